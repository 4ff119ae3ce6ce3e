"""The story of a job for pictures: for Perfetto and for the page of `reknit timeline`."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from reknit.core.job.restart import is_echo

from .doing import Doing
from .story import RoundStory, Story, round_name
from .telling import When, round_lines

JOB = 1
"""The number of the row of the job in Perfetto. Those of the nodes follow."""


def perfetto(story: Story, name: str, when: When) -> dict[str, Any]:
    """Trace events in the JSON format of Chrome (Trace Event Format), which ui.perfetto.dev opens. Times are in
    microseconds since the job began. `name`: of the job."""
    events: list[dict[str, Any]] = [_row(JOB, f"job {name}")]
    rows = {node: JOB + 1 + at for at, node in enumerate(dict.fromkeys(node.node for node in story.nodes))}
    events += [_row(row, f"node {node}") for node, row in rows.items()]

    def us(at: float) -> int:
        return round((at - story.began) * 1e6)

    before: RoundStory | None = None
    for told in story.rounds:
        begin = told.sealed_at
        if begin is not None:
            end = story.ended if told.ended_at is None else told.ended_at
            lines = round_lines(told, before, story.terms, when, goes_on=story.goes_on_after(told))
            text = {"story": "\n".join(lines)}
            events.append(_span(JOB, f"round {round_name(told.key)}", us(begin), us(end), text))
        before = told
    for node in story.nodes:
        row = rows[node.node]
        for span in node.spans:
            if span.doing is not Doing.ENDED:
                title = f"{span.doing.value}, round {round_name(span.key)}"
                events.append(_span(row, title, us(span.began), us(span.ended), {"round": span.key[1]}))
        events += [_mark(row, remark.text, us(remark.at)) for remark in node.remarks]
    for told in story.rounds:
        for node_name, failure in told.failures:
            if node_name in rows and told.ended_at is not None and not is_echo(failure):
                events.append(_mark(rows[node_name], f"rank {failure.rank} failed", us(told.ended_at)))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"job": name}}


def _row(row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": row, "tid": 0, "args": {"name": name}}


def _span(row: int, name: str, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
    duration = max(1, end - begin)
    return {"ph": "X", "name": name, "cat": "reknit", "pid": row, "tid": 0, "ts": begin, "dur": duration, "args": args}


def _mark(row: int, name: str, at: int) -> dict[str, Any]:
    return {"ph": "i", "name": name, "cat": "reknit", "pid": row, "tid": 0, "ts": at, "s": "p"}


def _natural(name: str) -> list[tuple[int, str]]:
    """`node9` before `node10`."""
    parts = [(is_number, "".join(part)) for is_number, part in groupby(name, str.isdecimal)]
    return [(int(part), "") if is_number else (-1, part) for is_number, part in parts]


def page_data(story: Story, name: str, when: When, head: list[str]) -> dict[str, Any]:
    """What the page shows. Times are in milliseconds since the job began. `head`: the lines above the picture."""
    rows: dict[str, list[list[Any]]] = {}
    marks: list[list[Any]] = []
    kinds = [what.value for what in Doing if what is not Doing.ENDED]
    seen = {told.key for told in story.rounds} | {span.key for node in story.nodes for span in node.spans}
    numbers = {key: number for number, key in enumerate(sorted(seen))}

    def ms(at: float) -> float:
        return round((at - story.began) * 1000, 1)

    for node in story.nodes:
        spans = rows.setdefault(node.node, [])
        for span in node.spans:
            if span.doing is not Doing.ENDED:
                spans.append([kinds.index(span.doing.value), numbers[span.key], ms(span.began), ms(span.ended)])
        marks += [[node.node, ms(remark.at), remark.text, False] for remark in node.remarks]
    rounds: list[list[Any]] = [[round_name(key), []] for key in numbers]
    before: RoundStory | None = None
    for told in story.rounds:
        goes_on = story.goes_on_after(told)
        rounds[numbers[told.key]][1] = list(round_lines(told, before, story.terms, when, goes_on=goes_on))
        before = told
        for node_name, failure in told.failures:
            if told.ended_at is not None and not is_echo(failure):
                text = f"rank {failure.rank} failed in round {round_name(told.key)}"
                marks.append([node_name, ms(told.ended_at), text, True])
    return {
        "job": name,
        "head": head,
        "began": story.began,
        "length": max(1.0, ms(story.ended)),
        "kinds": kinds,
        "nodes": [{"name": node, "spans": rows[node]} for node in sorted(rows, key=_natural)],
        "rounds": rounds,
        "marks": marks,
    }
