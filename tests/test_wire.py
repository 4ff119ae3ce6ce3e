"""The composition root: signals and the warden's end as requests, the folder of a run's files."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reknit.adapters.clock import Clock
from reknit.app.config import Config, configure
from reknit.app.options import UsageError, parse
from reknit.app.wire import SECRETS, LogFolder, Requests
from tests.command import run


def config(*argv: str) -> Config:
    return configure(parse([*argv, __file__], {}), {})


@pytest.fixture
def line() -> Iterator[tuple[int, int]]:
    """Both ends of a life-line; tests close the warden's."""
    ours, held = os.pipe()
    yield ours, held
    os.close(ours)


# ---- requests ----


def test_signals_are_requests(clock: Clock, line: tuple[int, int]) -> None:
    """They wake the loop up, and are handed out once."""
    requests = Requests(clock, [signal.SIGUSR1, signal.SIGUSR2], line[0])
    try:
        assert requests.taken() == []
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        clock.wait(None)
        assert requests.taken() == [signal.SIGUSR1, signal.SIGUSR2]
        assert requests.taken() == []
    finally:
        requests._signals.close()
        os.close(line[1])


def test_the_end_of_the_warden_is_sigkill_once(
    clock: Clock, line: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody is left who would clean up after us: no grace. And a descriptor at its end must not make the loop spin."""
    requests = Requests(clock, [], line[0])
    try:
        os.close(line[1])
        clock.wait(None)
        assert requests.taken() == [signal.SIGKILL]
        assert requests.taken() == []
        assert capfd.readouterr().err == "reknit: the process that started this agent was killed\n"
        clock.wait(clock.now() + 0.01)  # nothing is readable any more: this waits for its deadline
    finally:
        requests._signals.close()


# ---- the folder ----


def test_a_folder_of_this_run_alone(tmp_path: Path) -> None:
    """Two runs with the same id and --log-dir must not write over each other's files."""
    first, second = (LogFolder(config(f"--log-dir={tmp_path}/a/b", "--rdzv-id=job")) for _ in range(2))
    assert first.path != second.path
    for folder in (first, second):
        assert Path(folder.path).parent == tmp_path / "a" / "b"
        assert Path(folder.path).name.startswith("job_")
        folder.close()
        assert os.path.isdir(folder.path), "it was asked for"


def test_a_run_id_decides_over_no_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are made from job names and paths; a slash in one must not leave the base."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for run_id in ("a/b", "../../x", "/etc", "x" * 300):
        folder = LogFolder(config(f"--rdzv-id={run_id}"))
        assert Path(folder.path).parent == tmp_path
        folder.close()
    assert os.listdir(tmp_path) == []


def test_a_temporary_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun leaves one behind with every run. What the error files said is in the report."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = LogFolder(config())
    os.makedirs(f"{folder.path}/round_0/0")
    Path(folder.path, "round_0/0/error.json").write_text("{}")
    folder.close()
    assert os.listdir(tmp_path) == []


def test_a_temporary_folder_that_cannot_be_made_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /tmp is no reason not to train."""
    monkeypatch.setenv("TMPDIR", "/proc")
    folder = LogFolder(config())
    folder.close()
    assert folder.path == ""


def test_what_cannot_be_removed_fails_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network's file system refuses for its own reasons; the job has succeeded all the same."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = LogFolder(config())
    Path(folder.path, "error.json").touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", lambda path: (_ for _ in ()).throw(PermissionError(path)))
        folder.close()
    assert os.listdir(folder.path) == ["error.json"]


def test_redirected_output_is_kept_without_a_log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends output to files wants to read them."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = LogFolder(config("--redirects=3"))
    folder.close()
    assert os.path.isdir(folder.path)


def test_a_missing_temporary_folder_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR of another host, in a copied environment: like Python, we take /tmp, and leave nothing at that place."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    folder = LogFolder(config())
    folder.close()
    assert folder.path.startswith("/tmp/reknit_")
    assert not (tmp_path / "none").exists()


def test_dev_null_means_no_files(tmp_path: Path) -> None:
    """torchrun's way to say so."""
    folder = LogFolder(config("--log-dir=/dev/null", "--redirects=3"))
    folder.close()
    assert folder.path == ""
    script = "import os; print(1); raise SystemExit(bool(os.environ.get('TORCHELASTIC_ERROR_FILE')))"
    status, job = run(tmp_path, "--log-dir=/dev/null", "--redirects=1", "w.py", script=script)
    assert (status, job.out) == (0, ""), job.err


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/nothing"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The flag, the path as it was given, and the system's reason."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"^--log-dir={path}: (Not a directory|No such file or directory)$"):
        LogFolder(config(f"--log-dir={path}"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    """The usual case on a cluster."""
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match=r"^--log-dir=.*: Permission denied$"):
        LogFolder(config(f"--log-dir={tmp_path}/logs"))
    tmp_path.chmod(0o700)


# ---- together ----


def test_workers_get_the_threads_that_were_chosen(tmp_path: Path) -> None:
    """Contract 1.3, seen from the worker."""
    script = "import os; os.write(1, os.environ.get('OMP_NUM_THREADS', 'None').encode() + b' ')"
    assert run(tmp_path, "--nproc-per-node=2", "w.py", script=script)[1].out == "1 1 "
    assert run(tmp_path, "w.py", script=script)[1].out == "None "
    assert run(tmp_path, "--nproc-per-node=2", "w.py", env={"OMP_NUM_THREADS": "3"})[1].out == "3 3 "


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
        "from reknit.app.cli import main\n"
        "main()\n"
    )
    status, job = run(tmp_path, sys.executable, "launcher.py", "run", "w.py", script="pass")
    assert status == 0, job.err
    loaded = set((tmp_path / "modules").read_text().split())
    assert "reknit.app.wire" in loaded
    several = {"reknit.app.several", "reknit.app.rendezvous", "reknit.core.codec", "reknit.core.snapshot"}
    several |= {f"reknit.adapters.{name}" for name in ("ports", "link", "envelope", "hostlock", "address", "tcpstore")}
    heavy = {"typing", "re", "contextlib", "socket", "json", "hashlib", "threading", "fcntl", "torch"}
    assert not loaded & (several | heavy)


def test_secrets_are_for_agents_alone(tmp_path: Path) -> None:
    """One node has no use for them, and its workers even less."""
    script = f"import os; print([name for name in {SECRETS!r} if name in os.environ])"
    status, job = run(tmp_path, "w.py", script=script, env=dict.fromkeys(SECRETS, "s3cret"))
    assert (status, job.out) == (0, "[]\n")
    assert "s3cret" not in job.err
