"""The stores that hold journals, with one interface for `test_journals`. Run as a script, a process that writes.

    python -m tests.support.journals KIND WHERE JOB NAME COUNT

The process prints "ready" and waits for a line. Then it prints the number of each entry when its append has returned.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file.folder import file_name
from reknit.adapters.journals.file.journal import FileJournal
from reknit.adapters.journals.in_memory import MemoryJournal
from reknit.adapters.runtime.ports import Journal, Unavailable
from reknit.core.job.entries import Entry, Joined, Node, NodeId
from tests.support.alone import ENV, ROOT
from tests.support.waiting import PATIENCE_S

SHARED = ("file", "c10d", "etcd")
KINDS = ("memory", *SHARED)


class Store(Protocol):
    """A store. It keeps one journal per job."""

    def journal(self, job: str, secret: str = "") -> Journal:
        """The journal of one agent."""
        ...


class MemoryStore:
    def __init__(self) -> None:
        self._journals: dict[str, MemoryJournal] = {}

    def journal(self, job: str, secret: str = "") -> Journal:
        return self._journals.setdefault(job, MemoryJournal())


class SharedStore:
    """One of the stores in `SHARED`."""

    def __init__(self, kind: str, where: str) -> None:
        """`where`: a folder, or HOST:PORT."""
        self.kind = kind
        self.where = where
        self._made: list[Journal] = []

    def journal(self, job: str, secret: str = "") -> Journal:
        self._made.append(opened(self.kind, self.where, Envelope(job, secret)))
        return self._made[-1]

    def close(self) -> None:
        for journal in self._made:
            journal.close()

    def write_raw(self, job: str, record: bytes) -> None:
        """What an attacker can do who reaches the store and does not know the secret."""
        host, _, port = self.where.partition(":")
        if self.kind == "file":
            with open(Path(self.where) / file_name(job) / "journal", "ab") as file:
                file.write(record + b"\n")
        elif self.kind == "c10d":
            from reknit.adapters.journals.tcpstore.client import StoreClient

            client = StoreClient(host, int(port), 5.0)
            slot = client.add(f"reknit/{job}/head", 1) - 1
            client.set(f"reknit/{job}/slot/{slot}", record)
            client.close()
        else:
            from reknit.adapters.journals.etcd.gateway import Cluster, Gateway, put

            gateway = Gateway(Cluster([(host, int(port))]), 5.0)
            # A key of its own for each record: a key that is put twice is refused, whoever has put it first.
            gateway.transact([], [put(f"/reknit/{job}/entries/0/raw-{sha256(record).hexdigest()}", record)], [])
            gateway.close()


def opened(kind: str, where: str, envelope: Envelope) -> Journal:
    """A client with long limits, because the machine may be busy."""
    if kind == "file":
        return FileJournal(where, envelope, poll_s=0.01, timeout_s=PATIENCE_S)
    host, _, port = where.partition(":")
    if kind == "c10d":
        from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal

        return TCPStoreJournal(host, int(port), envelope, exclusive=False, timeout_s=PATIENCE_S)
    from reknit.adapters.journals.etcd.gateway import Cluster
    from reknit.adapters.journals.etcd.journal import EtcdJournal

    return EtcdJournal(Cluster([(host, int(port))]), envelope, timeout_s=PATIENCE_S)


@contextmanager
def served(kind: str, path: Path) -> Iterator[str]:
    """A store of this kind, as long as the context lasts. Gives the text that says where it is."""
    if kind == "file":
        yield str(path)
    elif kind == "c10d":
        from tests.support.stores import hosted

        with hosted() as (_, port):
            yield f"127.0.0.1:{port}"
    else:
        from tests.support.etcd import Etcd

        with Etcd(path) as server:
            yield f"127.0.0.1:{server.port}"


# ---- writers ----


def entry(name: str, i: int) -> Entry:
    """The i-th entry of the writer with this name. It looks like a node that comes back again and again."""
    return Joined(Node(NodeId(f"{name}-{i % 8}"), i // 8), f"{name} {i}", 0, "10.0.0.1", i)


def whose(entries: Sequence[Entry], name: str) -> list[int]:
    """The numbers of this writer's entries, in the order in which they are in the journal."""
    found = [e for e in entries if isinstance(e, Joined) and e.nonce.split()[0] == name]
    assert found == [entry(name, e.port) for e in found]
    return [e.port for e in found]


def append(journal: Journal, token: str, what: Entry) -> None:
    """Append the entry, and try again until it is in the journal, as the link does."""
    while True:
        try:
            return journal.append(token, what)
        except Unavailable as e:
            print(f"unavailable: {e}", file=sys.stderr, flush=True)


def everything(journal: Journal, after: int = 0) -> list[Entry]:
    """All entries after the position `after`."""
    entries: list[Entry] = []
    while True:
        batch = journal.read(after, wait_s=0.0)
        if batch.position == after:
            return entries
        assert batch.base is None, "whoever publishes a fold must expect one"
        after = batch.position
        entries += batch.entries


class Writer:
    """A process that appends `count` entries when `go` is called. Use `with`."""

    def __init__(self, store: SharedStore, job: str, name: str, count: int, *, is_safe: bool = True) -> None:
        """`is_safe`: what the process writes is forced to the disk. False: it is faster."""
        arguments = [store.kind, store.where, job, name, str(count)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.journals", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENV, "UNSAFE": "" if is_safe else "1"},
            cwd=ROOT,
        )
        self.errors = ""

    def go(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> list[int]:
        """Wait until the process has ended. Returns the numbers of the entries whose append has returned."""
        out, self.errors = self.process.communicate(timeout=2 * PATIENCE_S)
        return [int(line) for line in out.splitlines()]

    def kill_after(self, seconds: float) -> list[int]:
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def main(kind: str, where: str, job: str, name: str, count: str) -> None:
    if os.environ["UNSAFE"]:
        os.fsync = lambda fd: None
    journal = opened(kind, where, Envelope(job))
    journal.read(0, wait_s=0.0)  # this connects the journal
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(int(count)):
        append(journal, f"{name}-{i}", entry(name, i))
        print(i, flush=True)
    journal.close()


# ---- answers that get lost ----


class Proxy:
    """A proxy for a server on loopback. Use `with`."""

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        """`delay_s`: seconds that requests and answers are on their way, each."""
        self._delay_s = delay_s
        host, _, port = target.partition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.where = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.passes: int | None = None
        """Pass on so many more answers. The next answer is lost, and its connection is cut. None: pass on all."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        try:
            while (data := source.recv(1 << 16)) and self._is_passed(is_answer):
                time.sleep(self._delay_s)
                sink.sendall(data)
        except OSError:
            pass  # the thread of the other direction has closed both connections
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        if is_answer:
            source.close()
            sink.close()

    def _is_passed(self, is_answer: bool) -> bool:
        if not is_answer or self.passes is None:
            return True
        self.passes = self.passes - 1 if self.passes else None
        return self.passes is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
