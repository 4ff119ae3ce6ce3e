"""A second implementation of what the journal means, as simple as possible.

It is written from the rules of the protocol, and not from the fold. It keeps everything in plain sets and changes them
in place. Members, restarts and verdicts must agree with the fold.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from reknit.core.job.entries import (
    Aborted,
    Admission,
    Admit,
    Entry,
    Failed,
    GaveUp,
    Joined,
    LastCall,
    Leaving,
    Left,
    Lost,
    Node,
    Opened,
    Steady,
    Succeeded,
    Terms,
)


class Oracle:
    def __init__(self, remembers: int = 1024) -> None:
        """`remembers`: how many nodes that are gone every job remembers."""
        self.remembers = remembers
        self.phase = "unopened"
        self.epoch = -1
        self.terms = Terms()
        self.journal = ""
        self.verdicts: dict[int, str] = {}
        self.sealed: dict[tuple[int, int], list[Joined]] = {}
        self.live: dict[str, Joined] = {}
        self.departed: list[Node] = []
        """The nodes that have gone last, whose ids are not live. Each id once."""
        self.floor = -1
        """Of an id that is neither live nor departed, these incarnations are gone."""
        self._new_epoch()

    def _new_epoch(self) -> None:
        self.round = 0
        self.last_sealed = -1
        self.expected: set[Node] = set()
        self.members: set[Node] = set()
        self.leaving: set[Node] = set()
        self.done: set[Node] = set()
        self.reports: list[Failed] = []
        self.seats: list[str] = []
        self.first_size = self.largest = 0
        self.by_failure = self.excused = False
        self.judged = self.short = True
        self.spent = self.unspent = 0

    def feed(self, entry: Entry) -> None:
        if isinstance(entry, Opened):
            self._open(entry)
        elif getattr(entry, "epoch", self.epoch) != self.epoch:
            pass
        elif self.phase in ("gathering", "running") or (self.phase == "closed" and isinstance(entry, Left | Lost)):
            getattr(self, f"_{type(entry).__name__.lower()}")(entry)
            self._conclude()

    def _open(self, entry: Opened) -> None:
        again = self.phase == "closed" and self.verdicts[self.epoch] != "succeeded"
        if (self.phase == "unopened" or again) and entry.epoch == self.epoch + 1:
            left, self.live = self.live, {}
            for joined in left.values():
                self.departed = [n for n in self.departed if n.id != joined.node.id] + [joined.node]
            self._forget()
            self.journal = self.journal or entry.journal
            self.epoch, self.terms, self.phase = entry.epoch, entry.terms, "gathering"
            self._new_epoch()

    def move(self) -> None:
        """The store was lost, and the journal goes on: everybody who has joined the next round joins it again."""
        if self.phase == "gathering":
            self.expected = {joined.node for joined in self.live.values()}
        elif self.phase == "running":
            for joined in [j for j in self.live.values() if j.node not in self.members]:
                self._go(joined.node)

    @property
    def failed(self) -> list[Node]:
        """Who has reported a failure of the last round, in the journal's order."""
        return [entry.node for entry in self.reports]

    def _bury(self, node: Node) -> None:
        self.departed = [n for n in self.departed if n.id != node.id] + [node]
        self._forget()

    def _forget(self) -> None:
        while len(self.departed) > max(self.remembers, self.largest):
            node = self.departed.pop(0)
            self.floor = max(self.floor, node.incarnation)
            if node.id in self.seats:
                self.seats.remove(node.id)

    def _enter(self, entry: Joined) -> None:
        round = self.round + (self.phase == "running")
        self.live[entry.node.id] = evolve(entry, round=min(entry.round, round))
        self.departed = [n for n in self.departed if n.id != entry.node.id]

    def top(self, node_id: str) -> int:
        """The highest incarnation of this id that the journal has shown."""
        if node_id in self.live:
            return self.live[node_id].node.incarnation
        return next((n.incarnation for n in self.departed if n.id == node_id), self.floor)

    def _in(self, node: Node) -> bool:
        return node.id in self.live and self.live[node.id].node == node

    def _works(self, node: Node) -> bool:
        return self.phase == "running" and node in self.members and node not in self.done

    def _joined(self, entry: Joined) -> None:
        node = entry.node
        if entry.local_world_size < 1:
            return
        known = self.live.get(node.id)
        if known is None:
            if self.top(node.id) <= entry.seen < node.incarnation:
                self._enter(entry)
        elif known.node.incarnation < node.incarnation:
            if known.nonce == entry.nonce or known.node.incarnation <= entry.seen < node.incarnation:
                self._go(known.node)
                self._enter(entry)
        elif known.node == node and known.nonce == entry.nonce:
            if self.phase == "gathering" and entry.round == self.round and node in self.expected:
                self.expected.discard(node)
                self.live[node.id] = entry

    def _go(self, node: Node) -> None:
        """A live node is gone for ever."""
        worked, owed = self._works(node), self.phase == "gathering" and node in self.expected
        known = self.live.pop(node.id)
        self._bury(node)
        self.leaving.discard(node)
        if worked:
            self._end(by_failure=False)
            self.excused = True
        elif owed:
            self.expected.discard(node)
            self.excused = self.excused or (node not in self.failed and self._still_owes(known))

    def _still_owes(self, known: Joined) -> bool:
        """A member that has not joined the gathered round. After a move others are expected as well."""
        return known.node in self.members and known.round < self.round

    def _end(self, by_failure: bool) -> None:
        self.phase = "gathering"
        self.round += 1
        self.expected = {n for n in self.members if self._in(n)}
        self.by_failure, self.excused, self.reports = by_failure, False, []
        self.judged = self.short = False

    def _lost(self, entry: Lost) -> None:
        if self._in(entry.by) and self._in(entry.node) and entry.by != entry.node:
            self._go(entry.node)

    def _left(self, entry: Left) -> None:
        known = self.live.get(entry.node.id)
        if known is not None and known.node == entry.node:
            self._go(entry.node)
        elif self.top(entry.node.id) < entry.node.incarnation and self.top(entry.node.id) <= entry.seen:
            if known is not None:
                self._go(known.node)  # the leaver came to replace it
            self._bury(entry.node)  # its `Joined` may still come

    def _leaving(self, entry: Leaving) -> None:
        node = entry.node
        if not self._in(node) or node in self.leaving:
            return
        self.leaving.add(node)
        if self._works(node):
            self._end(by_failure=False)
            self.excused = True
        elif self.phase == "gathering" and node in self.expected and node not in self.failed:
            self.excused = self.excused or self._still_owes(self.live[node.id])

    def _failed(self, entry: Failed) -> None:
        if not entry.failures or not self._in(entry.node):
            return
        if entry.round == self.round and self._works(entry.node):
            self._end(by_failure=True)
            self.reports = [entry]
        elif self.phase == "gathering" and entry.round == self.round - 1 and entry.node in self.expected:
            told = [report for report in self.reports if report.node == entry.node]
            if not told:
                self.reports.append(entry)
            elif len(told[0].failures) < len(entry.failures):
                ranks = [failure.rank for failure in told[0].failures]
                later = [failure for failure in entry.failures if failure.rank not in ranks]
                at = self.reports.index(told[0])
                self.reports[at] = Failed(entry.node, entry.round, told[0].failures + tuple(later))

    def _succeeded(self, entry: Succeeded) -> None:
        node = entry.node
        running = self.phase == "running" and entry.round == self.round
        late = self.phase == "gathering" and entry.round == self.round - 1 and node in self.expected
        late = late and node not in self.failed
        if self._in(node) and node in self.members and (running or late):
            self.done.add(node)
            if self.done == self.members:
                self._close("succeeded")

    def _aborted(self, _: Aborted) -> None:
        self._close("aborted")

    def _filler(self, _: Entry) -> None: ...

    def _free(self) -> list[Joined]:
        busy = self.leaving | (self.expected if self.phase == "gathering" else self.members)
        return [j for j in self.live.values() if j.node not in busy]

    def _cap(self) -> int:
        never = self.first_size and self.terms.admission is Admission.NEVER
        return min(self.first_size, self.terms.max_nodes) if never else self.terms.max_nodes

    def _admit(self, entry: Admit) -> None:
        if self.phase == "running" and entry.round == self.round + 1 and not self.done:
            if len(self.members) < self._cap() and self._free():
                self._end(by_failure=False)

    def _count(self) -> int:
        return sum(1 for j in self.live.values() if j.node not in self.leaving)

    def _is_enough(self) -> bool:
        return self._count() >= self.terms.min_nodes

    def _steady(self, entry: Steady) -> None:
        if self.phase == "running" and entry.round == self.round:
            self.unspent = 0
            if self.terms.restarts.renews:
                self.spent = 0

    def _gaveup(self, entry: GaveUp) -> None:
        if self.phase == "gathering" and entry.round == self.round and not self._is_enough():
            self._close("failed")

    def _lastcall(self, entry: LastCall) -> None:
        if self.phase == "gathering" and entry.round == self.round and not self.expected:
            if self._is_enough():
                self._seal()

    def _conclude(self) -> None:
        if self.phase != "gathering":
            return
        self.short = self.short or not self._is_enough()
        if self.expected:
            return
        if not self.judged:
            self.judged = True
            if self.by_failure and not self.excused:
                self.spent += 1
            else:
                self.unspent += 1
            if self.spent > self.terms.restarts.max_restarts or self.unspent > self.terms.restarts.max_unspent:
                self._close("failed")
                return
        if self._count() >= self._cap() or (not self.short and self._count() >= self.terms.min_nodes):
            self._seal()

    def _close(self, verdict: str) -> None:
        self.phase = "closed"
        self.verdicts[self.epoch] = verdict

    def _seal(self) -> None:
        free = self._free()
        old = [j for j in free if j.node in self.members]
        seated = [j for j in free if j not in old and j.node.id in self.seats]
        rest = [j for j in free if j not in old and j not in seated]
        chosen = (old + seated + rest)[: self._cap()]
        new = [j for j in chosen if j.node.id not in self.seats]
        if self.seats:
            self.seats += [j.node.id for j in new]
        else:
            self.seats = _by_hint(new)
            self.first_size = self.first_size or len(new)  # all seats may have been forgotten since the first round
        chosen.sort(key=lambda j: self.seats.index(j.node.id))
        self.members, self.done, self.phase = {j.node for j in chosen}, set(), "running"
        self.largest = max(self.largest, len(chosen))
        self.sealed[self.epoch, self.round] = chosen
        self.last_sealed = self.round


def _by_hint(new: list[Joined]) -> list[str]:
    """The first round's order: whoever wishes a free place first gets it, the others fill the holes in order."""
    places: list[str | None] = [None] * len(new)
    for joined in new:
        if joined.rank_hint is not None and 0 <= joined.rank_hint < len(new) and places[joined.rank_hint] is None:
            places[joined.rank_hint] = joined.node.id
    rest = iter([j.node.id for j in new if j.node.id not in places])
    return [place if place is not None else next(rest) for place in places]


def ranks(members: Sequence[Joined], node: Node) -> list[tuple[int, int, int]]:
    """(local rank, rank, role rank) of the workers of `node`: count everybody, one by one."""
    counted: dict[str, int] = {}
    found: list[tuple[int, int, int]] = []
    rank = 0
    for member in members:
        for local in range(member.local_world_size):
            if member.node == node:
                found.append((local, rank, counted.get(member.role, 0)))
            counted[member.role] = counted.get(member.role, 0) + 1
            rank += 1
    return found
