"""Workers of a real keeper that has a zygote, and what becomes of them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from reknit.adapters.keeper.output.console import PLAIN
from reknit.adapters.keeper.output.streams import StreamSettings
from reknit.adapters.keeper.protocol.wire import Warm
from reknit.core.agent.worker_words import WorkersExited
from tests.support.keepers import Kept
from tests.support.processes import start
from tests.support.waiting import until

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="a keeper adopts the forks of a zygote on Linux only")
PACKAGES = "site-packages"
"""The folder, in that of the test, of its installed packages."""


class Ended(NamedTuple):
    """How a worker has ended."""

    exitcode: int
    out: str
    err: str


class Warmed:
    """A keeper whose workers run this command line of Python. `warm`: what it is told of its zygote. None: nothing."""

    def __init__(self, folder: Path, argv: Sequence[str], warm: dict[str, Any] | None = None, **configure: Any) -> None:
        """`configure`: fields of `Configure`, and `python`, the path of the workers' Python."""
        place = Path(tempfile.mkdtemp(prefix="keeper-", dir=folder))
        self.logs = place / "logs"
        self.logs.mkdir()
        packages = folder / PACKAGES
        packages.mkdir(exist_ok=True)
        env = {"PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "", **configure.pop("env", {})}
        self.argv = (configure.pop("python", sys.executable), *argv)
        self.kept = Kept(
            place,
            *self.argv,
            cwd=str(folder),
            env=tuple(env.items()),
            log_base=str(self.logs),
            streams=StreamSettings(redirects=3, lines=PLAIN),
            **configure,
        )
        self.kept.ready()
        if warm is not None:
            self.kept.keeper.warm_up(Warm(self.argv, **warm))

    def begin(self, round_: int = 0, count: int = 1) -> None:
        start(self.kept.keeper, count, round_)

    def end(self, round_: int = 0, count: int = 1) -> list[Ended]:
        """Wait until all workers of the round have ended. Returns how, by local rank."""
        kept = self.kept

        def exits() -> dict[int, int]:
            found = [event for event in kept.seen if isinstance(event, WorkersExited) and event.round == round_]
            return {e.local_rank: e.failure.exitcode if e.failure else 0 for event in found for e in event.exits}

        kept.drive_until(lambda: len(exits()) == count)
        kept.stop(round_=round_)
        assert kept.keeper.flush(60)
        (folder,) = self.logs.iterdir()
        ended = []
        for rank, code in sorted(exits().items()):
            own = folder / f"round_{round_}" / str(rank)
            ended.append(Ended(code, *((own / f"{name}.log").read_text() for name in ("stdout", "stderr"))))
        return ended

    def run(self, round_: int = 0, count: int = 1) -> list[Ended]:
        self.begin(round_, count)
        return self.end(round_, count)

    @property
    def zygote(self) -> int:
        """The pid of the zygote: the child of the keeper that is no worker. 0: there is none."""
        workers = self.kept.keeper.told.latest.values()
        found = [child.pid for child in psutil.Process(self.kept.pid).children() if child.pid not in workers]
        return found[0] if found else 0

    def said(self) -> str:
        """What the keeper has written to its console."""
        return self.kept.flushed()

    def close(self) -> None:
        self.kept.close()


def install(folder: Path, **modules: str) -> None:
    """Make these modules those of installed packages. `modules`: their texts, by name."""
    packages = folder / PACKAGES
    packages.mkdir(exist_ok=True)
    for name, text in modules.items():
        (packages / f"{name}.py").write_text(text)


def wait_dead(pid: int) -> None:
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def environ_of(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        words = os.fsdecode(file.read()).split("\0")
    return dict(word.partition("=")[::2] for word in words if word)
