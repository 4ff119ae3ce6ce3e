"""The journal in a folder, beside what `test_journals` demands of all: full disks, torn lines, lost files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file.folder import file_name
from reknit.adapters.journals.file.journal import FileJournal
from reknit.adapters.journals.folds import MANY
from reknit.adapters.journals.history import Prefix
from reknit.adapters.runtime.ports import Refused, Unavailable
from reknit.core.job.entries import Aborted, Filler, Leaving, Node, NodeId, Succeeded
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from tests.support.alone import ENV, ROOT, command
from tests.support.journals import entry, everything, whose
from tests.support.waiting import PATIENCE_S, descriptors

ME, PEER = Node(NodeId("me")), Node(NodeId("peer"))
SAID = Succeeded(ME, 0)
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def journal(path: Path, secret: str = "") -> FileJournal:
    return FileJournal(str(path), Envelope("job", secret), poll_s=0.005)


def content(path: Path) -> bytes:
    return (path / "job" / "journal").read_bytes()


def seen_at(data: bytes, position: int) -> str:
    """What a writer has seen that has read these bytes up to `position`."""
    prefix = Prefix()
    at = 0
    for line in data[:position].split(b"\n")[:-1]:
        at += len(line) + 1
        prefix.extend(line, at)
    return prefix.seen


# ---- the folder ----


def test_a_folder_is_made_where_there_is_none(tmp_path: Path) -> None:
    """The first agent of the first job has nobody to make it."""
    one = journal(tmp_path / "a" / "b")
    one.append("t", SAID)
    assert everything(journal(tmp_path / "a" / "b")) == [SAID]
    assert sorted(os.listdir(tmp_path / "a" / "b" / "job")) == ["beats", "journal", "lock"]


@pytest.mark.parametrize("path", ["a file", "a file/below", "dangling"])
def test_what_can_be_no_folder_is_refused_in_one_line(tmp_path: Path, path: str) -> None:
    """Waiting does not help: the operator has mistyped it."""
    (tmp_path / "a file").write_text("precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "a file" / "x")
    for call in (lambda j: j.append("t", SAID), lambda j: j.read(0, 0.0), lambda j: j.beat(ME, 1, ())):
        with pytest.raises(Refused) as refused:
            call(journal(tmp_path / path))
        assert refused.value.refusal is Refusal.SETUP
        assert "\n" not in str(refused.value)
    assert (tmp_path / "a file").read_text() == "precious"


def test_file_names_are_told_apart_and_stay_inside() -> None:
    """A job's id is the operator's, a node's its host's: neither may reach another's files."""
    texts = ["", ".", "..", "...", "a", "a.", ".a", "%2Ea", "a/b", "a%2Fb", "a b", "+", "ä", "\udcff", "\ud800", "\0"]
    texts += [159 * "x", 160 * "x", 161 * "x", 300 * "x", 301 * "x", 100 * "ä", 101 * "ä"]
    names = [file_name(text) for text in texts]
    assert len(set(names)) == len(names)
    for name in names:
        assert 0 < len(name) <= 230
        assert "/" not in name
        assert not name.startswith(".")
        assert name.isascii()


# ---- identity ----


@pytest.mark.parametrize(
    "harm",
    [
        os.unlink,
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, os.path.getsize(path) - 1),
        lambda path: path.write_bytes(Envelope("job").header() + b"\n" + 1000 * b"x" + b"\n"),
    ],
    ids=["gone", "empty", "shorter", "another"],
)
def test_a_journal_that_has_lost_what_was_read_is_refused(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """Going on from it would be another job. Nothing is written into it, and no new one is begun."""
    one = journal(tmp_path)
    one.append("t", SAID)
    after = one.read(0, 0.0).position
    harm(tmp_path / "job" / "journal")
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            one.append("u", SAID)
        assert refused.value.refusal is Refusal.IDENTITY
        with pytest.raises(Refused) as refused:
            one.read(after, 0.0)
        assert refused.value.refusal is Refusal.IDENTITY
    with pytest.raises(Refused):
        one.beat(ME, 1, ())


def test_what_cannot_be_reached_for_now_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that is away comes back. The text names the file and what is wrong with it."""
    one = journal(tmp_path)
    one.append("t", SAID)

    def stale(path: str, *args: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    monkeypatch.setattr(os, "open", stale)
    for call in (lambda: one.append("u", SAID), lambda: one.read(0, 0.0), lambda: one.beat(ME, 1, ())):
        with pytest.raises(Unavailable, match=f"{tmp_path}/job/.*: Stale file handle"):
            call()
    one.publish(1, Job())
    monkeypatch.undo()
    assert everything(one) == [SAID]


# ---- torn lines ----


def test_readers_take_complete_lines_only(tmp_path: Path) -> None:
    """What is being written is nothing yet: who took half of it would have read something else than all others."""
    one, two = journal(tmp_path), journal(tmp_path)
    one.append("t", SAID)
    position = two.read(0, 0.0).position
    envelope = Envelope("job")
    envelope.admit((tmp_path / "job" / "journal").read_bytes().split(b"\n")[0])
    record = envelope.wrap("u", Leaving(ME), str(position), seen_at(content(tmp_path), position))
    for i in range(len(record)):
        with open(tmp_path / "job" / "journal", "ab") as torn:
            torn.write(record[i : i + 1])
        assert two.read(position, 0.0).position == position
    one.append("v", Aborted("x"))
    assert everything(two, position) == everything(journal(tmp_path))[1:] == [Leaving(ME), Aborted("x")]


@pytest.mark.parametrize("secret", ["", "s"])
@pytest.mark.parametrize("tail", [b"{", b'{"token":"t","entry":{"kind":"Succ', b"\x00\x00\x00", b"\xff", b" "])
def test_the_next_writer_ends_what_a_dead_one_has_begun(tmp_path: Path, tail: bytes, secret: str) -> None:
    """Or its own words would be lost in the same line."""
    one, two = journal(tmp_path, secret), journal(tmp_path, secret)
    one.append("t", SAID)
    after = two.read(0, 0.0).position
    with open(tmp_path / "job" / "journal", "ab") as torn:
        torn.write(tail)
    assert two.read(after, 0.0).entries == ()
    one.append("u", Leaving(ME))
    assert everything(two, after) == [Filler(), Leaving(ME)]
    assert everything(journal(tmp_path, secret)) == [SAID, Filler(), Leaving(ME)]


DIES = """
import os, signal, sys
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file.journal import FileJournal
from tests.support.journals import append, entry

path, steps = sys.argv[1], int(sys.argv[2])
journal = FileJournal(path, Envelope("job"))
journal.append("w-0", entry("w", 0))

def dying(real):
    def call(fd, *args):
        global steps
        steps -= 1
        if steps == 0:
            if real in (real_write, real_pwrite):
                real(fd, args[0][:len(args[0]) // 2], *args[1:])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(fd, *args)
    return call

real_write, real_pwrite = os.write, os.pwrite
os.write, os.pwrite, os.fsync, os.close = dying(os.write), dying(os.pwrite), dying(os.fsync), dying(os.close)
journal.append("w-1", entry("w", 1))
print("done")
"""


@pytest.mark.slow
def test_a_writer_may_die_between_any_two_calls_of_an_append(tmp_path: Path) -> None:
    """And in the middle of each write: the others go on, and what it said is there whole or not at all."""
    outcomes = []
    for step in range(1, 20):
        path = tmp_path / str(step)
        reader = journal(path)
        done = subprocess.run(command(DIES, str(path), str(step)), capture_output=True, text=True, env=ENV, cwd=ROOT)
        read = reader.read(0, 0.0)
        journal(path).append("next", SAID)
        found = [*read.entries, *everything(reader, read.position)]
        assert found == everything(journal(path))
        assert found[-1] == SAID
        outcomes.append((len(whose(found, "w")), found.count(Filler())))
        assert set(found) <= {entry("w", 0), entry("w", 1), Filler(), SAID}
        if done.stdout == "done\n":
            break
    assert done.stdout == "done\n"
    assert set(outcomes) == {(1, 0), (1, 1), (2, 0)}


# ---- writes that fail ----


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """The `number`-th call of `os.<name>` fails, like a full disk; a write has written a part by then."""
    real = getattr(os, name)
    calls = 0

    def call(fd: int, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == number:
            if name == "write" and isinstance(args[0], bytes):
                real(fd, args[0][: len(args[0]) // 2])
            raise FULL
        return real(fd, *args)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(("name", "number"), [("write", 1), ("write", 2), ("fsync", 1), ("fsync", 2)])
@pytest.mark.parametrize("others_speak", [False, True])
def test_what_failed_and_is_said_again_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, others_speak: bool
) -> None:
    """Whichever call failed, and whether others have ended the line meanwhile."""
    one, reader = journal(tmp_path), journal(tmp_path)
    one.append("t-0", entry("w", 0))
    failing(monkeypatch, name, number)
    with pytest.raises(Unavailable, match="No space left on device"):
        one.append("t-1", entry("w", 1))
    monkeypatch.undo()
    early = reader.read(0, 0.0)
    if others_speak:
        journal(tmp_path).append("o", SAID)
    one.append("t-1", entry("w", 1))
    one.append("t-2", entry("w", 2))
    found = everything(journal(tmp_path))
    assert whose(found, "w") == [0, 1, 2]
    assert found.count(SAID) == others_speak
    assert [*early.entries, *everything(reader, early.position)] == found


def test_a_token_is_said_once_even_if_the_first_call_returned(tmp_path: Path) -> None:
    """Two that say the same in turn: each entry is there once."""
    one, two = journal(tmp_path), journal(tmp_path)
    for _ in range(2):
        one.append("a", SAID)
        two.append("b", Leaving(ME))
    assert everything(one) == [SAID, Leaving(ME)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip(f"may not mount a tmpfs here: {done.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(path: Path) -> None:
    with suppress(OSError), open(path, "wb", buffering=0) as disk:
        while disk.write(b"x" * 4096):
            pass


def outcome(journal: FileJournal, i: int) -> Unavailable | None:
    try:
        journal.append(f"t-{i}", entry("w", i))
    except Unavailable as e:
        return e
    return None


def test_a_full_disk_stops_the_journal_and_not_the_beats(small_disk: Path) -> None:
    """Somebody else's checkpoint fills it. Nobody must fall silent, and all goes on when there is room again."""
    one, two = journal(small_disk), journal(small_disk)
    one.append("t-0", entry("w", 0))
    two.beat(PEER, 1, [ME])
    one.beat(ME, 1, [PEER])
    ballast = small_disk / "checkpoint"
    fill(ballast)
    i = 0
    while (said := outcome(one, i := i + 1)) is None:
        pass  # in what is left of the last block
    assert str(said).endswith("/disk/job: No space left on device")
    assert outcome(one, i) is not None
    assert whose(everything(two), "w") == [*range(i)]
    assert one.beat(ME, 2, [PEER]) == {ME: 2, PEER: 1}
    assert two.beat(PEER, 2, [ME]) == {ME: 2, PEER: 2}
    two.publish(100, Job())
    ballast.unlink()
    one.append(f"t-{i}", entry("w", i))
    two.append("u", SAID)
    found = everything(journal(small_disk))
    assert whose(found, "w") == [*range(i + 1)]
    assert found[-1] == SAID
    assert found == everything(one)


LIMITED = """
import resource, sys
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file.journal import FileJournal
from reknit.adapters.runtime.ports import Unavailable
from tests.support.journals import entry

journal = FileJournal(sys.argv[1], Envelope("job"))
journal.append("t-0", entry("w", 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
i = 1
try:
    while True:
        journal.append(f"t-{i}", entry("w", i))
        i += 1
except Unavailable as e:
    print(e)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append(f"t-{i}", entry("w", i))
print(i)
"""


def test_a_limit_on_the_size_of_files_is_told_and_survived(tmp_path: Path) -> None:
    """Quotas end a file in the middle of a line, wherever that is."""
    done = subprocess.run(command(LIMITED, str(tmp_path)), capture_output=True, text=True, env=ENV, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said, count = done.stdout.splitlines()
    assert said == f"{tmp_path}/job: File too large"
    found = everything(journal(tmp_path))
    assert whose(found, "w") == [*range(int(count) + 1)]
    assert len(found) - found.count(Filler()) == int(count) + 1


# ---- folds ----


def test_a_fold_that_leads_nowhere_is_not_used(tmp_path: Path) -> None:
    """One of another position, torn, of the future: the entries themselves are there."""
    one = journal(tmp_path)
    ends = []
    for i in range(MANY + 2):
        one.append(f"t-{i}", entry("w", i))
        ends.append(len(content(tmp_path)))
    for position in (ends[-1] + 1, ends[3] - 1, 0, -5):
        one.publish(position, Job())
        assert len(everything(journal(tmp_path))) == MANY + 2
    (tmp_path / "job" / "fold").write_bytes(b'{"position":')
    assert len(everything(journal(tmp_path))) == MANY + 2
    one.publish(ends[3], Job())
    batch = journal(tmp_path).read(0, 0.0)
    assert batch.base == Job()
    assert whose(batch.entries, "w") == [*range(4, MANY + 2)]
    assert journal(tmp_path).read(ends[3], 0.0).base is None


# ---- counters ----


def test_a_counter_that_is_torn_or_spoilt_is_none(tmp_path: Path) -> None:
    """A number that never was would make its node look silent until the count has come so far."""
    one = journal(tmp_path)
    one.beat(PEER, 1, ())
    (path,) = (tmp_path / "job" / "beats").iterdir()
    assert path.name == "peer.0"
    longest = 19 * b"9"
    for spoilt in (b"", b"199 200\n", b"\x00" * 40, b"-1 -1\n", "² ²\n".encode(), b"1%s 1%s\n" % (longest, longest)):
        path.write_bytes(spoilt)
        assert not one.beat(ME, 1, [PEER]).get(PEER)
    path.write_bytes(b"7 7\n")
    assert one.beat(ME, 1, [PEER])[PEER] == 7
    assert one.beat(PEER, 8, ())[PEER] == 8


def test_nothing_stays_open(tmp_path: Path) -> None:
    """Beats and looks go on for months."""
    one = journal(tmp_path)
    before = descriptors()
    for i in range(3):
        one.append(str(i), SAID)
        one.read(0, 0.01)
        one.beat(ME, 1, [PEER])
        one.publish(1, Job())
    assert not descriptors() - before
    one.close()
    assert json.loads(content(tmp_path).splitlines()[0])["job"] == "job"
    assert one.read(0, PATIENCE_S).entries
