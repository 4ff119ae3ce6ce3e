"""reknit: an elastic agent for distributed PyTorch.

The front door for those who embed it. Importing it loads nothing else: each name is fetched when it is first asked for,
so `reknit --version` stays cheap and a launcher pays only for what it uses.

    from reknit import Agent, Job, fold, step

`fold(job, entry)` is the job that all agents share; `step(agent, event)` is one node's agent. See `reknit.core`.
"""

__version__ = "0.1.0"

TYPE_CHECKING = (
    False  # type checkers take it for true under this name; importing `typing` would cost more than all the rest
)
if TYPE_CHECKING:
    from .core.agent import Agent, Spec
    from .core.commands import Result
    from .core.fold import fold
    from .core.job import Job
    from .core.step import Step, step

__all__ = ["Agent", "Job", "Result", "Spec", "Step", "__version__", "fold", "step"]

_HOME = {
    "Agent": "agent",
    "Job": "job",
    "Result": "commands",
    "Spec": "agent",
    "Step": "step",
    "fold": "fold",
    "step": "step",
}
"""In which module of `reknit.core` a name lives."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.core.{_HOME[name]}"), name)
    globals()[name] = value  # the next look goes past this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
