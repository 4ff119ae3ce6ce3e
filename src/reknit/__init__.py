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
    from .adapters.keeper.client.functions import FunctionError
    from .adapters.keeper.watchdog.progress import progress
    from .adapters.runtime.loop import Loop, Ports
    from .adapters.runtime.ports import CannotStart
    from .app.python.launch import JobFailed, launch, launch_async, report_lines
    from .app.python.session import Running, run, run_async, start
    from .app.settings import HealthCheck, Meeting, Settings
    from .app.wiring.world import Prevented
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
    "CannotStart": "adapters.runtime.ports",
    "FunctionError": "adapters.keeper.client.functions",
    "Job": "core.job.job",
    "JobFailed": "app.python.launch",
    "Loop": "adapters.runtime.loop",
    "HealthCheck": "app.settings",
    "Meeting": "app.settings",
    "Ports": "adapters.runtime.loop",
    "Prevented": "app.wiring.world",
    "RestartPolicy": "core.job.entries",
    "Result": "core.agent.commands",
    "Running": "app.python.session",
    "Settings": "app.settings",
    "Spec": "core.agent.agent",
    "Step": "core.agent.step",
    "Terms": "core.job.entries",
    "fold": "core.job.fold",
    "launch": "app.python.launch",
    "launch_async": "app.python.launch",
    "progress": "adapters.keeper.watchdog.progress",
    "report_lines": "app.python.launch",
    "run": "app.python.session",
    "run_async": "app.python.session",
    "start": "app.python.session",
    "step": "core.agent.step",
}
"""In which module of `reknit` a name lives."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    if "__attrs_attrs__" in getattr(value, "__dict__", ()) and value.__doc__:  # `python -OO` has none
        from .app.python.fielddocs import with_fields

        with_fields(value)  # so that `help` shows the fields
    globals()[name] = value  # the next look goes past this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
