"""The judgement of an elastic agent, with no side effects.

A job is the fold of its journal. An agent is a step function.

    fold(job, entry) -> job                       rounds, ranks, restarts, the outcome
    step(agent, event) -> Step(agent, commands)   one node's workers, and what it says

The names in `__all__` are stable. Read `entries`, `events` and `commands` for the vocabulary, then `step`.
docs/protocol.md has the rules by which agents agree.

    job       what a run id names; node: one agent's host; worker: one process
    role      a kind of worker
    round     one formation of the group, counted from 0
    epoch     one run of a job whose journal is used again
    member    a node of the sealed round; standby: joined, not a member
    seat      a node's sticky place in rank order
    seal      a round's membership becomes final
    lost      fell silent; left: said goodbye
    spend     a restart of the job's budget

Nothing here reads a clock, draws a number, does IO or logs. Time arrives with events. These modules need `attrs`, and
neither torch nor psutil.
"""

TYPE_CHECKING = False  # type checkers take it for true under this name
if TYPE_CHECKING:
    from .agent.agent import Agent, Spec
    from .agent.commands import Result
    from .agent.step import Step, step
    from .agent.timers import next_wake
    from .job.fold import fold
    from .job.job import Job

__all__ = ["Agent", "Job", "Result", "Spec", "Step", "fold", "next_wake", "step"]


def __getattr__(name: str) -> object:
    """Fetches a name when it is first asked for. A program that needs one part of the core does not load the others."""
    match name:
        case "Agent" | "Spec":
            from .agent import agent

            return getattr(agent, name)
        case "Result":
            from .agent import commands

            return commands.Result
        case "Step" | "step":
            from .agent import step

            return getattr(step, name)
        case "next_wake":
            from .agent import timers

            return timers.next_wake
        case "Job":
            from .job import job

            return job.Job
        case "fold":
            from .job import fold

            return fold.fold
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
