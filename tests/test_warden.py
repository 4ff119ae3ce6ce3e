"""Nothing outlives the agent, whoever is killed and whatever the workers did to hide."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.alone import ENV, ROOT, STUBBORN, command
from tests.waiting import is_alive, read_pids, until

AGENT = """
import os, signal, sys
from reknit.adapters.warden import guard

def run(life_line):
    from tests.processes import Clock, Processes, WorkersStopped, start, stop
    from reknit.adapters.clock import Signals
    notes, wishes = sys.argv[1], sys.argv[2:]
    clock = Clock()
    signals = Signals(clock, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
    clock.watch(life_line)
    argv = [sys.executable, os.environ["STUBBORN"], notes, *wishes]
    workers = Processes(clock=clock, argv=argv, env=dict(os.environ), run_id="job", own_children=True)
    start(workers, 2)
    print("agent", os.getpid(), flush=True)
    while True:
        clock.wait(workers.wakes_at)
        if life_line_ended(life_line):
            workers.close()
            return 1
        for signum in signals.taken():
            print("took", signal.Signals(signum).name, flush=True)
            if signum != signal.SIGUSR1:
                stop(workers, 0.2)
        for event in workers.events(clock.now()):
            if isinstance(event, WorkersStopped):
                workers.close()
                return 5

def life_line_ended(fd):
    import select
    return bool(select.select([fd], [], [], 0)[0])

guard(run)
"""


def _is_dead(pid: int) -> bool:
    return not is_alive(pid)


class Guarded:
    """An agent of two workers with a warden, started and running."""

    def __init__(self, folder: Path, *wishes: str, pids: int) -> None:
        self.process = subprocess.Popen(
            command(AGENT, str(folder / "pids"), *wishes),
            env={**ENV, "STUBBORN": STUBBORN},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.warden = self.process.pid
        assert self.process.stdout
        self.agent = int(self.process.stdout.readline().split()[1])
        self.workers = read_pids(folder / "pids", pids)
        assert is_alive(self.agent)

    def end(self) -> tuple[int, str, str]:
        """Status, stdout and stderr once it has ended, and both pipes with it."""
        out, err = self.process.communicate(timeout=240)
        return self.process.returncode, out, err

    def nothing_is_left(self) -> None:
        for pid in (self.warden, self.agent, *self.workers):
            until(partial(_is_dead, pid), f"the end of {pid}")


WISHES = pytest.mark.parametrize("wishes", ["grandchild", "grandchild ignore", "grandchild die"])


@WISHES
def test_the_agent_is_killed(tmp_path: Path, wishes: str) -> None:
    """The out-of-memory killer takes the agent: its workers, and what they hid, must not hold the GPUs."""
    guarded = Guarded(tmp_path, *wishes.split(), pids=4)
    os.kill(guarded.agent, signal.SIGKILL)
    status, _, err = guarded.end()
    assert not any(map(is_alive, guarded.workers)), "all of it has ended when the command has"
    assert status == 128 + signal.SIGKILL
    assert err.startswith("reknit: the agent was killed by SIGKILL; ")
    # Workers that had died by themselves are not counted, or not always: the agent may have reaped them.
    assert err.endswith((" left-over processes were ended\n", " left-over process was ended\n"))
    if "die" not in wishes:
        assert " 4 left-over" in err


@WISHES
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGALRM])
def test_the_warden_is_killed(tmp_path: Path, wishes: str, signum: int) -> None:
    """By hand, or by a signal that it does not forward."""
    guarded = Guarded(tmp_path, *wishes.split(), pids=4)
    os.kill(guarded.warden, signum)
    guarded.nothing_is_left()
    status, _, _ = guarded.end()
    assert status == -signum


@WISHES
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_forwarded_once_and_the_status_is_the_agents(tmp_path: Path, wishes: str, signum: int) -> None:
    """A scheduler signals what it started, which is the warden; what to do about it is the agent's business."""
    guarded = Guarded(tmp_path, *wishes.split(), pids=4)
    os.kill(guarded.warden, signum)
    status, out, err = guarded.end()
    assert not any(map(is_alive, guarded.workers))
    assert (status, out, err) == (5, f"took {signal.Signals(signum).name}\n", "")


def test_a_signal_that_ends_nothing(tmp_path: Path) -> None:
    """SIGUSR1 may ask for a checkpoint: the job goes on."""
    guarded = Guarded(tmp_path, pids=2)
    os.kill(guarded.warden, signal.SIGUSR1)
    assert guarded.process.stdout
    assert guarded.process.stdout.readline() == "took SIGUSR1\n"
    assert all(map(is_alive, guarded.workers))
    os.kill(guarded.warden, signal.SIGTERM)
    assert guarded.end()[0] == 5


def run_guarded(body: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run an agent that does only this."""
    script = f"import os, signal, sys, time\nfrom reknit.adapters.warden import guard\ndef run(life_line):\n {body}\n"
    argv = command(script + "guard(run)")
    done: subprocess.CompletedProcess[str] = subprocess.run(argv, env=ENV, cwd=ROOT, text=True, timeout=240, **settings)
    return done


@pytest.mark.parametrize(
    ("body", "status", "err"),
    [
        ("return 0", 0, ""),
        ("return 71", 71, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("os._exit(9)", 9, ""),
        ("os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV; 0 left-over"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("sys.stdout.close(); return 4", 4, ""),
    ],
)
def test_the_end_of_the_agent_is_the_end_of_the_command(body: str, status: int, err: str) -> None:
    """Schedulers decide by the exit status; a crash of ours must be seen."""
    done = run_guarded(body, capture_output=True)
    assert done.returncode == status
    assert err in done.stderr
    assert bool(err) == bool(done.stderr)


def test_what_was_printed_is_not_lost() -> None:
    """The exit is a hard one: buffers have to be written before, and only once for both processes."""
    done = run_guarded("print('from the agent', end=''); return 0", stdout=subprocess.PIPE)
    assert done.stdout == "from the agent"


def test_the_warden_does_not_hold_our_output() -> None:
    """`reknit run | cat` ends with the job: whoever is left of us has let go of the pipe."""
    done = run_guarded(
        "import os\n"
        " while os.readlink(f'/proc/{os.getppid()}/fd/1') != '/dev/null': time.sleep(0.001)\n"
        " assert os.readlink(f'/proc/{os.getppid()}/fd/0') == '/dev/null'; return 0",
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )
    assert done.returncode == 0


def test_without_standard_files() -> None:
    """Some daemons start programs without any: our pipes must not become their stdin, stdout or stderr."""
    script = "from reknit.adapters.warden import guard\nguard(lambda life_line: 0 if life_line > 2 else 1)"
    shell = 'exec "$@" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", shell, "sh", *command(script)], env=ENV, cwd=ROOT, timeout=240)
    assert done.returncode == 0


def test_no_process_to_be_had() -> None:
    """Where not even the agent can be forked, that is said, without a traceback."""
    script = """
        import os
        from reknit.adapters.warden import guard
        def fork():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        os.fork = fork
        guard(lambda life_line: 0)
    """
    done = subprocess.run(command(script), env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 71
    assert done.stderr == "reknit: cannot start the agent: Resource temporarily unavailable\n"


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    """`nohup reknit run …`: torchrun dies of the hang-up all the same."""
    body = "os.kill(os.getppid(), signal.SIGHUP); os.kill(os.getpid(), signal.SIGHUP); time.sleep(0.2); return 6"
    script = f"import os, signal, sys, time\nfrom reknit.adapters.warden import guard\ndef run(life_line):\n {body}\n"
    argv = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command(script + "guard(run)")]
    assert subprocess.run(argv, env=ENV, cwd=ROOT, timeout=240).returncode == 6


def test_no_signal_is_lost_however_early_it_comes(tmp_path: Path) -> None:
    """Around the fork they are blocked; before the agent has handlers they end it. It never runs on as if none came."""
    script = """
        import os, sys, time
        print("here", flush=True)
        from reknit.adapters.warden import guard
        guard(lambda life_line: time.sleep(3600) or 0)
    """
    for delay_ms in range(0, 60, 2):
        process = subprocess.Popen(command(script), env=ENV, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout
        assert process.stdout.readline() == b"here\n"
        time.sleep(delay_ms / 1000)  # not a guess: any moment must do
        process.terminate()
        _, err = process.communicate(timeout=240)
        assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), err


def test_ctrl_c_reaches_the_agent_once(tmp_path: Path) -> None:
    """The terminal signals its whole foreground group: workers and agent are not in it, the warden forwards."""
    warden, terminal = pty.fork()
    if warden == 0:
        os.chdir(ROOT)
        argv = command(AGENT, str(tmp_path / "pids"))
        os.execve(argv[0], argv, {**ENV, "STUBBORN": STUBBORN})
    read_pids(tmp_path / "pids", 2)
    seen = b""
    while b"agent" not in seen:
        seen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    try:
        while data := os.read(terminal, 4096):
            seen += data
    except OSError:
        pass  # EIO: the end of a terminal
    assert os.waitstatus_to_exitcode(os.waitpid(warden, 0)[1]) == 5
    assert seen.count(b"took SIGINT") == 1, seen
    os.close(terminal)


def test_an_idle_warden_sleeps(tmp_path: Path) -> None:
    """It must cost nothing beside the training."""
    guarded = Guarded(tmp_path, pids=2)

    def switches() -> int:
        status = Path(f"/proc/{guarded.warden}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    before = switches()
    time.sleep(0.3)  # not a guess: the longer the better, any length is right
    assert switches() <= before + 2
    os.kill(guarded.warden, signal.SIGTERM)
    assert guarded.end()[0] == 5


def test_both_are_subreapers_and_reap_what_they_adopt(tmp_path: Path) -> None:
    """An orphan of a worker becomes the agent's child while the agent lives, and no zombie of anybody."""
    guarded = Guarded(tmp_path, "grandchild", pids=4)
    parents = {}
    for pid in guarded.workers:
        parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert set(parents.values()) == {guarded.agent}
    os.kill(guarded.agent, signal.SIGKILL)
    assert guarded.end()[0] == 137
    guarded.nothing_is_left()
