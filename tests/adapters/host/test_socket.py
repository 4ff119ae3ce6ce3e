"""A sign of a lock that does not depend on /tmp: real sockets, mounts and users."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reknit.adapters.host.left import end_left
from reknit.adapters.host.lock import Taken, take
from reknit.adapters.host.socket import Busy, listen
from tests.support.alone import ENV, ROOT
from tests.support.locks import agent
from tests.support.places import move, shared
from tests.support.users import NOBODY, forked, needs_two_users
from tests.support.waiting import PATIENCE_S, descriptors


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like /tmp, in which this test's folder is."""
    with shared() as path:
        move(monkeypatch, path)
        yield path


@pytest.fixture
def name() -> str:
    return f"test-{os.urandom(8).hex()}"


def test_one_listens_at_a_time(name: str) -> None:
    """The other one is told which process it is."""
    before = descriptors()
    fd = listen(name)
    with pytest.raises(Busy) as caught:
        listen(name)
    assert caught.value.pid == os.getpid()
    os.close(fd)
    os.close(listen(name))
    assert descriptors() == before


def test_a_name_that_is_too_long_is_no_error(name: str) -> None:
    """The file of the lock is there all the same."""
    assert listen(100 * name) == -1


@needs_two_users
def test_another_user_cannot_keep_an_agent_out(name: str) -> None:
    """They may take the name. Whoever is kept out by them could never start."""
    with socket.socket(fileno=listen(name)) as ours:
        address = ours.getsockname()
    up, tell = os.pipe()

    def squat() -> None:
        taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        taken.bind(address)
        taken.listen()
        os.write(tell, b"!")
        os.read(end, 1)

    end, ends = os.pipe()
    pid = forked(squat, NOBODY)
    assert os.read(up, 1) == b"!"
    assert listen(name) == -1
    os.write(ends, b"!")
    os.waitpid(pid, 0)
    for fd in (up, tell, end, ends):
        os.close(fd)
    os.close(listen(name))


def test_an_agent_with_another_tmp_is_kept_out(base: Path) -> None:
    """A service with a /tmp of its own, beside a shell of the same user. A folder that was removed is the same case."""
    code = "from reknit.adapters.host.lock import Taken, take\ntry: take('j', 'e', 'n')\nexcept Taken as e: print(e)"
    private = ["unshare", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o mode=1777 none {base}"
    if subprocess.run([*private, mount], capture_output=True).returncode:
        pytest.skip("no mounts of one's own here: unshare is not permitted")
    with agent() as other:
        command = f"{mount} && exec {shlex.join([sys.executable, '-c', code])}"
        done = subprocess.run([*private, command], env=ENV, cwd=ROOT, capture_output=True, timeout=PATIENCE_S)
        says = f"another agent of job j runs on this host as n (pid {other.pid}, which has another {base})\n"
        assert done.stdout.decode() == says, done.stderr


def test_a_folder_that_was_removed_under_an_agent(base: Path) -> None:
    """`rm -rf /tmp/*` takes the file of the lock away. The agent that comes leaves nothing behind."""
    (base / "moved").mkdir()
    with agent() as other:
        for path in base.glob("reknit-*"):
            path.rename(base / "moved" / path.name)
        with pytest.raises(Taken, match=rf"\(pid {other.pid}, which has another {base}\)"):
            take("j", "e", "n")
        assert [os.listdir(path) for path in base.glob("reknit-*")] == [[]]
        other.kill()
        other.wait(PATIENCE_S)
        take("j", "e", "n").release()
    assert end_left() == (0, ())
