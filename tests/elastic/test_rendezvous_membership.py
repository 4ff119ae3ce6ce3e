"""reknit's handler, called as torchrun calls it: several nodes in one process, each with a thread of its own."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from attrs import evolve
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.store import barrier

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore.host import StoreHost
from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.runtime.ports import Refused, Unavailable
from reknit.core.agent.contact import is_stop_late
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job, Verdict
from reknit.elastic.rendezvous import RendezvousParameters
from reknit.elastic.rendezvous.handler import ReknitRendezvousHandler
from reknit.elastic.rendezvous.membership import Membership
from tests.support.journals import everything
from tests.support.stores import free_port
from tests.support.waiting import PATIENCE_S, descriptors, until

CONF = {"heartbeat": 30.0, "last_call_timeout": 0.1, "settle": 0.0}
"""No node is lost here because this machine was busy for a second."""
LOSES = {"heartbeat": 3.0}
"""For tests in which a node is lost."""
ALL = {"last_call_timeout": 60.0}
"""The first round waits for all nodes. On a busy machine one of them may join a second after the other."""


class TorchrunNode:
    """One node: a handler, and the thread of its torchrun."""

    def __init__(self, name: str, endpoint: str, nodes: tuple[int, int], **config: Any) -> None:
        asked = RendezvousParameters("reknit", endpoint, "job1", *nodes, node_id=name, **{**CONF, **config})
        self.name = name
        self.handler = ReknitRendezvousHandler(asked)
        self.thread = ThreadPoolExecutor(1)
        self.endpoint = endpoint
        self.info: Any = None
        """What torchrun got last."""

    def ask(self) -> Future[Any]:
        """Ask for the next round."""
        return self.thread.submit(self.handler.next_rendezvous)

    def next(self) -> Any:
        return self.ask().result(PATIENCE_S)

    def succeed(self, size: int) -> None:
        """What torchrun does when all its workers have ended with 0."""
        store = self.info.store
        self.thread.submit(barrier, store, size, "torchelastic/agent/terminal_state", PATIENCE_S).result(PATIENCE_S)

    def waits(self) -> bool:
        """torchrun's look: is there reason to stop the workers?"""
        return bool(self.thread.submit(self.handler.num_nodes_waiting).result(PATIENCE_S))

    def shutdown(self) -> Future[bool]:
        return self.thread.submit(self.handler.shutdown)

    @property
    def member(self) -> Membership:
        assert self.handler._member is not None
        return self.handler._member


@contextmanager
def nodes(
    count: int, least: int, most: int, endpoint: str = "", *, name: str = "n", **config: Any
) -> Iterator[list[TorchrunNode]]:
    endpoint = endpoint or f"127.0.0.1:{free_port()}"
    made = [TorchrunNode(f"{name}{i}", endpoint, (least, most), **config) for i in range(count)]
    try:
        yield made
    finally:
        for ended in [node.shutdown() for node in made]:
            ended.result(PATIENCE_S)
        for node in made:
            node.thread.shutdown()


def job_at(endpoint: str) -> Job:
    """The job, as another client of the same store reads it. It is empty before its journal is there."""
    host, _, port = endpoint.partition(":")
    with closing(TCPStoreJournal(host, int(port), Envelope("job1"), exclusive=False, reads_only=True)) as journal:
        try:
            return fold_all(Job(), everything(journal))
        except (Unavailable, Refused):
            return Job()


def has_succeeded(node: TorchrunNode) -> bool:
    return any(found.id == node.name for found in job_at(node.endpoint).succeeded)


def meet(*those: TorchrunNode) -> list[TorchrunNode]:
    """Let these nodes form a round. Returns them in the order of their ranks."""
    asked = [(node, node.ask()) for node in those]
    for node, future in asked:
        node.info = future.result(PATIENCE_S)
    return sorted(those, key=lambda node: int(node.info.rank))


def place(node: TorchrunNode) -> tuple[int, int]:
    return node.info.rank, node.info.world_size


def master(node: TorchrunNode) -> tuple[str, int]:
    bootstrap = node.info.bootstrap_store_info
    return bootstrap.master_addr, bootstrap.master_port


# ---- rounds ----


def test_nodes_meet_and_share_a_store() -> None:
    """What torchrun does with the answer: ranks over the store, and MASTER_ADDR and MASTER_PORT for its workers."""
    with nodes(2, 2, 2) as two:
        assert not two[0].handler.use_agent_store
        first, second = meet(*two)
        assert (place(first), place(second)) == ((0, 2), (1, 2))
        assert master(first) == master(second)
        first.info.store.set("key", "value")
        assert second.info.store.get("key") == b"value"
        assert not first.waits()
        assert not first.handler.is_closed()
        assert first.handler.use_agent_store


def test_a_node_that_asks_again_has_failed_and_all_form_the_next_round(caplog: pytest.LogCaptureFixture) -> None:
    """torchrun says nothing of failures to its handler. It just asks for the next round. The log does not take a node
    for a worker."""
    caplog.set_level("INFO", "torch.distributed.elastic.rendezvous.reknit")
    with nodes(2, 2, 2) as two:
        first, second = meet(*two)
        before = master(first), first.info.store
        before[1].set("key", "of the first round")
        asked = second.ask()
        until(first.waits)
        assert place(first) == (0, 2)
        first.info, second.info = first.ask().result(PATIENCE_S), asked.result(PATIENCE_S)
        assert (place(first), place(second)) == ((0, 2), (1, 2))
        assert master(first) == master(second) != before[0]
        assert not second.info.store.check(["key"])
        until(lambda: "round 1 (restart 1): 2 nodes, master 127.0.0.1:" in caplog.text)
        assert "(group rank 1): workers of torchrun have failed" in caplog.text
        assert "rank 1 on" not in caplog.text


def test_a_newcomer_ends_the_round() -> None:
    """And those that were there keep their ranks."""
    with nodes(3, 2, 3) as three:
        first, second = meet(*three[:2])
        asked = three[2].ask()
        until(first.waits)
        until(second.waits)
        meet(first, second)
        three[2].info = asked.result(PATIENCE_S)
        assert [place(node) for node in (first, second, three[2])] == [(0, 3), (1, 3), (2, 3)]


def test_one_node_needs_no_endpoint() -> None:
    """`torchrun --rdzv-backend=reknit` for a first try."""
    with nodes(1, 1, 1) as (alone,):
        meet(alone)
        assert place(alone) == (0, 1)
        meet(alone)
        assert place(alone) == (0, 1)


def test_nodes_meet_in_a_shared_folder(tmp_path: Path) -> None:
    """Any journal of reknit serves: `--rdzv-endpoint=/shared/folder`."""
    with nodes(2, 2, 2, endpoint=str(tmp_path)) as two:
        first, second = meet(*two)
        assert (place(first), place(second)) == ((0, 2), (1, 2))


# ---- the end ----


def test_a_node_that_ends_without_success_ends_the_job() -> None:
    """With torch the others find out when their own workers fail. Here their next look tells them."""
    with nodes(2, 1, 2, **ALL) as two:
        first, second = meet(*two)
        ended = second.shutdown()
        until(first.waits)
        with pytest.raises(RendezvousClosedError, match="torchrun has ended on node n"):
            first.next()
        assert first.handler.is_closed()
        assert first.shutdown().result(PATIENCE_S)
        assert ended.result(PATIENCE_S)


def test_nodes_that_have_succeeded_end_in_peace() -> None:
    """Whoever is through the exit barrier is not told to stop, and the journal says that the job has succeeded."""
    with nodes(2, 2, 2) as two:
        first, second = meet(*two)
        done = [threading.Thread(target=node.succeed, args=(2,)) for node in two]
        for thread in done:
            thread.start()
        for thread in done:
            thread.join(PATIENCE_S)
        assert not first.waits()
        outcome = until(lambda: job_at(first.endpoint).outcome)
        assert outcome is not None
        assert outcome.verdict is Verdict.SUCCEEDED
        assert [node.shutdown().result(PATIENCE_S) for node in (second, first)] == [True, True]


def test_a_node_that_has_succeeded_does_not_hold_up_the_others() -> None:
    """It is in its exit barrier, and asks for no other round. The others form it without it."""
    with nodes(2, 1, 2, **ALL) as two:
        first, second = meet(*two)
        barred = first.thread.submit(first.info.store.add, "torchelastic/agent/terminal_state/num_members", 1)
        barred.result(PATIENCE_S)
        until(lambda: has_succeeded(first))
        second.info = second.next()
        assert place(second) == (0, 1)
        assert not first.waits()


def test_a_node_that_has_succeeded_can_leave_before_the_others() -> None:
    """torchrun's exit barrier has a timeout. The others work on."""
    with nodes(2, 1, 2, **ALL) as two:
        server, guest = two
        asked = server.ask()
        until(lambda: job_at(server.endpoint).live)
        meet(guest)
        server.info = asked.result(PATIENCE_S)
        guest.thread.submit(guest.info.store.add, "torchelastic/agent/terminal_state/num_members", 1).result(PATIENCE_S)
        until(lambda: has_succeeded(guest))
        assert guest.shutdown().result(PATIENCE_S)
        until(lambda: len(job_at(server.endpoint).live) == 1)
        assert not server.waits()


def test_a_spare_node_is_let_go_when_the_job_has_succeeded() -> None:
    """torch has an error of its own for that, which is no failure."""
    with nodes(3, 2, 2) as three:
        first, second = meet(*three[:2])
        spare = three[2].ask()
        until(lambda: len(job_at(first.endpoint).live) == 3)
        done = [threading.Thread(target=node.succeed, args=(2,)) for node in (first, second)]
        for thread in done:
            thread.start()
        for thread in done:
            thread.join(PATIENCE_S)
        with pytest.raises(RendezvousGracefulExitError):
            spare.result(PATIENCE_S)


def test_a_handler_can_close_the_rendezvous() -> None:
    """As in torch, for all nodes and for good."""
    with nodes(2, 2, 2) as two:
        first, second = meet(*two)
        first.handler.set_closed()
        until(second.waits)
        for node in two:
            with pytest.raises(RendezvousClosedError):
                node.next()
        assert first.shutdown().result(PATIENCE_S)
        with pytest.raises(RendezvousClosedError, match="was shut down"):
            first.next()
        assert first.handler.is_closed()


def test_a_journal_that_lasts_tells_a_latecomer_how_the_job_has_ended(tmp_path: Path) -> None:
    """A job that has failed may be run again under its name. One that has succeeded is not repeated."""
    for _ in range(2):
        with nodes(1, 1, 2, endpoint=str(tmp_path)) as (node,):
            meet(node)
            assert place(node) == (0, 1)
    with nodes(1, 1, 2, endpoint=str(tmp_path)) as (node,):
        meet(node)
        node.succeed(1)
    with nodes(1, 1, 2, endpoint=str(tmp_path)) as (late,), pytest.raises(RendezvousClosedError, match="finished"):
        late.next()


# ---- what goes wrong ----


def test_too_few_nodes_are_a_timeout(tmp_path: Path) -> None:
    """torch's error, after the join timeout. The store is a folder, which answers at once. If a store does not answer
    within this time, the agent ends for that reason."""
    with (
        nodes(1, 2, 2, str(tmp_path), join_timeout=1.5) as (alone,),
        pytest.raises(RendezvousTimeoutError, match="1 node joined"),
    ):
        alone.next()


def test_other_terms_are_an_error() -> None:
    """Two nodes with different numbers would wait for each other for ever."""
    endpoint = f"127.0.0.1:{free_port()}"
    with nodes(1, 1, 2, endpoint=endpoint) as (here,):
        meet(here)
        with (
            nodes(1, 1, 3, endpoint=endpoint, name="other") as (other,),
            pytest.raises(RendezvousStateError, match="terms"),
        ):
            other.next()


def test_a_store_that_cannot_be_hosted_is_an_error(tmp_path: Path) -> None:
    """One line, and no traceback of the store's client."""
    (tmp_path / "file").touch()
    with (
        nodes(1, 1, 2, endpoint=f"{tmp_path}/file/x", store_timeout=0.2) as (alone,),
        pytest.raises(RendezvousConnectionError),
    ):
        alone.next()


def test_an_outage_without_end_ends_the_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before that, torchrun's workers run on: the look says nothing of an outage."""
    monkeypatch.setattr(StoreHost, "restart", Mock(side_effect=OSError(errno.EMFILE, "no descriptor is free")))
    caplog.set_level("INFO", "torch.distributed.elastic.rendezvous.reknit")
    with nodes(2, 2, 2, store_timeout=1.0) as two:
        meet(*two)
        (server,) = [child for child in psutil.Process().children() if "server" in " ".join(child.cmdline())]
        server.kill()
        until(lambda: caplog.text.count("the store cannot be reached, workers keep running") == 2)
        assert not two[0].waits()
        until(two[0].waits)
        with pytest.raises(RendezvousConnectionError):
            two[0].next()


def test_fences_are_refused() -> None:
    """A fence kills workers, and these are torchrun's."""
    with nodes(1, 1, 2, fence_after=2) as (alone,), pytest.raises(ValueError, match="torchrun holds the workers"):
        alone.next()


def test_a_node_whose_torchrun_calls_no_more_is_lost_and_may_come_back() -> None:
    """After a signal torchrun ends its workers and calls nothing. Beats of a thread would keep the node alive."""
    with nodes(2, 1, 2, **ALL, **LOSES) as two:
        first, second = meet(*two)
        second.member._patience_s = 0.0
        until(first.waits)
        meet(first)
        assert place(first) == (0, 1)
        second.member._patience_s = 30.0
        until(second.waits)
        asked = second.ask()
        until(first.waits)
        meet(first)
        second.info = asked.result(PATIENCE_S)
        assert (place(first), place(second)) == ((0, 2), (1, 2))


def test_a_torchrun_that_is_slow_to_stop_its_workers_is_not_taken_for_hung() -> None:
    """It looks every 35 s, and its workers use their grace of 30 s."""
    with nodes(2, 1, 2, **ALL) as two:
        first, second = meet(*two)
        asked = second.ask()
        until(first.waits)
        agent = first.member._agent
        assert agent.workers.stopping is not None
        assert not is_stop_late(evolve(agent, at=agent.at + 35 + 30))
        meet(first)
        asked.result(PATIENCE_S)


@pytest.mark.alone
@pytest.mark.slow
def test_a_forked_child_says_no_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """The membership is its parent's."""
    register, goodbyes = atexit.register, list[Callable[[], None]]()

    def noting(goodbye: Callable[[], None]) -> Callable[[], None]:
        goodbyes.append(goodbye)
        return register(goodbye)

    monkeypatch.setattr(atexit, "register", noting)
    with nodes(2, 1, 2, **ALL, **LOSES) as two:
        first, second = meet(*two)
        pid = os.fork()
        if pid == 0:
            for goodbye in goodbyes:
                goodbye()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(goodbyes) >= 2
        assert not first.waits()
        assert not second.waits()
        meet(first, second)
        assert {place(first), place(second)} == {(0, 2), (1, 2)}


def test_nothing_is_left_after_the_shutdown() -> None:
    """A program may make many handlers, one after the other."""
    with nodes(2, 2, 2) as two:
        meet(*two)  # what torch makes once per process is there now
    threads, open_before = threading.active_count(), descriptors()
    with nodes(2, 2, 2) as two:
        meet(*two)
    for node in two:
        del node.info
    del two, node
    gc.collect()  # a store that is still referred to has descriptors
    until(lambda: threading.active_count() == threads, "the end of the threads")
    until(lambda: not (descriptors() - open_before), "the end of the descriptors")
