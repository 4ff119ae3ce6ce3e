"""Makes a script that breaks something shorter, as long as it still breaks the same check."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import evolve, fields

from reknit.app.testing.script import Script, Setup


def shrunk(script: Script, breaks: Callable[[Script], bool]) -> Script:
    """The smallest script found by leaving things out, one kind of thing after the other, until nothing more can go."""
    found: Script | None = script
    while found is not None:
        script = found
        found = next((smaller for smaller in _smaller(script) if breaks(smaller)), None)
    return script


def _smaller(script: Script) -> Iterator[Script]:
    moves = script.moves
    for size in (8, 4, 2, 1):
        for i in range(0, len(moves) - size + 1, max(1, size // 2)):
            yield evolve(script, moves=moves[:i] + moves[i + size :])
    for a in fields(Setup):
        if a.name not in ("nodes", "formed") and getattr(script.setup, a.name) != a.default:
            yield evolve(script, setup=evolve(script.setup, **{a.name: a.default}))
    if script.setup.nodes > 1:
        yield evolve(script, setup=evolve(script.setup, nodes=script.setup.nodes - 1))
    if script.setup.formed > script.setup.nodes:
        yield evolve(script, setup=evolve(script.setup, formed=script.setup.nodes))
    for i, move in enumerate(moves):
        if move.who:
            yield evolve(script, moves=(*moves[:i], evolve(move, who=move.who - 1), *moves[i + 1 :]))
