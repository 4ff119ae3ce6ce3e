"""Where events go: the names that a user may give, and what happens with a name that cannot be used."""

from __future__ import annotations

import logging
import logging.handlers
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from reknit.adapters.observe import destinations
from reknit.adapters.observe.destinations import (
    HANDLERS,
    RENDEZVOUS,
    UnusableHandler,
    check,
    handler_of,
    is_recorded,
    is_silent,
    logger_of,
)
from tests.support.handlers import TO_A_FILE, Kept, install


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test adds is gone after it, and packages are looked for again."""
    monkeypatch.setattr(destinations, "HANDLERS", dict(HANDLERS))
    destinations._installed.cache_clear()
    yield
    destinations._installed.cache_clear()


def test_a_handler_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform installs its handler once, and jobs name it. Its code is not run before there is a keeper."""
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "platform_of_ours", TO_A_FILE, ours="platform_of_ours:ToAFile")
    check("ours")
    assert "platform_of_ours" not in sys.modules
    made = handler_of("ours")
    assert type(made).__name__ == "ToAFile"
    assert handler_of("ours") is made
    monkeypatch.delitem(sys.modules, "platform_of_ours")


@pytest.mark.parametrize(
    "path",
    ["tests.support.handlers:Kept", "logging:StreamHandler", "logging.handlers:SysLogHandler", "logging:lastResort"],
)
def test_a_handler_by_its_import_path(path: str) -> None:
    """One's own handler needs no package: a class, a function, or an object."""
    made = handler_of(path)
    assert isinstance(made, logging.Handler)
    made.close()


def test_a_handler_that_torch_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform that was made for torch adds its handler to torch's table."""
    kept, module = Kept(), ModuleType(destinations._TORCHS)
    module._log_handlers = {"theirs": kept, RENDEZVOUS: kept, "console": kept}  # type: ignore[attr-defined]  # as torch has it
    monkeypatch.setitem(sys.modules, destinations._TORCHS, module)
    assert handler_of("theirs") is kept
    assert handler_of(RENDEZVOUS) is kept
    assert handler_of("console") is destinations.CONSOLE


@pytest.mark.parametrize("name", ["nowhere", "", ":", "a:", ":b"])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name: str) -> None:
    """A typing error must not cost the events of a whole job. torch raises `KeyError`."""
    for attempt in (check, handler_of, is_silent):
        with pytest.raises(KeyError) as caught:
            attempt(name)
        assert isinstance(caught.value, ValueError)
        assert str(caught.value) == (
            f"no event handler is called {name!r}; there are console and null."
            " Any other is named by its import path, module:name"
        )


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere_at_all:x", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("logging:nothing", "AttributeError: module 'logging' has no attribute 'nothing'"),
        ("builtins:dict", "builtins:dict is no logging.Handler, and makes none, but dict"),
        ("operator:truediv", "TypeError: truediv expected 2 arguments, got 0"),
    ],
)
def test_a_handler_that_cannot_be_made_is_one_line(path: str, why: str) -> None:
    """The user reads what is wrong with the handler, and no traceback."""
    with pytest.raises(UnusableHandler) as caught:
        handler_of(path)
    assert str(caught.value) == f"the event handler {path} cannot be made: {why}"


def test_a_handler_that_fails_raises_where_logging_would_print_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Most handlers give their errors to logging, which prints some twenty lines for each event."""
    made = handler_of("logging:StreamHandler")
    made.setFormatter(logging.Formatter("%(nothing)s"))
    with pytest.raises(ValueError, match="nothing"):
        logger_of("logging:StreamHandler", made).info("line")
    assert capsys.readouterr().err == ""


def test_nobody_listens_to_the_rendezvous_unless_somebody_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These events are of use to few."""
    assert is_silent(RENDEZVOUS)
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "listener", TO_A_FILE, **{RENDEZVOUS: "listener:ToAFile"})
    destinations._installed.cache_clear()
    assert not is_silent(RENDEZVOUS)
    monkeypatch.delitem(sys.modules, "listener")


def test_a_logger_follows_its_handler() -> None:
    """A program may put another handler under the same name between two runs."""
    first, second = Kept(), Kept()
    for handler in (first, second):
        logger_of("followed", handler).info("line")
    assert (first.lines, second.lines) == (["line"], ["line"])
    assert not logging.getLogger("torchelastic-events-followed").propagate


@pytest.mark.parametrize(
    ("level", "is_so"), [("INFO", True), ("debug", True), ("WARNING", False), ("no level", True), ("", True)]
)
def test_the_level_is_that_of_the_variable(level: str, is_so: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch, LOGLEVEL=WARNING records nothing. A level that does not exist ends no job."""
    monkeypatch.setenv("LOGLEVEL", level)
    assert is_recorded() is is_so
    kept = Kept()
    logger_of(f"level {level}", kept).info("line")
    assert bool(kept.lines) is is_so
