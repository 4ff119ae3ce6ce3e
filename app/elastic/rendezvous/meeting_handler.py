"""What an agent asks a handler of reknit's own: where the nodes meet, and on which terms."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from reknit.app.settings import Meeting
from reknit.core.job.entries import Terms


@runtime_checkable
class MeetingHandler(Protocol):
    """A rendezvous handler of reknit's own: it knows where the nodes meet, and on which terms."""

    @property
    def node_id(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def rank_hint(self) -> int | None: ...
    @property
    def store_timeout_s(self) -> float: ...
    def meeting(self) -> Meeting | None: ...
    def terms(self, max_restarts: int = 0) -> Terms: ...
    def get_run_id(self) -> str: ...
