"""Whether this agent has the terms of the job. The agent that opened the job has fixed them: number of nodes, budget,
waits. An agent with other terms ends, because its timers and its fold would not be those of the others."""

from __future__ import annotations

from enum import Enum

from reknit.core.job.entries import Terms


def differences(mine: Terms, jobs: Terms) -> tuple[tuple[str, str, str], ...]:
    """Each term that differs: its name, the job's value and this agent's, as the user writes them. Empty: none does."""
    if jobs == mine:
        return ()
    from attrs import fields  # slow to import, and needed here alone

    pairs = [
        (a.name, getattr(there, a.name), getattr(here, a.name))
        for there, here in ((jobs, mine), (jobs.restarts, mine.restarts))
        for a in fields(type(there))
        if a.name != "restarts"
    ]
    return tuple((name, _text(a), _text(b)) for name, a, b in pairs if a != b)


def _text(value: object) -> str:
    """A term as the user writes it: `soon`, not `Admission.SOON`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value.value if isinstance(value, Enum) else value)
