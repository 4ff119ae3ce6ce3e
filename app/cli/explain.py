"""`reknit explain`: what has become of a job, in plain sentences, from the traces of its agents."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence

from reknit.core.text.story import merged
from reknit.core.text.telling import told

from .arguments import Parsed, Table
from .looking import HELP, WORDS, clock_of, main, runs, words_of
from .options import Option

TABLE = Table(
    "reknit explain",
    (Option("all", "tell every round one by one, even if there are thousands", group="What is told"), HELP),
    "reknit explain [--all] [DIR…]",
    "Tell what has become of a job: its rounds, who failed first and why, what was decided and by which rule, who was"
    " waited for, and where the time went. The agents of several nodes are told as one story: name the folders of all.",
    WORDS,
    mixes=True,
)


def explain(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns the exit status."""
    return main(argv, environ, TABLE, _explained)


def _explained(parsed: Parsed) -> Iterator[str]:
    for number, run in enumerate(runs(words_of(parsed))):
        if number:
            yield ""
        if run.nodes:
            story = merged(run.nodes)
            yield time.strftime("%Y-%m-%d", time.localtime(story.began))
            yield from told(story, run.job, clock_of(story.began, story.ended), live=run.live, shows_all=parsed["all"])
        yield from run.troubles
