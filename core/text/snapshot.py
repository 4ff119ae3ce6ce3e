"""A whole job as one line of JSON. A reader that is far behind starts from it, and need not fold every entry.

`codec` can write a job like any other value. But a job grows with the number of its nodes, and every node of a large
job reads it when a round is sealed. So the data of the nodes are written as columns. They are checked and decoded one
column at a time. That takes a tenth of the time that `codec` needs.
"""

from __future__ import annotations

import json
from typing import Any

from attrs import evolve

from reknit.core.job.entries import Joined, Node, NodeId
from reknit.core.job.job import EMPTY, Job
from reknit.core.job.ranks import Members
from reknit.core.job.ring import ring_of
from reknit.core.text import codec

from .codec import CodecError

_COLUMNS: tuple[tuple[str, frozenset[type]], ...] = (
    ("nonce", frozenset({str})),
    ("round", frozenset({int})),
    ("address", frozenset({str})),
    ("port", frozenset({int})),
    ("role", frozenset({str})),
    ("local_world_size", frozenset({int})),
    ("rank_hint", frozenset({int, type(None)})),
    ("seen", frozenset({int})),
)


def freeze(job: Job) -> str:
    """The job as one line of JSON."""
    everybody = list({id(j): j for j in (*job.live.values(), *job.members)}.values())
    place = {id(joined): i for i, joined in enumerate(everybody)}
    small = evolve(job, live=EMPTY, gone=EMPTY, seats=EMPTY, members=Members(), ring=())
    data = {
        "job": codec.encode(small),
        "ids": [j.node.id for j in everybody],
        "incarnations": _packed([j.node.incarnation for j in everybody]),
        "joined": [_packed([getattr(j, name) for j in everybody]) for name, _ in _COLUMNS],
        "live": [place[id(j)] for j in job.live.values()],
        "members": [place[id(j)] for j in job.members],
        "gone": [list(job.gone), list(job.gone.values())],
        "seats": [list(job.seats), list(job.seats.values())],
    }
    return json.dumps(data, ensure_ascii=True, separators=(",", ":"))


def thaw(data: object) -> Job:
    """The job that `freeze` has written. `data`: its JSON, parsed. Raises `CodecError` if it is anything else."""
    try:
        return _thawed(data)
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise CodecError(f"not the fold of a journal: {e!r}") from None


def _thawed(data: Any) -> Job:
    ids = _checked(data["ids"], _STR)
    incarnations = _unpacked(data["incarnations"], _INT, len(ids))
    columns = [_unpacked(c, types, len(ids)) for c, (_, types) in zip(data["joined"], _COLUMNS, strict=True)]
    nodes = map(Node, map(NodeId, ids), incarnations)
    everybody = list(map(Joined, nodes, *columns))
    live = {j.node.id: j for j in (everybody[i] for i in _checked(data["live"], _INT))}
    members = Members(everybody[i] for i in _checked(data["members"], _INT))
    seats = _mapping(data["seats"])
    return evolve(
        codec.decode(data["job"], Job),
        live=live,
        members=members,
        gone=_mapping(data["gone"]),
        seats=seats,
        ring=ring_of(live, seats),
    )


def _mapping(columns: Any) -> dict[NodeId, int]:
    keys, values = columns
    return dict(zip(map(NodeId, _checked(keys, _STR)), _checked(values, _INT), strict=True))


def _packed(column: list[Any]) -> Any:
    """The column, or its value alone if all nodes have the same value."""
    return column[0] if column and column.count(column[0]) == len(column) else column


def _unpacked(column: Any, types: frozenset[type], size: int) -> list[Any]:
    return _checked(column if type(column) is list else [column] * size, types)


def _checked(column: Any, types: frozenset[type]) -> list[Any]:
    if type(column) is not list or not types.issuperset(map(type, column)):
        raise CodecError(f"{column!r:.80} is no column of {', '.join(sorted(t.__name__ for t in types))}")
    return column


_STR, _INT = frozenset({str}), frozenset({int})
