"""Stories of a few agents as transcripts, after etcd/raft's: commands, `----`, and everything that followed.

    REKNIT_REWRITE=1 pytest tests/core/agent/test_transcripts.py   writes what happens. Commit what you understand.

A block is one command per line (see `Verbs`), `----`, the output, an empty line. `#` begins a comment. In the output
`n0 << event` goes into the agent n0 and `n0 >> command` comes out of it; `at 4.2s` says when time has moved.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from attrs import evolve

from reknit.core.agent.agent import Spec
from reknit.core.agent.events import StopRequested
from reknit.core.job.entries import Aborted, Admission, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Job
from reknit.core.job.workers import WorkerFailure
from tests.support.cluster import Cluster
from tests.support.playbook import diff
from tests.support.short import short_entry, short_job

FOLDER = Path(__file__).parent / "transcripts"
TERMS = {"min": "min_nodes", "max": "max_nodes", "settle": "settle_s", "silence": "silence_s", "fence": "fence_s"}
TERMS |= {"last_call": "last_call_s", "join_timeout": "join_timeout_s"}
POLICY = {"restarts": "max_restarts", "unspent": "max_unspent", "backoff": "backoff_s"}
SPEC = {"grace": "grace_s", "store_timeout": "store_timeout_s"}


class Verbs:
    """What a transcript can do. A verb is a method; `key=value` words arrive as keywords."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.spec = Spec(NodeId("n"), "n")

    def run(self, line: str) -> None:
        verb, *words = line.split()
        options = dict(w.split("=", 1) for w in words if "=" in w)
        getattr(self, verb)(*(w for w in words if "=" not in w), **options)

    def agents(self, count: str, **options: str) -> None:
        """`agents 3 min=2 max=3 restarts=1`: n0, n1, n2, not started. The options hold for agents added later."""
        self.spec = self._spec(options)
        for i in range(int(count)):
            self.add(f"n{i}")

    def add(self, label: str, **options: str) -> None:
        """`add n3`: another agent, not started. `add twin id=n0`: with the stable id of another."""
        node_id = options.pop("id", label)
        self.cluster.add(label, evolve(self._spec(options), node_id=NodeId(node_id), address=label))

    def join(self, *labels: str) -> None:
        """The agent's process starts; again, if it had died or finished."""
        for label in labels:
            self.cluster.start(label)

    def fail(self, label: str, rank: str = "0", exit: str = "1", message: str = "") -> None:
        """Worker `rank` (local) of the node fails. `_` in the message stands for a space."""
        assignment = self.cluster.hosts[label].agent.workers.assignment
        assert assignment is not None, f"no workers run on {label}"
        local = int(rank)
        worker = WorkerFailure(local, assignment.workers[local].rank, int(exit), message=message.replace("_", " "))
        self.cluster.exit(label, {local: worker})

    def succeed(self, *labels: str) -> None:
        for label in labels:
            self.cluster.exit(label, {})

    def lose(self, label: str) -> None:
        self.cluster.lose(label)

    def leave(self, label: str, signal: str = "15") -> None:
        self.cluster.feed(self.cluster.hosts[label], StopRequested(self.cluster.at, int(signal)))

    def cut(self, label: str, why: str = "refused") -> None:
        """The node reaches the store no more."""
        self.cluster.cut(label, why)

    def mend(self, label: str) -> None:
        self.cluster.hosts[label].is_cut = False

    def mute(self, label: str) -> None:
        """What the node says vanishes on its way, and its beats and reads work."""
        self.cluster.hosts[label].is_mute = True

    def slow(self, label: str) -> None:
        """The node's workers ignore signals from now on: they go when they are killed."""
        self.cluster.hosts[label].is_slow = True

    def abort(self, why: str) -> None:
        self.cluster.journal.append(Aborted(why))

    def stabilize(self) -> None:
        self.cluster.stabilize()

    def advance(self, time: str) -> None:
        self.cluster.advance(float(time.removesuffix("s")))

    def quietly(self, verb: str, *words: str, **options: str) -> None:
        """Another verb whose output is not part of the story."""
        before = len(self.cluster.lines)
        getattr(self, verb)(*words, **options)
        del self.cluster.lines[before:]
        self.cluster.shown_at = self.cluster.at

    def show(self, what: str, label: str = "") -> None:
        """`show job` (one agent's, or that of all who are up, which must be equal), `show journal`."""
        if what == "journal":
            self.cluster.lines += [f"{i} {short_entry(e)}" for i, e in enumerate(self.cluster.journal)]
            return
        assert what == "job", f"there is no {what} to show"
        hosts = self.cluster.hosts.values()
        jobs: list[Job] = [h.agent.job for h in hosts if (h.label == label if label else h.is_up)]
        jobs = jobs or [h.agent.job for h in hosts][-1:]
        assert all(job == jobs[0] for job in jobs), "the agents see different jobs: name one"
        self.cluster.lines += short_job(jobs[0])

    def _spec(self, options: dict[str, str]) -> Spec:
        """The defaults of this transcript with `options` changed."""
        spec = self.spec

        def chosen(names: dict[str, str], kind: type[float] = float) -> dict[str, float]:
            return {names[k]: kind(v) for k, v in options.items() if k in names}

        unknown = set(options) - {*TERMS, *POLICY, *SPEC, "admission", "nproc", "host"}
        assert not unknown, f"unknown options: {sorted(unknown)}"
        counts = {"min": "min_nodes", "max": "max_nodes"}
        times = {k: v for k, v in TERMS.items() if k not in counts}
        policy = {k: v for k, v in POLICY.items() if k != "backoff"}
        restarts: RestartPolicy = evolve(spec.terms.restarts, **chosen(policy, int), **chosen({"backoff": "backoff_s"}))
        terms: Terms = evolve(spec.terms, **chosen(counts, int), **chosen(times), restarts=restarts)
        if "admission" in options:
            terms = evolve(terms, admission=Admission(options["admission"]))
        if "host" in options:
            spec = evolve(spec, hosts_journal=options["host"] == "yes")
        return evolve(spec, terms=terms, **chosen(SPEC), **chosen({"nproc": "local_world_size"}, int))


def play(text: str) -> str:
    """The transcript with the output that its commands have now."""
    verbs, written = Verbs(), list[str]()
    lines = iter(text.splitlines())
    for line in lines:
        written.append(line)
        if line == "----":
            for old in lines:
                if not old:
                    break
            # What the commands of this block did is kept until its end, so that a block reads as one story.
            written += [*(verbs.cluster.lines or ["ok"]), ""]
            verbs.cluster.lines.clear()
        elif line and not line.startswith("#"):
            verbs.run(line)
    return "\n".join(written).rstrip("\n") + "\n"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda p: p.stem)
def test_the_story_is_told_as_written(path: Path) -> None:
    """A change of behaviour shows as a diff of a story, which a reviewer can read."""
    before = path.read_text()
    now = play(before)
    if os.environ.get("REKNIT_REWRITE"):
        path.write_text(now)
        return
    assert now == before, "the story differs (- written, + happens):\n" + diff(before.splitlines(), now.splitlines())


def test_output_that_is_not_true_is_replaced() -> None:
    """A runner that would accept any output would make all transcripts worthless."""
    written = "agents 1\njoin n0\n----\nn0 << never happened\n"
    assert play(written) == "agents 1\njoin n0\n----\nn0 << started\n"


def test_playing_twice_changes_nothing() -> None:
    """Rewriting must come to rest, or every run would show a diff."""
    once = play("# a comment\nagents 2 min=1 max=2\njoin n0 n1\nstabilize\nadvance 60s\nshow job\n----\n")
    assert play(once) == once


def test_a_word_that_means_nothing_is_refused() -> None:
    """A misspelt option would silently tell another story."""
    with pytest.raises(AssertionError, match="restrats"):
        play("agents 1 restrats=3\n----\n")
