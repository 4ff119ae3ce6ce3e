"""The client of TCPStore's protocol, against torch's server and against servers that are none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reknit.adapters.journals.tcpstore.client import StoreClient, endpoint
from reknit.adapters.runtime.ports import Unavailable
from tests.support.stores import HOST, answering, free_port
from tests.support.waiting import PATIENCE_S

LONG_S = PATIENCE_S


@pytest.fixture
def client(port: int) -> Iterator[StoreClient]:
    client = StoreClient(HOST, port, LONG_S)
    yield client
    client.close()


def test_what_is_written_is_read_whatever_it_holds(client: StoreClient) -> None:
    """Records hold any text, and the fold of a large job is long."""
    for value in (b"one", b"\0\xff\n", b"x" * 3_000_000):
        client.set("k", value)
        assert client.get("k") == value
    assert client.get("é/ \n") == b""


def test_a_key_that_is_missing_answers_empty(client: StoreClient) -> None:
    """A hole in the journal must not be an error, nor a wait."""
    client.set("there", b"1")
    assert client.get("missing") == b""
    assert client.multi_get(["missing", "there", "also-missing"]) == [b"", b"1", b""]
    assert client.multi_get([]) == []


def test_compare_set_lets_one_writer_win(client: StoreClient) -> None:
    """A slot is filled or plugged, never both."""
    assert client.compare_set("slot", b"", b"mine") == b"mine"
    assert client.compare_set("slot", b"", b"yours") == b"mine"
    assert client.compare_set("slot", b"mine", b"yours") == b"yours"


def test_sums_are_answered_and_can_be_read(client: StoreClient) -> None:
    """A look, and a beat, are one round trip. A number is read as text."""
    assert client.add("count", 5) == 5
    assert client.add_and_get("count", -7, ["count", "missing"]) == (-2, [b"-2", b""])
    assert client.set_and_get("count", b"9", ["count", "missing"]) == [b"9", b""]


def test_waiting_in_vain_leaves_the_connection_usable(client: StoreClient) -> None:
    """Every idle second ends like that."""
    assert client.wait(["never"], 0.01) is False
    assert client.add("after-waiting", 1) == 1
    assert client.wait(["after-waiting"], 0.01) is True
    assert client.wait(["never"], 0.0) is False
    assert client.add("after-waiting", 1) == 2


@pytest.mark.parametrize("how", ["set", "add", "compare_set"])
def test_waiting_ends_when_the_key_comes(client: StoreClient, port: int, how: str) -> None:
    """However it is written."""
    writer = StoreClient(HOST, port, LONG_S)
    key = f"awaited-{how}"
    writes: dict[str, Callable[[], object]] = {
        "set": lambda: writer.set(key, b"1"),
        "add": lambda: writer.add(key, 1),
        "compare_set": lambda: writer.compare_set(key, b"", b"1"),
    }
    thread = threading.Thread(target=writes[how])
    thread.start()
    assert client.wait([key], LONG_S) is True
    thread.join()
    writer.close()


def test_nobody_listening_is_said_with_the_endpoint() -> None:
    """The operator must see which endpoint, and what is wrong with it."""
    port = free_port()
    with pytest.raises(Unavailable, match=rf"^127\.0\.0\.1:{port}: connection refused$"):
        StoreClient(HOST, port, LONG_S)


def test_a_silent_server_is_left_after_the_timeout() -> None:
    """A host that was suspended takes connections and says nothing."""
    with (
        answering(_read_to_the_end) as port,
        pytest.raises(Unavailable, match=r"no answer for 0\.05 s$"),
    ):
        StoreClient(HOST, port, 0.05)


def test_something_else_at_the_endpoint_is_told_apart() -> None:
    """A wrong port is the operator's mistake, not an outage."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        _read_to_the_end(connection)

    with (
        answering(answer) as port,
        pytest.raises(Unavailable, match=r"answers, but not as a TCPStore: another program uses this port$"),
    ):
        StoreClient(HOST, port, LONG_S)


def test_an_answer_that_cannot_be_one_ends_the_connection() -> None:
    """A length out of nowhere must not fill the memory."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(connection.recv(10, socket.MSG_WAITALL)[6:])
        connection.sendall(b"\xff" * 8)
        _read_to_the_end(connection)

    with answering(answer) as port:
        client = StoreClient(HOST, port, LONG_S)
        with pytest.raises(Unavailable, match="not as a TCPStore"):
            client.get("k")
        assert client.is_closed


def test_after_a_failure_the_connection_is_closed_for_good() -> None:
    """What still arrives on it would be taken for the answer to another question."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(connection.recv(10, socket.MSG_WAITALL)[6:])
        connection.recv(1)

    with answering(answer) as port:
        client = StoreClient(HOST, port, LONG_S)
        with pytest.raises(Unavailable, match=rf"^127\.0\.0\.1:{port}: "):
            client.get("k")
        with pytest.raises(Unavailable, match="closed"):
            client.get("k")


def test_a_name_that_cannot_be_resolved_is_said() -> None:
    """A typing error in the endpoint looks like that."""
    with pytest.raises(Unavailable, match="cannot resolve the name"):
        StoreClient("x" * 64 + ".invalid", 1, LONG_S)


def test_every_address_of_a_name_is_tried(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """localhost is ::1 first, and not everybody listens there."""
    real = socket.getaddrinfo

    def both(host: str, port: int, **kinds: Any) -> Any:
        return real(HOST, free_port(), **kinds) + real(HOST, port, **kinds)

    monkeypatch.setattr(socket, "getaddrinfo", both)
    StoreClient("some-name", port, LONG_S).close()


def test_closing_from_another_thread_ends_a_wait(client: StoreClient) -> None:
    """An agent that is done must not be held up by its reader."""
    asked = threading.Event()
    real = client._send

    def send(data: bytes) -> None:
        real(data)
        asked.set()

    client._send = send  # type: ignore[method-assign]  # to know when it waits
    ends: list[str] = []

    def wait() -> None:
        try:
            client.wait(["never"], LONG_S)
        except Unavailable as error:
            ends.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert asked.wait(LONG_S)
    client.close()
    thread.join()
    assert "closed here" in ends[0]


def test_a_connection_that_another_thread_has_closed_takes_no_limit(client: StoreClient) -> None:
    """An agent that moves closes the connections of its threads, whatever they do."""
    client.close()
    with pytest.raises(Unavailable, match="closed here"):
        client.get("x")
    with pytest.raises(Unavailable, match="closed here"):
        client.limit(1.0)


def test_an_endpoint_is_written_as_in_a_url() -> None:
    """::1:29500 could be read in two ways."""
    assert endpoint("::1", 29500) == "[::1]:29500"
    assert endpoint("node0", 29500) == "node0:29500"


def _read_to_the_end(connection: socket.socket) -> None:
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
