"""step(agent, event) -> Step(agent, commands): one node's whole judgement.

    observe   take the event into the state: fold entries, note exits, silences, requests
    drive     compare what should be with what is: stop or start workers, say what is owed, beat, finish

1. Pure and total: the same agent and event make the same step, on every machine, and nothing raises.
2. `observe` issues no commands and `drive` does not look at the event, so it does not matter how a state was reached:
   what is wanted is derived anew at every step, and what got lost on the way is still wanted. There is one exception:
   whom to call lost is known in the step of a read of the counters only.
3. A batch of entries is folded whole, then decided on once: no round that is over already is ever started.
4. A step may issue several commands, but starts or stops workers at most once.
"""

from __future__ import annotations

from typing import assert_never

from attrs import evolve, frozen

from reknit.core.job.entries import Lost, Node
from reknit.core.job.reasons import BudgetSpent, Refusal

from .agent import Agent, StopRequest, Timer
from .commands import SIGKILL, SIGTERM, Command
from .deadlines import after_sleep, is_due, is_out, next_wake, run_timers
from .ending import drive_end
from .events import (
    Counters,
    EntriesRead,
    Event,
    JournalFailed,
    RestartsLimited,
    Started,
    StopRequested,
    Woken,
)
from .identity import after_private_loss, read
from .reasons import JournalRefused, SignalReceived, StoreLost
from .situation import situation_of
from .states import WorkerState
from .wanted import drive_sayings
from .watching import accusations, drive_beats, heard, noticed_gap, repetitions
from .workers import PortReserved, WorkersExited, WorkersStarted, WorkersStopped
from .working import drive_workers, exited, is_held, reserved, started, stopped, why_failed

UNSAID = "this node gets no answers, or its entries do not appear in the journal"
"""Why an agent ends for want of the store if no call has failed."""
REPEAT_S = 0.5
"""The same signal again within this many seconds is the same request: schedulers signal an agent and its parent."""
HURRY_S = 5.0
"""Seconds that a second request leaves of the grace. A third leaves nothing."""


@frozen
class Step:
    """What one step has made."""

    agent: Agent
    """The agent after the event."""
    commands: tuple[Command, ...] = ()
    """What the agent wants done, in this order."""


def step(agent: Agent, event: Event) -> Step:
    """The agent after `event`, and what it wants done."""
    if agent.result is not None:
        return Step(agent)
    # The order matters. What the workers do decides which timers run. The timers decide what is said. The end comes
    # last.
    agent = _observed(noticed_gap(_at(agent, event.at)), event)
    agent = after_private_loss(_out_of_restarts(_out_of_patience(agent)))
    agent, commands = drive_workers(agent)
    agent = run_timers(agent)
    now = situation_of(agent)
    agent, sayings = drive_sayings(agent, now, _accusations(agent, event))
    agent, beats = drive_beats(agent)
    agent, end = drive_end(agent, now)
    wakes_at = next_wake(agent, now.deadlines.values())
    if wakes_at != agent.wakes_at:
        agent = evolve(agent, wakes_at=wakes_at)
    return Step(agent, (*commands, *sayings, *beats, *end))


def _at(agent: Agent, at: float) -> Agent:
    # The adapters' clock is monotonic. Events from two adapters may still overtake each other by a little.
    return after_sleep(agent, at) if at > agent.at else agent


def _observed(agent: Agent, event: Event) -> Agent:  # a dispatcher: one arm per event
    match event:
        case Started():
            me = Node(agent.spec.node_id)
            return evolve(agent, nonce=event.nonce, port=event.port, me=me)
        case EntriesRead():
            return read(agent, event)
        case Counters():
            return heard(agent, event)
        case JournalFailed():
            return _journal_failed(agent, event)
        case WorkersStarted():
            return started(agent, event)
        case WorkersExited():
            return exited(agent, event)
        case WorkersStopped():
            return stopped(agent, event)
        case PortReserved():
            return reserved(agent, event)
        case StopRequested():
            return _asked_to_stop(agent, event)
        case RestartsLimited():
            return evolve(agent, max_restarts=agent.restart_count + max(0, event.left))
        case Woken():
            return agent
        case _:
            assert_never(event)


def _journal_failed(agent: Agent, event: JournalFailed) -> Agent:
    # A job that has ended needs no journal. But workers of an agent that was left behind have no grace: the others may
    # not know of the end, and start the next round (rule 16 of the protocol).
    has_to_act = agent.outcome is None or (event.refusal is Refusal.LEFT_BEHIND and agent.workers.alive)
    if event.refusal is not None and has_to_act:
        return evolve(agent, end=JournalRefused(event.refusal, event.why))
    return evolve(agent, outage=event.why, store_answers=event.answers)


def _out_of_patience(agent: Agent) -> Agent:
    """An outage that has lasted too long ends this agent. The job may go on: other nodes may reach the journal."""
    if agent.end is not None or agent.outcome is not None or not is_due(agent, Timer.OUTAGE):
        return agent
    if not is_out(agent):
        return agent  # the store is back in the step in which the patience is over
    return evolve(agent, end=StoreLost(agent.outage or UNSAID, agent.store_answers))


def _out_of_restarts(agent: Agent) -> Agent:
    """This node's workers have failed, and it bears no further failure, though the job may. So the node leaves."""
    workers, limit = agent.workers, agent.max_restarts
    if limit is None or not workers.alive or workers.state is not WorkerState.FAILED or is_held(agent):
        return agent
    if agent.restarts_left or agent.is_departing or agent.end is not None:
        return agent
    if agent.job.terms.restarts.max_restarts <= limit:
        return agent  # this is the job's own limit: its failures may be excused (rule 2 of the protocol)
    why = BudgetSpent(limit, why_failed(workers))
    return evolve(agent, leaving=StopRequest(why, SIGTERM, SIGTERM, agent.at, 1, agent.at + agent.spec.grace_s))


def _asked_to_stop(agent: Agent, event: StopRequested) -> Agent:
    """Each further request shortens the grace. None makes it longer. SIGKILL stands for no grace at all."""
    before = agent.leaving
    if before is None:
        grace_s = 0.0 if event.signal == SIGKILL else agent.spec.grace_s
        why, is_late = SignalReceived(event.signal), agent.outcome is not None
        request = StopRequest(why, event.signal, event.signal, agent.at, 1, agent.at + grace_s, is_late)
    elif event.signal == before.latest and agent.at - before.at < REPEAT_S:
        return agent
    else:
        left_s = HURRY_S if before.count == 1 and event.signal != SIGKILL else 0.0
        kill_at = min(before.kill_at, agent.at + left_s)
        request = evolve(before, latest=event.signal, at=agent.at, count=before.count + 1, kill_at=kill_at)
    return evolve(agent, leaving=request)


def _accusations(agent: Agent, event: Event) -> tuple[Lost, ...]:
    is_read = isinstance(event, Counters)
    is_fresh_read = is_read and agent.pulse.acked_at == agent.at
    if is_fresh_read:
        return tuple(accusations(agent))
    return tuple(repetitions(agent)) if is_read else ()
