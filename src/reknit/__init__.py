"""reknit: an elastic agent for distributed PyTorch.

The front door for those who embed it. Importing it loads nothing else: each name is fetched when it is first asked for,
so `reknit --version` stays cheap, and a program pays only for what it uses.

    from reknit import launch                 run a function or a script on several workers
    from reknit import Settings, run          run an agent from a program
    from reknit import Agent, Job, fold, step judge alone: no process, no thread, no clock

`fold(job, entry)` is the job that all agents share; `step(agent, event)` is one node's agent. See `reknit.core`.
These names are stable: a version that changes one says so in CHANGELOG.md.
"""

__version__ = "0.1.0"

TYPE_CHECKING = (
    False  # type checkers take it for true under this name; importing `typing` would cost more than the rest
)
if TYPE_CHECKING:
    from .adapters.keeper.functions import FunctionError
    from .adapters.loop import Loop, Ports
    from .adapters.ports import CannotStart
    from .app.friendly import JobFailed, launch, launch_async, report_lines
    from .app.launch import Running, run, run_async, start
    from .app.settings import Meeting, Settings
    from .app.wire import Prevented
    from .core.agent.agent import Agent, Spec
    from .core.agent.commands import Result
    from .core.agent.step import Step, step
    from .core.job.entries import Admission, RestartPolicy, Terms
    from .core.job.fold import fold
    from .core.job.job import Job

__all__ = [
    "Admission",
    "Agent",
    "CannotStart",
    "FunctionError",
    "Job",
    "JobFailed",
    "Loop",
    "Meeting",
    "Ports",
    "Prevented",
    "RestartPolicy",
    "Result",
    "Running",
    "Settings",
    "Spec",
    "Step",
    "Terms",
    "__version__",
    "fold",
    "launch",
    "launch_async",
    "report_lines",
    "run",
    "run_async",
    "start",
    "step",
]

_HOME = {
    "Admission": "core.job.entries",
    "Agent": "core.agent.agent",
    "CannotStart": "adapters.ports",
    "FunctionError": "adapters.keeper.functions",
    "Job": "core.job.job",
    "JobFailed": "app.friendly",
    "Loop": "adapters.loop",
    "Meeting": "app.settings",
    "Ports": "adapters.loop",
    "Prevented": "app.wire",
    "RestartPolicy": "core.job.entries",
    "Result": "core.agent.commands",
    "Running": "app.launch",
    "Settings": "app.settings",
    "Spec": "core.agent.agent",
    "Step": "core.agent.step",
    "Terms": "core.job.entries",
    "fold": "core.job.fold",
    "launch": "app.friendly",
    "launch_async": "app.friendly",
    "report_lines": "app.friendly",
    "run": "app.launch",
    "run_async": "app.launch",
    "start": "app.launch",
    "step": "core.agent.step",
}
"""In which module of `reknit` a name lives."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the next look goes past this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
