"""The module that makes a Python a zygote, and what is left of it in a worker: nothing."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from reknit.adapters.keeper.zygote.zygote_line import HOOK
from tests.support.warming import PACKAGES, Warmed, install, needs_linux

pytestmark = needs_linux

SHOW = """if True:
    import os, sys
    print(sys.path, os.environ.get("PYTHONPATH"), os.environ.get("REKNIT_ZYGOTE"), sys.modules.get("sitecustomize"))
"""


def told(folder: Path, environ: dict[str, str], *options: str) -> str:
    return subprocess.check_output([sys.executable, *options, "-c", SHOW], text=True, env=environ, cwd=folder)


def test_a_python_that_is_not_asked_does_nothing(tmp_path: Path) -> None:
    """For example a child that a worker starts by another way."""
    assert told(tmp_path, {"PYTHONPATH": HOOK}) == told(tmp_path, {})


def test_the_other_customisations_are_found_as_ever(tmp_path: Path) -> None:
    """Those of an operating system, or of a user."""
    script = "import os, sys; sys.mine = [os.environ.get('REKNIT_ZYGOTE')]; print('once', flush=True)"
    install(tmp_path, sitecustomize=script, ahead="")
    (tmp_path / "train.py").write_text("import sys, sitecustomize; print(sys.mine, sitecustomize.__file__)")
    warmed = Warmed(tmp_path, ["train.py"], {"modules": ("ahead",)})
    try:
        (ended,) = warmed.run()
        assert ended.out == f"[None] {tmp_path / PACKAGES / 'sitecustomize.py'}\n"
        assert warmed.said() == "once\n", "in the zygote"
    finally:
        warmed.close()


def test_a_customisation_that_fails_makes_workers_cold(tmp_path: Path) -> None:
    """Python itself says so, and goes on. A zygote that goes on would be no safe copy of it."""
    install(tmp_path, sitecustomize="1 / 0", ahead="")
    (tmp_path / "train.py").write_text("print('ran')")
    warmed = Warmed(tmp_path, ["train.py"], {"modules": ("ahead",)})
    try:
        (ended,) = warmed.run()
        assert ended.out == "ran\n"
        assert "the module sitecustomize of this Python cannot be imported: ZeroDivisionError" in warmed.said()
    finally:
        warmed.close()


def test_a_python_that_does_not_come_here_runs_no_script(tmp_path: Path) -> None:
    """Otherwise a zygote would run it, beside the workers."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "train.py").write_text("open('ran', 'a').write('x')")
    warmed = Warmed(tmp_path, ["train.py"], {"modules": ("json",)}, python=str(python))
    try:
        (ended,) = warmed.run()
        assert ended.exitcode == 0
        assert "the workers start cold" in warmed.said()
    finally:
        warmed.close()
    assert (tmp_path / "ran").read_text() == "x"


def test_what_goes_wrong_in_a_zygote_is_one_line(tmp_path: Path) -> None:
    """A Python that is too old, for example, or a module that breaks another one."""
    install(tmp_path, breaks="import importlib.util; importlib.util.find_spec = None", ahead="")
    (tmp_path / "train.py").write_text("print('ran')")
    warmed = Warmed(tmp_path, ["train.py"], {"modules": ("breaks", "ahead")})
    try:
        (ended,) = warmed.run()
        assert (ended.exitcode, ended.out) == (0, "ran\n")
        assert warmed.said().startswith("reknit: the workers start cold: TypeError: ")
        assert warmed.said().count("\n") == 1
    finally:
        warmed.close()


@pytest.mark.parametrize("changes", [False, True])
def test_variables_of_a_pth_file(changes: bool, tmp_path: Path) -> None:
    """Those that it makes are there. If it changes one, each worker needs a start of its own."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "made.pth").write_text(f"import os; os.environ['{'PATH' if changes else 'MADE'}'] = 'by pth'\n")
    (tmp_path / "train.py").write_text("import os; print(os.environ.get('MADE'), os.environ['PATH'] == 'by pth')")
    warmed = Warmed(tmp_path, ["train.py"], {"modules": ("json",)}, python=str(tmp_path / "venv" / "bin" / "python"))
    (ended,) = warmed.run()
    assert ended.out == ("None True\n" if changes else "by pth False\n")
    assert bool(warmed.zygote) != changes
    assert ("Python changes the variable PATH when it starts" in warmed.said()) == changes
    warmed.close()
