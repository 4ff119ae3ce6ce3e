"""Handlers of events, and packages that bring one."""

from __future__ import annotations

import json
import logging
import textwrap
import threading
from pathlib import Path
from typing import Any

from reknit.adapters.observe.destinations import GROUP
from tests.support.waiting import PATIENCE_S


class Kept(logging.Handler):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def told(self) -> list[tuple[str, str]]:
        """Source and state of each event."""
        return [(event["source"], event["metadata"]["state"]) for event in self.events()]


class Hung(Kept):
    """Does not come back before `come_back` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = threading.Event()
        self.come_back = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.hangs.set()
        self.come_back.wait(PATIENCE_S)
        super().emit(record)


class Failing(Kept):
    """Keeps what it gets, and fails each time."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        raise ValueError("no\nroom")


TO_A_FILE = """
import logging, os

class ToAFile(logging.Handler):
    def emit(self, record):
        with open(os.environ["EVENTS"], "a") as file:
            print(record.getMessage(), file=file)
"""
"""A module with a handler that writes to the file that the variable EVENTS names."""


def install(folder: Path, module: str, source: str, **points: str) -> None:
    """Put a package into `folder`, as pip leaves it. `points`: by the name of a handler, its entry point."""
    (folder / f"{module}.py").write_text(textwrap.dedent(source))
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    listed = "\n".join(f"{name} = {point}" for name, point in points.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{listed}\n")
