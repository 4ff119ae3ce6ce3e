"""torch's flight recorder, read from outside of a hung worker."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reknit.adapters.keeper.common.environment import SOCKET
from reknit.adapters.keeper.watchdog import flight_recorder
from reknit.adapters.keeper.watchdog.flight_recorder import HANDLERS, SIZES, RecorderSockets, last_collective
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.job.workers import Collective
from tests.support.command import Run
from tests.support.waiting import PATIENCE_S, descriptors, until

HUNG = 124
ON = {SIZES[0]: "100"}
SKIPS = """
    import os, time
    import torch, torch.distributed as dist
    from torch.distributed.elastic.control_plane import worker_main
    from reknit import progress

    def in_turn(tensor, step):
        if os.environ["RANK"] != "1" or step != 2:
            dist.all_reduce(tensor)

    @worker_main()
    def main():
        dist.init_process_group("gloo")
        for step in range(4):
            progress(step)
            in_turn(torch.ones(3), step)
        time.sleep(1e6)

    main()
"""


@pytest.mark.slow
def test_the_report_says_in_which_collective_each_rank_is(tmp_path: Path, short: str) -> None:
    """Rank 1 has left one out, so it has entered one fewer. Its stack alone would not tell. Nothing is left of the
    sockets."""
    argv = ("--nproc-per-node=3", "--hang-after=3", "--start-timeout=120", "w.py")
    with Run(tmp_path, *argv, script=SKIPS, env={**ON, "TMPDIR": short}) as job:
        assert job.end() == HUNG
    assert "  rank 1: main (w.py:17), not in a collective, after collective 3 (all_reduce)" in job.err, job.err
    assert "  ranks 0,2: all_reduce (w.py:9), in collective 4" in job.err, job.err
    assert not os.listdir(short)


def test_a_script_that_does_not_serve_its_record_is_told_how(tmp_path: Path, short: str) -> None:
    """Half of what it needs has no effect. Said once for all workers."""
    argv = ("--nproc-per-node=2", "--hang-after=1", "--no-python", "sleep", "1000000")
    with Run(tmp_path, *argv, env={**ON, "TMPDIR": short}) as job:
        assert job.end() == HUNG
    assert job.err.count("no flight record of ranks 0-1: the worker serves none") == 1, job.err


@pytest.mark.slow
def test_a_record_that_is_missing_accuses_nobody(tmp_path: Path, short: str) -> None:
    """Rank 3 has left out a collective, and stands in the next one. Rank 1 serves no record, and waits where ranks 0
    and 2 wait."""
    serves = 'main() if os.environ["RANK"] != "1" else main.__wrapped__()'
    script = SKIPS.replace('!= "1" or step', '!= "3" or step').replace("\n    main()\n", f"\n    {serves}\n")
    script = script.replace("time.sleep(1e6)", "dist.barrier()").replace("range(4)", "range(3)")
    argv = ("--nproc-per-node=4", "--hang-after=3", "--start-timeout=120", "w.py")
    with Run(tmp_path, *argv, script=script, env={**ON, "TMPDIR": short}) as job:
        assert job.end() == HUNG
    assert "probably rank 3 on node N holds up the others" in "\n".join(job.said), job.err
    assert job.err.count("no flight record of rank 1: the worker serves none") == 1, job.err


@pytest.mark.slow
def test_a_socket_that_cannot_be_made_is_told_of(tmp_path: Path, short: str) -> None:
    """As in a container that the worker has started: the folder of the socket is not there."""
    script = SKIPS.replace(
        "    main()\n", "    os.rename(os.environ['TMPDIR'], os.environ['TMPDIR'] + '2')\n    main()\n"
    )
    with Run(tmp_path, "--hang-after=60", "w.py", script=script, env={**ON, "TMPDIR": short}) as job:
        assert job.end() == 1
        os.rename(short + "2", short)
    assert any("could not make the socket for its flight recorder" in line for line in job.said)


def entry(number: int, **other: object) -> dict[str, object]:
    """A collective as torch writes it, but for fields that nobody reads."""
    return {
        "collective_seq_id": number,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "retired": False,
        "state": "scheduled",
        "time_created_ns": 1000 + number,
        **other,
    }


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], None),
        ([entry(1, is_p2p=True)], None),
        ([entry(3, retired=True), entry(4)], Collective("all_reduce", 4)),
        ([entry(3), entry(4, retired=True)], Collective("all_reduce", 3)),
        ([entry(3, state="completed"), entry(4, state="completed")], Collective("all_reduce", 4, is_over=True)),
        ([entry(3, retired=True, process_group=["2", "tp"])], Collective("all_reduce", 3, "tp", is_over=True)),
        ([entry(1, profiling_name="nccl:all_gather")], Collective("all_gather", 1)),
        ([{"collective_seq_id": 1}], None),
        ([entry(1, process_group=[])], None),
        ([entry(1, profiling_name="a\nb")], None),
        ([entry(-1)], None),
        ([entry(1 << 63)], None),
        ([entry(1, collective_seq_id=float("inf"))], None),
        ([entry(1, process_group=["1", "g" * 1000])], Collective("all_reduce", 1, "g" * 100)),
    ],
)
def test_the_last_collective(entries: list[object], found: Collective | None) -> None:
    """One that is not over counts more than a later one that is: the worker waits for it."""
    assert last_collective(json.dumps({"entries": entries}).encode()) == found


def test_the_last_of_two_backends_counts() -> None:
    """A job on GPUs may have done one barrier with gloo, long ago."""
    gloo = entry(1, profiling_name="gloo:barrier", retired=True)
    nccl = entry(813, profiling_name="nccl:all_reduce")
    records = [json.dumps({"entries": [each]}).encode() for each in (gloo, nccl)]
    assert last_collective(*records) == last_collective(*records[::-1]) == Collective("all_reduce", 813)


@pytest.mark.parametrize("record", [b"", b"[]", b"{}", b'{"entries": 3}', b'{"entries": [3]}', b"\xff", b"[" * 100_000])
def test_what_is_no_record_tells_nothing(record: bytes) -> None:
    """The worker can write anything."""
    assert last_collective(record) is None
    assert last_collective(record, json.dumps({"entries": [entry(7)]}).encode()) == Collective("all_reduce", 7)


@pytest.fixture
def short() -> Iterator[str]:
    """A folder whose path is short enough for a socket in it. Those that pytest makes are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


@pytest.fixture
def sockets(short: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecorderSockets]:
    monkeypatch.setenv("TMPDIR", short)
    made = RecorderSockets()
    yield made
    made.forget()
    made.close()
    assert not os.listdir(short)


@contextmanager
def serving(path: str) -> Iterator[socket.socket]:
    """A worker's socket, at which the test answers."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        listening.settimeout(PATIENCE_S)
        yield listening


def test_each_worker_of_each_round_has_a_path_of_its_own(sockets: RecorderSockets) -> None:
    """torch fails if there is a file. A path that the user has set is not changed. Without a recorder there is none."""
    assert sockets.variables(0, {**ON, SOCKET: "/own"}) == {}
    assert sockets.variables(0, {}) == sockets.variables(0, {SIZES[0]: "0", SIZES[1]: ""}) == {}
    first = [sockets.variables(rank, ON)[SOCKET] for rank in (0, 1)]
    sockets.forget()
    assert len({*first, sockets.variables(0, ON)[SOCKET]}) == 3


def test_a_path_that_is_too_long_for_a_socket_is_left_out(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then torch makes no socket, and the worker runs as always."""
    long = Path(short, "l" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    made = RecorderSockets()
    assert made.variables(0, ON) == {}
    made.close()
    assert not [*long.iterdir()]


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ((b"", b""), None),
        ((b"garbage", b"HTTP/1.1 404 Not Found\r\n\r\nno such handler"), None),
        ((b"HTTP/1.1 404 Not Found\r\n\r\n", b"record"), Collective("all_reduce", 7)),
        ((b"record", b"HTTP/1.1 404 Not Found\r\n\r\n"), Collective("all_reduce", 7)),
    ],
)
def test_the_answer_that_knows_of_a_collective_counts(
    sockets: RecorderSockets, clock: SystemClock, answers: tuple[bytes, ...], found: Collective | None
) -> None:
    """The record of gloo is always there, and mostly empty on a GPU."""
    record = b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps({"entries": [entry(7)]}).encode()
    before = descriptors()
    with serving(sockets.variables(0, ON)[SOCKET]) as server:
        asked = sockets.ask(0, clock)
        for handler, answer in zip(HANDLERS, answers, strict=True):
            connection, _ = server.accept()
            with connection:
                assert connection.recv(1000).startswith(f"POST /handler/{handler} ".encode())
                connection.sendall(record if answer == b"record" else answer)
    for one in asked:
        until(one.is_over)
    assert last_collective(*(one.record for one in asked)) == found
    assert all(one.is_whole for one in asked)
    assert descriptors() == before


def test_an_answer_that_is_too_long_is_left_out(
    sockets: RecorderSockets, clock: SystemClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper would do nothing else while it parses a record of gigabytes."""
    monkeypatch.setattr(flight_recorder, "_MOST_BYTES", 100)
    record = b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps({"entries": [entry(7)]}).encode()
    with serving(sockets.variables(0, ON)[SOCKET]) as server:
        asked, other = sockets.ask(0, clock)
        connection, _ = server.accept()
        with connection:
            connection.sendall(record)
            until(asked.is_over)
    other.close()
    assert (asked.record, asked.is_whole) == (b"", False)


def test_a_worker_that_serves_nothing(sockets: RecorderSockets, clock: SystemClock) -> None:
    """The rule: few scripts ask torch for the socket. A socket that a killed process has left is no server either."""
    before = descriptors()
    assert sockets.ask(0, clock) == []
    path = sockets.variables(0, ON)[SOCKET]
    assert sockets.ask(0, clock) == []
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    assert sockets.ask(0, clock) == []
    assert descriptors() == before


def test_a_worker_that_cannot_be_asked(
    sockets: RecorderSockets, clock: SystemClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is free. That is not the script's fault."""
    sockets.variables(0, ON)

    def refuse(*how: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(flight_recorder.socket, "socket", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        sockets.ask(0, clock)


def test_a_worker_that_does_not_answer_holds_up_nobody(sockets: RecorderSockets, clock: SystemClock) -> None:
    """A stopped process takes the connection, and says nothing."""
    before = descriptors()
    with serving(sockets.variables(0, ON)[SOCKET]):
        asked = sockets.ask(0, clock)
        assert [one.is_over() for one in asked] == [False, False]
        for one in asked:
            one.close()
        assert [(one.is_over(), one.is_whole, one.record) for one in asked] == [(True, False, b"")] * 2
    assert descriptors() == before
