"""Entries folded per second, on one core, in a job with few ids and in one that has seen many.

Nodes come and go, as on preemptible hosts: one joins, a round is formed with it, another is lost, and a round is formed
without it. With *few* ids the nodes that go come back. With *many* ids every node that comes is new. Both are measured
in turn, in the same run, after the job has seen as many ids as asked for. A figure that falls with the number of ids
means that the job's state grows. The size of the state is printed as well, as the text that `freeze` makes.

    python benchmarks/fold.py [--ids 10000] [--members 4] [--entries 20000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from reknit.core.job.entries import Admit, Entry, Joined, Lost, Node, NodeId, Opened, RestartPolicy, Terms
from reknit.core.job.fold import fold
from reknit.core.job.job import Job
from reknit.core.text.snapshot import freeze

GOAL = 35_000


class Comings:
    """The entries of a job whose nodes come and go. `ids`: the number of names that the nodes have in turn."""

    def __init__(self, members: int, ids: int) -> None:
        terms = Terms(min_nodes=1, max_nodes=members + 1, restarts=RestartPolicy(max_unspent=10**9))
        self.job = fold(Job(), Opened(terms, "benchmark"))
        self.seen = 0
        self._ids = ids
        for _ in range(members + 1):
            self.job = fold(self.job, self._coming(0))

    def entries(self) -> Iterator[Entry]:
        """For ever. Each must be folded before the next is asked for."""
        while True:
            nodes = list(self.job.live)
            first, last = self.job.live[nodes[0]].node, self.job.live[nodes[-1]].node
            yield Lost(first, by=last)
            yield from self._back()
            yield self._coming(self.job.round + 1)
            yield Admit(self.job.round + 1)
            yield from self._back()

    def _back(self) -> Iterator[Joined]:
        for joined in list(self.job.live.values()):
            if self.job.is_expected(joined.node):
                yield Joined(joined.node, joined.nonce, self.job.round, joined.address, joined.port)

    def _coming(self, round_: int) -> Joined:
        node_id = NodeId(f"gpu-pool-7f9c-{self.seen % self._ids:06d}.europe-west4-a")
        self.seen += 1
        seen = self.job.highest_incarnation(node_id)
        return Joined(Node(node_id, seen + 1), f"nonce-{self.seen}", round_, "10.0.0.1", 29500, seen=seen)


def rate(comings: Comings, count: int) -> float:
    spent_s = 0.0
    for _, entry in zip(range(count), comings.entries(), strict=False):
        began = time.process_time()
        comings.job = fold(comings.job, entry)
        spent_s += time.process_time() - began
    return count / spent_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=10_000)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--entries", type=int, default=20_000, help="entries per measurement")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    few = Comings(options.members, options.members + 2)
    many = Comings(options.members, 10**9)
    for entry in many.entries():
        many.job = fold(many.job, entry)
        if many.seen >= options.ids:
            break
    pairs = [(rate(few, options.entries), rate(many, options.entries)) for _ in range(options.repeats)]
    few_median, many_median = (sorted(column)[len(pairs) // 2] for column in zip(*pairs, strict=True))
    ratio = sorted(b / a for a, b in pairs)[len(pairs) // 2]
    verdict = "reached" if many_median >= GOAL else "not reached"
    print(f"{options.members + 2} ids: {few_median:,.0f} entries per second, state {len(freeze(few.job)):,} bytes")
    print(f"{many.seen} ids: {many_median:,.0f} entries per second, state {len(freeze(many.job)):,} bytes")
    print(f"ratio {ratio:.2f}; goal {GOAL:,} after {options.ids} ids: {verdict}")


if __name__ == "__main__":
    main()
