"""The keys of a journal in etcd.

    /reknit/<job>/header               what names this journal
    /reknit/<job>/segments/<n>         is there if the n-th segment, from 1 on, has begun
    /reknit/<job>/entries/<n>/<token>  one entry, in the n-th segment
    /reknit/<job>/beats/<id>.<inc>     a node's counter
    /reknit/<job>/fold                 the fold of all entries before a position
    /reknit/<job>/fold-at              that position

The names of jobs and nodes, and tokens, are quoted as in a URL. So different names have different keys, and no name
reaches into the keys of another job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from reknit.core.job.entries import Node

ALL = "/reknit/"
"""All keys of all jobs begin with this."""


class EtcdKeys:
    """The keys of one job."""

    def __init__(self, job: str) -> None:
        self.root = f"{ALL}{_quoted(job)}/"
        """All keys of the job begin with this."""
        self.header = f"{self.root}header"
        self.entries = f"{self.root}entries/"
        self.segments = f"{self.root}segments/"
        self.beats = f"{self.root}beats/"
        self.fold, self.fold_at = f"{self.root}fold", f"{self.root}fold-at"

    def owns(self, key: str) -> bool:
        """The key belongs to this job."""
        return key.startswith(self.root)

    def segment(self, number: int) -> str:
        return f"{self.segments}{number:06}"

    def entries_of(self, segment: int) -> str:
        return f"{self.entries}{segment}/"

    def entry(self, segment: int, token: str) -> str:
        return self.entries_of(segment) + _quoted(token)

    def beat(self, node: Node) -> str:
        return f"{self.beats}{_quoted(node.id)}.{node.incarnation}"


def job_of(key: str) -> str:
    """The job to which a key belongs."""
    return unquote(key.removeprefix(ALL).partition("/")[0], errors="surrogatepass")


def place_of(key: str) -> str:
    """The place of an entry, which its signature covers."""
    return f"entry {unquote(key.rpartition('/')[2], errors='surrogatepass')}"


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")
