"""etcd with users: tokens that expire, passwords that change, and users who may not do what an agent does."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.connection import EtcdServer, Login
from reknit.adapters.journals.etcd.gateway import Cluster, Gateway, get
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.runtime.ports import Batch, Refused, Unavailable
from reknit.core.job.entries import Aborted, Node, NodeId
from reknit.core.job.reasons import Refusal
from tests.support.etcd import Etcd, make_certificate, patiently, watch_of, watches
from tests.support.nodes import CONF, GOOD, Nodes
from tests.support.waiting import PATIENCE_S

ME = Node(NodeId("me"))
QUICK = ("--bcrypt-cost", "4")
"""Otherwise etcd needs 50 ms for each password."""
Make = Callable[..., EtcdJournal]


@pytest.fixture
def journal() -> Iterator[Make]:
    """Makes journals of the user train, and closes them."""
    with ExitStack() as stack:

        def make(server: Etcd, job: str = "j", **login: str) -> EtcdJournal:
            login = {"user": "train", "password": "secret", **login}
            made = EtcdJournal(Cluster(server.endpoints, **login), Envelope(job), timeout_s=30.0)
            return stack.enter_context(closing(made))

        yield make


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """A server with users, for all tests that do not change the users of others."""
    with Etcd(tmp_path_factory.mktemp("etcd"), options=QUICK) as server:
        server.add_user("train", "secret", "/reknit/")
        server.ask_for_users()
        yield server


def noted_logins(monkeypatch: pytest.MonkeyPatch) -> list[Login]:
    """The logins that are made from now on."""
    make, made = Cluster.login, list[Login]()

    def noting(cluster: Cluster, needs: str) -> Login:
        made.append(make(cluster, needs))
        return made[-1]

    monkeypatch.setattr(Cluster, "login", noting)
    return made


def expire(server: Etcd, token: str) -> None:
    """Wait until etcd no longer takes the token, which lives for a second."""
    login = Login()
    login.token = token
    with closing(EtcdServer(*server.endpoints[0], 30.0, login=login)) as asked:
        while True:
            # A look at a simple token prolongs its life by a second, so this must not look more often.
            threading.Event().wait(1.1 if "." in token[20:] else 2.1)
            try:
                asked.ask("/v3/kv/range", {"key": "AA=="})
            except Refused as e:
                if "permission denied" not in str(e):
                    return


def jwt(path: Path) -> str:
    """etcd's option for tokens that etcd signs and does not keep. They live for a second."""
    private, public = path / "private.pem", path / "public.pem"
    subprocess.run(["openssl", "genrsa", "-out", private, "2048"], check=True, capture_output=True)
    subprocess.run(["openssl", "rsa", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
    return f"jwt,pub-key={public},priv-key={private},sign-method=RS256,ttl=1s"


@pytest.mark.parametrize("kind", ["simple", "jwt"])
def test_tokens_that_expire_are_renewed_by_all_who_use_the_journal(
    tmp_path: Path, journal: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job runs for weeks, and a token for minutes. Beats, appends and reads all need one."""
    tokens = ("--auth-token-ttl", "1") if kind == "simple" else ("--auth-token", jwt(tmp_path))
    with Etcd(tmp_path, options=(*QUICK, *tokens)) as server:
        server.add_user("train", "secret", "/reknit/")
        server.ask_for_users()
        logins = noted_logins(monkeypatch)
        one, other = journal(server), journal(server)
        one.append("0", Aborted("0"))
        position = other.read(0, 0.0).position
        watch_of(other, position)
        assert len(logins) == 2, "all who use a journal share its token"
        expire(server, logins[0].token)
        assert one.beat(ME, 1, ()) == {ME: 1}
        waiting: list[Batch] = []
        reader = threading.Thread(target=lambda: waiting.append(other.read(position, PATIENCE_S)))
        with watches() as opened:
            reader.start()
            one.append("last", Aborted("last"))
            reader.join(PATIENCE_S)
        assert [batch.entries for batch in waiting] == [(Aborted("last"),)]
        assert opened == [], "a watch that is open needs the token no more"


def test_a_token_of_an_older_state_of_the_users_is_renewed(
    tmp_path: Path, journal: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signed token names the revision of the users. Whoever adds any user makes all tokens invalid."""
    with Etcd(tmp_path, options=(*QUICK, "--auth-token", jwt(tmp_path).replace("1s", "1h"))) as server:
        server.add_user("train", "secret", "/reknit/")
        server.ask_for_users()
        logins = noted_logins(monkeypatch)
        own = journal(server)
        own.append("0", Aborted("0"))
        (login,) = logins
        token = login.token
        server.add_user("somebody", "else")
        own.append("1", Aborted("1"))
        assert login.token != token


def test_a_password_that_changes_while_a_job_runs(tmp_path: Path, journal: Make) -> None:
    """Between the change in etcd and the change of the file there is an outage, and no end of the job."""
    file = tmp_path / "password"
    file.write_text("secret\n")
    with Etcd(tmp_path, options=QUICK) as server:
        server.add_user("train", "secret", "/reknit/")
        server.ask_for_users()
        own = journal(server, password="", password_file=str(file))
        own.append("0", Aborted("0"))
        server.post("/v3/auth/user/changepw", {"name": "train", "password": "changed"})
        calls: list[Callable[[], Any]] = [
            lambda: own.append("1", Aborted("1")),
            lambda: own.beat(ME, 1, ()),
            lambda: own.read(0, 0.0),
        ]
        for call in calls:
            with pytest.raises(Unavailable, match=r"does not let user train in: .*invalid user ID or password"):
                call()
        file.unlink()
        with pytest.raises(Unavailable, match=f"the password cannot be read: {file}: No such file"):
            own.append("1", Aborted("1"))
        file.write_text("changed\n")
        for call in calls:
            call()
        assert own.read(0, 0.0).entries == (Aborted("0"), Aborted("1"))


@pytest.mark.parametrize(
    ("login", "why"),
    [
        ({"password": "wrong"}, "user train in: .*invalid user ID or password; check the user and the password"),
        ({"user": "nobody"}, "user nobody in: .*invalid user ID or password"),
        ({"user": "", "password": ""}, "a client without a user in: .*it needs a user and a password"),
    ],
)
def test_who_is_not_let_in_is_refused_at_once(guarded: Etcd, journal: Make, login: dict[str, str], why: str) -> None:
    """Nobody shall wait ten minutes for a password that is wrong."""
    calls: list[Callable[[EtcdJournal], Any]] = [
        lambda own: own.append("t", Aborted("x")),
        lambda own: own.read(0, 60.0),
        lambda own: own.beat(ME, 1, ()),
    ]
    for call in calls:
        with pytest.raises(Refused, match=f"etcd at {guarded_url(guarded)} does not let {why}") as refused:
            call(journal(guarded, **login))
        assert refused.value.refusal is Refusal.SETUP
        assert "wrong" not in str(refused.value)


def guarded_url(server: Etcd) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_a_user_without_the_keys_of_the_job_is_told_which_to_grant(guarded: Etcd, journal: Make) -> None:
    """The words of the message are those of etcd's own tool. A right to read alone is not enough for an agent."""
    guarded.add_user("reader", "secret")
    guarded.grant("reader", "/reknit/", "READ")
    with pytest.raises(Refused, match="permission denied") as refused:
        journal(guarded, "a/b", user="reader").append("t", Aborted("x"))
    assert str(refused.value).endswith("etcdctl role grant-permission ROLE --prefix readwrite /reknit/a%2Fb/")
    guarded.add_user("own", "secret", "/reknit/own/")
    own = journal(guarded, "own", user="own")
    own.append("t", Aborted("x"))
    assert own.read(0, 0.0).entries == (Aborted("x"),)


def test_rights_that_are_taken_away_while_a_job_runs_are_an_outage(guarded: Etcd, journal: Make) -> None:
    """They may be given back. Until then the workers run on."""
    guarded.add_user("guest", "secret", "/reknit/")
    own = journal(guarded, "guest", user="guest")
    own.append("0", Aborted("0"))
    guarded.post("/v3/auth/user/revoke", {"name": "guest", "role": "guest"})
    with pytest.raises(Unavailable, match=r"does not let user guest in: .*permission denied"):
        own.append("1", Aborted("1"))
    guarded.post("/v3/auth/user/grant", {"user": "guest", "role": "guest"})
    patiently(own.append, "1", Aborted("1"))


def test_a_certificate_proves_the_client_and_names_no_user(tmp_path: Path) -> None:
    """etcd takes a user from the common name only where a client speaks gRPC. It denies others with such a name."""
    for subject in ("/CN=train", "/O=train"):
        pair = make_certificate(tmp_path, subject)
        with Etcd(tmp_path, subject[1:2], tls=pair, options=QUICK) as server:
            server.add_user("train", "secret", "/reknit/")
            server.ask_for_users()
            cluster = Cluster(server.endpoints, "https", pair[0], *pair, "train", "secret")
            with closing(Gateway(cluster, 30.0)) as gateway:
                if subject == "/O=train":
                    assert gateway.transact([], [get("/reknit/k")], []).is_met
                    continue
                with pytest.raises(Refused, match="takes only a certificate without a common name"):
                    gateway.transact([], [get("/reknit/k")], [])


def test_a_job_of_two_nodes_does_not_show_its_password(tmp_path: Path) -> None:
    """Tokens live for a second here, and rounds for longer. No text and no worker gets to know the password."""
    with Etcd(tmp_path, options=(*QUICK, "--auth-token-ttl", "1")) as server:
        server.add_user("train", "pa55word", "/reknit/j/")
        server.ask_for_users()
        place = ("--rdzv-backend=etcd", f"--rdzv-endpoint=127.0.0.1:{server.port}", "--rdzv-id=j")
        env = {"REKNIT_RDZV_PASSWORD": "pa55word"}
        with Nodes(tmp_path, "--nnodes=2", "-v", *place, f"{CONF},user=train", env=env) as nodes:
            runs = nodes.start("a", "b")
            nodes.formed(*runs)
            for up in (up for run in runs for up in run.workers()):
                assert b"pa55word" not in Path(f"/proc/{up.pid}/environ").read_bytes()
                assert b"pa55word" not in Path(f"/proc/{up.pid}/cmdline").read_bytes()
            for run in runs:
                run.tell(GOOD)
            assert [run.end() for run in runs] == [0, 0]
            assert not any("pa55word" in text for run in runs for text in run.texts)
            (other,) = nodes.start("a", env={"REKNIT_RDZV_PASSWORD": "wrong"})
            assert other.end() == 69
            assert "does not let user train in: " in other.said[-2]
