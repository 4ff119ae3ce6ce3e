"""A module that says in which process it was imported."""

from __future__ import annotations

import os

IMPORTED_BY = os.getpid()


def imported_by() -> int:
    """The same in each worker that was forked from one process that has imported this module."""
    return IMPORTED_BY
