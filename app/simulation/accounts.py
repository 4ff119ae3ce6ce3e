"""Where the time of a simulated job goes.

A round is sealed, its workers start, train, and stop. What was trained since the last checkpoint is lost if the round
ends. Every second of the job has one cause:

    training           it has reached a checkpoint, or the end
    lost steps         trained, and trained again later
    checkpoints        written
    detecting          something was broken, and the job did not know it
    stopping           until the last worker was gone
    waiting for nodes  too few had joined
    meeting            until the round was sealed
    starting           until all workers train
    over               the job had ended before its time
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from attrs import define, field, frozen

from reknit.adapters.simulated.crew import Crew
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.core.agent.worker_words import WorkersStarted, WorkersStopped
from reknit.core.job.entries import Entry
from reknit.core.job.job import Closed, Gathering, Job, Running, Unopened, has_enough

CAUSES = (
    "training",
    "lost steps",
    "checkpoints",
    "detecting",
    "stopping",
    "waiting for nodes",
    "meeting",
    "starting",
    "over",
)


@frozen
class SimulatedRun:
    """What has become of one simulated job. Times in seconds."""

    seed: int
    lasted_s: float
    """The time that was simulated."""
    causes: dict[str, float]
    """Where it went."""
    recoveries: tuple[float, ...]
    """From each break in training until all workers trained again."""
    rounds: int
    restarts: int
    """That failures have cost."""
    most_out: int
    """Members and spares that were out at one time, at most."""
    outcome: str
    """Why the job has ended before its time. Empty: it has not."""
    steps: int
    """Steps that were made."""
    shared: int
    """Steps that agents would have made, beats aside, if none had stepped for others."""

    @property
    def effective(self) -> float:
        """The part of the time that was training."""
        return self.causes["training"] / self.lasted_s


@define(eq=False)
class Accounts:
    """Keeps the accounts of one job. A watcher of its fleet."""

    checkpoint_s: float
    """At least so much training is between two checkpoints."""
    checkpoint_cost_s: float
    step_s: float = 0.0
    causes: dict[str, float] = field(factory=lambda: dict.fromkeys(CAUSES, 0.0))
    recoveries: list[float] = field(factory=list)
    rounds: int = 0
    _since: float = 0.0
    """Up to here the time has a cause."""
    _round: int = -1
    """The round that starts or trains. -1: none does."""
    _sealed_last: tuple[int, int] = (-1, -1)
    """Epoch and number of the last round that was sealed."""
    _up: int = 0
    """Nodes whose workers run."""
    _members: int = 0
    _trains_from: float | None = None
    _broken_at: float | None = None
    """When the training that runs was broken. None: it was not."""
    _waits_since: float | None = None
    """When the last break in training was. None: there was none."""
    _stopped_at: float = 0.0
    _short_since: float | None = 0.0
    """Since when there are too few nodes. None: there are enough."""
    _short_s: float = 0.0

    def break_down(self, at: float) -> None:
        """Something breaks that ends the training of the round."""
        if self._trains_from is not None and self._broken_at is None:
            self._broken_at = at

    @property
    def trains(self) -> bool:
        return self._trains_from is not None and self._broken_at is None

    @property
    def round(self) -> int:
        """The round that starts or trains. -1: none does."""
        return self._round

    def since_step_s(self, at: float) -> float:
        """How long ago the last step had ended at this time, or training had begun. A checkpoint is no progress."""
        if not self.step_s:
            return 0.0
        interval_s = self.interval_s
        whole, trained_s = divmod(at - self._since, interval_s + self.checkpoint_cost_s)
        if trained_s >= interval_s:
            return trained_s - interval_s
        return trained_s + self.checkpoint_cost_s * (whole > 0) if trained_s < self.step_s else trained_s % self.step_s

    @property
    def interval_s(self) -> float:
        """Training between two checkpoints. A checkpoint comes after a whole step."""
        # Not one step more because 2.1 / 0.3 is a little more than 7.
        return ceil(self.checkpoint_s / self.step_s - 1e-9) * self.step_s if self.step_s else self.checkpoint_s

    def landed(self, at: float, before: Job, entries: Sequence[Entry], job: Job) -> None:
        phase = job.phase
        if self._round >= 0 and not (isinstance(phase, Running) and phase.round == self._round):
            self._ended(at)
        is_short = isinstance(phase, Unopened) or (isinstance(phase, Gathering) and not has_enough(job))
        if is_short and self._short_since is None:
            self._short_since = at
        elif not is_short and self._short_since is not None:
            self._short_s, self._short_since = self._short_s + at - self._short_since, None
        if isinstance(phase, Running) and self._round < 0 and (job.epoch, job.round) != self._sealed_last:
            self._sealed(at, job)
        elif isinstance(phase, Closed):
            self._round = -1

    def stepped(self, at: float, crew: Crew, before: Agent, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, WorkersStopped):
            self._stopped_at = at
        elif isinstance(event, WorkersStarted) and event.round == self._round and crew.agent.workers.up_at == at:
            self._up += len(crew.owns)
            if self._up == self._members and self._trains_from is None:
                self._spend("starting", at)
                self._trains_from = at
                if self._waits_since is not None:
                    self.recoveries.append(at - self._waits_since)

    def _spend(self, cause: str, until: float) -> None:
        self.causes[cause] += max(0.0, until - self._since)
        self._since = max(self._since, until)

    def _sealed(self, at: float, job: Job) -> None:
        self._spend("stopping", min(at, max(self._stopped_at, self._since)))
        waited_s, self._short_s = min(self._short_s, at - self._since), 0.0
        self._spend("waiting for nodes", self._since + waited_s)
        self._spend("meeting", at)
        self._round, self._up, self._members = job.round, 0, len(job.members)
        self._sealed_last = job.epoch, job.round
        self.rounds += 1

    def _ended(self, at: float) -> None:
        """The round is over for all agents."""
        self._round = -1
        if self._trains_from is None:
            self._spend("starting", at)
        else:
            broken_at = at if self._broken_at is None else self._broken_at
            self._trained(broken_at, is_lost=True)
            self._waits_since = broken_at
            self._spend("detecting", at)
        self._trains_from = self._broken_at = None
        self._stopped_at = at

    def _trained(self, until: float, *, is_lost: bool) -> None:
        trained_s = until - self._since
        interval_s = self.interval_s
        whole = int(trained_s // (interval_s + self.checkpoint_cost_s))
        rest_s = trained_s - whole * (interval_s + self.checkpoint_cost_s)
        self.causes["training"] += whole * interval_s
        self.causes["checkpoints"] += whole * self.checkpoint_cost_s
        self.causes["lost steps" if is_lost else "training"] += rest_s
        self._since = until

    def emptied(self, at: float) -> None:
        """No agent is left. Some may come later."""
        self.break_down(at)
        if self._round >= 0:
            self._ended(at)
        if self._short_since is None:
            self._short_since = at

    def close(self, at: float, *, over_at: float | None = None, is_over: bool = False) -> None:
        """The simulation ends. `over_at`: when the last agent had ended. None: there are some, or the journal tells how
        the job has ended. `is_over`: the job has ended before its time."""
        if over_at is not None:
            self.emptied(over_at)
        if is_over:
            self._spend("over", at)
        elif self._trains_from is not None:
            self._trained(at if self._broken_at is None else self._broken_at, is_lost=False)
            self._spend("detecting", at)
        elif self._round >= 0:
            self._spend("starting", at)
        else:
            self._spend("waiting for nodes" if self._short_since is not None else "meeting", at)
