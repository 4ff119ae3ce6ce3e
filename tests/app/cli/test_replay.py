"""`reknit replay` of real traces: the same decisions, or the first that differs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from reknit.adapters.observe.traces import below
from tests.support import places
from tests.support.command import Run, run
from tests.support.verbs import ask

FAILS_ONCE = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"


@pytest.fixture
def job(tmp_path: Path) -> Run:
    status, job = run(tmp_path, "--max-restarts=1", "w.py", script=FAILS_ONCE)
    assert status == 0
    return job


def part(tmp_path: Path) -> Path:
    (trace,) = below(str(places.below(tmp_path) / "traces"))
    return Path(trace.parts[0])


def test_what_was_decided_is_decided_again(job: Run) -> None:
    """A report of a bug comes with a trace."""
    status, out, err = ask(job, "replay")
    assert (status, err) == (0, "")
    assert "steps, all decided alike" in out


def test_the_first_difference_is_shown(job: Run, tmp_path: Path) -> None:
    """What was decided then, and what is decided now."""
    file = part(tmp_path)
    text = file.read_text()
    assert '"kind":"StartWorkers","round":1' in text
    file.write_text(text.replace('"kind":"StartWorkers","round":1', '"kind":"StartWorkers","round":9'))
    status, out, _ = ask(job, "replay")
    lines = out.splitlines()
    steps = [line for line in text.splitlines() if '"event":' in line]
    number = 1 + next(at for at, line in enumerate(steps) if '"kind":"StartWorkers","round":1' in line)
    assert status == 1
    assert lines[0] == f"node {os.uname().nodename}: step {number} differs ({file.parent})"
    assert "read Joined" in lines[1]
    assert lines[2].startswith("  then: start workers of round 9")
    assert lines[3].startswith("  now:  start workers of round 1")


def test_another_event_leads_to_another_decision(job: Run, tmp_path: Path) -> None:
    """What the agent saw is compared as well: by what it does then."""
    file = part(tmp_path)
    text = file.read_text()
    assert '"port":' in text
    file.write_text(re.sub(r'("kind":"Started".*?"port":)[0-9]+', r"\g<1>1", text, count=1))
    status, out, _ = ask(job, "replay")
    assert (status, " differs (" in out.splitlines()[0]) == (1, True)


@pytest.mark.parametrize("content", [b"rubbish\n", b"\xff\x00\n", b"[1]\n", b""])
def test_a_file_that_is_no_trace(job: Run, tmp_path: Path, content: bytes) -> None:
    """It has a status of its own: a script must not take it for a trace that is decided alike."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "000000.jsonl").write_bytes(content)
    status, _, err = ask(job, "replay", str(folder))
    assert status == 65
    assert "Traceback" not in err


def test_what_cannot_be_read_is_named(job: Run, tmp_path: Path) -> None:
    """With file and line, and a status of its own."""
    file = part(tmp_path)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:5], "rubbish\n", *lines[5:]]))
    status, out, err = ask(job, "replay")
    assert status == 65
    assert f"{file}, line 6, cannot be read" in err
    assert "all decided alike" in out
