"""What an agent does now, for observers: one word, and one sentence. No decision depends on it. And its commands and
entries in a few words."""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from attrs import frozen

from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Append, Beat, Command, Finish, StopWorkers
from reknit.core.agent.events import (
    Counters,
    EntriesRead,
    Event,
    JournalFailed,
    RestartsLimited,
    Started,
    StopRequested,
    Woken,
)
from reknit.core.agent.states import WorkerState
from reknit.core.agent.worker_words import (
    PortReserved,
    ReservePort,
    StartWorkers,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.job.entries import Entry
from reknit.core.job.job import Running, coming

from .describe import how_text, reason_text, signal_name


class Doing(Enum):
    """What an agent does. It does exactly one of these at a time."""

    STARTING = "starting"
    """It has not found its place in the job: its keeper gets ready, or it reads the journal."""
    GATHERING = "gathering"
    """It waits until the next round can begin."""
    STANDBY = "standby"
    """A round runs without this node, which waits for a place."""
    LAUNCHING = "launching"
    """It starts this node's workers."""
    RUNNING = "running"
    """This node's workers run."""
    STOPPING = "stopping"
    """It ends this node's workers."""
    FINISHING = "finishing"
    """This node has no more work, and waits for the other nodes or says goodbye."""
    ENDED = "ended"
    """The agent has its result."""


@frozen
class Situation:
    """What an agent does, in the least that tells its story."""

    doing: Doing
    round: int
    """The round that it is about: that of this node's workers while there are any, else the job's."""
    outage: str = ""
    """Why the store cannot be used. Empty: it can."""
    unable: str = ""
    """Why the agent cannot take part in the job. Empty: it can, or is not asked to any more."""
    epoch: int = 0
    """The epoch that the round belongs to."""


def situation(agent: Agent) -> Situation:
    now, why = doing(agent), agent.causes.unable
    own = agent.workers if now in _WITH_WORKERS else agent.job
    told = "" if why is None else reason_text(why)
    return Situation(now, own.round, agent.contact.outage or "", told, own.epoch)


def doing(agent: Agent) -> Doing:
    """What the agent does now."""
    workers, job = agent.workers, agent.job
    if agent.result is not None:
        return Doing.ENDED
    if workers.alive:
        if workers.stopping is not None:
            return Doing.STOPPING
        return Doing.RUNNING if workers.up_at is not None else Doing.LAUNCHING
    if not agent.is_working:
        return Doing.FINISHING
    if agent.epoch is None:
        return Doing.STARTING
    if isinstance(job.phase, Running):
        if agent.me not in job.member_nodes:
            return Doing.STANDBY
        if workers.state is WorkerState.SUCCEEDED and workers.round == job.round:
            return Doing.FINISHING
    return Doing.GATHERING


_WITH_WORKERS = (Doing.LAUNCHING, Doing.RUNNING, Doing.STOPPING)


def takes_part(agent: Agent) -> bool:
    """The other nodes count on this node: it has joined the job, and does not leave it. Its workers run, or it waits
    for a round."""
    return agent.job.is_live(agent.me) and agent.is_working


def doing_text(agent: Agent) -> str:
    """`runs the workers of round 2, ranks 0 to 3 of 8`"""
    text = _text(agent, doing(agent))
    outage = agent.contact.outage
    return f"{text}; the store cannot be reached: {outage}" if outage and agent.result is None else text


def _text(agent: Agent, what: Doing) -> str:
    workers, job = agent.workers, agent.job
    match what:
        case Doing.STARTING:
            return "reads the journal" if agent.nonce else "waits for its keeper"
        case Doing.GATHERING:
            return f"waits for round {job.round}: {coming(job)} of at least {job.terms.min_nodes} nodes are there"
        case Doing.STANDBY:
            return f"stands by while round {job.round} runs"
        case Doing.LAUNCHING:
            return f"starts the workers of round {workers.round}"
        case Doing.RUNNING:
            return f"runs the workers of round {workers.round}{_ranks(agent)}"
        case Doing.STOPPING:
            why = "" if workers.stopping is None else f": {reason_text(workers.stopping)}"
            return f"stops the workers of round {workers.round}{why}"
        case Doing.FINISHING:
            return "has no more work here, and waits for the other nodes or says goodbye"
        case Doing.ENDED:
            return "has ended" if agent.result is None else f"has ended: {reason_text(agent.result.why)}"


def _ranks(agent: Agent) -> str:
    made = agent.workers.assignment
    if made is None or not made.workers:
        return ""
    ranks = [worker.rank for worker in made.workers]
    span = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f", {span} of {made.world_size}"


def event_text(event: Event) -> str:  # a dispatcher: one arm per event
    """An event in a few words, for the lines of `-v`. Nothing that a decision depends on is left out, except for the
    texts of failures."""
    match event:
        case Started(_, nonce, port):
            return f"the keeper is ready (agent {nonce}, port {port or 'none'})"
        case EntriesRead(_, entries, base, _, is_anew):
            start = "the journal from its beginning" if is_anew else "" if base is None else "the job as it is now"
            return f"read {'; '.join([start] * bool(start) + [entry_text(e) for e in entries]) or 'nothing new'}"
        case Counters(_, counts):
            return f"counters {', '.join(f'{node} {count}' for node, count in counts.items()) or 'of nobody'}"
        case JournalFailed(_, why, refusal, answers):
            kind = "refused" if refusal is not None else "not usable yet" if answers else "not reached"
            return f"the store is {kind}: {why}"
        case StopRequested():
            return f"asked to stop: {signal_name(event.signal)}"
        case RestartsLimited(_, left):
            return f"this node bears {left} further restarts"
        case Woken():
            return "woken"
        case WorkersStarted(_, round, assignment):
            return f"the workers of round {round} run" + (", with other ranks" if assignment is not None else "")
        case WorkersExited(_, round, exits):
            how = {e.local_rank: "exit code 0" if e.failure is None else how_text(e.failure) for e in exits}
            told = ", ".join(f"local rank {local_rank}: {text}" for local_rank, text in how.items())
            return f"workers of round {round} ended: {told}"
        case WorkersStopped(_, round, port, stuck):
            except_for = f", except for {', '.join(map(str, stuck))}" if stuck else ""
            return f"no process of round {round} is left{except_for} (port {port or 'none'})"
        case PortReserved(_, port):
            return f"port {port or 'none'} is reserved"
        case _:
            assert_never(event)


def command_text(command: Command) -> str:
    """A command in a few words, for the lines of `-v`."""
    match command:
        case Append(entry):
            return f"say {entry_text(entry)}"
        case StartWorkers(round, assignment):
            ranks = [w.rank for w in assignment.workers]
            return f"start workers of round {round}, ranks {ranks[0]}..{ranks[-1]} of {assignment.world_size}"
        case StopWorkers(round, signal, grace_s, why, _, await_exits_s):
            wait = f"{await_exits_s:g} s for exits, " if await_exits_s else ""
            return f"stop workers of round {round}: {wait}{signal_name(signal)}, {grace_s:g} s, {reason_text(why)}"
        case ReservePort():
            return "reserve another port"
        case Beat(_, _, watch):
            return f"beat, watch {', '.join(map(str, watch)) or 'nobody'}"
        case Finish(result):
            return f"finish: {result.state.value}, {reason_text(result.why)}"
        case _:
            assert_never(command)


def entry_text(entry: Entry) -> str:
    """`Joined node=n1 round=2`"""
    words = [type(entry).__name__]
    for name in ("node", "by", "round", "epoch", "why"):
        value = getattr(entry, name, None)
        if value is not None:
            words.append(f"{name}={value}")
    return " ".join(words)
