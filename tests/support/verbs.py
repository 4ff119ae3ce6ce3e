"""The verbs of the command that look at jobs, run beside the job that they look at."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.support.command import REKNIT, Run
from tests.support.waiting import PATIENCE_S


def ask(job: Run, *argv: str, **settings: Any) -> tuple[int, str, str]:
    """Run a verb where this job runs or has run. Returns the exit status, stdout and stderr."""
    done = subprocess.run(
        [REKNIT, *argv],
        check=False,
        cwd=settings.pop("cwd", job.base_env["TMPDIR"]),
        env=job.base_env | settings.pop("env", {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **settings,
    )
    return done.returncode, done.stdout, done.stderr
