"""The logger of contexts and of log folders, for the files that `api.py` imports.

As in torch, its name is that of `api`, where programs patch it. So `api` says here how it is found there.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import Logger, getLogger

NAME = "reknit.elastic.multiprocessing.api"


def logger() -> Logger:
    """The logger for one message. The next message may have another one."""
    return _find()


def look_up(find: Callable[[], Logger]) -> None:
    """From now on, let `find` say which logger is used."""
    global _find
    _find = find


def _find() -> Logger:
    return getLogger(NAME)
