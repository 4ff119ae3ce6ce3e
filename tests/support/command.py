"""The real `reknit` command as a process, and what it leaves behind.

Every process of a run inherits a mark in its environment. So it is found even if it has become a daemon.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.support import traces
from tests.support.leaks import marked
from tests.support.places import VARIABLE
from tests.support.waiting import PATIENCE_S, until

REKNIT = str(Path(sys.executable).with_name("reknit"))
STUBBORN = str(Path(__file__).with_name("stubborn.py"))
_MARK = "REKNIT_TEST_MARK"
STORY = "the whole story: reknit explain DIR"
"""What the report of a failed job says last, as `Run.said` has it. Only the line about the exit status may follow."""
_OURS = re.compile(r"PET_|TORCH|OMP_NUM_THREADS|PYTHON_EXEC|REKNIT_")


class Run:
    """One run of `reknit run`, or of the command in `argv`. Use `with`, which ends the processes that are left.

    `script`: the text of a worker, put into `tmp_path` and named in `argv` as "w.py".
    """

    def __init__(
        self, tmp_path: Path, *argv: str, script: str = "", env: dict[str, str] | None = None, **popen: Any
    ) -> None:
        if script:
            (tmp_path / "w.py").write_text(textwrap.dedent(script))
        self.mark = uuid.uuid4().hex
        self.base_env = base = {name: value for name, value in os.environ.items() if not _OURS.match(name)}
        base[_MARK] = self.mark
        base["PET_LOG_TIMES"] = "never"  # lines are compared. Tests of times ask for them
        base["TMPDIR"] = str(tmp_path)  # pytest removes the files of the run with the test
        base[VARIABLE] = str(tmp_path)  # another test's run must not end what this one leaves
        settings = {
            "cwd": tmp_path,
            "env": {**base, **(env or {})},
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **popen,
        }
        command = [REKNIT, "run", *argv] if not argv or argv[0] != sys.executable else list(argv)
        self.process = subprocess.Popen(command, **settings)
        self.pid = self.process.pid
        self.out = self.err = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.process.kill()  # the keeper of an agent that dies ends everything
        self.process.communicate(timeout=PATIENCE_S)
        if kind is None:
            until(lambda: not self.left_over(), f"the end of {self.left_over()}")
            traces.check(Path(self.base_env[VARIABLE]))  # whatever happens to an agent, it can be made again

    @property
    def keeper(self) -> int:
        """The pid of the keeper, the agent's first child."""
        return until(self._children)[0]

    def _children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.pid).children()]

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> int:
        """Wait until the run has ended. Returns its status as `subprocess` has it. No process of the run may be
        left."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        self.out, self.err = ((text or b"").decode(errors="replace") for text in (out, err))
        assert not self.left_over(), "a process outlived the command"
        return self.process.returncode

    def left_over(self) -> list[int]:
        """The living processes of this run."""
        return sorted(marked(f"{_MARK}={self.mark}"))

    @property
    def said(self) -> list[str]:
        """The agent's own lines without their prefix. Values that differ from run to run are replaced."""
        lines = [line.removeprefix("reknit: ") for line in self.err.splitlines() if line.startswith("reknit: ")]
        host = re.escape(os.uname().nodename)
        told = (
            (r"pid \d+", "pid P"),
            (r"(had run for) [\d.]+ s", r"\1 T s"),
            (r"(127\.0\.0\.1):\d+", r"\1:PORT"),
            (r"(reknit explain) .+", r"\1 DIR"),
            (rf"node {host}\b", "node N"),
        )
        for pattern, put in told:
            lines = [re.sub(pattern, put, line) for line in lines]
        return lines


def run(tmp_path: Path, *argv: str, **settings: Any) -> tuple[int, Run]:
    """Run the command until it ends."""
    with Run(tmp_path, *argv, **settings) as job:
        return job.end(), job


def refusal(tmp_path: Path, *argv: str, **settings: Any) -> str:
    """The line of a command that refuses to run. It must be exactly one line, with status 2 and nothing on stdout."""
    status, job = run(tmp_path, *argv, **settings)
    assert status == 2, job.err
    assert job.out == ""
    assert job.err.count("\n") == 1
    assert job.err.startswith("reknit: ")
    return job.err.removeprefix("reknit: ").rstrip("\n")
