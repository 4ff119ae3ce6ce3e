"""reknit: an elastic agent for distributed PyTorch.

The names that programs import. docs/embedding.md shows how to use them. Importing this package loads nothing else: each
name is fetched when it is first asked for.

    from reknit import launch              run a function or a script on several workers
    from reknit import progress            say, in a worker, that it makes progress
    from reknit import simulate            play weeks of a job on a cluster in seconds
    from reknit import Settings            what an agent is to do
    from reknit.runtime import run, start  run an agent yourself, and get every detail
    from reknit.core import fold, step     use reknit's decisions as pure functions
    from reknit.testing import play        try a policy of your own in simulated clusters

The names in `__all__` of these four modules are stable: a version that changes one of them says so in CHANGELOG.md.
"""

TYPE_CHECKING = (
    False  # type checkers take it for true under this name; importing `typing` would cost more than the rest
)
if TYPE_CHECKING:
    from .adapters.keeper.client.function_workers import FunctionError
    from .adapters.keeper.watchdog.progress import progress
    from .adapters.runtime.ports import CannotStart
    from .app.python.launch import JobFailed, launch, launch_async, report_lines
    from .app.settings import HealthCheck, Meeting, Settings
    from .app.simulation.playing import simulate
    from .app.version import __version__
    from .app.wiring.surroundings import Prevented
    from .core.job.entries import Admission, RestartPolicy, Terms

__all__ = [
    "Admission",
    "CannotStart",
    "FunctionError",
    "HealthCheck",
    "JobFailed",
    "Meeting",
    "Prevented",
    "RestartPolicy",
    "Settings",
    "Terms",
    "__version__",
    "launch",
    "launch_async",
    "progress",
    "report_lines",
    "simulate",
]

_HOME = {
    "__version__": "app.version",
    "Admission": "core.job.entries",
    "CannotStart": "adapters.runtime.ports",
    "FunctionError": "adapters.keeper.client.function_workers",
    "JobFailed": "app.python.launch",
    "HealthCheck": "app.settings",
    "Meeting": "app.settings",
    "Prevented": "app.wiring.surroundings",
    "RestartPolicy": "core.job.entries",
    "Settings": "app.settings",
    "Terms": "core.job.entries",
    "launch": "app.python.launch",
    "launch_async": "app.python.launch",
    "progress": "adapters.keeper.watchdog.progress",
    "report_lines": "app.python.launch",
    "simulate": "app.simulation.playing",
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
