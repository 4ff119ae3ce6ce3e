"""The events of an agent, made from the steps of simulated agents: which, in which order, and what they hold."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from reknit.adapters.observe.records import Event, EventSource, NodeState, RdzvEvent
from reknit.adapters.observe.torchelastic_events import About, Events, RendezvousEvents
from reknit.adapters.simulated import faults
from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.hosts import Proc
from reknit.adapters.simulated.world import World
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event as StepEvent
from reknit.core.agent.worker_words import WorkerExit, WorkersExited
from reknit.core.job.entries import Entry, NodeId, RestartPolicy, Terms
from reknit.core.job.job import Job
from reknit.core.job.workers import NoProgress, TimerExpired, WorkerFailure

ABOUT = About("job42", "train.py", "c10d", "host.example")
ROUND = ["AGENT RENDEZVOUS", "AGENT ASSIGN_WORKER_RANKS", "WORKER START", "WORKER START"]


class Recorded:
    """Watches a simulated world: the events of each agent, and those of its rendezvous."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events: dict[Proc, list[Event]] = {}
        self.meetings: dict[Proc, list[RdzvEvent]] = {}
        self.observers: dict[Proc, tuple[Events, RendezvousEvents]] = {}
        world.watchers.append(self)

    def begin(self, host: int, **terms: Any) -> Proc:
        """An agent with two workers begins now."""
        number = len(self.world.procs)
        terms = {"last_call_s": 5.0, **terms}
        spec = Spec(NodeId(f"n{host}"), f"10.0.0.{host}", Terms(**terms), local_world_size=2)
        proc = Proc(f"n{number}", host, spec, 10.0 * number, number)
        self.events[proc], self.meetings[proc] = [], []
        self.observers[proc] = (
            Events(ABOUT, self.events[proc].append, lambda round_: {0: 70 + round_, 1: 80 + round_}, lambda: 1.5),
            RendezvousEvents("job42", "host.example", 7, self.meetings[proc].append),
        )
        self.world.begin(proc)
        return proc

    def stepped(self, proc: Proc, before: Agent, event: StepEvent, commands: Sequence[Command]) -> None:
        for observer in self.observers[proc]:
            observer(before, event, proc.agent, commands)

    def landed(self, entry: Entry, before: Job) -> None: ...

    def told(self, proc: Proc) -> list[str]:
        return [f"{event.source.value} {event.metadata['state']}" for event in self.events[proc]]

    def finish(self) -> None:
        """All workers succeed from now on, and all agents end."""
        self.world.calm = self.world.finishing = True
        for proc in self.world.procs:
            staff.succeed(self.world, proc, proc.group)
        assert self.world.run_for(600.0, until=lambda: not any(p.up for p in self.world.procs))


@pytest.fixture
def recorded() -> Recorded:
    return Recorded(World(seed=3))


def inner(event: Event) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(event.metadata["metadata"]))
    return found


def test_two_nodes_that_fail_once_and_succeed_then(recorded: Recorded) -> None:
    """The order of torch. Only workers of the last round have an end."""
    policy = RestartPolicy(max_restarts=1)
    procs = [recorded.begin(host, min_nodes=2, max_nodes=2, restarts=policy) for host in range(2)]
    recorded.world.run_for(20.0)
    staff.fail(recorded.world, procs[0])
    recorded.world.run_for(60.0)
    recorded.finish()
    for proc in procs:
        assert recorded.told(proc) == [*ROUND, *ROUND, "WORKER SUCCEEDED", "WORKER SUCCEEDED", "AGENT SUCCEEDED"]
        restarts = [event.metadata["agent_restarts"] for event in recorded.events[proc]]
        assert restarts == [0] * 4 + [1] * 7


def test_what_an_event_holds(recorded: Recorded) -> None:
    """Every field of torch, as a plain value. The time is that of the event."""
    proc = recorded.begin(0)
    recorded.world.run_for(20.0)
    recorded.finish()
    rendezvous, assign, _, start, *_, last = recorded.events[proc]
    metadata = dict(start.metadata)
    assert json.loads(str(metadata.pop("metadata"))) == {
        "group_world_size": 1,
        "entry_point": "train.py",
        "local_rank": 1,
        "role_rank": 1,
        "role_world_size": 2,
        "exit_code": None,
        "worker_pid": None,
    }
    assert metadata == {
        "run_id": "job42",
        "global_rank": 1,
        "group_rank": 0,
        "worker_id": "80",
        "role": "default",
        "hostname": "host.example",
        "state": "START",
        "total_run_time": 0,
        "rdzv_backend": "c10d",
        "raw_error": None,
        "agent_restarts": 0,
        "duration_ms": None,
    }
    assert (start.name, start.source, start.timestamp) == (
        "torchelastic.worker.status.START",
        EventSource.WORKER,
        1500,
    )
    assert inner(rendezvous) == {"group_world_size": 1, "entry_point": "train.py"}
    assert (assign.metadata["duration_ms"], last.metadata["duration_ms"]) == (0.0, None)
    assert int(str(last.metadata["total_run_time"])) >= 20


def test_a_rendezvous_takes_as_long_as_the_node_waits(recorded: Recorded) -> None:
    """The figure by which somebody sees that a node was late."""
    terms = {"min_nodes": 2, "max_nodes": 2, "join_timeout_s": 600.0}
    first = recorded.begin(0, **terms)
    recorded.world.run_for(100.0)
    second = recorded.begin(1, **terms)
    recorded.world.run_for(20.0)
    waited = [float(str(recorded.events[proc][0].metadata["duration_ms"])) for proc in (first, second)]
    assert 99_000 < waited[0] < 121_000
    assert 0 < waited[1] < 20_000


def test_a_job_that_fails(recorded: Recorded) -> None:
    """The agent has done its work, and so it says. The failed worker says how, as its error file would."""
    proc = recorded.begin(0)
    recorded.world.run_for(20.0)
    staff.fail(recorded.world, proc)
    assert recorded.world.run_for(60.0, until=lambda: not proc.up)
    told = recorded.told(proc)
    assert told[:4] + told[6:] == [*ROUND, "AGENT SUCCEEDED"]
    assert set(told[4:6]) <= {"WORKER FAILED", "WORKER TERMINATED"}
    failed = next(event for event in recorded.events[proc] if event.metadata["state"] == "FAILED")
    found = inner(failed)
    assert found["exit_code"] != 0
    assert found["worker_pid"] == 1000 + int(str(failed.metadata["global_rank"]))
    assert set(json.loads(str(failed.metadata["raw_error"]))["message"]) == {"message", "extraInfo", "errorCode"}


def test_a_node_that_is_told_to_leave(recorded: Recorded) -> None:
    """As in torch, a signal is a failure of the agent. The workers have an end, which torch leaves out."""
    proc = recorded.begin(0)
    recorded.world.run_for(20.0)
    recorded.world.ask_to_leave(proc, signal.SIGTERM)
    assert recorded.world.run_for(60.0, until=lambda: not proc.up)
    assert recorded.told(proc) == [*ROUND, "WORKER TERMINATED", "WORKER TERMINATED", "AGENT FAILED"]
    assert recorded.events[proc][-1].metadata["raw_error"] == "SIGTERM received"


def test_an_agent_that_ends_without_a_round(recorded: Recorded) -> None:
    """Nobody else came: there is no worker, and the reason stands in the event."""
    proc = recorded.begin(0, min_nodes=2, max_nodes=2, join_timeout_s=30.0)
    assert recorded.world.run_for(600.0, until=lambda: not proc.up)
    assert recorded.told(proc) == ["AGENT FAILED"]
    error = recorded.events[proc][0].metadata["raw_error"]
    assert error == "1 node joined in time, but the job needs at least 2"


def test_an_agent_that_raises_has_failed_once(recorded: Recorded) -> None:
    """A platform that waits for the end of an agent must not wait for ever."""
    proc = recorded.begin(0)
    recorded.world.run_for(20.0)
    events, _ = recorded.observers[proc]
    events.close("Traceback: …")
    events.close()
    assert recorded.told(proc) == [*ROUND, "AGENT FAILED"]
    assert recorded.events[proc][-1].metadata["raw_error"] == "Traceback: …"
    never: list[Event] = []
    Events(ABOUT, never.append, lambda round_: {}).close()
    assert [event.metadata["state"] for event in never] == ["FAILED"]


@pytest.mark.parametrize(
    ("cause", "name", "what"),
    [
        (TimerExpired("load"), "timer expired", {"scope_id": "load"}),
        (NoProgress(30.0, step=7), "no progress", {"for_s": 30.0, "step": 7}),
    ],
)
def test_a_hung_worker(cause: Any, name: str, what: dict[str, Any], recorded: Recorded) -> None:
    """The events of torch's watchdog for a timer, and their like for a worker without progress."""
    proc = recorded.begin(0)
    recorded.world.run_for(20.0)
    observer, _ = recorded.observers[proc]
    exits = (WorkerExit(1, WorkerFailure(1, 1, -9, pid=81, cause=cause)), WorkerExit(0))
    observer(proc.agent, WorkersExited(30.0, 0, exits), proc.agent, ())
    hung = recorded.events[proc][4:]
    assert [(event.name, event.source) for event in hung] == [
        (name, EventSource.AGENT),
        ("kill worker process", EventSource.AGENT),
    ]
    for event in hung:
        assert inner(event) == {"watchdog_event": event.name, "worker_pid": "81", **what, "signal": "9"}
        assert (event.metadata["state"], event.metadata["group_rank"]) == ("RUNNING", 0)
    observer(proc.agent, WorkersExited(30.0, 5, exits), proc.agent, ())
    assert len(recorded.events[proc]) == 6, "another round is not this agent's"


def test_what_is_told_of_the_rendezvous(recorded: Recorded) -> None:
    """Ready, then the place in the round, then the end. A repeated entry is told once."""
    policy = RestartPolicy(max_restarts=1)
    procs = [recorded.begin(host, min_nodes=2, max_nodes=2, restarts=policy) for host in range(2)]
    faults.begin_outage(recorded.world)
    recorded.world.run_for(10.0)
    faults.end_outage(recorded.world)
    recorded.world.run_for(20.0)
    staff.fail(recorded.world, procs[0])
    recorded.world.run_for(60.0)
    recorded.finish()
    for proc in procs:
        found = recorded.meetings[proc]
        assert [event.name for event in found] == [f"reknit:{what}" for what in ("join", "start") * 2] + ["reknit:end"]
        states = [event.node_state for event in found]
        assert states == [NodeState.INIT, *[NodeState.RUNNING] * 3, NodeState.SUCCEEDED]
        assert found[1].master_endpoint.startswith("10.0.0.")
        assert found[1].message == f"node {proc.id} has group rank {found[1].rank} of 2 in round 0"
    assert sorted(recorded.meetings[proc][1].rank or 0 for proc in procs) == [0, 1]
