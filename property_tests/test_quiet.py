"""Quiet stretches: what is computed is what would have happened. The small world asks it as well (`Checks.stepped`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.app.testing.checks.shifted import shifted
from reknit.app.testing.checks.stretches import are_computed
from reknit.app.testing.play import play
from reknit.app.testing.script import Script, parse
from reknit.app.testing.weather import scripts
from reknit.core.agent.agent import Agent, Contact, Spec
from reknit.core.agent.quiet import after_beats, beats_before, quiet_until
from reknit.core.agent.step import step
from reknit.core.job.entries import NodeId, Terms
from reknit.core.job.job import Gathering, Job, Running


def agents_of(script: Script) -> Iterator[Agent]:
    """Each agent after each of its steps."""
    for proc in play(script, is_ending=False).procs:
        agent = Agent(proc.spec)
        for traced in proc.trace:
            agent = step(agent, traced.event).agent
            yield agent


@settings(max_examples=15)  # each of them has hundreds of steps
@given(scripts())
def test_computed_beats_are_beats(script: Script) -> None:
    """At every step of every agent, whatever has happened. When a clock begins does not matter."""
    for agent in agents_of(script):
        if are_computed(agent.me.id, agent):
            until = quiet_until(shifted(agent, 0.0))
            assert until is not None
            assert quiet_until(shifted(agent, 2.0**20)) == until + 2.0**20


@given(st.floats(0.0, 2.0**20), st.integers(0, 40), st.sampled_from([0.25, 0.3, 1.0]), st.floats(0.0, 1.0))
def test_beats_are_counted_up_to_a_time(began: float, n: int, beat_s: float, part: float) -> None:
    """A beat at the very time does not come before it."""
    terms = Terms(1, 1, beat_s=beat_s)
    agent = evolve(Agent(Spec(NodeId("a"), "h", terms)), job=Job(terms=terms), contact=Contact(beat_at=began))
    until = began + n * beat_s + part * beat_s
    found = beats_before(agent, until)
    assert found in range(n - 1, n + 2)
    assert found <= 0 or began + found * beat_s < until
    assert began + (found + 1) * beat_s >= until - 1e-6
    assert beats_before(agent, began) == beats_before(agent, began - 5.0) == 0


def test_no_beat_changes_nothing() -> None:
    """And a node whose counter is not given is a mistake of the caller."""
    calm = [agent for agent in agents_of(parse("setup\nwait 20")) if quiet_until(agent) is not None]
    assert after_beats(calm[-1], 0, {}) is calm[-1]
    with pytest.raises(KeyError):
        after_beats(calm[-1], 1, {})


def test_most_of_a_calm_job_is_quiet() -> None:
    """Otherwise the laws above would say nothing: while workers run, and while a node is waited for."""
    seen = set()
    for text in ("setup\nwait 20", "setup nodes=2 formed=1 min=2\nwait 8"):
        agents = list(agents_of(parse(text)))
        calm = [agent for agent in agents if quiet_until(agent) is not None]
        assert len(calm) > len(agents) / 5
        seen |= {type(agent.job.phase) for agent in calm}
    assert seen >= {Running, Gathering}
