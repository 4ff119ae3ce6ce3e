"""The wiring of an agent, seen from the command line: what one run loads, gives to its workers, and leaves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from reknit.app.wiring.surroundings import SECRETS
from tests.support.command import run


def test_dev_null_means_no_files(tmp_path: Path) -> None:
    """torchrun's way to say so."""
    script = "import os; print(1); raise SystemExit(bool(os.environ.get('TORCHELASTIC_ERROR_FILE')))"
    status, job = run(tmp_path, "--log-dir=/dev/null", "--redirects=1", "w.py", script=script)
    assert (status, job.out) == (0, ""), job.err


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/nothing"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, path: str) -> None:
    """The flag, the path as it was given, and the system's reason. The keeper finds it out, the agent ends with 2."""
    (tmp_path / "file").touch()
    status, job = run(tmp_path, f"--log-dir={path}", "w.py", script="pass")
    assert status == 2
    reasons = ("Not a directory", "No such file or directory")
    assert job.said[-1] in {f"--log-dir={path} cannot be made: {why}" for why in reasons}


def test_workers_get_the_threads_that_were_chosen(tmp_path: Path) -> None:
    """docs/torchelastic.md#threads, seen from the worker."""
    script = "import os; os.write(1, os.environ.get('OMP_NUM_THREADS', 'None').encode() + b'\\n')"
    assert run(tmp_path, "--nproc-per-node=2", "w.py", script=script)[1].out == "1\n1\n"
    assert run(tmp_path, "w.py", script=script)[1].out == "None\n"
    assert run(tmp_path, "--nproc-per-node=2", "w.py", env={"OMP_NUM_THREADS": "3"})[1].out == "3\n3\n"


def test_a_run_leaves_no_temporary_files(tmp_path: Path) -> None:
    """Whatever the outcome, unless there is something to read."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for status in (0, 7):
        assert run(tmp_path, "w.py", script=f"raise SystemExit({status})", env={"TMPDIR": str(temporary)})[0] == status
        assert os.listdir(temporary) == []


def test_a_single_node_loads_nothing_that_only_several_need(tmp_path: Path) -> None:
    """A launch should cost what starting Python costs: this is what is there when the first worker is spawned."""
    (tmp_path / "launcher.py").write_text(
        "import os, sys\n"
        "spawn = os.posix_spawnp\n"
        "def told(*args, **settings):\n"
        "    print(*sys.modules, file=open('modules', 'w'))\n"
        "    return spawn(*args, **settings)\n"
        "os.posix_spawnp = told\n"
        "from reknit.app.cli.main import main\n"
        "main()\n"
    )
    status, job = run(tmp_path, sys.executable, "launcher.py", "run", "w.py", script="pass")
    assert status == 0, job.err
    loaded = set((tmp_path / "modules").read_text().split())
    assert "reknit.app.wiring.wiring" in loaded
    several = {"reknit.app.wiring.several_nodes", "reknit.app.input.meeting", "reknit.core.text.snapshot"}
    several |= {
        f"reknit.adapters.{name}"
        for name in ("link", "host.lock", "host.address", "journals.envelope", "journals.tcpstore")
    }
    heavy = {"asyncio", "hashlib", "logging", "multiprocessing", "psutil", "shutil", "subprocess", "torch"}
    assert not loaded & (several | heavy)


def test_secrets_are_for_agents_alone(tmp_path: Path) -> None:
    """One node has no use for them, and its workers even less."""
    script = f"import os; print([name for name in {SECRETS!r} if name in os.environ])"
    status, job = run(tmp_path, "w.py", script=script, env=dict.fromkeys(SECRETS, "s3cret"))
    assert (status, job.out) == (0, "[]\n")
    assert "s3cret" not in job.err
