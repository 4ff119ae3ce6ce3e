"""How long to search: the profiles quick, change, long, night and mutation. REKNIT_PROFILE=long REKNIT_SEED=<commit>.

A night can be run in parts: each part is a run with another seed, and searches other histories.

Hypothesis has one profile at a time, for the whole process. `tests/` has another one. So each folder loads its own
profile before each of its modules and tests. pytest calls these hooks only for what is in this folder.
"""

from __future__ import annotations

import faulthandler
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings

# Hypothesis has profiles of its own, among them one named `ci` that it loads where `CI` is set. A profile of that name
# would become the default of all others.
COMMON: dict[str, Any] = {
    "parent": settings.get_profile("default"),
    "deadline": None,
    "print_blob": True,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}
settings.register_profile("quick", max_examples=60, **COMMON)
settings.register_profile("change", max_examples=400, **COMMON)
# Once for every mutant of the core. That some history shows the mutant is enough, so none is made shorter.
settings.register_profile("mutation", max_examples=200, phases=[Phase.generate], **COMMON)
settings.register_profile("long", max_examples=6000, **COMMON)
settings.register_profile("night", max_examples=100_000, **COMMON)
PROFILE = os.environ.get("REKNIT_PROFILE", "quick")
HISTORIES = {"quick": 50, "change": 300}.get(PROFILE, settings.get_profile(PROFILE).max_examples)
"""Whole clusters that are played. `test_reach` plays others, with the same checks: about a hundred in `quick`."""
SEED = int(os.environ.get("REKNIT_SEED", "0")[:12], 16)
"""A commit's name will do: the same tests of the same commit search the same histories, the next one others."""


def pytest_report_header() -> str:
    return f"property tests: profile {PROFILE}, seed {SEED:x} (REKNIT_PROFILE, REKNIT_SEED)"


def pytest_collectstart() -> None:
    settings.load_profile(PROFILE)


def pytest_runtest_setup() -> None:
    settings.load_profile(PROFILE)
    if PROFILE not in ("quick", "change", "mutation"):
        faulthandler.cancel_dump_traceback_later()  # a search may take hours, and `pyproject.toml` grants 900 s


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give every test drawn by Hypothesis the run's seed."""
    test = getattr(item, "obj", None)
    if hasattr(test, "hypothesis"):
        seed(SEED)(test)
