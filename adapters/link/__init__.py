"""The link between the agent's loop, which never waits, and a journal, which waits."""

from __future__ import annotations

from .lanes import ThreadedLink
from .machine import LOOK_S

__all__ = ["LOOK_S", "ThreadedLink"]
