"""`reknit.elastic.timer`: the format of torch, and a server that ends the worker and never itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reknit.adapters.host.children import stat_of
from reknit.elastic import timer
from reknit.elastic.timer import api, file_based_local_timer
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[timer.FileTimerServer, list[str]]]:
    """A server with its pipe, and the names of its events."""
    told: list[str] = []
    found = timer.FileTimerServer(
        str(tmp_path / "pipe"), "job", max_interval=0.1, log_event=lambda name, request: told.append(name)
    )
    found.start()
    yield found, told
    found.stop()
    assert not (tmp_path / "pipe").exists()


def test_a_request_is_the_line_of_torch() -> None:
    """torch's client and this server, and the other way round, meet in one job."""
    from torch.distributed.elastic.timer import FileTimerRequest

    ours = timer.FileTimerRequest(12, "scope", 1.5, 9)
    assert ours.to_json() == FileTimerRequest(12, "scope", 1.5, 9).to_json()
    assert ours == timer.FileTimerRequest(12, "scope", 1.5, 9) != timer.FileTimerRequest(12, "scope", 1.5, 15)


WORKER = """
import sys, time
from torch.distributed.elastic import timer as theirs
from reknit.elastic import timer as ours
timer = theirs if sys.argv[2] == "torch" else ours
timer.configure(timer.FileTimerClient(sys.argv[1]))
with timer.expires(after=60):
    pass
with timer.expires(after=0.2):
    sys.stdin.read()
"""


@pytest.mark.parametrize("client", ["torch", pytest.param("reknit", marks=pytest.mark.slow)])
def test_a_worker_whose_timer_expires_is_killed(
    server: tuple[timer.FileTimerServer, list[str]], client: str, tmp_path: Path
) -> None:
    """A timer that was released kills nobody. The server's own process lives on: torch's would be killed."""
    argv = [sys.executable, "-c", WORKER, str(tmp_path / "pipe"), client]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as worker:
        assert worker.wait(PATIENCE_S) == -signal.SIGKILL
    assert server[1][:2] == ["watchdog started", "timer expired"]


def test_what_is_no_request_is_left_out(server: tuple[timer.FileTimerServer, list[str]], tmp_path: Path) -> None:
    """The pipe is open to every process of the user: garbage must not end the watch."""
    with open(tmp_path / "pipe", "wb", buffering=0) as pipe:
        pipe.write(b"garbage\n[]\n{}\n" + b'{"pid": "x", "scope_id": 1, "expiration_time": 2, "signal": 3}\n')
        pipe.write(b"y" * 3 * 4096)
        pipe.write(b"\n")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        request = timer.FileTimerRequest(worker.pid, "s", time.time(), signal.SIGTERM)
        timer.FileTimerClient(str(tmp_path / "pipe"))._send_request(request)
        assert worker.wait(PATIENCE_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    "line",
    [
        b'{"pid": -1, "scope_id": "s", "expiration_time": 1, "signal": 9}',
        b'{"pid": 0, "scope_id": "s", "expiration_time": 1, "signal": 9}',
        b'{"pid": 5, "scope_id": "s", "expiration_time": 1, "signal": 1000}',
        b'{"pid": 5, "scope_id": "s", "expiration_time": 1' + b"0" * 400 + b', "signal": 9}',
        b"[" * 2000,
    ],
)
def test_a_line_that_would_do_harm_is_refused(line: bytes) -> None:
    """The pid -1 stands for every process of this user, and 0 for the group of the server. The other lines would raise
    an exception in each look."""
    assert file_based_local_timer._request(line) is None


def test_without_a_server_a_client_says_so(tmp_path: Path) -> None:
    """A worker must not hang on a pipe that nobody reads."""
    with pytest.raises(BrokenPipeError, match="no timer server"):
        timer.FileTimerClient(str(tmp_path / "none")).acquire("s", time.time() + 1)


def test_a_client_waits_for_room_in_the_pipe(tmp_path: Path) -> None:
    """A worker that sets timers faster than they are read must not fail because of it."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    filler = b" " * 4095 + b"\n"
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(reader, filler)
    client, told = timer.FileTimerClient(str(tmp_path / "pipe")), list[object]()

    def acquire() -> None:
        try:
            told.append(client.acquire("scope", time.time() + 60))
        except OSError as error:
            told.append(error)

    thread = threading.Thread(target=acquire)
    thread.start()
    until(lambda: told or is_asleep(thread), "the client to fail or to wait")
    found = drained(reader)
    thread.join()
    assert told == [None]
    assert b"scope" in found + drained(reader)
    os.close(reader)


def is_asleep(thread: threading.Thread) -> bool:
    """The thread waits in a call of the kernel."""
    return stat_of(f"{os.getpid()}/task/{thread.native_id}")[0] == b"S"


def drained(reader: int) -> bytes:
    """What is in the pipe now."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(reader, 1 << 16):
            found += data
    return found


def test_a_client_of_a_server_that_hangs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker must not wait for ever."""
    monkeypatch.setattr(file_based_local_timer, "ROOM_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(reader, b" " * 4096)
    with pytest.raises(BrokenPipeError, match=r"does not read .*pipe"):
        timer.FileTimerClient(str(tmp_path / "pipe")).acquire("scope", time.time() + 60)
    os.close(reader)


def test_expires_needs_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names its caller as the scope, and releases the timer even after an exception."""
    monkeypatch.setattr(api, "_timer_client", None)
    with pytest.raises(RuntimeError, match=r"timer\.configure"), timer.expires(after=1):
        pass

    class Kept(timer.TimerClient):
        def __init__(self) -> None:
            self.calls: list[tuple[str, str]] = []

        def acquire(self, scope_id: str, expiration_time: float) -> None:
            self.calls.append(("acquire", scope_id))

        def release(self, scope_id: str) -> None:
            self.calls.append(("release", scope_id))

    client = Kept()
    with pytest.raises(ZeroDivisionError), timer.expires(after=1, client=client):
        raise ZeroDivisionError
    (first, scope), (second, same) = client.calls
    assert (first, second) == ("acquire", "release")
    assert scope == same
    assert scope.startswith(__file__)


class Staff(timer.TimerServer):
    """A server over a list: which workers it has ended."""

    def __init__(self, error: Exception | None = None) -> None:
        """`error`: raised when a worker is to be ended."""
        self.error = error
        self.timers: list[timer.TimerRequest] = []
        self.ended: list[int] = []
        self.looked = threading.Event()
        super().__init__(Requests(), max_interval=0.01)

    def register_timers(self, timer_requests: list[timer.TimerRequest]) -> None:
        self.timers += timer_requests

    def clear_timers(self, worker_ids: set[int]) -> None:
        self.timers = [request for request in self.timers if request.worker_id not in worker_ids]
        if self.ended:
            self.looked.set()

    def get_expired_timers(self, deadline: float) -> dict[int, list[timer.TimerRequest]]:
        return {r.worker_id: [r] for r in self.timers if r.expiration_time <= deadline}

    def _reap_worker(self, worker_id: int) -> bool:
        self.ended.append(worker_id)
        if self.error is not None:
            raise self.error
        return True


class Requests(timer.RequestQueue):
    """One request, and then none."""

    def __init__(self) -> None:
        self.left = [timer.TimerRequest(5, "s", 0)]

    def size(self) -> int:
        return len(self.left)

    def get(self, size: int, timeout: float) -> list[timer.TimerRequest]:
        found, self.left = self.left, []
        if not found:
            threading.Event().wait(timeout)
        return found


@pytest.mark.parametrize("error", [None, ProcessLookupError("it is gone")])
def test_the_base_of_all_servers(error: Exception | None) -> None:
    """Programs write servers of their own: the base looks, ends and clears. As with torch, a worker whose end raises an
    error counts as ended: it would be asked for at every look."""
    server = Staff(error)
    server.start()
    assert server.looked.wait(PATIENCE_S)
    server.stop()
    assert (server.ended, server.timers) == ([5], [])


def test_the_clients_of_torch_that_need_torch() -> None:
    """They are torch's own classes, imported when they are asked for."""
    from torch.distributed.elastic.timer import LocalTimerClient

    assert timer.LocalTimerClient is LocalTimerClient
    assert json.loads(timer.FileTimerRequest(os.getpid(), "s", -1).to_json())["signal"] == 0
