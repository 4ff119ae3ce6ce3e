"""Running a script in an interpreter of its own: one that may become a subreaper, be killed, or end by `os._exit`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
STUBBORN = str(ROOT / "tests" / "stubborn.py")
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def command(script: str, *args: str) -> list[str]:
    """The command line of a script, which can import `reknit` and `tests` if it runs with `ENV`."""
    return [sys.executable, "-c", textwrap.dedent(script), *args]


def run_alone(script: str, *args: str) -> str:
    """Run it to its end, which must be a success; its output."""
    done = subprocess.run(command(script, *args), capture_output=True, text=True, timeout=240, env=ENV, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout
