"""Where workers' output goes: with real processes, pipes and terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from reknit.adapters.keeper.output.console import PLAIN
from reknit.adapters.keeper.output.streams import STDERR, STDOUT, Streams, StreamSettings, last_lines
from tests.support.streams import Console, finished, open_, spawn, streams_to
from tests.support.waiting import PATIENCE_S, descriptors, until


def test_by_default_both_streams_pass_verbatim(out: Console, err: Console) -> None:
    """At once, unchanged, and the end of stderr is remembered."""
    streams = streams_to(out, err)
    worker = open_(streams)
    assert finished(spawn(worker, "import os; os.write(1, b'o\\n'); os.write(2, b'a\\xff\\x00\\nb')")) == 0
    assert out.read_until(b"o\n") == b"o\n"
    assert streams.tail(worker, 5) == ("a\\xff\x00", "b")
    streams.release(worker)
    assert streams.flush(PATIENCE_S)
    assert err.read_until(b"b") == b"a\xff\x00\nb"


def test_a_worker_that_says_nothing_on_stderr_is_known_by_its_stdout(out: Console, err: Console) -> None:
    """For example one that was killed for its memory, and shows its progress on stdout."""
    streams = streams_to(out, err)
    worker = open_(streams)
    assert finished(spawn(worker, "import os; os.write(1, b'step 1\\nstep 2\\n')")) == 0
    assert streams.tail(worker, 1) == ("step 2",)
    streams.release(worker)


def test_lines_stay_whole_if_stdout_and_stderr_go_to_two_places(out: Console, err: Console) -> None:
    """As under `sbatch -o -e`. Two workers write one line each, in two parts."""
    streams = streams_to(out, err)
    workers = [open_(streams, local_rank=i) for i in range(2)]
    script = "import os; os.write(1, b'o'); os.write(2, b'e'); os.write(1, b'o\\n'); os.write(2, b'e\\n')"
    assert [finished(spawn(worker, script)) for worker in workers] == [0, 0]
    for worker in workers:
        streams.release(worker)
    assert streams.flush(PATIENCE_S)
    assert out.read_until(b"oo\noo\n") == b"oo\n" * 2
    assert err.read_until(b"ee\nee\n") == b"ee\n" * 2


def test_inherited_stdout_that_is_descriptor_1_is_not_touched() -> None:
    """No descriptor, no copy."""
    streams = Streams(StreamSettings(output="inherit"))
    worker = open_(streams)
    assert STDOUT not in worker.ends
    worker.spawned()
    streams.release(worker)


def test_the_tail_is_complete_although_a_grandchild_holds_the_pipe(out: Console, err: Console) -> None:
    """A failure's last words must be there at its exit; end-of-file may be hours away."""
    streams = streams_to(out, err)
    worker = open_(streams)
    script = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
for i in range(3000):
    os.write(2, b"line %d\\n" % i)
print(child.pid)
"""
    assert finished(spawn(worker, script)) == 0
    assert streams.tail(worker, 2) == ("line 2998", "line 2999")
    seen = err.read_until(b"line 2999\n")
    assert seen == b"".join(b"line %d\n" % i for i in range(3000)), "and in order on the console"
    os.kill(int(out.read_until(b"\n")), 9)
    streams.release(worker)


def test_tail_is_bounded(out: Console, err: Console) -> None:
    """A worker that writes for weeks must not fill the agent's memory."""
    streams = streams_to(out, err)
    worker = open_(streams)
    reader = threading.Thread(target=err.read_until, args=(b"END",))
    reader.start()
    pid = spawn(worker, "import os\nfor _ in range(2000): os.write(2, b'x' * 999 + b'\\n')\nos.write(2, b'END')")
    assert finished(pid) == 0
    lines = streams.tail(worker, 10**6)
    assert lines[-1] == "END"
    assert sum(map(len, lines)) <= 16384
    assert set(map(len, lines[:-1])) == {999}, "a line cut at its beginning is left out"
    reader.join()
    streams.release(worker)


def test_a_worker_may_close_its_stderr(out: Console, err: Console) -> None:
    """Daemon-like libraries do. The relay must neither spin nor stop."""
    streams = streams_to(out, err)
    worker, other = open_(streams), open_(streams, local_rank=1)
    assert finished(spawn(worker, "import os; os.write(2, b'bye\\n'); os.close(2); os.close(1)")) == 0
    until(lambda: worker.taps[STDERR].source == -1)
    assert streams.tail(worker, 5) == ("bye",)
    assert finished(spawn(other, "import os; os.write(2, b'still here\\n')")) == 0
    assert err.read_until(b"still here\n") == b"bye\nstill here\n"
    for each in (worker, other):
        streams.release(each)
    assert streams.flush(PATIENCE_S)


def test_a_blocked_console_blocks_only_who_writes(out: Console, err: Console) -> None:
    """`reknit run … | less`: the agent must go on deciding, and nothing may be lost."""
    streams = streams_to(out, err)
    worker = open_(streams)
    writer = spawn(worker, "import os\nfor i in range(300000): os.write(2, b'%07d\\n' % i)")
    until(streams._consoles[STDERR].is_full, "the console and its queue to be full")
    tail = streams.tail(worker, 1)  # the main thread is not held up
    assert len(tail) == 1
    assert not streams.flush(0.01), "there is something to be written still"
    assert os.waitpid(writer, os.WNOHANG) == (0, 0), "but the worker waits"
    seen = err.read_until(b"0299999\n")
    assert finished(writer) == 0
    assert seen == b"".join(b"%07d\n" % i for i in range(300000))
    streams.release(worker)
    assert streams.flush(PATIENCE_S)


def test_a_console_that_is_gone_does_not_stop_the_workers(out: Console, err: Console) -> None:
    """`reknit run … 2>&1 | head`: training goes on when nobody reads any more."""
    streams = streams_to(out, err)
    worker = open_(streams)
    os.close(err.read_end)
    assert finished(spawn(worker, "import os\nfor i in range(20000): os.write(2, b'%07d\\n' % i)")) == 0
    assert streams.tail(worker, 1) == ("0019999",)
    streams.release(worker)
    assert streams.flush(PATIENCE_S)


def test_a_full_disk_is_told_on_stderr(err: Console) -> None:
    """Once. The workers go on, and nobody would know that a part of their output is missing."""
    full = os.open("/dev/full", os.O_WRONLY)
    streams = Streams(StreamSettings(lines=PLAIN), stdout=full, stderr=err.fd)
    worker = open_(streams)
    assert finished(spawn(worker, "import os\nfor i in range(3000): os.write(1, b'%0100d\\n' % i)")) == 0
    streams.release(worker)
    assert streams.flush(PATIENCE_S)
    streams.say("END")
    why = b"reknit: stdout cannot be written: No space left on device. Output of the workers is missing there\n"
    assert err.read_until(b"END\n") == why + b"END\n"
    assert streams.close(PATIENCE_S)
    os.close(full)


def test_a_non_blocking_console_loses_nothing(out: Console, err: Console) -> None:
    """Whoever shares the terminal may have made it non-blocking."""
    os.set_blocking(err.fd, False)
    streams = streams_to(out, err)
    worker = open_(streams)
    writer = spawn(worker, "import os\nfor i in range(50000): os.write(2, b'%07d\\n' % i)")
    assert err.read_until(b"0049999\n") == b"".join(b"%07d\n" % i for i in range(50000))
    assert finished(writer) == 0
    streams.release(worker)


def test_redirect_goes_to_the_file_only(tmp_path: Path, out: Console, err: Console) -> None:
    """`-r 3`: nothing on the console, and the tail comes from the file."""
    streams = streams_to(out, err, redirects=STDOUT + STDERR)
    worker = open_(streams, tmp_path)
    assert finished(spawn(worker, "import os; os.write(1, b'o'); os.write(2, b'a\\nb\\n')")) == 0
    assert (tmp_path / "stdout.log").read_bytes() == b"o"
    assert (tmp_path / "stderr.log").read_bytes() == b"a\nb\n"
    assert streams.tail(worker, 1) == ("b",)
    assert worker.files
    assert not worker.taps
    streams.release(worker)
    assert streams.flush(0.0), "no thread was needed"


def test_masks_by_local_rank(tmp_path: Path, out: Console, err: Console) -> None:
    """`-r 0:1`: a rank that is not named keeps the console."""
    streams = streams_to(out, err, redirects={0: STDOUT})
    zero, one = open_(streams, tmp_path), open_(streams, tmp_path, local_rank=1)
    assert set(zero.files) == {STDOUT}
    assert not one.files
    for worker in (zero, one):
        worker.spawned()
        streams.release(worker)


def test_tee_writes_the_file_verbatim_and_whole_prefixed_lines(tmp_path: Path, out: Console, err: Console) -> None:
    """`-t 3`: which worker said what, never half a line in another's, and the last one without its end."""
    streams = streams_to(out, err, tee=STDOUT + STDERR)
    worker = open_(streams, tmp_path)
    go_read, go_write = os.pipe()
    os.set_inheritable(go_read, True)
    script = f"import os; os.write(1, b'one\\ntw'); os.read({go_read}, 1); os.write(1, b'o\\nthr')"
    pid = spawn(worker, script + "; os.write(2, b'\\xff')")
    assert out.read_until(b"one\n") == b"[trainer0]:one\n"
    os.write(go_write, b"!")
    assert finished(pid) == 0
    streams.release(worker)
    assert streams.flush(PATIENCE_S)
    assert out.read_until(b"thr\n") == b"[trainer0]:one\n[trainer0]:two\n[trainer0]:thr\n"
    assert err.read_until(b"\n") == b"[trainer0]:\xff\n"
    assert (tmp_path / "stdout.log").read_bytes() == b"one\ntwo\nthr"
    assert (tmp_path / "stderr.log").read_bytes() == b"\xff"
    os.close(go_read)
    os.close(go_write)


@pytest.mark.parametrize(
    ("writes", "shown"),
    [
        ((b"1%\r2%\r", b"\nend\r\n"), b"[trainer0]:1%\r[trainer0]:2%\r\n[trainer0]:end\r\n"),
        # The carriage return at the beginning is no line. Otherwise two prefixes would stand side by side.
        ((b"\r1%\r2%", b"\r3%\nend\n"), b"[trainer0]:1%\r[trainer0]:2%\r[trainer0]:3%\n[trainer0]:end\n"),
        ((b"a\n\r1%", b"\r\r2%\n\rend\n"), b"[trainer0]:a\n[trainer0]:1%\r[trainer0]:2%\n[trainer0]:end\n"),
        ((b"a\n\r\r\n", b"\r\nend\n"), b"[trainer0]:a\n[trainer0]:\r\n[trainer0]:\r\n[trainer0]:end\n"),
        ((b"\r", b"\rend\n"), b"[trainer0]:end\n"),
    ],
    ids=["at the end", "at the beginning", "after a line", "in an empty line", "alone"],
)
def test_tee_of_a_progress_bar(
    tmp_path: Path, out: Console, err: Console, writes: tuple[bytes, bytes], shown: bytes
) -> None:
    """tqdm begins or ends its lines with a carriage return: shown as it moves, not at the end of the epoch. A carriage
    return ends the line before it, and at the beginning of a line it is left out."""
    streams = streams_to(out, err, tee=STDERR)
    worker = open_(streams, tmp_path)
    assert finished(spawn(worker, f"import os; os.write(2, {writes[0]!r}); os.write(2, {writes[1]!r})")) == 0
    streams.release(worker)
    assert streams.flush(PATIENCE_S)
    assert err.read_until(shown.rpartition(b":")[2]) == shown


def test_the_prefix_is_a_template(out: Console, err: Console) -> None:
    """TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE; what it does not know stays."""
    streams = streams_to(out, err, tee=STDERR, prefix="${role_name}/${local_rank}/${rank}/${other} ${hostname}> ")
    worker = open_(streams)
    assert finished(spawn(worker, "import os; os.write(2, b'x\\n')")) == 0
    assert err.read_until(b"\n") == b"trainer/0/4/${other} %s> x\n" % os.uname().nodename.encode()
    streams.release(worker)


def test_the_template_comes_from_the_environment(out: Console, err: Console) -> None:
    """As torchelastic has it; what was set on purpose goes before."""
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<$rank>"}
    for settings in (StreamSettings(tee=STDERR), StreamSettings(tee=STDERR, prefix="own:")):
        streams = Streams(settings, env=env, stdout=out.fd, stderr=err.fd)
        worker = open_(streams)
        assert finished(spawn(worker, "import os; os.write(2, b'x\\n')")) == 0
        streams.release(worker)
        assert streams.flush(PATIENCE_S)
    assert err.read_until(b"own:x\n") == b"<4>x\nown:x\n"


def test_ranks_that_are_filtered_out(tmp_path: Path, out: Console, err: Console) -> None:
    """`--local-ranks-filter`: files are written all the same, and a failure still shows its last lines."""
    streams = streams_to(out, err, tee={1: STDOUT}, shown=frozenset({0}))
    worker = open_(streams, tmp_path, local_rank=1)
    assert finished(spawn(worker, "import os; os.write(1, b'o'); os.write(2, b'why\\n')")) == 0
    assert streams.tail(worker, 5) == ("why",)
    streams.release(worker)
    assert streams.flush(PATIENCE_S)
    assert (tmp_path / "stdout.log").read_bytes() == b"o"
    other = open_(streams, tmp_path, local_rank=2)
    assert finished(spawn(other, "import os; os.write(1, b'nobody sees it')")) == 0
    streams.release(other)
    assert not select.select([out.read_end, err.read_end], [], [], 0)[0]


def test_without_a_folder_there_are_no_files(out: Console, err: Console) -> None:
    """`--log-dir /dev/null`: redirected output vanishes, teed output is shown."""
    streams = streams_to(out, err, redirects=STDOUT, tee=STDERR)
    worker = open_(streams)
    assert finished(spawn(worker, "import os; os.write(1, b'o'); os.write(2, b'e\\n')")) == 0
    assert err.read_until(b"\n") == b"[trainer0]:e\n"
    assert not worker.files
    streams.release(worker)


def test_a_folder_that_cannot_be_written_leaves_nothing_open(tmp_path: Path, out: Console, err: Console) -> None:
    """A full disk fails the start; descriptors must not leak at every restart."""
    streams = streams_to(out, err, redirects=STDERR, tee=STDOUT)
    open_(streams).spawned()  # the relay is running now
    before = descriptors()
    for _ in range(3):
        with pytest.raises(OSError, match="No such file"):
            open_(streams, tmp_path / "missing")
    assert not descriptors() - before


def test_no_thread_to_be_had_is_an_oserror(monkeypatch: pytest.MonkeyPatch, out: Console, err: Console) -> None:
    """A process limit hits threads, too; Python then raises another kind of exception."""

    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    before = descriptors()
    with pytest.raises(OSError, match="no thread"):
        open_(streams_to(out, err))
    assert not descriptors() - before


def test_a_terminal_stays_one(out: Console) -> None:
    """Colours and progress bars depend on isatty; the text must not get its line ends translated twice."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    streams = Streams(StreamSettings(), stdout=out.fd, stderr=slave)
    worker = open_(streams)
    script = "import os; os.write(2, b'%r\\n' % os.isatty(2)); os.write(2, b'%d' % os.get_terminal_size(2)[0])"
    assert finished(spawn(worker, script)) == 0
    assert streams.tail(worker, 2) == ("True", "77")
    streams.release(worker)
    assert streams.flush(PATIENCE_S)
    seen = b""
    while b"77" not in seen:
        seen += os.read(master, 4096)
    assert seen == b"True\r\n77"
    os.close(master)
    os.close(slave)


def test_inherited_output_is_not_touched(out: Console, err: Console) -> None:
    """`--output=inherit`: the worker writes to the console itself. It costs nothing, and nothing is remembered."""
    streams = streams_to(out, err, output="inherit", shown=frozenset({0}))
    worker, hidden = open_(streams), open_(streams, local_rank=1)
    for each in (worker, hidden):
        script = "import os; os.write(1, b'%d\\n' % os.fstat(1).st_ino); os.write(2, b'%d\\n' % os.fstat(2).st_ino)"
        assert finished(spawn(each, script)) == 0
        assert streams.tail(each, 5) == ()
        assert not each.taps
        streams.release(each)
    assert out.read_until(b"\n") == b"%d\n" % os.fstat(out.fd).st_ino
    assert err.read_until(b"\n") == b"%d\n" % os.fstat(err.fd).st_ino
    assert streams.close(0.0), "no thread was needed"


def test_after_close_nothing_is_left(tmp_path: Path, err: Console) -> None:
    """A library opens and closes many agents in one process."""
    threads, before = threading.active_count(), descriptors()
    for _ in range(3):
        streams = streams_to(err, err, tee=STDERR)
        worker = open_(streams, tmp_path)
        streams.say("x")
        assert finished(spawn(worker, "print('o')")) == 0
        streams.release(worker)
        assert streams.close(PATIENCE_S)
        assert descriptors() == before
        assert threading.active_count() == threads


def test_pipes_do_not_leak_into_other_workers(out: Console, err: Console) -> None:
    """A worker that held another's pipe would keep it from its end-of-file."""
    streams = streams_to(out, err)
    workers = [open_(streams, local_rank=i) for i in range(3)]
    script = "import os; os.write(2, b'%d\\n' % len(os.listdir('/proc/self/fd')))"
    alone = subprocess.run([sys.executable, "-c", script], close_fds=False, stderr=subprocess.PIPE, text=True)
    for worker in workers:
        assert finished(spawn(worker, script)) == 0
        assert streams.tail(worker, 1) == (alone.stderr.strip(),)
        streams.release(worker)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", ()),
        (b"\n", ()),
        (b"a\nb", ("a", "b")),
        (b"a\r\nb\r\n", ("a", "b")),
        (b"1%\r50%\r99%\r", ("99%",)),
        (b"a\x0bb\xe2\x80\xa8c\n", ("a\x0bb\u2028c",)),
        (b"\x1b[1;31mred\x1b[0m\x1b[K\n\x1b]0;title\x07x\n", ("red", "x")),
    ],
)
def test_last_lines(data: bytes, lines: tuple[str, ...]) -> None:
    """What is shown of the end of stderr."""
    assert last_lines(data, 10) == lines


def test_an_idle_relay_uses_no_processor_time() -> None:
    """An agent that is idle must cost nothing beside the training, nor after a worker closed its stderr.

    A relay that polls shows by its switches. One that spins shows by its share of the processor.
    """
    script = """
import os, resource, subprocess, sys, time
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.keeper.output.streams import Streams, StreamSettings
streams = Streams(StreamSettings())
one = streams.open(local_rank=0, rank=0, role="r", folder="")
two = streams.open(local_rank=1, rank=1, role="r", folder="")
one.spawned()  # nobody has the other end now: end-of-file
while one.taps[2].source >= 0:
    time.sleep(0.01)
before, begin, used = resource.getrusage(resource.RUSAGE_SELF), time.monotonic(), time.process_time()
time.sleep(0.3)  # the idle time is what is measured, and any length is right
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_nvcsw - before.ru_nvcsw, (time.process_time() - used) / (time.monotonic() - begin))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    switches, share = done.stdout.split()
    assert int(switches) <= 5, done.stderr
    assert float(share) < 0.5, done.stderr
