"""`examples/etcd_member.py`: three members of etcd on three hosts, and a job that outlives each of these hosts.

    REKNIT_ETCD_KILLS=100 pytest -n0 -s -o faulthandler_timeout=0 tests/adapters/journals/etcd -k every_host

kills a host so many times, and prints how long the other two needed until their next round.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from reknit.adapters.journals.etcd.gateway import Cluster, Gateway, get, put
from tests.support.command import Run
from tests.support.etcd import patiently
from tests.support.etcd_hosts import SCRIPT, Members
from tests.support.nodes import GOOD, NodeRun, Nodes, all_alive, at_etcd, ended
from tests.support.waiting import PATIENCE_S, until

KILLS = int(os.environ.get("REKNIT_ETCD_KILLS", "3"))
SEED = int(os.environ.get("REKNIT_SEED", "1")[:12], 16)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    with Members(tmp_path) as members:
        yield members


def test_three_members_serve_and_leave_nothing(members: Members) -> None:
    """One line says when the cluster serves. At the end of the job the disk is as it was."""
    members.start(0)
    until(lambda: _accepts(members.endpoints[0]), "the first member to listen")
    assert " serves at " not in members.runs[0].line, "one of three is no majority"
    members.start(1)
    members.serve()
    members.start(2)
    members.serve()
    assert [oct(folder.stat().st_mode & 0o777) for run in members.runs.values() for folder in run.folders] == [
        "0o700"
    ] * 3
    for run in members.runs.values():
        assert run.end() == 0
        assert run.line.count(" serves at ") == 1, run.line
        assert run.folders == []


def test_a_member_that_was_killed_comes_back_with_its_folder_and_not_without(members: Members) -> None:
    """Two members with one set of data between them could elect a leader that has forgotten the job."""
    members.start(0, 1, 2)
    members.serve()
    with closing(Gateway(Cluster(members.endpoints), 30.0)) as gateway:
        members.runs[0].kill()
        patiently(gateway.transact, [], [put("/k", b"v")], [])
        (folder,) = members.runs[0].folders
        members.start(0)
        assert members.runs[0].process.wait(PATIENCE_S) == 1
        assert members.runs[0].line.endswith("etcd has ended with status 1; it has kept no data\n")
        assert members.runs[0].folders == [folder]
        members.start(0, argv=[f"--data-dir={folder}"])
        members.serve()
    with closing(Gateway(Cluster(members.endpoints[:1]), 30.0)) as alone:
        assert patiently(alone.transact, [], [get("/k")], []).ranges[0].found[0].value == b"v"
    assert members.runs[0].end() == 0
    assert f"its data stay in {folder}" in members.runs[0].line
    assert (folder / "member" / "wal").is_dir()


def test_a_folder_that_was_named_stays_as_it_was(members: Members, tmp_path: Path) -> None:
    """It may hold other files of the user, or the data of a member that is told to end before the others are back."""
    named = tmp_path / "named"
    named.mkdir()
    (named / "mine").write_text("mine")
    members.start(0)
    members.start(1, argv=[f"--data-dir={named}"])
    members.serve()
    for run in members.runs.values():
        assert run.end() == 0
    assert (named / "mine").read_text() == "mine"
    members.start(1, argv=[f"--data-dir={named}"])
    until(lambda: _accepts(members.endpoints[1]), "the member to listen")
    assert members.runs[1].end() == 0
    assert " serves at " not in members.runs[1].line
    assert (named / "member" / "wal").is_dir()
    assert (named / "mine").read_text() == "mine"


def test_a_member_whose_port_is_taken_does_not_serve(members: Members, tmp_path: Path) -> None:
    """Two jobs on one host with one port: the members of the second would talk of the store of the first."""
    members.start(0, 1)
    members.serve()
    second = Members(tmp_path / "second")
    (tmp_path / "second").mkdir()
    second.port = members.port
    with second:
        second.start(0)
        assert second.runs[0].process.wait(PATIENCE_S) == 1
        assert " serves at " not in second.runs[0].line
        assert second.runs[0].line.endswith("etcd has ended with status 1; it has kept no data\n")
        assert second.runs[0].folders == []


def test_a_member_says_for_whom_it_waits(members: Members) -> None:
    """Otherwise nobody knows whether the wait is over soon, or a host is missing."""
    members.start(0)
    until(lambda: "nobody answers at" in members.runs[0].line, "the line")
    assert "2 of 3 members must be there" in members.runs[0].line
    assert f"{members.hosts[1]}:{members.port + 1}, {members.hosts[2]}:{members.port + 1}\n" in members.runs[0].line
    assert members.runs[0].end() == 0
    assert members.runs[0].folders == []


def test_the_end_of_etcd_is_seen_although_the_parent_has_ignored_sigchld(members: Members, tmp_path: Path) -> None:
    """Some launchers ignore it, and a child inherits that. Without a signal nobody would learn of the end."""
    script = tmp_path / "ignoring.py"
    script.write_text(
        "import os, signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        f"os.execv(sys.executable, [sys.executable, {str(SCRIPT)!r}, *sys.argv[1:]])\n"
    )
    with Members(tmp_path, script=script) as ignoring:
        ignoring.start(0, 1)
        ignoring.serve()
        run = ignoring.runs[0]
        (etcd,) = set(run.left_over()) - {run.pid}
        os.kill(etcd, signal.SIGKILL)
        assert run.process.wait(PATIENCE_S) == 1
        assert "etcd has ended with status -9; to go on with its data" in run.line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--hosts=no-such-host.invalid", "--me=no-such-host.invalid"], "no-such-host.invalid in --hosts has no"),
        (["--hosts=127.0.0.11", "--me=127.0.0.11", "--data-dir=/proc/no"], "cannot be made: /proc/no: No such file"),
        (["--hosts=127.0.0.11", "--me=127.0.0.11", f"--data-dir={__file__}"], f"cannot be made: {__file__}: File exi"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path: Path, words: list[str], line: str) -> None:
    """The user looks for the option that is wrong."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    with Run(tmp_path, sys.executable, str(SCRIPT), *words) as job:
        assert job.end() == 2
    assert line in job.err
    assert job.err.count("\n") == 1


def test_a_member_whose_etcd_was_killed_says_how_it_comes_back(members: Members) -> None:
    """The kernel kills what takes too much memory. The data are worth keeping then."""
    members.start(0, 1)
    members.serve()
    run = members.runs[0]
    (etcd,) = set(run.left_over()) - {run.pid}
    os.kill(etcd, signal.SIGKILL)
    assert run.process.wait(PATIENCE_S) == 1
    (folder,) = run.folders
    assert run.line.endswith(f"etcd has ended with status -9; to go on with its data, give --data-dir={folder}\n")
    members.revive(0)
    members.serve()


def test_a_member_serves_on_after_sigterm(members: Members) -> None:
    """Slurm sends SIGTERM to agents and members alike. The agents need the store until their workers have ended."""
    members.start(0, 1, 2)
    members.serve()
    for run in members.runs.values():
        run.signal(signal.SIGTERM)
    with closing(Gateway(Cluster(members.endpoints), 30.0)) as gateway:
        assert gateway.transact([], [put("/k", b"v")], []).is_met
    for run in members.runs.values():
        assert run.end(signal.SIGTERM) == 0
        assert run.folders == []


def test_after_its_last_seconds_a_member_ends_by_itself(members: Members) -> None:
    """Nobody sends a second signal when Slurm ends a job."""
    members.start(0, 1, 2, argv=["--linger=0.1"])
    members.serve()
    assert [run.end(signal.SIGTERM) for run in members.runs.values()] == [0, 0, 0]


@pytest.mark.parametrize(
    ("version", "is_refused"), [("3.4.21", True), ("3.4.22", False), ("3.5.0", True), ("3.5.5", True), ("3.5.6", False)]
)
def test_a_version_that_loses_writes_is_refused(tmp_path: Path, version: str, is_refused: bool) -> None:
    """The journal is only as good as the promise of the store."""
    program = tmp_path / "etcd"
    program.write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
    program.chmod(0o755)
    words = [str(SCRIPT), "--hosts=127.0.0.11", "--me=127.0.0.11", "--port=1"]
    with Run(tmp_path, sys.executable, *words, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}) as job:
        status = job.end()
    assert (status, f"etcd {version} may lose" in job.err) == ((2, True) if is_refused else (1, False))


# ---- a job ----


@pytest.mark.slow
def test_a_job_outlives_every_host(members: Members, tmp_path: Path) -> None:
    """Each host has a member and an agent, and loses both at once. That costs a round, and no restart."""
    chance = random.Random(SEED)
    # An agent that could not beat for 0.7 of this time counts as started again, which costs a further round. A busy
    # machine elects a leader in less.
    heartbeat = "--rdzv-conf=heartbeat=2.5,last_call_timeout=1,settle=0.2"
    members.start(0, 1, 2)
    members.serve()
    took: list[float] = []
    with Nodes(tmp_path, "--nnodes=2:3", "--max-restarts=0", *at_etcd(members), heartbeat) as nodes:
        hosts = dict(enumerate(nodes.start("a", "b", "c")))
        three = nodes.formed(*hosts.values())
        for kill in range(KILLS):
            victim = kill % 3
            time.sleep(chance.uniform(0.0, 1.5))  # not a guess: a random moment
            began = time.monotonic()
            _kill(members, hosts[victim], victim)
            survivors = [run for i, run in hosts.items() if i != victim]
            two = nodes.formed(*survivors, after=three)
            took.append(time.monotonic() - began)
            assert {(up.round, up.restart) for up in two} == {(three[0].round + 1, 0)}
            assert all_alive(two)
            members.revive(victim)
            members.serve()  # otherwise the next kill might take the majority away
            (hosts[victim],) = nodes.start("abc"[victim])
            three = nodes.formed(*hosts.values(), after=two)
            assert {up.restart for up in three} == {0}
        for run in hosts.values():
            run.tell(GOOD)
        assert ended(*hosts.values()) == [0, 0, 0]
    for member in members.runs.values():
        assert member.end() == 0
    _print(took)


@pytest.mark.slow
def test_without_a_majority_the_workers_run_on(members: Members, tmp_path: Path) -> None:
    """Two of three hosts are gone. The job goes on when one of them is back with its folder."""
    members.start(0, 1, 2)
    members.serve()
    with Nodes(tmp_path, "--nnodes=1:3", "--max-restarts=0", *at_etcd(members)) as nodes:
        a, b, c = nodes.start("a", "b", "c")
        three = nodes.formed(a, b, c)
        _kill(members, b, 1)
        _kill(members, c, 2)
        a.says("the store cannot be reached, workers keep running")
        assert all_alive([up for up in three if up in a.ups])
        members.revive(1)
        one = nodes.formed(a, after=three)
        assert [up.restart for up in one] == [0]
        a.tell(GOOD)
        assert a.end() == 0


def _kill(members: Members, agent: NodeRun, i: int) -> None:
    """The host dies: member and agent at once."""
    frozen = agent.freeze()
    members.runs[i].kill()
    assert frozen
    agent.vanish()


def _accepts(endpoint: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(endpoint) == 0


def _print(took: list[float]) -> None:
    took.sort()
    print(
        f"\n{len(took)} hosts killed; seconds until the next round: median {statistics.median(took):.1f}, "
        f"nine of ten within {took[int(0.9 * (len(took) - 1))]:.1f}, longest {took[-1]:.1f}"
    )
