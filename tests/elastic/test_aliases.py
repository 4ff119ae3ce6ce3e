"""Modules of `reknit.elastic` that are torch's own modules."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import pytest

from reknit.elastic.aliases import ALIASES


def torchs(name: str) -> object:
    """torch's module of this name. The test is skipped if torch needs a package for it that is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"torch needs {error.name} for this module")


@pytest.mark.parametrize("name", ALIASES)
def test_the_module_is_torchs_own(name: str) -> None:
    """A copy of the names would be another class for `except` and `isinstance`, and another target for a patch."""
    theirs = torchs(ALIASES[name])
    assert import_module(name) is theirs
    package, _, last = name.rpartition(".")
    assert getattr(import_module(package), last) is theirs
    assert sys.modules[name] is sys.modules[ALIASES[name]] is theirs
    spec = find_spec(ALIASES[name])
    assert spec is not None
    assert spec.name == ALIASES[name]


def test_every_form_of_import_finds_it() -> None:
    """Programs use all of them."""
    import torch.distributed.elastic.utils.data as theirs

    import reknit.elastic.utils.data
    import reknit.elastic.utils.data as named
    from reknit.elastic.utils import data
    from reknit.elastic.utils.data import ElasticDistributedSampler

    assert reknit.elastic.utils.data is named is data is theirs
    assert ElasticDistributedSampler is theirs.ElasticDistributedSampler


def test_a_pickle_names_torchs_module() -> None:
    """So a process that has only torch can read it, and one that has reknit gets the same class."""
    from reknit.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

    assert pickle.loads(pickle.dumps(RendezvousTimeout)) is RendezvousTimeout


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_asked_for() -> None:
    """torch is slow to import. A module that is neither here nor in torch is missing, as usual."""
    code = """if True:
        import importlib.util, sys
        import reknit.elastic.rendezvous, reknit.elastic.timer, reknit.elastic.utils
        assert importlib.util.find_spec("reknit.elastic.timer.local_timer") is not None
        assert "torch" not in sys.modules
        try:
            import reknit.elastic.utils.nothing
        except ModuleNotFoundError as error:
            assert error.name == "reknit.elastic.utils.nothing"
        from reknit.elastic.timer import LocalTimerClient
        from reknit.elastic.timer.local_timer import LocalTimerClient as again
        assert LocalTimerClient is again
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


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
