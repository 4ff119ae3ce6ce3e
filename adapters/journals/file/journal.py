"""A journal in a folder on a file system that all nodes share.

    PATH/<job>/journal                     the header, then one record per line; a position is an offset in this file
               lock                        the file that a writer locks, with the digest of the journal (`turn`)
               beats/<node>.<incarnation>  a counter
               fold                        the fold that was published last

1. One process writes at a time (`turn`).
2. Bytes that were written are never changed and never cut off, because readers take no lock. If bytes were replaced, a
   reader might see a mixture that no other reader sees. Readers take complete lines only. What a disk or a person
   changes all the same is noticed by the digests in the records (`lines`).
3. The writer writes the line without its end, and makes it safe with fsync. Then it writes the end of the line. So a
   line that a reader has seen cannot vanish. NFS reports a full disk only at the fsync, and only to the host that
   wrote.
4. A line without an end was left by a writer that died or failed. The next writer first ends that line. If all of the
   line was there, it is an entry, although no writer was told so. Otherwise the line is a `Filler`. All readers see the
   same.
5. A record vouches for all bytes before it. So a writer appends nothing after bytes that other agents have read
   differently. Each writer leaves the digest of the journal in the file `lock`, and the next writer compares it with
   its own.
6. If `lock` was removed, two writers may write at once. They append, so neither overwrites the other. Each looks at the
   end whether its line stands where it should, and otherwise says the entry again.
7. Bytes may be damaged after some agents have read them, and so may the header. These agents go on, because they do not
   read the bytes again. Agents that read them for the first time find the damage, and are refused.
8. A reader opens the file anew for each look, because an NFS client asks its server when a file is opened. Nothing
   tells a reader that there are new entries, so readers poll.
9. Counters are overwritten in place. So a node can beat when the disk is full.

A system call may hang, for example on a hard NFS mount whose server is gone. Then its thread hangs, and this module
cannot end the call.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, NoReturn

from reknit.adapters.journals.folds import MANY, Unpublished
from reknit.adapters.runtime.ports import Batch, NoJournal, Refused, Unavailable
from reknit.core.job.founding import Life
from reknit.core.job.reasons import Refusal

from . import folder, lines
from .lines import Mark
from .turn import Turn, note_in

if TYPE_CHECKING:
    from reknit.adapters.journals.envelope import Envelope
    from reknit.adapters.runtime.ports import Record
    from reknit.core.job.entries import Entry, Node
    from reknit.core.job.job import Job

_FOR_GOOD = {
    errno.ENOENT,
    errno.ENODEV,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}
"""Errors in making the folder that do not go away by themselves."""
_REPLACED = {errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO}
"""Errors that show that something else has the name of a file or of a folder of the journal."""


class FileJournal:
    """Implements `ports.Journal`, `ports.Remembers` and `ports.Readable`."""

    def __init__(
        self,
        path: str,
        envelope: Envelope,
        *,
        group: int | None = None,
        reads_only: bool = False,
        poll_s: float = 0.1,
        timeout_s: float = 5.0,
    ) -> None:
        """`path`: a folder. It is made if it is missing. `group`: the number of a group whose members may use the
        journal, too, if this agent makes it. `reads_only`: nothing is made or changed. `poll_s`: seconds between two
        looks of a reader that waits. `timeout_s`: seconds that a writer waits for its turn at most."""
        self._path = path
        self._envelope = envelope
        self._group = group
        self._reads_only = reads_only
        self._poll_s = poll_s
        self._timeout_s = timeout_s
        self._folder = os.path.join(path, folder.file_name(envelope.job))
        self._journal = os.path.join(self._folder, "journal")
        self._lock = os.path.join(self._folder, "lock")
        self._fold = os.path.join(self._folder, "fold")
        self._mode = folder.PRIVATE
        self._start: Mark | None = None
        """The end of the header. None: no header was read and admitted yet."""
        self._read: Mark | None = None
        """Where the last read ended."""
        self._furthest: Mark | None = None
        """The furthest place in the file that this agent has read or written. None: it has done neither yet."""
        self._unpublished = Unpublished()
        self._last = ("", 0)
        """The token of the last entry, and the length of the file before its first append was tried."""
        self._is_ready = False
        self._preparing = threading.Lock()
        self._is_closed = False
        self._open_until_closed = threading.Lock()
        self._open_until_closed.acquire()

    # ---- the writer's side ----

    def append(self, token: str, entry: Entry, life: Life = Life()) -> bool:
        try:
            self._prepare()
            with self._turn() as turn:
                self._append(turn, token, entry)
                return True
        except OSError as e:
            self._failed(e)

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> Mapping[Node, int]:
        try:
            self._prepare()
            os.close(self._opened(os.O_RDONLY))  # checks that the counters still belong to this journal
            try:
                folder.write_count(self._beat_path(node), count, self._mode)
            except FileNotFoundError:
                folder.make_beats(self._folder)
                folder.write_count(self._beat_path(node), count, self._mode)
            found = {n: folder.read_count(self._beat_path(n)) for n in (node, *watch)}
        except OSError as e:
            self._failed(e)
        return {n: value for n, value in found.items() if value is not None}

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._open_until_closed.release()

    def _append(self, turn: Turn, token: str, entry: Entry) -> None:
        fd = self._opened(os.O_RDWR | os.O_APPEND)
        try:
            size = os.fstat(fd).st_size
            if os.pread(fd, 1, size - 1) != b"\n":
                os.fsync(fd)  # the writer that died may have died before its own fsync (rule 3 above)
                _write(fd, b"\n")
                os.fsync(fd)
            end, digest = self._verified_end(fd, turn)
            if self._last[0] != token:
                self._last = (token, end)
            elif token in lines.tokens(self._envelope, fd, self._last[1]):
                return
            record = self._envelope.wrap(token, entry, str(end), lines.seen(end, digest))
            _write(fd, record)
            os.fsync(fd)
            _write(fd, b"\n")
            os.fsync(fd)
            mark = lines.following(end, digest, record)
            if not mark.is_there(fd):
                raise Unavailable(f"{self._journal}: another process wrote at the same time; was {self._lock} removed?")
        finally:
            # Closed before the lock is let go. So on NFS the next process that opens the file sees all of it.
            os.close(fd)
        self._advance(mark)
        turn.leave(self._envelope.wrap_end(lines.seen(mark.position, mark.digest)))

    def _verified_end(self, fd: int, turn: Turn) -> tuple[int, str]:
        """Position and digest at the end of the file, whose last line is complete. Raises `Refused` if the file holds
        other bytes than another agent has read."""
        mark = self._furthest or self._begin()
        found = lines.complete_lines(fd, mark.position)
        known = lines.digests(mark, found)
        end = max(known)
        broken_at = lines.broken_at(self._envelope, known, found)
        if broken_at is not None:
            self._damaged(mark.position, broken_at)
        noted = self._envelope.open_end(turn.note)
        if noted is not None and noted[0] >= mark.position and known.get(noted[0]) != noted[1]:
            self._damaged(mark.position, noted[0])
        return end, known[end]

    def _turn(self) -> Turn:
        return Turn(self._lock, self._timeout_s, self._mode)

    def _beat_path(self, node: Node) -> str:
        return os.path.join(self._folder, "beats", f"{folder.file_name(node.id)}.{node.incarnation}")

    # ---- the reader's side ----

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        if fold := self._unpublished.take():
            self.publish(*fold)
        give_up = monotonic() + wait_s
        while True:
            try:
                if not self._reads_only:
                    self._prepare()
                batch = self._look(after)
            except OSError as e:
                self._failed(e)
            left_s = give_up - monotonic()
            if batch.position != after or left_s <= 0:
                return self._unpublished.found(batch)
            if self._open_until_closed.acquire(timeout=min(self._poll_s, left_s)):
                self._open_until_closed.release()
                return self._unpublished.found(batch)

    def records(self, after: int) -> tuple[int, Sequence[tuple[str, Record]]]:
        """Implements `ports.Readable`. If the journal is damaged, the records before the damage come first, and then
        `Refused`."""
        try:
            mark, found = self._new_lines(after)
        except OSError as e:
            self._failed(e)
        sound = lines.believed(self._envelope, mark, found)
        if not sound.records:
            self._check(mark, sound)
        return (sound.mark.position if sound.records else after), [(str(at), record) for at, record in sound.records]

    def _look(self, after: int) -> Batch:
        mark, found = self._new_lines(after)
        base = None
        if len(found) > MANY and (fold := self._published()) is not None:
            position, job, digest = fold
            behind = lines.advanced(mark, found, position)
            if behind is not None and behind.digest == digest and behind.position > mark.position:
                base, mark = job, behind
                found = [line for line in found if line[0] >= position]
        sound = lines.believed(self._envelope, mark, found)
        self._check(mark, sound)
        if base is None and not sound.records:
            return Batch(after)
        self._read = sound.mark
        self._advance(sound.mark)
        return Batch(sound.mark.position, tuple(record.entry for _, record in sound.records), base)

    def _new_lines(self, after: int) -> tuple[Mark, list[lines.Line]]:
        fd = self._opened(os.O_RDONLY)
        try:
            mark = self._mark_at(fd, after)
            if mark is None:
                self._damaged(0, after)
            return mark, lines.complete_lines(fd, mark.position)
        finally:
            os.close(fd)

    def _check(self, mark: Mark, found: lines.LinesRead) -> None:
        """Raise `Refused` if other agents have read other bytes."""
        if found.broken_at is not None:
            self._damaged(found.mark.position, found.broken_at)
        end = max(found.digests)
        known = self._furthest  # this agent may have written further than it has read
        witnesses = [] if known is None else [(known.position, known.digest)]
        # If no record vouches for the lines at the end, the note of the last writer tells damaged records from lines of
        # another program.
        if end != found.mark.position and (noted := self._envelope.open_end(note_in(self._lock))) is not None:
            witnesses.append(noted)
        for position, digest in witnesses:
            if mark.position <= position <= end and found.digests.get(position) != digest:
                self._damaged(found.mark.position, position)

    # ---- folds ----

    def remember(self, position: int, job: Job) -> None:
        self._unpublished.folded(position, job)

    def take_back(self) -> None:
        """The journal keeps nothing of what it has returned."""

    def publish(self, position: int, job: Job) -> None:
        """Offer the fold of everything before `position` to readers that are far behind. Called by the thread that
        reads."""
        try:
            self._prepare()
            fd = self._opened(os.O_RDONLY)
            try:
                mark = self._mark_at(fd, position)
            finally:
                os.close(fd)
            if mark is not None:
                folder.replace(self._fold, self._envelope.wrap_job(position, job, mark.digest), self._mode)
        except (OSError, Unavailable):
            pass  # readers read the entries instead

    def _published(self) -> tuple[int, Job, str] | None:
        try:
            return self._envelope.open_fold(folder.contents(self._fold))
        except OSError:
            return None  # there is none yet

    # ---- both ----

    def _opened(self, flags: int) -> int:
        """The journal's descriptor, which holds what was read before. Raises `Refused`, `OSError`."""
        start, furthest = self._start, self._furthest  # before the file is opened: other threads may read further
        try:
            fd = folder.there(self._journal, flags)
        except FileNotFoundError:
            if start is None and self._reads_only:
                raise NoJournal(f"there is no journal of job {self._envelope.job} in {self._path}") from None
            self._envelope.admit(b"")
            raise
        try:
            if start is None:
                header = lines.first_line(fd)
                self._envelope.admit(header)
                self._start = lines.begin(header)
            elif furthest is None or os.fstat(fd).st_size < furthest.position or not furthest.is_there(fd):
                self._compare(fd, start, furthest or start)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _compare(self, fd: int, start: Mark, furthest: Mark) -> None:
        """Raise `Refused` if the file is another one than before. Called if the last line that was read is not there
        any more, or if only the header was read."""
        if os.fstat(fd).st_size < furthest.position:
            self._envelope.admit(b"")
        if not start.is_there(fd):
            self._envelope.admit(lines.first_line(fd))
        text = os.pread(fd, len(furthest.last), furthest.at)
        if furthest is not start and self._envelope.unwrap(text, str(furthest.at)) is not None:
            self._damaged(0, furthest.position)

    def _begin(self) -> Mark:
        if self._start is None:
            raise AssertionError("the journal was not opened yet")
        return self._start

    def _mark_at(self, fd: int, position: int) -> Mark | None:
        """None: no line ends there."""
        start, read = self._begin(), self._read
        if position == 0:
            return start
        if read is not None and read.position == position:
            return read
        return lines.advanced(start, lines.complete_lines(fd, start.position), position)

    def _advance(self, mark: Mark) -> None:
        furthest = self._furthest
        if furthest is None or mark.position > furthest.position:
            self._furthest = mark

    def _damaged(self, start: int, end: int) -> NoReturn:
        where = f"between the bytes {start} and {end}" if start < end else f"before byte {end}"
        raise Refused(
            Refusal.IDENTITY,
            f"the journal of job {self._envelope.job} is damaged {where} of {self._journal}: agents that have read it "
            "before go on, and no other agent can join; start all agents again with another --rdzv-id",
        )

    def _prepare(self) -> None:
        """Make the folder and the journal if they are missing. Only the first call does so. If the journal is missing
        later, it was lost, and this agent must not begin another one."""
        if self._reads_only:
            raise Refused(Refusal.SETUP, f"{self._journal} was opened for reading alone")
        with self._preparing:
            if self._is_ready:
                return
            try:
                self._make()
            except OSError as e:
                if e.errno not in _FOR_GOOD:
                    raise
                what = self._not_a_folder() or e.strerror
                why = f"the folder {self._path} (--rdzv-endpoint) cannot hold the job's journal: {what}"
                if owner := folder.owner(self._folder):
                    why += f"; {self._folder} belongs to {owner}, and --rdzv-conf=group=GROUP would share it"
                raise Refused(Refusal.SETUP, why) from None
            self._is_ready = True

    def _make(self) -> None:
        for tries_left in (2, 1, 0):
            try:
                self._mode = folder.make(self._folder, self._group)
                with self._turn():
                    if not os.path.exists(self._journal):
                        folder.replace(self._journal, self._envelope.header() + b"\n", self._mode)
                return
            except FileNotFoundError:
                if not tries_left:
                    raise
                # the folder of a finished job was just removed (`pruning`)

    def _not_a_folder(self) -> str:
        """Which of the folders is something else, in words. Empty: none of them."""
        for path in (self._path, self._folder, os.path.join(self._folder, "beats")):
            if os.path.lexists(path) and not os.path.isdir(path):
                return f"{path} is no folder"
        return ""

    def _failed(self, error: OSError) -> NoReturn:
        if isinstance(error, FileNotFoundError) and self._is_ready and not os.path.exists(self._journal):
            self._envelope.admit(b"")
        if error.errno in _REPLACED:
            found = "a pipe, a socket or a device" if error.errno == errno.ENXIO else error.strerror
            what = f"{self._not_a_folder() or f'{error.filename or self._journal} is no file'} ({found})"
            why = f"the journal of job {self._envelope.job} cannot be used: {what}: another program has replaced it"
            raise Refused(Refusal.IDENTITY, f"{why}; start all agents again with another --rdzv-id") from None
        if self._reads_only and error.errno in (errno.EACCES, errno.EPERM):
            raise Refused(Refusal.SETUP, f"{error.filename or self._folder}: {error.strerror}") from None
        raise Unavailable(f"{error.filename or self._folder}: {error.strerror}") from error


def _write(fd: int, data: bytes) -> None:
    """Write all of `data` at the end of the file."""
    while data:
        data = data[os.write(fd, data) :]
