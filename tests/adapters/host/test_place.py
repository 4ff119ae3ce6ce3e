"""One folder per host and user: real folders, real users, and many first starts at once."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reknit.adapters.host import place as hostplace
from reknit.adapters.host.place import open_folder
from reknit.adapters.runtime.ports import Refused
from tests.support import places
from tests.support.users import NOBODY, as_nobody, forked, needs_two_users
from tests.support.waiting import descriptors

ROUNDS, AGENTS = 15, 4


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like /tmp, in which this test's folder is."""
    with places.shared() as path:
        places.move(monkeypatch, path)
        yield path


def opened() -> str:
    """The path of the folder."""
    fd, path = open_folder()
    os.close(fd)
    return path


def test_the_folder_is_private_and_stays_the_same(base: Path) -> None:
    """In /tmp everybody could hold our locks."""
    before = descriptors()
    path = opened()
    assert path == str(places.below(base))
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o1700
    assert opened() == path
    assert os.listdir(base) == [os.path.basename(path)]
    assert descriptors() == before


def test_no_variable_moves_the_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts of one job with and without XDG_RUNTIME_DIR have trained side by side."""
    path = opened()
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME", "HOME", "TMPDIR", "TEMP", "USER", "HOSTNAME"):
        monkeypatch.setenv(name, str(base / "elsewhere"))
        assert opened() == path


SQUATS: dict[str, Callable[[str], object]] = {
    "folder": lambda path: os.mkdir(path, 0o777),
    "link": lambda path: os.symlink("/", path),
    "link to nothing": lambda path: os.symlink("/no/such", path),
    "file": lambda path: os.close(os.open(path, os.O_CREAT)),
    "fifo": lambda path: os.mkfifo(path, 0o666),
}


@needs_two_users
@pytest.mark.parametrize("what", SQUATS)
def test_another_user_cannot_take_the_place(base: Path, what: str) -> None:
    """`mkdir -m 777 /tmp/reknit-<uid>` has kept a user from every start. The place is the same for all starts, also
    when the other user gives the name free in between."""
    usual = str(places.below(base))
    as_nobody(lambda: SQUATS[what](usual))
    path = opened()
    assert path.startswith(f"{usual}-")
    assert opened() == path
    as_nobody(lambda: os.rmdir(usual) if what == "folder" else os.unlink(usual))
    assert opened() == path
    as_nobody(lambda: os.mkdir(f"{usual}-0", 0o1700))  # it would come first, if it were ours
    assert opened() == path


@needs_two_users
def test_another_user_has_a_place_of_their_own(base: Path) -> None:
    """Neither can enter the place of the other."""

    def other() -> None:
        assert os.path.basename(opened()) == f"reknit-{NOBODY}"
        with pytest.raises(PermissionError):
            os.open(ours, os.O_RDONLY)

    ours = opened()
    as_nobody(other)


def test_what_this_user_has_put_there_is_no_hindrance(base: Path) -> None:
    """A file or a link of one's own, and a folder of an earlier version, which is used."""
    usual = places.below(base)
    usual.symlink_to(base)
    path = opened()
    assert path != str(usual)
    shutil.rmtree(path)
    usual.unlink()
    usual.mkdir(0o700)
    assert opened() == str(usual)


def test_a_chosen_folder_that_was_opened_to_others(base: Path) -> None:
    """Agents that run have their locks in it, so there can be no other one. The line says what to do."""
    path = opened()
    os.chmod(path, 0o1777)
    with pytest.raises(Refused, match=rf"^the folder for this node's lock, {path}, is open to other users; close it"):
        open_folder()
    os.chmod(path, 0o1700)
    assert opened() == path


def test_bases_that_cannot_be_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have a read-only /tmp. If there is no place at all, the line names the last one."""
    assert hostplace.__dict__["BASES"] == (str(base),)
    monkeypatch.setattr(hostplace, "BASES", (f"{base}/none", str(base)))
    assert opened() == str(places.below(base))
    monkeypatch.setattr(hostplace, "BASES", (f"{base}/none", f"{base}/neither"))
    with pytest.raises(Refused, match=rf"^the folder for this node's lock, {base}/neither/reknit-\d+: No such file"):
        open_folder()


def test_a_cleaner_waits_for_agents_and_agents_for_a_cleaner(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd-tmpfiles removes old files, but not from a folder that it cannot lock. Nobody waits for ever."""
    fd, path = open_folder()
    cleaner = os.open(path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with monkeypatch.context() as patched:
        patched.setattr(hostplace, "WAIT_S", 0.02)
        with pytest.raises(Refused, match="is locked by another process"):
            open_folder()
    os.rmdir(path)
    os.close(cleaner)
    assert opened() == path


def test_a_folder_that_is_chosen_between_two_looks(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. P sees its own folder only. 2. Q makes another one, locks both, and chooses its own. 3. P locks its own."""
    usual = places.below(base)
    mine, other = Path(f"{usual}-5"), Path(f"{usual}-1")
    mine.mkdir(0o700)
    lock = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if not other.exists():
            other.mkdir()
            other.chmod(0o1700)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert opened() == str(other)
    assert stat.S_IMODE(mine.lstat().st_mode) == 0o700


@contextmanager
def squatter(path: str) -> Iterator[None]:
    """Another user who takes the usual name and gives it free, again and again."""

    def act() -> None:
        while True:
            os.mkdir(path)
            os.rmdir(path)

    def persist() -> None:
        while True:
            try:
                act()
            except OSError:
                pass  # the agents have the name now

    if os.geteuid() != 0:
        yield
        return
    pid = forked(persist, NOBODY)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.slow
def test_many_first_starts_at_once_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither start finds a folder. Each may make one, under different names if another user plays with the usual one.
    All must use the same."""
    for _ in range(ROUNDS):
        with places.shared() as base, squatter(str(places.below(base))):
            places.move(monkeypatch, base)
            gate, go = os.pipe()
            result, results = os.pipe()

            def start(gate: int = gate, results: int = results) -> None:
                os.read(gate, 1)
                os.write(results, f"{open_folder()[1]}\n".encode())

            pids = [forked(start) for _ in range(AGENTS)]
            os.write(go, bytes(AGENTS))
            assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * AGENTS
            chosen = os.read(result, 1 << 16).decode().split()
            for fd in (gate, go, result, results):
                os.close(fd)
            assert len(chosen) == AGENTS
            assert len(set(chosen)) == 1
