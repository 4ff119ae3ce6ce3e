"""reknit: an elastic agent for distributed PyTorch.

The names that programs import. docs/embedding.md shows how to use them. Importing this package loads nothing else: each
name is fetched when it is first asked for.

    from reknit import launch                 run a function or a script on several workers
    from reknit import progress               say, in a worker, that it makes progress
    from reknit import Settings, run          run an agent, and get every detail
    from reknit import Agent, Job, fold, step use reknit's decisions as pure functions

`fold(job, entry)` returns the next state of the job that all agents share. `step(agent, event)` returns the next state
of one node's agent, and its commands. See `reknit.core`.
These names are stable: a version that changes one of them says so in CHANGELOG.md.
"""

__version__ = "0.1.0"

TYPE_CHECKING = (
    False  # type checkers take it for true under this name; importing `typing` would cost more than the rest
)
if TYPE_CHECKING:
    from .adapters.keeper.functions import FunctionError
    from .adapters.loop import Loop, Ports
    from .adapters.ports import CannotStart
    from .adapters.progress import progress
    from .app.friendly import JobFailed, launch, launch_async, report_lines
    from .app.launch import Running, run, run_async, start
    from .app.settings import HealthCheck, Meeting, Settings
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
    "HealthCheck",
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
    "progress",
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
    "HealthCheck": "app.settings",
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
    "progress": "adapters.progress",
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
    if "__attrs_attrs__" in getattr(value, "__dict__", ()) and value.__doc__:  # `python -OO` has none
        from .app.fielddocs import with_fields

        with_fields(value)  # so that `help` shows the fields
    globals()[name] = value  # the next look goes past this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
