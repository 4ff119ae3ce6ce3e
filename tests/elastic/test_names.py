"""Every name of torch's modules exists in reknit's, or stands in docs/differences.md with its reason."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ELASTIC = "torch.distributed.elastic"
MODULES = [
    *(
        f"{ELASTIC}.{name}"
        for name in (
            "agent.server",
            "agent.server.api",
            "agent.server.health_check_server",
            "agent.server.local_elastic_agent",
            "events",
            "events.api",
            "events.handlers",
            "metrics",
            "metrics.api",
            "multiprocessing",
            "multiprocessing.api",
            "multiprocessing.errors",
            "multiprocessing.errors.error_handler",
            "multiprocessing.errors.handlers",
            "multiprocessing.redirects",
            "multiprocessing.tail_log",
            "rendezvous",
            "rendezvous.api",
            "rendezvous.c10d_rendezvous_backend",
            "rendezvous.dynamic_rendezvous",
            "rendezvous.registry",
            "rendezvous.static_tcp_rendezvous",
            "rendezvous.utils",
            "timer",
            "timer.api",
            "timer.debug_info_logging",
            "timer.file_based_local_timer",
            "timer.local_timer",
            "utils",
            "utils.api",
            "utils.data",
            "utils.distributed",
            "utils.log_level",
            "utils.logging",
            "utils.store",
        )
    ),
    "torch.distributed.launcher",
    "torch.distributed.launcher.api",
    "torch.distributed.run",
]


EXTENDED = ("SimpleElasticAgent", "TimerServer")
"""Classes whose methods with an underscore are meant to be overridden."""


def ours(name: str) -> str:
    """The module of reknit for a module of torch."""
    name = name.replace(ELASTIC, "reknit.elastic")
    return re.sub(r"^torch\.distributed\.(launcher|run)\b", r"reknit.elastic.\1", name)


def public(module: ModuleType) -> Iterator[str]:
    """The names that a program imports from this module: those in `__all__`, or those that the package defines."""
    listed = getattr(module, "__all__", None)
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        home = getattr(value, "__module__", None)
        if listed is None and (home is None or not home.startswith("torch.distributed")):
            continue  # something else that the module has imported, or a plain value
        if listed is None or name in listed:
            yield name


def left_out() -> set[str]:
    """The names in the table of docs/differences.md: `module.name`, as torch's."""
    _, _, table = (ROOT / "docs/differences.md").read_text().partition("## Names that do not exist here")
    return set(re.findall(r"^\| `(torch\.distributed\.[\w.]+(?:\(\))?)` \|", table, re.M))


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_exists(module: str) -> None:
    """A search and replace of the package's name must be enough."""
    theirs, found = import_module(module), import_module(ours(module))
    missing = {name for name in public(theirs) if not hasattr(found, name) and f"{module}.{name}" not in left_out()}
    assert not missing


@pytest.mark.parametrize("module", MODULES)
def test_every_parameter_exists(module: str) -> None:
    """In the same order with the same default, or code that gives arguments by place would mean something else.
    Further parameters follow."""
    theirs, found = import_module(module), import_module(ours(module))
    for name in public(theirs):
        pair = getattr(theirs, name), getattr(found, name, None)
        if pair[1] is None or pair[0] is pair[1] or f"{module}.{name}()" in left_out():
            continue
        for label, theirs_, ours_ in callables(name, *pair):
            if f"{module}.{label}()" not in left_out():
                compare(f"{module}.{label}", theirs_, ours_)


def callables(name: str, theirs: Any, found: Any) -> Iterator[tuple[str, Any, Any]]:
    """The function, or the constructor and the public methods of the class."""
    if inspect.isfunction(theirs):
        yield name, theirs, found
    if not inspect.isclass(theirs) or issubclass(theirs, BaseException):
        return
    yield name, theirs, found
    for method, value in vars(theirs).items():
        is_public = not method.startswith("_") or (name in EXTENDED and not method.startswith("__"))
        if inspect.isfunction(value) and is_public:
            assert hasattr(found, method), f"{name}.{method} is missing"
            yield f"{name}.{method}", value, getattr(found, method)


def compare(label: str, theirs: Any, found: Any) -> None:
    try:
        wanted = inspect.signature(theirs).parameters
    except (TypeError, ValueError):
        return  # a class of C, an enum, a named tuple
    own = list(inspect.signature(found).parameters.values())
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(parameter.kind in kinds for parameter in (*wanted.values(), *own)):
        return
    names = [parameter.name for parameter in own]
    assert names[: len(wanted)] == [*wanted], label
    for parameter, ours_ in zip(wanted.values(), own, strict=False):
        has_default = parameter.default is not inspect.Parameter.empty
        assert has_default <= (ours_.default is not inspect.Parameter.empty), f"{label}: {parameter.name} needs a value"
        if isinstance(parameter.default, str | int | float | bool | None):
            assert ours_.default == parameter.default, f"{label}: {parameter.name}"


def test_nothing_is_listed_that_exists() -> None:
    """A table that outlives its reasons hides the next gap."""
    stale = set()
    for name in left_out():
        module, _, last = name.rpartition(".")
        try:
            if hasattr(import_module(ours(module)), last):
                stale.add(name)
        except ModuleNotFoundError:
            pass
    assert not stale
