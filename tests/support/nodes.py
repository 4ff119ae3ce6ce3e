"""Several nodes of one job on this host. Each is a real agent, and faults can happen to it.

A node's output goes to files, so that a test can wait for a line while the node runs. A worker that runs prints its
ranks (`Up`). It ends when a test tells it to.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest

from reknit.app.cli.arguments import parse
from reknit.app.cli.parsing import asked
from reknit.app.wiring.several_nodes import open_journal
from reknit.core.job.entries import Entry, Joined, Left, Lost, Succeeded
from tests.support import traces
from tests.support.command import Run
from tests.support.etcd import Etcd, EtcdCluster
from tests.support.stores import free_port, needs_torch
from tests.support.waiting import PATIENCE_S, is_alive, until

CONF = "--rdzv-conf=heartbeat=1.5,last_call_timeout=1,settle=0.2"
"""Short times for tests. They are long enough that no node is declared lost because this machine was busy for a second.
"""
BOTH = [pytest.param("c10d", marks=pytest.mark.slow), "file"]
"""Where nodes meet, for tests to which the store does not matter. The README's command runs them at one of the two."""
GOOD, BAD = signal.SIGUSR1, signal.SIGUSR2
"""The signals that tell a worker to end, by how it is to end."""
UP = """
    import os, signal, sys
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    def up():
        ranks = "{RANK} {WORLD_SIZE} {GROUP_RANK} {TORCHELASTIC_RESTART_COUNT} {REKNIT_ROUND}"
        line = f"up {ranks} {{MASTER_ADDR}}:{{MASTER_PORT}}"
        os.write(1, f"{line.format(**os.environ)} {os.getpid()}\\n".encode())
    def told():
        return signal.sigwait({signal.SIGUSR1, signal.SIGUSR2})
    def end():
        if told() == signal.SIGUSR2:
            sys.exit("worker told to fail")
"""
WAITS = (
    UP
    + """
    up()
    end()
"""
)
GLOO = (
    UP
    + """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    sum = torch.ones(1)
    dist.all_reduce(sum)
    assert int(sum) == int(os.environ["WORLD_SIZE"])
    up()  # the group works
    code = told() == signal.SIGUSR2
    os._exit(code)  # gloo aborts now and then when it is torn down
"""
)


class Up(NamedTuple):
    """What a worker has printed about itself."""

    rank: int
    world: int
    group_rank: int
    restart: int
    round: int
    master: str
    pid: int


class NodeRun(Run):
    """One node: its `reknit run`, the files with its output, and all its processes."""

    def __init__(self, path: Path, name: str, *argv: str, env: dict[str, str] | None = None, **popen: Any) -> None:
        self.name = name
        self._files = path / f"{name}.out", path / f"{name}.err"
        self._begin = [file.stat().st_size if file.exists() else 0 for file in self._files]
        with open(self._files[0], "ab") as out, open(self._files[1], "ab") as err:
            settings = {"stdout": out, "stderr": err, "env": env, **popen}
            super().__init__(path, f"--node-id={name}", *argv, "w.py", **settings)

    @property
    def texts(self) -> list[str]:
        """stdout and stderr so far."""
        read = (file.read_bytes()[begin:] for file, begin in zip(self._files, self._begin, strict=True))
        return [text.decode(errors="replace") for text in read]

    @property
    def ups(self) -> list[Up]:
        """All workers that this node has had so far, in the order in which they came up."""
        lines = [line.split()[1:] for line in self.texts[0].split("\n")[:-1] if line.startswith("up ")]
        return [Up(*map(int, numbers), master, int(pid)) for *numbers, master, pid in lines]

    def workers(self) -> list[Up]:
        """The workers of its last round."""
        ups = self.ups
        return [up for up in ups if up.round == ups[-1].round]

    def says(self, text: str, times: int = 1) -> None:
        """Wait until the node has said this."""
        until(lambda: self.texts[1].count(text) >= times, f"{self.name} to say {text!r}")

    def tell(self, signum: int) -> None:
        """Tell the workers of its last round."""
        for up in self.workers():
            os.kill(up.pid, signum)

    def freeze(self) -> list[int]:
        """SIGSTOP all processes of the node."""
        frozen: set[int] = set()
        while more := set(self.left_over()) - frozen:  # several times, because a process may fork meanwhile
            for pid in more:
                _signal(pid, signal.SIGSTOP)
            frozen |= more
        return sorted(frozen)

    def thaw(self) -> None:
        for pid in self.left_over():
            _signal(pid, signal.SIGCONT)

    def vanish(self) -> None:
        """Kill all processes of the node, as if its machine were gone. None of them can clean up."""
        for pid in self.freeze():
            _signal(pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        until(lambda: not self.left_over(), f"the end of all of {self.name}")

    def end(self) -> int:
        status = super().end()
        self.out, self.err = self.texts
        return status


class Nodes:
    """The nodes of one job, by name. Use `with`, which kills what is left at its end."""

    def __init__(self, path: Path, *argv: str, script: str = WAITS, env: dict[str, str] | None = None) -> None:
        """`argv`: options of all nodes."""
        self.path = path
        self.argv = argv
        self.env = env
        self.script = script
        self.runs: list[NodeRun] = []

    def start(self, *names: str, argv: tuple[str, ...] = (), **settings: Any) -> list[NodeRun]:
        """Start a node. `argv`: further options. They come after those of all nodes, and so take precedence."""
        runs = []
        for name in names:
            env = {**(self.env or {}), **settings.pop("env", {})}
            run = NodeRun(self.path, name, *self.argv, *argv, env=env, script=self.script, **settings)
            self.runs.append(run)
            runs.append(run)
        return runs

    def formed(self, *nodes: NodeRun, after: list[Up] | None = None) -> list[Up]:
        """Wait for a round of exactly these nodes that is later than the round of the workers `after`. Returns its
        workers by rank."""

        def look() -> list[Up]:
            if not all(node.ups for node in nodes):
                return []
            ups = sorted(up for node in nodes for up in node.workers())
            is_whole = {up.world for up in ups} == {len(ups)} and len({(up.round, up.master) for up in ups}) == 1
            is_later = after is None or ups[0].round > after[0].round
            return ups if is_whole and is_later else []

        found = until(look, f"a round of {[node.name for node in nodes]}, later than {after}:\n{self.story()}")
        assert [up.rank for up in found] == list(range(len(found)))
        return found

    def entries(self) -> tuple[Entry, ...]:
        """The entries that are in the journal now."""
        settings = asked(parse([*self.argv, __file__], {}), {}).settings
        assert settings.meeting is not None
        journal = open_journal(settings.meeting, settings.run_id)
        try:
            return tuple(journal.read(0, 0).entries)
        finally:
            journal.close()

    def said(self, kind: type[Joined | Left | Lost | Succeeded], name: str, **where: int) -> None:
        """Wait until such an entry is in the journal."""

        def look() -> bool:
            return any(
                isinstance(entry, kind)
                and entry.node.id == name
                and all(getattr(entry, key) == value for key, value in where.items())
                for entry in self.entries()
            )

        until(look, f"{kind.__name__} of {name} {where or ''}")

    def story(self) -> str:
        """What all nodes have said."""
        return "\n".join(f"-- {run.name}\n{''.join(run.texts)}" for run in self.runs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self.story())
        for run in self.runs:
            run.vanish()
        if error is None:
            traces.check(self.path)


def all_alive(ups: list[Up]) -> bool:
    return all(is_alive(up.pid) for up in ups)


def ended(*nodes: NodeRun) -> list[int]:
    """Wait until these nodes have ended. Returns their exit statuses."""
    return [node.end() for node in nodes]


def at_file(path: Path) -> tuple[str, ...]:
    """A job that meets in a folder. That is the fastest store, and no node hosts it."""
    return ("--rdzv-backend=file", f"--rdzv-endpoint={path}/shared", "--rdzv-id=j", "--local-addr=127.0.0.1", CONF)


def at_c10d() -> tuple[str, ...]:
    needs_torch()
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=j", CONF)


def at_etcd(server: Etcd | EtcdCluster) -> tuple[str, ...]:
    places = ",".join(f"{host}:{port}" for host, port in server.endpoints)
    return ("--rdzv-backend=etcd", f"--rdzv-endpoint={places}", "--rdzv-id=j", CONF)


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass  # the process has ended already
