"""Which runs of a job a user means."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from reknit.app.cli.looking import clock_of, command_text, runs
from reknit.app.cli.options import UsageError
from tests.support import places
from tests.support.command import REKNIT, run
from tests.support.verbs import ask


def test_a_name_means_the_latest_run_and_a_folder_means_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is started again under its name. What it did before is another story."""
    places.move(monkeypatch, tmp_path)
    for argv in (("--log-dir=logs",), ("--log-dir=logs",), ()):
        run(tmp_path, "--rdzv-id=j", *argv, "w.py", script="pass")
    (latest,) = runs(["j"])
    assert runs([])[0].nodes[0].began == latest.nodes[0].began
    both = runs([str(tmp_path / "logs")])
    assert [one.job for one in both] == ["j", "j"]
    assert both[0].nodes[0].began < both[1].nodes[0].began < latest.nodes[0].began
    assert latest.live == frozenset()
    with pytest.raises(UsageError, match="nix is no folder"):
        runs(["nix"])


def test_a_command_line_is_written_as_one_types_it() -> None:
    """An endless one is cut."""
    assert command_text(("python3", "-u", "train.py", "--name=two words")) == "python3 -u train.py '--name=two words'"
    assert command_text(("train", "x" * 300)) == f"train {'x' * 194} …"


def test_the_day_is_left_out_if_it_is_one_day() -> None:
    """Times are short, and never ambiguous."""
    assert len(clock_of(1000.0, 1001.0)(1000.25)) == len("00:16:40.2")
    assert clock_of(0.0, 3 * 86400.0)(0.0).count("-") == 2


def test_who_waits_for_a_long_trace_sees_how_far_it_is(tmp_path: Path) -> None:
    """On a terminal, and on stderr: what is told stays as it is."""
    _, job = run(tmp_path, f"--log-dir={tmp_path}/logs", "w.py", script="pass")
    (part,) = (tmp_path / "logs").rglob("000000.jsonl")
    plain = ask(job, "replay", str(tmp_path / "logs"))[1]
    shutil.copy(part, part.with_name("000001.jsonl"))
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [REKNIT, "replay", str(tmp_path / "logs")], stdout=subprocess.PIPE, stderr=theirs, env=job.base_env, check=True
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "reading the trace of node " in shown
    assert "\x1b[?25l" not in shown  # the cursor is not hidden: after Ctrl-C, nobody would show it again
    assert done.stdout.decode().count("\n") == plain.count("\n") == 1
