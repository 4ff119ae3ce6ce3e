"""The link between the agent's loop, which never waits, and a journal, which waits."""

from __future__ import annotations

from .machine import LOOK_S
from .threads import ThreadedLink

__all__ = ["LOOK_S", "ThreadedLink"]
