"""`reknit run --warm` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import Run, refusal, run
from tests.support.stores import needs_torch
from tests.support.warming import PACKAGES, install, needs_linux

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


@pytest.mark.slow
@needs_linux
def test_without_names_it_is_torch_that_is_imported(tmp_path: Path) -> None:
    """With what the first optimizer imports. From the first round on."""
    needs_torch()
    script = "import sys; print('torch._dynamo' in sys.modules, 'torch.nn.parallel' in sys.modules)"
    status, done = run(tmp_path, "--warm", "w.py", script=script)
    assert (status, done.out) == (0, "True True\n"), done.err
    assert "cold" not in done.err


@needs_linux
@pytest.mark.parametrize("asks", [["--warm=counted"], []])
def test_named_modules_are_imported_at_once(asks: list[str], packages: dict[str, str], tmp_path: Path) -> None:
    """Also if a variable names them."""
    named = {} if asks else {"PET_WARM": "counted"}
    status, done = run(tmp_path, *asks, "--nproc-per-node=2", "w.py", script=SCRIPT, env=packages | named)
    assert (status, done.out) == (0, "0 False []\n" * 2), done.err


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
