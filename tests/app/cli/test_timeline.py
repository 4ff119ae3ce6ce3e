"""`reknit timeline` after real jobs, and its page in a real browser."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.simulated import workers as staff
from reknit.adapters.simulated.hosts import Proc
from reknit.adapters.simulated.world import World
from reknit.core.agent.agent import Spec
from reknit.core.job.entries import NodeId, RestartPolicy, Terms
from reknit.core.job.job import Running
from tests.support.command import Run, run
from tests.support.pictures import brightness, shown
from tests.support.traces import Watching
from tests.support.verbs import ask

HOST = os.uname().nodename
EVIL = "</script><b>x"
FAILS_ONCE = f"""
    import os
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise ValueError("no such file {EVIL}")
"""
DRAWN = """
const texts = [], bars = [], context = CanvasRenderingContext2D.prototype;
for (const [name, seen] of [["fillText", texts], ["fillRect", bars]]) {
  const real = context[name];
  context[name] = function (...given) { seen.push(given); real.apply(this, given); };
}
"""
"""Notes what is drawn."""
CLICK = """
canvas.setPointerCapture = () => {};  // no real pointer is there
function click(row, ms) {
  const box = canvas.getBoundingClientRect();
  const where = {clientX: box.left + x(ms), clientY: box.top + TOP + row * ROW + ROW / 2, bubbles: true};
  for (const kind of ["pointerdown", "pointerup"]) canvas.dispatchEvent(new PointerEvent(kind, where));
  note(told.textContent);
}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A job that has ended: in its first round a worker failed. Its name and its error look like HTML."""
    folder = tmp_path_factory.mktemp("job")
    argv = ("--nproc-per-node=2", "--max-restarts=3", f"--rdzv-id={EVIL}", "w.py")
    status, job = run(folder, *argv, script=FAILS_ONCE)
    assert status == 0, job.err
    return job


@pytest.fixture(scope="module")
def page(job: Run) -> Path:
    assert ask(job, "timeline") == (0, "timeline.html\n", "")
    return Path(job.base_env["TMPDIR"]) / "timeline.html"


def test_a_file_for_perfetto(job: Run, tmp_path: Path) -> None:
    """ui.perfetto.dev drops what is no Trace Event Format, and what overlaps in a row, without a word."""
    path = tmp_path / "trace.json"
    assert ask(job, "timeline", "--output", str(path), EVIL) == (0, f"{path}\n", "")
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    rows = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert rows == {1: f"job {EVIL}", 2: f"node {HOST}"}
    ends = dict.fromkeys(rows, 0)
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert event["pid"] in rows
        match event["ph"]:
            case "M":
                assert event["name"] == "process_name"
            case "X":
                assert event["ts"] >= ends[event["pid"]]
                assert event["dur"] > 0
                ends[event["pid"]] = event["ts"] + event["dur"] - 1  # what has no length is shown with 1 µs
            case "i":
                assert (event["s"], event["ts"] > 0) == ("p", True)
            case other:
                pytest.fail(f"an event of the kind {other}")
    names = [event["name"] for event in events]
    assert {"round 0", "round 1", "running, round 0", "running, round 1", "rank 1 failed"} <= set(names)
    (story,) = [event["args"]["story"] for event in events if event["name"] == "round 0"]
    assert f"rank 1 on node {HOST} failed: exit code 1, ValueError: no such file {EVIL}" in story


def test_where_it_cannot_be_written(job: Run, tmp_path: Path) -> None:
    """One line, and a status that says whether the command line or the disk is wrong."""
    expected = "a file that ends in .html or .json expected"
    for status, path, why in (
        (2, "picture.png", expected),
        (74, f"{tmp_path}/no/page.html", "No such file or directory"),
    ):
        assert ask(job, "timeline", "-o", path) == (status, "", f"reknit: --output={path}: {why}\n")
    assert ask(job, "timeline", "nojob")[0] == 2


def test_a_damaged_trace_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    """The host had a full disk. If nothing can be read, no page pretends otherwise."""
    status, job = run(tmp_path, "--log-dir=logs", "w.py", script="pass")
    assert status == 0
    (part,) = (logs := tmp_path / "logs").rglob("*.jsonl")
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:-1]) + "}{\n")
    status, out, err = ask(job, "timeline", str(logs))
    assert (status, out) == (0, "timeline.html\n")
    assert err.startswith(f"{part}, line {len(lines)}, cannot be read: ")
    part.write_text(lines[0])
    (tmp_path / "timeline.html").unlink()
    status, out, err = ask(job, "timeline", str(logs))
    assert (status, out, err) == (65, "", "reknit: nothing in these traces can be read\n")
    assert not (tmp_path / "timeline.html").exists()


def test_the_page_loads_nothing() -> None:
    """It is opened on machines without a network, and tells nobody that it was opened."""
    text = (files("reknit.app.cli") / "timeline.html").read_text()
    assert not re.search(r"https?:|//\w+\.\w|\ssrc=|\shref=|@import|url\(|fetch\(|XMLHttp|WebSocket", text)


def test_names_that_look_like_html_stay_text(page: Path) -> None:
    """A job's name and an error come from anywhere, and a page with them is sent to colleagues."""
    told = shown(page)
    assert told.texts["title"] == f'job "{EVIL}": succeeded after 1 restart'
    assert "b" not in told.tags
    assert told.attributes["body"]["data-drawn"] == "1"
    assert EVIL not in page.read_text()


def test_a_click_tells_why(page: Path) -> None:
    """On the mark of the failure, on the bar of the round after it, and beside everything."""
    script = f"""
    {CLICK}
    click(0, data.marks.find(mark => mark[3])[1]);
    click(0, data.nodes[0].spans.filter(([kind, round]) => data.kinds[kind] === "running" && round === 1)[0][3] - 1);
    click(5, 0);
    """
    at_mark, at_bar, beside = shown(page, after=script).noted
    assert at_mark.startswith(f"node {HOST}: rank 1 failed in round 0\n")
    assert f"rank 1 on node {HOST} failed: exit code 1, ValueError: no such file {EVIL}" in at_mark
    assert "so all workers were stopped and started again: restart 1 of 3 (rule 2)" in at_mark
    assert at_bar.startswith(f"node {HOST}: running, round 1, for ")
    assert "ended after" in at_bar
    assert beside == at_bar, "there is nothing to tell"


def test_keys_and_the_wheel_zoom(page: Path) -> None:
    """Of a week, an hour is read. The whole is one key away."""
    script = """
    function look(what) { note([what, from, until - from]); }
    function press(key) { dispatchEvent(new KeyboardEvent("keydown", {key})); look(key); }
    look("whole");
    press("+"); press("+"); press("ArrowRight"); press("0");
    const at = {deltaY: -300, ctrlKey: true, clientX: canvas.getBoundingClientRect().right - RIGHT, bubbles: true};
    canvas.dispatchEvent(new WheelEvent("wheel", at)); look("wheel");
    """
    seen = {what: (begin, length) for what, begin, length in shown(page, after=script).noted}
    whole = seen["whole"]
    assert whole == seen["0"]
    assert seen["+"][1] == pytest.approx(whole[1] * 0.36)
    assert seen["ArrowRight"][0] > seen["+"][0]
    assert sum(seen["wheel"]) == pytest.approx(whole[1]), "the place below the pointer stays"
    assert seen["wheel"][1] < whole[1] / 2


@pytest.mark.slow
def test_it_is_dark_for_whoever_wants_it_dark(page: Path) -> None:
    """A white page at night hurts."""
    assert brightness(page, dark=True) < 64
    assert brightness(page, dark=False) > 192


@pytest.mark.slow
def test_many_nodes(job: Run, tmp_path: Path) -> None:
    """Each of 64 has a row of its own, with its whole name, and the page is scrolled to the last one."""
    _traces_of(tmp_path / "traces", 64)
    assert ask(job, "timeline", str(tmp_path / "traces"), cwd=tmp_path) == (0, "timeline.html\n", "")
    script = """
    rows.scrollTop = 1e9;
    const bottom = canvas.getBoundingClientRect().bottom - rows.getBoundingClientRect().bottom;
    note({texts, bars, bottom, width: canvas.clientWidth});
    """
    told = shown(
        tmp_path / "timeline.html", before=DRAWN, after=f"const rows = document.getElementById('rows');{script}"
    )
    (drawn,) = told.noted
    assert told.attributes["body"]["data-drawn"] == "64"
    named = {y: text for text, left, y in drawn["texts"] if text.startswith("node")}
    assert sorted(named.values()) == sorted(f"node{i}" for i in range(64))
    rows = {y for _, y, _, _ in drawn["bars"]}
    assert len(rows) == 64
    assert all(left >= 0 and left + width <= drawn["width"] for left, _, width, _ in drawn["bars"])
    assert abs(drawn["bottom"]) < 1


def _traces_of(folder: Path, count: int) -> None:
    """The traces of a job with so many nodes. In the first of its two rounds, a worker failed."""
    world, watching = World(seed=1), Watching(folder)
    world.watchers.append(watching)
    terms = Terms(count, count, RestartPolicy(max_restarts=1))
    for i in range(count):
        world.begin(Proc(f"p{i:02}", i, Spec(NodeId(f"node{i}"), f"10.0.0.{i}", terms), 0.0, i))
    for round_ in range(2):
        assert world.run_for(120.0, until=partial(_runs, world, round_))
        staff.fail(world, world.procs[7])
    world.run_for(120.0)
    watching.close()


def _runs(world: World, round_: int) -> bool:
    return all(
        isinstance(proc.agent.job.phase, Running) and proc.agent.workers.alive and proc.agent.workers.round == round_
        for proc in world.procs
    )
