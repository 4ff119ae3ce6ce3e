"""What the loss of etcd's leader costs, with short tries of the gateway and without them, side by side.

    python -m benchmarks.etcd_lost                # both tables, about five minutes; needs root, for network namespaces
    python -m benchmarks.etcd_lost --repeats 9
    python -m benchmarks.etcd_lost --slow-elections   # etcd's own election timeout of 1 s, and not that of the script

Three hosts are three network namespaces. On each runs a member of etcd (`examples/etcd_member.py`).

1. Two clients on a fourth host write without a pause: one makes no short tries (before), and one does (after). The
   leader's process is killed, or its host is cut off: all packets from and to it are dropped. The figure is the longest
   time between two writes that etcd has acknowledged.
2. Two jobs run on the three hosts: the agents of one make no short tries. The heartbeat is 1 s. The host of the leader
   is cut off, and all of its processes are killed. The figure is the time until the survivors' next round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import command
from tests.support.etcd_hosts import SCRIPT, Members
from tests.support.netns import Network
from tests.support.nodes import GOOD, NodeRun, Nodes, Up, ended
from tests.support.waiting import PATIENCE_S, until

CLIENT = """
import sys, threading, time
from math import inf
import reknit.adapters.journals.etcd.journal as journal
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.gateway import Cluster
from reknit.adapters.runtime.ports import Unavailable
from reknit.core.job.entries import Node, NodeId

kind, port, *hosts = sys.argv[1:]
if kind == "before":
    journal._SOON_S = inf
writer = journal.EtcdJournal(Cluster([(host, int(port)) for host in hosts]), Envelope(kind), timeout_s=5.25)
longest, count, node = 0.0, 0, Node(NodeId("n"))
last = None

def write():
    global last, longest, count
    while True:
        try:
            writer.beat(node, count, ())
        except Unavailable:
            time.sleep(0.05)
            continue
        now = time.monotonic()
        longest = max(longest, now - (last or now))
        last, count = now, count + 1
        time.sleep(0.005)

threading.Thread(target=write, daemon=True).start()
for line in sys.stdin:
    print(count, longest, flush=True)
    longest = 0.0
"""
LEADER = """
import http.client, json, sys
port, *hosts = sys.argv[1:]
for i, host in enumerate(hosts):
    try:
        connection = http.client.HTTPConnection(host, int(port), timeout=1)
        connection.request("POST", "/v3/maintenance/status", "{}")
        status = json.loads(connection.getresponse().read())
        if status["header"]["member_id"] == status.get("leader"):
            print(i)
    except OSError:
        pass
"""
BEFORE = f"""#!{sys.executable}
from math import inf
import reknit.adapters.journals.etcd.journal as journal
journal._SOON_S = inf
from reknit.app.cli.main import main
main()
"""


class Client:
    """A process that writes without a pause."""

    def __init__(self, kind: str, members: Members, **popen: Any) -> None:
        command = [sys.executable, "-c", CLIENT, kind, str(members.port), *members.hosts]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **popen)

    def told(self) -> tuple[int, float]:
        """How many writes were acknowledged, and the longest gap since this was asked last."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        count, longest = self._process.stdout.readline().split()
        return int(count), float(longest)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def leader(members: Members, enter: Any) -> int:
    """Wait for the one leader."""

    def look() -> list[str]:
        words = [sys.executable, "-c", LEADER, str(members.port), *members.hosts]
        found = subprocess.run(words, preexec_fn=enter, capture_output=True, text=True, check=True).stdout.split()
        return found if len(found) == 1 else []

    return int(until(look, "a leader")[0])


def progressed(clients: list[Client], writes: int = 300) -> list[float]:
    """Wait until every client has made so many more writes. Returns the longest gap of each."""
    begun, longest = [client.told() for client in clients], [0.0 for _ in clients]

    def look() -> bool:
        now = [client.told() for client in clients]
        longest[:] = [max(old, gap) for old, (_, gap) in zip(longest, now, strict=True)]
        return all(count >= before + writes for (count, _), (before, _) in zip(now, begun, strict=True))

    until(look, "the clients to write")
    return [max(gap, before) for gap, (_, before) in zip(longest, begun, strict=True)]


@contextmanager
def cluster(path: Path, size: int, script: Path) -> Iterator[tuple[Network, Members]]:
    """Three members in three namespaces, and further namespaces up to `size`."""
    with Network(size) as network:
        popen = [{"preexec_fn": network.enter(i)} for i in range(3)]
        with Members(path, network.addresses[:3], popen, script=script) as members:
            members.start(0, 1, 2)
            members.serve()
            yield network, members


def write_gaps(path: Path, repeats: int, script: Path) -> None:
    gaps: dict[str, list[list[float]]] = {"its process is killed": [], "its host is cut off": []}
    with ExitStack() as stack:
        network, members = stack.enter_context(cluster(path, 4, script))
        enter = network.enter(3)
        clients = [Client(kind, members, preexec_fn=enter) for kind in ("before", "after")]
        for client in clients:
            stack.callback(client.close)
        for _ in range(repeats):
            for what, found in gaps.items():
                progressed(clients)
                victim = leader(members, enter)
                progressed(clients, 50)
                if "killed" in what:
                    members.runs[victim].kill()
                    found.append(progressed(clients))
                    members.revive(victim)
                else:
                    network.cut(victim)
                    found.append(progressed(clients))
                    network.mend(victim)
                members.runs[victim].serves()
    for what, found in gaps.items():
        table(f"longest gap between two writes, the leader is lost: {what}", found)


def rounds(path: Path, repeats: int, script: Path) -> None:
    found = []
    program = path / "reknit-before"
    program.write_text(BEFORE)
    program.chmod(0o755)
    with ExitStack() as stack:
        network, members = stack.enter_context(cluster(path, 3, script))
        enters = [network.enter(i) for i in range(3)]
        jobs = [stack.enter_context(job(path, kind, members)) for kind in ("before", "after")]
        agents = [{i: started(nodes, kind, i, enters[i], path) for i in range(3)} for kind, nodes in jobs]
        last = [nodes.formed(*runs.values()) for (_, nodes), runs in zip(jobs, agents, strict=True)]
        for _ in range(repeats):
            victim = leader(members, enters[0])
            began = time.monotonic()
            network.cut(victim)
            frozen = [runs[victim].freeze() for runs in agents]
            members.runs[victim].kill()
            for runs in agents:
                runs[victim].vanish()
            assert all(frozen)
            took, last = both_formed(jobs, agents, last, victim, began)
            found.append(took)
            print(" ".join(f"{seconds:.2f}" for seconds in took), file=sys.stderr, flush=True)
            network.mend(victim)
            members.revive(victim)
            for (kind, nodes), runs in zip(jobs, agents, strict=True):
                runs[victim] = started(nodes, kind, victim, enters[victim], path)
            last = [
                nodes.formed(*runs.values(), after=ups)
                for (_, nodes), runs, ups in zip(jobs, agents, last, strict=True)
            ]
        for runs in agents:
            for run in runs.values():
                run.tell(GOOD)
            assert ended(*runs.values()) == [0, 0, 0]
    table("the leader's host is cut off and killed: seconds until the survivors' next round", found)


@contextmanager
def job(path: Path, kind: str, members: Members) -> Iterator[tuple[str, Nodes]]:
    folder = path / kind
    folder.mkdir()
    places = ",".join(f"{host}:{port}" for host, port in members.endpoints)
    where = ("--rdzv-backend=etcd", f"--rdzv-endpoint={places}", f"--rdzv-id={kind}")
    conf = "--rdzv-conf=heartbeat=1,last_call_timeout=1,settle=0.2"
    with Nodes(folder, "--nnodes=2:3", "--max-restarts=0", *where, conf) as nodes:
        yield kind, nodes


def started(nodes: Nodes, kind: str, i: int, enter: Any, path: Path) -> NodeRun:
    usual = command.REKNIT
    command.REKNIT = str(path / "reknit-before") if kind == "before" else usual
    try:
        (run,) = nodes.start("abc"[i], preexec_fn=enter)
    finally:
        command.REKNIT = usual
    return run


def both_formed(
    jobs: list[tuple[str, Nodes]], agents: list[dict[int, NodeRun]], last: list[list[Up]], victim: int, began: float
) -> tuple[list[float], list[list[Up]]]:
    """When the survivors of each job were in their next round, and its workers."""
    results: list[tuple[float, list[Up]] | None] = [None for _ in jobs]

    def wait(i: int) -> None:
        survivors = [run for number, run in agents[i].items() if number != victim]
        ups = jobs[i][1].formed(*survivors, after=last[i])
        results[i] = time.monotonic() - began, ups

    threads = [threading.Thread(target=partial(wait, i)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    done = [result for result in results if result is not None]
    assert len(done) == len(jobs)
    for ups in (ups for _, ups in done):
        assert {up.restart for up in ups} == {0}
    return [took for took, _ in done], [ups for _, ups in done]


def table(title: str, found: list[list[float]]) -> None:
    print(f"\n{title}, {len(found)} times")
    for name, values in zip(("before", "after"), zip(*found, strict=True), strict=True):
        middle = statistics.median(values)
        print(f"  {name:6}  median {middle:5.2f} s   from {min(values):5.2f} to {max(values):5.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["writes", "rounds"])
    parser.add_argument("--slow-elections", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        script = path / SCRIPT.name
        text = SCRIPT.read_text()
        if options.slow_elections:
            text = text.replace("--heartbeat-interval=50", "--heartbeat-interval=100")
            text = text.replace("--election-timeout=500", "--election-timeout=1000")
        script.write_text(text)
        for name, measure in (("writes", write_gaps), ("rounds", rounds)):
            if options.only in (None, name):
                (path / f"{name}").mkdir()
                measure(path / name, options.repeats, script)


if __name__ == "__main__":
    main()
