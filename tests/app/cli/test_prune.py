"""`reknit prune` with a real etcd: which journals it removes, and what it says of the others."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.journals import envelope as envelope_module
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.etcd.gateway import Cluster, put
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.journals.etcd.keys import EtcdKeys
from reknit.adapters.journals.etcd.pruning import EtcdShelf
from reknit.adapters.journals.file.journal import FileJournal
from reknit.adapters.runtime.ports import Refused, Stored
from reknit.app.cli.prune import prune
from reknit.core.job.entries import Aborted, Joined, Node, NodeId, Opened, Terms
from reknit.core.job.job import Verdict
from tests.support.command import REKNIT
from tests.support.etcd import Etcd, change
from tests.support.nodes import CONF, GOOD, Nodes

DAY = 86400.0
ME = Node(NodeId("me"))
OPENED = Opened(Terms(beat_s=0.1, silence_s=0.5), journal="j")
OPEN = "it has not ended; --abandoned removes such jobs if no agent lives"
REFUSED = "http://127.0.0.1:1: Connection refused"
Make = Callable[..., EtcdJournal]


@pytest.fixture
def store(server: Etcd) -> Etcd:
    """A server without a job, because `reknit prune` looks at all jobs."""
    server.post("/v3/kv/deleterange", {"key": "AA==", "range_end": "AA=="})
    return server


@pytest.fixture
def journal(store: Etcd, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes the journal of a job whose agents have written it some days ago."""
    with ExitStack() as stack:

        def make(job: str, days: float = 0.0, *, ended: bool = True, secret: str = "") -> EtcdJournal:
            made = EtcdJournal(Cluster(store.endpoints), Envelope(job, secret), timeout_s=30.0)
            stack.enter_context(closing(made))
            with monkeypatch.context() as patch:
                now = envelope_module.time.time()
                patch.setattr(envelope_module.time, "time", lambda: now - days * DAY)
                made.append("open", OPENED)
                made.append("join", Joined(ME, "n", 1, "10.0.0.1", 1))
                if ended:
                    made.append("end", Aborted("told to end"))
            made.beat(ME, 1, ())
            return made

        yield make


class Pruned:
    """What one `reknit prune` has done."""

    def __init__(self, server: Etcd, capfd: pytest.CaptureFixture[str], *argv: str, **more: Any) -> None:
        place = ("--rdzv-backend=etcd", f"--rdzv-endpoint=127.0.0.1:{server.port}")
        self.waited: list[float] = []
        self.status = prune([*place, *argv], **{"environ": {}, "wait": self.waited.append, **more})
        self.lines = capfd.readouterr().out.splitlines()


def keys(server: Etcd) -> int:
    return int(server.post("/v3/kv/range", {"key": "AA==", "range_end": "AA==", "count_only": True}).get("count", 0))


def has_keys(server: Etcd, job: str) -> bool:
    root = EtcdKeys(job).root
    key, end = (b64encode(text.encode()).decode() for text in (root, root[:-1] + "0"))
    return "count" in server.post("/v3/kv/range", {"key": key, "range_end": end, "count_only": True})


def without_age(text: str) -> str:
    """A job that has just ended may be a second old, and older on a busy machine."""
    return re.sub(r", last entry \d+\w ago", "", text)


def test_jobs_that_ended_long_ago_are_removed(store: Etcd, journal: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither a name nor a secret keeps one, and none takes another one along."""
    journal("a", 8)
    journal("a/b", 8, secret="s3cret")
    journal("a-b", 1)
    journal("", 9)
    journal("open", 30, ended=False)
    said = [
        "job : aborted, last entry 9d ago: {}",
        "job a-b: aborted, last entry 24h ago: kept: that is less than --older-than=7d",
        "job a: aborted, last entry 8d ago: {}",
        "job a/b: aborted, last entry 8d ago: {}",
        f"job open: not ended, last entry 30d ago: kept: {OPEN}",
    ]
    before = keys(store)
    dry = Pruned(store, capfd, "--dry-run")
    assert (dry.status, sorted(dry.lines)) == (0, sorted(line.format("would be removed") for line in said))
    assert keys(store) == before
    done = Pruned(store, capfd)
    assert (done.status, sorted(done.lines)) == (0, sorted(line.format("removed") for line in said))
    assert [has_keys(store, job) for job in ("", "a", "a/b", "a-b", "open")] == [False, False, False, True, True]
    assert Pruned(store, capfd, "--older-than=0", "--rdzv-id=a-b").lines == [
        "job a-b: aborted, last entry 24h ago: removed"
    ]
    assert Pruned(store, capfd, "--rdzv-id=a-b").lines[0].startswith("no job a-b at ")


def test_a_job_that_never_ended_is_removed_when_nobody_lives(
    store: Etcd, journal: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    """All agents were killed. A job that trains for weeks without a word looks the same, and its agents beat."""
    journal("dead", 8, ended=False)
    alive = journal("alive", 8, ended=False)
    journal("young", 1, ended=False)

    def wait(seconds: float) -> None:
        assert seconds == OPENED.terms.silence_s
        alive.beat(ME, 2, ())

    assert sorted(Pruned(store, capfd, "--abandoned", wait=wait).lines) == [
        "job alive: not ended, last entry 8d ago: kept: an agent lives, or the job has just begun again",
        "job dead: not ended, last entry 8d ago: removed",
        "job young: not ended, last entry 24h ago: kept: that is less than --older-than=7d",
    ]
    assert has_keys(store, "alive")


@pytest.mark.parametrize("what", ["append", "beat"])
def test_an_agent_that_begins_the_next_epoch_meanwhile_keeps_its_journal(
    store: Etcd, journal: Make, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It has written its first word between the look and the removal."""
    agent = journal("j", 8)
    remove = EtcdShelf.remove

    def late(shelf: EtcdShelf, job: str) -> bool:
        if what == "append":
            agent.append("again", OPENED)
        else:
            agent.beat(ME, 2, ())
        return remove(shelf, job)

    monkeypatch.setattr(EtcdShelf, "remove", late)
    assert Pruned(store, capfd).lines[0].endswith(": kept: an agent lives, or the job has just begun again")
    assert len(agent.read(0, 0.0).entries) == 3 + (what == "append")


def test_a_removed_job_is_forgotten(store: Etcd, journal: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """An agent that still has it open is told so. The next one begins anew."""
    old = journal("j", 8)
    assert Pruned(store, capfd).lines[0].endswith(": removed")
    with pytest.raises(Refused, match="is gone"):
        old.append("more", OPENED)
    assert journal("j").read(0, 0.0).entries[0] == OPENED


def test_what_is_not_of_this_version_is_left_alone(
    store: Etcd, journal: Make, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs may have put keys beside those of reknit, under names that no job has."""
    for key in ("", "/", "//", "/x", "/a b/header", "/é/x/y", "/z/header"):
        change(store, put(f"/reknit{key}", b"of another program"))
    newer = journal("newer", 8)
    monkeypatch.setattr(envelope_module, "dumps", lambda entry: '{"kind":"Promoted"}')
    newer.append("t", Aborted("x"))
    before = keys(store)
    why = "kept: its journal is of another version of reknit, or of another program"
    lines = Pruned(store, capfd, "--older-than=0", "--abandoned").lines
    assert lines[0].startswith("job newer: kept: the journal holds an entry that this version of reknit cannot read")
    assert lines[1:] == [f"job z: {why}"]
    assert keys(store) == before


def test_a_long_journal_is_read_and_removed_whole(store: Etcd, journal: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in pages, and all of its segments go at once."""
    monkeypatch.setattr("reknit.adapters.journals.etcd.pruning.PAGE", 2)
    monkeypatch.setattr("reknit.adapters.journals.etcd.journal.SEGMENT", 3)
    long = journal("long", 8, ended=False)
    for i in range(9):
        long.append(str(i), OPENED)
    long.append("end", Aborted("x"))
    with closing(EtcdShelf(Cluster(store.endpoints))) as shelf:
        assert shelf.jobs() == ["long"]
        stored = shelf.look("long")
        assert stored == Stored("long", Verdict.ABORTED, stored.at, 0.5)
        assert shelf.is_quiet("long")
        assert shelf.remove("long")
    assert keys(store) == 0


def test_what_cannot_be_done_is_one_line(store: Etcd, capfd: pytest.CaptureFixture[str]) -> None:
    """A job of a scheduler shows a status of its own for each."""
    for argv, status, line in (
        ([], 2, "reknit prune needs --rdzv-backend=etcd or --rdzv-backend=file"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=h"], 2, "--rdzv-backend=c10d: etcd or file expected"),
        (["--rdzv-backend=etcd", "--rdzv-endpoint=h", "j"], 2, "reknit prune takes options only, and not j"),
        (["--older-than=7w"], 2, "--older-than=7w: a time such as 90s, 30m, 12h or 7d expected"),
        (["--older-than=7"], 2, "--older-than=7: a unit is missing: s, m, h or d, for example 7d"),
        (["--nnodes=2"], 2, "unknown option --nnodes; see reknit prune --help"),
        (
            ["--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:1"],
            74,
            f"the store cannot be reached: no server of etcd has answered: {REFUSED}",
        ),
    ):
        assert prune(argv, {}) == status
        assert capfd.readouterr().err == f"reknit: {line}\n"
    assert prune(["--help"], {}) == 0
    assert "--older-than" in capfd.readouterr().out


def test_the_user_of_etcd_needs_all_keys_or_those_of_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The user of a job cannot list the others, and may still remove its own."""
    with Etcd(tmp_path, options=("--bcrypt-cost", "4")) as server:
        server.add_user("train", "secret", EtcdKeys("j").root)
        server.ask_for_users()
        login = {"REKNIT_RDZV_PASSWORD": "secret"}
        assert Pruned(server, capfd, "--rdzv-conf=user=train", environ=login).status == 69
        own = Pruned(server, capfd, "--rdzv-conf=user=train", "--rdzv-id=j", environ=login)
        assert (own.status, own.lines[0].startswith("no job j at ")) == (0, True)


def test_the_command_removes_what_a_job_has_left(tmp_path: Path, store: Etcd) -> None:
    """From the first agent to an empty store, with the real command."""
    place = ("--rdzv-backend=etcd", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-id=j")
    with Nodes(tmp_path, "--nnodes=1:2", *place, f"{CONF},last_call_timeout=0") as nodes:
        (run,) = nodes.start("a")
        nodes.formed(run)
        command = [REKNIT, "prune", *place, "--older-than=0"]
        first = subprocess.run([*command, "--abandoned"], capture_output=True, text=True, check=True)
        assert first.stdout.endswith(": kept: an agent lives, or the job has just begun again\n")
        run.tell(GOOD)
        assert run.end() == 0
        second = subprocess.run(command, capture_output=True, text=True, check=True)
        assert second.stdout.startswith("job j: succeeded, last entry ")
        assert second.stdout.endswith(" ago: removed\n")
        assert keys(store) == 0


def test_a_job_in_a_folder_that_never_ended_is_removed_when_nobody_lives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same as with etcd."""
    with ExitStack() as stack:
        for job in ("alive", "dead"):
            agent = stack.enter_context(closing(FileJournal(str(tmp_path), Envelope(job))))
            agent.append("open", OPENED)
            agent.beat(ME, 1, ())
        alive = stack.enter_context(closing(FileJournal(str(tmp_path), Envelope("alive"))))

        def wait(seconds: float) -> None:
            assert seconds == OPENED.terms.silence_s
            alive.beat(ME, 2, ())

        place = ("--rdzv-backend=file", f"--rdzv-endpoint={tmp_path}", "--older-than=0")
        assert prune(place, {}) == 0
        assert [line.partition(": kept: ")[2] for line in capfd.readouterr().out.splitlines()] == [OPEN, OPEN]
        assert prune([*place, "--abandoned"], {}, wait) == 0
        assert without_age(capfd.readouterr().out).splitlines() == [
            "job alive: not ended: kept: an agent lives, or the job has just begun again",
            "job dead: not ended: removed",
        ]
        assert [path.name for path in tmp_path.iterdir()] == ["alive"]


def test_a_job_of_which_it_cannot_be_told_whether_it_has_ended_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator learns that it is there, why it is kept, and what can be done."""
    for job in ("of another user", "damaged"):
        with closing(FileJournal(str(tmp_path), Envelope(job))) as journal:
            journal.append("open", OPENED)
            journal.append("end", Aborted("told to end"))
    damaged = tmp_path / "damaged" / "journal"
    data = bytearray(damaged.read_bytes())
    data[-200:-160] = b"x" * 40
    damaged.write_bytes(data)
    theirs, real = tmp_path / "of%20another%20user", os.open

    def denied(path: str, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(str(theirs)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", denied)
    assert prune(("--rdzv-backend=file", f"--rdzv-endpoint={tmp_path}", "--older-than=0", "--abandoned"), {}) == 0
    advice = f"if no agent of the job lives, remove the folder {damaged.parent}"
    assert capfd.readouterr().out.splitlines() == [
        f"job damaged: kept: its journal is damaged; {advice}",
        f"job of another user: kept: {theirs} cannot be read: Permission denied",
    ]


def test_a_folder_is_cleared_in_the_same_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Users need not know how a store keeps its journals."""
    with closing(FileJournal(str(tmp_path), Envelope("j"))) as journal:
        journal.append("open", OPENED)
        journal.append("end", Aborted("told to end"))
    place = ("--rdzv-backend=file", f"--rdzv-endpoint={tmp_path}", "--older-than=0")
    for more, said in ((["--dry-run"], "would be removed"), ([], "removed")):
        assert prune([*place, *more], {}) == 0
        assert without_age(capfd.readouterr().out) == f"job j: aborted: {said}\n"
    assert prune(place, {}) == 0
    assert capfd.readouterr().out == f"no jobs at {tmp_path}\n"
