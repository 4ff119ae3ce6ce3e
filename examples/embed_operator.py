"""An operator in the style of Kubernetes: a reconcile loop that compares what should run with what runs.

    python examples/embed_operator.py

It has nothing of reknit but the core. The operator keeps the journal of a job and an agent for each node. In each turn
of the loop it tells every agent what has happened to its pod, and does what `step` answers. The pods are fakes. One
node loses its pod, and later its host. Then the operator itself appends `Lost` (docs/embedding.md#operator).
"""

from __future__ import annotations

from attrs import define, field

from reknit import RestartPolicy, Terms
from reknit.core import Agent, Job, Spec, fold, next_wake, step
from reknit.core.agent import worker_words as words
from reknit.core.agent.commands import Append, Beat, Command, Finish, StopWorkers
from reknit.core.agent.events import Counters, EntriesRead, Event, Started, Woken
from reknit.core.job.entries import Entry, Lost, Node, NodeId
from reknit.core.job.workers import WorkerFailure

TERMS = Terms(min_nodes=2, max_nodes=3, restarts=RestartPolicy(1), last_call_s=2.0)
TRAINS_S = 30.0
"""So long the pods of a round train before they succeed, if nothing happens to them."""


@define
class Pod:
    """A fake: what the cluster would run for one node."""

    round: int
    rank: int
    """Of its one worker."""
    began: float
    code: int | None = None
    """Its exit code. None: it runs."""


@define
class Host:
    """One node of the cluster, and the agent that speaks for it."""

    agent: Agent
    pod: Pod | None = None
    news: list[Event] = field(factory=list)
    """What its agent does not know yet."""
    read: int = 0
    """Entries of the journal that its agent knows."""
    is_there: bool = True


class Operator:
    def __init__(self, nodes: int) -> None:
        self.now = 0.0
        """Seconds since the operator began."""
        self.journal: list[Entry] = []
        self.job = Job()
        """The fold of the journal: what `kubectl get` would show."""
        self.counters: dict[Node, int] = {}
        self.hosts = [Host(Agent(Spec(NodeId(f"node{i}"), f"10.0.0.{i}", TERMS))) for i in range(nodes)]
        for number, host in enumerate(self.hosts):
            host.news += [Started(0.0, nonce=f"pod{number}", port=29500), EntriesRead(0.0)]

    def reconcile(self) -> bool:
        """One turn of the loop. False: every agent has ended."""
        for host in self.hosts:
            if host.is_there and host.agent.result is None:
                self._observe(host)
                while host.news and host.agent.result is None:  # nothing is fed after `Finish`
                    self._feed(host, host.news.pop(0))
        return any(host.is_there and host.agent.result is None for host in self.hosts)

    def lose(self, host: Host) -> None:
        """The host is gone, and nothing runs there any more. Say so in the name of another node that is live."""
        host.is_there = False
        joined = self.job.live.get(host.agent.spec.node_id)
        others = [other.node for other in self.job.live.values() if other is not joined]
        if joined is not None and others:
            self._append(Lost(joined.node, by=others[0]))
            self.say(f"the journal: {joined.node} is lost, in the name of {others[0]}")

    def _observe(self, host: Host) -> None:
        """Compare what runs with what the agent knows."""
        pod, wakes_at = host.pod, next_wake(host.agent)
        if pod is not None and pod.code is None and self.now >= pod.began + TRAINS_S:
            pod.code = 0
        if pod is not None and pod.code is not None:
            failure = WorkerFailure(0, pod.rank, pod.code) if pod.code else None
            host.news.append(words.WorkersExited(self.now, pod.round, (words.WorkerExit(0, failure),)))
            host.pod = None
        if host.read < len(self.journal):
            host.news.append(EntriesRead(self.now, tuple(self.journal[host.read :])))
            host.read = len(self.journal)
        if wakes_at is not None and wakes_at <= self.now:
            host.news.append(Woken(self.now))

    def _feed(self, host: Host, event: Event) -> None:
        """All commands of a step are carried out before the next event."""
        made = step(host.agent, event)
        host.agent = made.agent
        for command in made.commands:
            self._carry_out(host, command)

    def _carry_out(self, host: Host, command: Command) -> None:
        match command:
            case Append(entry):
                self._append(entry)
            case Beat(node, count, watch):
                self.counters[node] = count
                read = {each: self.counters.get(each, 0) for each in (node, *watch)}
                host.news += [Counters(self.now, read), EntriesRead(self.now)]
            case words.StartWorkers(round, assignment):
                ranks = [worker.rank for worker in assignment.workers]
                host.pod = Pod(round, ranks[0], self.now)
                self.say(f"{host.agent.spec.node_id}: a pod for round {round}, ranks {ranks}")
                host.news.append(words.WorkersStarted(self.now, round))
            case StopWorkers(round=round):
                host.pod = None
                host.news.append(words.WorkersStopped(self.now, round, port=29500 + round + 1))
            case words.ReservePort():
                host.news.append(words.PortReserved(self.now, port=29600 + len(self.journal)))
            case Finish(result):
                self.say(f"{host.agent.spec.node_id}: {result.state.value.lower()}")

    def _append(self, entry: Entry) -> None:
        self.journal.append(entry)
        self.job = fold(self.job, entry)

    def say(self, line: str) -> None:
        print(f"{self.now:5.1f} s  {line}")


def main() -> None:
    operator = Operator(nodes=3)
    for half in range(400):
        operator.now, victim = half / 2, operator.hosts[1]
        if operator.now == 10.0 and victim.pod is not None:
            operator.say("the pod of node1 fails")
            victim.pod.code = 137
        if operator.now == 20.0:
            operator.say("the host of node1 is gone")
            operator.lose(victim)
        if not operator.reconcile():
            break
    operator.say(f"the job: {operator.job.outcome.verdict.value if operator.job.outcome else 'runs'}")


if __name__ == "__main__":
    main()
