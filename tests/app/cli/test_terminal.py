"""A worker that somebody talks to: the real command on a terminal, with and without a shell."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import REKNIT, Run, run
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the ways of terminals differ")

DEBUGS = "x = 41\nbreakpoint()\nprint('after', x)\n"
SLEEPS = "import time\nprint('up', flush=True)\ntime.sleep(1000)\n"


class Typist:
    """A terminal with a command, and somebody who types."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.screen = ""
        """All that was shown."""
        self._unread = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            plain = {
                "PS1": "$ ",
                "TERM": "dumb",
                "TMPDIR": str(folder),
                "INPUTRC": "/dev/null",
                "LOCKS_OF_TESTS": str(folder),
            }
            os.execve(argv[0], argv, {**os.environ, **plain})

    def read(self, wanted: str) -> None:
        """Wait until this is on the screen, behind what was read before."""
        give_up = time.monotonic() + PATIENCE_S
        while wanted not in self._unread:
            assert time.monotonic() < give_up, f"{wanted!r} is not in {self._unread!r}"
            if select.select([self._fd], [], [], 0.1)[0] and not self._more():
                pytest.fail(f"the command has ended without {wanted!r}: {self._unread!r}")
        self._unread = self._unread.partition(wanted)[2]

    def shows(self, wanted: str) -> bool:
        """Whether this comes to the screen within a second."""
        give_up = time.monotonic() + 1.0
        while wanted not in self._unread and time.monotonic() < give_up:
            if select.select([self._fd], [], [], 0.1)[0]:
                self._more()
        return wanted in self._unread

    def _more(self) -> bool:
        try:
            data = os.read(self._fd, 4096).decode(errors="replace")
        except OSError:
            return False
        self.screen += data
        self._unread += data
        return bool(data)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    @property
    def has_terminal(self) -> bool:
        """The command that was started reads from the terminal, and not a job of it."""
        return os.tcgetpgrp(self._fd) == self.pid

    def settled(self) -> None:
        """Wait until somebody reads the terminal letter by letter: keys that come before that are lost."""
        until(lambda: not termios.tcgetattr(self._fd)[3] & termios.ICANON, "a prompt that is read with editing")

    def end(self) -> int:
        """Read until the end. Returns the exit status."""
        give_up = time.monotonic() + PATIENCE_S
        while not select.select([self._fd], [], [], 0.1)[0] or self._more():
            assert time.monotonic() < give_up, f"somebody still has the terminal: {self.screen!r}"
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "debugs.py").write_text(DEBUGS)
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    return tmp_path


def test_a_debugger_can_be_used(folder: Path) -> None:
    """`breakpoint()` in the only worker of a job: as without a launcher, with line editing."""
    typist = Typist(folder, REKNIT, "run", "debugs.py")
    typist.read("(Pdb) ")
    typist.settled()
    typist.type("p x + 2\x7f1\n")  # with a letter that is taken back
    typist.read("42")
    typist.read("(Pdb) ")
    typist.type("c\n")
    assert typist.end() == 0
    assert "after 41" in typist.screen
    assert "the job succeeded" in typist.screen


def test_ctrl_c_in_the_debugger_is_not_for_reknit(folder: Path) -> None:
    """It ends what was typed, and the job goes on."""
    typist = Typist(folder, REKNIT, "run", "debugs.py")
    typist.read("(Pdb) ")
    typist.settled()
    # Python may overlook the signal in the moment before it waits for a key, with reknit and without.
    until(lambda: typist.type("\x03") or typist.shows("(Pdb) "), "the prompt")
    typist.settled()
    typist.type("c\n")
    assert typist.end() == 0
    assert "SIGINT" not in typist.screen


def test_ctrl_c_ends_a_worker_and_the_command(folder: Path) -> None:
    """The worker dies of it: no restart, and the status of a command that was interrupted."""
    typist = Typist(folder, REKNIT, "run", "--max-restarts=3", "sleeps.py")
    typist.read("up")
    typist.type("\x03")
    assert typist.end() == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in typist.screen
    assert "round 1" not in typist.screen


def test_a_worker_may_save_something_at_ctrl_c(folder: Path) -> None:
    """It ends with a status of its own. Nobody who presses Ctrl-C wants it started again."""
    (folder / "saves.py").write_text(
        "import sys, time\ntry:\n    print('up', flush=True)\n    time.sleep(1000)\n"
        "except KeyboardInterrupt:\n    print('saved', flush=True)\n    sys.exit(1)\n"
    )
    typist = Typist(folder, REKNIT, "run", "--max-restarts=3", "saves.py")
    typist.read("up")
    typist.type("\x03")
    assert typist.end() == 128 + signal.SIGINT
    assert "saved" in typist.screen
    assert "round 1" not in typist.screen


def test_nobody_is_stopped_where_nobody_could_continue_it(folder: Path) -> None:
    """Under `ssh -t` reknit leads the session, and no shell is there. Ctrl-Z does nothing, and Ctrl-C still works."""
    typist = Typist(folder, REKNIT, "run", "sleeps.py")
    typist.read("up")
    typist.type("\x1a")
    typist.type("\x03")
    assert typist.end() == 128 + signal.SIGINT
    assert "was stopped by" not in typist.screen


def test_a_command_line_of_ssh_is_not_stopped_either(folder: Path) -> None:
    """`ssh -t HOST 'reknit run …; echo …'`: the shell that runs both is in the same process group, and leads the
    session."""
    typist = Typist(folder, "/bin/bash", "--norc", "-c", f"{REKNIT} run debugs.py; echo status $?")
    typist.read("(Pdb) ")
    typist.settled()
    typist.type("\x1a")
    typist.type("p x + 1\n")
    typist.read("42")
    shell = Path(f"/proc/{typist.pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert shell != "T", "nobody could continue it"
    typist.type("c\n")
    typist.read("the job succeeded")
    typist.read("status 0")
    assert typist.end() == 0


def test_who_quits_the_debugger_wants_no_restart(folder: Path) -> None:
    """Another try would ask again."""
    typist = Typist(folder, REKNIT, "run", "--max-restarts=3", "debugs.py")
    typist.read("(Pdb) ")
    typist.settled()
    typist.type("q\n")
    assert typist.end() == 1
    assert "the job failed: rank 0 failed, and a worker that waits for input is not started again" in typist.screen
    assert "--stdin" not in typist.screen, "it had a terminal"
    assert "round 1" not in typist.screen


def test_one_of_several_workers_has_the_terminal(folder: Path) -> None:
    """The others get an empty stdin, as ever."""
    (folder / "two.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n    print('got', input('name: '))\nelse:\n"
        "    import sys; print('empty', repr(sys.stdin.read()))\n"
    )
    typist = Typist(folder, REKNIT, "run", "--nproc-per-node=2", "--stdin=1", "two.py")
    typist.read("name: ")
    typist.type("Ada\n")
    assert typist.end() == 0
    assert "got Ada" in typist.screen
    assert "empty ''" in typist.screen


@pytest.fixture
def shell(folder: Path) -> Iterator[Typist]:
    typist = Typist(folder, "/bin/bash", "--norc", "--noprofile", "--noediting", "-i")
    typist.read("$ ")
    yield typist
    os.kill(typist.pid, signal.SIGHUP)
    typist.end()


def test_a_shell_stops_and_continues_both(shell: Typist) -> None:
    """Ctrl-Z, bg and fg: agent and worker are one job of the shell."""
    shell.type(f"{REKNIT} run debugs.py\n")
    shell.read("(Pdb) ")
    shell.settled()
    shell.type("\x1a")
    shell.read("Stopped")
    shell.type("jobs\n")
    shell.read("Stopped")
    shell.type("fg\n")
    shell.read("debugs.py")
    shell.type("p x + 1\n")
    shell.read("42")
    shell.type("c\n")
    shell.read("the job succeeded")
    shell.type("echo status $?\n")
    shell.read("status 0")


def test_a_worker_in_the_background_changes_no_modes(shell: Typist, folder: Path) -> None:
    """After `bg`, a debugger would set the modes of the terminal that the shell uses. SIGTTOU stops it until `fg`. All
    other workers are always in the background, and `stty tostop` must not stop them."""
    says = "import os, signal\nprint(os.environ['RANK'] + ' ' + signal.getsignal(signal.SIGTTOU).name)\n"
    (folder / "says.py").write_text(says)
    shell.type(f"{REKNIT} run --stdin=0 --nproc-per-node=2 says.py\n")
    shell.read("the job succeeded")
    assert "0 SIG_DFL" in shell.screen
    assert "1 SIG_IGN" in shell.screen


def test_who_kills_the_group_leaves_a_keeper(tmp_path: Path) -> None:
    """Without a terminal, the keeper is in no group of the agent. It ends what a worker has put into a session of its
    own."""
    script = """
        import subprocess, time
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open("begun", "w").close()
        time.sleep(1000)
    """
    with Run(tmp_path, "--stdin=0", "w.py", script=script, start_new_session=True) as job:
        until((tmp_path / "begun").exists, "the worker")
        os.killpg(job.pid, signal.SIGKILL)
        until(lambda: not job.left_over(), "the keeper to end all")


def test_a_script_may_be_between_them(shell: Typist, folder: Path) -> None:
    """It is in the same process group, so the shell stops and continues all three."""
    (folder / "job.sh").write_text(f"{REKNIT} run sleeps.py\n:\n")  # a shell may become its last command
    shell.type("sh job.sh\n")
    shell.read("up")
    shell.type("\x1a")
    shell.read("Stopped")
    shell.type("fg\n")
    shell.read("sh job.sh")
    until(lambda: not shell.has_terminal, "the job to have the terminal again")
    shell.type("\x03")
    shell.read("$ ")


def test_the_terminal_works_as_before(shell: Typist, folder: Path) -> None:
    """A worker that has switched off the echo is killed, and the shell echoes again."""
    (folder / "mute.py").write_text(
        "import os, termios\nmode = termios.tcgetattr(0)\nmode[3] &= ~(termios.ECHO | termios.ICANON)\n"
        "termios.tcsetattr(0, termios.TCSANOW, mode)\nprint('mute', flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    shell.type(f"{REKNIT} run mute.py; stty -a\n")
    shell.read("killed by SIGKILL")
    shell.read("line = 0")
    shell.read("echoprt")
    assert re.search(r"[^-]icanon", shell.screen)
    assert re.search(r"[^-]echo ", shell.screen)


def test_without_a_terminal_a_debugger_says_how_to_get_one(tmp_path: Path) -> None:
    """A batch job with a forgotten `breakpoint()`: one line, and no restart."""
    status, job = run(tmp_path, "--max-restarts=3", "w.py", script=DEBUGS)
    assert status == 1
    assert "round 1" not in job.err
    how = "run one worker on a terminal without --tee, --redirects, --warm and --hang-after, or give --stdin=0"
    assert f"this worker waited for input (breakpoint(), input()), and has no terminal: {how}" in job.said
