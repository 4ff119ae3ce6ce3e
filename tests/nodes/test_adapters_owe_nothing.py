"""The real adapters keep what they owe the core: link, journals, keeper and clock, asked by `reknit.testing.Owed`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from reknit import Meeting, RestartPolicy, Settings, Terms
from reknit.core.agent.states import WorkerState
from reknit.runtime import Session, start
from reknit.testing import Owed
from tests.support.etcd import Etcd
from tests.support.stores import free_port, needs_torch
from tests.support.waiting import PATIENCE_S, is_alive, until

SCRIPT = """
    import os, sys, time
    folder, node = sys.argv[1:]
    round = os.environ["REKNIT_ROUND"]
    with open(f"{folder}/{node}-{round}", "a") as file:
        file.write(f"{os.getpid()}\\n")
    if node == "a" and round == "0" and os.environ["LOCAL_RANK"] == "1":
        sys.exit(3)
    while not os.path.exists(f"{folder}/done"):
        time.sleep(0.01)
"""


class Job(NamedTuple):
    """A job of two nodes in this process."""

    folder: Path

    def pids(self, name: str, round: int) -> list[int]:
        """Of the workers that live."""
        path = self.folder / f"{name}-{round}"
        return [pid for pid in map(int, path.read_text().split()) if is_alive(pid)] if path.exists() else []

    def settings(self, name: str, meeting: Meeting) -> Settings:
        return Settings(
            command=(sys.executable, "-c", textwrap.dedent(SCRIPT), str(self.folder), name),
            local_world_size=2,
            terms=Terms(1, 2, RestartPolicy(1), last_call_s=0.5, beat_s=0.5, silence_s=30.0),
            meeting=meeting,
            run_id=str(self.folder),
            node_id=name,
        )


@pytest.fixture(params=["file", "c10d", "etcd"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Meeting]:
    """Where the two nodes meet."""
    match request.param:
        case "file":
            yield Meeting("file", folder=str(tmp_path / "journal"))
        case "c10d":
            needs_torch()
            yield Meeting("c10d", endpoints=(("127.0.0.1", free_port()),))
        case _:
            server: Etcd = request.getfixturevalue("server")
            yield Meeting("etcd", endpoints=(("127.0.0.1", server.port),))


def test_a_failure_and_a_leave(meeting: Meeting, tmp_path: Path) -> None:
    """A worker fails, all start anew, one node leaves, the other goes on alone and succeeds."""
    job = Job(tmp_path)
    owed = Owed(answer_s=PATIENCE_S, alive=job.pids)
    debts = {name: owed.by(name) for name in "ab"}
    nodes: dict[str, Session] = {}
    try:
        for name in "ab":
            nodes[name] = start(job.settings(name, meeting), say=lambda line: None, observers=[debts[name]])
        until(lambda: all(len(job.pids(name, 1)) == 2 for name in "ab"), "round 1 on both nodes")
        nodes["b"].leave()
        until(lambda: len(job.pids("a", 2)) == 2, "round 2")
        (tmp_path / "done").touch()
        results = {name: node.join(PATIENCE_S) for name, node in nodes.items()}
    finally:
        for node in nodes.values():
            node.close()
    states = {name: result.state for name, result in results.items() if result is not None}
    assert states == {"a": WorkerState.SUCCEEDED, "b": WorkerState.STOPPED}
    for each in debts.values():
        each.ended()
