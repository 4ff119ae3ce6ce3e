"""The simulated cluster with its checks, which look at everything after every step. A violation carries the story."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from attrs import evolve

from reknit.adapters.simulated import world
from reknit.core.agent import timers
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Beat, Command
from reknit.core.agent.events import Event
from reknit.core.job.entries import Entry, Joined
from reknit.core.job.founding import Life, Origin
from reknit.core.job.job import Job, Outcome

from . import as_text, checks, later, prompt, stretches
from .hosts import Proc, Traced
from .oracle import Oracle
from .script import NAMES, Setup, node_id

MOST_PROCS = 9


class World(world.World):
    """A simulated cluster that is its own watcher."""

    procs: list[Proc]  # type: ignore[assignment]  # all of them are started here

    def __init__(self, setup: Setup, *, oracle: Oracle | None = None) -> None:
        super().__init__(seed=setup.seed, troubles=setup.weather, echo=setup.echo)
        self.watchers.append(self)
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
        proc = Proc(name, host, spec, 1000.0 * (number + 1), number, twin, rate=rate, read_at=self.now)
        self.begin(proc)
        if setup.text:
            ports = proc.loop.ports
            proc.loop.ports = evolve(ports, link=as_text.Link(ports.link))

    def read_by(self, proc: Proc) -> Job:
        """The fold of what this agent was told."""
        known = self.lives.get(proc.link.reading.life)
        return Job() if known is None else known[2][proc.cursor]

    def kill(self, proc: Proc) -> None:  # type: ignore[override]  # all of them are started here
        super().kill(proc)
        prompt.is_noticed(self, proc)

    def happen(self, proc: Proc, make: Callable[[float], Event]) -> None:  # type: ignore[override]  # as in `kill`
        super().happen(proc, (lambda at: as_text.read(make(at))) if self.setup.text else make)

    def stepped(self, proc: Proc, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        self.steps += 1
        if self.setup.text:
            as_text.same_commands(commands)
        proc.trace.append(Traced(self.now, event, tuple(commands), timers.next_wake(proc.agent)))
        self.story.append((self.now, proc.name, event, commands))
        checks.after_step(self, proc, before, event, commands)
        if not self.steps % 8:
            stretches.are_computed(proc.name, proc.agent)
        if self.oracle is not None:
            has_said = any(not isinstance(command, Beat) for command in commands)
            if not self.steps % (8 if has_said else 64):
                later.goes_on_alike(proc.name, before, event, proc.agent, commands)

    def landed(self, entry: Entry, before: Job) -> None:
        self.story.append((self.now, "journal", entry, ()))
        checks.after_landing(self, entry, before)

    def founded(self, origin: Origin) -> None:
        self.story.append((self.now, "journal", f"goes on as {origin.life} from position {origin.position}", ()))
        checks.after_founding(self, origin)
