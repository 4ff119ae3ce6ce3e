"""One console for stdout and stderr: order, whole lines, and a console that nobody reads."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import threading
from pathlib import Path

import pytest

from reknit.adapters.keeper.output import relay
from reknit.adapters.keeper.output.streams import STDERR, STDOUT, Streams, StreamSettings
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.agent.worker_words import WorkersStopped
from tests.support.alone import ENV
from tests.support.processes import Make, drive, drive_exits, start, stop, stopped
from tests.support.streams import Console, finished, open_, spawn, streams_to
from tests.support.waiting import PATIENCE_S, descriptors, until

NUMBERED = """
import os
for i in range(3000):
    for fd, name in ((1, b"out"), (2, b"err")):
        os.write(fd, b"%s %s " % (os.environ["RANK"].encode(), name))
        os.write(fd, b"%d\\n" % i)
"""


def test_two_streams_of_two_ranks_into_one_file(make: Make, clock: SystemClock, tmp_path: Path) -> None:
    """`> log 2>&1`, which Slurm does by default: each rank's lines in the order in which it wrote them, and whole."""
    workers = make(script=NUMBERED)
    start(workers, 2)
    drive_exits(workers, clock, 2)
    workers.end_all()
    assert workers.flush(PATIENCE_S)
    lines = [line.split() for line in (tmp_path / "console").read_text().splitlines()]
    for rank in ("2", "3"):
        wanted = [[rank, name, str(i)] for i in range(3000) for name in ("out", "err")]
        assert [line for line in lines if line[0] == rank] == wanted
    assert len(lines) == 12_000


def test_two_terminals_are_one_where_the_console_is_one() -> None:
    """A progress bar on stderr and prints on stdout keep their order, both with colours, and know the size."""
    master, slave = pty.openpty()
    streams = Streams(StreamSettings(), stdout=slave, stderr=slave)
    worker = open_(streams)
    script = """
import os, signal
for fd in (1, 2, 1):
    os.write(fd, b"%d %r\\n" % (fd, os.isatty(fd)))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
os.write(1, b"ready\\n")
signal.sigwait([signal.SIGWINCH])
os.write(1, b"%d\\n" % os.get_terminal_size(1)[0])
"""
    pid = spawn(worker, script)
    seen = b""
    while b"ready\r\n" not in seen:
        seen += os.read(master, 4096)
    assert seen == b"1 True\r\n2 True\r\n1 True\r\nready\r\n"
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 123, 0, 0))
    assert streams.resized()
    os.kill(pid, signal.SIGWINCH)
    assert finished(pid) == 0
    assert streams.tail(worker, 1) == ("123",)
    streams.release(worker)
    assert not streams.resized(), "no terminal is left"
    assert streams.close(PATIENCE_S)
    os.close(master)
    os.close(slave)


def test_dev_tty_and_the_terminal_itself_are_one() -> None:
    """Shells and wrappers open /dev/tty for one of the two. Seen through its two names it is still one terminal."""
    script = """
import os
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.keeper.output.streams import Streams, StreamSettings
for other in (os.open("/dev/tty", os.O_RDWR), os.open("/dev/null", os.O_RDWR)):
    worker = Streams(StreamSettings(), stdout=other, stderr=2).open(local_rank=0, rank=0, role="r", folder="")
    print(worker.ends.get(1) == worker.ends[2])
print("END")
"""
    pid, master = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", script], ENV)
    seen = b""
    while b"END\r\n" not in seen:
        seen += os.read(master, 4096)
    assert seen == b"True\r\nFalse\r\nEND\r\n"
    assert finished(pid) == 0
    os.close(master)


def test_dev_null_is_inherited() -> None:
    """Nobody reads the order there. Stderr is read all the same, for its last lines."""
    null = os.open(os.devnull, os.O_WRONLY)
    streams = Streams(StreamSettings(), stdout=null, stderr=null)
    worker = open_(streams)
    assert os.path.samestat(os.fstat(worker.ends[STDOUT]), os.stat(os.devnull))
    assert finished(spawn(worker, "import os; os.write(1, b'o'); os.write(2, b'why\\n')")) == 0
    assert streams.tail(worker, 5) == ("why",)
    streams.release(worker)
    assert streams.close(PATIENCE_S)
    os.close(null)


def test_the_end_of_both_streams_is_remembered(err: Console) -> None:
    """In a merged stream the last lines are those of both, in the order in which they were written."""
    streams = streams_to(err, err)
    worker = open_(streams)
    assert set(worker.ends) == {STDOUT, STDERR}
    assert (
        finished(spawn(worker, "import os; os.write(1, b'step 7\\n'); os.write(2, b'why\\n'); os.write(1, b'x')")) == 0
    )
    assert streams.tail(worker, 5) == ("step 7", "why", "x")
    streams.say("a word of ours")
    streams.release(worker)
    assert streams.close(PATIENCE_S)
    assert err.read_until(b"ours\n") == b"step 7\nwhy\nx\na word of ours\n"


def test_a_partial_line_is_shown_soon(err: Console) -> None:
    """A prompt or a bar has no line end and is meant to be seen. It goes on where it stopped."""
    streams = streams_to(err, err)
    worker = open_(streams)
    go_read, go_write = os.pipe()
    os.set_inheritable(go_read, True)
    pid = spawn(worker, f"import os; os.write(1, b'loading ...'); os.read({go_read}, 1); os.write(1, b' done\\n')")
    assert err.read_until(b"...") == b"loading ..."
    os.write(go_write, b"!")
    assert finished(pid) == 0
    assert err.read_until(b"\n") == b"loading ... done\n"
    streams.release(worker)
    assert streams.close(PATIENCE_S)
    os.close(go_read)
    os.close(go_write)


def test_a_line_in_pieces_stays_whole_in_a_pipe(err: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unbuffered `print` writes pieces, and another worker writes meanwhile. Nobody waits for a prompt there."""
    monkeypatch.setattr(relay, "PROMPT_S", 0.0)
    monkeypatch.setattr(relay, "PARTIAL_S", 3600.0)
    streams = streams_to(err, err)
    slow, quick = open_(streams), open_(streams)
    go_read, go_write = os.pipe()
    os.set_inheritable(go_read, True)
    begun_read, begun_write = os.pipe()
    os.set_inheritable(begun_write, True)
    script = (
        f"import os; os.write(1, b'a '); os.write({begun_write}, b'!'); os.read({go_read}, 1); os.write(1, b'b\\n')"
    )
    pid = spawn(slow, script)
    assert os.read(begun_read, 1) == b"!"
    assert finished(spawn(quick, "import os; os.write(1, b'quick\\n')")) == 0
    assert err.read_until(b"\n") == b"quick\n"
    os.write(go_write, b"!")
    assert finished(pid) == 0
    assert err.read_until(b"b\n") == b"quick\na b\n"
    for worker in (slow, quick):
        streams.release(worker)
    assert streams.close(PATIENCE_S)
    for fd in (go_read, go_write, begun_read, begun_write):
        os.close(fd)


def test_dev_stdout_can_be_opened(err: Console) -> None:
    """Scripts write to /dev/stdout, which a socket would refuse."""
    streams = streams_to(err, err)
    worker = open_(streams)
    assert finished(spawn(worker, "open('/dev/stdout', 'w').write('o'); open('/dev/stderr', 'w').write('e')")) == 0
    streams.release(worker)
    assert streams.close(PATIENCE_S)
    assert err.read_until(b"oe") == b"oe"


def test_two_tees_to_one_console_stay_whole(tmp_path: Path, err: Console) -> None:
    """Two files need two pipes. On the console their lines are whole, each with its prefix."""
    streams = streams_to(err, err, tee=STDOUT + STDERR)
    worker = open_(streams, tmp_path)
    script = "import os\nfor i in range(500):\n for fd in (1, 2): os.write(fd, b'%d ' % fd); os.write(fd, b'x\\n')"
    pid = spawn(worker, script)
    assert finished(pid) == 0
    streams.release(worker)
    streams.say("END")
    seen = err.read_until(b"END\n")
    assert sorted(set(seen.splitlines())) == [b"END", b"[trainer0]:1 x", b"[trainer0]:2 x"]
    assert (tmp_path / "stdout.log").read_bytes() == b"1 x\n" * 500
    assert (tmp_path / "stderr.log").read_bytes() == b"2 x\n" * 500
    assert streams.close(PATIENCE_S)


def test_close_does_not_wait_for_a_console_that_nobody_reads(err: Console) -> None:
    """Who was asked to end ends. What could not be written is dropped."""
    threads, before = threading.active_count(), descriptors()
    streams = streams_to(err, err)
    worker = open_(streams)
    writer = spawn(worker, "import os\nwhile True: os.write(1, b'%0999d\\n' % 7)")
    until(streams._consoles[STDERR].is_full, "a full queue")
    streams.say("this is said at once")
    assert not streams.flush(0.01)
    os.kill(writer, signal.SIGKILL)
    assert finished(writer) == -signal.SIGKILL
    streams.release(worker)
    assert not streams.close(0.01)
    until(lambda: descriptors() == before, "the end of all descriptors")
    until(lambda: threading.active_count() == threads, "the end of all threads")


def test_a_console_that_nobody_reads_keeps_no_worker_alive(make: Make, clock: SystemClock, err: Console) -> None:
    """An unread terminal once kept workers alive beside the next round, and the process that should have ended them."""
    threads = threading.active_count()
    script = "import os\nwhile True: os.write(1, b'%0999d\\n' % 7)"
    workers = make(script=script, console=(err.fd, err.fd))
    start(workers, 2)
    until(workers._streams._consoles[STDERR].is_full, "a full queue")
    workers.say("round 0 ends")
    assert not workers.flush(0.01)
    stop(workers, grace_s=PATIENCE_S)
    assert stopped(drive(workers, clock, WorkersStopped)).round == 0
    start(workers, 1, round_=1)
    workers.end_all()
    assert not workers.flush(0.01), "words wait for whoever may wait longer"
    assert not workers._streams.close(0.01)
    until(lambda: threading.active_count() == threads, "the end of all threads")
