"""etcd's gateway: a real server, with and without TLS, and other servers that may listen at an endpoint."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest

from reknit.adapters.journals.etcd.connection import EtcdServer
from reknit.adapters.journals.etcd.gateway import (
    Answer,
    Cluster,
    Gateway,
    KeyValue,
    Range,
    below,
    created_after,
    get,
    holds,
    is_created,
    put,
)
from reknit.adapters.runtime.ports import Refused, Unavailable
from reknit.core.job.reasons import Refusal
from tests.support.etcd import Etcd, make_certificate
from tests.support.leaks import nothing_left
from tests.support.stores import answering
from tests.support.waiting import PATIENCE_S, descriptors, until

SOON_S = 0.05


@pytest.fixture
def nobody() -> Iterator[tuple[str, int]]:
    """An endpoint at which nobody listens, nor will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


@pytest.fixture
def black_hole() -> Iterator[tuple[str, int]]:
    """An endpoint that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()


class Stranger(BaseHTTPRequestHandler):
    """Answers everything with `reply`: status and body."""

    reply = (200, b"<html>")

    def do_POST(self) -> None:
        status, body = self.reply
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[tuple[str, int]]:
    """A web server that is not etcd."""
    with HTTPServer(("127.0.0.1", 0), Stranger) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield ("127.0.0.1", http.server_port)
        http.shutdown()
        thread.join()


class Member(ThreadingHTTPServer):
    """What a member of etcd looks like from outside: it answers every transaction, unless it was told to be silent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.speaks, self.asked, self.headers = threading.Event(), 0, dict[str, str]()
        self.status: dict[str, object] = {}
        """What else is in each answer."""
        self.late_s = 0.0
        """Seconds that each answer takes."""
        self.speaks.set()

    @property
    def endpoint(self) -> tuple[str, int]:
        return "127.0.0.1", self.server_port

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the client has given up before the answer came


class Answering(BaseHTTPRequestHandler):
    server: Member

    def do_POST(self) -> None:
        self.server.asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.speaks.wait(PATIENCE_S)
        threading.Event().wait(self.server.late_s)
        body = json.dumps({"header": {"revision": "7"}, "succeeded": True, **self.server.status}).encode()
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def members(number: int) -> Iterator[list[Member]]:
    """So many members, each in a thread of its own."""
    made = [Member() for _ in range(number)]
    threads = [threading.Thread(target=member.serve_forever, args=(0.01,)) for member in made]
    try:
        for thread in threads:
            thread.start()
        yield made
    finally:
        for member in made:
            member.speaks.set()
            member.late_s = 0.0
            member.shutdown()
            member.server_close()
        for thread in threads:
            thread.join()


def hasty(made: list[Member], timeout_s: float) -> Gateway:
    """A gateway that makes short tries, and knows already how long the first member takes."""
    gateway = Gateway(Cluster([member.endpoint for member in made]), timeout_s, soon_s=SOON_S)
    assert gateway.transact([], [], []).is_met
    return gateway


@contextmanager
def pipe() -> Iterator[int]:
    """A descriptor from which nothing is to be read."""
    ends = os.pipe()
    yield ends[0]
    for end in ends:
        os.close(end)


def tried(gateway: Gateway) -> Answer:
    try:
        return gateway.transact([], [get("/k")], [])
    finally:
        gateway.close()


def test_a_transaction_compares_and_then_does_one_or_the_other(server: Etcd) -> None:
    """All that the journal promises rests on this."""
    gateway = Gateway(Cluster(server.endpoints), 30.0)
    first = gateway.transact([is_created("/t/a", 0)], [put("/t/a", b"1"), get("/t/a")], [])
    assert first == Answer(
        True, first.revision, (Range(), Range((KeyValue("/t/a", b"1", first.revision, 1),), count=1))
    )
    again = gateway.transact([is_created("/t/a", 0)], [put("/t/a", b"2")], [get("/t/a"), get("/t/b")])
    assert again == Answer(False, first.revision, (first.ranges[1], Range()))
    same = gateway.transact([holds("/t/a", b"1")], [put("/t/a", b"3"), get("/t/a")], [])
    assert same.ranges[1].found == (KeyValue("/t/a", b"3", first.revision, 2),)
    gateway.close()


def test_ranges_end_where_the_prefix_ends_and_come_in_the_order_of_creation(server: Etcd) -> None:
    """The neighbour's keys sort right beside."""
    gateway = Gateway(Cluster(server.endpoints), 30.0)
    revisions = {k: gateway.transact([], [put(k, b"")], []).revision for k in ("/r/z", "/r0", "/r/a", "/r", "/r/m")}
    everything, page = gateway.transact([], [below("/r/"), created_after("/r/", revisions["/r/z"], 1)], []).ranges
    assert [f.key for f in everything.found] == ["/r/a", "/r/m", "/r/z"]
    assert ([f.key for f in page.found], page.has_more) == (["/r/a"], True)
    gateway.close()


def test_the_next_server_is_asked_and_stays_the_first(
    server: Etcd, nobody: tuple[str, int], black_hole: tuple[str, int]
) -> None:
    """A silent server must cost one wait, not one for each call."""
    gateway = Gateway(Cluster([nobody, black_hole, *server.endpoints]), 6.0)
    assert gateway.transact([], [get("/k")], []).is_met
    assert gateway.server.authority == f"127.0.0.1:{server.port}"
    gateway.close()


def test_who_cannot_be_reached_is_named_with_the_reason(nobody: tuple[str, int], black_hole: tuple[str, int]) -> None:
    """The line goes to somebody who has to find out what is wrong with the network."""
    with pytest.raises(Unavailable) as e:
        tried(Gateway(Cluster([nobody, black_hole, ("no-such-host.invalid", 1)]), 0.6))
    assert f"http://127.0.0.1:{nobody[1]}: Connection refused" in str(e.value)
    assert f"http://127.0.0.1:{black_hole[1]}: no answer within 0.2 s" in str(e.value)
    assert "http://no-such-host.invalid:1: " in str(e.value)


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, b"<html>", "Expecting value"),
        (200, b"[]", "not an answer of etcd"),
        (200, b"{}", "not an answer of etcd"),
        (404, b"Not Found", "another program answers there, or etcd on a port that is not for clients"),
        (503, b'{"error":"x","message":"etcdserver: no leader","code":14}', "etcdserver: no leader"),
    ],
)
def test_what_is_not_an_answer_is_an_outage(
    stranger: tuple[str, int], status: int, body: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else listens there, or etcd has no leader: in words, and never a traceback."""
    monkeypatch.setattr(Stranger, "reply", (status, body))
    with pytest.raises(Unavailable, match=why):
        tried(Gateway(Cluster([stranger]), 5.0))


def test_proxies_of_the_environment_are_not_asked(
    server: Etcd, nobody: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters set them for downloads; their proxy does not know the nodes."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{nobody[1]}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert tried(Gateway(Cluster(server.endpoints), 30.0)).is_met


def test_tls_checks_both_sides(tmp_path: Path) -> None:
    """Whoever can write into the store runs the job."""
    pair = make_certificate(tmp_path)
    with Etcd(tmp_path, tls=pair) as server, pipe() as gate:
        gateway = Gateway(Cluster(server.endpoints, "https", pair[0], *pair), 30.0)
        watch = gateway.watch("/w/", 1)
        assert watch is not None
        assert gateway.transact([], [put("/w/k", b"")], []).is_met
        assert watch.wait(60.0, gate)
        assert watch.take()
        watch.close()
        gateway.close()
        with pytest.raises(Unavailable) as e:
            tried(Gateway(Cluster(server.endpoints, "https", pair[0]), 30.0))
        assert "Pool(" not in str(e.value), "the words of a library, not of the network"
        with pytest.raises(Unavailable, match="certificate verify failed"):
            tried(Gateway(Cluster(server.endpoints, "https", None, *pair), 30.0))
        with pytest.raises(Refused, match=r"missing\.pem") as refused:
            tried(Gateway(Cluster(server.endpoints, "https", str(tmp_path / "missing.pem")), 30.0))
        assert refused.value.refusal is Refusal.SETUP


def test_a_watch_hears_of_its_keys_alone_and_ends_with_the_server(tmp_path: Path) -> None:
    """What others write, beats above all, must wake nobody; and a dead server must not look like a quiet one."""
    with Etcd(tmp_path) as server, pipe() as gate:
        gateway = Gateway(Cluster(server.endpoints), 30.0)
        watch = gateway.watch("/w/", server.revision() + 1)
        assert watch is not None
        gateway.transact([], [put("/v", b""), put("/w0", b"")], [])
        assert not watch.wait(0.1, gate)  # nothing comes, so any length of the wait is right
        assert watch.take()
        gateway.transact([], [put("/w/x", b"")], [])
        assert watch.wait(60.0, gate)
        assert watch.take()
        server.kill()
        assert watch.wait(60.0, gate)
        assert not watch.take()
        assert gateway.watch("/w/", 1) is None
        watch.close()
        gateway.close()


def test_a_watch_that_begins_in_the_compacted_past_is_known_to_be_none(server: Etcd) -> None:
    """It would never say anything again."""
    gateway = Gateway(Cluster(server.endpoints), 30.0)
    gateway.transact([], [put("/c/x", b"")], [])
    server.compact()
    watch = gateway.watch("/c/", 1)
    if watch is not None:  # told so at once, or in the next message
        with pipe() as gate:
            assert watch.wait(60.0, gate)
        assert not watch.take()
        watch.close()
    gateway.close()


def test_one_connection_is_used_again_and_replaced_when_the_server_has_closed_it(tmp_path: Path) -> None:
    """A connection per call is a load on the store; and a server that was restarted is no outage."""
    with Etcd(tmp_path) as server, closing(Gateway(Cluster(server.endpoints), 30.0)) as gateway:
        assert gateway.transact([], [get("/k")], []).is_met
        first = descriptors()
        assert gateway.transact([], [get("/k")], []).is_met
        assert descriptors() == first
        server.kill()
        server.start()
        server.wait()
        assert gateway.transact([], [get("/k")], []).is_met


def test_closing_ends_a_transaction_that_waits(black_hole: tuple[str, int]) -> None:
    """An agent that ends must not wait for a server that is silent."""
    gateway = Gateway(Cluster([black_hole]), 600.0)
    raised: list[Exception] = []

    def ask() -> None:
        try:
            gateway.transact([], [get("/k")], [])
        except Unavailable as e:
            raised.append(e)

    with nothing_left():
        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: gateway.server.fileno() >= 0, "the connection")
        gateway.close()
        thread.join(PATIENCE_S)
        assert raised


@pytest.mark.parametrize(
    "reply", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b"SSH-2.0-x\r\n", b"\xff" * 99]
)
def test_what_speaks_no_http_or_stops_in_the_middle_is_an_outage(reply: bytes) -> None:
    """A wrong port, or a server that dies while it answers: in words, and the other servers are still asked."""

    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(reply)

    with answering(answer) as port, pytest.raises(Unavailable, match=f"http://127.0.0.1:{port}: "):
        tried(Gateway(Cluster([("127.0.0.1", port)]), PATIENCE_S))


def test_a_user_logs_in_and_again_when_the_token_has_expired(tmp_path: Path) -> None:
    """Whoever can write into the store runs the job, so operators turn etcd's own users on."""
    with Etcd(tmp_path) as server:
        server.post("/v3/auth/user/add", {"name": "root", "password": "secret"})
        server.post("/v3/auth/role/add", {"name": "root"})
        server.post("/v3/auth/user/grant", {"user": "root", "role": "root"})
        server.post("/v3/auth/enable", {})
        cluster = Cluster(server.endpoints, user="root", password="secret")
        login = cluster.login("readwrite ''")
        with closing(Gateway(cluster, 30.0, login)) as gateway, pipe() as gate:
            assert gateway.transact([], [put("/a/k", b"")], []).is_met
            watch = gateway.watch("/a/", 1)
            assert watch is not None, "a watch needs the token, too"
            assert watch.wait(PATIENCE_S, gate)
            watch.close()
            login.token = "expired"
            assert gateway.transact([], [get("/a/k")], []).is_met
            assert login.token != "expired"
        for user, password in (("", ""), ("root", "wrong"), ("nobody", "secret")):
            with pytest.raises(Refused, match=r"etcd at http://127.0.0.1:.* does not let .* in: ") as e:
                tried(Gateway(Cluster(server.endpoints, user=user, password=password), 30.0))
            assert e.value.refusal is Refusal.SETUP


def test_a_user_where_etcd_has_none_is_refused(server: Etcd) -> None:
    """The operator believes that the store is protected."""
    with pytest.raises(Refused, match="authentication is not enabled"):
        tried(Gateway(Cluster(server.endpoints, user="root", password="secret"), 30.0))


# ---- haste ----


def test_the_next_server_is_asked_long_before_the_time_of_a_silent_one_is_over() -> None:
    """An agent that waits for a leader that is gone falls silent itself."""
    with members(3) as made, closing(hasty(made, 6 * PATIENCE_S)) as gateway:
        for member in made:
            member.speaks.clear()  # nobody answers before the new leader is elected
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.append(gateway.transact([], [], [])))
        asking.start()
        until(lambda: min(made[1].asked, made[2].asked) >= 2, "a second round of short tries")
        made[1].speaks.set()
        asking.join(PATIENCE_S)
        assert answers


def test_the_answer_of_a_server_that_has_become_slow_counts() -> None:
    """A plain wait costs as long as the answer takes. An agent that throws such answers away falls silent, and its
    keeper kills the workers (--fence-after)."""
    with members(3) as made, closing(hasty(made, 6 * PATIENCE_S)) as gateway:
        for slow_s in (2.5 * SOON_S, 0.0, 2.5 * SOON_S, 0.0, 0.0, 0.0, 2.5 * SOON_S):
            before = [member.asked for member in made]
            current = gateway.server
            for member in made:
                member.late_s = slow_s
            assert gateway.transact([], [], []).is_met
            assert gateway.server is current
            assert max(m.asked - b for m, b in zip(made, before, strict=True)) <= 1, "a server was asked twice"


def test_a_server_that_takes_longer_than_all_are_asked_in_turn_answers_one_of_the_short_tries() -> None:
    """Each try takes the place of the one before on the same server, so the tries must become longer."""
    with members(3) as made, closing(hasty(made, 6 * PATIENCE_S)) as gateway:
        for member in made:
            member.late_s = 4 * SOON_S
        assert gateway.transact([], [], []).is_met
        assert sum(member.asked for member in made) <= 9
        assert {server.timeout_s for server in gateway._servers} == {2 * PATIENCE_S}


def test_a_server_that_answers_late_and_badly_leaves_the_call_to_the_others() -> None:
    """The one that was asked first may be the one that is broken."""
    with members(3) as made, closing(hasty(made, 6 * PATIENCE_S)) as gateway:
        for member in made:
            member.speaks.clear()
        made[0].status = {"succeeded": True, "header": None}
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.append(gateway.transact([], [], [])))
        asking.start()
        until(lambda: made[1].asked, "the second server to be asked")
        made[0].speaks.set()
        until(lambda: made[2].asked, "the third server to be asked")
        made[2].speaks.set()
        asking.join(PATIENCE_S)
        assert answers
        assert gateway.server.authority == f"127.0.0.1:{made[2].server_port}"


def test_a_cluster_that_has_become_slow_is_no_outage_and_is_asked_once_per_call() -> None:
    """Answers that are later than ever are answers all the same. Repeating them would make the cluster slower still."""
    with members(2) as made, closing(hasty(made, 2 * PATIENCE_S)) as gateway:
        for member in made:
            member.late_s = 10 * SOON_S
        assert gateway.transact([], [], []).is_met
        before = sum(member.asked for member in made)
        for _ in range(3):
            assert gateway.transact([], [], []).is_met
        assert sum(member.asked for member in made) == before + 3


def test_in_an_outage_each_server_is_asked_once_per_call() -> None:
    """Only the first call of an outage is hasty. A thousand agents must not keep a cluster from coming back."""
    with members(2) as made, closing(hasty(made, 8 * SOON_S)) as gateway:
        for member in made:
            member.speaks.clear()
        with pytest.raises(Unavailable, match="no answer"):
            gateway.transact([], [], [])
        before = [member.asked for member in made]
        with pytest.raises(Unavailable, match=f"no answer within {4 * SOON_S} s"):
            gateway.transact([], [], [])
        assert [member.asked for member in made] == [count + 1 for count in before]
        for member in made:
            member.speaks.set()
        assert gateway.transact([], [], []).is_met


def test_a_server_that_is_far_away_is_given_the_time_that_its_answers_take() -> None:
    """Otherwise every call would be made several times."""
    with members(2) as made:
        made[0].late_s = 6 * SOON_S
        with closing(hasty(made, 2 * PATIENCE_S)) as gateway:
            for _ in range(3):
                assert gateway.transact([], [], []).is_met
        assert [member.asked for member in made] == [4, 0]


def test_servers_that_refuse_are_not_asked_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is down refuses at once. So a bound in seconds would allow thousands of tries."""
    with members(2) as made, closing(hasty(made, 2 * PATIENCE_S)) as gateway:
        refusals = 0

        def refused(self: EtcdServer, path: str, data: object, within_s: float) -> object:
            nonlocal refusals
            refusals += 1
            raise ConnectionRefusedError

        monkeypatch.setattr(EtcdServer, "begin", refused)
        with pytest.raises(Unavailable):
            gateway.transact([], [], [])
        assert refusals <= 20


def test_a_server_that_closes_the_connection_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy may do so. Python 3.13 closes the socket with the last part of such an answer, and older ones later."""
    read1 = HTTPResponse.read1

    def read(self: HTTPResponse, n: int = -1) -> bytes:
        part = read1(self, n)
        if self.length == 0 and not self.isclosed():
            self._close_conn()  # type: ignore[attr-defined]  # what Python 3.13 does here
        return part

    monkeypatch.setattr(HTTPResponse, "read1", read)
    with members(1) as made, closing(Gateway(Cluster([made[0].endpoint]), PATIENCE_S)) as gateway:
        made[0].headers = {"Connection": "close"}
        for _ in range(2):
            assert gateway.transact([], [], []).is_met
