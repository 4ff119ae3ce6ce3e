"""Shells as processes of a context, and what a context leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from reknit.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from reknit.elastic.multiprocessing.api import RunProcsResult
from tests.support.leaks import nothing_left

SH = "/bin/sh"
WAITS = 'echo $$ >> "$0"; sleep 1000 & wait'
"""A script with a child. It writes its pid into the file that is its argument."""
IGNORES = f"trap '' TERM; {WAITS}"
"""As `WAITS`, but script and child ignore SIGTERM."""


@contextmanager
def leaving_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context after which no thread, descriptor, child, handler, variable or temporary file is left. `folder`: in
    which the folder for temporary files is made."""
    scratch = folder / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with nothing_left(scratch):
        yield
        gc.collect()


def shell(*scripts: str, args: tuple[object, ...] = (), **more: Any) -> PContext:
    """One shell for each script."""
    ranks = range(len(scripts))
    given: dict[str, Any] = {"envs": {rank: {} for rank in ranks}, "logs_specs": DefaultLogsSpecs(), **more}
    return start_processes("trainer", SH, {rank: ("-c", scripts[rank], *args) for rank in ranks}, **given)


def result_of(context: PContext) -> RunProcsResult:
    """Wait for the end, and close."""
    try:
        result = context.wait(timeout=240, period=0.1)
    finally:
        context.close()
    assert result is not None
    return result
