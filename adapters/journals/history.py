"""What an agent has read of a journal, and whether another agent has read the same.

A reader keeps a digest of all records that it has read. Two readers with the same position and the same digest have
read the same records.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

LONGEST_NUMBER = 20
"""A number in a store has fewer digits than this."""
REMEMBERED = 4096
"""Number of positions whose digest a reader remembers."""


def chained(digest: str, record: bytes) -> str:
    """The digest of all records up to this one. `digest`: of the records before."""
    return hashlib.blake2b(digest.encode() + record, digest_size=16).hexdigest()


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
        if len(self._digests) > REMEMBERED:
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
