"""The metrics of an agent: what is counted, and that Prometheus can read it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import prometheus_client
import pytest
from attrs import evolve

from reknit.adapters.keeper.watchdog import progress
from reknit.adapters.keeper.watchdog.page import Page
from reknit.adapters.observe import metrics
from reknit.adapters.observe.metrics import CAUSES, Metrics, MetricsObserver, no_processes, standings, usage, workers
from reknit.adapters.simulated import faults
from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.hosts import Proc
from reknit.adapters.simulated.world import World
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Command
from reknit.core.agent.events import EntriesRead, Event
from reknit.core.job.entries import Entry, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Closed, Gathering, Job, Running
from reknit.core.job.reasons import Departure, NodeGone, NodesAdmitted, RoundEnd, WorkerFailed
from reknit.core.job.workers import NoProgress, TimerExpired, WorkerFailure
from reknit.core.text.doing import Doing
from tests.support.asking import parsed
from tests.support.playbook import an_agent, exits, failure, joined, node, playing, running, stopped
from tests.support.waiting import until


class Watches:
    """Watches a simulated world: one `MetricsObserver` per agent."""

    def __init__(self) -> None:
        self.of: dict[Proc, MetricsObserver] = {}

    def stepped(self, proc: Proc, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        if proc not in self.of:
            self.of[proc] = MetricsObserver(before, before.at)
        self.of[proc](before, event, proc.agent, commands)

    def landed(self, entry: Entry, before: Job) -> None: ...


def shown(watch: MetricsObserver, now: float = 0.0, run_id: str = "job42") -> dict[str, float]:
    return parsed(Metrics(watch, lambda: now, run_id, no_processes).text())


def test_a_job_with_failures_losses_and_newcomers() -> None:
    """Every agent counts rounds and causes as they were, and its phases make up its time."""
    world, watches = World(seed=0), Watches()
    world.watchers.append(watches)
    terms = Terms(min_nodes=2, max_nodes=3, last_call_s=5.0, restarts=RestartPolicy(max_restarts=2))

    def begin(i: int) -> None:
        number = len(world.procs)
        spec = Spec(NodeId(f"n{i}"), f"10.0.0.{i}", terms, local_world_size=2)
        world.begin(Proc(f"n{number}", i, spec, 10.0 * number, number))

    for i in range(3):
        begin(i)
    world.after(20.0, lambda: staff.fail(world, world.procs[0]))
    world.after(40.0, lambda: world.kill(world.procs[2]))
    world.after(60.0, lambda: begin(2))
    world.after(80.0, partial(faults.begin_outage, world))
    world.run_for(100.0)
    first = shown(watches.of[world.procs[0]], world.procs[0].agent.at)
    assert first["reknit_rounds_total"] == 4
    causes = {cause: first[f'reknit_restarts_total{{cause="{cause}"}}'] for cause in CAUSES}
    assert {cause: count for cause, count in causes.items() if count} == {
        "worker_failed": 1,
        "node_lost": 1,
        "nodes_admitted": 1,
    }
    assert (first["reknit_restarts_spent"], first["reknit_restarts_allowed"]) == (1, 2)
    assert first['reknit_nodes{standing="member"}'] == 3
    assert first["reknit_round"] == 3
    assert first["reknit_journal_reachable"] == 0
    phases = {what: first[f'reknit_phase_seconds_total{{phase="{what.value}"}}'] for what in Doing}
    assert phases[Doing.RUNNING] > 60
    assert phases[Doing.STOPPING] > 0
    assert sum(phases.values()) == pytest.approx(world.procs[0].agent.at)
    # The newcomer has not seen the rounds before its own.
    newcomer = shown(watches.of[world.procs[3]])
    assert newcomer["reknit_rounds_total"] == 1
    assert newcomer['reknit_restarts_total{cause="nodes_admitted"}'] == 1


def job(round_: int, why: RoundEnd | None = None, *, runs: bool = True, epoch: int = 0) -> Job:
    return Job(phase=Running(round_) if runs else Gathering(round_), why=why, epoch=epoch)


FAILED = WorkerFailed(node("n0"), failure())


def test_a_job_that_fails_has_no_round_after_its_last_one() -> None:
    """The next round was gathered when the job ended, and has not begun."""
    world, watches = World(seed=0), Watches()
    world.watchers.append(watches)
    terms = Terms(restarts=RestartPolicy(max_restarts=1))
    world.begin(Proc("n0", 0, Spec(NodeId("n0"), "10.0.0.0", terms), 0.0, 0))
    for at in (20.0, 40.0):
        world.after(at, lambda: staff.fail(world, world.procs[0]))
    world.run_for(100.0)
    counts = watches.of[world.procs[0]].counts
    assert isinstance(world.procs[0].agent.job.phase, Closed)
    assert (counts.rounds, counts.restarts) == (2, {"worker_failed": 1})


def test_rounds_that_were_not_seen() -> None:
    """An agent that was cut off reads several rounds at once. The cause of the last one alone is known."""
    watch = MetricsObserver(an_agent(), 0.0)

    def read(*jobs: Job) -> tuple[int, dict[str, int]]:
        for each in jobs:
            after = evolve(watch.agent, job=each)
            watch(watch.agent, EntriesRead(0.0), after, ())
        return watch.counts.rounds, dict(watch.counts.restarts)

    assert read(job(2, FAILED)) == (0, {}), "they began before this agent looked"
    assert read(job(3, FAILED, runs=False)) == (0, {}), "the next one is gathered"
    assert read(job(3, FAILED), job(3, FAILED)) == (1, {"worker_failed": 1})
    assert read(job(6, NodesAdmitted((node("n1"),)))) == (4, {"worker_failed": 1, "unseen": 2, "nodes_admitted": 1})
    assert read(job(8, FAILED, runs=False))[1]["unseen"] == 3
    assert read(job(0, epoch=1)) == (6, {"worker_failed": 1, "unseen": 3, "nodes_admitted": 1})


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        (FAILED, "worker_failed"),
        (WorkerFailed(node("n0"), evolve(failure(), cause=TimerExpired("step"))), "timer_expired"),
        (WorkerFailed(node("n0"), evolve(failure(), cause=NoProgress(5.0))), "no_progress"),
        (NodesAdmitted((node("n1"),)), "nodes_admitted"),
        *((NodeGone(node("n1"), how), f"node_{how.value}") for how in Departure),
        (None, "unseen"),
    ],
)
def test_causes(why: RoundEnd | None, cause: str) -> None:
    """Each has a name of its own, which a query can rely on."""
    watch, agent = MetricsObserver(an_agent(), 0.0), an_agent()
    watch(agent, EntriesRead(0.0), evolve(agent, job=job(0)), ())
    watch(evolve(agent, job=job(0)), EntriesRead(0.0), evolve(agent, job=job(1, why)), ())
    assert dict(watch.counts.restarts) == {cause: 1}
    assert cause in CAUSES


def test_workers_by_state() -> None:
    """The sum is always the number of workers on the node."""

    def there(agent: Agent) -> dict[str, int]:
        found = workers(agent)
        assert sum(found.values()) == 3
        return {state: count for state, count in found.items() if count}

    assert there(an_agent(local_world_size=3)) == {"stopped": 3}
    playbook = playing("n0", Terms(), local_world_size=3)
    assert there(playbook.agent) == {"running": 3}
    playbook.feed(exits(1))
    assert there(playbook.agent) == {"running": 2, "succeeded": 1}
    playbook.feed(exits(failure(0)))
    assert there(playbook.agent) == {"stopping": 1, "succeeded": 1, "failed": 1}
    playbook.feed(stopped())
    assert there(playbook.agent) == {"stopped": 1, "succeeded": 1, "failed": 1}


def test_failures_by_worker_and_cause() -> None:
    """An alert tells a hang from a crash, and a worker that fails again and again from many that failed once."""
    terms = Terms(restarts=RestartPolicy(max_restarts=9))
    watch = MetricsObserver(an_agent(), 0.0)
    for bad in (
        WorkerFailure(1, 1, 3, 7),
        WorkerFailure(1, 1, -9, 7),
        WorkerFailure(1, 1, -11, 7),
        WorkerFailure(0, 0, -6, 7, cause=NoProgress(5.0)),
        WorkerFailure(0, 0, -6, 7, cause=TimerExpired("step")),
        WorkerFailure(0, 0, 127),
    ):
        playbook = playing("n0", terms, local_world_size=2)
        for builder in (exits(bad, round=7), exits(bad)):  # workers of another round are none of the agent's
            before, event = playbook.agent, builder(playbook)
            playbook.feed(event)
            watch(before, event, playbook.agent, ())
    found = shown(watch)
    assert {name: count for name, count in found.items() if name.startswith("reknit_worker_failures")} == {
        f'reknit_worker_failures_total{{cause="{cause}",local_rank="{local_rank}"}}': count
        for local_rank, cause, count in (
            (0, "no_progress", 1),
            (0, "not_started", 1),
            (0, "timer_expired", 1),
            (1, "exit", 1),
            (1, "signal", 2),
        )
    }


def test_workers_that_succeed_are_no_failures() -> None:
    """The series begins with the first failure."""
    playbook = playing("n0", Terms(), local_world_size=2)
    watch = MetricsObserver(playbook.agent, 0.0)
    before, event = playbook.agent, exits(0, 1)(playbook)
    playbook.feed(event)
    watch(before, event, playbook.agent, ())
    assert not [name for name in shown(watch) if name.startswith("reknit_worker_failures")]


def test_how_far_the_workers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that reports nothing has no number: 0 would be a step. One that reports no step has a time."""
    page = Page()  # as a keeper has it: this process is the keeper here
    reports: list[Callable[[], None]] = [lambda: None, partial(progress.progress, 41), progress.progress]
    for local_rank, report in enumerate(reports):
        variables = page.variables(local_rank, {})
        page.started(local_rank, 100 + local_rank)
        monkeypatch.setattr(progress, "_records", ())
        monkeypatch.setenv(progress.VARIABLE, variables[progress.VARIABLE])
        report()
    watch = MetricsObserver(an_agent(), 0.0)

    def told() -> dict[str, float]:
        found = parsed(Metrics(watch, lambda: 0.0, "job42", lambda: (os.getpid(), {})).text())
        return {name: found[name] for name in found if name.startswith(("reknit_worker_step", "reknit_worker_seconds"))}

    first = told()
    since = 'reknit_worker_seconds_since_progress{local_rank="%d"}'
    assert first.keys() == {'reknit_worker_step{local_rank="1"}', since % 1, since % 2}
    assert first['reknit_worker_step{local_rank="1"}'] == 41
    assert first[since % 1] >= first[since % 2] >= 0
    assert until(lambda: told()[since % 2] > first[since % 2], "time to pass")
    page.close()


def test_nodes_by_standing() -> None:
    """A standby is live and no member."""
    assert standings(running(2)) == {"member": 2, "standby": 0, "gathering": 0, "gone": 0}
    assert standings(running(2, Terms(1, 2), joined("n2")))["standby"] == 1
    assert standings(Job()) == {"member": 0, "standby": 0, "gathering": 0, "gone": 0}


def test_strange_names_can_be_read() -> None:
    """Labels are quoted, and a name that is no UTF-8 does not break the page."""
    found = shown(MetricsObserver(an_agent('n"0\\'), 0.0), run_id="a\nb\udcff")
    (info,) = [name for name in found if name.startswith("reknit_agent_info")]
    assert 'n"0\\' in info


def test_every_metric_is_explained_and_the_common_registry_is_left_alone() -> None:
    """A program may have metrics of its own, and several agents."""
    before = prometheus_client.generate_latest()
    one, other = (
        Metrics(MetricsObserver(an_agent(name), 0.0), lambda: 0.0, "job", no_processes) for name in ("a", "b")
    )
    names = {line.split()[2] for line in one.text().splitlines() if line.startswith("# TYPE")}
    helps = {
        line.split()[2]: line.split(maxsplit=3)[3] for line in one.text().splitlines() if line.startswith("# HELP")
    }
    assert names == helps.keys()
    assert all(text.endswith(".") for text in helps.values())
    assert all(name.startswith("reknit_") for name in names)
    assert 'node="b"' in other.text()
    assert "reknit" not in prometheus_client.generate_latest().decode()
    assert before.count(b"# TYPE") == prometheus_client.generate_latest().count(b"# TYPE")


def test_the_usage_of_workers() -> None:
    """A process that is no child of the keeper is none of its workers: the pid was used again."""
    program = "print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # the interpreter runs
        found = list(usage(os.getpid(), {0: child.pid, 1: os.getpid(), 2: 2**22 + 1}))
        assert [rank for rank, _, _ in found] == [0]
        assert found[0][1] >= 0
        assert found[0][2] > 100_000
        assert list(usage(0, {0: child.pid})) == []
        assert child.stdin is not None
        child.stdin.write(b"\n")
    assert list(usage(os.getpid(), {0: child.pid})) == []


def test_a_look_at_many_workers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape must not take longer than Prometheus waits."""
    monkeypatch.setattr(metrics, "USAGE_S", -1.0)
    assert list(usage(os.getppid(), {0: os.getpid()})) == []
