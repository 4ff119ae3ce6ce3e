"""Hosts that each have a member of etcd, which `examples/etcd_member.py` runs, as under Slurm."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.command import Run
from tests.support.stores import free_port
from tests.support.waiting import PATIENCE_S, until

SCRIPT = Path(__file__).parents[2] / "examples" / "etcd_member.py"
LOOPBACK = ("127.0.0.11", "127.0.0.12", "127.0.0.13")


class Member(Run):
    """One run of the script."""

    def __init__(self, path: Path, *argv: str, script: Path = SCRIPT, **popen: Any) -> None:
        path.mkdir(exist_ok=True)
        self._path = path
        self._err = path / "member.err"
        with open(self._err, "wb") as err:
            outputs = {"stdout": subprocess.DEVNULL, "stderr": err}
            super().__init__(path, sys.executable, str(script), *argv, **outputs, **popen)

    @property
    def line(self) -> str:
        """What it has said."""
        return self._err.read_text()

    @property
    def folders(self) -> list[Path]:
        return [folder for folder in self._path.iterdir() if folder.is_dir()]

    def serves(self) -> None:
        def look() -> bool:
            assert self.process.poll() is None, self.line
            return " serves at " in self.line

        until(look, "the cluster to serve")

    def kill(self) -> None:
        """SIGKILL the script alone. The kernel kills its etcd."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        until(lambda: not self.left_over(), "the end of etcd")

    def end(self, signum: int = signal.SIGUSR1) -> int:
        self.process.send_signal(signum)
        return super().end()


class Members:
    """The members of one cluster. Use `with`, which ends those that are left."""

    def __init__(
        self,
        path: Path,
        hosts: Sequence[str] = LOOPBACK,
        popen: Sequence[dict[str, Any]] = (),
        *,
        script: Path = SCRIPT,
    ) -> None:
        """`popen`: for each host, how its processes are started. `script`: a variant of the script."""
        self._script = script
        self._path = path
        self.hosts = hosts
        self._popen = popen or [{} for _ in hosts]
        self.port = free_port()
        self.endpoints = [(host, self.port) for host in hosts]
        self.runs: dict[int, Member] = {}

    def start(self, *numbers: int, argv: Sequence[str] = ()) -> None:
        """Start these members. Their folders are new."""
        for i in numbers:
            words = [f"--hosts={','.join(self.hosts)}", f"--me={self.hosts[i]}", f"--port={self.port}", "--token=t"]
            self.runs[i] = Member(self._path / f"member{i}", *words, *argv, script=self._script, **self._popen[i])

    def revive(self, i: int) -> None:
        """Start this member again, with the folder that it has left."""
        (folder,) = self.runs[i].folders
        self.start(i, argv=[f"--data-dir={folder}"])

    def serve(self) -> None:
        for run in self.runs.values():
            run.serves()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for run in self.runs.values():
            if error is not None:
                error.add_note(run.line)
            run.process.kill()
            run.process.communicate(timeout=PATIENCE_S)
