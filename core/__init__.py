"""The judgement of an elastic agent, with no side effects.

A job is the fold of its journal; an agent is a step function.

    fold(job, entry) -> job                     the job that all agents share: rounds, ranks, restarts, outcome
    step(agent, event) -> Step(agent, commands) one node's agent: its workers, what it says, when it must be woken

Read `entries`, `events` and `commands` for the vocabulary, then `step`; docs/protocol.md has the rules by which agents
agree. Words:

job       what a run id names; node: one agent's host; worker: one process; role: a kind of worker
round     one formation of the group, counted from 0; epoch: only for a journal that is used again
member    a node of the sealed round; standby: joined, not a member; seat: a node's sticky place in rank order
seal      a round's membership becomes final
lost      fell silent; left: said goodbye
spend     a restart of the job's budget

Nothing here reads a clock, draws a number, does IO or logs. Time arrives with events, and what an embedder needs is
these modules and `attrs`: neither torch nor psutil.
"""

TYPE_CHECKING = False  # type checkers take it for true under this name
if TYPE_CHECKING:
    from .agent.agent import Agent, Spec
    from .agent.commands import Result
    from .agent.step import Step, step
    from .job.fold import fold
    from .job.job import Job

__all__ = ["Agent", "Job", "Result", "Spec", "Step", "fold", "step"]

_HOME = {
    "Agent": "agent.agent",
    "Job": "job.job",
    "Result": "agent.commands",
    "Spec": "agent.agent",
    "Step": "agent.step",
    "fold": "job.fold",
    "step": "agent.step",
}
"""In which module of `reknit.core` a name lives. A program that needs one of them does not load the others."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
