"""`reknit warm`, and `reknit run --warm` as a user types it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reknit.adapters.keeper.zygote import learned
from reknit.adapters.keeper.zygote.commandline import CommandLine
from reknit.app.cli.warm import warm
from tests.support.command import Run, refusal, run
from tests.support.warming import PACKAGES, install, needs_linux

Ask = Callable[..., tuple[int, str]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ask:
    """Calls the command in the folder of the test. Returns its status and all that it has said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def asked(*argv: str) -> tuple[int, str]:
        status = warm(argv, {"HOME": str(tmp_path)})
        return status, "".join(capfd.readouterr())

    return asked


def test_what_is_known_is_shown_and_forgotten(ask: Ask, tmp_path: Path) -> None:
    """With the reason for each module that is left out, and without what it holds."""
    file = learned.file_of(CommandLine((), "", "train.py"), sys.executable, str(tmp_path), {"HOME": str(tmp_path)})
    assert learned.open_folder(file) == ""
    modules = ["torch", "torch.nn", "numpy", "bad", "bad.inner", "badly", "json", "json.decoder"]
    learned.note(file, "/w/train.py", modules=modules)
    assert (
        ask("train.py")[1].splitlines()[2] == "  the next launch with --warm finds out which of them workers can share"
    )
    learned.note(file, "/w/train.py", left_out={"numpy.a": "imports bad", "bad": "starts a thread", "b": "imports bad"})
    assert ask("train.py")[1].splitlines() == [
        "/w/train.py: imported once for all workers, each with all that it imports:",
        "  torch (2 modules), Python itself (2 modules), numpy, badly",
        "  left out: bad starts a thread",
        "  left out, because they import what is left out: numpy.a, b",
        f"  kept in {file}",
    ]
    assert ask("--forget", "train.py") == (0, "train.py: forgotten\n")
    assert ask("--forget", "train.py") == (0, "train.py: nothing was known\n")
    assert ask("train.py")[1].startswith("train.py: nothing is known yet.")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "one script is needed"),
        (["a.py", "b.py"], "one script is needed"),
        (["train.py", "--forget"], "one script is needed, after the options"),
        (["missing.py"], "script missing.py does not exist"),
        (["--forgot", "train.py"], "unknown option --forgot; did you mean --forget?"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], said: str, ask: Ask) -> None:
    """And status 2."""
    status, text = ask(*argv)
    assert (status, text.count("\n")) == (2, 1)
    assert said in text


# ---- `reknit run --warm` ----

SCRIPT = """
    import os, sys, counted
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"{restart} {counted.PID == os.getpid()} {sys.argv[1:]}\\n".encode())
    if restart == "0" and "--fail" in sys.argv: sys.exit(3)
"""


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, str]:
    """An installed package. Returns the variables with which it is found."""
    install(tmp_path, counted="import os; PID = os.getpid()")
    return {"PYTHONPATH": str(tmp_path / PACKAGES), "HOME": str(tmp_path), "XDG_CACHE_HOME": ""}


@needs_linux
def test_a_launch_teaches_the_next(packages: dict[str, str], tmp_path: Path) -> None:
    """From the second one on nothing is imported twice."""
    status, first = run(tmp_path, "--warm", "w.py", "a", script=SCRIPT, env=packages)
    assert (status, first.out) == (0, "0 True ['a']\n"), first.err
    status, second = run(tmp_path, "--warm", "--max-restarts=1", "w.py", "--fail", env=packages)
    assert (status, second.out) == (0, "0 False ['--fail']\n1 False ['--fail']\n"), second.err
    assert "cold" not in second.err


@needs_linux
@pytest.mark.parametrize("asks", [["--warm=counted"], []])
def test_named_modules_are_imported_at_once(asks: list[str], packages: dict[str, str], tmp_path: Path) -> None:
    """Also if a variable names them."""
    named = {} if asks else {"PET_WARM": "counted"}
    status, done = run(tmp_path, *asks, "--nproc-per-node=2", "w.py", script=SCRIPT, env=packages | named)
    assert (status, done.out) == (0, "0 False []\n" * 2), done.err
    assert not (tmp_path / ".cache").exists(), "nothing is learned"


@needs_linux
def test_a_program_that_is_no_python_cannot_be_warm(tmp_path: Path) -> None:
    """One line says so, before anything runs."""
    (tmp_path / "job.sh").write_text("#!/bin/sh\n")
    (tmp_path / "job.sh").chmod(0o755)
    assert "--warm: ./job.sh is no Python" in refusal(tmp_path, "--warm", "--no-python", "./job.sh")


@needs_linux
def test_a_killed_run_leaves_no_zygote(packages: dict[str, str], tmp_path: Path) -> None:
    """`Run` finds every process by its mark."""
    script = "import counted, time; print('runs', flush=True); time.sleep(1000)"
    with Run(tmp_path, "--warm=counted", "w.py", script=script, env=packages) as running:
        assert running.process.stdout is not None
        assert running.process.stdout.readline() == b"runs\n"
