"""How long to search. The profiles are quick, ci and night: REKNIT_PROFILE=ci REKNIT_SEED=<commit>."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, seed, settings

COMMON = {
    "deadline": None,
    "print_blob": True,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}
settings.register_profile("quick", max_examples=1000, **COMMON)
settings.register_profile("ci", max_examples=6000, **COMMON)
settings.register_profile("night", max_examples=100_000, **COMMON)
settings.load_profile(os.environ.get("REKNIT_PROFILE", "quick"))

SEED = int(os.environ.get("REKNIT_SEED", "0")[:12], 16)
"""A commit's name will do: the same tests of the same commit search the same histories, the next one others."""


def pytest_report_header() -> str:
    profile = os.environ.get("REKNIT_PROFILE", "quick")
    return f"property tests: profile {profile}, seed {SEED:x} (REKNIT_PROFILE, REKNIT_SEED)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test drawn by Hypothesis the run's seed."""
    for item in items:
        test = getattr(item, "obj", None)
        if hasattr(test, "hypothesis"):
            seed(SEED)(test)
