"""Gives the processes that a test starts a folder for their locks. Python imports this module when it starts, because
`tests/conftest.py` puts this folder into PYTHONPATH.

No variable moves that folder, and tests that run side by side must not end what the others leave. So the module that
chooses the folder is changed when it is imported.
"""

import os
import sys


class _Placed:
    """Finds one module, and changes where it puts the folder."""

    def __init__(self, base):
        self._base = base

    def find_spec(self, name, path=None, target=None):
        if name != "reknit.adapters.host.place":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.BASES = (self._base,)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("LOCKS_OF_TESTS"):
    sys.meta_path.insert(0, _Placed(os.environ["LOCKS_OF_TESTS"]))
