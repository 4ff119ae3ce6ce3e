"""What an operator should know about an etcd that answers. Each kind of line is told at most once per agent.

1. **A version that may lose writes.** Each server is asked for its version when it has answered a read first.
2. **An etcd that keeps its whole history.** Every beat makes a revision, and etcd takes no more writes when its space
   is used up. Whether etcd compacts cannot be asked, and a young etcd has compacted nothing yet. So the agent asks for
   a revision of the past, when `_MANY` others have followed it. etcd refuses a revision that it has forgotten. If etcd
   still has it, the line tells when the space will be used up at this rate. Most of the space is left then.

An etcd that compacts keeps at most twice what its retention says. With a retention of 5 minutes, 2,000 nodes with the
default heartbeat make 1.6 million revisions in that time.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from http.client import HTTPException
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING

from attrs import frozen

from reknit.adapters.runtime.ports import Refused

if TYPE_CHECKING:
    from .connection import EtcdServer

_MANY = 4_000_000
"""Number of revisions. With beats they are about 0.4 GB, a fifth of the space."""
_SPACE = 2 << 30
"""The space that etcd has by default, in bytes. Its JSON interface does not tell how much it has."""
_WEEK_S = 7 * 24 * 3600.0
"""An operator is told if the space is used up sooner. Seconds."""
_ASK_S = 1.0
"""Bound on each question, in seconds."""
_COMPACTED = "required revision has been compacted"


@frozen
class _Mark:
    """How etcd was at some moment."""

    revision: int
    at: float
    size: int
    """Of the database, in bytes."""


class Doubts:
    """Of one agent about its etcd."""

    def __init__(
        self, tell: Callable[[str], None], heartbeat_s: float, *, now: Callable[[], float] = monotonic
    ) -> None:
        """`tell`: called with a line, by the thread that reads. `heartbeat_s`: of the job, in seconds. `now`: a clock,
        in seconds."""
        self._tell = tell
        self._heartbeat_s = heartbeat_s
        self._now = now
        self._asked: set[str] = set()
        """The servers, by their URLs, that were asked for their version."""
        self._mark: _Mark | None = None
        """None: nothing was asked yet."""
        self._has_told_version = self._has_told_growth = False

    def look(self, server: EtcdServer, key: str, revision: int) -> None:
        """After a read. `server`: has answered it, and is asked. `key`: any that the client may read. `revision`: of
        the store. Asks nothing, nearly always. Raises nothing."""
        mark = self._mark
        has_grown = mark is not None and not self._has_told_growth and revision - mark.revision >= _MANY
        if server.url in self._asked and not has_grown:
            return
        self._asked.add(server.url)
        try:
            status = server.ask("/v3/maintenance/status", {}, _ASK_S)
            self._judge(server, str(status["version"]))
            new = _Mark(revision, self._now(), int(status["dbSize"]))
            if mark is None or has_grown:
                self._mark = new
            if mark is not None and has_grown and _keeps(server, key, mark.revision):
                self._warn(server, mark, new)
        except (OSError, HTTPException, ValueError, KeyError, TypeError, Refused):
            pass  # nothing is known, and the job needs none of this

    def _judge(self, server: EtcdServer, version: str) -> None:
        if loses_writes(version) and not self._has_told_version:
            self._has_told_version = True
            self._tell(
                f"etcd {version} at {server.url} may lose writes that it has acknowledged, if it crashes; the job goes "
                "on; install 3.4.22, 3.5.6 or a later version"
            )

    def _warn(self, server: EtcdServer, old: _Mark, new: _Mark) -> None:
        """etcd has forgotten nothing since `old`."""
        passed_s, grown = max(new.at - old.at, 1.0), max(new.size - old.size, 1)
        left_s = max(1.0, (_SPACE - new.size) * passed_s / grown)
        if left_s > _WEEK_S:
            return
        self._has_told_growth = True
        heartbeat_s = ceil(self._heartbeat_s * _WEEK_S / left_s)
        self._tell(
            f"etcd at {server.url} has forgotten nothing for {passed_s / 3600:.1f} h, and its database has grown by "
            f"{grown / 1e6:.0f} MB; if this goes on, its space (2 GB by default) is used up in {left_s / 3600:.1f} h, "
            "and the job stops; start etcd with --auto-compaction-mode=periodic --auto-compaction-retention=5m; "
            f"otherwise --rdzv-conf=heartbeat={heartbeat_s} on all nodes makes the space last for a week"
        )


def _keeps(server: EtcdServer, key: str, revision: int) -> bool:
    """etcd still has this revision of the past."""
    wanted = {"key": b64encode(key.encode()).decode(), "revision": str(revision), "count_only": True}
    try:
        server.ask("/v3/kv/range", wanted, _ASK_S)
    except ValueError as e:
        if _COMPACTED not in str(e):
            raise
        return False
    return True


def loses_writes(version: str) -> bool:
    """Before 3.4.22, and from 3.5.0 to 3.5.5, a crash could lose writes that etcd had acknowledged."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return () < numbers < (3, 4, 22) or (3, 5) <= numbers < (3, 5, 6)
