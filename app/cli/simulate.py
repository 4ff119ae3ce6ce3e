"""`reknit simulate`: what a cluster, its failures and reknit's settings make of the time of a training job."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from attrs import asdict

from reknit.app.input import readers
from reknit.app.report import write
from reknit.app.simulation.accounts import CAUSES
from reknit.app.simulation.cluster import SCENARIOS, BadCluster, SimulatedCluster, of_file, read_value, with_values

from .arguments import Parsed, Table
from .looking import HELP, main, put, runs, show, with_bar, words_of
from .options import Option, UsageError

if TYPE_CHECKING:
    from reknit.app.simulation.playing import Simulation, Sweep

TABLE = Table(
    "reknit simulate",
    (
        Option("scenario", f"a published job: {', '.join(SCENARIOS)}", "NAME", group="Input"),
        Option("file", "a TOML file with a line KEY = VALUE for each", "FILE", group="Input"),
        Option("recorded", "traces of real jobs: nodes, failures and kinds", "DIR", group="Input"),
        Option("compare", "columns for several values, like KEY=A,B", "KEY=A,B…", group="Input"),
        Option("sweep", "lines for several numbers, and the best one", "KEY=A,B…", group="Input"),
        Option("runs", "how often each job is played (10)", "N", "10", readers.whole(1), group="Input"),
        Option("seed", "number of the first run (0); the others follow", "N", "0", readers.whole(0), group="Input"),
        Option("processes", "how many runs at once; 0: one for each CPU", "N", "0", readers.whole(0), group="Input"),
        Option("json", "the answers as JSON", group="Output"),
        Option("save-trace", "the first run, as its first node saw it", "DIR", group="Output"),
        Option("plot", "a picture of --sweep: .png, .svg or .pdf", "FILE", group="Output"),
        HELP,
    ),
    "reknit simulate [options] [KEY=VALUE…]",
    "Play a training job for weeks in seconds, with the decisions that reknit's agents really take, and say which part"
    " of the time is training, and where the rest goes.",
    "Keys: nodes, spares, days, failures (for each 1,000 node-days), checkpoint_s, start_s, max_restarts, heartbeat_s"
    " and more: docs/simulation.md has all. Several values of a key (spares=0,8,32) are compared on the same failures.",
    mixes=True,
)

_EARLY = "ended before its time"
_EQUAL = 5e-5
"""Differences of less than this part of the time are shown as 0.00 %."""
SWEPT = ("training", "lost steps", "checkpoints", "waiting for nodes", "recovery, median", "restarts spent", _EARLY)
"""What the table of `--sweep` shows of all that is told."""


def simulate(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns the exit status."""
    return main(argv, environ, TABLE, _simulated)


def _simulated(parsed: Parsed) -> Iterator[str] | int:
    from reknit.app.simulation.playing import answers

    _check_plot(parsed)
    try:
        clusters = _clusters(parsed)
        if parsed["save-trace"]:
            _check_trace(parsed["save-trace"], clusters)
        if parsed["sweep"]:
            clusters = _by_value(parsed, clusters)
        seeds = range(parsed["seed"], parsed["seed"] + parsed["runs"])
        shown = partial(with_bar, name="playing")
        found = answers([cluster for _, cluster in clusters], seeds, parsed["processes"] or None, shown)
    except BadCluster as error:
        raise UsageError(str(error)) from None
    names = [name for name, _ in clusters]
    if parsed["save-trace"]:
        _trace(parsed, clusters[0][1])
    if parsed["sweep"]:
        return _swept(parsed, names, found)
    if parsed["json"]:
        data = [
            {**_data(name, answer), **_than_first(found, answer)} for name, answer in zip(names, found, strict=True)
        ]
        put(f"{json.dumps(data, indent=2)}\n")
        return 0
    return _table(names, found)


def _clusters(parsed: Parsed) -> list[tuple[str, SimulatedCluster]]:
    """The jobs to play: the name of each, and its cluster."""
    scenario = parsed["scenario"]
    if scenario and scenario not in SCENARIOS:
        raise UsageError(f"--scenario={scenario}: there is no such job; there are {', '.join(SCENARIOS)}")
    cluster = with_values(SimulatedCluster(), SCENARIOS.get(scenario, {}), "--scenario")
    if parsed["recorded"]:
        cluster = _of_records(cluster, parsed["recorded"])
    if parsed["file"]:
        cluster = of_file(cluster, parsed["file"])
    fixed: dict[str, object] = {}
    several: list[tuple[str, list[str]]] = []
    words = (*words_of(parsed), *filter(None, (parsed["compare"], parsed["sweep"])))
    for word in words:
        key, is_given, text = word.partition("=")
        if not is_given:
            raise UsageError(f"{word} is no KEY=VALUE, for example spares=2")
        if key in (*fixed, *(known for known, _ in several)):
            raise UsageError(f"{word}: {key} is given twice")
        if "," in text:
            several.append((key, text.split(",")))
        else:
            fixed[key] = read_value(key, text, word)
    if "trace" in fixed and "failures" in (*fixed, *(key for key, _ in several)):
        raise UsageError("failures has no effect beside trace, which says when each node fails")
    found = []
    for chosen in product(*(values for _, values in several)):
        pairs = [(key, text) for (key, _), text in zip(several, chosen, strict=True)]
        values = {key: read_value(key, text, f"{key}={text}") for key, text in pairs}
        name = " ".join(f"{key}={text}" for key, text in pairs)
        one = with_values(cluster, {**fixed, **values}, name or " ".join(words))
        found.append((name or scenario or "this job", one))
    return found


def _of_records(cluster: SimulatedCluster, folder: str) -> SimulatedCluster:
    """With the nodes, failures and kinds of failures that traces show. A line says them."""
    from reknit.app.simulation.recorded import recorded
    from reknit.core.text.story import merged

    found = recorded(merged(run.nodes) for run in runs([folder]) if run.nodes)
    try:
        made = with_values(cluster, found.values(), f"--recorded={folder}")
    except ValueError as error:
        raise UsageError(f"--recorded={folder}: {error}") from None
    write(2, found.line() + "\n")
    return made


def _by_value(parsed: Parsed, clusters: Sequence[tuple[str, SimulatedCluster]]) -> list[tuple[str, SimulatedCluster]]:
    """The clusters of `--sweep`, the least value first. Each value is there once."""
    key, where = _swept_key(parsed), f"--sweep={parsed['sweep']}"
    if parsed["compare"] or any("," in word for word in words_of(parsed)):
        raise UsageError(f"{where}: no other key may have several values beside it")
    found = {getattr(cluster, key): (name, cluster) for name, cluster in clusters}
    if not all(type(value) in (int, float) for value in found):
        raise UsageError(f"{where}: {key} is no number; --compare takes its values")
    if len(found) < 2:
        raise UsageError(f"{where}: two values or more are expected, for example checkpoint_s=600,1800,3600")
    return [found[value] for value in sorted(found)]


def _swept_key(parsed: Parsed) -> str:
    return str(parsed["sweep"].partition("=")[0])


def _check_plot(parsed: Parsed) -> None:
    """Nobody should wait for a picture that cannot be drawn."""
    if not parsed["plot"]:
        return
    from reknit.app.simulation.plot import why_not

    why = why_not(parsed["plot"]) if parsed["sweep"] else "a picture is drawn of --sweep=KEY=A,B… only"
    if why:
        raise UsageError(f"--plot={parsed['plot']}: {why}")


def _check_trace(folder: str, clusters: Sequence[object]) -> None:
    if len(clusters) > 1:
        raise UsageError(f"--save-trace={folder}: one job is traced, and {len(clusters)} are asked for")
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise UsageError(f"--save-trace={folder}: a new or empty folder is expected")


def _trace(parsed: Parsed, cluster: SimulatedCluster) -> None:
    from reknit.app.simulation.playing import traced

    try:
        traced(cluster, parsed["seed"], parsed["save-trace"])
    except OSError as error:
        raise UsageError(f"--save-trace={parsed['save-trace']}: {error.strerror or error}") from None


def _swept(parsed: Parsed, names: Sequence[str], found: Sequence[Simulation]) -> int:
    from reknit.app.simulation.playing import Sweep

    key = _swept_key(parsed)
    sweep = Sweep(key, tuple(getattr(answer.cluster, key) for answer in found), tuple(found))
    if parsed["json"]:
        data = {
            "key": key,
            "best": sweep.values[sweep.best],
            "least_spares": sweep.least_spares,
            "values": [_swept_data(sweep, place, name) for place, name in enumerate(names)],
        }
        put(f"{json.dumps(data, indent=2)}\n")
    else:
        show(_sweep_table(sweep, names))
    if parsed["plot"]:
        from reknit.app.simulation.plot import draw

        try:
            draw(sweep, parsed["plot"])
        except OSError as error:
            raise UsageError(f"--plot={parsed['plot']}: {error.strerror or error}") from None
    return 0


def _swept_data(sweep: Sweep, place: int, name: str) -> dict[str, object]:
    return {
        "value": sweep.values[place],
        "mark": sweep.mark(place),
        **_difference_data("than_best", *sweep.than_best(place)),
        **_data(name, sweep.answers[place]),
    }


def _than_first(found: Sequence[Simulation], answer: Simulation) -> dict[str, object]:
    """By how much the job trains more than the first one. Nothing if one job is played."""
    from reknit.app.simulation.playing import difference

    if len(found) == 1:
        return {}
    return _difference_data("than_first", *difference(found[0], answer))


def _difference_data(name: str, mean: float, half: float) -> dict[str, object]:
    """How much more one job trains than another, and the 95 % interval of that."""
    return {name: mean, f"{name}_95": _ends(mean, half)}


def _ends(mean: float, half: float, least: float = -1.0, most: float = 1.0) -> list[float] | None:
    """The ends of an interval of confidence, cut at the `least` and the `most` that is possible. None: one run has
    none."""
    return None if half == float("inf") else [max(least, mean - half), min(most, mean + half)]


def _data(name: str, answer: Simulation) -> dict[str, object]:
    mean, half = answer.effective
    return {
        "name": name,
        "effective": mean,
        "effective_95": _ends(mean, half, 0.0, 1.0),
        "causes": answer.causes,
        "recovery_p50_s": answer.recovery_s(0.5),
        "recovery_p99_s": answer.recovery_s(0.99),
        "rounds": answer.rounds,
        "restarts": answer.restarts,
        "most_out": answer.most_out,
        "ended_early": answer.ended_early,
        "outcomes": sorted({run.outcome for run in answer.runs if run.outcome}),
        "cluster": asdict(answer.cluster),
    }


def _table(names: Sequence[str], found: Sequence[Simulation]) -> Iterator[str]:
    from reknit.app.simulation.playing import title

    yield title(found)
    yield _assumed(found)
    rows = [("", list(names)), *_rows(found)]
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(found))]
    wide = max(len(label) for label, _ in rows)
    for label, cells in rows if len(found) > 1 else rows[1:]:
        yield "  ".join((f"{label:{wide}}", *(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))).rstrip()
    yield from _ends_early(found)
    yield from _differences(names, found)


def _assumed(found: Sequence[Simulation]) -> str:
    """What the answers rest on most, as far as it is the same for all of them."""
    clusters = [answer.cluster for answer in found]
    failing = () if any(cluster.trace for cluster in clusters) else ("failures", "repair_s", "repair_p99_s")
    keys = (*failing, "checkpoint_s", "checkpoint_cost_s", "start_s", "start_p99_s")
    each = {key: {getattr(cluster, key) for cluster in clusters} for key in keys}
    told = (f"{key}={value:g}" for key, values in each.items() if len(values) == 1 for value in values)
    return f"assumed: {' '.join(told)} (docs/simulation.md#keys)"


def _rows(found: Sequence[Simulation]) -> list[tuple[str, list[str]]]:
    """What is told of the answers: a label, and one cell for each."""
    rows = [("training", [_percent(*answer.effective) for answer in found])]
    causes = [cause for cause in CAUSES[1:] if any(answer.causes[cause] for answer in found)]
    rows += ((cause, [f"{100 * answer.causes[cause]:.2f} %" for answer in found]) for cause in causes)
    rows.append(("recovery, median", [_seconds(answer.recovery_s(0.5)) for answer in found]))
    rows.append(("recovery, 99th percentile", [_seconds(answer.recovery_s(0.99)) for answer in found]))
    rows.append(("rounds", [f"{answer.rounds:.1f}" for answer in found]))
    rows.append(("restarts spent", [f"{answer.restarts:.1f}" for answer in found]))
    rows.append(("nodes out at once, at most", [str(answer.most_out) for answer in found]))
    if any(answer.ended_early for answer in found):
        rows.append((_EARLY, [f"{100 * answer.ended_early:.0f} % of the runs" for answer in found]))
    return rows


def _ends_early(found: Sequence[Simulation]) -> Iterator[str]:
    for why in sorted({run.outcome for answer in found for run in answer.runs if run.outcome}):
        yield f"a run ended because {why}"


def _sweep_table(sweep: Sweep, names: Sequence[str]) -> Iterator[str]:
    """One line for each value, and the differences from the best one."""
    from reknit.app.simulation.playing import MOST_LESS, title

    found, best, places = sweep.answers, sweep.best, range(len(names))
    yield title(found)
    yield _assumed(found)
    columns = [(sweep.key, [name.partition("=")[2] for name in names])]
    columns += (row for row in _rows(found) if row[0] in SWEPT)
    columns.append(("", [sweep.mark(place) for place in places]))
    wide = [max(map(len, (label, *cells))) for label, cells in columns[:-1]]
    for line in zip(*((label, *cells) for label, cells in columns), strict=True):
        yield "  ".join((*(f"{cell:>{w}}" for cell, w in zip(line, wide, strict=False)), line[-1])).rstrip()
    yield from _ends_early(found)
    least = sweep.least_spares
    if least is not None and least != sweep.values[best]:
        yield f"spares={least:g} is enough: more would surely gain less than {100 * MOST_LESS:g} % of the time"
    order = (best, *(place for place in places if place != best))
    yield from _differences([names[place] for place in order], [found[place] for place in order])


def _differences(names: Sequence[str], found: Sequence[Simulation]) -> Iterator[str]:
    from reknit.app.simulation.playing import difference, is_real

    for name, answer in zip(names[1:], found[1:], strict=True):
        mean, half = difference(found[0], answer)
        what = "more" if mean > 0 else "less"
        if half == float("inf"):
            yield f"{name} and {names[0]}: one run tells no difference ({100 * mean:+.2f} %)"
        elif is_real(mean, half):
            yield f"{name} trains {100 * abs(mean):.2f} ± {100 * half:.2f} % {what} than {names[0]}"
        elif max(abs(mean), half) < _EQUAL:
            yield f"{name} trains as much as {names[0]}"
        else:
            yield f"{name} and {names[0]}: no difference can be told ({100 * mean:+.2f} ± {100 * half:.2f} %)"


def _percent(mean: float, half: float) -> str:
    return f"{100 * mean:.2f} %" if half == float("inf") else f"{100 * mean:.2f} ± {100 * half:.2f} %"


def _seconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.0f} s"
