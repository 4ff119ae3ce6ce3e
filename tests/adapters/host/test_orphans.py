"""Ending processes by their mark: real processes, real kills."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from reknit.adapters.host.orphans import MARK, carry, end_marked
from reknit.adapters.host.record import ProcessId, identified
from tests.support.alone import ENV, command, run_alone
from tests.support.leaks import marked
from tests.support.waiting import PATIENCE_S, descriptors, is_alive


@contextmanager
def process(mark: str, name: str = MARK) -> Iterator[int]:
    """A process with that mark that ignores SIGTERM."""
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, name: mark}, stdout=subprocess.PIPE, start_new_session=True
    ) as made:
        assert made.stdout is not None
        assert made.stdout.readline() == b"up\n"
        try:
            yield made.pid
        finally:
            made.kill()


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> str:
    """A mark of this test's own."""
    return f"{request.node.name}-{os.getpid()}".replace("/", "-")


def test_all_with_the_mark_end_and_no_others(mark: str) -> None:
    """A job beside this one on the host is none of our business."""
    with process(mark) as one, process(mark) as two, process(mark + "x") as other, process(mark, "OTHER") as elsewhere:
        assert end_marked(mark, PATIENCE_S) == (2, ())
        assert [is_alive(pid) for pid in (one, two, other, elsewhere)] == [False, False, True, True]
    assert end_marked(mark, PATIENCE_S) == (0, ())


LIMITS = {"has a limit": (1 << 40, 1 << 40), "has a soft limit": (1 << 40, resource.RLIM_INFINITY)}
"""Limits that the operator has set."""


@contextmanager
def forked(mark: str, program: str) -> Iterator[int]:
    """A fork of this process that carries the mark, and has closed all its files as a daemon does. Another program may
    have taken its place then, without an environment."""
    told, tell = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if limits := LIMITS.get(program):
                resource.setrlimit(resource.RLIMIT_RTTIME, limits)
            if program == "has another mark":
                carry("of the agent that has started this one")
            carry(mark)
            if limits:
                assert resource.getrlimit(resource.RLIMIT_RTTIME) == limits
            if program == "exec":
                os.set_inheritable(tell, True)
                code = f"import os, signal; os.write({tell}, b'!'); os.closerange(0, 1024); signal.pause()"
                os.execve(sys.executable, [sys.executable, "-c", code], {})
            os.write(tell, b"!")
            os.closerange(0, 1 << 10)
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell)  # otherwise the read would wait for a child that has died
    assert os.read(told, 1) == b"!"
    os.close(told)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("program", ["", "exec", *LIMITS, "has another mark"])
@pytest.mark.alone
@pytest.mark.parametrize("name", ["", "/worker", "x"])
def test_a_process_carries_the_mark_without_an_environment(mark: str, name: str, program: str) -> None:
    """A fork shows the environment of this process, and a program that it executes may have none. If the operator has
    limited real-time processes, the limit stays, and nothing is carried."""
    with forked(mark + name, program) as pid:
        is_found = name in ("", "/worker") and program not in LIMITS
        assert end_marked(f"{mark}/another", PATIENCE_S) == (0, ())
        assert end_marked(mark, PATIENCE_S) == (is_found, ())
        assert is_alive(pid) is not is_found


BARE = "import os, signal; os.write(1, f'{os.getpid()}\\n'.encode()); signal.pause()"
"""The script of a process that prints its pid."""


@contextmanager
def bare(code: str = BARE, mark: str = "") -> Iterator[list[int]]:
    """A process group of processes that print their pids, at first with the mark in their environment. Returns the two
    pids that come first, or one if the code does not fork."""
    env = {MARK: mark} if mark else {}
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, process_group=0) as leader:
        assert leader.stdout is not None
        pids = [int(leader.stdout.readline()) for _ in range(2 if "fork" in code else 1)]
        try:
            yield pids
        finally:
            for pid in pids:
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


BECOMES_ANOTHER = f"import os, signal; os.setuid(65534); {BARE}"


def known(pid: int) -> ProcessId:
    found = identified(pid)
    assert found is not None
    return found


def test_a_process_without_an_environment_is_found_by_pid_and_start(mark: str) -> None:
    """`env -i`, and programs that write their title over their environment. A later process with the pid is spared."""
    with bare() as (pid,), bare() as (other,):
        assert end_marked(mark, PATIENCE_S) == (0, ())
        earlier = ProcessId(other, known(other).start - 1)
        assert end_marked(mark, PATIENCE_S, [known(pid), earlier]) == (1, ())
        assert [is_alive(pid), is_alive(other)] == [False, True]
        assert end_marked(mark, PATIENCE_S, [ProcessId(pid, 1)]) == (0, ())


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_known_process_that_has_become_another_user_is_spared(mark: str) -> None:
    """What another user runs is not this agent's, whatever was written down."""
    with bare(BECOMES_ANOTHER) as (pid,):
        assert end_marked(mark, PATIENCE_S, [known(pid)]) == (0, ())
        assert is_alive(pid)


def cleared(leave: str = "pass", then: str = "os.wait()") -> str:
    """The script of a process that makes a child, which does `leave` and then clears its environment. The process
    itself does `then`."""
    child = f"os.execve(sys.executable, [sys.executable, '-c', {BARE!r}], {{}})"
    tell = "os.write(1, f'{os.getpid()}\\n'.encode())"
    return f"import os, signal, sys\n{tell}\nif os.fork() == 0:\n    {leave}\n    {child}\n{then}"


@pytest.mark.parametrize("leave", ["os.setsid()", "pass"])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_has_cleared_its_environment_belongs_to_its_parent(mark: str, leave: str, is_known: bool) -> None:
    """Nothing else tells of it once its parent is dead."""
    with bare(cleared(leave), "" if is_known else mark) as (parent, child):
        assert end_marked(mark, PATIENCE_S, [known(parent)] if is_known else ()) == (2, ())
        assert not is_alive(child)


def test_what_has_cleared_its_environment_belongs_to_its_group(mark: str) -> None:
    """Its parent has ended, and the leader of its group lives."""
    code = cleared("os.fork() and os._exit(0)", "os.wait(); signal.pause()")
    with bare(code, mark) as (leader, child):
        assert end_marked(mark, PATIENCE_S)[1] == ()
        assert not is_alive(leader)
        assert not is_alive(child)


def test_the_group_of_a_known_process_may_hold_this_one(mark: str) -> None:
    """An agent that a worker has started, and its children, are no leftovers."""
    code = f"""
        import os, signal, sys
        from reknit.adapters.host.record import identified
        from reknit.adapters.host.orphans import end_marked
        leader = os.getpid()
        os.setpgid(0, 0)
        if (between := os.fork()) == 0:  # ends, so that the leader is no ancestor
            between = os.getpid()
            if os.fork() == 0:
                while os.getppid() == between:
                    pass
                child = os.fork() or signal.pause()
                known = [identified(leader)]
                print(end_marked("{mark}", 60.0, known)[0], os.waitpid(child, os.WNOHANG))
                os.kill(child, signal.SIGKILL)
                sys.stdout.flush()
            os._exit(0)
        os.wait()
        signal.pause()
    """
    with subprocess.Popen(command(code), env=ENV, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        try:
            assert leader.stdout.readline() == "1 (0, 0)\n"
        finally:
            leader.kill()


def test_what_forks_while_it_is_killed_is_ended_too(mark: str) -> None:
    """A worker may be starting its own workers when it is found."""
    # The sleep is the pace at which the processes double. They are 512 at most, whatever happens here.
    double = "for _ in range(9):\n    if os.fork() == 0: os.setsid()\n    os.write(1, b'x'); time.sleep(0.1)"
    code = f"import os, signal, time\n{double}\nsignal.pause()"
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", code]
    with subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE) as forking:
        assert forking.stdout is not None
        assert forking.stdout.read(8) == b"x" * 8
        assert end_marked(mark, PATIENCE_S)[0] >= 2
    assert not marked(f"{MARK}={mark}")


def test_this_process_and_its_ancestors_live() -> None:
    """A keeper that is started inside a worker's shell must end neither the shell nor itself."""
    inner = "from reknit.adapters.host.orphans import end_marked; print(end_marked('m', 60.0)[0])"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True); print('lives')"
    done = subprocess.run([sys.executable, "-c", outer], env={**ENV, MARK: "m"}, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "lives"], done.stderr


def test_what_does_not_die_is_named_in_time(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded: a process that hangs in the kernel must not hold the agent for ever."""
    with process(mark) as pid, monkeypatch.context() as patched:
        patched.setattr(signal, "pidfd_send_signal", lambda *_: None)
        assert end_marked(mark, 0.05) == (0, (pid,))


def test_without_pidfds_psutil_watches_over_the_number(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has none."""
    monkeypatch.delattr(os, "pidfd_open")
    with process(mark) as pid:
        assert end_marked(mark, PATIENCE_S) == (1, ())
        assert not is_alive(pid)


def test_processes_that_vanish_or_must_not_be_read_are_passed_over(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the list and the look anything may end, and a host has other users."""
    read = psutil.Process.environ
    errors = iter([psutil.AccessDenied(), psutil.NoSuchProcess(1), psutil.ZombieProcess(1), ProcessLookupError()])

    def environ(self: psutil.Process) -> dict[str, str]:
        if self.pid != pid and (error := next(errors, None)):
            raise error
        return dict(read(self))

    before = descriptors()
    with process(mark) as pid, process("a" + mark), process("b" + mark), process("c" + mark), process("d" + mark):
        monkeypatch.setattr(psutil.Process, "environ", environ)
        assert end_marked(mark, PATIENCE_S) == (1, ())
    assert not descriptors() - before


def test_a_process_whose_program_is_just_being_replaced_is_found(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel shows an empty environment for a moment: a worker that is just starting would outlive its agent."""
    read, seen = psutil.Process.environ, set[int]()

    def environ(self: psutil.Process) -> dict[str, str]:
        if self.pid in seen:
            return dict(read(self))
        seen.add(self.pid)
        return {}

    before = descriptors()
    with process(mark) as pid, process(mark + "x") as other:
        monkeypatch.setattr(psutil.Process, "environ", environ)
        assert end_marked(mark, PATIENCE_S) == (1, ())
        assert (is_alive(pid), is_alive(other)) == (False, True)
    assert not descriptors() - before


def test_nothing_is_loaded_for_it_before_it_is_needed() -> None:
    """psutil takes milliseconds that the first worker would wait for."""
    script = """
        import sys
        import reknit.adapters.host.lock, reknit.adapters.host.children
        reknit.adapters.host.children.become_subreaper()
        reknit.adapters.host.children.sweep(0.0)
        print("psutil" in sys.modules)
    """
    assert run_alone(script) == "False\n"
