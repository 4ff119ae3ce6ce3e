"""`reknit timeline`: what each node of a job did when, as a picture."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files

from reknit.app.report import write
from reknit.core.text.story import merged
from reknit.core.text.telling import head_lines
from reknit.core.text.timeline_data import page_data, perfetto

from .arguments import Parsed, Table
from .looking import HELP, UNREADABLE, WORDS, NotWritten, clock_of, fail, main, put, runs, words_of
from .options import Option, UsageError

_DATA = "/*DATA*/"
TABLE = Table(
    "reknit timeline",
    (
        Option(
            "output",
            "the file: page.html is a page for a browser, trace.json is for ui.perfetto.dev and chrome://tracing"
            " (default: timeline.html in this folder)",
            "FILE",
            "timeline.html",
            short="o",
            group="What is made",
        ),
        HELP,
    ),
    "reknit timeline [-o FILE] [DIR…]",
    "Draw what each node of a job did when: nodes are rows, rounds have colours, failures are marks. In the page, a"
    " click tells why. It is one file, and loads nothing from elsewhere.",
    WORDS,
    mixes=True,
)


def timeline(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns the exit status."""
    return main(argv, environ, TABLE, _timeline)


def _timeline(parsed: Parsed) -> int:
    path = parsed["output"]
    is_page = path.endswith((".html", ".htm"))
    if not is_page and not path.endswith(".json"):
        raise UsageError(f"--output={path}: a file that ends in .html or .json expected")
    found = runs(words_of(parsed))
    for run in found:
        for line in run.troubles:
            write(2, f"{line}\n")
    told = [run for run in found if run.nodes]
    if not told:
        return fail("nothing in these traces can be read", UNREADABLE)
    if len(told) > 1:
        write(2, f"{len(told)} runs were found; the latest is drawn\n")
    run = max(told, key=lambda run: max(node.ended for node in run.nodes))
    story = merged(run.nodes)
    when = clock_of(story.began, story.ended)
    if is_page:
        head = [*head_lines(story, run.job, when, run.live)]
        head.insert(1, time.strftime("%Y-%m-%d", time.localtime(story.began)))
        text = _page(page_data(story, run.job, when, head))
    else:
        text = json.dumps(perfetto(story, run.job, when))
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise NotWritten(f"--output={path}: {error.strerror}") from None
    put(f"{path}\n")
    return 0


def _page(data: object) -> str:
    template = (files(__package__) / "timeline.html").read_text(encoding="utf-8")
    # Inside a script element, only `<` could end it.
    return template.replace(_DATA, json.dumps(data).replace("<", "\\u003c"))
