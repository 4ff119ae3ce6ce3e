"""How many workers a word like `gpu` means. The interpreters here are fakes, so no number depends on the host."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

from reknit.app.cli.options import UsageError
from reknit.app.input import devices


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for Python: what is written into it is a shell script that answers."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(path))
    return path


def answers(interpreter: Path, text: str, status: int = 0) -> None:
    interpreter.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")


def cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def test_cpus_are_those_that_we_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with 4 of 128 CPUs gets 4 workers; and nobody asks torch for it."""
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: pytest.fail("torch was asked"))
    assert devices.count("cpu", os.environ) == cpus()


def test_what_torch_counts(interpreter: Path) -> None:
    """The numbers are torch's, per kind."""
    answers(interpreter, "gpu 8\nxpu 3\nauto 8")
    assert [devices.count(kind, os.environ) for kind in ("gpu", "xpu", "auto")] == [8, 3, 8]


def test_a_talkative_torch_is_understood(interpreter: Path) -> None:
    """Site hooks and plugins print what they like."""
    answers(interpreter, "Loading plugin…\ngpu two\ngpu 2\nbye now then\n\xff")
    assert devices.count("gpu", os.environ) == 2


def test_no_device_is_said(interpreter: Path) -> None:
    """`gpu` where there is none is a mistake, never one worker on a CPU."""
    answers(interpreter, "gpu 0\nxpu 0\nauto 0")
    for kind in ("gpu", "xpu"):
        with pytest.raises(UsageError, match=f"^--nproc-per-node={kind}: torch sees no such device here$"):
            devices.count(kind, os.environ)


def test_a_missing_torch_is_not_a_missing_device(interpreter: Path) -> None:
    """Who has forgotten to install torch must not look for a broken driver."""
    answers(interpreter, "", status=1)
    with pytest.raises(
        UsageError,
        match=r"^--nproc-per-node=gpu: the devices cannot be counted, because torch cannot be imported$",
    ):
        devices.count("gpu", os.environ)


def test_auto_without_devices_is_cpus(interpreter: Path) -> None:
    """As in torchrun. Even where torch cannot be imported: nothing breaks where there is none."""
    answers(interpreter, "gpu 0\nxpu 0\nauto 0")
    assert devices.count("auto", os.environ) == cpus()
    answers(interpreter, "", status=1)
    assert devices.count("auto", os.environ) == cpus()


def test_an_interpreter_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable names what is wrong, not a traceback of ours."""
    monkeypatch.setenv("PYTHON_EXEC", "/no/such/python")
    with pytest.raises(UsageError, match=r"devices cannot be counted: .*No such file.*'/no/such/python'"):
        devices.count("gpu", os.environ)


def test_an_answer_that_does_not_come(interpreter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that hangs must not hang the launcher without a word."""
    interpreter.write_text("#!/bin/sh\nexec sleep 1000\n")
    monkeypatch.setattr(devices, "PATIENCE_S", 0.05)
    with pytest.raises(UsageError, match=r"devices cannot be counted: .*timed out"):
        devices.count("gpu", os.environ)


@pytest.mark.slow
def test_the_question_can_be_asked_of_the_real_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only part of this that torch itself has to understand. What it counts is the host's business."""
    pytest.importorskip("torch")
    monkeypatch.setattr(devices, "_asked", cache(devices._asked))  # its answer holds all kinds

    def answered(kind: str) -> bool:
        try:
            return devices.count(kind, {}) > 0
        except UsageError as error:
            return str(error).endswith("torch sees no such device here")

    assert [answered(kind) for kind in ("gpu", "xpu", "auto")] == [True] * 3
