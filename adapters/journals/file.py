"""A journal in a folder on a file system that all nodes share.

    PATH/<job>/journal                     the header, then one record per line; a position is an offset in this file
               lock                        the file that a writer locks; names the process that wrote last
               beats/<node>.<incarnation>  a counter
               fold                        the fold that was published last

1. One process writes at a time (`turn`).
2. Bytes that were written are never changed and never cut off, because readers take no lock. If bytes were replaced, a
   reader might see a mixture that no other reader sees. Readers take complete lines only.
3. The writer writes the line without its end, and makes it safe with fsync. Then it writes the end of the line. So a
   line that a reader has seen cannot vanish. NFS reports a full disk only at the fsync, and only to the host that
   wrote.
4. A line without an end was left by a writer that died or failed. The next writer first ends that line. If all of the
   line was there, it is an entry, although no writer was told so. Otherwise the line is a `Filler`. All readers see the
   same.
5. A reader opens the file anew for each look, because an NFS client asks its server when a file is opened. Nothing
   tells a reader that there are new entries, so readers poll.
6. Counters are overwritten in place. So a node can beat when the disk is full.

A system call may hang, for example on a hard NFS mount whose server is gone. Then its thread hangs, and this module
cannot end the call.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from time import monotonic
from typing import TYPE_CHECKING

from reknit.adapters.journals.turn import Turn
from reknit.adapters.link import MANY
from reknit.adapters.ports import Batch, Refused, Unavailable
from reknit.core.job.reasons import Refusal

if TYPE_CHECKING:
    from reknit.adapters.journals.envelope import Envelope
    from reknit.core.job.entries import Entry, Node
    from reknit.core.job.job import Job

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")
_LONGEST_NAME = 160
"""Upper bound on a file name, in bytes. A longer name is cut, and a digest is added. File systems allow 255 bytes."""
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


class FileJournal:
    """Implements `ports.Journal`."""

    def __init__(self, path: str, envelope: Envelope, *, poll_s: float = 0.1, timeout_s: float = 5.0) -> None:
        """`path`: a folder. It is made if it is missing. `poll_s`: seconds between two looks of a reader that waits.
        `timeout_s`: seconds that a writer waits for its turn at most."""
        self._path = path
        self._envelope = envelope
        self._poll_s = poll_s
        self._timeout_s = timeout_s
        self._folder = os.path.join(path, file_name(envelope.job))
        self._journal = os.path.join(self._folder, "journal")
        self._fold = os.path.join(self._folder, "fold")
        self._beats = os.path.join(self._folder, "beats")
        self._header = b""
        """The first line of the file, which the envelope has admitted. Empty: no header was admitted yet."""
        self._known = 0
        """Size of the file in bytes when this agent saw it last. The file never becomes shorter."""
        self._last = ("", 0)
        """The token of the last entry, and the length of the file before its first append was tried."""
        self._is_ready = False
        self._preparing = threading.Lock()
        self._is_closed = False
        self._open_until_closed = threading.Lock()
        self._open_until_closed.acquire()

    # ---- the writer's side ----

    def append(self, token: str, entry: Entry) -> None:
        try:
            self._prepare()
            with self._turn():
                self._append(token, entry)
        except OSError as e:
            raise self._unavailable(e) from e

    def beat(self, node: Node, watch: Sequence[Node]) -> Mapping[Node, int]:
        try:
            self._prepare()
            os.close(self._opened(os.O_RDONLY))  # checks that the counters still belong to this journal
            counts = {node: _raise_count(self._beat_path(node))}
            for other in watch:
                if other not in counts and (count := _read_count(self._beat_path(other))) is not None:
                    counts[other] = count
        except OSError as e:
            raise self._unavailable(e) from e
        return counts

    def publish(self, position: int, job: Job) -> None:
        record = self._envelope.wrap_job(position, job)
        try:
            with self._turn():
                _replace(self._fold, record)
        except (OSError, Unavailable):
            pass  # readers read the entries instead

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._open_until_closed.release()

    def _append(self, token: str, entry: Entry) -> None:
        fd = self._opened(os.O_RDWR)
        try:
            size = os.fstat(fd).st_size
            if os.pread(fd, 1, size - 1) != b"\n":
                os.fsync(fd)  # rule 3 above, for the writer that died
                size = _write(fd, b"\n", size)
                os.fsync(fd)
            if self._last[0] != token:
                self._last = (token, size)
            elif any(self._envelope.open(line, str(at))[0] == token for at, line in _lines(fd, self._last[1])):
                return
            end = _write(fd, self._envelope.wrap(token, entry, str(size)), size)
            os.fsync(fd)
            end = _write(fd, b"\n", end)
            os.fsync(fd)
        finally:
            os.close(
                fd
            )  # before the lock is let go, so that on NFS the next process that opens the file sees all of it
        self._known = max(self._known, end)

    def _turn(self) -> Turn:
        return Turn(os.path.join(self._folder, "lock"), self._timeout_s)

    def _beat_path(self, node: Node) -> str:
        return os.path.join(self._beats, f"{file_name(node.id)}.{node.incarnation}")

    # ---- the reader's side ----

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        give_up = monotonic() + wait_s
        while True:
            try:
                self._prepare()
                batch = self._look(after)
            except OSError as e:
                raise self._unavailable(e) from e
            left_s = give_up - monotonic()
            if batch.position != after or left_s <= 0:
                return batch
            if self._open_until_closed.acquire(timeout=min(self._poll_s, left_s)):
                self._open_until_closed.release()
                return batch

    def _look(self, after: int) -> Batch:
        fd = self._opened(os.O_RDONLY)
        try:
            start = after or len(self._header) + 1
            if os.fstat(fd).st_size < start:
                self._envelope.admit(b"")  # the file has lost bytes that were read before
            found = [*_lines(fd, start)]
        finally:
            os.close(fd)
        if not found:
            return Batch(after)
        ends = [at + len(line) + 1 for at, line in found]
        base, skipped = None, 0
        if len(found) > MANY and (fold := self._published()) is not None and fold[0] in ends:
            skipped, base = ends.index(fold[0]) + 1, fold[1]
        entries = tuple(self._envelope.open(line, str(at))[1] for at, line in found[skipped:])
        self._known = max(self._known, ends[-1])
        return Batch(ends[-1], entries, base)

    def _published(self) -> tuple[int, Job] | None:
        try:
            with open(self._fold, "rb") as file:
                return self._envelope.open_job(file.read())
        except OSError:
            return None  # there is none yet

    # ---- both ----

    def _opened(self, flags: int) -> int:
        """The journal's descriptor, its header checked. Raises `Refused`, `OSError`."""
        known = self._known  # read before the file is opened: another thread may make it longer meanwhile
        try:
            fd = os.open(self._journal, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            self._envelope.admit(b"")
            raise
        try:
            header = _first_line(fd)
            if os.fstat(fd).st_size < known:
                self._envelope.admit(b"")
            if not header or header != self._header:
                self._envelope.admit(header)
                self._header = header
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _prepare(self) -> None:
        """Make the missing files, once. A file that is missing later was lost. Then the journal must not begin anew."""
        with self._preparing:
            if self._is_ready:
                return
            try:
                os.makedirs(self._beats, exist_ok=True)
                with self._turn():
                    if not os.path.exists(self._journal):
                        _replace(self._journal, self._envelope.header() + b"\n")
            except OSError as e:
                if e.errno not in _FOR_GOOD:
                    raise
                why = f"the folder {self._path} (--rdzv-endpoint) cannot hold the job's journal: {e.strerror}"
                raise Refused(Refusal.SETUP, why) from None
            self._is_ready = True

    def _unavailable(self, error: OSError) -> Unavailable:
        return Unavailable(f"{error.filename or self._folder}: {error.strerror}")


def file_name(text: str) -> str:
    """A file name for this text. No other text has the same name, and it never leads to another folder."""
    data = text.encode(errors="surrogatepass")
    name = "".join(chr(b) if b in _PLAIN else f"%{b:02X}" for b in data)
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > _LONGEST_NAME:
        return f"{name[:_LONGEST_NAME]}+{sha256(data).hexdigest()}"
    return name or "+"


def _lines(fd: int, start: int) -> Iterator[tuple[int, bytes]]:
    """The complete lines from offset `start` on, each with its offset."""
    parts = []
    at = start
    while part := os.pread(fd, 1 << 20, at):
        parts.append(part)
        at += len(part)
    for line in b"".join(parts).split(b"\n")[:-1]:
        yield start, line
        start += len(line) + 1


def _first_line(fd: int) -> bytes:
    """The first line of the file, without its end. Empty if the line has no end."""
    line, end, _ = os.pread(fd, 1 << 16, 0).partition(b"\n")
    return line if end else b""


def _write(fd: int, data: bytes, at: int) -> int:
    """Write all of `data` at offset `at`. Returns the offset behind it."""
    while data:
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count
    return at


def _replace(path: str, data: bytes) -> None:
    """Replace the content of the file in one instant. Only the process that has the turn may call this, because all
    processes give the new file the same name first."""
    beside = f"{path}.new"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(beside, path)


def _raise_count(path: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        count = (_count(os.pread(fd, 64, 0)) or 0) + 1
        # The number is written twice. A reader that looks during the write sees two numbers that differ, and looks
        # again. With one number it might take half of the old and half of the new number for the counter.
        _write(fd, f"{count:020} {count:020}\n".encode(), 0)
    finally:
        os.close(fd)
    return count


def _read_count(path: str) -> int | None:
    for _ in range(3):  # the numbers differ only during a write, and writes are about a second apart
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            count = _count(os.pread(fd, 64, 0))
        finally:
            os.close(fd)
        if count is not None:
            return count
    return None


def _count(data: bytes) -> int | None:
    first, _, second = data.rstrip(b"\n").partition(b" ")
    return int(first) if first == second and first.isdigit() else None
