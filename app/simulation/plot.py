"""A picture of a sweep: which part of the time is training, for each value of a key. It needs matplotlib."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from .playing import Sweep, title

UNDATED: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""The suffixes of a picture, and what keeps the time out of its bytes."""
LOOKS = {"best": ("*", "tab:green"), "not really different": ("o", "tab:green"), "worse": ("o", "tab:red")}
"""How the values with a mark look: their shape and colour."""


def why_not(path: str) -> str:
    """Why no picture can be drawn at this path. Empty: it can."""
    if _suffix(path) not in UNDATED:
        return f"a name that ends with {', '.join(UNDATED)} is expected"
    if not os.path.isdir(os.path.dirname(path) or "."):
        return "there is no such folder"
    if find_spec("matplotlib") is None:
        return "it needs matplotlib: pip install 'reknit[plots]'"
    return ""


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def draw(sweep: Sweep, path: str) -> None:
    """Draw each value with its 95 % interval of confidence. Raises `OSError`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    points = [(value, *answer.effective) for value, answer in zip(sweep.values, sweep.answers, strict=True)]
    axes.plot([value for value, _, _ in points], [100 * mean for _, mean, _ in points], color="0.8", zorder=0)
    for mark, (shape, colour) in LOOKS.items():
        shown = [point for place, point in enumerate(points) if sweep.mark(place) == mark]
        if shown:
            values, means, halves = zip(*shown, strict=True)
            bars = [100 * half if half != float("inf") else 0.0 for half in halves]
            heights = [100 * mean for mean in means]
            size = 12.0 if shape == "*" else 6.0
            axes.errorbar(values, heights, bars, fmt=shape, color=colour, capsize=3.0, markersize=size, label=mark)
    if sweep.values[0] > 0 and sweep.values[-1] / sweep.values[0] > 8:
        axes.set_xscale("log")
        axes.set_xticks(sweep.values, [f"{value:g}" for value in sweep.values])
        axes.minorticks_off()
    axes.set(xlabel=sweep.key, ylabel="training, % of the time", title=title(sweep.answers))
    axes.legend()
    with rc_context({"svg.hashsalt": "reknit"}):  # the same sweep gives the same bytes
        figure.savefig(path, metadata=UNDATED[_suffix(path)])
