"""Modules of torch that have a name here as well. `reknit.elastic` puts their finder into `sys.meta_path`.

1. Both names are one module, and not a copy of its names. So what a test patches here is patched there, and a class has
   one identity.
2. torch is loaded when such a module is imported, and not before.
3. The finder is the last to be asked, and knows the names below only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAMES = (
    "rendezvous.c10d_rendezvous_backend",
    "rendezvous.dynamic_rendezvous",
    "rendezvous.etcd_rendezvous",
    "rendezvous.etcd_rendezvous_backend",
    "rendezvous.etcd_server",
    "rendezvous.etcd_store",
    "rendezvous.static_tcp_rendezvous",
    "rendezvous.utils",
    "timer.debug_info_logging",
    "timer.local_timer",
    "utils.data",
    "utils.store",
)
ALIASES = {f"reknit.elastic.{name}": f"torch.distributed.elastic.{name}" for name in _NAMES}
"""By name here: torch's name."""


class Finder:
    """A finder and a loader of `ALIASES`, as `importlib.abc` describes them. Its classes are not used: they are slow to
    import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ALIASES:
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]  # a loader by its methods, see above

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes an empty module, which is dropped. If this returned torch's module, Python would write the name
        here into its `__spec__`."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(ALIASES[module.__name__])
