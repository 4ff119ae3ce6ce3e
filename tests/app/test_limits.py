"""A limit of the machine is told from a bug of reknit: it gives one line and status 71, wherever it strikes."""

from __future__ import annotations

import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from reknit.app.limits import limit_text
from tests.support.command import REKNIT, run
from tests.support.places import VARIABLE


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC])
def test_what_the_system_has_run_out_of(number: int) -> None:
    """The system's own word, and the file if there is one."""
    text = limit_text(OSError(number, os.strerror(number), "/some/file"))
    assert text is not None
    assert text.startswith(f"{os.strerror(number)}: /some/file")


def test_threads_and_memory() -> None:
    """Python reports these two without an error number."""
    assert limit_text(RuntimeError("can't start new thread")) is not None
    assert limit_text(MemoryError()) == "no memory is left"


def test_a_limit_behind_another_error() -> None:
    """An import that meets a limit ends in an error of its own."""
    error = ImportError("no module")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert limit_text(error) == "Too many open files; raise `ulimit -n`"


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "no file"), RuntimeError("another"), KeyError("x")])
def test_a_bug_is_no_limit(error: Exception) -> None:
    """Whoever reads "a limit" does not report a bug."""
    assert limit_text(error) is None


# ---- real limits, through the real command ----


def limited(ulimit: str, *argv: str) -> tuple[str, str, str]:
    """A command line that runs reknit under a limit of the shell."""
    command = f"ulimit {ulimit}; exec {shlex.join([REKNIT, 'run', *argv])}"
    return sys.executable, "-c", f"import os; os.execvp('bash', ['bash', '-c', {command!r}])"


@pytest.mark.parametrize("limit", range(5, 17))
@pytest.mark.parametrize("backend", ["alone", "file"])
@pytest.mark.slow
def test_descriptors(tmp_path: Path, backend: str, limit: int) -> None:
    """Whatever needs the descriptor that is not there: an import, the journal, a pipe or a worker."""
    conf = f"--rdzv-conf=last_call_timeout=0,join_timeout=1 --rdzv-endpoint={tmp_path}/j --store-timeout=1"
    conf += " --rdzv-id=j --local-addr=127.0.0.1"
    argv = ["--nnodes=1:2", "--rdzv-backend=file", *conf.split()] if backend == "file" else []
    status, job = run(tmp_path, *limited(f"-n {limit}", *argv, "--no-python", "true"))
    assert "bug in reknit" not in job.err, job.err
    assert "Traceback" not in job.err, job.err
    # 74: a journal that cannot be opened is out of reach, whatever the reason, and may be back in a second.
    assert status in (0, 71, 74), (limit, job.err)
    if status:
        assert re.fullmatch(rf"reknit: exit status {status}: .+", job.err.splitlines()[-1]), job.err
    if status == 74:
        assert "Too many open files" in job.err


@pytest.mark.parametrize("files", [1, 2], ids=["folder", "file"])
def test_a_full_disk_for_the_lock(tmp_path: Path, files: int) -> None:
    """The lock's folder is often on a small file system. The journal, which 69 speaks of, has nothing to do with it."""
    small = tmp_path / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o nr_inodes={files} none {small}"
    private = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*private, mount], capture_output=True).returncode:
        pytest.skip("no mounts of one's own here: unshare is not permitted")
    argv = ["--nnodes=1:2", "--rdzv-backend=file", f"--rdzv-endpoint={tmp_path}/j", "--rdzv-id=j", "w.py"]
    command = f"{mount} && exec {shlex.join([REKNIT, 'run', *argv])}"
    launcher = f"import os; os.execvp('unshare', {[*private, command]!r})"
    status, job = run(tmp_path, sys.executable, "-c", launcher, env={VARIABLE: str(small)}, script="pass")
    assert status == 71, job.err
    (line,) = job.said
    assert line.startswith(f"exit status 71: no lock for this node: No space left on device: {small}/reknit-")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, so that the limit holds")
def test_processes() -> None:
    """Threads count as processes: a file backend needs some. Every limit ends in one clear line, or in success."""
    with TemporaryDirectory() as name:  # pytest's own folders are out of another user's reach
        tmp_path = Path(name)
        tmp_path.chmod(0o777)
        for limit in range(1, 9):
            under_a_limit_of_processes(tmp_path, limit)


def under_a_limit_of_processes(tmp_path: Path, limit: int) -> None:
    conf = f"--rdzv-conf=last_call_timeout=0,join_timeout=1 --rdzv-endpoint={tmp_path}/j --store-timeout=1"
    conf += " --rdzv-id=j --local-addr=127.0.0.1"
    patch = f"""
import argparse, inspect, locale, re, traceback, contextlib, json, hashlib, hmac, fcntl, socket, threading
import ctypes, psutil, shutil, reknit.adapters.keeper.process.keeper
import reknit.app.cli.run, reknit.app.cli.parsing, reknit.app.cli.running, reknit.app.wiring.several_nodes
import reknit.adapters.journals.file.journal, reknit.adapters.keeper.failures.error_files
import reknit.adapters.keeper.failures.tracebacks
import reknit.app.input.meeting, reknit.core.text.describe, reknit.core.text.snapshot, reknit.app.limits
import os, resource
os.setgroups([]); os.setgid(65534); os.setuid(65534 - 9)
resource.setrlimit(resource.RLIMIT_NPROC, ({limit}, {limit}))
from reknit.app.cli.main import main
main()
"""
    (tmp_path / "launcher.py").write_text(patch)
    argv = ["run", "--nnodes=1:2", "--rdzv-backend=file", *conf.split(), "--no-python", "true"]
    status, job = run(tmp_path, sys.executable, "launcher.py", *argv)
    assert "bug in reknit" not in job.err, job.err
    assert "Traceback" not in job.err, job.err
    assert status in (0, 71), (limit, job.err)
