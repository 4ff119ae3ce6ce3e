"""Modules of `reknit.elastic.rendezvous` that are torch's own modules."""

from __future__ import annotations

from importlib import import_module
from unittest import mock

import pytest

TORCHS = (
    "c10d_rendezvous_backend",
    "dynamic_rendezvous",
    "etcd_rendezvous",
    "etcd_rendezvous_backend",
    "etcd_server",
    "etcd_store",
    "static_tcp_rendezvous",
    "utils",
)


@pytest.mark.parametrize("name", TORCHS)
def test_the_module_is_torchs_own(name: str) -> None:
    """A copy of the names would be another class for `except` and `isinstance`, and another target for a patch."""
    try:
        theirs = import_module(f"torch.distributed.elastic.rendezvous.{name}")
    except ModuleNotFoundError as error:
        pytest.skip(f"torch needs {error.name} for this module")
    assert import_module(f"reknit.elastic.rendezvous.{name}") is theirs
    assert getattr(import_module("reknit.elastic.rendezvous"), name) is theirs


def test_what_is_patched_here_is_patched_in_torch() -> None:
    """Users patch names where they import them from, in their own tests."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as theirs

    from reknit.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

    assert RendezvousTimeout is theirs.RendezvousTimeout
    with mock.patch("reknit.elastic.rendezvous.dynamic_rendezvous.RendezvousTimeout", "patched"):
        assert theirs.RendezvousTimeout == "patched"


def test_one_except_catches_both() -> None:
    """The error of torch's handler is caught under the name of reknit's module."""
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    from reknit.elastic.rendezvous import RendezvousClosedError
    from reknit.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    store = HashStore()
    handler = DynamicRendezvousHandler.from_backend("j", store, C10dRendezvousBackend(store, "j"), 1, 1)
    handler.set_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
