"""Several agents of one job on this host, through the real command, and agents that must not begin."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.host.orphans import MARK
from reknit.adapters.journals.in_memory import MemoryJournal
from reknit.adapters.journals.tcpstore.hosted import HostedJournal
from reknit.adapters.runtime.ports import Refused, Unavailable
from reknit.app.cli.arguments import parse
from reknit.app.cli.parsing import asked
from reknit.app.settings import Meeting
from reknit.app.wiring.several_nodes import _lock_place, open_journal
from reknit.app.wiring.surroundings import SECRETS
from reknit.core.job.entries import Entry, Filler, Node, NodeId
from reknit.core.job.founding import Life
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from tests.support.alone import STUBBORN
from tests.support.command import Run
from tests.support.places import below, locks
from tests.support.stores import free_port
from tests.support.waiting import is_alive, read_pids, until

TELLS = "import os; os.write(1, '{RANK}/{WORLD_SIZE} {GROUP_RANK} {MASTER_ADDR}\\n'.format(**os.environ).encode())"
WAITS = "import os, signal; open(f\"up{os.environ['RANK']}\", 'w').close(); signal.pause()"
GLOO = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    sum = torch.ones(1)
    dist.all_reduce(sum)
    print(int(sum), flush=True)
    dist.barrier()
    os._exit(0)  # gloo, torn down, aborts by itself now and then
"""


@pytest.fixture
def c10d() -> tuple[str, ...]:
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")


def agent(tmp_path: Path, *argv: str, env: Mapping[str, str] | None = None, **settings: Any) -> Run:
    return Run(tmp_path, *argv, "w.py", env=dict(env or {}), **settings)


def pair(tmp_path: Path, script: str, *argv: str, each: tuple[str, str] = ("--role=default",) * 2) -> list[Run]:
    """Two agents that run to a good end, side by side."""
    with agent(tmp_path, *argv, each[0], script=script) as a, agent(tmp_path, *argv, each[1]) as b:
        statuses = [a.end(), b.end()]
        assert statuses == [0, 0], a.err + b.err
    assert locks(below(tmp_path)) == [], "no lock is left"
    return [a, b]


# ---- two nodes at each place ----


def test_c10d(tmp_path: Path, c10d: tuple[str, ...]) -> None:
    """The usual case, with a real group of real torch; one of them hosts the store, nobody was told who."""
    jobs = pair(tmp_path, GLOO, "--nnodes=2", *c10d)
    assert [job.out for job in jobs] == ["2\n", "2\n"]
    meets = [line for job in jobs for line in job.err.splitlines() if " joins job " in line]
    host, place = os.uname().nodename, c10d[1].partition("=")[2]
    names = {line.split()[2] for line in meets}
    assert names == {host, f"{host}-2"}
    assert sum("; this node hosts the job's store" in line for line in meets) == 1
    assert all(f'(127.0.0.1) joins job "none" at {place}' in line for line in meets)
    assert all(job.said[-1] == "the job succeeded" for job in jobs)


def test_static(tmp_path: Path) -> None:
    """Nothing but the port and the ranks, as on a torchrun command line of 2019; and the ranks are those asked for."""
    argv = ("--nnodes=2", f"--master-port={free_port()}")
    jobs = pair(tmp_path, TELLS, *argv, each=("--node-rank=1", "--node-rank=0"))
    assert [job.out for job in jobs] == ["1/2 1 127.0.0.1\n", "0/2 0 127.0.0.1\n"]


def test_file(tmp_path: Path) -> None:
    """No server at all. The folder is made; the addresses are this host's."""
    argv = ("--nnodes=2", "--rdzv-backend=file", f"--rdzv-endpoint={tmp_path}/shared", "--rdzv-id=a/b")
    jobs = pair(tmp_path, TELLS, *argv, "--local-addr=127.0.0.1")
    assert sorted(job.out for job in jobs) == ["0/2 0 127.0.0.1\n", "1/2 1 127.0.0.1\n"]


def test_etcd(tmp_path: Path) -> None:
    """A real server."""
    from tests.support.etcd import Etcd

    with Etcd(tmp_path) as server:
        endpoints = ",".join(f"{host}:{port}" for host, port in server.endpoints)
        argv = ("--nnodes=2", "--rdzv-backend=etcd", f"--rdzv-endpoint={endpoints}", "--rdzv-id=j")
        jobs = pair(tmp_path, TELLS, *argv)
    assert sorted(job.out for job in jobs) == ["0/2 0 127.0.0.1\n", "1/2 1 127.0.0.1\n"]


def test_each_backend_has_its_journal(tmp_path: Path) -> None:
    """Made of what was asked for, without asking the store anything."""
    for argv, name in (
        (["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1"], "TCPStoreJournal"),
        (["--rdzv-backend=file", f"--rdzv-endpoint={tmp_path}/f", "--rdzv-id=j"], "FileJournal"),
        (["--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1", "--rdzv-id=j"], "EtcdJournal"),
    ):
        settings = asked(parse(["--nnodes=2", *argv, __file__], {}), {}).settings
        assert settings.meeting is not None
        journal = open_journal(settings.meeting, settings.run_id)
        assert type(journal).__name__ == name
        journal.close()


# ---- what keeps an agent from beginning, or ends it ----


def test_a_name_that_is_taken(tmp_path: Path, c10d: tuple[str, ...]) -> None:
    """Who names a node means that one; to become another in silence would be a new seat, and no restart."""
    argv = ("--nnodes=1:2", *c10d, "--rdzv-conf=last_call_timeout=0", "--node-id=me", "--rdzv-id=J")
    with agent(tmp_path, *argv, script=WAITS) as first:
        until((tmp_path / "up0").exists)
        with agent(tmp_path, *argv) as second:
            assert second.end() == 76
        who = rf"another agent of job J runs on this host as me \(pid {first.pid}, since [-0-9: ]+: .+\)"
        says = f"reknit: {who}; give this one another --node-id, or end that one"
        assert re.fullmatch(says, second.err.splitlines()[0])
        assert second.err.splitlines()[1:] == ["reknit: exit status 76: another agent has this node's id"]
        first.signal(signal.SIGTERM)
        assert first.end() == 128 + signal.SIGTERM


def test_agents_of_one_store_get_different_names_however_they_write_it(tmp_path: Path) -> None:
    """Otherwise the second agent on a host would throw out the first one."""
    (tmp_path / "link").symlink_to(tmp_path)
    for one, other in (
        ("etcd a:1,b:2", "etcd b:2,a:1"),
        ("c10d localhost:1", "c10d 127.0.0.1:1"),
        (f"file {tmp_path}", f"file {tmp_path}/link"),
    ):
        assert _lock_place(meeting_at(one)) == _lock_place(meeting_at(other))
    assert _lock_place(meeting_at("c10d a:1")) != _lock_place(meeting_at("c10d a:2"))


def meeting_at(text: str) -> Meeting:
    backend, place = text.split()
    endpoints = [part.split(":") for part in place.split(",")] if backend != "file" else []
    folder = place if backend == "file" else ""
    return Meeting(backend, tuple((host, int(port)) for host, port in endpoints), folder)


@pytest.mark.slow
def test_what_a_killed_agent_left_is_ended_first(tmp_path: Path, c10d: tuple[str, ...]) -> None:
    """Agent and keeper killed in one instant leave daemons. They hold the devices, and ports of the last round."""
    argv = ("--nnodes=1:2", *c10d, "--rdzv-id=j", "--rdzv-conf=last_call_timeout=0", "--nproc-per-node=2")
    with agent(tmp_path, *argv, STUBBORN, "pids", "grandchild", script="") as first:
        pids = read_pids(tmp_path / "pids", 4)
        os.kill(first.pid, signal.SIGSTOP)  # else it would sweep before it is killed itself
        os.kill(first.keeper, signal.SIGKILL)
        first.signal(signal.SIGKILL)
        first.process.wait()
        with agent(tmp_path, *argv, script=TELLS) as second:
            assert second.end() == 0, second.err
        # Two, or three with the store's server, which ends by itself.
        assert re.match(r"ended [23] processes that an earlier agent had left behind", second.said[1])
        assert not any(map(is_alive, pids))


def test_a_host_without_torch(tmp_path: Path, c10d: tuple[str, ...]) -> None:
    """The store is torch's. The reason comes at once, and before any line about an outage."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('not here')")
    with agent(tmp_path, "--nnodes=2", *c10d, script="pass", env={"PYTHONPATH": str(tmp_path)}) as job:
        status = job.end()
    assert status == 69, job.err
    assert "torch is needed to host the store (--rdzv-backend=c10d): " in job.said[-2]
    assert "cannot be reached" not in job.err


def test_a_port_that_somebody_else_has(tmp_path: Path) -> None:
    """is_host=true must host. One line, before anybody joins."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        argv = (
            "--nnodes=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{other.getsockname()[1]}",
            "--rdzv-id=j",
        )
        with agent(tmp_path, *argv, "--rdzv-conf=is_host=true", script="pass") as job:
            assert job.end() == 69
    assert job.said == [
        "cannot host the store at 127.0.0.1:PORT: address already in use",
        "exit status 69: the job's journal cannot be used as asked",
    ]
    assert locks(below(tmp_path)) == []


def test_told_to_end_while_waiting_for_others(tmp_path: Path, c10d: tuple[str, ...]) -> None:
    """The usual end of a job that never got its nodes. Nothing is left, the store's server neither."""
    with open(tmp_path / "err", "wb") as err, agent(tmp_path, "--nnodes=2", *c10d, script="pass", stderr=err) as job:
        until(lambda: b"1 joined, 2 wanted" in (tmp_path / "err").read_bytes())
        job.signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM


# ---- what workers get ----


def test_workers_carry_the_mark_and_no_secret(tmp_path: Path, c10d: tuple[str, ...]) -> None:
    """What they inherit ends up in crash reports and in their own children."""
    script = f"import os; print(os.environ['{MARK}'], [name for name in {SECRETS!r} if name in os.environ])"
    argv = ("--nnodes=1:2", *c10d, "--rdzv-conf=last_call_timeout=0", "--node-id=me", "--rdzv-id=J")
    with agent(tmp_path, *argv, script=script, env=dict.fromkeys(SECRETS, "s3cret")) as job:
        assert job.end() == 0, job.err
    assert re.fullmatch(r"[0-9a-f]{32}/workers \[\]\n", job.out)
    assert "s3cret" not in job.err


# ---- a store of one's own ----

ME = Node(NodeId("n"))


class FakeHost:
    """A server that has ended, if it has a reason."""

    pid = 0

    def __init__(self, reason: str | None, *, cannot_serve: bool = False) -> None:
        self.reason = reason
        self.cannot_serve = cannot_serve
        self.can_restart = True

    def failure(self) -> str | None:
        return self.reason

    def restart(self) -> None:
        if not self.can_restart:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self.reason, self.pid = None, self.pid + 1

    def close(self) -> None: ...


class Breaking(MemoryJournal):
    """Answers nothing while `is_down`."""

    is_down = True

    def beat(self, node: Node, count: int, watch: object) -> Mapping[Node, int]:
        if self.is_down:
            raise Unavailable("h:1: connection refused")
        return super().beat(node, count, ())


def test_a_server_that_never_served_is_no_outage() -> None:
    """It will not come back: nobody should wait for it."""
    with pytest.raises(Refused, match=r"^no torch$") as caught:
        HostedJournal(Breaking(), FakeHost("no torch", cannot_serve=True)).beat(ME, 1, ())
    assert caught.value.refusal is Refusal.SETUP


def test_servers_that_die_before_they_serve_are_replaced_twice() -> None:
    """One may be killed by accident. If all of them die, nobody should wait for the end of an outage."""
    host = FakeHost(None)
    journal = HostedJournal(Breaking(), host)
    for _ in range(2):
        host.reason = "ended with SIGBUS"
        with pytest.raises(Unavailable, match=r"ended with SIGBUS; another server was started$"):
            journal.beat(ME, 1, ())
    host.reason = "ended with SIGBUS"
    with pytest.raises(Refused, match=r"^ended with SIGBUS$"):
        journal.beat(ME, 1, ())


def test_a_server_that_died_later_is_an_outage_with_its_reason() -> None:
    """Workers are kept through it, as through any other, and the operator reads what has ended it. Another server is
    started, because the other agents try again at this place alone."""
    store, host = Breaking(), FakeHost(None)
    started: list[int] = []
    journal = HostedJournal(store, host, started.append)
    with pytest.raises(Unavailable, match=r"^h:1: connection refused$"):
        journal.beat(ME, 1, ())  # it may only be starting
    store.is_down = False
    assert journal.beat(ME, 1, ()) == {ME: 1}
    store.is_down, host.reason, host.can_restart = True, "ended with SIGKILL", False
    why = "h:1: connection refused; ended with SIGKILL; "
    with pytest.raises(Unavailable, match=f"^{why}no other server can be started: address already in use$"):
        journal.beat(ME, 1, ())
    host.can_restart = True
    with pytest.raises(Unavailable, match=f"^{why}another server was started$"):
        journal.beat(ME, 1, ())
    assert started == [1]
    with pytest.raises(Unavailable, match=r"^h:1: connection refused$"):
        journal.beat(ME, 1, ())


class Remembering(MemoryJournal):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, Job] | str] = []

    def remember(self, position: int, job: Job) -> None:
        self.calls.append((position, job))

    def take_back(self) -> None:
        self.calls.append("taken back")


def test_a_hosted_journal_remembers_if_it_can() -> None:
    """The journal of a store that was lost is founded again with what agents remember."""
    store = Remembering()
    for journal in (store, MemoryJournal()):
        hosted = HostedJournal(journal, FakeHost(None))
        hosted.remember(1, Job())
        hosted.take_back()
    assert store.calls == [(1, Job()), "taken back"]


def test_a_hosted_journal_is_a_journal() -> None:
    """Nothing is lost on the way through it."""
    journal = HostedJournal(MemoryJournal(), FakeHost(None))
    assert journal.append("t", Filler(), Life()) is True
    batch = journal.read(0, 0)
    assert (batch.position, batch.entries) == (1, (Filler(),))
    journal.close()


def test_a_hosted_journal_says_that_an_entry_belongs_to_another_life() -> None:
    """Otherwise the host alone would say in one life of the journal what it has wanted in another (rule 16)."""
    elsewhere = Life("j", "another")

    class InOneLife(MemoryJournal):
        def append(self, token: str, entry: Entry, life: Life = Life()) -> bool:
            return life != elsewhere and super().append(token, entry, life)

    store = InOneLife()
    assert HostedJournal(store, FakeHost(None)).append("t", Filler(), elsewhere) is False
    assert store.since(0) == ()
