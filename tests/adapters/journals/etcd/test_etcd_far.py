"""etcd behind a slow link: calls find out how long an answer takes, and a beat waits for no other call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.connection import EtcdServer
from reknit.adapters.journals.etcd.gateway import Cluster
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.runtime.ports import Unavailable
from reknit.core.job.entries import Aborted, Node, NodeId
from tests.support.etcd import Etcd, patiently
from tests.support.journals import Proxy
from tests.support.waiting import PATIENCE_S

ME = Node(NodeId("me"))
WAY_S, LIMIT_S = 0.04, 0.06
"""The limit is shorter than a round trip, and a quarter of the longest limit is not."""


def test_a_distant_etcd_is_reached_and_its_distance_is_told_once(server: Etcd) -> None:
    """Nobody knows before the first answer whether a silent server is far away or dead."""
    told: list[float] = []
    with Proxy(f"127.0.0.1:{server.port}", WAY_S) as proxy:
        host, _, port = proxy.where.partition(":")
        far = EtcdJournal(Cluster([(host, int(port))]), Envelope("far"), timeout_s=LIMIT_S, on_slow=told.append)
        with closing(far):
            with pytest.raises(Unavailable, match=f"no answer within {LIMIT_S} s"):
                far.append("0", Aborted("0"))
            calls: list[Callable[[], object]] = [
                lambda: far.append("0", Aborted("0")),
                lambda: far.beat(ME, 1, ()),
                lambda: far.read(0, 0.0),
            ]
            for call in calls:
                patiently(call)
            for call in calls:
                call()  # the limit follows the distance, so nothing fails any more
            assert far.read(0, 0.0).entries == (Aborted("0"),)
    (took_s,) = told
    assert took_s >= 2 * WAY_S


def test_a_beat_waits_for_no_append(server: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that does not beat in time is taken for dead, although only its words are slow."""
    journal = EtcdJournal(Cluster(server.endpoints), Envelope("apart"), timeout_s=PATIENCE_S)
    with closing(journal):
        journal.append("0", Aborted("0"))
        waiting = threading.Thread(target=journal.append, args=("1", Aborted("1")))
        is_sent, may_arrive, finish = threading.Event(), threading.Event(), EtcdServer.finish

        def finish_late(server: EtcdServer, within_s: float) -> object:
            if threading.current_thread() is waiting:  # its answer is on its way
                is_sent.set()
                may_arrive.wait(PATIENCE_S)
            return finish(server, within_s)

        monkeypatch.setattr(EtcdServer, "finish", finish_late)
        waiting.start()
        assert is_sent.wait(PATIENCE_S)
        assert journal.beat(ME, 1, ()) == {ME: 1}
        assert len(journal.read(0, 0.0).entries) == 2
        assert waiting.is_alive()
        may_arrive.set()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
