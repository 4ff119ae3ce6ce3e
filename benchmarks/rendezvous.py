"""How long N nodes need until every node knows its ranks: reknit's journal beside torch's dynamic rendezvous.

    python benchmarks/rendezvous.py                        # the table, about ten minutes (torch does not finish 256)
    python benchmarks/rendezvous.py --nodes 128 --only reknit --repeats 5
    python benchmarks/rendezvous.py --nodes 128 --journal etcd   # or file; reknit alone
    python benchmarks/rendezvous.py --store                # how fast the stores take entries, for `reknit simulate`

Both meet at one TCPStore, hosted by torch's own server in a process of its own. Nodes are threads, either all in one
process or spread over 8 processes. N is the minimum and the maximum of nodes. The time is measured from the moment when
all processes let their threads go, until the last node has its ranks. At that moment torch's threads have connected to
the store already. Those of reknit connect later.

reknit's nodes are whole agents: the real `Loop` with the real journal, each in a thread. They have no keeper and no
workers: a node knows its ranks when its loop says `StartWorkers`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from math import inf
from typing import Any
from urllib.request import urlopen

PATIENCE_S = 300.0
SIZES = (32, 128, 256, 512, 1000)
TORCH_SIZES = (32, 128, 256)
"""512 does not finish within the patience either."""
WRITERS = (1, 8, 64, 256)
"""Numbers of nodes, where the store itself is measured."""


# ---- one process of nodes ------------------------------------------------------------------------------------------


def reknit_node(endpoint: str, number: int, total: int, job: str, known: Callable[[int], None]) -> None:
    from reknit.adapters.link import ThreadedLink
    from reknit.adapters.runtime.clock import SystemClock
    from reknit.adapters.runtime.loop import Loop, Ports
    from reknit.adapters.runtime.shells import run
    from reknit.core.agent.agent import Agent, Spec
    from reknit.core.job.entries import NodeId, Terms

    clock = SystemClock()
    is_host = number == 0  # the first node begins the journal and fixes the terms, as in a real job
    link = ThreadedLink(journal_at(endpoint, job, founds=is_host), clock, f"x{number}")
    terms = Terms(total, total, beat_s=2.25, silence_s=10.5)  # lost after 15 s, as with torch's defaults
    spec = Spec(NodeId(f"node{number}"), "127.0.0.1", terms, opens_after_s=0.0 if is_host else 3.0)
    ports: Any = Ports(clock, link, NoWorkers(f"x{number}", known), NoRequests())
    run(Loop(Agent(spec), ports))


def appends(total: int) -> int:
    """How many entries each of so many nodes appends."""
    return 200 if total == 1 else 20


def writing_node(endpoint: str, number: int, total: int, job: str, known: Callable[[int], None]) -> Callable[[], None]:
    """Connect at once. Returns the function that appends one entry after the other. It waits for each."""
    from reknit.core.job.entries import Node, NodeId, Succeeded

    journal, node = journal_at(endpoint, job, founds=number == 0), Node(NodeId(f"node{number}"))
    journal.append(f"x{number}", Succeeded(node, 0))

    def write() -> None:
        for i in range(appends(total)):
            journal.append(f"x{number}.{i}", Succeeded(node, i))
        known(number)

    return write


def journal_at(endpoint: str, job: str, *, founds: bool) -> Any:
    """`endpoint`: the port of a TCPStore, `etcd:` and a port, or a folder."""
    from reknit.adapters.journals.envelope import Envelope

    if endpoint.isdigit():
        from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal

        return TCPStoreJournal("127.0.0.1", int(endpoint), Envelope(job), founds=founds, timeout_s=30.0)
    if endpoint.startswith("etcd:"):
        from reknit.adapters.journals.etcd.gateway import Cluster
        from reknit.adapters.journals.etcd.journal import EtcdJournal

        return EtcdJournal(Cluster([("127.0.0.1", int(endpoint[5:]))]), Envelope(job), timeout_s=30.0)
    from reknit.adapters.journals.file.journal import FileJournal

    return FileJournal(endpoint, Envelope(job), timeout_s=30.0)


class NoWorkers:
    """The port `Workers` of a node without a keeper. It starts nothing, and tells which rank it was to start."""

    wakes_at = None

    def __init__(self, nonce: str, known: Callable[[int], None]) -> None:
        self._nonce = nonce
        self._has_started = False
        self._known = known
        self._stopped: int | None = None

    def start(self, command: Any) -> None:
        self._known(command.assignment.workers[0].rank)

    def stop(self, command: Any) -> None:
        self._stopped = command.round

    def renew_port(self) -> None:
        pass  # no round is passed over here, so no node needs another port

    def events(self, now: float) -> list[Any]:
        from reknit.core.agent.events import Started
        from reknit.core.agent.worker_words import WorkersStopped

        if not self._has_started:
            self._has_started = True
            return [Started(now, self._nonce, 1)]
        round, self._stopped = self._stopped, None
        return [] if round is None else [WorkersStopped(now, round, 1)]


class NoRequests:
    def taken(self) -> list[int]:
        return []


def torch_node(port: int, number: int, total: int, job: str, known: Callable[[int], None]) -> Callable[[], None]:
    """Connect at once. Returns the function that makes the rendezvous."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    backend = C10dRendezvousBackend(store, job)
    handler = DynamicRendezvousHandler.from_backend(
        run_id=job, store=store, backend=backend, min_nodes=total, max_nodes=total, local_addr="127.0.0.1"
    )
    return lambda: known(handler.next_rendezvous().rank)


def be_nodes(which: str, endpoint: str, first: int, count: int, total: int, job: str) -> None:
    """A process with nodes. It prints `ready`, waits for a line, and prints for each node its rank and the time when
    the node knew it."""
    said = threading.Lock()

    def known(rank: int) -> None:
        at = time.monotonic()
        with said:
            print(json.dumps([rank, at]), flush=True)

    calls: list[Callable[[], None]] = []
    for number in range(first, first + count):
        if which == "torch":
            calls.append(torch_node(int(endpoint), number, total, job, known))
        elif which == "store":
            calls.append(writing_node(endpoint, number, total, job, known))
        else:
            calls.append(partial(reknit_node, endpoint, number, total, job, known))
    if which == "reknit":
        journal_at(endpoint, job, founds=False).close()
        import reknit.adapters.link
        import reknit.adapters.runtime.loop
        import reknit.adapters.runtime.shells  # noqa: F401  # only imported, as torch is

        gc.freeze()  # as `reknit run` does when it has imported what it needs
    gate = threading.Event()

    def run(call: Callable[[], None]) -> None:
        gate.wait()
        call()

    threading.stack_size(512 * 1024)
    # A thread that waits for the interpreter's lock asks for it every 5 ms. Hundreds of threads would do nothing else.
    sys.setswitchinterval(0.1)
    for call in calls:
        threading.Thread(target=run, args=(call,), daemon=True).start()
    print("ready", flush=True)
    if not sys.stdin.readline():
        os._exit(1)  # the benchmark has ended
    gate.set()
    sys.stdin.readline()
    os._exit(0)


# ---- a measurement -------------------------------------------------------------------------------------------------


def measured(which: str, endpoint: str, total: int, processes: int, job: str) -> float | None:
    """One measurement, in seconds. None: it was not done within the patience."""
    share = [total * (i + 1) // processes - total * i // processes for i in range(processes)]
    firsts = [sum(share[:i]) for i in range(processes)]
    argv = [sys.executable, __file__, "--be", which, endpoint]
    children = [
        subprocess.Popen(
            [*argv, str(first), str(count), str(total), job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for first, count in zip(firsts, share, strict=True)
    ]
    give_up = threading.Timer(PATIENCE_S, lambda: [child.kill() for child in children])
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        give_up.start()
        start = time.monotonic()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        lines: list[str] = []
        for child, count in zip(children, share, strict=True):
            assert child.stdout is not None
            lines += [child.stdout.readline() for _ in range(count)]
        if not all(lines):
            return None
        said = [json.loads(line) for line in lines]
        assert sorted(rank for rank, _ in said) == list(range(total)), "ranks are not 0..N-1"
        return float(max(at for _, at in said)) - start
    finally:
        give_up.cancel()
        for child in children:
            child.kill()
            child.communicate()


@contextmanager
def served(journal: str) -> Iterator[str]:
    """Start a store in a process of its own. Gives its endpoint."""
    with tempfile.TemporaryDirectory() as folder:
        if journal == "file":
            yield folder
            return
        process, endpoint = etcd(folder) if journal == "etcd" else torchs_server()
        try:
            yield endpoint
        finally:
            process.kill()
            process.communicate()


def torchs_server() -> tuple[subprocess.Popen[bytes], str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    port = listener.getsockname()[1]
    code = (
        "import sys, threading; from torch.distributed import TCPStore\n"
        f"s = TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False,"
        f" master_listen_fd={listener.fileno()}, use_libuv=True)\n"
        "print('serves', flush=True)\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[listener.fileno()],
    )
    listener.close()
    assert process.stdout is not None
    process.stdout.readline()
    return process, str(port)


def etcd(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    """One etcd server, which writes to the disk as in production."""
    reserved = [socket.socket(), socket.socket()]
    for s in reserved:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", 0))
    url, peer_url = (f"http://127.0.0.1:{s.getsockname()[1]}" for s in reserved)
    argv = ["etcd", "--data-dir", folder, "--initial-cluster", f"default={peer_url}", "--log-level", "error"]
    for option, value in {
        "--listen-client-urls": url,
        "--advertise-client-urls": url,
        "--listen-peer-urls": peer_url,
        "--initial-advertise-peer-urls": peer_url,
    }.items():
        argv += [option, value]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            if b"true" in urlopen(f"{url}/health").read():
                return process, f"etcd:{reserved[0].getsockname()[1]}"
        except OSError:
            time.sleep(0.05)
    raise SystemExit("etcd does not run")


def table(sizes: list[int], repeats: int, which: list[str], journal: str) -> None:
    print(f"{'nodes':>6} {'threads':>18} " + " ".join(f"{name:>22}" for name in which), flush=True)
    for total in sizes:
        for processes in (1, 8):
            cells = []
            for name in which:
                if name == "torch" and total not in TORCH_SIZES:
                    cells.append("not tried")
                    continue
                cells.append(cell(name, total, processes, repeats, journal))
            shape = f"{processes} x {total // processes}"
            print(f"{total:>6} {shape:>18} " + " ".join(f"{text:>22}" for text in cells), flush=True)


def stores(repeats: int) -> None:
    """How fast each store takes entries, from one node and from many."""
    print(f"{'store':>6} " + " ".join(f"{f'{total} nodes':>10}" for total in WRITERS) + "  entries in a second")
    for journal in ("c10d", "etcd", "file"):
        rates = []
        for total in WRITERS:
            taken = []
            for i in range(repeats):
                with served(journal) as endpoint:
                    taken.append(measured("store", endpoint, total, min(total, 2), f"job{i}") or inf)
            rates.append(total * appends(total) / statistics.median(taken))  # 0: not done within the patience
        print(f"{journal:>6} " + " ".join(f"{rate:>10.0f}" for rate in rates), flush=True)


def cell(name: str, total: int, processes: int, repeats: int, journal: str) -> str:
    taken: list[float] = []
    for i in range(repeats):
        with served(journal) as endpoint:
            seconds = measured(name, endpoint, total, processes, f"job{i}")
        if seconds is None:
            return f"not in {PATIENCE_S:.0f} s"
        taken.append(seconds)
        if seconds > 30:
            break
    return f"{statistics.median(taken):.3f} s (of {len(taken)})"


def main() -> None:
    if sys.argv[1:2] == ["--be"]:
        which, endpoint, first, count, total, job = sys.argv[2:]
        be_nodes(which, endpoint, int(first), int(count), int(total), job)
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, action="append", help=f"a size of its own (default: {SIZES})")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("reknit", "torch"))
    parser.add_argument("--journal", choices=("c10d", "file", "etcd"), default="c10d", help="torch knows only c10d")
    parser.add_argument("--store", action="store_true", help="measure the stores themselves")
    options = parser.parse_args()
    if options.store and (options.nodes or options.only or options.journal != "c10d"):
        parser.error("--store measures all stores, and takes --repeats only")
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    if options.store:
        stores(options.repeats)
        return
    only = "reknit" if options.journal != "c10d" else options.only
    table(options.nodes or list(SIZES), options.repeats, [only] if only else ["reknit", "torch"], options.journal)


if __name__ == "__main__":
    main()
