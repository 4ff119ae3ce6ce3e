"""Who may use the folder of a job's journal, and a journal that is opened for reading alone."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file.folder import complaint
from reknit.adapters.journals.file.journal import FileJournal
from reknit.adapters.journals.folds import MANY
from reknit.adapters.runtime.ports import NoJournal, Refused
from reknit.core.job.entries import Filler, Node, NodeId
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from tests.support.journals import entry, everything

ME = Node(NodeId("me"))


def journal(path: Path, *, group: int | None = None, reads_only: bool = False, job: str = "job") -> FileJournal:
    return FileJournal(str(path), Envelope(job), group=group, reads_only=reads_only, poll_s=0.005)


def used(path: Path, group: int | None = None) -> FileJournal:
    """A journal with every kind of file."""
    one = journal(path, group=group)
    for i in range(MANY + 1):
        one.append(str(i), entry("a", i))
    one.beat(ME, 1, ())
    one.publish(one.read(0, 0.0).position, Job())
    return one


def modes(path: Path) -> dict[str, int]:
    return {str(p.relative_to(path)): stat.S_IMODE(p.stat().st_mode) for p in path.rglob("*")}


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


# ---- privacy ----


@pytest.mark.usefixtures("umask")
def test_the_folder_of_a_job_is_private(tmp_path: Path) -> None:
    """Another user who can read the file `lock` can lock it, and hold up every writer."""
    used(tmp_path)
    files = {"journal", "lock", "fold", "beats/me.0"}
    assert modes(tmp_path / "job") == {"beats": 0o700} | dict.fromkeys(files, 0o600)
    assert stat.S_IMODE((tmp_path / "job").stat().st_mode) == 0o700
    assert complaint(str(tmp_path), "job", None) is None


@pytest.mark.usefixtures("umask")
def test_the_members_of_a_group_can_share_a_journal(tmp_path: Path) -> None:
    """Whatever their umasks are. An agent that does not know of the group follows the folder."""
    group = 54321 if os.geteuid() == 0 else [*os.getgroups(), os.getegid()][0]
    used(tmp_path, group)
    journal(tmp_path).beat(Node(NodeId("peer")), 1, ())
    files = {"journal", "lock", "fold", "beats/me.0", "beats/peer.0"}
    assert modes(tmp_path / "job") == {"beats": 0o2770} | dict.fromkeys(files, 0o660)
    assert stat.S_IMODE((tmp_path / "job").stat().st_mode) == 0o2770
    assert {p.stat().st_gid for p in (tmp_path / "job").rglob("*")} == {group}
    assert complaint(str(tmp_path), "job", group) is None
    assert complaint(str(tmp_path), "job", None) is None
    assert os.listdir(tmp_path) == ["job"]


def test_a_folder_that_was_made_before_stays_as_it_is_and_is_told_of(tmp_path: Path) -> None:
    """By an older version, or by the user."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job").chmod(0o755)
    used(tmp_path)
    line = complaint(str(tmp_path), "job", None)
    assert line is not None
    assert "mode 0755" in line
    assert f"chmod -R go= {tmp_path}/job" in line
    line = complaint(str(tmp_path), "job", 54321)
    assert line is not None
    assert "54321" in line
    assert modes(tmp_path / "job")["lock"] == 0o600


OTHER = """
import os, sys
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file.journal import FileJournal
from reknit.adapters.runtime.ports import NoJournal, Refused
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for options in ({}, {"reads_only": True}, {"group": 4242}):
    job = "mine" if options.get("group") else "job"
    try:
        print(FileJournal(sys.argv[1], Envelope(job), **options).read(0, 0.0))
    except Refused as e:
        print(e.refusal.name, e)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_in_one_line() -> None:
    """And learns whose journal it is."""
    with tempfile.TemporaryDirectory() as name:  # other users may not enter the folder of pytest
        _another_user(Path(name))


def _another_user(tmp_path: Path) -> None:
    used(tmp_path)
    tmp_path.chmod(0o777)
    done = subprocess.run([sys.executable, "-c", OTHER, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    writer, reader, member = done.stdout.splitlines()
    assert writer.startswith("SETUP the folder")
    assert "belongs to root" in writer
    assert reader == f"SETUP {tmp_path}/job/journal: Permission denied"
    assert member == "SETUP this user is no member of group 4242 (--rdzv-conf=group)"
    assert os.listdir(tmp_path) == ["job"]


# ---- reading alone ----


def listing(path: Path) -> dict[str, tuple[int, int, int]]:
    return {str(p): ((s := p.stat()).st_size, s.st_mtime_ns, s.st_ino) for p in (path, *path.rglob("*"))}


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    """Also if a line is torn and the lock is gone. Records come with author and time."""
    one = used(tmp_path)
    with open(tmp_path / "job" / "journal", "ab") as torn:
        torn.write(b"torn")
    one.append("last", entry("a", 100))
    with open(tmp_path / "job" / "journal", "ab") as torn:
        torn.write(b"torn")
    (tmp_path / "job" / "lock").unlink()
    before = listing(tmp_path)
    reader = journal(tmp_path, reads_only=True)
    position, records = reader.records(0)
    said = [record.entry for _, record in records]
    assert said == [*[entry("a", i) for i in range(MANY + 1)], Filler(), entry("a", 100)]
    assert all(record.by and record.at is not None for _, record in records if record.entry != Filler())
    data = (tmp_path / "job" / "journal").read_bytes()
    assert [data[int(place) :][:1] for place, record in records if record.by] == (MANY + 2) * [b"{"]
    assert reader.records(position) == (position, [])
    assert reader.read(0, 0.0).base == Job()
    for call in (
        lambda: reader.append("t", entry("a", 0)),
        lambda: reader.beat(ME, 1, ()),
        lambda: reader.publish(position, Job()),
    ):
        with pytest.raises(Refused, match="opened for reading alone"):
            call()
    assert listing(tmp_path) == before
    one.append("more", entry("a", 101))
    assert [record.entry for _, record in reader.records(position)[1]] == [Filler(), entry("a", 101)]


def test_a_reader_of_a_journal_that_is_not_there_makes_none(tmp_path: Path) -> None:
    """A mistyped id must leave nothing behind."""
    for path in (tmp_path, tmp_path / "none"):
        for call in (lambda j: j.records(0), lambda j: j.read(0, 0.0)):
            with pytest.raises(NoJournal, match=f"there is no journal of job job in {path}") as refused:
                call(journal(path, reads_only=True))
            assert refused.value.refusal is Refusal.SETUP
    assert not os.listdir(tmp_path)


def test_a_reader_needs_no_more_than_to_read(tmp_path: Path) -> None:
    """A file system that is mounted read-only, or a copy."""
    used(tmp_path / "disk")
    done = subprocess.run(["mount", "--bind", "-o", "ro", tmp_path / "disk", tmp_path / "disk"], capture_output=True)
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.decode().strip()}")
    try:
        reader = journal(tmp_path / "disk", reads_only=True)
        assert len(reader.records(0)[1]) == MANY + 1
        with pytest.raises(Refused, match="Read-only file system"):
            journal(tmp_path / "disk", job="new").append("t", entry("a", 0))
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)


def test_a_reader_gets_what_comes_before_damage_and_then_learns_of_it(tmp_path: Path) -> None:
    """The story of a job is of use also if its end cannot be read."""
    one = journal(tmp_path)
    for i in range(4):
        one.append(str(i), entry("a", i))
    path = tmp_path / "job" / "journal"
    data = path.read_bytes().splitlines(keepends=True)
    data[2] = data[2][:100] + b"#" + data[2][101:]
    path.write_bytes(b"".join(data))
    reader = journal(tmp_path, reads_only=True)
    position, records = reader.records(0)
    assert [record.entry for _, record in records] == [entry("a", 0)]
    with pytest.raises(Refused, match=f"is damaged between the bytes {position} and"):
        reader.records(position)


# ---- the lock ----


def test_removing_or_replacing_the_lock_loses_nothing(tmp_path: Path) -> None:
    """Somebody tidies up. Both agents write at once, because each has its own lock."""
    one, two = journal(tmp_path), journal(tmp_path)
    one.append("a-0", entry("a", 0))
    lock = tmp_path / "job" / "lock"
    fsync, count = os.fsync, 0

    def removed(fd: int) -> None:
        nonlocal count
        fsync(fd)
        count += 1
        if count == 1:  # the record of `one` has no end yet
            lock.unlink()
            held = os.open(tmp_path / "job" / "other", os.O_RDWR | os.O_CREAT)
            os.rename(tmp_path / "job" / "other", lock)
            os.close(held)
            done = subprocess.run([sys.executable, "-c", WRITES, str(tmp_path)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", removed)
        one.append("a-1", entry("a", 1))
    two.append("c", entry("c", 0))
    found = [e for e in everything(journal(tmp_path)) if e != Filler()]
    assert found == [entry("a", 0), entry("a", 1), entry("b", 0), entry("c", 0)]


WRITES = """
import sys
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.file.journal import FileJournal
from tests.support.journals import entry
FileJournal(sys.argv[1], Envelope("job")).append("b", entry("b", 0))
"""


def test_a_writer_whose_line_went_elsewhere_says_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers at once, and the other was faster."""
    one = journal(tmp_path)
    one.append("a-0", entry("a", 0))
    real, is_first = os.write, True

    def write(fd: int, data: bytes) -> int:
        nonlocal is_first
        if is_first:
            is_first = False
            monkeypatch.setattr(os, "write", real)
            (tmp_path / "job" / "lock").unlink()
            done = subprocess.run([sys.executable, "-c", WRITES, str(tmp_path)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(Exception, match=r"wrote at the same time; was .*lock removed\?"):
        one.append("a-1", entry("a", 1))
    one.append("a-1", entry("a", 1))
    assert everything(journal(tmp_path)) == [entry("a", 0), entry("b", 0), Filler(), entry("a", 1)]


def test_the_real_holder_of_the_lock_is_named(tmp_path: Path) -> None:
    """A program that is none of the job's agents has locked the file to read it. The one that wrote last is not to
    blame."""
    one = FileJournal(str(tmp_path), Envelope("job"), timeout_s=0.1)
    one.append("a", entry("a", 0))
    code = "import fcntl, sys; fd = open(sys.argv[1]); fcntl.lockf(fd, fcntl.LOCK_SH); print(flush=True); input()"
    lock = tmp_path / "job" / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(Exception, match=rf"process {holder.pid} of this host \(python.*\) holds it as a reader"):
            one.append("b", entry("a", 1))
        holder.communicate(b"\n")
    fd = os.open(lock, os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
