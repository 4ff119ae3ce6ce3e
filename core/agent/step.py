"""step(agent, event) -> Step(agent, commands): all that one node decides.

    observe   take the event into the state: fold entries, note exits, silences, requests
    time      start and forget timers. What is due may make the agent end
    drive     compare what should be with what is: stop or start workers, say what is owed, beat, finish

1. Pure and total: the same agent and event make the same step, on every machine, and no event makes it raise. An
   AssertionError marks a bug of the core.
2. Observing issues no commands, and nothing after it looks at the event. So it does not matter how a state was reached:
   what is wanted is derived anew at every step, and what got lost on the way is still wanted.
3. An agent folds all entries of a read, and decides after the last. So it never starts a round that is over already.
4. A step may issue several commands, but starts or stops workers at most once.
"""

from __future__ import annotations

from typing import assert_never

from attrs import evolve, frozen

from reknit.core.job.entries import Node

from .agent import Agent, Done
from .commands import Command
from .contact import drive_beats, noticed_gap
from .events import (
    Counters,
    EntriesRead,
    Event,
    JournalFailed,
    RestartsLimited,
    Started,
    StopRequested,
    Woken,
)
from .incarnation import after_private_loss, read
from .lifecycle import advanced, asked_to_stop, drive_end, journal_failed, out_of_patience, out_of_restarts
from .sayings import drive_sayings
from .silence import heard
from .timers import after_sleep, run_timers
from .worker_words import PortReserved, WorkersExited, WorkersStarted, WorkersStopped
from .workers import drive_workers, exited, reserved, started, stopped


@frozen
class Step:
    """What one step has made."""

    agent: Agent
    """The agent after the event."""
    commands: tuple[Command, ...] = ()
    """What the agent wants done, in this order."""


def step(agent: Agent, event: Event) -> Step:
    """The agent after `event`, and what it wants done. `timers.next_wake` says when it must be woken."""
    if isinstance(agent.lifecycle, Done):
        return Step(agent)
    agent = after_private_loss(_observed(noticed_gap(_at(agent, event.at)), event))
    # The order matters. What is due decides whether the agent ends. Only an agent that does not end starts workers. A
    # failure that was held counts when the workers are stopped. An entry that is no longer wanted must not count as
    # late when the agent beats. The end comes last.
    agent = advanced(out_of_patience(run_timers(agent)))
    agent, orders = drive_workers(agent)
    agent, sayings = drive_sayings(out_of_restarts(agent))
    agent, beats = drive_beats(agent)
    agent, end = drive_end(agent)
    return Step(agent, (*orders, *sayings, *beats, *end))


def _at(agent: Agent, at: float) -> Agent:
    # The adapters' clock is monotonic. Events from two adapters may still overtake each other by a little.
    return after_sleep(agent, at) if at > agent.at or not agent.nonce else agent


def _observed(agent: Agent, event: Event) -> Agent:  # a dispatcher: one arm per event
    match event:
        case Started():
            me = Node(agent.spec.node_id)
            return evolve(agent, nonce=event.nonce, port=event.port, me=me)
        case EntriesRead():
            return read(agent, event)
        case Counters():
            return heard(agent, event)
        case JournalFailed():
            return journal_failed(agent, event)
        case WorkersStarted():
            return started(agent, event)
        case WorkersExited():
            return exited(agent, event)
        case WorkersStopped():
            return stopped(agent, event)
        case PortReserved():
            return reserved(agent, event)
        case StopRequested():
            return asked_to_stop(agent, event)
        case RestartsLimited():
            return evolve(agent, max_restarts=agent.restart_count + max(0, event.left))
        case Woken():
            return agent
        case _:
            assert_never(event)
