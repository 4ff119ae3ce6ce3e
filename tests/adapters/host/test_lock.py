"""One agent per node and host, and the end of the processes that a killed agent has left, with real processes."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from reknit.adapters.host import lock as hostlock
from reknit.adapters.host.lock import Taken, remember, take, take_alone, take_free
from reknit.adapters.host.orphans import MARK
from reknit.adapters.runtime.ports import Refused
from tests.support.alone import ENV, ROOT, command
from tests.support.locks import agent, killed, known, worker
from tests.support.places import move, shared
from tests.support.users import as_nobody, needs_two_users
from tests.support.waiting import PATIENCE_S, is_alive, until


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's locks are."""
    return move(monkeypatch, tmp_path)


# ---- the lock ----


def test_only_one_at_a_time() -> None:
    """Two agents with one id throw each other out of the job, and their workers share the host's devices."""
    with agent() as other:
        with pytest.raises(Taken) as caught:
            take("j", "e", "n")
        says = rf"another agent of job j runs on this host as n \(pid {other.pid}, since [-0-9: ]+: .*python.* -c .+\)"
        assert re.fullmatch(says, str(caught.value))
        other.communicate("", timeout=PATIENCE_S)
        take("j", "e", "n").release()


def test_another_job_place_or_name_is_another_lock() -> None:
    """Two jobs on one host are usual; and no text of one triple may be another's."""
    triples = [("j", "e", "n"), ("j2", "e", "n"), ("j", "e2", "n"), ("j", "e", "n2"), ("j", "en", ""), ("je", "", "n")]
    locks = [take(*triple) for triple in triples]
    assert len({lock.mark for lock in locks}) == len(triples)
    for lock in locks:
        lock.release()


def test_the_hosts_name_is_numbered() -> None:
    """Several agents on one host are the usual way to try things out. The one that is free first is taken."""
    first, second, third = (take_free("j", "e", "n") for _ in range(3))
    assert [first.node, second.node, third.node] == ["n", "n-2", "n-3"]
    second.release()
    assert take_free("j", "e", "n").node == "n-2"


def test_an_agent_that_ends_in_order_leaves_no_file(folder: Path) -> None:
    """A lock file per run would fill the folder; and what is there means a killed agent."""
    lock = take("j", "e", "n")
    assert len(os.listdir(folder)) == 1
    lock.release()
    lock.release()
    assert os.listdir(folder) == []


def test_the_lock_ends_with_the_process() -> None:
    """Nobody has to clean up after a SIGKILL before the agent can be started again."""
    killed().release()


def test_a_fork_of_the_agent_does_not_keep_the_lock() -> None:
    """A data loader of a killed program may live for long. The next agent must be let in."""
    script = """
        from tests.support.processes import *
        from reknit.adapters.host.lock import take
        lock = take("j", "e", "n")
        said, says = os.pipe()
        if os.fork() == 0:
            os.write(says, b"forked")
            signal.pause()
        os.read(said, 6)
        print("holds", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with subprocess.Popen(command(script), env=ENV, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"holds\n"
        try:
            agent.wait(PATIENCE_S)
            take("j", "e", "n").release()
        finally:
            os.killpg(agent.pid, signal.SIGKILL)


def test_workers_do_not_inherit_the_lock() -> None:
    """A stray worker would keep the next agent out."""
    with worker("x/y"):
        lock = take("j", "e", "n")
        with worker("x/z"):
            lock.release()
            take("j", "e", "n").release()


def test_many_at_once_are_never_two(tmp_path: Path) -> None:
    """The file is removed and made again under contention: whoever has it must be alone."""
    code = f"""
import os
from reknit.adapters.host.lock import Taken, take
got = 0
while got < 50:
    try:
        lock = take("j", "e", "n")
    except Taken:
        continue
    os.close(os.open({str(tmp_path / "alone")!r}, os.O_CREAT | os.O_EXCL))
    os.unlink({str(tmp_path / "alone")!r})
    got += 1
    lock.release()
"""
    agents = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    assert [process.wait(PATIENCE_S) for process in agents] == [0] * 4


# ---- where it is ----


def test_two_starts_with_and_without_a_variable(tmp_path: Path) -> None:
    """XDG_RUNTIME_DIR gave each its own lock, and two rounds' workers ran side by side."""
    (tmp_path / "runtime").mkdir(0o700)
    with agent(XDG_RUNTIME_DIR=str(tmp_path / "runtime")), pytest.raises(Taken):
        take("j", "e", "n")
    with agent(), agent("j2"), pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
        patched.setenv("HOME", str(tmp_path))
        patched.setenv("TMPDIR", str(tmp_path))
        with pytest.raises(Taken):
            take("j", "e", "n")


@needs_two_users
def test_another_user_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mkdir -m 777 /tmp/reknit-<uid>` ended every start with 69. Nor can another user hold a lock of ours."""

    def squat() -> None:
        os.mkdir(usual)
        os.chmod(usual, 0o777)
        take("j", "e", "n")  # a job of their own, whose name happens to be the same

    with shared() as base:
        usual = move(monkeypatch, base)
        as_nobody(squat)
        lock = take("j", "e", "n")
        with pytest.raises(Taken, match=rf"\(pid {os.getpid()}, "):
            take("j", "e", "n")
        lock.release()
        assert not os.listdir(usual)


def test_the_file_is_private(folder: Path) -> None:
    """It names processes that are killed."""
    before = os.umask(0)
    try:
        lock, alone = take("j", "e", "n"), take_alone("n")
    finally:
        os.umask(before)
    assert alone is not None
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600] * 2
    lock.release()
    alone.release()


def test_a_folder_that_is_cleaned_away_while_the_lock_is_taken(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Between the lock on the folder and the first file in it."""
    real, cleaned = hostlock.open_folder, list[int]()

    def opened() -> tuple[int, str]:
        found = real()
        if not cleaned:
            cleaned.append(found[0])
            folder.rmdir()
        return found

    monkeypatch.setattr(hostlock, "open_folder", opened)
    lock = take("j", "e", "n")
    assert len(os.listdir(folder)) == 1
    lock.release()


def test_a_full_disk_keeps_nobody_from_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock needs no byte on it; who holds it is then not said."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        lock = take("j", "e", "n")
    with pytest.raises(Taken, match=r"^another agent of job j runs on this host as n$"):
        take("j", "e", "n")
    lock.release()


# ---- what was left behind ----


def test_workers_of_a_killed_agent_are_ended() -> None:
    """`pkill -9 -f reknit` takes warden and agent at once; the next agent must not start beside their workers."""
    with agent() as process:
        process.kill()
        process.wait(PATIENCE_S)
    lock = take("j", "e", "n")
    with worker(lock.mark) as one, worker(lock.mark) as two, worker(lock.mark + "x") as other:
        assert lock.end_orphans() == 2
        assert not is_alive(one)
        assert not is_alive(two)
        assert is_alive(other), "another node's"
    assert lock.end_orphans() == 0
    lock.release()


def test_what_an_orphan_forks_is_ended_too() -> None:
    """It may be starting its own workers when it is found."""
    lock = killed()
    code = "import os\nwhile os.fork(): os.wait()\nprint('up', flush=True)\nimport signal; signal.pause()"
    with worker(lock.mark, "import os\nos.fork()\nos.fork()\nos.write(1, b'up\\n')\nimport signal; signal.pause()"):
        assert lock.end_orphans() >= 1
    with worker(lock.mark, code) as parent:
        lock.end_orphans()
        until(lambda: not is_alive(parent))
    lock.release()


def test_after_an_end_in_order_nobody_is_looked_for() -> None:
    """To read every process's environment takes a while, and there is nothing to find."""
    take("j", "e", "n").release()
    lock = take("j", "e", "n")
    with worker(lock.mark) as pid:
        assert lock.end_orphans() == 0
        assert is_alive(pid)
    lock.release()


def test_an_agent_killed_before_it_has_looked_leaves_the_work_to_the_next() -> None:
    """The sign must stay until somebody has ended in order."""
    lock = killed()
    with worker(lock.mark):
        lock.abandon()  # as the kernel does for a process that is killed
        assert take("j", "e", "n").end_orphans() == 1


def test_our_own_ancestors_are_no_orphans() -> None:
    """Whoever starts an agent from inside a worker's shell must not lose that shell, nor the agent."""
    lock = killed()
    lock.abandon()  # left once more
    inner = 'from reknit.adapters.host.lock import take; print(take("j", "e", "n").end_orphans())'
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}]); print('lives')"
    env = {**os.environ, MARK: lock.mark}
    done = subprocess.run([sys.executable, "-c", outer], env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["0", "lives"], done.stderr


def test_orphans_that_do_not_die_are_named() -> None:
    """Bounded: to join beside them would break the promise of `Joined`."""
    lock = killed()
    with worker(lock.mark) as pid, pytest.MonkeyPatch.context() as patched:
        patched.setattr(signal, "pidfd_send_signal", lambda *a: None)
        with pytest.raises(Refused, match=f"^processes {pid}, which an earlier agent left here, survive SIGKILL$"):
            lock.end_orphans(0.05)
    lock.release()


def test_awkward_names() -> None:
    """Job ids and names hold anything but NUL. The mark does not."""
    marks = set[str]()
    for text in ("ä %/../", "a\nb", "a\r\nb\r", "x" * 3000, os.fsdecode(b"\xff")):
        for job, node in ((text, "n"), ("j", text)):
            lock = take(job, "e", node)
            assert re.fullmatch("[0-9a-f]{32}", lock.mark)
            marks.add(lock.mark)
            lock.release()
    assert len(marks) == 10


REMEMBERS = "from reknit.adapters.host.record import identified; lock.remember((identified({pid}),))"


def test_processes_that_the_killed_agent_has_written_down_are_ended() -> None:
    """They have cleared their environment, and nobody is their parent any more. A torn record names none."""
    with worker("") as one, worker("") as two:
        lock = killed(then=REMEMBERS.format(pid=one))
        assert lock.end_orphans() == 1
        assert [is_alive(one), is_alive(two)] == [False, True]
        lock.abandon()  # as the kernel does for a process that is killed
        lock = take("j", "e", "n")
        lock.remember((known(two),))
        os.ftruncate(lock._fd, os.fstat(lock._fd).st_size - 2)
        lock.abandon()
        lock = take("j", "e", "n")
        with worker(lock.mark) as marked:
            assert lock.end_orphans() == 1
            assert [is_alive(two), is_alive(marked)] == [True, False]
        lock.release()


def test_what_was_written_down_stays_until_somebody_has_ended_it() -> None:
    """An agent that is killed before it has looked leaves the work to the next."""
    with worker("") as one, worker("") as two:
        lock = killed(then=REMEMBERS.format(pid=one))
        remember(f"{lock.mark}/workers", (known(two),))
        lock.abandon()
        assert take("j", "e", "n").end_orphans() == 2


def test_a_note_is_for_the_agent_after_one_that_was_killed(folder: Path) -> None:
    """An agent that has hosted the store may say so. An end in order leaves nothing."""
    lock = killed(then="lock.note('journal 7')")
    assert lock.left_note == "journal 7"
    lock.abandon()
    lock = take("j", "e", "n")
    assert lock.left_note == "journal 7", "it counts until an agent has ended in order"
    lock.note("journal 8")
    lock.remember((known(os.getpid()),))
    with pytest.raises(ValueError, match="a note of at most 256 characters, not 257"):
        lock.note(257 * "x")
    assert lock.left_note == "journal 7"
    lock.abandon()
    lock = take("j", "e", "n")
    assert lock.left_note == "journal 8"
    lock.note("")
    lock.abandon()
    lock = take("j", "e", "n")
    assert lock.left_note == ""
    lock.note("journal 9")
    lock.release()
    assert not os.listdir(folder)
    assert take("j", "e", "n").left_note == ""
