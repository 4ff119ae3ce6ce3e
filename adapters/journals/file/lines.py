"""The lines of a journal's file, and what makes a reader believe them.

1. The digest of a journal at a position covers the header and every line before that position, as bytes. Torn lines and
   lines of other programs are covered like all others.
2. A record names its own offset and the digest at that offset (`seen`), as its writer had read the file. So a record
   vouches for every byte before it. A reader that comes to another digest has read other bytes than the writer: one of
   the two has read damage.
3. A line that is no record counts as a `Filler` only when a later record vouches for it. Until then a reader cannot
   tell whether another program wrote the line, or whether the line was a record that is damaged. Other readers may have
   read that record. So the reader stops before such a line.
4. A reader remembers the last line that it has read. If the file holds another record there, the file was cut off and
   written anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.history import chained
from reknit.adapters.runtime.ports import Record
from reknit.core.job.entries import Filler

if TYPE_CHECKING:
    Line = tuple[int, bytes]
    """Offset and text, without the end of the line."""

_FILLER = Record(Filler())


@frozen
class Mark:
    """How far a file was read and found to be sound."""

    position: int
    digest: str
    last: bytes
    """The line that ends at `position`, without its end."""

    @property
    def at(self) -> int:
        """The offset of the last line."""
        return self.position - len(self.last) - 1

    def is_there(self, fd: int) -> bool:
        """The last line is still in the file."""
        return os.pread(fd, len(self.last) + 1, self.at) == self.last + b"\n"


@frozen
class LinesRead:
    """What was read after a mark."""

    records: Sequence[tuple[int, Record]]
    """Each with its offset. The last of them is no `Filler`, so it vouches for all before it."""
    mark: Mark
    """After the last of `records`."""
    digests: Mapping[int, str]
    """The digest at the end of each complete line, also of lines that are not among `records`."""
    broken_at: int | None
    """Offset of the first record whose writer had read other bytes. None: there is none."""


def begin(header: bytes) -> Mark:
    """The mark after the header."""
    return following(0, "", header)


def following(position: int, digest: str, line: bytes) -> Mark:
    """The mark after one more line."""
    return Mark(position + len(line) + 1, chained(digest, line), line)


def first_line(fd: int) -> bytes:
    """The first line, without its end. Empty if the file is empty."""
    return os.pread(fd, 1 << 16, 0).partition(b"\n")[0]


def complete_lines(fd: int, start: int) -> list[Line]:
    """The complete lines from offset `start` on."""
    parts, at, lines = [], start, []
    while part := os.pread(fd, 1 << 20, at):
        parts.append(part)
        at += len(part)
    for line in b"".join(parts).split(b"\n")[:-1]:
        lines.append((start, line))
        start += len(line) + 1
    return lines


def digests(mark: Mark, lines: Iterable[Line]) -> dict[int, str]:
    """The digest at the mark and at the end of each line, by position."""
    digest = mark.digest
    found = {mark.position: digest}
    for at, line in lines:
        digest = found[at + len(line) + 1] = chained(digest, line)
    return found


def advanced(mark: Mark, lines: Iterable[Line], position: int) -> Mark | None:
    """The mark at this position, whether or not the lines before it are sound. None: no line ends there."""
    for at, line in lines:
        if mark.position >= position:
            break
        mark = following(at, mark.digest, line)
    return mark if mark.position == position else None


def believed(envelope: Envelope, mark: Mark, lines: Sequence[Line]) -> LinesRead:
    """Read lines that follow a mark. Raises `Refused` like `Envelope.unwrap`."""
    digest, known = mark.digest, {mark.position: mark.digest}
    records: list[tuple[int, Record]] = []
    count, vouching, end_of_it = 0, b"", 0  # of the last record
    broken = None
    for at, line in lines:
        record = envelope.unwrap(line, str(at))
        if record is not None and record.seen != seen(at, digest):
            broken = at
            break
        digest = chained(digest, line)
        end = at + len(line) + 1
        known[end] = digest
        records.append((at, record or _FILLER))
        if record is not None:
            count, vouching, end_of_it = len(records), line, end
    if count:
        mark = Mark(end_of_it, known[end_of_it], vouching)
    return LinesRead(records[:count], mark, known, broken)


def broken_at(envelope: Envelope, known: Mapping[int, str], lines: Sequence[Line]) -> int | None:
    """The same as `LinesRead.broken_at`, for a writer. It checks the last record only: it vouches for all before it."""
    for at, line in reversed(lines):
        record = envelope.unwrap(line, str(at))
        if record is not None:
            return None if record.seen == seen(at, known[at]) else at
    return None


def seen(position: int, digest: str) -> str:
    """As it stands in a record."""
    return f"{position} {digest}"


def tokens(envelope: Envelope, fd: int, start: int) -> Iterator[str]:
    """The tokens of the records from offset `start` on."""
    for at, line in complete_lines(fd, start):
        record = envelope.unwrap(line, str(at))
        if record is not None:
            yield record.token
