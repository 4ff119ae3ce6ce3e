"""Running a script in an interpreter of its own. The script may become a subreaper, be killed, or end by `os._exit`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
STUBBORN = str(ROOT / "tests" / "support" / "stubborn.py")
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def command(script: str, *args: str) -> list[str]:
    """The command line of a script. With the environment `ENV` the script can import `reknit` and `tests`."""
    return [sys.executable, "-c", textwrap.dedent(script), *args]


def run_alone(script: str, *args: str) -> str:
    """Run the script until it ends, which must be a success. Returns its output."""
    done = subprocess.run(command(script, *args), capture_output=True, text=True, timeout=240, env=ENV, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_killed(script: str, *args: str) -> str:
    """Run the script, and then kill its process as the kernel does: nothing that it holds is closed in order. It has
    the environment of now. Returns its output."""
    script = textwrap.dedent(script) + "\nimport os, sys\nsys.stdout.flush()\nos.kill(os.getpid(), 9)\n"
    env = {**os.environ, "PYTHONPATH": ENV["PYTHONPATH"]}
    done = subprocess.run(command(script, *args), capture_output=True, text=True, timeout=240, env=env, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout
