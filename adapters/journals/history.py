"""What an agent has read of a journal, and whether another agent has read the same.

1. A reader keeps a digest of all records that it has read. Two readers with the same position and the same digest have
   read the same records.
2. A journal whose store was lost goes on as another *life*. Each life names the lives from which it goes on. So an
   agent that comes from one life to another knows up to which position both hold the same records.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from math import inf

from attrs import frozen

LONGEST_NUMBER = 20
"""A number in a store has fewer digits than this."""
_REMEMBERED = 4096
"""Number of positions whose digest a reader remembers."""
_LIVES = 64
"""Number of earlier lives that a life names."""


def chained(digest: str, record: bytes) -> str:
    """The digest of all records up to this one. `digest`: of the records before."""
    return hashlib.blake2b(digest.encode() + record, digest_size=16).hexdigest()


Line = tuple[tuple[str, int], ...]
"""Lives of a journal, each with its name and the position where it begins. Each goes on from the one before it."""


@frozen
class Life:
    """Where a journal goes on.

    A store may lose its content. Then the agents found the journal again, and it begins another *life*: the records
    from `position` on are kept in another place of the store. What was before is known from a fold.
    """

    name: str = ""
    """Empty: the first life."""
    position: int = 0
    """Where this life begins."""
    digest: str = ""
    """The digest of all records before `position`."""
    number: int = 0
    """How often the journal was founded again until this life began."""
    before: Line = ()
    """The lives from which this one goes on, the first one first. Only the latest are named."""

    @property
    def line(self) -> Line:
        """This life, and those before it."""
        return (*self.before, (self.name, self.position))[-_LIVES:]

    def place(self, number: int) -> str:
        """The place of a record of this life."""
        return f"{number} {self.name}" if self.name else str(number)


def common(one: Life, other: Life) -> float:
    """Up to which position both lives of a journal hold the same records. Infinity: they are the same life. -1: this is
    not known."""
    lines = one.line, other.line
    starts = dict(lines[1])
    last = next((name for name, _ in reversed(lines[0]) if name in starts), None)
    if last is None:
        return -1
    ends = (position for line in lines for position in _after(line, last))
    return min(ends, default=inf)


def _after(line: Line, name: str) -> list[int]:
    """Where the life begins that follows this one. Empty: it is the last."""
    at = [each for each, _ in line].index(name)
    return [position for _, position in line[at + 1 : at + 2]]


def lives(data: object) -> Line:
    """A `Line`, as a store holds it. Empty if it is none."""
    if not isinstance(data, list) or not all(isinstance(each, list) and len(each) == 2 for each in data):
        return ()
    return tuple((str(name), position) for name, position in data if type(position) is int)


class Prefix:
    """What a reader has read of a journal: the position behind it, and a digest of its records.

    Two readers with the same position and the same digest have read the same records.
    """

    def __init__(self, position: int = 0, digest: str = "") -> None:
        self.position = position
        self.digest = digest
        self._digests: OrderedDict[int, str] = OrderedDict({position: digest})
        """By position, for the latest positions."""

    def extend(self, record: bytes, position: int) -> None:
        """One more record was read. `position`: the position behind it."""
        self.position = position
        self.digest = chained(self.digest, record)
        self._digests[position] = self.digest
        if len(self._digests) > _REMEMBERED:
            self._digests.popitem(last=False)

    def at(self, position: int) -> str:
        """The digest of the records before `position`. Empty: this reader does not know it, or no longer."""
        return self._digests.get(position, "")

    @property
    def seen(self) -> str:
        """As it stands in a record."""
        return f"{self.position} {self.digest}"

    def contradicts(self, seen: str) -> bool:
        """Whether the writer of a record had read other records than this reader. False if this reader does not know
        the position, or no longer."""
        position, digest = read_to(seen)
        known = self._digests.get(position)
        return bool(digest) and known is not None and known != digest


def read_to(seen: str) -> tuple[int, str]:
    """The position and the digest in a field `seen`. Anybody may have written it. -1: there is no position."""
    position, _, digest = seen.partition(" ")
    is_number = position.isascii() and position.isdigit() and len(position) < LONGEST_NUMBER
    return (int(position), digest) if is_number else (-1, "")
