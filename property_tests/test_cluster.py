"""Whole clusters under all kinds of trouble: no check is ever broken, and everything comes to rest."""

from __future__ import annotations

from math import inf

from hypothesis import event as note
from hypothesis import example, given, settings

from reknit.app.testing.owed import Owed
from reknit.app.testing.play import play
from reknit.app.testing.script import Script, parse
from reknit.app.testing.weather import scripts
from reknit.core.agent.worker_words import WorkersExited

from .conftest import HISTORIES

OVER_AND_LOST = """
setup min=1 budget=3 fence=yes sizes=1,2 roles=tst weather=lose,partial seed=145
cut b
wait 25
cut b
wait 2
fail c
wait 4.5
fail a
wait 25
fail a
wait 7
fail a
wait 7
start c
wait 0.1
wipe
wait 0.4
"""
"""The store loses the journal of a job that is over. An agent that had read only its beginning founds it again."""


@settings(max_examples=HISTORIES)
@given(scripts())
@example(parse(OVER_AND_LOST))
def test_nothing_breaks_and_everything_rests(script: Script) -> None:
    """A failure prints the shortest script, then its story; `parse` and `play` make it happen again."""
    world = play(script, oracle=True)
    note(f"rounds: {min(5, world.jobs[-1].round)}")
    note(f"epochs: {min(2, world.jobs[-1].epoch)}")
    note(f"end: {world.jobs[-1].outcome.why.__class__.__name__ if world.jobs[-1].outcome else 'none'}")


@settings(max_examples=HISTORIES // 3)
@given(scripts())
def test_the_simulated_ports_keep_what_adapters_owe(script: Script) -> None:
    """In any weather, but for one thing: an exit may be told after the stop of the workers, so that the core must bear
    it. Otherwise the checks of agents would say nothing of agents with good adapters."""
    world = play(script)
    owed = Owed(answer_s=inf)
    for proc in world.procs:
        observer = owed.by(proc.name)
        for before, event, after, commands in proc.steps():
            is_late = isinstance(event, WorkersExited) and observer.round is not None and observer.round.is_over
            if not is_late:
                observer(before, event, after, commands)


@settings(max_examples=100)
@given(scripts())
def test_a_script_is_its_text(script: Script) -> None:
    """Histories are kept as text: what is read back must be the same history."""
    assert parse(str(script)) == script
