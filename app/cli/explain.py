"""`reknit explain`: what has become of a job, in plain sentences, from the traces of its agents."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence

from reknit.core.text.story import merged
from reknit.core.text.telling import told

from .arguments import Parsed, Table
from .looking import HELP, UNREADABLE, WORDS, RunOfJob, clock_of, fail, main, runs, show, words_of
from .options import Option

TABLE = Table(
    "reknit explain",
    (Option("all", "tell every round one by one, even if there are thousands", group="What is told"), HELP),
    "reknit explain [--all] [DIR…]",
    "Tell what has become of a job: its rounds, who failed first and why, what was decided and by which rule, who was"
    " waited for, and where the time went. The agents of several nodes are told as one story: name the folders of all.",
    WORDS
    + " The rules that are named are those of docs/protocol.md. The exit status is 65 if nothing in the traces can be"
    " read.",
    mixes=True,
)


def explain(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns the exit status."""
    return main(argv, environ, TABLE, _explained)


def _explained(parsed: Parsed) -> int:
    found = runs(words_of(parsed))
    show(_lines(found, shows_all=parsed["all"]))
    return 0 if any(run.nodes for run in found) else fail("nothing in these traces can be read", UNREADABLE)


def _lines(found: Sequence[RunOfJob], *, shows_all: bool) -> Iterator[str]:
    for number, run in enumerate(found):
        if number:
            yield ""
        if run.nodes:
            story = merged(run.nodes)
            yield time.strftime("%Y-%m-%d", time.localtime(story.began))
            yield from told(story, run.job, clock_of(story.began, story.ended), live=run.live, shows_all=shows_all)
        yield from run.troubles
