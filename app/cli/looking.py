"""What the verbs that read traces share: which traces the user means, and how they end."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from attrs import evolve, frozen

from reknit.adapters.keeper.output.console import escaped
from reknit.adapters.observe.now import of_live
from reknit.adapters.observe.trace_reader import Resumed
from reknit.adapters.observe.traces import StoredTrace, Unreadable, below, of_this_host, told_by
from reknit.app.report import PREFIX, USAGE, write
from reknit.core.text.story import NodeStory, Told, lasting, node_story

from .arguments import Parsed, Table, help_text, parse
from .options import Option, UsageError

HELP = Option("help", "this text", short="h", group="Help")
WORDS = (
    "DIR is a folder with traces, for example what --log-dir has named. It may also be the name of a job (--rdzv-id)"
    " whose agents run or ran on this host. Without it, the latest job on this host is meant."
)
_NOT_WRITTEN = 74
"""EX_IOERR."""
_LONG = 200
"""A command line of more characters is cut."""
UNREADABLE = 65
"""The exit status for a trace of which nothing can be read: EX_DATAERR."""


def main(
    argv: Sequence[str], environ: Mapping[str, str], table: Table, run: Callable[[Parsed], Iterator[str] | int]
) -> int:
    """Parse the command line and run the verb. Returns the exit status. `run` gives lines for stdout, or a status. A
    mistake of the user gives one line and no traceback."""
    try:
        parsed = parse(argv, environ, table)
        if parsed["help"]:
            put(help_text(table))
            return 0
        done = run(parsed)
        if isinstance(done, int):
            return done
        show(done)
        return 0
    except UsageError as e:
        return fail(str(e), USAGE)
    except NotWritten as e:
        return fail(str(e), _NOT_WRITTEN)


class NotWritten(Exception):
    """The output cannot be written, for example because the disk is full."""


def fail(line: str, status: int) -> int:
    """Write a line to stderr. Returns the status."""
    write(2, f"{PREFIX}{line}\n")
    return status


def show(lines: Iterable[str]) -> bool:
    """Write lines to stdout. False: nobody reads them any more, as in `… | head`. That is no failure."""
    return all(put(f"{escaped(line)}\n") for line in lines)


def put(text: str) -> bool:
    """Write to stdout. False: nobody reads it any more. Raises `NotWritten`."""
    data = text.encode(errors="backslashreplace")
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        return False
    except OSError as e:
        raise NotWritten(f"stdout cannot be written: {e.strerror}") from None
    return True


def words_of(parsed: Parsed) -> tuple[str, ...]:
    return (parsed.script, *parsed.args) if parsed.script else ()


def no_agent(jobs: Sequence[str]) -> str:
    """No agent of these jobs runs on this host: which jobs run here. `jobs`: their names. Empty: any job is meant."""
    if not jobs:
        return "no agent runs on this host"
    here = sorted({now.about.job for now in of_live()})
    return f"no agent of job {', '.join(jobs)} runs on this host; jobs that run here: {', '.join(here) or 'none'}"


def found(words: Sequence[str]) -> dict[str, list[StoredTrace]]:
    """The traces that the user means, by the name of the job. Raises `UsageError` if there are none."""
    if not words:
        here = of_this_host()
        if not here:
            raise UsageError("no agent has left a trace on this host; name a folder with traces")
        words = (_name(here[-1]),)
    traces: dict[str, StoredTrace] = {}
    for word in words:
        given = below(word) if os.path.isdir(word) else [t for t in of_this_host() if _name(t) == word]
        if not given:
            what = "holds no trace" if os.path.isdir(word) else "is no folder, and no job that ran on this host"
            raise UsageError(f"{word} {what}")
        traces |= {trace.path: trace for trace in given}
    jobs: dict[str, list[StoredTrace]] = {}
    for trace in traces.values():
        jobs.setdefault(_name(trace), []).append(trace)
    return jobs


def _name(trace: StoredTrace) -> str:
    return trace.about.job if trace.about is not None else "?"


@frozen
class RunOfJob:
    """One run of a job: the agents that have used one journal."""

    job: str
    """Its name."""
    nodes: tuple[NodeStory, ...]
    live: frozenset[str]
    """The nodes whose agents run now."""
    troubles: tuple[str, ...]
    """Lines about what cannot be read."""


def runs(words: Sequence[str]) -> list[RunOfJob]:
    """The runs that the user means, the oldest first. A job that is named, or nothing, means its latest run. A folder
    means all runs whose traces it holds. Raises `UsageError` if there are none."""
    made: list[RunOfJob] = []
    for job, traces in found(words).items():
        own = _runs(job, traces)
        made += own if any(os.path.isdir(word) for word in words) else own[-1:]
    return made


def latest_run(job: str) -> RunOfJob:
    """The latest run of this job on this host. It has no nodes if nothing of it can be read."""
    return _runs(job, [trace for trace in of_this_host() if _name(trace) == job])[-1]


def _runs(job: str, traces: Sequence[StoredTrace]) -> list[RunOfJob]:
    """The runs whose traces these are, the oldest first, at least one. The last one has the troubles of all."""
    by_journal: dict[str, list[tuple[StoredTrace, NodeStory]]] = {}
    troubles: list[str] = []
    for trace in traces:
        if (story := _story(trace, troubles)) is not None:
            by_journal.setdefault(story.job.journal, []).append((trace, story))
    own = [_run(job, stories) for stories in by_journal.values()]
    own.sort(key=lambda run: min(node.began for node in run.nodes))
    last = own.pop() if own else RunOfJob(job, (), frozenset(), ())
    return [*own, evolve(last, troubles=tuple(troubles))]


def _run(job: str, stories: Sequence[tuple[StoredTrace, NodeStory]]) -> RunOfJob:
    now, live, nodes = time.time(), set(), []
    for trace, story in stories:
        is_live = not story.has_ended and trace.is_live
        if is_live:
            live.add(story.node)
        until = now if is_live else min(now, trace.alive_at)
        nodes.append(story if story.has_ended or until <= story.ended else lasting(story, until))
    return RunOfJob(job, tuple(nodes), frozenset(live), ())


def _story(trace: StoredTrace, troubles: list[str]) -> NodeStory | None:
    if trace.is_cut:
        troubles.append(f"{trace.path}: a part is missing")
    told: Iterator[Resumed | Told] = readable(trace, by_part(trace, told_by), troubles)
    agents_and_steps = (each.agent if isinstance(each, Resumed) else each for each in told)
    story = node_story(agents_and_steps)
    return story if story is None or trace.about is None else evolve(story, command=command_text(trace.about.command))


T = TypeVar("T")


def by_part(trace: StoredTrace, read: Callable[[StoredTrace], Iterator[T]]) -> Iterator[T]:
    """Read a trace, file after file. On a terminal, a bar shows how far that is if there are several files."""
    parts: Iterable[str] = trace.parts
    if len(trace.parts) > 1:
        name = "a trace" if trace.about is None else f"the trace of node {escaped(trace.about.node)}"
        parts = with_bar(parts, len(trace.parts), f"reading {name}")
    for part in parts:
        yield from read(evolve(trace, parts=(part,)))


def with_bar(things: Iterable[T], total: int, name: str) -> Iterable[T]:
    """Passes the things on. On a terminal, a bar shows how many of them the caller has taken."""
    if not os.isatty(2):
        return things
    from rich.console import Console
    from rich.progress import track

    class Plain(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False  # Ctrl-C ends this process at once, and nobody would show it again

    return track(things, name, total, console=Plain(stderr=True, markup=False), transient=True)


def readable(trace: StoredTrace, found: Iterable[T | Unreadable], troubles: list[str]) -> Iterator[T]:
    """What could be read. Lines about what could not are added to `troubles` meanwhile."""
    for each in found:
        if isinstance(each, Unreadable):
            troubles.append(f"{each.path}, line {each.line}, cannot be read: {each.why}")
            continue
        if isinstance(each, Resumed) and each.has_lost:
            troubles.append(f"{trace.path}: some steps are missing")
        yield each


def command_text(command: Sequence[str]) -> str:
    """`python3 -u train.py '--name=two words'`"""
    text = shlex.join(command)
    return text if len(text) <= _LONG else f"{text[:_LONG]} …"


def clock_of(began: float, ended: float) -> Callable[[float], str]:
    """How times between these two are written: the day is left out if it is one day."""
    days = {time.strftime("%Y-%m-%d", time.localtime(at)) for at in (began, ended)}
    form = "%H:%M:%S" if len(days) == 1 else "%Y-%m-%d %H:%M:%S"
    return lambda at: f"{time.strftime(form, time.localtime(at))}.{int(at % 1 * 10)}"
