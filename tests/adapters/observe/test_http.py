"""The HTTP server of the health checks: it answers, and no client holds it up."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from subprocess import PIPE

import pytest

from reknit.adapters.observe import http
from reknit.adapters.observe.http import Page, PageServer, Response, line
from reknit.adapters.runtime.clock import is_readable
from tests.support.alone import ENV, ROOT, command, run_alone
from tests.support.asking import connected, full, get, listening, served
from tests.support.leaks import nothing_left
from tests.support.waiting import PATIENCE_S, descriptors, until

BIG = "x" * 20_000_000


def fails(query: Mapping[str, str]) -> Response:
    raise LookupError("no such thing")


class Gate:
    """A page that waits until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.asked = 0

    def page(self, query: Mapping[str, str]) -> Response:
        self.asked += 1
        return line(200, "open") if self.is_open.wait(PATIENCE_S) else line(503, "too late")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def server(gate: Gate) -> Iterator[PageServer]:
    pages: dict[str, Page] = {
        "/ok": lambda query: line(200, f"fine {sorted(query.items())}"),
        "/fails": fails,
        "/gate": gate.page,
        "/big": lambda query: Response(200, BIG),
    }
    with nothing_left():
        server = PageServer("127.0.0.1", 0, pages)
        server.start()
        yield server
        gate.is_open.set()
        server.close()
        server.close()


def test_a_page_and_its_query(server: PageServer) -> None:
    """What a probe and a person with curl see."""
    status, body, headers = full(f"{server.url}/ok?a=1&b=x%20y")
    assert (status, body) == (200, "fine [('a', '1'), ('b', 'x y')]\n")
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Date"].endswith("GMT")


def test_head_has_the_headers_alone(server: PageServer) -> None:
    """Some load balancers ask with HEAD."""
    status, body, headers = full(f"{server.url}/ok", "HEAD")
    assert (status, body) == (200, "")
    assert int(headers["Content-Length"]) == len("fine []\n")


def test_what_cannot_be_answered(server: PageServer) -> None:
    """Each mistake has its status, and one line that says what is possible."""
    status, body = get(f"{server.url}/nowhere")
    assert (status, body) == (404, "there is no such page; the pages are /ok, /fails, /gate, /big\n")
    assert get(f"{server.url}/ok", "POST")[0] == 501
    assert get(f"{server.url}/fails") == (500, "the page has failed: LookupError: no such thing\n")
    assert get(f"{server.url}/ok")[0] == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"GET /ok HTTP/9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\xff\xfe\n\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"G" * 100_000,
        b"GET /ok HTTP/1.1\r\n" + b"A: b\r\n" * 200,
    ],
)
def test_garbage_ends_nothing(server: PageServer, request_: bytes) -> None:
    """A scanner of ports, or somebody who speaks TLS. The next client is answered."""
    with connected(server.url) as client:
        try:
            # The server may refuse the request before it has read all of it.
            client.sendall(request_)
            client.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        except OSError:  # reset, or not connected any more
            answer = b""
    assert b" 200 " not in answer
    assert get(f"{server.url}/ok")[0] == 200


def test_a_page_that_waits(server: PageServer, gate: Gate) -> None:
    """Others are answered meanwhile."""
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(get, f"{server.url}/gate") for _ in range(5)]
        until(lambda: gate.asked == 5)
        assert get(f"{server.url}/ok")[0] == 200
        gate.is_open.set()
        assert [answer.result() for answer in answers] == [(200, "open\n")] * 5


def test_a_client_that_half_closes_has_its_answer(server: PageServer) -> None:
    """As `nc` does."""
    with connected(server.url) as client:
        client.sendall(b"GET /ok HTTP/1.1\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100).startswith(b"HTTP/1.0 200")


def test_slow_clients_hold_nobody_up(server: PageServer) -> None:
    """More clients than the server has places for say nothing. Somebody who asks is answered at once, and the oldest of
    the silent ones has lost its place."""
    silent = [connected(server.url) for _ in range(http._MOST_CLIENTS + 5)]
    try:
        for _ in range(3):
            assert get(f"{server.url}/ok")[0] == 200
        assert silent[0].recv(1) == b""
        silent[-1].sendall(b"GET /ok HTTP/1.1\r\n\r\n")
        assert silent[-1].recv(100).startswith(b"HTTP/1.0 200")
    finally:
        for client in silent:
            client.close()


def test_pages_that_wait_do_not_take_all_threads(server: PageServer, gate: Gate) -> None:
    """Probes of an agent that hangs wait for a minute each. The host may allow a few thousand threads, which the
    workers need."""
    probes = []
    try:
        for _ in range(http._MOST_THREADS + 10):
            probes.append(connected(server.url))
            probes[-1].sendall(b"GET /gate HTTP/1.1\r\n\r\n")
        for probe in (probes[0], probes[-1]):
            with suppress(ConnectionResetError):
                assert probe.recv(1) == b""
        assert gate.asked <= http._MOST_THREADS
        gate.is_open.set()
        served(server.url)
        assert get(f"{server.url}/ok")[0] == 200
    finally:
        for probe in probes:
            probe.close()


def test_a_silent_client_is_cut_off(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep its thread for ever."""
    monkeypatch.setattr(http._Handler, "timeout", 0.1)
    before = threading.active_count()
    with connected(server.url) as silent, connected(server.url) as reads_nothing:
        reads_nothing.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert silent.recv(1) == b""
        until(lambda: threading.active_count() == before, "the end of the threads of both")
    assert get(f"{server.url}/ok")[0] == 200


def test_closing_cuts_everybody_off(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` does not wait for a client that says nothing, nor for one that does not take its answer."""
    monkeypatch.setattr(http, "END_S", PATIENCE_S)
    before = threading.active_count()
    with connected(server.url) as silent, connected(server.url) as reads_nothing:
        reads_nothing.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        until(lambda: threading.active_count() == before + 2, "a thread for each")
        server.close()
        assert silent.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        get(f"{server.url}/ok")


def test_a_server_that_was_not_started() -> None:
    """The system has allowed no thread: the socket is closed all the same."""
    with nothing_left():
        PageServer("127.0.0.1", 0, {}).close()


def test_a_port_in_use(server: PageServer) -> None:
    """Nothing is left of the second server."""
    with nothing_left(), pytest.raises(OSError, match="in use"):
        PageServer("127.0.0.1", server.port, {})


def test_the_port_can_be_had_again_at_once() -> None:
    """A connection of the last server may linger in the kernel for a minute."""
    first = PageServer("127.0.0.1", 0, {"/": lambda query: line(200, "first")})
    first.start()
    assert get(f"{first.url}/") == (200, "first\n")
    first.close()
    second = PageServer("127.0.0.1", first.port, {"/": lambda query: line(200, "second")})
    second.start()
    assert get(f"{second.url}/") == (200, "second\n")
    second.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::1"])
def test_other_addresses(host: str) -> None:
    """Kubernetes asks at the address of the pod."""
    try:
        server = PageServer(host, 0, {"/": lambda query: line(200, "here")})
    except OSError as error:
        pytest.skip(f"this system has no {host}: {error}")
    server.start()
    assert get(f"{server.url.replace('0.0.0.0', '127.0.0.1')}/") == (200, "here\n")
    server.close()


@pytest.mark.alone
def test_a_forked_child_has_none_of_the_sockets(server: PageServer, gate: Gate) -> None:
    """Otherwise the port would stay taken, and clients would wait, as long as the child lives."""
    read_end, write_end = os.pipe()
    before = descriptors()
    with connected(server.url) as client:
        client.sendall(b"GET /gate HTTP/1.1\r\n\r\n")
        until(lambda: gate.asked == 1)
        assert len(listening(os.getpid())) >= 1
        assert len(descriptors() - before) == 2, "both ends of the connection"
        pid = os.fork()
        if pid == 0:
            try:
                server.close()
                os.write(write_end, repr((len(listening(os.getpid())), len(descriptors() - before))).encode())
            finally:
                os._exit(0)
        os.close(write_end)
        assert os.read(read_end, 100) == b"(0, 1)", "the end of the client is left"
        os.close(read_end)
        os.waitpid(pid, 0)
        gate.is_open.set()
        assert client.recv(100).startswith(b"HTTP/1.0 200")
    assert get(f"{server.url}/ok")[0] == 200


def test_idle_clients_leave_descriptors_for_the_agent() -> None:
    """Without one the agent loses its store, and its node is taken for dead."""
    script = """
        import os, resource
        from reknit.adapters.observe import http
        http._Handler.timeout = 1000  # nobody is cut off because of silence
        server = http.PageServer("127.0.0.1", 0, {"/": lambda query: http.line(200, "here")})
        server.start()
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        print(server.url, flush=True)
        input()
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(http._LEFT - 1)]
        print("opened", flush=True)
        for fd in files:
            os.close(fd)
        input()
        server.close()
    """
    argv = command(script)
    with subprocess.Popen(argv, env=ENV, cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        clients = [connected(url) for _ in range(60)]
        until(lambda: sum(is_readable(client.fileno()) for client in clients) >= 30, "clients to be turned away")
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "opened\n"
        for client in clients:
            client.close()
        served(url)
        print(file=process.stdin, flush=True)


def test_no_descriptor_is_left() -> None:
    """A client cannot be accepted. The server pauses instead of spinning, and then serves the client."""
    said = run_alone("""
        import os, resource, socket, threading
        from socketserver import TCPServer
        from reknit.adapters.observe import http
        from tests.support.waiting import until

        server = http.PageServer("127.0.0.1", 0, {"/": lambda query: http.line(200, "here")})
        server.start()
        threads = threading.active_count()
        first = socket.create_connection((server.host, server.port))
        until(lambda: threading.active_count() > threads)
        client = socket.socket()
        limit = os.dup(0)
        os.close(limit)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        accept, refused = TCPServer.get_request, []

        def get_request(listener):
            try:
                return accept(listener)
            except OSError as error:
                refused.append(error)
                raise

        TCPServer.get_request = get_request
        client.connect((server.host, server.port))
        client.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
        until(lambda: refused)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        print(client.recv(100).decode().split()[1])
        assert len(refused) < 5, refused
        server.close()
    """)
    assert said == "200\n"
