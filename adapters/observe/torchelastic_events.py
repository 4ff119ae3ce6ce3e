"""torchelastic's events of one agent, made from the steps of its loop.

    AGENT RENDEZVOUS, AGENT ASSIGN_WORKER_RANKS    this node gets its place in a round
    WORKER START                                   once for each worker, when all of them run
    WORKER SUCCEEDED, FAILED or TERMINATED         once for each worker of the last round, when the agent ends
    AGENT SUCCEEDED or FAILED                      the last event

    AGENT timer expired or no progress             a worker is hung; see `hang_events`
    AGENT kill worker process                      it was ended, therefore

1. TERMINATED: reknit has ended the worker, or the worker had ended by itself when another one failed.
2. AGENT SUCCEEDED says that the agent has done its work. Its workers may have failed. AGENT FAILED: a signal, or
   something that is no worker's failure, has ended the agent. So torch tells them apart.
3. Every agent that does not die tells one of the two, whatever its loop has raised: see `close`.
4. Names, sources and fields are torch's. Each event has the time at which it happened.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import frozen

from reknit.adapters.keeper.failures.error_files import document_of
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Append, Command, Result
from reknit.core.agent.events import Event as StepEvent
from reknit.core.agent.events import Started
from reknit.core.agent.reasons import AlreadyFinished
from reknit.core.agent.states import WorkerState
from reknit.core.agent.worker_words import StartWorkers, WorkersExited, WorkersStarted, WorkersStopped
from reknit.core.job.entries import Joined
from reknit.core.job.reasons import AllSucceeded
from reknit.core.job.workers import Assignment, NoProgress, TimerExpired, WorkerFailure, WorkerRanks
from reknit.core.text.describe import reason_text

from .records import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

Record = Callable[[Event], object]


@frozen
class About:
    """What all events of an agent have in common, besides what its steps tell."""

    run_id: str
    entry_point: str
    """What the workers run: the name of a function, or the file name of a program."""
    rdzv_backend: str
    hostname: str
    watches_timers: bool = False
    """The timers of the workers are watched. This begins and ends with each round."""


def worker_event_name(state: str) -> str:
    """The name of an event about a state. torch uses the same form for agents."""
    return f"torchelastic.worker.status.{state}"


def hang_events(cause: TimerExpired | NoProgress, pid: int, exitcode: int) -> list[tuple[str, str]]:
    """The events about a worker that was ended because it was hung: the name and the inner metadata of each. Names and
    fields are those of torch's watchdog, as far as torch knows them."""
    known = {"scope_id": cause.scope} if isinstance(cause, TimerExpired) else {"for_s": cause.for_s, "step": cause.step}
    names = ("timer expired" if isinstance(cause, TimerExpired) else "no progress"), "kill worker process"
    inner = {"worker_pid": str(pid), **known, "signal": str(-exitcode)}
    return [(name, json.dumps({"watchdog_event": name, **inner})) for name in names]


class Events:
    """An observer of one loop. `close` it when the loop has ended."""

    def __init__(
        self,
        about: About,
        record: Record,
        pids: Callable[[int], Mapping[int, int]],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`record`: takes each event. It must not wait. `pids`: by local rank, the processes of the workers of a round.
        `wall_clock`: the seconds since 1970."""
        self._about = about
        self._record = record
        self._pids = pids
        self._wall_clock = wall_clock
        self._agent: Agent | None = None
        """The agent after the latest step."""
        self._began_at = 0.0
        self._waits_since = 0.0
        """Since when the node waits for a round."""
        self._has_ended = False
        self._is_watching = False
        """`watchdog started` was recorded last, and not `watchdog stopped`."""

    def __call__(self, before: Agent, event: StepEvent, after: Agent, commands: Sequence[Command]) -> None:
        if self._agent is None:
            self._began_at = self._waits_since = event.at
        self._agent = after
        if isinstance(event, Started | WorkersStopped):
            self._waits_since = event.at
        for command in commands:
            if isinstance(command, StartWorkers):
                self._end_watch(command.assignment)
                waited_ms = (event.at - self._waits_since) * 1000
                self._of_agent("RENDEZVOUS", command.assignment, duration_ms=waited_ms)
                # The ranks come with the round itself: no time passes.
                self._of_agent("ASSIGN_WORKER_RANKS", command.assignment, duration_ms=0.0)
                if self._about.watches_timers:
                    self._watch("watchdog started", command.assignment)
        if isinstance(event, WorkersStarted) and event.round == after.workers.round and after.workers.assignment:
            for ranks in after.workers.assignment.workers:
                self._of_worker("START", after.workers.assignment, ranks)
        if isinstance(event, WorkersExited) and event.round == after.workers.round:
            for exit_ in event.exits:
                if exit_.failure is not None and exit_.failure.cause is not None:
                    self._of_hang(exit_.failure, exit_.failure.cause, after.workers.assignment)
        if after.result is not None and not self._has_ended:
            self._end(after, after.result)

    def close(self, error: str = "") -> None:
        """The loop has ended. `error`: what it has raised, with the traceback. Empty: nothing."""
        if not self._has_ended:
            self._has_ended = True
            assignment = None if self._agent is None else self._agent.workers.assignment
            self._end_watch(assignment)
            self._of_agent("FAILED", assignment, raw_error=error or "the agent was ended before it had begun")

    def _end(self, agent: Agent, result: Result) -> None:
        self._has_ended = True
        assignment = agent.workers.assignment
        has_succeeded = isinstance(result.why, AllSucceeded)
        if not has_succeeded:
            self._end_watch(assignment)  # the workers were stopped, and the watchdog with them
        if assignment is not None:
            state = "SUCCEEDED" if has_succeeded else "TERMINATED"
            self._end_of_workers(agent, assignment, state)
        self._end_watch(assignment)
        if result.state is WorkerState.SUCCEEDED or result.root is not None:
            self._of_agent("SUCCEEDED", assignment)
        else:
            self._of_agent("FAILED", assignment, raw_error=reason_text(result.why))

    def _end_of_workers(self, agent: Agent, assignment: Assignment, state: str) -> None:
        """`state`: that of a worker that has not failed."""
        for ranks in assignment.workers:
            exit_ = agent.workers.exits.get(ranks.local_rank)
            failure = None if exit_ is None else exit_.failure
            self._of_worker("FAILED" if failure else state, assignment, ranks, failure)

    # ---- one event ----

    def _end_watch(self, assignment: Assignment | None) -> None:
        if self._is_watching:
            self._watch("watchdog stopped", assignment)

    def _watch(self, name: str, assignment: Assignment | None) -> None:
        self._is_watching = name == "watchdog started"
        inner = json.dumps({"watchdog_event": name})
        self._make(EventSource.AGENT, "RUNNING", assignment, {}, {"metadata": inner}, name)

    def _of_agent(
        self,
        state: str,
        assignment: Assignment | None,
        *,
        raw_error: str | None = None,
        duration_ms: float | None = None,
    ) -> None:
        self._make(EventSource.AGENT, state, assignment, {}, {"raw_error": raw_error, "duration_ms": duration_ms})

    def _of_hang(self, failure: WorkerFailure, cause: TimerExpired | NoProgress, assignment: Assignment | None) -> None:
        for name, inner in hang_events(cause, failure.pid, failure.exitcode):
            self._make(EventSource.AGENT, "RUNNING", assignment, {}, {"metadata": inner}, name)

    def _of_worker(
        self, state: str, assignment: Assignment, ranks: WorkerRanks, failure: WorkerFailure | None = None
    ) -> None:
        pid = self._pids(assignment.round).get(ranks.local_rank)
        inner = {
            "local_rank": ranks.local_rank,
            "role_rank": ranks.role_rank,
            "role_world_size": assignment.role_world_size,
            "exit_code": None if failure is None else failure.exitcode,
            "worker_pid": None if failure is None else failure.pid,
        }
        fields: dict[str, EventMetadataValue] = {
            "global_rank": ranks.rank,
            "worker_id": None if pid is None else str(pid),
            "raw_error": None if failure is None else json.dumps(document_of(failure, failure.exitcode)),
        }
        self._make(EventSource.WORKER, state, assignment, inner, fields)

    def _make(
        self,
        source: EventSource,
        state: str,
        assignment: Assignment | None,
        inner: Mapping[str, int | None],
        fields: Mapping[str, EventMetadataValue],
        name: str = "",
    ) -> None:
        """`inner`: what stands in the inner metadata besides the usual. `fields`: the fields that are not as usual.
        `name`: empty means the name of the state."""
        agent, about = self._agent, self._about
        metadata: dict[str, EventMetadataValue] = {
            "run_id": about.run_id,
            "global_rank": None,
            "group_rank": None if assignment is None else assignment.group_rank,
            "worker_id": None,
            "role": "" if agent is None else agent.spec.role,
            "hostname": about.hostname,
            "state": state,
            "total_run_time": int(agent.at - self._began_at) if agent is not None and self._has_ended else 0,
            "rdzv_backend": about.rdzv_backend,
            "raw_error": None,
            "metadata": json.dumps(
                {
                    "group_world_size": None if assignment is None else assignment.group_world_size,
                    "entry_point": about.entry_point,
                    **inner,
                }
            ),
            "agent_restarts": 0 if agent is None else agent.job.spent,
            "duration_ms": None,
        }
        at_ms = int(self._wall_clock() * 1000)
        self._record(Event(name or worker_event_name(state), source, at_ms, {**metadata, **fields}))


class RendezvousEvents:
    """An observer of one loop: what the agent does to meet the others, as torch's events of a rendezvous."""

    def __init__(self, run_id: str, hostname: str, pid: int, record: Callable[[RdzvEvent], object]) -> None:
        self._run_id = run_id
        self._hostname = hostname
        self._pid = pid
        self._record = record
        self._joins: Joined | None = None
        """What was told last. An entry may be said several times."""

    def __call__(self, before: Agent, event: StepEvent, after: Agent, commands: Sequence[Command]) -> None:
        for command in commands:
            for made in self._of_command(after, command):
                self._record(made)
        if after.result is not None and before.result is None:
            has_succeeded = isinstance(after.result.why, AllSucceeded | AlreadyFinished)
            state = NodeState.SUCCEEDED if has_succeeded else NodeState.FAILED
            text = reason_text(after.result.why)
            self._record(self._made("end", f"node {after.me} takes part in no further round: {text}", state))

    def _of_command(self, agent: Agent, command: Command) -> Iterator[RdzvEvent]:
        if isinstance(command, Append) and isinstance(command.entry, Joined) and command.entry != self._joins:
            self._joins = command.entry
            text = f"node {agent.me} is ready for round {command.entry.round}"
            yield self._made("join", text, NodeState.INIT if agent.workers.round < 0 else NodeState.RUNNING)
        elif isinstance(command, StartWorkers):
            made = command.assignment
            place = f"group rank {made.group_rank} of {made.group_world_size}"
            text = f"node {agent.me} has {place} in round {made.round}"
            endpoint = f"{made.master_addr}:{made.master_port}"
            yield self._made("start", text, NodeState.RUNNING, endpoint, made.group_rank)

    def _made(
        self, what: str, message: str, state: NodeState, endpoint: str = "", rank: int | None = None
    ) -> RdzvEvent:
        return RdzvEvent(
            name=f"reknit:{what}",
            run_id=self._run_id,
            message=message,
            hostname=self._hostname,
            pid=self._pid,
            node_state=state,
            master_endpoint=endpoint,
            rank=rank,
            error_trace=message if state is NodeState.FAILED else "",
        )
