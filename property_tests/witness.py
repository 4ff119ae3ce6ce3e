"""A second implementation of rules 6 and 15: what one agent must do, by what it was told and what it has said.

The oracle knows what the journal means. A witness knows when its agent must beat, count, accuse, end, and kill its
workers. It is asked in the histories in which the oracle is asked. In the others a bug must be found by what it does to
the world.

1. A witness keeps events and commands with their times, and derives silences and waits from them anew.
2. It takes from the agent's state only what other checks look at: the job, the stage, the end, the workers, and which
   entries the agent wants said (`Agent.said`).
3. Its times are those of the agent's clock. It compares them exactly, because it computes them in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from attrs import define, evolve, field, frozen

from reknit.core.agent.agent import Agent, Stage
from reknit.core.agent.commands import SIGKILL, Append, Beat, Command, StopWorkers
from reknit.core.agent.events import Counters, EntriesRead, Event, JournalFailed
from reknit.core.agent.reasons import CutOff, DeclaredLost, JournalRefused, StoreLost
from reknit.core.agent.workers import StartWorkers
from reknit.core.job.entries import Entry, Joined, Lost, Node, Terms
from reknit.core.job.reasons import NodeGone, NodesAdmitted, Refusal

from .hosts import demand

RETURN_S = 12.0
"""The longest part of a pause that is forgiven (rule 6)."""


def is_left_behind(agent: Agent) -> bool:
    return isinstance(agent.end, JournalRefused) and agent.end.refusal is Refusal.LEFT_BEHIND


@frozen
class FreshRead:
    """A read of the counters in which the agent's own had moved."""

    at: float
    counts: Mapping[Node, int]
    """The counters of the nodes that the agent watched."""
    apart_s: float
    """Time since the fresh read before. 0: there was none."""
    spare_s: float
    """What is forgiven each node because of that time."""
    spares_until: float
    """Nobody whom the agent begins to watch in this read is lost for a silence that ends before this time."""


@define(eq=False)
class Witness:
    me: Node | None = None
    asked: dict[int, float] = field(factory=dict)
    """When the present incarnation sent each count first."""
    sent: int = 0
    acked: int = 0
    beat_at: float = -inf
    """When the present incarnation has beaten last."""
    watch: tuple[Node, ...] = ()
    """The nodes whose counters its last beat asked for."""
    reads: list[FreshRead] = field(factory=list)
    signs: dict[Node, tuple[int, int, float]] = field(factory=dict)
    """Signs of life between two fresh reads: how many fresh reads there were before, the counter, and when."""
    spares_until: float = -inf
    is_gap: bool = False
    read_at: float = inf
    """When the journal was read last. Infinite: never, so nothing is late."""
    is_out: bool = False
    """The store cannot be reached, and nothing was read since the agent was told so."""
    unread: dict[Entry, float] = field(factory=dict)
    """Entries that are wanted and were not read back, and when each was said first."""
    appended: dict[Entry, float] = field(factory=dict)
    """When each entry was said last."""
    failing_since: float | None = None
    """Since when round trips of some kind have failed without an end."""
    has_overslept: bool = False
    """Meanwhile the agent was suspended until its patience was over, and tries once more."""

    # ---- what it knows ----

    @property
    def proven_at(self) -> float:
        """When the newest count that was acknowledged was sent first. Infinitely long ago: none was."""
        return self.asked.get(self.acked, -inf)

    def is_entry_late(self, agent: Agent) -> bool:
        return bool(self.unread) and agent.at - min(self.unread.values()) > _late_s(agent)

    def is_read_late(self, agent: Agent) -> bool:
        return agent.at - self.read_at > _late_s(agent)

    def takes_part(self, agent: Agent) -> bool:
        is_waited_for = agent.job.is_live(agent.me)
        is_held = self.is_entry_late(agent) and is_waited_for
        return self.sent == self.acked and not (is_held or self.is_read_late(agent) or _is_stop_late(agent))

    def is_lost(self, node: Node, terms: Terms) -> bool:
        """The agent has counted enough silence of this node. It looks back from the last fresh read."""
        if not self.reads or node not in self.reads[-1].counts:
            return False
        silent_s = spared_s = 0.0
        for i in range(len(self.reads) - 1, -1, -1):
            read, before = self.reads[i], self.reads[i - 1].counts.get(node) if i else None
            sign_at, sign, seen_at = self.signs.get(node, (0, 0, 0.0))
            if sign_at == i + 1:
                silent_s -= min(seen_at - read.at, 2 * terms.beat_s)  # it was not silent until then
                break
            if before is None:
                spared_s = max(spared_s, read.spares_until - read.at)
                break
            if read.counts[node] != (sign if sign_at == i else before):
                spared_s = max(spared_s, read.spare_s)
                break
            silent_s += min(read.apart_s, 2 * terms.beat_s)
            spared_s = max(spared_s, read.spare_s)
        return silent_s >= terms.silence_s + spared_s

    def accused(self, agent: Agent, event: Event) -> set[Lost]:
        """Whom the agent must call lost in this step."""
        job, me = agent.job, agent.me
        if not isinstance(event, Counters) or not self.reads or not job.is_live(me):
            return set()
        lost = {n for n in self.reads[-1].counts if job.is_live(n) and self.is_lost(n, job.terms)}
        if self.reads[-1].at == agent.at:
            return {Lost(node, me) for node in lost}
        return {Lost(node, me) for node in lost if self.is_entry_late(agent)} & self.unread.keys()

    # ---- what happens ----

    def stepped(self, name: str, before: Agent, event: Event, agent: Agent, commands: Sequence[Command]) -> None:
        """Take in one step, and compare what the agent did with what it had to do."""
        is_unproven = self.acked > 0 and agent.at - self.proven_at > before.job.terms.silence_s
        self.is_gap = was_gap = self.is_gap or (is_unproven and _beats(before, before))
        self._wake(before, event)
        self._observe(before, event)
        self._patience(name, before, agent)
        # An incarnation that nobody knows of may take its own number again when a gap ends.
        is_over = agent.workers.alive or agent.is_departing or agent.end is not None or before.has_joined
        if agent.me != self.me or (was_gap and not self.is_gap and not is_over):
            self._begin(agent.me)
        self._fence(name, before, agent, commands)
        self._wait(name, before, agent)
        self._words(name, event, agent, commands)
        self._beats(name, agent, commands)

    def _begin(self, me: Node) -> None:
        """A new incarnation has sent nothing and said nothing."""
        self.me, self.sent, self.acked, self.beat_at, self.is_gap = me, 0, 0, -inf, False
        self.asked, self.watch, self.unread = {}, (), {}

    def _wake(self, before: Agent, event: Event) -> None:
        """Rule 15: once in an outage, an agent that ran much later than it wanted to has 12 s at least."""
        since, wanted_at, patience_s = self.failing_since, before.wakes_at, _patience_s(before)
        if since is None or wanted_at is None or self.has_overslept:
            return
        if event.at > before.at and event.at - wanted_at > 2 * before.job.terms.beat_s:
            begins_at = event.at + min(RETURN_S, patience_s) - patience_s
            if begins_at > since:
                self.failing_since, self.has_overslept = begins_at, True

    def _observe(self, before: Agent, event: Event) -> None:
        at = max(before.at, event.at)
        match event:
            case JournalFailed() if event.refusal is None or before.outcome is not None:
                self.is_out = True
            case EntriesRead():
                self.is_out, self.read_at = False, at
                if self.failing_since is not None and not self.reads:
                    self._spare(at + _spare_s(at - self.failing_since, before.job.terms), at)
                if not before.was_read:
                    self.failing_since, self.has_overslept = None, False  # the join timeout counts no more
                self.is_gap = self.is_gap and at - self.proven_at > before.job.terms.silence_s
                if event.life != before.life:  # another life: what was said and heard in the one before does not count
                    self.unread, self.appended, self.signs = {}, {}, {}
                    self.reads = [evolve(read, counts={}) for read in self.reads]
                self.unread = {entry: first for entry, first in self.unread.items() if entry not in event.entries}
            case Counters():
                self._count(event, at, before)

    def _count(self, event: Counters, at: float, agent: Agent) -> None:
        own, counts = event.counts.get(agent.me, 0), {node: event.counts.get(node, 0) for node in self.watch}
        if self.acked < own <= self.sent:
            apart_s = at - self.reads[-1].at if self.reads else 0.0
            spare_s = _spare_s(apart_s, agent.job.terms)
            self._spare(at + spare_s, at)
            self.reads.append(FreshRead(at, counts, apart_s, spare_s, self.spares_until))
            self.acked = own
        elif self.reads:
            for node, known in self.reads[-1].counts.items():
                sign_at, sign, _ = self.signs.get(node, (0, 0, 0.0))
                count = event.counts.get(node, 0)
                if count > (sign if sign_at == len(self.reads) else known):
                    self.signs[node] = len(self.reads), count, at

    def _spare(self, until: float, at: float) -> None:
        self.spares_until = max(self.spares_until, until, at)

    # ---- what the agent had to do ----

    def _patience(self, name: str, before: Agent, agent: Agent) -> None:
        """Rule 15: it ends when it has waited for the store timeout, and not earlier."""
        if isinstance(before.end, StoreLost):
            return
        is_over = self.failing_since is not None and agent.at >= self.failing_since + _patience_s(agent)
        must = is_over and self._is_failing(before, agent) and before.end is None and agent.outcome is None
        has = isinstance(agent.end, StoreLost)
        if agent.end is None or has:
            demand(must == has, "outage", f"{name} {'ends' if has else 'goes on'}, failing since {self.failing_since}")

    def _fence(self, name: str, before: Agent, agent: Agent, commands: Sequence[Command]) -> None:
        """Rules 13 and 15: workers start on a fresh beat, and are killed when the fence falls and not before."""
        terms, at = agent.job.terms, agent.at
        falls_at = inf if terms.fence_s is None or not self.acked else self.proven_at + terms.fence_s
        for command in commands:
            if isinstance(command, StartWorkers):
                is_fresh = not self.is_gap and at - self.proven_at <= terms.silence_s and at < falls_at
                demand(is_fresh, "fresh", f"{name} starts workers, last heard {at - self.proven_at:.2f} s ago")
            if isinstance(command, StopWorkers) and command.signal == SIGKILL:
                is_told = agent.leaving is not None and agent.leaving.signal == SIGKILL
                is_out = isinstance(command.why, DeclaredLost) and terms.fence_s is not None
                is_out = is_out or is_left_behind(agent)
                demand(is_told or is_out or at >= falls_at, "fence", f"{name} kills its workers before {falls_at:.2f}")
            if isinstance(command, StopWorkers) and isinstance(command.why, CutOff):
                demand(at >= falls_at, "fence", f"{name} stops its workers for a fence that falls at {falls_at:.2f}")
            if isinstance(command, StopWorkers) and isinstance(command.why, NodeGone | NodesAdmitted):
                node = agent.workers.node
                is_first = before.workers.stopping is None  # a shorter grace keeps the reason
                is_gone = is_first and node is not None and agent.job.is_gone(node)
                demand(not is_gone, "fence", f"{name} stops its workers for {command.why}, though {node} is gone")
        if not agent.workers.alive or not before.workers.alive or not _beats(agent, before):
            return
        is_killed = agent.workers.stopping is not None and agent.workers.kill_at <= at
        demand(at < falls_at or is_killed, "fence", f"{name} does not kill its workers, though its fence has fallen")
        wakes_at = inf if agent.wakes_at is None else agent.wakes_at
        demand(at >= falls_at or wakes_at <= falls_at, "fence", f"{name} sleeps over its fence")

    def _is_failing(self, before: Agent, agent: Agent) -> bool:
        is_late = agent.me == self.me and self.is_entry_late(agent)  # a new incarnation wants other entries said
        is_failing = self.is_out or not agent.was_read or is_late
        if not _beats(agent, before):
            return is_failing
        is_unheard = not self.reads or agent.at - self.reads[-1].at > agent.job.terms.silence_s
        return is_failing or self.is_read_late(agent) or (is_unheard and not _is_stop_late(agent))

    def _wait(self, name: str, before: Agent, agent: Agent) -> None:
        """Since when round trips of some kind fail, and that the agent is awake when it has waited long enough."""
        if not self._is_failing(before, agent):
            self.failing_since, self.has_overslept = None, False
        elif self.failing_since is None:
            self.failing_since = agent.at
        is_on = agent.end is None and agent.outcome is None and agent.result is None
        if self.failing_since is not None and is_on:
            ends_at = self.failing_since + _patience_s(agent)
            demand(
                agent.wakes_at is not None and agent.wakes_at <= ends_at, "wake", f"{name} sleeps over {ends_at:.2f}"
            )

    def _words(self, name: str, event: Event, agent: Agent, commands: Sequence[Command]) -> None:
        """Rule 6: whom it accuses, and which entries it still misses in the journal."""
        new = [command.entry for command in commands if isinstance(command, Append)]
        if not agent.was_read or (self.is_gap and not self.is_entry_late(agent)):
            demand(not new, "fresh", f"{name} says {new} in a gap")
            return
        accused = self.accused(agent, event)
        accused = accused & self.unread.keys() if self.is_gap else accused
        others = {entry for entry in new if isinstance(entry, Lost)} - accused
        demand(not others, "silence", f"{name} says {others}, and has not heard so")
        for lost in accused:
            is_due = agent.at >= self.appended.get(lost, -inf) + agent.spec.resay_s
            demand(lost in new or not is_due, "silence", f"{name} does not say {lost}")
        self.appended |= dict.fromkeys(new, agent.at)
        terms = agent.job.terms
        wanted = [
            entry
            for entry in (*self.unread, *new)
            if entry in agent.said
            or (isinstance(entry, Lost) and agent.job.is_live(entry.node) and self.is_lost(entry.node, terms))
        ]
        old = {entry: at for entry, at in self.unread.items() if isinstance(entry, Joined)}
        first = min(old.values(), default=agent.at)
        begun = self.unread | {entry: first for entry in new if isinstance(entry, Joined) and entry not in self.unread}
        self.unread = {entry: begun.get(entry, agent.at) for entry in wanted}
        if not any(
            isinstance(entry, Joined) for entry in new
        ):  # it will join another round, and has not joined this one
            self.unread |= {entry: at for entry, at in old.items() if not agent.job.is_live(entry.node)}

    def _beats(self, name: str, agent: Agent, commands: Sequence[Command]) -> None:
        """Rule 6: it beats once per interval, and counts if it takes part."""
        beat = next((command for command in commands if isinstance(command, Beat)), None)
        due_at = self.beat_at + agent.job.terms.beat_s
        is_due = _beats(agent, agent) and agent.at >= due_at
        demand(is_due == (beat is not None), "beat", f"{name} beats: {beat}, which is due at {due_at:.2f}")
        if beat is not None:
            count = self.sent + self.takes_part(agent)
            demand(beat.count == count, "beat", f"{name} beats with count {beat.count}, not {count}")
            self.asked.setdefault(count, agent.at)
            self.sent, self.beat_at, self.watch = count, agent.at, beat.watch
        if _beats(agent, agent) and agent.result is None:
            due_at = self.beat_at + agent.job.terms.beat_s
            ok = agent.wakes_at is not None and agent.wakes_at <= due_at
            demand(ok, "wake", f"{name} sleeps over its next beat at {due_at:.2f}")


def _late_s(agent: Agent) -> float:
    """Rule 6: three silence limits, 3 s, and 20 ms for each live node."""
    return 3 * agent.job.terms.silence_s + 3.0 + 0.02 * len(agent.job.live)


def _spare_s(apart_s: float, terms: Terms) -> float:
    """Rule 6: a pause, but at most 12 s, and two beats. Two beats or less are no pause."""
    two_s = 2 * terms.beat_s
    return min(apart_s, RETURN_S) + two_s if apart_s > two_s else 0.0


def _patience_s(agent: Agent) -> float:
    return agent.spec.store_timeout_s if agent.was_read else agent.spec.terms.join_timeout_s


def _is_stop_late(agent: Agent) -> bool:
    """Rule 6: 10 s after the time of SIGKILL nothing was reported of workers that are to stop."""
    workers = agent.workers
    return workers.alive and workers.stopping is not None and agent.at > workers.kill_at + 10.0


def _beats(agent: Agent, before: Agent) -> bool:
    """It has said `Joined`, or comes back and wants to, or serves others. `before`: the agent before this step, to ask
    about the time before the step's entries were said. Otherwise the agent itself."""
    is_new = before.stage is not Stage.JOINING or before.me != agent.me
    has_joined = agent.stage is Stage.LIVE or (agent.stage is Stage.JOINING and not is_new)
    return has_joined or agent.is_renewed or (agent.end is not None and agent.spec.hosts_journal)
