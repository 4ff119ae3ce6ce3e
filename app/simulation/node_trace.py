"""The trace of one simulated agent, as a real agent writes it: `reknit explain`, `timeline` and `replay` read it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO

from attrs import evolve

from reknit.adapters.observe.trace import agent_line, step_line
from reknit.adapters.observe.trace_folder import is_quiet, owner_line
from reknit.adapters.simulated.crew import Crew
from reknit.app.version import __version__
from reknit.core.agent.agent import Agent
from reknit.core.agent.alike import as_other, event_as_other
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event, Started
from reknit.core.agent.step import step
from reknit.core.job.entries import Entry, Node, NodeId
from reknit.core.job.job import Job

BEGINS_AT = 1767225600.0
"""The first second of 2026, UTC: when a simulated job begins. Seconds since 1970."""


class NodeTrace:
    """An onlooker of a fleet. Each process of the node's agent gets a folder of its own. Close it at the end."""

    def __init__(self, folder: str, node: NodeId) -> None:
        """`folder`: where the folders are made. Raises `OSError`."""
        self._folder, self._node = folder, node
        self._lives = 0
        self._file: IO[str] | None = None
        self._last: Agent | None = None
        """The agent after the last step that is written."""
        os.makedirs(folder, exist_ok=True)

    def landed(self, at: float, before: Job, entries: Sequence[Entry], job: Job) -> None:
        """Implements `Onlooker`."""

    def stepped(self, at: float, crew: Crew, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        """Implements `Onlooker`. A step that is made in the name of the node is the node's own."""
        own = crew.owns.get(self._node)
        if own is None:
            return
        if isinstance(event, Started):
            self._begin(at)
        if self._file is None or (self._last is not None and is_quiet(before, event, crew.agent, commands)):
            return
        was = evolve(own, me=Node(own.me.id, own.me.incarnation - crew.agent.me.incarnation + before.me.incarnation))
        mine, happened = as_other(before, was), event_as_other(event, before, was)
        made = step(mine, happened)
        if mine != self._last:
            self._file.write(agent_line(mine, is_quiet=True))
        self._file.write(step_line(BEGINS_AT + at, mine, happened, made.agent, made.commands))
        self._last = made.agent

    def _begin(self, at: float) -> None:
        self.close(at)
        path = os.path.join(self._folder, f"{self._node}-{self._lives}")
        self._lives += 1
        os.makedirs(path, exist_ok=True)
        self._file = open(os.path.join(path, "000000.jsonl"), "w")  # noqa: SIM115  # `close` closes it
        nobody = 0, 0
        line = owner_line("simulated", self._node, nobody, "simulated", __version__, (), BEGINS_AT + at)
        self._file.write(line)

    def close(self, at: float) -> None:
        """The agent was there until then. May be repeated."""
        if self._file is not None:
            self._file.close()
            os.utime(self._file.name, (BEGINS_AT + at, BEGINS_AT + at))
        self._file = self._last = None
