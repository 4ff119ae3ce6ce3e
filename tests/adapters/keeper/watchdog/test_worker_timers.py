"""Timers of workers: from the bytes of a pipe to the timers that have expired. No worker is ended here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.adapters.keeper.watchdog.worker_timers import Reader, Request, TimerProcess, Timers, WorkerTimer, client
from tests.support.waiting import read_pids, until


def line(pid: Any = 7, scope: Any = "s", at: Any = 1.5, signum: Any = 9, **more: Any) -> bytes:
    """A request as a client writes it, with its line end."""
    fields = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": at, "signal": signum, **more}
    return json.dumps(fields).encode() + b"\n"


class Told:
    """A reader, and what it complains of."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.reader = Reader(lambda kind, what: self.kinds.append(kind))


# ---- the reader ----


def test_requests_are_read_in_their_order() -> None:
    """A request may come in parts, and its version does not matter, as in torch."""
    told = Told()
    data = line() + line(at=-1, signum=0) + line(scope="a#1", at=2, version=99) + line(scope=3, at=-0.5)
    cut = len(data) // 2
    found = told.reader.feed(data[:cut]) + told.reader.feed(data[cut:])
    assert found == [
        Request(7, "s", 1.5, 9),
        Request(7, "s", None, 0),
        Request(7, "a#1", 2.0, 9),
        Request(7, "3", None, 9),
    ]
    assert told.kinds == []


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage",
        b"\xff\xfe\0",
        b"[1, 2]",
        b"{}",
        b"null",
        b"[" * 5000,
        line(pid="7"),
        line(pid=True),
        line(pid=0),
        line(pid=-1),
        line(pid=10**30),
        line(scope=None),
        line(scope={"a": 1}),
        line(at="soon"),
        line(at=float("nan")),
        line(at=10**400),
        line(at=None),
        line(signum=None),
        line(signum=1000),
        line(signum=2.5),
        line()[:-9],
    ],
)
def test_what_is_no_request_is_left_out(garbage: bytes) -> None:
    """A pid of 0 or -1 would signal every process of this user. The requests beside the garbage count."""
    told = Told()
    data = line(scope="before") + garbage.rstrip(b"\n") + b"\n" + line(scope="after")
    assert [request.scope for request in told.reader.feed(data)] == ["before", "after"]
    assert len(told.kinds) == 1


def test_a_huge_line_is_not_kept() -> None:
    """A program that writes without a line end must not fill the memory of the keeper."""
    told = Told()
    for _ in range(100):
        told.reader.feed(b"x" * 65_536)
    assert len(told.reader._unread) < 65_536
    assert [request.scope for request in told.reader.feed(b"\n" + line())] == ["s"]
    assert set(told.kinds) == {"a line is too long for a timer request", "a line is no timer request"}


@pytest.mark.parametrize("stub", [b"garbage", b'{"version": 1, "pid": 7', b'{"a": {"b": "', b"x" * 100_000])
def test_half_a_line_does_not_spoil_the_next_request(stub: bytes) -> None:
    """Otherwise a release would be lost, and a worker that has done nothing wrong would be ended."""
    told = Told()
    for scope in ('{"', "{"):
        assert told.reader.feed(stub + line(scope=scope, at=-1)) == [Request(7, scope, None, 9)]
    assert told.kinds


requests = st.builds(
    Request,
    st.integers(1, 1 << 22),
    st.text(max_size=60),
    st.none() | st.floats(min_value=0, allow_nan=False),
    st.sampled_from([0, -1, 6, 9, 15]),
)
noise = st.one_of(
    st.binary(max_size=300), st.builds(lambda n: b"y" * n, st.integers(0, 30_000)), st.just(line()[:-1])
).map(lambda data: data.replace(b"\n", b""))


@given(st.lists(requests | noise), st.lists(st.integers(0, 40_000), max_size=20))
def test_every_request_is_found_whatever_surrounds_it(parts: list[Request | bytes], cuts: list[int]) -> None:
    """What strangers write has no line end here, so that it comes before a request on the same line."""
    written = b"".join(
        part if isinstance(part, bytes) else line(part.pid, part.scope, -1 if part.at is None else part.at, part.signal)
        for part in parts
    )
    told, found, start = Told(), [], 0
    for end in (*sorted(cut for cut in cuts if cut < len(written)), len(written)):
        found += told.reader.feed(written[start:end])
        start = end
        assert len(told.reader._unread) <= 65_536
    assert found == [part for part in parts if isinstance(part, Request)]


def test_a_scope_can_be_written_as_utf8() -> None:
    """It goes into the journal and the report. JSON can hold a lone surrogate, and UTF-8 cannot."""
    (request,) = Told().reader.feed(line(scope="step \ud800 é"))
    assert request.scope == "step \\ud800 é"


# ---- clients ----


def test_a_descendant_of_a_worker_counts_for_the_worker() -> None:
    """A data loader is a child of the worker. It may have a process group of its own."""
    script = "import os, subprocess, sys; os.setsid(); subprocess.run(['sleep', '1000'])"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as worker:
        try:
            (sleep,) = until(lambda: _children(worker.pid))
            assert client(worker.pid, {worker.pid}) == TimerProcess(worker.pid, worker.pid, 0)
            inner = client(sleep, {worker.pid})
            assert inner is not None
            assert (inner.pid, inner.worker, inner.is_there) == (sleep, worker.pid, True)
            own = client(sleep, {os.getpid()})
            assert own is not None
            assert own.worker == os.getpid()
            foreign = client(os.getpid(), {worker.pid})
            assert foreign is not None
            assert foreign.worker == 0
        finally:
            os.killpg(worker.pid, 9)
    until(lambda: client(sleep, {worker.pid}) is None)
    assert not inner.is_there


def test_an_orphan_counts_for_the_worker_whose_group_it_has(tmp_path: os.PathLike[str]) -> None:
    """Its parent has ended, so only the process group tells whose it is."""
    pids = os.path.join(tmp_path, "pids")
    script = f"(sleep 1000 & echo $! > {pids}); exec sleep 1000"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as worker:
        try:
            (orphan,) = read_pids(pids, 1)
            found = client(orphan, {worker.pid})
            assert found is not None
            assert found.worker == worker.pid
        finally:
            os.killpg(worker.pid, 9)


def test_another_process_with_the_pid_is_another_client() -> None:
    """The pid of a data loader may be given to another process, which must not pay for the timer."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        found = client(process.pid, {os.getpid()})
        assert found is not None
        assert found.is_there
        assert not TimerProcess(process.pid, os.getpid(), found.started - 1).is_there
        process.kill()


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


# ---- the timers that are set ----


def timer(scope: str, at: float, pid: int = 7, worker: int = 7) -> WorkerTimer:
    return WorkerTimer(TimerProcess(pid, worker, 0), scope, at, 9, 0.0)


def timers() -> Timers:
    return Timers(lambda kind, what: None)


def test_timers_expire_in_the_order_of_time() -> None:
    """The first timer that ran out is the reason that the operator reads."""
    found = timers()
    for scope, at in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("late", 9.0), ("never", inf)):
        found.add(timer(scope, at))
    assert found.wakes_at == 1.0
    assert found.expired(0.5) == []
    assert [each.scope for each in found.expired(3.0)] == ["a", "b", "c"]
    assert found.wakes_at == 9.0
    assert [each.scope for each in found.expired(1e9)] == ["late"]
    assert found.wakes_at == inf


def test_a_release_and_a_later_acquire_replace() -> None:
    """A loop sets the same timer again in each step. A worker that goes on must not be ended."""
    found = timers()
    found.add(timer("a", 1.0))
    found.add(timer("a", 5.0))
    found.add(timer("b", 2.0))
    found.release(7, "b")
    found.release(7, "unknown")
    assert found.expired(4.0) == []
    assert [each.scope for each in found.expired(5.0)] == ["a"]


def test_a_client_that_has_ended_has_no_timers() -> None:
    """A data loader that has ended in the middle of its work must not cost its worker."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        holder = client(process.pid, {os.getpid()})
        process.kill()
    assert holder is not None
    found = timers()
    found.add(WorkerTimer(holder, "a", 1.0, 9, 0.0))
    found.add(timer("b", 1.0))
    assert [each.scope for each in found.expired(1.0)] == ["b"]


def test_the_timers_of_one_worker_are_forgotten_together() -> None:
    """A worker that is being ended is no news a second time. Timers of a round end with it."""
    found = timers()
    found.add(timer("a", 1.0))
    found.add(timer("a", 1.0, pid=8))
    found.add(timer("b", 1.0, pid=9, worker=9))
    found.drop(7)
    assert [each.scope for each in found.expired(1.0)] == ["b"]
    found.add(timer("a", 1.0))
    found.clear()
    assert found.expired(1.0) == []


def test_a_flood_of_timers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that never releases must not fill the memory of the keeper."""
    monkeypatch.setattr("reknit.adapters.keeper.watchdog.worker_timers.MOST_TIMERS", 3)
    kinds: list[str] = []
    found = Timers(lambda kind, what: kinds.append(kind))
    for scope in "abcda":
        found.add(timer(scope, 1.0))
    assert [each.scope for each in found.expired(1.0)] == ["a", "b", "c"]
    assert kinds == ["more than 3 timers are set"]
