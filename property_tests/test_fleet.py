"""The fleet decides what the small world decides: the same faults make the same rounds, for the same reasons.

The small world plays every beat of every agent, and knows nothing of crews. In its calmest weather it has the delays
that the fleet is given here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import pytest
from attrs import define, field, frozen

from reknit.adapters.simulated import faults
from reknit.adapters.simulated import fleet as fleets
from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.fleet import Fleet
from reknit.adapters.simulated.hosts import Proc
from reknit.adapters.simulated.world import World
from reknit.core.agent.agent import Spec
from reknit.core.job.entries import Entry, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Closed, Job, Running
from reknit.core.job.reasons import NodeGone, NodesAdmitted, RoundEnd, WorkerFailed

from .conftest import PROFILE

KINDS = ("fail", "hang", "kill", "leave", "cut", "suspend", "outage")
LAST_S = 300.0


@frozen
class Fault:
    at: float
    kind: str
    node: int
    for_s: float
    """Until a node comes back, can be reached, or goes on, or until the store answers."""


def drawn(seed: int, count: int = 7) -> tuple[int, int, list[Fault]]:
    """Nodes, members of a round at most, and faults: some alone, some shortly after another.

    What is decided by who beats when is not asked, since the fleet gives beats another phase: which of two nodes that
    have fallen silent is noticed first, and who of several returns first after an outage.
    """
    luck = Random(seed)
    nodes = luck.randrange(5, 17)
    members = nodes - luck.randrange(0, 2)
    found, at, silent_at = list[Fault](), 60.0, 0.0
    for _ in range(count):
        kind = luck.choice(KINDS)
        is_alone = kind in ("kill", "cut", "suspend", "outage")
        gap_s = luck.choice((0.7, 90.1, 140.9))
        at = max(at + gap_s, silent_at + 90.0 if is_alone or kind_before(found) == "outage" else 0.0) + luck.random()
        found.append(Fault(at, kind, luck.randrange(nodes), luck.choice((6.1, 31.7, 77.1))))
        silent_at = at if is_alone else silent_at
    return nodes, members, found


def kind_before(found: Sequence[Fault]) -> str:
    return found[-1].kind if found else ""


def terms_of(members: int) -> Terms:
    policy = RestartPolicy(1000, steady_s=30.0)
    return Terms(max(1, members - 4), members, policy, settle_s=2.0, last_call_s=10.0, beat_s=5.0, silence_s=15.0)


Seen = tuple[int, tuple[str, ...], str]
"""A round, its members in rank order, and why the one before has ended."""


def why_text(why: RoundEnd | None) -> str:
    match why:
        case WorkerFailed(node):
            return f"{node} failed"
        case NodeGone(node, how):
            return f"{node} {how.value}"
        case NodesAdmitted(nodes):
            return f"{', '.join(map(str, nodes))} admitted"
        case _:
            return ""


@define(eq=False)
class Notes:
    """What a journal shows, by a watcher of either of the two."""

    rounds: list[Seen] = field(factory=list)
    times: list[float] = field(factory=list)
    ends: list[str] = field(factory=list)

    def job(self, at: float, before: Job, job: Job) -> None:
        if isinstance(job.phase, Running) and (not isinstance(before.phase, Running) or before.round != job.round):
            self.rounds.append((job.round, tuple(m.node.id for m in job.members), why_text(job.why)))
            self.times.append(at)
        if isinstance(job.phase, Closed) and not isinstance(before.phase, Closed):
            self.ends.append(str(job.phase.outcome.verdict))

    def landed(self, at: float, before: Job, entries: Sequence[Entry], job: Job) -> None:
        self.job(at, before, job)

    def stepped(self, *_: object) -> None: ...


def in_the_fleet(nodes: int, members: int, planned: Sequence[Fault], *, audits: float = 1.0, seed: int = 0) -> Notes:
    notes = Notes()
    speed = fleets.StoreSpeed(way_s=0.02, appends_per_s=1000.0)
    fleet = Fleet(terms_of(members), seed=seed, speed=speed, audits=audits, grace_s=7.0, watchers=[notes])
    names = [NodeId(f"n{i:02}") for i in range(nodes)]
    for number, name in enumerate(names):
        fleet.start([name], number * 0.3)
    for fault in planned:
        name = names[fault.node]
        fleet.after(fault.at, partial(_befall, fleet, fault, name))
    fleet.run_until(planned[-1].at + LAST_S)
    return notes


def _befall(fleet: Fleet, fault: Fault, name: NodeId) -> None:
    match fault.kind:
        case "fail":
            fleet.fail(name)
        case "hang":
            fleet.hang(name, 30.0)
        case "kill":
            if fleet.kill(name):
                fleet.start([name], fault.for_s)
        case "leave":
            if fleet.ask_to_leave(name):
                fleet.start([name], fault.for_s)
        case "cut":
            if fleet.cut(name):
                fleet.after(fault.for_s, partial(fleet.mend, name))
        case "suspend":
            if fleet.suspend(name):
                fleet.after(fault.for_s, partial(fleet.resume, name))
        case _:
            fleet.lose_store()
            fleet.after(fault.for_s, fleet.restore_store)


class _World(World):
    def __init__(self, notes: Notes) -> None:
        super().__init__(echo=False)
        self.notes = notes
        self.watchers.append(self)

    def landed(self, entry: Entry, before: Job) -> None:
        self.notes.job(self.now, before, self.jobs[-1])

    def stepped(self, *_: object) -> None: ...

    def founded(self, *_: object) -> None: ...


def in_the_world(nodes: int, members: int, planned: Sequence[Fault]) -> Notes:
    notes = Notes()
    world = _World(notes)

    def start(host: int) -> None:
        if world.proc_of(host) is None:
            spec = Spec(NodeId(f"n{host:02}"), f"n{host:02}.net", terms_of(members), grace_s=7.0, store_timeout_s=300.0)
            number = len(world.procs)
            world.begin(Proc(spec.node_id, host, spec, 0.0, number))

    for host in range(nodes):
        world.after(host * 0.3, partial(start, host))
    for fault in planned:
        world.after(fault.at, partial(_befall_in, world, fault, start))
    world.run_for(planned[-1].at + LAST_S)
    return notes


def _befall_in(world: World, fault: Fault, start: Callable[[int], None]) -> None:
    proc = world.proc_of(fault.node)
    if fault.kind == "outage":
        faults.begin_outage(world)
        world.after(fault.for_s, partial(faults.end_outage, world))
    if proc is None:
        return
    match fault.kind:
        case "fail":
            staff.fail(world, proc)
        case "hang":
            staff.fail(world, proc)
        case "kill":
            world.kill(proc)
            world.after(fault.for_s, partial(start, fault.node))
        case "leave":
            world.ask_to_leave(proc, 15)
            world.after(fault.for_s, partial(start, fault.node))
        case "cut":
            faults.cut(world, proc)
            world.after(fault.for_s, partial(faults.mend, proc))
        case "suspend":
            faults.suspend(proc)
            world.after(fault.for_s, partial(faults.resume, proc))


@pytest.mark.parametrize("seed", range({"quick": 6, "change": 30}.get(PROFILE, 200)))
def test_the_fleet_decides_what_the_small_world_decides(seed: int) -> None:
    """The same rounds with the same members, for the same reasons, and at the same times but for a few beats."""
    nodes, members, planned = drawn(seed)
    here, there = in_the_fleet(nodes, members, planned), in_the_world(nodes, members, planned)
    assert here.rounds == there.rounds
    assert here.ends == there.ends
