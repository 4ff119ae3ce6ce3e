"""torch's store for tests: served by a process as in production, or by a few lines that do what a test wants."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import count
from typing import Any, Self, TypeVar
from unittest.mock import patch

import pytest
from attrs import evolve

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore.client import StoreClient
from reknit.adapters.journals.tcpstore.host import StoreHost, host_store
from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal
from reknit.adapters.runtime.ports import Batch, Unavailable
from reknit.core.job.entries import Entry, Joined, Node, NodeId, Opened, Terms
from reknit.core.job.fold import fold
from reknit.core.job.founding import Life
from reknit.core.job.job import Job
from tests.support.waiting import PATIENCE_S, until

T = TypeVar("T")
HOST = "127.0.0.1"
JOBS = (f"job-{number}" for number in count())


def free_port() -> int:
    """Nobody listens there now.

    It lies below the ports that the kernel hands out. Otherwise a process of another test that runs at the same time
    could get it before the caller uses it.
    """
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            end = int(file.read().split()[0])
    except OSError:
        end = 0  # this system is not Linux
    while True:
        # Not `random`: Hypothesis seeds it alike in all processes that run tests.
        port = end // 2 + secrets.randbelow(end // 2) if end > 8192 else 0
        try:
            with socket.create_server((HOST, port)) as free:
                return int(free.getsockname()[1])
        except OSError:
            continue  # somebody listens there


def needs_torch() -> None:
    """Skip the test where torch is not installed. The server of a c10d store is torch's."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")


@contextmanager
def hosted() -> Iterator[tuple[StoreHost, int]]:
    """A new store. Gives its port."""
    needs_torch()
    port = free_port()
    host = host_store(HOST, port)
    assert host is not None
    try:
        yield host, port
    finally:
        host.close()


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that calls `answer` with its first connection, and then closes it. Gives its port."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield int(listener.getsockname()[1])
        thread.join()


class SlowLink:
    """An endpoint that leads to a store, and takes `delay_s` seconds each way. Use `with`."""

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self._to = port
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._pass_on, HOST, 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    def lead_to(self, port: int) -> None:
        """From now on the endpoint leads to this store. The connections to the store before break."""
        self._to = port
        asyncio.run_coroutine_threadsafe(self._break(), self._loop).result(PATIENCE_S)

    async def _end(self) -> None:
        self._server.close()
        await self._break()

    async def _break(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, ours = await asyncio.open_connection(HOST, self._to)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(self._pump(reader, ours), self._pump(theirs, writer))
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            ours.close()
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            data = b"x"
            while data:
                try:
                    data = await reader.read(1 << 16)
                except OSError:
                    data = b""
                sent.put_nowait((self._loop.time() + self.delay_s, data))

        reading = asyncio.create_task(read())
        while (item := await sent.get())[1]:
            await asyncio.sleep(max(0.0, item[0] - self._loop.time()))
            writer.write(item[1])
        writer.close()
        await reading


def stubborn(call: Callable[[], T]) -> T:
    """What a link does: try again while the store does not answer."""
    found: list[T] = []

    def tried() -> bool:
        try:
            found.append(call())
        except Unavailable:
            return False
        return True

    until(tried)
    return found[0]


class JobStore:
    """One job in a store that other tests use as well."""

    def __init__(self, port: int, closing: ExitStack, job: str = "") -> None:
        self.port = port
        self.job = job or next(JOBS)
        self._closing = closing
        self.client = StoreClient(HOST, port, PATIENCE_S)
        closing.callback(self.client.close)

    def journal(self, job: str = "", *, secret: str = "", **settings: Any) -> TCPStoreJournal:
        settings = {"exclusive": False, "timeout_s": PATIENCE_S, **settings}
        journal = TCPStoreJournal(HOST, self.port, Envelope(job or self.job, secret), **settings)
        self._closing.callback(journal.close)
        return journal

    def key(self, name: str) -> str:
        return f"reknit/{self.job}/{name}"


@contextmanager
def noted_clients() -> Iterator[list[StoreClient]]:
    """The clients of stores that this process makes within the `with`."""
    begin, made = StoreClient.__init__, list[StoreClient]()

    def noting(client: StoreClient, *given: Any, **more: Any) -> None:
        made.append(client)
        begin(client, *given, **more)

    with patch.object(StoreClient, "__init__", noting):
        yield made


def many(number: int) -> list[Entry]:
    """Enough to make who reads them far behind."""
    joined = (
        Joined(Node(NodeId(f"n{i:03}")), nonce="x", round=0, address="10.0.0.1", port=i) for i in range(number - 1)
    )
    return [Opened(Terms(min_nodes=1000, max_nodes=1000), "x"), *joined]


def plain(batch: Batch) -> Batch:
    """Without the life of the journal, whose names are drawn."""
    return evolve(batch, life=Life())


def folded(entries: list[Entry], job: Job = Job()) -> Job:
    for entry in entries:
        job = fold(job, entry)
    return job
