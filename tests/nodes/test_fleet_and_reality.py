"""The fleet against reality: in the same schedule, simulated agents decide what real agents on loopback decide.

A schedule is played twice, step by step. Each step waits for what it says, in the journal or at the workers. So both
plays go on at the same point of the job, however fast their clocks are. One function, `decisions`, makes the list that
is compared of either journal.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from attrs import frozen

from reknit.adapters.simulated.fleet import Fleet
from reknit.app.cli.arguments import parse
from reknit.app.cli.parsing import asked
from reknit.app.report import exit_status
from reknit.core.agent.worker_words import WorkerExit, WorkersExited
from reknit.core.job.entries import Entry, Joined, Lost, NodeId, Succeeded, Terms
from reknit.core.job.fold import fold
from reknit.core.job.job import Closed, Job, Running
from reknit.core.job.reasons import BudgetSpent, JobEnd, NodeGone, NodesAdmitted, RoundEnd, WorkerFailed
from tests.support.etcd import Etcd
from tests.support.nodes import BAD, GOOD, NodeRun, Nodes, Up, at_etcd, at_file
from tests.support.stores import hosted
from tests.support.waiting import until


def decisions(entries: Sequence[Entry]) -> list[str]:
    """What these entries of a journal have decided: each round with its members in rank order, why the one before has
    ended, and what that has cost so far. Then the end of the job."""
    job, found = Job(), list[str]()
    for entry in entries:
        before, job = job, fold(job, entry)
        if isinstance(job.phase, Running) and (not isinstance(before.phase, Running) or before.round != job.round):
            members = " ".join(str(member.node) for member in job.members)
            cost = f"{job.spent} restarts, {job.unspent} unspent"
            found.append(f"round {job.round} of {members}: {why_text(job.why)}; {cost}")
        if isinstance(job.phase, Closed) and not isinstance(before.phase, Closed):
            found.append(f"{job.phase.outcome.verdict.value}: {why_text(job.phase.outcome.why)}")
    return found


def why_text(why: RoundEnd | JobEnd | None) -> str:
    """The reason and what it names. Who has noticed is left out: that depends on whose beat comes first."""
    match why:
        case WorkerFailed(node, failure):
            return f"rank {failure.rank} of {node} failed with {failure.exitcode}"
        case NodeGone(node, how):
            return f"{node} {how.value}"
        case NodesAdmitted(nodes):
            return f"admitted {' '.join(map(str, nodes))}"
        case BudgetSpent(most, root):
            return f"{why_text(root)}, {most} restarts spent"
        case _:
            return "the first" if why is None else type(why).__name__


@frozen
class Schedule:
    """What happens to a job."""

    name: str
    place: str
    """Where the real nodes meet."""
    options: str
    """Of `reknit run`. The terms of the fleet are made of them as well."""
    steps: str
    """Each is a method of `Reality` and of `Simulated`, and its arguments. The nodes of `round` are in any order."""
    last_call_s: int = 30
    """0: the first round does not wait for more nodes than it needs."""
    heartbeat_s: int = 60
    """Short where a node falls silent. Else long: a gap in a node's beats may be followed by a new incarnation, so the
    decisions would depend on how long an outage is, and how busy this machine."""


SCHEDULES = [
    Schedule(
        *("a worker fails", "c10d", "--nnodes=3 --max-restarts=1"),
        "join a, join b, join c, round a b c, fail b, round a b c, succeed c, succeed a, succeed b",
    ),
    Schedule(
        *("a node is killed, and comes back", "file", "--nnodes=2:3"),
        "join a, join b, join c, round a b c, kill a, round b c, join a, round a b c, fail c",
        heartbeat_s=3,
    ),
    Schedule(
        *("new nodes join", "file", "--nnodes=1:3"),
        "join b, round b, join c, round b c, join a, round a b c, succeed a, succeed b, succeed c",
        last_call_s=0,
    ),
    Schedule(
        *("nodes leave in order", "file", "--nnodes=1:3"),
        "join a, join b, join c, round a b c, leave b, round a c, leave a, round c, succeed c",
    ),
    Schedule(
        *("a node is suspended", "file", "--nnodes=1:2"),
        "join a, join b, round a b, suspend b, round a, resume b, round a b, succeed a, succeed b",
        heartbeat_s=3,
    ),
    Schedule(
        *("an outage, and a failure after it", "etcd", "--nnodes=2 --max-restarts=1"),
        "join a, join b, round a b, outage, restore, fail b, round a b, succeed a, succeed b",
    ),
    Schedule(
        *("a failure in an outage", "etcd", "--nnodes=2 --max-restarts=1"),
        "join a, join b, round a b, outage, fail a, restore, round a b, fail b",
    ),
    Schedule(
        *("a failure, a kill, a replacement", "file", "--nnodes=2:3 --max-restarts=1"),
        "join a, join b, join c, round a b c, fail a, round a b c, kill b, round a c, join d, round a c d, fail d",
        heartbeat_s=3,
    ),
    Schedule(
        *("a failure that is an echo", "file", "--nnodes=1:2 --max-restarts=0"),
        "join a, join b, round a b, kill b, fail a, lost b, round a, succeed a",
        heartbeat_s=3,
    ),
    Schedule(
        *("standbys take over", "file", "--nnodes=2 --max-restarts=0"),
        "join a, join b, round a b, join c, join d, kill a, round b c, leave c, round b d, succeed b, succeed d",
        heartbeat_s=3,
    ),
    Schedule(
        *("a standby is admitted at a failure", "file", "--nnodes=1:2 --max-restarts=1 --admission=at-failure"),
        "join a, round a, join b, fail a, round a b, succeed b, succeed a",
        last_call_s=0,
    ),
]


class Stage(ABC):
    """Where a schedule is played."""

    def play(self, schedule: Schedule) -> None:
        for step in schedule.steps.split(","):
            verb, *names = step.split()
            getattr(self, verb)(*names)

    def join(self, name: str) -> None:
        """A new agent starts. Wait until it says so in the journal."""
        self._said(Joined, name, self._start)

    def succeed(self, name: str) -> None:
        """The worker of this node exits with 0. Wait until its agent says so."""
        self._said(Succeeded, name, self._let_succeed)

    def lost(self, name: str) -> None:
        """Wait until the others have declared this node lost."""
        self._until(lambda: self._count(Lost, name) > 0, f"{name} to be lost")

    def _said(self, kind: type[Joined | Succeeded], name: str, act: Callable[[str], None]) -> None:
        count = self._count(kind, name)
        act(name)
        self._until(lambda: self._count(kind, name) > count, f"{kind.__name__} of {name}")

    def _count(self, kind: type[Joined | Succeeded | Lost], name: str) -> int:
        return sum(isinstance(entry, kind) and entry.node.id == name for entry in self.entries())

    @abstractmethod
    def entries(self) -> Sequence[Entry]:
        """The journal."""

    @abstractmethod
    def statuses(self) -> dict[str, int]:
        """Wait until all agents have ended. Returns the exit statuses of those that were not killed."""

    @abstractmethod
    def _start(self, name: str) -> None: ...
    @abstractmethod
    def _let_succeed(self, name: str) -> None: ...
    @abstractmethod
    def _until(self, condition: Callable[[], bool], what: str) -> None: ...


class Reality(Stage):
    """Real agents, each with a keeper and a worker, and a real store."""

    def __init__(self, nodes: Nodes, server: Etcd | None) -> None:
        self.nodes, self.server = nodes, server
        self.runs: dict[str, NodeRun] = {}
        """Those that were not killed."""
        self.ups: list[Up] | None = None

    def entries(self) -> Sequence[Entry]:
        return self.nodes.entries() if self.nodes.runs else ()

    def statuses(self) -> dict[str, int]:
        return {name: run.end() for name, run in self.runs.items()}

    def round(self, *names: str) -> None:
        """Wait until the workers of these nodes run in a round that is later than the last one."""
        self.ups = self.nodes.formed(*(self.runs[name] for name in names), after=self.ups)

    def fail(self, name: str) -> None:
        run, told = self.runs[name], f"on node {name} failed: exit code 1"
        times = run.texts[1].count(told) + 1
        run.tell(BAD)
        run.says(told, times)

    def kill(self, name: str) -> None:
        self.runs.pop(name).vanish()

    def leave(self, name: str) -> None:
        self.runs[name].signal(signal.SIGTERM)

    def suspend(self, name: str) -> None:
        for pid in (self.runs[name].keeper, self.runs[name].pid):
            os.kill(pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.runs[name].thaw()

    def outage(self) -> None:
        """The store answers nobody. Wait until every agent has noticed."""
        assert self.server is not None
        self.server.kill()
        for run in self.runs.values():
            run.says("the store cannot be reached, workers keep running")

    def restore(self) -> None:
        """The store answers again. Wait until every agent has noticed."""
        assert self.server is not None
        self.server.start()
        for run in self.runs.values():
            run.says("the store can be reached again")

    def _start(self, name: str) -> None:
        (self.runs[name],) = self.nodes.start(name)
        self.runs[name].says("joins job")

    def _let_succeed(self, name: str) -> None:
        self.runs[name].tell(GOOD)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, what)


class Simulated(Stage):
    """A fleet. Its verbs wait for what those of `Reality` wait for."""

    def __init__(self, terms: Terms) -> None:
        self.fleet = Fleet(terms, audits=1.0, watchers=[self])
        self.journal: list[Entry] = []
        self.last_round = -1

    def landed(self, at: float, before: Job, entries: Sequence[Entry], job: Job) -> None:
        self.journal += entries

    def stepped(self, *_: object) -> None: ...

    def entries(self) -> Sequence[Entry]:
        return self.journal

    def statuses(self) -> dict[str, int]:
        self._until(lambda: self.fleet.is_over, "the end of all agents")
        return {str(node): exit_status(result) for node, result in self.fleet.results.items()}

    def round(self, *names: str) -> None:
        def is_up() -> bool:
            job = self.fleet.job
            is_later = isinstance(job.phase, Running) and job.round > self.last_round
            if not is_later or {member.node.id for member in job.members} != set(names):
                return False
            workers = [self.fleet.of[NodeId(name)].agent.workers for name in names]
            return all(some.round == job.round and some.up_at is not None for some in workers)

        self._until(is_up, f"a round of {names}")
        self.last_round = self.fleet.job.round

    def fail(self, name: str) -> None:
        assert self.fleet.fail(NodeId(name))

    def kill(self, name: str) -> None:
        assert self.fleet.kill(NodeId(name))

    def leave(self, name: str) -> None:
        assert self.fleet.ask_to_leave(NodeId(name), signal.SIGTERM)

    def suspend(self, name: str) -> None:
        assert self.fleet.suspend(NodeId(name))

    def resume(self, name: str) -> None:
        self.fleet.resume(NodeId(name))

    def outage(self) -> None:
        self.fleet.lose_store()
        self._until(lambda: all(crew.agent.contact.outage for crew in self.fleet.crews), "an outage for all")

    def restore(self) -> None:
        self.fleet.restore_store()
        self._until(lambda: not any(crew.agent.contact.outage for crew in self.fleet.crews), "the end of the outage")

    def _start(self, name: str) -> None:
        self.fleet.start([NodeId(name)])

    def _let_succeed(self, name: str) -> None:
        crew = self.fleet._running_alone(NodeId(name))
        assert crew is not None
        self.fleet._happen(crew, WorkersExited(0.0, crew.agent.workers.round, (WorkerExit(0),)))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        give_up = self.fleet.now + 600.0  # seconds of the fleet
        while not condition():
            assert self.fleet.now < give_up, f"waited in vain for {what}: {decisions(self.journal)}"
            self.fleet.run_until(self.fleet.now + 1 / 16)


def options_of(schedule: Schedule, path: Path, stack: ExitStack, server: Etcd | None) -> list[str]:
    conf = f"--rdzv-conf=heartbeat={schedule.heartbeat_s},settle=0.2,last_call_timeout={schedule.last_call_s}"
    place = at_file(path) if server is None else at_etcd(server)
    if schedule.place == "c10d":  # the test hosts the store, so that the journal outlasts the agents
        _, port = stack.enter_context(hosted())
        place = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=j")
        conf += ",is_host=false"
    return [*place, conf, *schedule.options.split()]


ASKED = [*SCHEDULES[:2], *(pytest.param(schedule, marks=pytest.mark.slow) for schedule in SCHEDULES[2:])]


@pytest.mark.parametrize("schedule", ASKED, ids=lambda schedule: schedule.name)
def test_the_fleet_decides_what_real_agents_decide(tmp_path: Path, schedule: Schedule) -> None:
    """The same rounds, with the same members in rank order, for the same reasons, at the same cost. The job and each
    agent end alike."""
    with ExitStack() as stack:
        server = stack.enter_context(Etcd(tmp_path)) if schedule.place == "etcd" else None
        argv = options_of(schedule, tmp_path, stack, server)
        reality = Reality(stack.enter_context(Nodes(tmp_path, *argv)), server)
        reality.play(schedule)
        statuses, decided = reality.statuses(), decisions(reality.entries())
    simulated = Simulated(asked(parse([*argv, __file__], {}), {}).settings.terms)
    simulated.play(schedule)
    assert simulated.statuses() == statuses
    assert decisions(simulated.entries()) == decided
