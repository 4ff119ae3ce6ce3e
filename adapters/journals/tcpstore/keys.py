"""The keys of a journal in a TCPStore. <job> is the job's id.

    /reknit/owner         the job that the store serves
    /reknit/<job>/header  what names this journal
    /reknit/<job>/begun   set once there is a header
    /reknit/<job>/pace    the longest round trip of any writer, in milliseconds
    /reknit/<job>/best    the best offer to found a journal again

The following keys exist once in each life of the journal (`founding.Life`). In the first life, <life> is left out.

    /reknit/<job>/<life>/head              how many slots are taken
    /reknit/<job>/<life>/slot/<n>          one record; n is a position
    /reknit/<job>/<life>/beat/<inc>/<id>   a node's counter
    /reknit/<job>/<life>/fold              the fold of all entries before a position
    /reknit/<job>/<life>/fold-at           that position
    /reknit/<job>/<life>/part/<n>          what follows if the fold with which the life begins is larger than 4 MiB; the
                                           first part is in `fold`, and n counts from 1
    /reknit/<job>/<life>/claim/<n>         how many readers that are far behind have claimed to publish the next fold
                                           after the one that ends at n
    /reknit/<job>/<life>/done/<n>          set when one of these readers has done so
"""

from __future__ import annotations

from reknit.core.job.entries import Node

OWNER = "reknit/owner"


class StoreKeys:
    """The keys that all lives of a journal share."""

    def __init__(self, job: str) -> None:
        self.root = f"reknit/{job.replace('%', '%25').replace('/', '%2F')}/"
        self.header = self.root + "header"
        self.begun = self.root + "begun"
        self.pace = self.root + "pace"
        self.best = self.root + "best"

    def of(self, life: str) -> LifeKeys:
        """`life`: its name. Empty: the first one."""
        return LifeKeys(self.root, life)


class LifeKeys:
    """The keys of one life."""

    def __init__(self, root: str, life: str) -> None:
        self._root = f"{root}{life}/" if life else root
        self._life = life
        self.head = self._root + "head"
        self.fold = self._root + "fold"
        self.fold_at = self._root + "fold-at"

    def slot(self, number: int) -> str:
        return f"{self._root}slot/{number}"

    def place(self, number: int) -> str:
        """What the record in this slot names as its place."""
        return f"{number} {self._life}" if self._life else str(number)

    def beat(self, node: Node) -> str:
        return f"{self._root}beat/{node.incarnation}/{node.id}"

    def part(self, number: int) -> str:
        return f"{self._root}part/{number}"

    def claim(self, fold_at: int) -> str:
        return f"{self._root}claim/{fold_at}"

    def done(self, fold_at: int) -> str:
        return f"{self._root}done/{fold_at}"
