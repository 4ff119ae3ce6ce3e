"""The examples for people who embed the core do what docs/embedding.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "embedding.md").read_text()


@cache
def printed(name: str) -> str:
    """What the example prints. It is run once for all tests of this file."""
    command = [sys.executable, str(ROOT / "examples" / name)]
    # Without a buffer, `print` writes a line and its end apart, and lines of two processes get mixed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def bare(line: str) -> str:
    """The line without what differs in each run: ports, process numbers, and whether the other worker still ran when
    one failed."""
    return re.sub(r"(127\.0\.0\.1:|pid )\d+", r"\1N", line).partition("; stopping this node's workers")[0]


def test_a_scheduler_runs_three_jobs() -> None:
    """One succeeds, one after a restart, one fails for good. A fourth can never run, and is refused."""
    lines = printed("embed_scheduler.py").splitlines()
    assert {line for line in lines if ": the job " in line or ": refused" in line} == {
        "plain: the job succeeded",
        "shaky: the job succeeded after 1 restart",
        "broken: the job failed: rank 0 failed, and the only restart is spent",
        "greedy: refused: it needs 6 slots, and there are 5",
    }
    assert lines.count("trained") == 2
    assert [line.split(":")[0] for line in lines if "(restart 1 of " in line].count("shaky") == 1


def test_a_scheduler_says_why_a_job_has_failed() -> None:
    """The page shows these lines."""
    lines = [bare(line) for line in printed("embed_scheduler.py").splitlines()]
    shown = PAGE.partition("$ python examples/embed_scheduler.py\n")[2].partition("```")[0].splitlines()
    assert {bare(line) for line in shown} - {"…"} <= set(lines)
    assert "broken:   rank 0 failed first (node here, local rank 0, pid N): exit code 3" in lines


def test_an_operator_prints_what_the_page_shows() -> None:
    """Its time is its own, so it decides the same in every run."""
    shown = PAGE.partition("$ python examples/embed_operator.py\n")[2].partition("```")[0]
    assert printed("embed_operator.py") == shown


@pytest.mark.parametrize("name", ["embed_scheduler.py", "embed_operator.py"])
def test_an_example_can_be_read_at_once(name: str) -> None:
    """Less than 120 lines of code."""
    lines = (ROOT / "examples" / name).read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) < 120 + 10, "and ten of prose"
