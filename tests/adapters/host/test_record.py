"""What an agent writes into the file of its lock: real files and real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reknit.adapters.host import place as hostplace
from reknit.adapters.host.record import (
    LONGEST_NOTE,
    HostRecord,
    ProcessId,
    children_of,
    identified,
    is_alive,
    read,
    shown,
)
from reknit.adapters.host.record import write as write_record
from tests.support.waiting import PATIENCE_S, until

RECORD = HostRecord(ProcessId(1, 2), (ProcessId(3, 4), ProcessId(5, 6)), "ä note\n")


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


def test_what_is_written_is_read(fd: int) -> None:
    """A later record takes the place of an earlier one, longer or shorter."""
    assert read(fd) is None
    long = HostRecord(ProcessId(1, 2), tuple(ProcessId(pid, pid) for pid in range(100)))
    for record in (RECORD, long, RECORD, HostRecord(ProcessId(1, 2))):
        write_record(fd, record)
        assert read(fd) == record


def test_a_torn_record_is_none(fd: int) -> None:
    """No part of a record may be believed: its processes are killed."""
    write_record(fd, RECORD)
    whole = os.pread(fd, 1 << 16, 0)
    longer = b"00000000 [" + b"9" * 300
    for length in range(len(whole) - 1):
        os.ftruncate(fd, length)
        assert read(fd) is None
        os.pwrite(fd, longer, 0)
        os.pwrite(fd, whole[:length], 0)  # in the place of a longer one
        assert read(fd) is None
        os.pwrite(fd, whole[:length] + bytes([whole[length] ^ 1]) + whole[length + 1 :], 0)
        assert read(fd) is None
        os.ftruncate(fd, 0)
    for text in (b"", b"\0" * 50, b"x y\n", b"8 \n", b"\xff" * 9):
        os.pwrite(fd, text, 0)
        assert read(fd) is None


def test_a_record_is_bounded(fd: int) -> None:
    """A node may have many processes. The latest count."""
    processes = tuple(ProcessId(4_000_000 + number, 10**12) for number in range(5000))
    write_record(fd, HostRecord(ProcessId(1, 2), processes, LONGEST_NOTE * "ä"))
    assert os.fstat(fd).st_size < 40_000
    found = read(fd)
    assert found is not None
    assert found.processes == processes[-1000:]


@pytest.mark.parametrize("what", ["boot", "pid_namespace"])
def test_another_boot_or_container_knows_none_of_the_processes(
    fd: int, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """There the same pids are other processes. The note counts all the same."""
    write_record(fd, RECORD)
    monkeypatch.setattr(hostplace, what, lambda: "other")
    assert read(fd) == HostRecord(None, (), RECORD.note)


def test_a_full_disk_is_no_error(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent can do without a record."""
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    write_record(fd, RECORD)
    assert read(fd) is None


def test_a_process_is_named_by_its_start_as_well() -> None:
    """The number alone may be another process's by now."""
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", code, "a\nb", "x" * 300]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        found = identified(process.pid)
        assert found is not None
        assert identified(process.pid) == found
        assert is_alive(found)
        assert not is_alive(ProcessId(found.pid, found.start + 1))
        text = shown(found)
        assert text.startswith(f"pid {process.pid}, since 20")
        assert text.isprintable()
        assert text.endswith("…")
        process.kill()
        until(lambda: not is_alive(found))  # dead, and not reaped
        assert shown(found) == f"pid {process.pid}"
        process.wait(PATIENCE_S)
    assert identified(process.pid) is None


def test_only_children_of_the_keeper_are_named() -> None:
    """The pids of a keeper on another host say nothing of the processes here."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        me = os.getpid()
        assert children_of(me, [child.pid, os.getppid()]) == (identified(me), identified(child.pid))
        assert children_of(os.getppid(), [child.pid]) == ()
        child.send_signal(signal.SIGKILL)
