"""What an operator is told about an etcd that answers: a version that loses writes, a history that is kept for ever."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.connection import EtcdServer
from reknit.adapters.journals.etcd.doubts import _MANY, Doubts, loses_writes
from reknit.adapters.journals.etcd.gateway import Cluster, Gateway, put
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.runtime.ports import Unavailable
from reknit.core.job.entries import Aborted
from tests.adapters.journals.etcd.test_gateway import Member, members
from tests.support.etcd import Etcd
from tests.support.waiting import PATIENCE_S

KEY = "/doubts"
GROWN = 500_000_000


@contextmanager
def asked(member: Member) -> Iterator[EtcdServer]:
    with closing(EtcdServer(*member.endpoint, PATIENCE_S)) as server:
        yield server


@pytest.mark.parametrize(
    ("version", "loses"),
    [
        ("3.4.21", True),
        ("3.4.22", False),
        ("3.5.0", True),
        ("3.5.5", True),
        ("3.5.6", False),
        ("3.6.1", False),
        ("", False),
    ],
)
def test_which_versions_lose_writes(version: str, loses: bool) -> None:
    """A version that is not known is not accused."""
    assert loses_writes(version) == loses


def test_a_version_that_loses_writes_is_named_once() -> None:
    """The journal is only as good as the promise of the store. Three members say the same."""
    told: list[str] = []
    doubts = Doubts(told.append, 5.0)
    with members(2) as made:
        for member in made:
            member.status = {"version": "3.5.2", "dbSize": "1"}
            with asked(member) as server:
                for revision in (7, 8):
                    doubts.look(server, KEY, revision)
        assert [member.asked for member in made] == [1, 1], "each member once, and not at every read"
    (line,) = told
    assert line.startswith(f"etcd 3.5.2 at http://127.0.0.1:{made[0].server_port} may lose writes")


@pytest.mark.parametrize("status", [{}, {"version": "3.5.9"}, {"version": None, "dbSize": "x"}])
def test_a_server_that_does_not_say_what_it_is_harms_nobody(status: dict[str, object]) -> None:
    """Another program may speak etcd's language."""
    told: list[str] = []
    with members(1) as made, asked(made[0]) as server:
        made[0].status = status
        Doubts(told.append, 5.0).look(server, KEY, 7)
    assert told == []


def test_a_history_that_nobody_forgets_is_told_long_before_the_space_is_used_up(server: Etcd) -> None:
    """The job would stop in the middle of the night. The revisions are real, and their number is played."""
    told: list[str] = []
    with closing(Gateway(Cluster(server.endpoints), PATIENCE_S)) as gateway:
        begin = gateway.transact([], [put(KEY, b"")], []).revision
        doubts = Doubts(told.append, 5.0, now=iter((0.0, 3600.0)).__next__)
        grown = Grown(gateway.server)
        doubts.look(grown, KEY, begin)
        doubts.look(grown, KEY, begin + _MANY - 1)
        assert told == []
        doubts.look(grown, KEY, begin + _MANY)
        doubts.look(grown, KEY, begin + 9 * _MANY)
    (line,) = told
    assert "has forgotten nothing for 1.0 h, and its database has grown by 500 MB" in line
    assert "is used up in 3.3 h" in line
    fits = re.search(r"--rdzv-conf=heartbeat=(\d+) on all nodes makes the space last for a week", line)
    assert fits is not None
    assert 250 < int(fits[1]) < 270  # 5 s · 168 h / 3.3 h


def test_an_etcd_that_compacts_is_not_accused(server: Etcd) -> None:
    """Most operators have read the page."""
    told: list[str] = []
    with closing(Gateway(Cluster(server.endpoints), PATIENCE_S)) as gateway:
        begin = gateway.transact([], [put(KEY, b"")], []).revision
        doubts = Doubts(told.append, 5.0)
        grown = Grown(gateway.server)
        doubts.look(grown, KEY, begin)
        gateway.transact([], [put(KEY, b"")], [])
        server.compact()
        doubts.look(grown, KEY, begin + _MANY)
    assert told == []


def test_a_history_that_lasts_for_weeks_is_no_news() -> None:
    """Four nodes need more than a month to fill the space."""
    told: list[str] = []
    doubts = Doubts(told.append, 5.0, now=iter((0.0, 7 * 24 * 3600.0)).__next__)
    with members(1) as made, asked(made[0]) as server:
        made[0].status = {"version": "3.5.9", "dbSize": "1"}
        doubts.look(server, KEY, 1)
        made[0].status["dbSize"] = str(GROWN)
        doubts.look(server, KEY, 1 + _MANY)
        assert made[0].asked == 3, "two times for its size, and once for the past"
    assert told == []


def test_a_journal_looks_when_it_has_read(server: Etcd) -> None:
    """Not before: a store that does not answer is told of elsewhere."""
    seen: list[tuple[str, str, int]] = []

    def look(server: EtcdServer, key: str, revision: int) -> None:
        seen.append((server.url, key, revision))

    with closing(
        EtcdJournal(Cluster(server.endpoints), Envelope("doubts"), timeout_s=PATIENCE_S, on_read=look)
    ) as journal:
        journal.append("t", Aborted("x"))
        assert seen == []
        position = journal.read(0, 0.0).position
        assert seen == [(f"http://127.0.0.1:{server.port}", "/reknit/doubts/header", position)]
    with pytest.raises(Unavailable):
        journal.read(0, 0.0)
    assert len(seen) == 1


class Grown(EtcdServer):
    """A real server. Its database seems to grow by half a gigabyte from one question to the next."""

    def __init__(self, server: EtcdServer) -> None:
        self.url, self._server, self._times = server.url, server, 0

    def ask(self, path: str, data: object, within_s: float = PATIENCE_S) -> object:
        answer = self._server.ask(path, data, within_s)
        if path.endswith("/status"):
            answer["dbSize"] = str(int(answer["dbSize"]) + self._times * GROWN)
            self._times += 1
        return answer
