"""How several nodes meet: torchrun's words are understood, and every mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.app.cli.arguments import parse
from reknit.app.cli.options import UsageError
from reknit.app.cli.parsing import asked
from reknit.app.input.meeting import MeetingOptions, judged
from reknit.app.settings import Settings
from reknit.core.job.entries import Admission, RestartPolicy, Terms

C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=h", "--rdzv-id=j")
FILE = ("--rdzv-backend=file", "--rdzv-endpoint=/shared", "--rdzv-id=j")
ETCD = ("--rdzv-backend=etcd", "--rdzv-endpoint=h", "--rdzv-id=j")


def meet(*argv: str, nodes: tuple[int, int] = (2, 3), **environ: str) -> MeetingOptions:
    return judged(parse([*argv, "s.py"], environ), environ, nodes, RestartPolicy())


def settings(*argv: str) -> Settings:
    return asked(parse(["--nnodes=2:3", *argv, __file__], {}), {}).settings


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        meet(*argv, **environ)
    return str(caught.value)


# ---- where ----


@pytest.mark.parametrize(
    ("argv", "place"),
    [
        ("", "c10d://127.0.0.1:29500"),
        ("--master-addr=h --master-port=7", "c10d://h:7"),
        ("--master-addr=[::1]", "c10d://[::1]:29500"),
        ("--rdzv-endpoint=h:7", "c10d://h:7"),
        ("--rdzv-endpoint=h", "c10d://h:29500"),
        ("--rdzv-endpoint=h --master-port=7", "c10d://h:7"),
        ("--rdzv-backend=static --rdzv-endpoint=h:7 --master-addr=x", "c10d://h:7"),
        ("--rdzv-backend=c10d --rdzv-endpoint=h", "c10d://h:29400"),
        ("--rdzv-backend=c10d --rdzv-endpoint=h:7", "c10d://h:7"),
        ("--rdzv-backend=c10d --rdzv-endpoint=[fe80::1]:7", "c10d://[fe80::1]:7"),
        ("--rdzv-backend=c10d --rdzv-endpoint=[::1]", "c10d://[::1]:29400"),
        ("--rdzv-backend=c10d --rdzv-endpoint=/s/x --rdzv-conf=store_type=file --rdzv-id=j", "file:///s/x"),
        ("--rdzv-backend=c10d --rdzv-endpoint=h --rdzv-conf=store_type=tcp", "c10d://h:29400"),
        ("--rdzv-backend=file --rdzv-endpoint=/s/x --rdzv-id=j", "file:///s/x"),
        ("--rdzv-backend=etcd --rdzv-endpoint=h --rdzv-id=j", "etcd://h:2379"),
        ("--rdzv-backend=etcd --rdzv-endpoint=a,b:7,[::1] --rdzv-id=j", "etcd://a:2379,b:7,[::1]:2379"),
    ],
)
def test_where_nodes_meet(argv: str, place: str) -> None:
    """docs/torchelastic.md#which-rendezvous: the words of a torchrun command line lead to the same place."""
    assert meet(*argv.split()).meeting.place == place


def test_a_relative_folder_is_one_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The agent's working directory must not decide over where the journal is after a change of it."""
    monkeypatch.chdir(tmp_path)
    found = meet("--rdzv-backend=file", "--rdzv-endpoint=x", "--rdzv-id=j")
    assert (found.meeting.folder, found.meeting.endpoints) == (f"{tmp_path}/x", ())


def test_a_job_without_a_name() -> None:
    """torchrun's `none` where the store ends with the job; where it does not, the next job would find the last one."""
    assert meet().run_id == meet(*C10D[:2]).run_id == "none"
    assert meet("--rdzv-id=j").run_id == "j"
    assert refused("--rdzv-backend=file", "--rdzv-endpoint=/x").startswith("--rdzv-backend=file needs --rdzv-id")
    assert refused("--rdzv-backend=etcd", "--rdzv-endpoint=x").startswith("--rdzv-backend=etcd needs --rdzv-id")


def test_what_an_agent_is_told_about_itself() -> None:
    """Each of these is this node's own affair, so none of them is part of the terms."""
    found = settings(*C10D, "--node-id=n", "--local-addr=[::1]", "--node-rank=7", "--store-timeout=9")
    assert (found.node_id, found.address, found.rank_hint, found.store_timeout_s) == ("n", "::1", 7, 9)
    assert found.terms == meet(*C10D).terms
    assert meet(*C10D).rank_hint is None


def test_who_hosts_can_be_said() -> None:
    """torchelastic's is_host, in all its spellings."""
    for text, said in (("true", True), ("1", True), ("Y", True), ("no", False), ("F", False)):
        assert meet(*C10D, f"--rdzv-conf=is_host={text}").meeting.is_host is said
        assert meet(f"--rdzv-conf=is_host={text}").meeting.is_host is said
    assert meet(*C10D).meeting.is_host is None


def test_the_secret_may_come_from_either_variable() -> None:
    """`ps` shows a command line to everybody."""
    assert meet(*C10D).meeting.secret == ""
    assert meet(*C10D, REKNIT_RDZV_SECRET="r").meeting.secret == "r"
    assert meet(*C10D, REKNIT_RDZV_SECRET="r", PET_RDZV_SECRET="p").meeting.secret == "p"
    assert meet(*C10D, "--rdzv-secret=c", REKNIT_RDZV_SECRET="r", PET_RDZV_SECRET="p").meeting.secret == "c"


def test_etcd_over_tls(tmp_path: Path) -> None:
    """Both of torchelastic's sets of names; a missing file is better named here than by a library."""
    pem = tmp_path / "pem"
    pem.touch()
    for ca, cert, key in (("ca_cert", "ssl_cert", "ssl_cert_key"), ("cacert", "cert", "key")):
        found = meet(*ETCD, f"--rdzv-conf=protocol=https,{ca}={pem},{cert}={pem},{key}={pem}")
        client = (found.meeting.ssl_cert, found.meeting.ssl_cert_key)
        assert (found.meeting.protocol, found.meeting.ca_cert, *client) == ("https", *[str(pem)] * 3)
    assert meet(*ETCD).meeting.protocol == "http"
    assert refused(*ETCD, "--rdzv-conf=ca_cert=/none") == (
        "--rdzv-conf: ca_cert=/none: no such file, or it cannot be read"
    )
    assert (
        refused(*ETCD, f"--rdzv-conf=ssl_cert={pem}") == "--rdzv-conf: give both ssl_cert and ssl_cert_key, or neither"
    )


def test_a_user_of_etcd(tmp_path: Path) -> None:
    """`ps` shows a command line to everybody, so the password has two other ways. No message shows it."""
    file = tmp_path / "password"
    file.touch()
    assert meet(*ETCD, REKNIT_RDZV_PASSWORD="v").meeting.user == ""
    for conf, password, path in (
        ("user=u", "v", ""),
        ("user=u,password=c", "c", ""),
        (f"user=u,password_file={file}", "", str(file)),
    ):
        found = meet(*ETCD, f"--rdzv-conf={conf}", REKNIT_RDZV_PASSWORD="v").meeting
        assert (found.user, found.password, found.password_file) == ("u", password, path)
        assert "password='" not in repr(found)
    for conf, why in (
        ("user=u", "user=u: its password is missing; set REKNIT_RDZV_PASSWORD, or give password_file=FILE"),
        ("password=p", "password needs user=NAME"),
        ("user=u,password=p,password_file=f", "give password or password_file, not both"),
        ("user=u,password_file=/none", "password_file=/none: no such file, or it cannot be read"),
        ("user=u,password=p,part", "after a password: KEY=VALUE expected"),
    ):
        assert refused(*ETCD, f"--rdzv-conf={conf}") == f"--rdzv-conf: {why}"
    (line,) = meet(*FILE, "--rdzv-conf=user=u,password=pa55").notices
    assert line.startswith("--rdzv-conf: user, password: without effect; ")


# ---- on which terms ----


def test_the_default_terms() -> None:
    """torchelastic's numbers, and a heartbeat of 5 s."""
    assert meet(*C10D).terms == Terms(
        min_nodes=2,
        max_nodes=3,
        admission=Admission.SOON,
        join_timeout_s=600,
        last_call_s=30,
        settle_s=1,
        beat_s=0.75,
        silence_s=3.5,
        fence_s=None,
    )


def test_terms_from_the_configuration() -> None:
    """Spaces around keys and values are usual in templates."""
    terms = meet(*C10D, "--rdzv-conf= join_timeout = 5,last_call_timeout=0.5, settle=0,", "--admission=never").terms
    assert (terms.join_timeout_s, terms.last_call_s, terms.settle_s) == (5, 0.5, 0)
    assert terms.admission is Admission.NEVER


@pytest.mark.parametrize(
    ("conf", "heartbeat_s"),
    [
        ("heartbeat=2", 2),
        ("heartbeat_timeout=10", 10),
        ("keep_alive_interval=2", 6),
        ("keep_alive_max_attempt=4", 20),
        ("keep_alive_interval=0.5,keep_alive_max_attempt=2", 1),
        ("heartbeat_timeout=5,keep_alive_interval=10", 30),
    ],
)
def test_a_heartbeat_in_torchelastics_words(conf: str, heartbeat_s: float) -> None:
    """There a node is dead after interval × attempts; heartbeat_timeout alone bounds one call."""
    terms = meet(*C10D, f"--rdzv-conf={conf}").terms
    assert (terms.beat_s, terms.silence_s) == pytest.approx((0.15 * heartbeat_s, 0.7 * heartbeat_s))


@given(st.floats(0.5, 1000), st.none() | st.floats(0.5, 1000))
def test_a_dead_node_is_noticed_in_time_and_a_fenced_one_not_too_early(heartbeat_s: float, fence_s: float) -> None:
    """The two promises of these numbers, for the worst moment of its death."""
    fence = [] if fence_s is None else [f"--fence-after={fence_s}"]
    terms = meet(*C10D, f"--rdzv-conf=heartbeat={heartbeat_s}", *fence).terms
    silent_reads = -(-terms.silence_s // terms.beat_s)
    if fence_s is None:
        assert terms.beat_s + silent_reads * terms.beat_s < 0.95 * heartbeat_s
    else:
        assert terms.fence_s == fence_s
        assert terms.silence_s > fence_s + 2 * terms.beat_s
        assert fence_s > 3.99 * terms.beat_s, "one slow answer does not set it off"


def test_a_static_job_has_a_fixed_size() -> None:
    """torchrun ignores the minimum without a word; node ranks are 0 to the maximum."""
    found = meet("--nnodes=2:3", "--node-rank=2", "--master-addr=h")
    assert (found.terms.min_nodes, found.terms.max_nodes, found.rank_hint) == (3, 3, 2)
    assert found.notices == ("--nnodes=2:3: with --rdzv-backend=static the job waits for all 3 nodes",)
    assert meet("--master-addr=node0", nodes=(3, 3)).notices == (
        "--node-rank is not given: this node gets group rank 0, or the next one that is free",
    )
    assert meet().rank_hint == 0, "torchrun's default, that scripts for the first node rely on"
    assert refused("--node-rank=3") == "--node-rank=3: with 3 nodes it is at most 2"
    assert refused("--node-rank=-1") == "--node-rank=-1: must be at least 0"


# ---- what is wrong, or does nothing ----


@pytest.mark.parametrize("name", ["rdzv-id", "master-addr", "node-rank", "node-id", "rdzv-secret", "fence-after"])
def test_an_unset_variable_is_no_value(name: str) -> None:
    """`--master-addr=$HEAD` without HEAD: or all nodes would wait for ten minutes, or run unsigned."""
    assert refused(f"--{name}=") == f"--{name} is empty; perhaps a variable of the shell is not set"
    variable = "PET_" + name.upper().replace("-", "_")
    assert refused(**{variable: ""}) == f"{variable} is empty; perhaps a variable of the shell is not set"


def test_a_name_fits_into_a_key() -> None:
    """torch's server hangs up on whoever asks for a key of 8 KiB: that node would take the journal from all others."""
    assert settings(*C10D, f"--node-id={'n' * 1000}").node_id == "n" * 1000
    assert refused(*C10D, f"--node-id={'é' * 501}") == "--node-id: at most 1000 bytes are allowed"
    assert refused(*C10D, f"--rdzv-id={'n' * 1001}") == "--rdzv-id: at most 1000 bytes are allowed"


def test_what_several_nodes_have_no_use_for_is_said() -> None:
    """127.0.0.1 is torchrun's default, and so is no id: two jobs that meet are one."""
    loopback = "--master-addr is not given: nodes meet at 127.0.0.1, which other hosts cannot reach"
    assert meet("--node-rank=1", nodes=(2, 2)).notices == (loopback,)
    assert meet("--node-rank=1", "--rdzv-endpoint=h:7", nodes=(2, 2)).notices == ()
    no_id = "--rdzv-id is not given: all agents without it at this endpoint form one job; give each job its own"
    assert meet("--rdzv-backend=c10d", "--rdzv-endpoint=h").notices == (no_id,)


def test_keys_that_do_nothing_are_named_once() -> None:
    """`timeout=` has been set in vain by many; a typing error must not pass in silence."""
    (line,) = meet(*FILE, "--rdzv-conf=timeout=900,is_host=1,joint_timeout=3").notices
    assert line == (
        "--rdzv-conf: timeout, is_host, joint_timeout: without effect; file takes join_timeout, last_call_timeout,"
        " heartbeat, keep_alive_interval, keep_alive_max_attempt, settle, group"
    )
    assert meet(*C10D, "--rdzv-conf=join_timeout=3,store_type=tcp,is_host=0,heartbeat_timeout=3").notices == ()
    (line,) = meet(*C10D, PET_RDZV_CONF="rank=1").notices
    assert line.startswith("PET_RDZV_CONF: rank: without effect; c10d takes ")


def test_the_master_of_another_backend_is_said_to_do_nothing() -> None:
    """It is the most common of all options, and means something else for c10d."""
    line = "--master-addr, --master-port: without effect: nodes meet at --rdzv-endpoint"
    assert meet(*C10D, "--master-addr=h", "--master-port=7").notices == (line,)
    assert meet("--master-addr=h", "--master-port=7", "--node-rank=1", nodes=(2, 2)).notices == ()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--rdzv-backend=zoo", "--rdzv-backend=zoo: static, c10d, file or etcd expected"),
        ("--rdzv-backend=", "--rdzv-backend=: static, c10d, file or etcd expected"),
        ("--rdzv-backend=etcd-v2", "--rdzv-backend=etcd-v2: etcd has no such API since its version 3.6; use etcd"),
        ("--rdzv-backend=c10d", "--rdzv-backend=c10d needs --rdzv-endpoint=HOST:PORT"),
        ("--rdzv-backend=etcd --rdzv-id=j", "--rdzv-backend=etcd needs --rdzv-endpoint=HOST:PORT,HOST:PORT…"),
        (
            "--rdzv-backend=file --rdzv-id=j",
            "--rdzv-backend=file needs --rdzv-endpoint=FOLDER, on a file system that all nodes share",
        ),
        ("--rdzv-endpoint=h:0", "--rdzv-endpoint=h:0: port 0 means another port on every node; give a fixed one"),
        ("--master-port=0", "--master-port=0: port 0 means another port on every node; give a fixed one"),
        ("--master-port=x", "--master-port=x: a port is a number up to 65535"),
        ("--rdzv-endpoint=h:", "--rdzv-endpoint=h:: a port is a number up to 65535"),
        ("--rdzv-endpoint=h:65536", "--rdzv-endpoint=h:65536: a port is a number up to 65535"),
        ("--rdzv-endpoint=h:-1", "--rdzv-endpoint=h:-1: a port is a number up to 65535"),
        ("--rdzv-endpoint=:7", "--rdzv-endpoint=:7: HOST:PORT expected"),
        ("--rdzv-endpoint=[::1]7", "--rdzv-endpoint=[::1]7: HOST:PORT expected"),
        ("--rdzv-endpoint=[::1", "--rdzv-endpoint=[::1: HOST:PORT expected"),
        (
            "--rdzv-endpoint=a,b",
            "--rdzv-endpoint=a,b: static has one endpoint; a job that must outlive any host needs --rdzv-backend=etcd",
        ),
        (
            "--rdzv-backend=c10d --rdzv-endpoint=a,b",
            "--rdzv-endpoint=a,b: c10d has one endpoint; a job that must outlive any host needs --rdzv-backend=etcd",
        ),
        (
            "--rdzv-backend=c10d --rdzv-endpoint=a --store-timeout=0",
            "--store-timeout=0: with several nodes, more than 0 s are expected",
        ),
        ("--rdzv-endpoint=::1", "--rdzv-endpoint=::1: HOST:PORT expected"),
        ("--rdzv-endpoint=fe80::1", "--rdzv-endpoint=fe80::1: HOST:PORT expected, an IPv6 address in brackets"),
        ("--rdzv-endpoint=tcp://h:7", "--rdzv-endpoint=tcp://h:7: HOST:PORT expected, without tcp://"),
        ("--rdzv-conf=join_timeout", "--rdzv-conf: join_timeout: KEY=VALUE expected"),
        ("--rdzv-conf=join_timeout=", "--rdzv-conf: join_timeout=: KEY=VALUE expected"),
        ("--rdzv-conf==3", "--rdzv-conf: =3: KEY=VALUE expected"),
        ("--rdzv-conf=join_timeout=x", "--rdzv-conf: join_timeout=x: a number of seconds expected"),
        ("--rdzv-conf=last_call_timeout=-1", "--rdzv-conf: last_call_timeout=-1: 0 or more seconds expected"),
        ("--rdzv-conf=heartbeat=0.4", "--rdzv-conf: heartbeat is 0.4: must be at least 0.5 seconds"),
        ("--rdzv-conf=keep_alive_max_attempt=1.5", "--rdzv-conf: keep_alive_max_attempt=1.5: a whole number expected"),
        (
            "--rdzv-conf=keep_alive_max_attempt=0",
            "--rdzv-conf: keep_alive_interval × keep_alive_max_attempt is 0: must be at least 0.5 seconds",
        ),
        ("--rdzv-conf=is_host=2", "--rdzv-conf: is_host=2: true or false expected"),
        (
            "--rdzv-backend=c10d --rdzv-endpoint=h --rdzv-conf=store_type=x",
            "--rdzv-conf: store_type=x: tcp or file expected",
        ),
        (
            "--rdzv-backend=etcd --rdzv-endpoint=h --rdzv-id=j --rdzv-conf=protocol=ftp",
            "--rdzv-conf: protocol=ftp: http or https expected",
        ),
        ("--admission=later", "--admission=later: soon, at-failure or never expected"),
        ("--fence-after=0", "--fence-after=0: must be at least 0.5 seconds"),
        ("--fence-after=1e300", "--fence-after=1e300: must be at most 1000000000 seconds"),
        ("--rdzv-conf=heartbeat=1e300", "--rdzv-conf: heartbeat is 1e+300: must be at most 1000000000 seconds"),
        ("--fence-after=x", "--fence-after=x: a number of seconds expected"),
        ("--store-timeout=x", "--store-timeout=x: a number of seconds expected"),
        ("--node-rank=x", "--node-rank=x: a whole number expected"),
    ],
)
def test_a_wrong_value_is_named(argv: str, message: str) -> None:
    """The flag, what it was given, what it takes."""
    assert refused(*argv.split()) == message


@given(st.sampled_from(["static", "c10d", "file", "etcd"]), st.text(max_size=12), st.text(max_size=12), st.text())
def test_any_text_is_taken_or_refused(backend: str, endpoint: str, conf: str, rank: str) -> None:
    """No text that fits into a command line makes the judge itself fail."""
    argv = [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}", f"--node-rank={rank}"]
    said = "--"
    try:
        assert meet(*argv, "--rdzv-id=j").meeting.place
    except UsageError as refusal:
        said = str(refusal)
    assert said.startswith("--")
