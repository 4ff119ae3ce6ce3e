"""A handler of torch in the place of the journal. The handler here does what a test tells it to."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from reknit.adapters.elastic.foreign_rendezvous import ForeignRendezvous
from reknit.app.python.session import Session
from reknit.app.settings import Settings
from reknit.core.agent.reasons import StoreLost
from reknit.core.agent.states import WorkerState
from reknit.core.job.entries import Joined
from reknit.core.job.job import Running as RunningPhase
from reknit.core.job.reasons import BudgetSpent, NodesAdmitted
from tests.support.alone import run_alone
from tests.support.waiting import PATIENCE_S, until

WAITS = "import signal; signal.sigwait({signal.SIGTERM})"


class Told:
    """Has the two methods of a handler that are called."""

    def __init__(self) -> None:
        self.rounds = 0
        """How many times `next_rendezvous` was called."""
        self.looks = 0
        self.waiting: int | Exception = 0
        self.may_return = threading.Event()
        self.error: Exception | None = None

    def next_rendezvous(self) -> object:
        self.rounds += 1
        self.may_return.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return f"round {self.rounds}"

    def num_nodes_waiting(self) -> int:
        self.looks += 1
        if isinstance(self.waiting, Exception):
            raise self.waiting
        return self.waiting


class Job:
    """An agent with real workers, whose rendezvous is `handler`."""

    def __init__(self, code: str, max_restarts: int, store_timeout_s: float) -> None:
        self.handler = Told()
        self.foreign = ForeignRendezvous(self.handler, max_restarts, poll_s=0.01)
        settings = Settings(command=(sys.executable, "-c", code), grace_s=0.0, store_timeout_s=store_timeout_s)
        self.lines: list[str] = []
        self.running = Session(settings, rewire=self.foreign.rewire, say=self.lines.append)

    @property
    def agent(self):  # type: ignore[no-untyped-def]  # an agent of torch, which has no types here
        return self.running.loop.agent

    def runs(self, round_: int) -> bool:
        job, workers = self.agent.job, self.agent.workers
        is_it = isinstance(job.phase, RunningPhase) and job.round == workers.round == round_
        return is_it and workers.state is WorkerState.HEALTHY


@contextmanager
def a_job(code: str = WAITS, *, max_restarts: int = 0, store_timeout_s: float = 300.0) -> Iterator[Job]:
    job = Job(code, max_restarts, store_timeout_s)
    try:
        job.running.start()
        yield job
    finally:
        job.handler.may_return.set()
        job.running.close()


def test_workers_start_when_the_rendezvous_is_complete() -> None:
    """Not before: the ranks come from there. And the job ends as any job of reknit does."""
    with a_job("pass") as job:
        until(lambda: job.handler.rounds == 1)
        assert not job.agent.job.live
        job.handler.may_return.set()
        result = job.running.join(PATIENCE_S)
        assert result is not None
        assert result.state is WorkerState.SUCCEEDED
        assert (job.handler.rounds, job.foreign.info, job.foreign.error) == (1, "round 1", None)


def test_a_rendezvous_that_takes_long_is_asked_for_once() -> None:
    """The agent says `Joined` again and again meanwhile."""
    with a_job("pass") as job:
        said = []
        append = job.foreign.append
        job.running.loop.ports.link.append = lambda entry: (said.append(entry), append(entry))  # type: ignore[method-assign, assign, func-returns-value]
        until(lambda: sum(isinstance(entry, Joined) for entry in said) >= 2)
        job.handler.may_return.set()
        assert job.running.join(PATIENCE_S) is not None
        assert job.handler.rounds == 1


def test_nodes_that_wait_end_the_round_and_spend_nothing() -> None:
    """As with torch: a change of membership is no failure."""
    with a_job() as job:
        job.handler.may_return.set()
        for round_ in range(3):
            until(lambda r=round_: job.runs(r))  # type: ignore[misc]  # mypy cannot infer the lambda with a default
            assert job.foreign.info == f"round {round_ + 1}"
            job.handler.waiting = 1
            assert job.handler.rounds == round_ + 1
            job.foreign.be_started()
            until(lambda r=round_: job.agent.job.round == r + 1)  # type: ignore[misc]  # mypy cannot infer the lambda with a default
            job.handler.waiting = 0
        until(lambda: job.runs(3))
        assert (job.agent.job.spent, job.agent.job.unspent) == (0, 3)
        assert isinstance(job.agent.job.why, NodesAdmitted)
        assert list(job.agent.job.live) == [job.agent.me.id]


def test_nobody_looks_for_waiting_nodes_before_the_workers_run() -> None:
    """The agents of a round exchange their ranks first. One that left meanwhile would hold up all others."""
    with a_job() as job:
        job.handler.waiting = 1
        job.handler.may_return.set()
        until(lambda: job.runs(0))
        assert job.handler.looks == 0
        job.foreign.be_started()
        until(lambda: job.agent.job.round == 1)


def test_an_error_of_the_rendezvous_ends_the_agent_and_is_kept() -> None:
    """`run` raises it again, as torch does: closed, too late, or whatever a handler of another package raises."""
    with a_job() as job:
        job.handler.error = error = TimeoutError("nobody came")
        job.handler.may_return.set()
        result = job.running.join(PATIENCE_S)
        assert result is not None
        assert (result.state, job.foreign.error) == (WorkerState.STOPPED, error)


def test_healthy_workers_outlive_a_rendezvous_that_is_out_of_reach() -> None:
    """torch's agent ends them at the first failed look. Here it is an outage, like that of a journal."""
    with a_job() as job:
        job.handler.may_return.set()
        until(lambda: job.runs(0))
        job.handler.waiting = ConnectionError("reset")
        job.foreign.be_started()
        until(lambda: job.agent.contact.outage == "ConnectionError: reset")
        assert job.agent.workers.alive
        job.handler.waiting = 0
        until(lambda: job.agent.contact.outage is None)
        job.handler.waiting = 1
        until(lambda: job.agent.job.round == 1)


def test_an_outage_without_end_ends_the_agent() -> None:
    """After the store timeout, as with a journal."""
    with a_job(store_timeout_s=0.1) as job:
        job.handler.may_return.set()
        until(lambda: job.runs(0))
        job.handler.waiting = ConnectionError("reset")
        job.foreign.be_started()
        result = job.running.join(PATIENCE_S)
        assert result is not None
        assert isinstance(result.why, StoreLost)


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_failure_spends_this_nodes_budget(max_restarts: int) -> None:
    """When it is spent, the node does not go to the handler again. It would wait for a round that nobody wants."""
    with a_job("raise SystemExit(3)", max_restarts=max_restarts) as job:
        job.handler.may_return.set()
        result = job.running.join(PATIENCE_S)
        assert result is not None
        assert isinstance(result.why, BudgetSpent)
        assert [failure.exitcode for failure in result.failures.values()] == [3]
        assert job.handler.rounds == 1 + max_restarts


def test_an_agent_that_is_told_to_leave_waits_for_no_rendezvous() -> None:
    """`next_rendezvous` cannot be interrupted. A signal ends the agent all the same."""
    with a_job() as job:
        until(lambda: job.handler.rounds == 1)
        job.running.leave()
        result = job.running.join(PATIENCE_S)
        assert result is not None
        assert result.state is WorkerState.STOPPED


ENDED = """
    import gc, os, sys, weakref
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
    from torch.distributed.elastic.rendezvous import registry as torchs
    from reknit.elastic.agent.server.api import WorkerSpec
    from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from reknit.elastic.multiprocessing import SignalException
    from reknit.elastic.rendezvous import registry as own
    from tests.support.waiting import until

    def handler(name):
        registry = own if name == "reknit" else torchs
        made = registry.get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", name, 1, 1))
        if name == "refuses":
            made.__class__ = Refuses
        return made

    class Refuses(type(torchs.get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "x", 1, 1)))):
        def next_rendezvous(self):
            raise RendezvousClosedError("closed")

    def run(name, script):
        held = handler(name)
        spec = WorkerSpec("trainer", 2, held, entrypoint="/bin/sh", args=("-c", script), max_restarts=1)
        agent = LocalElasticAgent(spec)
        try:
            print(name, agent.run().state.name, end=" ")
        except (SignalException, RendezvousClosedError) as error:
            print(name, type(error).__name__, end=" ")
        held.shutdown()
        return weakref.ref(held), weakref.ref(agent)

    os.environ["AGENT"] = str(os.getpid())
    gc.collect()
    gc.disable()
    for name, script in (
        ("succeeds", "exit 0"), ("fails", "exit 3"), ("stops", "kill -TERM $AGENT; exec sleep 1000"), ("refuses", ""),
        ("reknit", "exit 3"),
    ):
        left = run(name, script)
        until(lambda: not any(held() for held in left))  # a thread that ends drops its own a moment later
        print(*(held() is None for held in left))
"""


@pytest.mark.beside_torch
def test_an_agent_that_has_ended_holds_nothing() -> None:
    """Least of all the store in the handler. A program that forks then would end its child at some collection there:
    the threads of the store are not in the child. So everything is dropped without a collection."""
    assert run_alone(ENDED).splitlines() == [
        "succeeds SUCCEEDED True True",
        "fails FAILED True True",
        "stops SignalException True True",
        "refuses RendezvousClosedError True True",
        "reknit FAILED True True",
    ]
