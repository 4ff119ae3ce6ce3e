"""Alike agents: they differ in what is their own, and in nothing that decides. One of them can step for all.

Agents are *alike* if they have folded the same job, stand in it alike (`standing`), and are equal in all fields but
those of `OWN` and `PULSE`. What one of them decides, the others decide as well, each in its own name:

    step(as_other(agent, own), event_as_other(…))  is  as_other(step(agent, event))       for each alike agent

1. `as_other` is the agent that another alike one is. It and its companions rename a value from one agent to another:
   events, entries and commands.
2. An agent may be in a state that cannot be renamed, and then it is like no other (`can_share`).
3. The pulse is the moment of the last beat, and what was heard then. Who lets one agent step for others forgets the
   differences between their pulses. So this holds only for agents that are quiet (`quiet`).
4. Some of what an agent has noted decides nothing any more (`without_past`). Alike agents may differ in it. Otherwise
   there would be one more kind of agents with each failure.

A simulator needs this: a job of a thousand nodes has a dozen kinds of agents (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from itertools import islice
from math import inf
from operator import attrgetter

from attrs import evolve, fields, frozen

from reknit.core.job.entries import Entry, Failed, Joined, Leaving, Left, Lost, Node, NodeId, Opened, Succeeded
from reknit.core.job.job import EMPTY, Closed, Gathering, Job, Running
from reknit.core.job.ranks import assign
from reknit.core.job.reasons import WorkerFailed
from reknit.core.job.workers import Assignment, WorkerFailure

from .agent import Agent, Done, NodeWorkers, Spec
from .commands import Append, Beat, Command, Finish, Result, StopWorkers
from .events import Counters, Event, Started
from .timers import STAGGERED
from .worker_words import PortReserved, StartWorkers, WorkerExit, WorkersExited, WorkersStopped
from .workers import have_lasted, why_failed

OWN = frozenset({"spec", "nonce", "me", "port", "offered", "workers", "lifecycle", "said", "unread"})
"""The fields of `Agent` that hold something of its own. `as_other` renames it."""
PULSE = frozenset({"at", "contact", "silence"})
"""The fields of `Agent` that a beat changes."""


@frozen
class Own:
    """What an agent has of its own."""

    spec: Spec
    me: Node
    nonce: str
    port: int | None
    """None while its workers use the port."""


def own_of(agent: Agent) -> Own:
    return Own(agent.spec, agent.me, agent.nonce, agent.port)


# ---- who is like whom ------------------------------------------------------------------------------------------------


def can_share(agent: Agent) -> bool:
    """Whether `as_other` can rename this agent. It cannot if the agent hosts the journal, accuses a node, or had its
    workers in a round that the job does not show any more, or as another incarnation."""
    workers, job = agent.workers, agent.job
    if agent.spec.hosts_journal or any(isinstance(entry, Lost) for entry in (*agent.said, *agent.unread)):
        return False
    if workers.node is None:
        return workers.assignment is None and not workers.exits
    last = job.round - isinstance(job.phase, Gathering)
    return (workers.node, workers.epoch, workers.round) == (agent.me, job.epoch, last) and agent.me in job.member_nodes


def are_alike(a: Agent, b: Agent, now: float) -> bool:
    """Whether one of the two can step for the other from now on, apart from their pulses."""
    if a.job is not b.job and a.job != b.job:
        return False
    if not (can_share(a) and can_share(b)) or standing(a.job, a.me) != standing(b.job, b.me):
        return False
    mine, other = a.spec, b.spec
    if evolve(mine, node_id=other.node_id, address=other.address, rank_hint=other.rank_hint) != other:
        return False
    if (a.port is None) != (b.port is None):
        return False
    return but_pulse(without_past(as_other(a, own_of(b)), now)) == but_pulse(without_past(b, now))


def without_past(agent: Agent, now: float) -> Agent:
    """The agent without two things that decide nothing any more: when its workers came up, if they have lasted since
    then, and for which round it has offered its port, if that cannot be joined any more."""
    offered, workers, job = agent.offered, agent.workers, agent.job
    can_join = not isinstance(job.phase, Closed)
    if offered is not None and not (can_join and offered[1] >= job.round + isinstance(job.phase, Running)):
        agent = evolve(agent, offered=(offered[0], -1))
    if have_lasted(workers, now):
        agent = evolve(agent, workers=evolve(workers, up_at=-inf))
    return agent


but_pulse = attrgetter(*(f.name for f in fields(Agent) if f.name not in PULSE))
"""All fields of an agent but those of `PULSE`, as a tuple. Python compares two tuples faster than two agents: it skips
an object that stands in both, such as the job of a thousand nodes."""


def standing(job: Job, node: Node) -> tuple[object, ...]:
    """All that the fold says of one node and that a decision of its agent may depend on."""
    if not job.is_live(node):
        return job.is_gone(node), job.highest_incarnation(node.id)
    is_expected, failures = False, 0
    if isinstance(job.phase, Gathering):
        is_expected, told = node in job.phase.expected, job.phase.told.get(node)
        failures = 0 if told is None else len(told.failures)
    place = next((i for i, first in enumerate(islice(job.live, STAGGERED)) if first == node.id), STAGGERED)
    return node in job.member_nodes, is_expected, failures, node in job.succeeded, node in job.leaving, place


def by_standing(job: Job, nodes: Set[Node]) -> list[Set[Node]]:
    """These nodes in groups that stand alike (`standing`). Thousands of nodes differ only in whether they are members,
    whether they are expected, and how many failures they have told. The few others are asked for one by one."""
    phase, live = job.phase, job.live
    asked = {node for node in nodes if (joined := live.get(node.id)) is None or joined.node is not node}
    asked.update(joined.node for joined in islice(live.values(), STAGGERED) if joined.node in nodes)
    asked |= (job.succeeded | job.leaving) & nodes
    expected, told = (phase.expected, phase.told) if isinstance(phase, Gathering) else (frozenset[Node](), {})
    by_count: dict[int, set[Node]] = {0: {*nodes} - asked - told.keys()}
    for node in (nodes & told.keys()) - asked:
        by_count.setdefault(len(told[node].failures), set()).add(node)
    found: dict[tuple[object, ...], Set[Node]] = {}
    for some in by_count.values():
        for members in apart(some, frozenset(job.members.group_ranks)):
            for group in apart(members, expected):
                found[standing(job, next(iter(group)))] = group
    for node in asked:
        stands = standing(job, node)
        found[stands] = found.get(stands, frozenset()) | {node}
    return [*found.values()]


def apart(nodes: Set[Node], some: frozenset[Node]) -> list[Set[Node]]:
    """Those of `nodes` that are in `some`, and those that are not. A group without a node is left out."""
    return [group for group in (nodes & some, nodes - some) if group]


# ---- renaming --------------------------------------------------------------------------------------------------------


def as_other(agent: Agent, own: Own) -> Agent:
    """The agent that this alike one is. It has the pulse of `agent`."""
    if own.me == agent.me and own.nonce == agent.nonce:
        return agent
    offered = agent.offered
    other = evolve(
        agent,
        spec=own.spec,
        nonce=own.nonce,
        me=own.me,
        port=None if agent.port is None else own.port,
        offered=None if offered is None else (_before(offered[0], agent, own), offered[1]),
        workers=_workers(agent, own),
    )
    if agent.said or agent.unread:
        other = evolve(other, said=_entries(agent.said, agent, own), unread=_entries(agent.unread, agent, own))
    if isinstance(agent.lifecycle, Done):
        result = _result(agent.lifecycle.result, agent, own)
        other = evolve(other, lifecycle=evolve(agent.lifecycle, result=result))
    return other


def _before(node: Node, agent: Agent, own: Own) -> Node:
    """The incarnation of the other agent that was what `node` was of this one."""
    return Node(own.me.id, own.me.incarnation + node.incarnation - agent.me.incarnation)


def _seen(seen: int, agent: Agent, own: Own) -> int:
    """The incarnation of its own id that the other agent has seen in the journal. -1: none."""
    return seen if seen < 0 else own.me.incarnation + seen - agent.me.incarnation


def entry_as_other(entry: Entry, agent: Agent, own: Own) -> Entry:
    """What the other alike agent says where `agent` says this entry."""
    match entry:
        case Joined() if entry.node == agent.me:
            return _joined_as(entry, agent)(own)
        case Failed() if entry.node == agent.me:
            first = _first_rank(agent, own)
            return Failed(own.me, entry.round, tuple(_failure(failure, first) for failure in entry.failures))
        case Left() if entry.node == agent.me:
            return evolve(entry, node=own.me, seen=_seen(entry.seen, agent, own))
        case Succeeded() | Leaving() if entry.node == agent.me:
            return evolve(entry, node=own.me)
        case Opened() if entry.journal == agent.speaker:
            return evolve(entry, journal=f"{own.nonce}.{agent.births}" if agent.births else own.nonce)
        case _:
            return entry


def entry_as_others(entry: Entry, agent: Agent, owns: Mapping[NodeId, Own]) -> list[tuple[NodeId, Entry]]:
    """What each of these alike agents says where `agent` says this entry."""
    if isinstance(entry, Joined) and entry.node == agent.me:  # thousands of nodes join together
        joined = _joined_as(entry, agent)
        return [(node_id, joined(own)) for node_id, own in owns.items()]
    return [(node_id, entry_as_other(entry, agent, own)) for node_id, own in owns.items()]


def _joined_as(entry: Joined, agent: Agent) -> Callable[[Own], Joined]:
    round, role, width, port, seen = entry.round, entry.role, entry.local_world_size, entry.port, entry.seen
    life = f".{agent.births}" if agent.births else ""
    before = seen - agent.me.incarnation

    def joined(own: Own) -> Joined:
        spec, me = own.spec, own.me
        own_port = port if own.port is None else own.port
        own_seen = seen if seen < 0 else me.incarnation + before
        return Joined(me, own.nonce + life, round, spec.address, own_port, role, width, spec.rank_hint, own_seen)

    return joined


def event_as_other(event: Event, agent: Agent, own: Own) -> Event:
    """The event that means for the other alike agent what this one means for `agent`. `agent`: before the event."""
    match event:
        case Started():
            return evolve(event, nonce=own.nonce, port=event.port if own.port is None else own.port)
        case WorkersExited():
            return evolve(event, exits=tuple(_exit(exit, agent, own) for exit in event.exits))
        case Counters():
            return evolve(event, counts={own.me: event.counts.get(agent.me, 0)})
        case WorkersStopped() | PortReserved():
            return event if own.port is None else evolve(event, port=own.port)
        case _:
            return event


def command_as_other(command: Command, agent: Agent, own: Own) -> Command:
    """What the other alike agent wants done. `agent`: after the step. A `Beat` has the watch of `agent`."""
    match command:
        case Append(entry):
            return Append(entry_as_other(entry, agent, own))
        case StartWorkers(round, assignment):
            return StartWorkers(round, _assignment(assignment, agent, own))
        case StopWorkers():
            return evolve(command, why=as_other(agent, own).workers.stopping or command.why)
        case Beat():
            return evolve(command, node=own.me)
        case Finish(result):
            return Finish(_result(result, agent, own))
        case _:
            return command


def _entries(said: Mapping[Entry, float], agent: Agent, own: Own) -> Mapping[Entry, float]:
    return {entry_as_other(entry, agent, own): at for entry, at in said.items()} if said else EMPTY


def _workers(agent: Agent, own: Own) -> NodeWorkers:
    workers = agent.workers
    if workers.node is None:
        return workers
    assignment = None if workers.assignment is None else _assignment(workers.assignment, agent, own)
    workers = evolve(workers, node=own.me, assignment=assignment)
    if workers.exits:
        workers = evolve(workers, exits={i: _exit(exit, agent, own) for i, exit in workers.exits.items()})
    if isinstance(workers.stopping, WorkerFailed) and workers.stopping.node == agent.me:
        workers = evolve(workers, stopping=why_failed(workers))
    return workers


def _exit(exit: WorkerExit, agent: Agent, own: Own) -> WorkerExit:
    return exit if exit.failure is None else evolve(exit, failure=_failure(exit.failure, _first_rank(agent, own)))


def _assignment(assignment: Assignment, agent: Agent, own: Own) -> Assignment:
    return assign(
        agent.job.members,
        own.me,
        round=assignment.round,
        restart_count=assignment.restart_count,
        max_restarts=assignment.max_restarts,
    )


def _first_rank(agent: Agent, own: Own) -> int:
    """The rank of the other agent's worker with local rank 0."""
    members = agent.job.members
    firsts, _ = members.counted
    return firsts[members.group_ranks[own.me]][0]


def _failure(failure: WorkerFailure, first: int) -> WorkerFailure:
    """The failure of the worker with the same local rank, on the node whose ranks begin with `first`."""
    return WorkerFailure(  # thousands of workers hang together, and `evolve` takes five times as long
        failure.local_rank,
        first + failure.local_rank,
        failure.exitcode,
        failure.pid,
        failure.message,
        failure.traceback,
        failure.stderr,
        failure.log,
        failure.cause,
    )


def _result(result: Result, agent: Agent, own: Own) -> Result:
    if not result.return_values or agent.workers.assignment is None:
        return result
    ranks = _assignment(agent.workers.assignment, agent, own).workers
    return evolve(result, return_values={w.rank: None for w in ranks})
