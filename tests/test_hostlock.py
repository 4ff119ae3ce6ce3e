"""One agent per node and host, and the end of the processes that a killed agent has left, with real processes."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reknit.adapters import hostlock
from reknit.adapters.hostlock import HostLock, Taken, end_left_alone, take, take_alone, take_free
from reknit.adapters.orphans import MARK
from reknit.adapters.ports import Refused
from reknit.core.job.reasons import Refusal
from tests.alone import ENV, ROOT, command
from tests.waiting import PATIENCE_S, is_alive, until


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's locks are."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "reknit"


@contextmanager
def agent(job: str = "j", node: str = "n") -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its stdin ends; then it releases it."""
    code = f"""
import sys
from reknit.adapters.hostlock import take
lock = take({job!r}, "e", {node!r})
print("holds", flush=True)
sys.stdin.read()
lock.release()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def worker(mark: str, code: str = "print('up', flush=True); import signal; signal.pause()") -> Iterator[int]:
    """A process with that mark, reaped as it ends, as init would."""
    command = [sys.executable, "-c", f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{code}"]
    env = {**os.environ, MARK: mark}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield process.pid
        finally:
            process.kill()


def killed(job: str = "j", node: str = "n") -> HostLock:
    """The lock, after its holder was killed."""
    with agent(job, node) as process:
        process.kill()
        process.wait(PATIENCE_S)
    return take(job, "e", node)


# ---- the lock ----


def test_only_one_at_a_time() -> None:
    """Two agents with one id throw each other out of the job, and their workers share the host's devices."""
    with agent() as other:
        with pytest.raises(Taken) as caught:
            take("j", "e", "n")
        assert str(caught.value) == f"another agent of job j runs on this host as n (pid {other.pid})"
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
        from tests.processes import *
        from reknit.adapters.hostlock import take
        lock = take("j", "e", "n")
        said, says = os.pipe()
        if os.fork() == 0:
            os.write(says, b"forked")
            signal.pause()
        os.read(said, 6)
        print("holds", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    env = {**ENV, "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    with subprocess.Popen(command(script), env=env, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as agent:
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
from reknit.adapters.hostlock import Taken, take
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


def test_the_folder_is_ours_alone(folder: Path) -> None:
    """In /tmp everybody could hold our locks."""
    take("j", "e", "n").release()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(Refused, match="is not a folder of this user alone") as caught:
        take("j", "e", "n")
    assert caught.value.refusal is Refusal.SETUP


def test_a_folder_that_somebody_else_has_made(folder: Path, tmp_path: Path) -> None:
    """A link would let them choose what is written to."""
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")
    with pytest.raises(Refused, match="is not a folder of this user alone"):
        take("j", "e", "n")
    folder.unlink()
    folder.touch()
    with pytest.raises(Refused, match="is not a folder of this user alone"):
        take("j", "e", "n")


@pytest.mark.parametrize("value", ["", "/none", "relative"])
def test_a_runtime_folder_of_another_host(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Schedulers hand down the login host's variable."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    lock = take(f"test-{os.getpid()}", "e", "n")
    assert lock._path.startswith(f"/tmp/reknit-{os.getuid()}/")
    lock.release()


def test_a_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path and the system's reason, for whoever runs us in a read-only container."""
    monkeypatch.setattr(os, "mkdir", lambda *a: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    with pytest.raises(Refused, match=r"^the folder for this node's lock, .*/reknit: Read-only file system$"):
        take("j", "e", "n")


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
        os.close(lock._fd)  # as the kernel does for a process that is killed
        assert take("j", "e", "n").end_orphans() == 1


def test_our_own_ancestors_are_no_orphans() -> None:
    """Whoever starts an agent from inside a worker's shell must not lose that shell, nor the agent."""
    lock = killed()
    os.close(lock._fd)  # left once more
    inner = 'from reknit.adapters.hostlock import take; print(take("j", "e", "n").end_orphans())'
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
    """Job ids and names hold anything but NUL, and so may the environment."""
    for text in ("ä %/../", "a\nb", "a\r\nb\r", "x" * 3000, os.fsdecode(b"\xff")):
        lock = killed(text, "n")
        with worker(lock.mark):
            assert lock.end_orphans() == 1
        lock.release()


# ---- a job with one node ----


@contextmanager
def agent_alone(nonce: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of a job with one node until it is killed."""
    code = f"""
import signal
from reknit.adapters.hostlock import take_alone
lock = take_alone({nonce!r})
print(lock.mark, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{nonce}\n"
        try:
            yield process
        finally:
            process.kill()


def killed_alone(*nonces: str) -> None:
    for nonce in nonces:
        with agent_alone(nonce):
            pass


def test_what_any_killed_agent_of_one_node_left_is_ended(folder: Path) -> None:
    """No later agent has its name, so whichever starts next looks for it. An agent that lives keeps its workers."""
    killed_alone("dead-1", "dead-2")
    with agent_alone("alive"), worker("dead-1") as one, worker("dead-2") as two, worker("alive") as other:
        assert end_left_alone() == (2, ())
        assert [is_alive(pid) for pid in (one, two, other)] == [False, False, True]
        (left,) = os.listdir(folder)
        assert left.endswith("-alive")
        assert end_left_alone() == (0, ())


def test_an_agent_of_one_node_that_ends_leaves_no_file(folder: Path) -> None:
    """A file that stays would make the next start read the process table."""
    lock = take_alone("n")
    assert lock is not None
    lock.release()
    lock.release()
    assert os.listdir(folder) == []


def test_a_file_of_an_agent_that_was_killed_while_it_made_it_is_removed(folder: Path) -> None:
    """Such a file names no lock yet, so no process can carry its mark. A file that is new may still get its name."""
    lock = take_alone("mine")
    old, new = folder / "new-0123", folder / "new-4567"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    end_left_alone()
    assert not old.exists()
    assert new.exists()
    assert lock is not None
    lock.release()


def test_two_agents_that_start_together_both_wait_for_the_end(folder: Path) -> None:
    """Neither may take the other for the owner of what it looks at, and start its workers beside an old one."""
    killed_alone("dead")
    looking = os.open(next(folder.iterdir()), os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # the other agent is just looking
    with worker("dead") as pid:
        assert end_left_alone() == (1, ())
        assert not is_alive(pid)
    os.close(looking)


def test_a_container_leaves_the_processes_of_another_to_that(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share /tmp. An agent that cannot see the processes must not remove what tells of them."""
    killed_alone("dead")
    with worker("dead") as pid:
        with monkeypatch.context() as patched:
            patched.setattr(hostlock, "_alone", lambda: "alone-1-")
            assert end_left_alone() == (0, ())
            assert is_alive(pid)
        assert end_left_alone() == (1, ())
    assert os.listdir(folder) == []


def test_what_survives_is_named_and_tried_again(folder: Path) -> None:
    """A process that hangs in the kernel is not worth a job that does not start."""
    killed_alone("dead")
    with worker("dead") as pid:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(signal, "pidfd_send_signal", lambda *_: None)
            assert end_left_alone(0.05) == (0, (pid,))
        assert end_left_alone() == (1, ())


def test_a_job_of_one_node_needs_no_lock(tmp_path: Path, folder: Path) -> None:
    """A full disk, or a folder of somebody else: the job runs all the same."""
    folder.symlink_to(tmp_path)
    assert take_alone("n") is None
    assert end_left_alone() == (0, ())


def test_the_process_table_is_not_read_in_vain(tmp_path: Path) -> None:
    """psutil takes milliseconds that the first worker would wait for."""
    script = """
        import sys
        from reknit.adapters.hostlock import end_left_alone, take_alone
        lock = take_alone("n")
        end_left_alone()
        lock.release()
        print([name for name in ("psutil", "hashlib", "reknit.adapters.orphans") if name in sys.modules])
    """
    env = {**ENV, "XDG_RUNTIME_DIR": str(tmp_path)}
    assert subprocess.check_output(command(script), env=env, cwd=ROOT) == b"[]\n"
