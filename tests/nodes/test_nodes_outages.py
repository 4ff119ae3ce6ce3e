"""Stores that fail while the job runs: etcd without its leader or without an answer, a folder on a full disk.

Workers are kept through all of it. No node is declared lost, and no entry is lost or doubled.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from reknit.core.job.entries import Entry, Failed, Joined, Lost, Succeeded
from reknit.core.text.codec import dumps
from tests.support.etcd import EtcdCluster
from tests.support.nodes import BAD, GOOD, UP, NodeRun, Nodes, Up, all_alive, at_c10d, at_etcd, at_file, ended
from tests.support.places import VARIABLE
from tests.support.waiting import is_alive, until


def of(kind: type[Joined | Failed | Succeeded], entries: tuple[Entry, ...]) -> list[tuple[str, int]]:
    """Who has said it, for which round."""
    return sorted(
        (e.node.id, e.round) for e in entries if isinstance(e, Joined | Failed | Succeeded) and type(e) is kind
    )


def assert_told(entries: tuple[Entry, ...]) -> None:
    """b failed once, both came back and succeeded; nothing is lost or doubled, and nobody was accused."""
    assert max(Counter(map(dumps, entries)).values()) == 1
    assert of(Failed, entries) == [("b", 0)]
    assert of(Joined, entries) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert of(Succeeded, entries) == [("a", 1), ("b", 1)]
    assert not any(isinstance(entry, Lost) for entry in entries)


def finish(*runs: NodeRun) -> None:
    for run in runs:
        run.tell(GOOD)
    assert ended(*runs) == [0] * len(runs)


def test_the_leader_of_etcd_is_killed(tmp_path: Path) -> None:
    """The cluster elects another one; the job goes on, and its next round too."""
    # The election takes some seconds on a busy machine. Nobody is to join anew because of it.
    calm = "--rdzv-conf=heartbeat=30,last_call_timeout=1"
    with (
        EtcdCluster(tmp_path) as cluster,
        Nodes(tmp_path, "--nnodes=2", "--max-restarts=1", *at_etcd(cluster), calm) as nodes,
    ):
        a, b = nodes.start("a", "b")
        first = nodes.formed(a, b)
        cluster.kill(cluster.leader())
        cluster.leader()  # there is another one
        assert all_alive(first)
        b.tell(BAD)
        second = nodes.formed(a, b, after=first)
        assert {up.restart for up in second} == {1}
        finish(a, b)
        assert_told(nodes.entries())


@pytest.mark.slow
def test_etcd_answers_nothing(tmp_path: Path) -> None:
    """Much longer than the silence limit: workers run on, nobody is accused, and what happened meanwhile is told
    when it is back, once."""
    with (
        EtcdCluster(tmp_path) as cluster,
        Nodes(tmp_path, "--nnodes=2", "--max-restarts=1", *at_etcd(cluster)) as nodes,
    ):
        a, b = nodes.start("a", "b")
        first = nodes.formed(a, b)
        for i in range(3):
            cluster.stop(i)
        for run in (a, b):
            run.says("the store cannot be reached, workers keep running")
        assert all_alive(first)
        assert len(a.ups) == len(b.ups) == 1
        b.tell(BAD)
        b.says(f"rank {b.ups[0].rank} on node b failed: exit code 1")
        assert is_alive(a.ups[0].pid)
        for i in range(3):
            cluster.cont(i)
        second = nodes.formed(a, b, after=first)
        for run in (a, b):
            run.says("the store can be reached again")
        assert {up.restart for up in second} == {1}
        finish(a, b)
        assert_told(nodes.entries())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "reknit-test", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


def test_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    """A journal that can be read and not written: what has failed meanwhile is told when there is room again."""
    argv = ("--nnodes=2", "--max-restarts=1", *at_file(small_disk))
    # Its failure does not fit into what is left of the journal's last block.
    script = (
        UP
        + """
    up()
    if told() == signal.SIGUSR2:
        sys.exit("\\n".join(["x" * 1500] * 10))
    """
    )
    with Nodes(tmp_path, *argv, script=script) as nodes:
        a, b = nodes.start("a", "b")
        first = nodes.formed(a, b)
        ballast = fill(small_disk)
        b.tell(BAD)
        b.says("the store cannot be reached")
        assert is_alive(a.ups[0].pid)
        ballast.unlink()
        second = nodes.formed(a, b, after=first)
        assert {up.restart for up in second} == {1}
        finish(a, b)
        assert_told(nodes.entries())


def host_and_guests(nodes: Nodes) -> tuple[list[NodeRun], list[Up]]:
    """Three nodes that run. The first one hosts the store."""
    (host,) = nodes.start("a")
    host.says("this node hosts the job's store")
    runs = [host, *nodes.start("b", "c")]
    return runs, nodes.formed(*runs)


def test_the_host_of_the_store_is_killed_and_comes_back(tmp_path: Path) -> None:
    """The others remember the journal, and found it again in the new store. Their workers run on until the host joins
    again, as a new incarnation, and the round is formed anew."""
    with Nodes(tmp_path, "--nnodes=3", "--max-restarts=0", *at_c10d()) as nodes:
        (a, b, c), first = host_and_guests(nodes)
        a.vanish()
        for run in (b, c):
            run.says("the store cannot be reached, workers keep running")
        assert all_alive(b.ups + c.ups)
        (again,) = nodes.start("a")
        again.says("this node hosts the job's store")
        second = nodes.formed(again, b, c, after=first)
        assert {up.restart for up in second} == {0}
        again.says("this agent takes its place as a.1")
        finish(again, b, c)


@pytest.mark.slow
def test_the_server_of_the_store_is_killed_alone(tmp_path: Path) -> None:
    """The host's agent starts another one, and all found the journal again. No worker is stopped for it."""
    with Nodes(tmp_path, "--nnodes=2", "--max-restarts=1", *at_c10d()) as nodes:
        (a,) = nodes.start("a")
        a.says("this node hosts the job's store")
        (b,) = nodes.start("b")
        first = nodes.formed(a, b)
        os.kill(server_of(a), signal.SIGKILL)
        for run in (a, b):
            run.says("the store can be reached again")
        assert all_alive(first)
        b.tell(BAD)
        second = nodes.formed(a, b, after=first)
        assert {up.restart for up in second} == {1}
        finish(a, b)


def test_the_server_of_the_store_is_killed_before_it_serves(tmp_path: Path) -> None:
    """Its agent starts another one, as it would later."""
    with Nodes(tmp_path, "--nnodes=1:2", "--max-restarts=0", *at_c10d()) as nodes:
        (a,) = nodes.start("a")
        server = until(lambda: servers_of(a), "the store's server")[0]
        os.kill(server, signal.SIGKILL)
        nodes.formed(a)
        assert server not in servers_of(a)
        finish(a)


def server_of(host: NodeRun) -> int:
    (found,) = servers_of(host)
    return found


def servers_of(host: NodeRun) -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(host.pid)}
    return [pid for pid, command in commands.items() if b"tcpstore/server.py" in command]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_the_host_comes_back_on_another_machine(tmp_path: Path) -> None:
    """It finds no note of the one before, and begins a new journal. That journal makes way for the one that the others
    remember."""
    with Nodes(tmp_path, "--nnodes=3", "--max-restarts=0", *at_c10d()) as nodes:
        (a, b, c), first = host_and_guests(nodes)
        a.vanish()
        (again,) = nodes.start("a", env={VARIABLE: str(other_folder(tmp_path))})
        second = nodes.formed(again, b, c, after=first)
        assert {up.restart for up in second} == {0}
        finish(again, b, c)


def other_folder(tmp_path: Path) -> Path:
    """A place for locks that the agents before did not have."""
    folder = tmp_path / "other"
    folder.mkdir()
    return folder
