"""The program of a keeper that is started by exec: nothing from the surroundings of its host program gets in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.alone import run_alone
from tests.support.keepers import Kept

Keep = Callable[..., Kept]


def test_modules_in_the_way_are_not_imported(keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the working folder, beside other packages or on PYTHONPATH may have the name of one that the keeper
    needs.

    The keeper must import its own.
    """
    packages = tmp_path / "site-packages"
    packages.mkdir()
    for name in ("selectors", "json", "attrs", "socket", "os", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('in the way')")
        if name != "attrs":
            (packages / f"{name}.py").write_text("raise SystemExit('in the way')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:/no/such/place")
    monkeypatch.setattr(sys, "path", [str(packages), *sys.path])
    kept = keep("true")
    kept.ready()
    kept.run(1)
    assert not kept.said


@pytest.mark.parametrize("how", ["exec", "fork"])
def test_the_hosts_descriptors_reach_neither_keeper_nor_workers(keep: Keep, tmp_path: Path, how: str) -> None:
    """An inherited socket would keep a port of the host in use, long after the host has closed it."""
    secret = tmp_path / "secret"
    fd = os.open(secret, os.O_RDWR | os.O_CREAT)
    os.set_inheritable(fd, True)
    kept = keep("sh", "-c", 'ls -l /proc/$$/fd > "$0"', str(tmp_path / "list"), how=how)
    kept.ready()
    os.close(fd)
    kept.run(1)
    kept.drive_until(lambda: "WorkersExited" in str(kept.seen))
    assert "secret" not in (tmp_path / "list").read_text()
    assert not any("secret" in os.readlink(entry.path) for entry in os.scandir(f"/proc/{kept.pid}/fd"))


@pytest.mark.parametrize("how", ["exec", "fork", "command"])
def test_a_host_without_stdin_stdout_and_stderr_is_served(how: str, tmp_path: Path) -> None:
    """A daemon has closed them: a stream that gets their numbers must not be taken for the console."""
    script = """
        from pathlib import Path
        from tests.support.processes import *
        from tests.support.keepers import *
        from tests.adapters.keeper.remote.test_remote import behind
        from reknit.adapters.keeper.client.keeper_client import KeeperClient
        from reknit.adapters.keeper.protocol.wire import Configure
        how, file = sys.argv[1:]
        start_ = {**ways(), "command": behind([])}[how]
        shown = os.dup(1)
        for fd in (0, 1, 2): os.close(fd)
        clock = SystemClock()
        argv = ("sh", "-c", "echo out; echo err >&2; exit 3")
        keeper = KeeperClient(clock, Configure(argv=argv, run_id="job"), "n", start_)
        drive(keeper, clock, Started)
        start(keeper, 2); seen = drive_exits(keeper, clock, 2); keeper.close()
        os.write(shown, str([f.exitcode for f in failures(seen)]).encode())
        os._exit(0)
    """
    assert run_alone(script, how, str(tmp_path / "x")) == "[3, 3]"
