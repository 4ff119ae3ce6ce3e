"""How often the nodes of real jobs have failed, and how: from the traces of their agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from attrs import frozen

from reknit.core.job.reasons import Departure, NodeGone, RoundEnd, WorkerFailed
from reknit.core.job.workers import NoProgress
from reknit.core.text.story import Story

from .playing import DAY_S


@frozen
class Recorded:
    """What traces show of failures."""

    node_days: float
    """In rounds: the members of each round, for as long as it lasted."""
    kinds: Counter[str]
    """How many rounds were ended by each kind of failure: worker, hang, node, leave."""
    nodes: int
    """The members of the largest round."""
    nproc_per_node: int

    def values(self) -> dict[str, object]:
        """The same as values of a `SimulatedCluster`. `ValueError`: too little was recorded."""
        if self.node_days < _LEAST_DAYS:
            raise ValueError(
                f"{self.node_days:.2g} node-days were recorded; at least {_LEAST_DAYS:g} are needed to count failures"
            )
        count = sum(self.kinds.values())
        weights = {kind: self.kinds[kind] / max(1, count) for kind in ("worker", "hang", "node", "leave")}
        found: dict[str, object] = {"nodes": self.nodes, "nproc_per_node": self.nproc_per_node}
        found["failures"] = 1000 * count / self.node_days
        return {**found, **weights, "network": 0.0} if count else found

    def line(self) -> str:
        """For people."""
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items())) or "no failures"
        return f"recorded: {told} in {self.node_days:.3g} node-days, up to {self.nodes} nodes"


_LEAST_DAYS = 0.01


def recorded(stories: Iterable[Story]) -> Recorded:
    """`stories`: of runs, each merged over its nodes."""
    node_days, kinds, nodes, workers = 0.0, Counter[str](), 0, 1
    for story in stories:
        rounds = [round for round in story.rounds if round.sealed_at is not None and round.members]
        begins = [round.sealed_at or 0.0 for round in rounds]
        # A trace may not show how a round has ended.
        ends = [*begins, max((node.ended for node in story.nodes), default=0.0)][1:]
        for round, began, latest in zip(rounds, begins, ends, strict=True):
            node_days += len(round.members) * max(0.0, min(round.ended_at or latest, latest) - began) / DAY_S
            if len(round.members) >= nodes:
                nodes, workers = len(round.members), max(1, round.workers // len(round.members))
            if kind := _kind(round.why):
                kinds[kind] += 1
    return Recorded(node_days, kinds, nodes, workers)


def _kind(why: RoundEnd | None) -> str:
    """Empty: no failure ended the round."""
    match why:
        case WorkerFailed(failure=failure):
            return "hang" if isinstance(failure.cause, NoProgress) else "worker"
        case NodeGone(how=Departure.LEFT | Departure.LEAVING):
            return "leave"
        case NodeGone():
            return "node"
        case _:
            return ""
