"""Which handler a backend name stands for, and what its parameters mean. Nothing here opens a store."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reknit.app.settings import Meeting
from reknit.core.job.entries import Admission
from reknit.elastic import rendezvous
from reknit.elastic.rendezvous import RendezvousHandlerRegistry, RendezvousParameters, rendezvous_handler_registry
from reknit.elastic.rendezvous.handler import ReknitRendezvousHandler
from reknit.elastic.rendezvous.registry import get_rendezvous_handler


def params(backend: str = "c10d", endpoint: str = "h:7", nodes: tuple[int, int] = (2, 3), **config: Any) -> Any:
    run_id, local_addr = config.pop("run_id", "job1"), config.pop("local_addr", None)
    return RendezvousParameters(backend, endpoint, run_id, *nodes, local_addr=local_addr, **config)


def handler(*args: Any, **config: Any) -> ReknitRendezvousHandler:
    return ReknitRendezvousHandler(params(*args, **config), environ={})


# ---- where ----


@pytest.mark.parametrize(
    ("backend", "endpoint", "place"),
    [
        ("c10d", "h", "c10d://h:29400"),
        ("c10d", "h:7", "c10d://h:7"),
        ("c10d", "localhost:7", "c10d://localhost:7"),
        ("static", "h:7", "c10d://h:7"),
        ("file", "/s/x", "file:///s/x"),
        ("etcd", "a,b:7", "etcd://a:2379,b:7"),
        ("reknit", "h:7", "c10d://h:7"),
        ("reknit", "/s/x", "file:///s/x"),
        ("reknit", "etcd://a,b:7", "etcd://a:2379,b:7"),
        ("reknit", "file:///s/x", "file:///s/x"),
    ],
)
def test_a_backend_name_means_the_journal_of_reknit(backend: str, endpoint: str, place: str) -> None:
    """The names mean the same as after `reknit run --rdzv-backend`."""
    meeting = handler(backend, endpoint).meeting()
    assert meeting is not None
    assert meeting.place == place


@pytest.mark.parametrize("endpoint", ["", "localhost:0", "h:0"])
@pytest.mark.parametrize("backend", ["c10d", "etcd", "static", "reknit"])
def test_without_an_endpoint_the_job_has_one_node(backend: str, endpoint: str) -> None:
    """`LaunchConfig` begins with the backend etcd and no endpoint. A script that never thought of nodes must run."""
    alone = handler(backend, endpoint, (1, 4))
    assert alone.meeting() is None
    assert (alone.terms().min_nodes, alone.terms().max_nodes) == (1, 1)


def test_one_node_needs_no_store() -> None:
    """As with `reknit run`: an endpoint costs a lone node nothing."""
    assert handler("c10d", "h:7", (1, 1)).meeting() is None


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: handler("c10d", ""), "endpoint is empty, so 2 nodes cannot meet"),
        (lambda: handler("c10d", "localhost:0"), "endpoint=localhost:0: port 0 is another one on every node"),
        (lambda: handler("c10d", "h:x"), "endpoint=h:x: a port is a number"),
        (lambda: handler("etcd-v2", "h:7"), "backend=etcd-v2: etcd has no such API"),
        (lambda: handler("etcd-v2", "", (1, 1)), "backend=etcd-v2: etcd has no such API"),
        (lambda: handler("reknit", "zeus://h:7"), "backend=zeus: static, c10d, file or etcd"),
        (lambda: handler(run_id=""), "run_id is empty"),
        (lambda: handler(join_timeout="soon"), "config: join_timeout=soon: a number of seconds expected"),
        (lambda: handler(is_host=2), "config: is_host=2: true or false"),
        (lambda: handler("etcd", "h", ca_cert="a,b"), "config: ca_cert=a,b: without a comma"),
        (lambda: handler(admission="late"), "admission=late: soon, at-failure or never"),
        (lambda: handler("static", "h:7", (2, 2), rank=2), "rank=2: with 2 nodes it is at most 1"),
    ],
)
def test_what_cannot_be_is_refused_when_the_handler_is_made(made: Any, says: str) -> None:
    """The message names the parameter, not an option of a command line that nobody typed."""
    with pytest.raises(ValueError, match=says):
        made()


# ---- on which terms ----


def test_the_settings_of_the_backend_are_those_of_rdzv_conf() -> None:
    """A `rdzv_configs` that works with torch works here, with numbers as well as with texts."""
    asked = handler(
        join_timeout=60, last_call_timeout="5", heartbeat=10.0, is_host=True, local_addr="[::1]", node_id="n7"
    )
    terms = asked.terms(max_restarts=4)
    assert (terms.min_nodes, terms.max_nodes, terms.restarts.max_restarts) == (2, 3, 4)
    assert (terms.join_timeout_s, terms.last_call_s, terms.silence_s) == (60.0, 5.0, 7.0)
    assert asked.meeting() == Meeting("c10d", endpoints=(("h", 7),), is_host=True)
    assert (asked.address, asked.node_id) == ("::1", "n7")


def test_the_options_that_are_no_rdzv_conf_can_be_given_as_well() -> None:
    """A program, and plain torchrun, have no other way to give them."""
    asked = handler(admission="never", store_timeout=7, fence_after=2)
    assert (asked.terms().admission, asked.terms().fence_s, asked.store_timeout_s) == (Admission.NEVER, 2.0, 7.0)


def test_static_takes_the_rank_and_the_timeout_that_torchs_launcher_gives() -> None:
    """torchrun turns --node-rank into a setting of the static backend."""
    asked = handler("static", "h:7", (2, 2), rank=1, timeout=900)
    assert (asked.rank_hint, asked.terms().join_timeout_s, asked.notices) == (1, 900.0, ())


def test_the_timeout_that_the_launcher_always_gives_does_not_change_c10d() -> None:
    """As in torch. `LaunchConfig` puts it into every configuration, so nothing is said about it either."""
    asked = handler(timeout=900)
    assert (asked.terms().join_timeout_s, asked.notices) == (600.0, ())


def test_the_secret_is_read_from_the_environment() -> None:
    """A secret among the parameters would be logged by torch's launcher."""
    meeting = ReknitRendezvousHandler(params(), {"REKNIT_RDZV_SECRET": "s"}).meeting()
    assert meeting is not None
    assert meeting.secret == "s"


# ---- RendezvousParameters ----


MISTAKES: tuple[Callable[[Any], object], ...] = (
    lambda module: module.RendezvousParameters("", "h", "j", 1, 1),
    lambda module: module.RendezvousParameters(None, "h", "j", 1, 1),
    lambda module: module.RendezvousParameters("c10d", "h", "j", 0, 1),
    lambda module: module.RendezvousParameters("c10d", "h", "j", 2, 1),
    lambda module: module.RendezvousParameters("c10d", "h", "j", 1, 1, key="maybe").get_as_bool("key"),
    lambda module: module.RendezvousParameters("c10d", "h", "j", 1, 1, key=1.5).get_as_bool("key"),
    lambda module: module.RendezvousParameters("c10d", "h", "j", 1, 1, key="maybe").get_as_int("key"),
    lambda module: registry_of(module).register("", Custom),
    lambda module: registry_of(module).register("other", len),
    lambda module: registry_of(module).create_handler(module.RendezvousParameters("other", "h", "j", 1, 1)),
    lambda module: registry_of(module).create_handler(module.RendezvousParameters("zeus", "h", "j", 1, 1)),
)


def registry_of(module: Any) -> Any:
    """A fresh registry of this package. The creator that it knows was registered under a wrong name."""
    made = module.RendezvousHandlerRegistry()
    made.register("other", Custom)
    return made


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_torchs_words(mistake: Callable[[Any], object]) -> None:
    """Programs look for these words, mostly in their tests."""
    from torch.distributed.elastic import rendezvous as theirs

    def told(module: Any) -> tuple[type, str]:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            mistake(module)
        return caught.type, str(caught.value)

    assert told(rendezvous) == told(theirs)


@pytest.mark.parametrize("value", [None, True, 0, 1, 2, "1", "T", "no", "maybe", 1.5, "7", " 8 "])
def test_settings_are_read_as_torch_reads_them(value: object) -> None:
    """Handlers of other packages read their settings by these methods."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters as TorchParameters

    def read(asked: Any, method: str) -> object:
        try:
            return getattr(asked, method)("key")
        except ValueError:
            return "refused"

    ours = RendezvousParameters("b", "e", "r", 1, 1, key=value)
    theirs = TorchParameters("b", "e", "r", 1, 1, key=value)
    for method in ("get", "get_as_bool", "get_as_int"):
        assert read(ours, method) == read(theirs, method), method
    assert ours.get("other", 3) == 3
    assert ours.get_as_bool("other", True) is True
    assert ours.get_as_int("other") is None


def test_the_fields_of_parameters_are_torchs() -> None:
    """Handlers of other packages read the fields, too."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters as TorchParameters

    args = ("c10d", "h:7", "j", 1, 2, "10.0.0.1")
    assert vars(RendezvousParameters(*args, a=1)) == vars(TorchParameters(*args, a=1))


# ---- the registry ----


class Custom:
    def __init__(self, asked: RendezvousParameters) -> None:
        self.params = asked

    def get_backend(self) -> str:
        return "custom"


def test_a_registered_creator_makes_the_handler() -> None:
    """The way in which programs bring a handler of their own."""
    registry = RendezvousHandlerRegistry()
    registry.register("custom", Custom)
    registry.register("custom", Custom)
    made = registry.create_handler(params("custom"))
    assert isinstance(made, Custom)
    assert made.params.endpoint == "h:7"


def test_a_name_has_one_creator() -> None:
    """Two packages that take one name must find out before a job runs with the wrong one."""
    with pytest.raises(ValueError, match="already registered"):
        rendezvous_handler_registry.register("c10d", Custom)


@pytest.mark.parametrize("backend", ["c10d", "file", "etcd", "static", "reknit"])
def test_the_registry_makes_the_light_handler(backend: str) -> None:
    """A backend name never loads torch, see below."""
    made = get_rendezvous_handler(params(backend, "folder" if backend == "file" else "h:7"))
    assert isinstance(made, ReknitRendezvousHandler)
    assert (made.get_backend(), made.get_run_id()) == (backend, "job1")


def test_the_prefix_torch_asks_for_torchs_own_handler() -> None:
    """For those who must meet agents of torchrun."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    made = get_rendezvous_handler(params("torch:c10d", "localhost:0", (1, 1)))
    assert isinstance(made, DynamicRendezvousHandler)
    assert made.get_backend() == "c10d"
    made.shutdown()


PLUGIN = """
class Handler:
    def __init__(self, params):
        self.params = params

    def get_backend(self):
        return "outside"

def get_creator():
    return Handler

def broken():
    raise OSError("no licence")
"""


def test_handlers_of_other_packages_are_found_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch: an entry point of the group `torchrun.handlers` loads a function that returns the creator."""
    (tmp_path / "outside_handlers.py").write_text(PLUGIN)
    info = tmp_path / "outside_handlers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-handlers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[torchrun.handlers]\noutside = outside_handlers:get_creator\nbroken = outside_handlers:broken\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = get_rendezvous_handler(params("outside"))
    assert type(made).__module__ == "outside_handlers"
    with pytest.raises(ValueError, match="'broken' of outside_handlers:broken cannot be loaded: no licence"):
        get_rendezvous_handler(params("broken"))


# ---- torch ----


def test_no_torch_is_loaded_for_a_backend_of_reknit() -> None:
    """The launcher must not pay for torch before it starts a worker."""
    code = (
        "import sys; from reknit.elastic.rendezvous import RendezvousParameters\n"
        "from reknit.elastic.rendezvous.registry import get_rendezvous_handler\n"
        "handler = get_rendezvous_handler(RendezvousParameters('c10d', 'h:7', 'j', 2, 2, is_host='true'))\n"
        "handler.meeting(); handler.terms()\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_exceptions_and_the_handler_are_torchs() -> None:
    """`except` catches what torch raises, whichever module the name was imported from."""
    from torch.distributed.elastic.rendezvous import api as torchs

    from reknit.elastic import rendezvous
    from reknit.elastic.rendezvous import api

    for name in torchs.__all__:
        is_ours = name in ("RendezvousParameters", "RendezvousHandlerRegistry", "rendezvous_handler_registry")
        if not is_ours and name != "RendezvousHandlerCreator":
            assert getattr(api, name) is getattr(torchs, name)
        assert getattr(rendezvous, name) is getattr(api, name)
    assert set(api.__all__) == set(torchs.__all__)
    assert isinstance(handler(), api.RendezvousHandler)
    with pytest.raises(AttributeError, match="Unknown"):
        _ = api.Unknown  # type: ignore[attr-defined]  # the wrong name that is meant
