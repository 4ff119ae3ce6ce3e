"""The simulated cluster, with what the checks remember of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from attrs import evolve

from reknit.adapters.simulated import world
from reknit.core.agent.agent import Spec
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.core.job.entries import Entry, Joined
from reknit.core.job.founding import Life
from reknit.core.job.job import Job, Outcome

from . import as_text
from .checked_proc import CheckedProc
from .checks.oracle import Oracle
from .script import NAMES, Setup, node_id

MOST_PROCS = 9


class CheckedWorld(world.World):
    """A simulated cluster as `setup` says. `checks.watcher.Checks` is what looks at it."""

    procs: list[CheckedProc]  # type: ignore[assignment]  # all of them are started here

    def __init__(self, setup: Setup, *, oracle: Oracle | None = None) -> None:
        super().__init__(seed=setup.seed, troubles=setup.weather, echo=setup.echo)
        self.setup = setup
        self.oracle = oracle
        """Asked after every entry, if there is one."""
        self.sealed: dict[tuple[Life, int, int], tuple[Joined, ...]] = {}
        """Members of every round, by life of the journal, epoch and round."""
        self.steady_round = 0
        """The last round that was said to be steady. 0: none was in this epoch."""
        self.entries: Counter[tuple[int, int]] = Counter()
        """How many entries have landed, by epoch and round."""
        self.outcomes: dict[int, Outcome] = {}
        """How each epoch has ended."""
        self.ended_by: Entry | None = None
        """The entry that ended the last round."""
        self.was_troubled = False
        """Something has happened that may keep a dead node from being noticed soon."""
        self.steps = 0
        self.story: list[tuple[float, str, Event | Entry | str, Sequence[Command]]] = []

    def start(self, host: int, *, twin: bool = False, other: bool = False) -> None:
        """An agent is started on this host; `other`: with other terms than the job's."""
        setup, number = self.setup, len(self.procs)
        if number >= MOST_PROCS + setup.nodes:
            return
        kind = host + setup.changing * sum(p.host == host for p in self.procs)
        spec = Spec(
            node_id=node_id(host),
            address=f"{NAMES[host]}{number}.net",
            terms=evolve(setup.terms, max_nodes=setup.terms.max_nodes + 1) if other else setup.terms,
            role=setup.roles[kind % len(setup.roles)],
            local_world_size=setup.sizes[kind % len(setup.sizes)],
            rank_hint=setup.hints[host] if host < len(setup.hints) else None,
            hosts_journal=setup.host and number == 0,
            grace_s=float(setup.graces[kind % len(setup.graces)]),
            store_timeout_s=30.0,
        )
        name = NAMES[host] + str(sum(p.host == host for p in self.procs) or "")
        rate = setup.rates[host % len(setup.rates)] / 100
        proc = CheckedProc(name, host, spec, 1000.0 * (number + 1), number, twin, rate=rate, read_at=self.now)
        self.begin(proc)
        if setup.text:
            ports = proc.loop.ports
            proc.loop.ports = evolve(ports, link=as_text.TextLink(ports.link))

    def proc_of(self, host: int, *, twin: bool = False) -> CheckedProc | None:
        return cast(CheckedProc | None, super().proc_of(host, twin=twin))

    def read_by(self, proc: CheckedProc) -> Job:
        """The fold of what this agent was told."""
        known = self.lives.get(proc.link.reading.life)
        return Job() if known is None else known[2][proc.cursor]

    def happen(self, proc: CheckedProc, make: Callable[[float], Event]) -> None:  # type: ignore[override]  # as `procs`
        super().happen(proc, (lambda at: as_text.read(make(at))) if self.setup.text else make)
