"""The simulated cluster with its checks, which look at everything after every step. A violation carries the story."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attrs import evolve

from reknit.adapters.simulated import world
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.core.job.entries import Entry, Joined
from reknit.core.job.job import Job

from . import checks
from .hosts import Proc, Traced
from .oracle import Oracle
from .script import NAMES, Setup, node_id

MOST_PROCS = 12


class World(world.World):
    """A simulated cluster that is its own watcher."""

    procs: list[Proc]  # type: ignore[assignment]  # all of them are started here

    def __init__(self, setup: Setup, *, oracle: Oracle | None = None) -> None:
        super().__init__(seed=setup.seed, troubles=setup.weather, echo=setup.echo)
        self.watchers.append(self)
        self.setup = setup
        self.oracle = oracle
        """Asked after every entry, if there is one."""
        self.sealed: dict[tuple[int, int], tuple[Joined, ...]] = {}
        """Members of every round, by epoch and round."""
        self.entries: Counter[tuple[int, int]] = Counter()
        """How many entries have landed, by epoch and round."""
        self.steps = 0
        self.story: list[tuple[float, str, Event | Entry | str, Sequence[Command]]] = []

    def start(self, host: int, *, twin: bool = False, other: bool = False) -> None:
        """An agent is started on this host; `other`: with other terms than the job's."""
        setup, number = self.setup, len(self.procs)
        if number >= MOST_PROCS:
            return
        spec = Spec(
            node_id=node_id(host),
            address=f"{NAMES[host]}{number}.net",
            terms=evolve(setup.terms, max_nodes=setup.terms.max_nodes + 1) if other else setup.terms,
            role=setup.roles[host % len(setup.roles)],
            local_world_size=setup.sizes[host % len(setup.sizes)],
            rank_hint=setup.hints[host] if host < len(setup.hints) else None,
            hosts_journal=setup.host and number == 0,
            grace_s=7.0,
            store_timeout_s=30.0,
        )
        name = NAMES[host] + str(sum(p.host == host for p in self.procs) or "")
        self.begin(Proc(name, host, spec, 1000.0 * (number + 1), number, twin, read_at=self.now))

    def stepped(self, proc: Proc, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        self.steps += 1
        proc.trace.append(Traced(self.now, event, tuple(commands), proc.agent.wakes_at))
        self.story.append((self.now, proc.name, event, commands))
        checks.after_step(self, proc, before, event, commands)

    def landed(self, entry: Entry, before: Job) -> None:
        self.story.append((self.now, "journal", entry, ()))
        checks.after_landing(self, entry, before)
