"""`reknit.elastic.utils`."""

from __future__ import annotations

import logging

import pytest

from reknit.elastic.utils import get_env_variable_or_raise, get_socket_with_port, macros
from reknit.elastic.utils.distributed import get_free_port
from reknit.elastic.utils.logging import get_logger


def test_macros_are_those_of_torch() -> None:
    """Arguments that are no text, and other macros, stay as they are."""
    from torch.distributed.elastic.utils import macros as theirs

    args = ["a${local_rank}", "$${local_rank}", 3, "${other}", None]
    assert macros.substitute(args, "1") == theirs.substitute(args, "1") == ["a1", "${local_rank}", 3, "${other}", None]
    assert macros.local_rank == theirs.local_rank


def test_a_variable_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that asks cannot go on without it."""
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(ValueError, match="NOT_THERE"):
        get_env_variable_or_raise("NOT_THERE")


def test_ports() -> None:
    """The socket listens already, and a free port is a number that can be bound."""
    with get_socket_with_port() as listener:
        assert listener.getsockname()[1] > 0
    assert get_free_port() > 0


def test_a_logger_has_the_level_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch: LOGLEVEL, else WARNING. Without a name it is the caller's."""
    monkeypatch.delenv("LOGLEVEL", raising=False)
    assert get_logger().name == __name__
    assert get_logger("reknit.test.a").level == logging.WARNING
    for text, level in (("DEBUG", logging.DEBUG), ("debug", logging.DEBUG), ("loud", logging.WARNING)):
        monkeypatch.setenv("LOGLEVEL", text)
        assert get_logger("reknit.test.a").level == level
