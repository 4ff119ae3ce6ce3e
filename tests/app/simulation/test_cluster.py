"""What may be asked of a simulation, and what is said of what may not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import fields

from reknit.app.simulation.cluster import SCENARIOS, BadCluster, SimulatedCluster, of_file, read_trace, with_values


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_can_be_asked(name: str) -> None:
    """Its terms are those of a job."""
    cluster = with_values(SimulatedCluster(), SCENARIOS[name], name)
    assert cluster.terms.max_nodes == cluster.nodes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = 4\nspares = -1\n", r": spares must be a whole number of at least 0, not -1"),
        ("nodes = 4\n\nfailurs = 3\n", r", line 3: there is no key failurs; did you mean failures\?"),
        ("nodes = 2.5\n", r", line 1: nodes is 2\.5; a whole number is expected"),
        ("renews = 1\n", r", line 1: renews is 1; true or false is expected"),
        ("nodes = 2\nmin_nodes = 3\n", r": min_nodes is 3, and nodes is 2; min_nodes must not be more"),
        ("failures = -0.5\n", r": failures is -0\.5; a number of at least 0 is expected"),
        ("worker = 0\nnode = 0\nhang = 0\nleave = 0\n", r"one of them must be above 0"),
        ("nodes = \n", r"line 1"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    """One line, which says what is accepted."""
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(BadCluster, match=message) as caught:
        of_file(SimulatedCluster(), str(tmp_path / "x.toml"))
    assert "\n" not in str(caught.value)


def test_a_file_may_name_values_in_any_order(tmp_path: Path) -> None:
    """A value that is too large for the default of another is checked with the file's own."""
    (tmp_path / "x.toml").write_text("min_nodes = 20\nnodes = 32\ndays = 2\n")
    found = of_file(SimulatedCluster(), str(tmp_path / "x.toml"))
    assert (found.min_nodes, found.nodes, found.days) == (20, 32, 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5,remove,1\n3,add,1\n", "line 2: the time 3 is before 5"),
        ("5,remove,9\n", "line 1: there is no node 9; the nodes are 0 to 3"),
        ("5,gone,1\n", "line 1: '5,gone,1'; SECONDS,add,NODE or SECONDS,remove,NODE is expected"),
        ("nan,add,1\n", "line 1: 'nan' is no time"),
        ("5,remove,1\n6,remove,2\n7,remove,1\n", "line 3: '7,remove,1'; node 1 is not there"),
        ("5,remove,1\n6,add,1\n7,add,1\n", "line 3: '7,add,1'; node 1 is there already"),
    ],
)
def test_a_wrong_trace_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    """One line, which says what is accepted."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(BadCluster, match=message):
        read_trace(str(tmp_path / "t.csv"), 4)


def test_a_trace_is_read(tmp_path: Path) -> None:
    """Empty lines and comments count for nothing."""
    (tmp_path / "t.csv").write_text("# from the logs\n5,remove,1\n\n7.5, add, 1\n")
    assert read_trace(str(tmp_path / "t.csv"), 4) == [(5.0, False, 1), (7.5, True, 1)]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"node": 64.0}, "node is 64.0; at most 1 is expected"),
        ({"days": 1e308}, "days is 1e+308; at most 10000 is expected"),
        ({"days": 10**400}, "int too large to convert to float"),
        ({"repair_s": 1e305, "repair_p99_s": 1e306}, "repair_s is 1e+305; at most 1000000000 is expected"),
        ({"shape": 0.001}, "shape is 0.001; a number of at least 0.1 is expected"),
        ({"hang_after_s": float("inf")}, "hang_after_s is inf; at most 1000000000 is expected"),
        (
            {"step_s": 595.0},
            "step_s is 595, and checkpoint_cost_s is 5; together they must be less than hang_after_s, which is 600",
        ),
        ({"step_s": 1e-320}, "step_s is 1e-320; 0 or at least 0.001 is expected"),
        ({"rack_failures": 1.0}, "rack_failures is given, and rack is 0; rack says how many nodes stand in a rack"),
        ({"warm_start_s": 60.0}, "warm_start_s is 60, and start_s is 30; warm_start_s must not be more"),
        ({"heartbeat_s": 15.0}, "silence_s is 15, and heartbeat_s is 15; silence_s must be more"),
        ({"spares": [0, 2]}, "spares is [0, 2]; a whole number is expected; several are for --compare or --sweep"),
        ({"nodes": 12_000, "spares": 1}, "nodes and spares are together 12001; at most 12000 is expected"),
        ({"nodez": 4}, "there is no key nodez; did you mean node or nodes?"),
        (
            {"start_s": 100.0, "start_p99_s": 90.0},
            "start_p99_s is 90, and start_s is 100; start_p99_s must not be less. 0: it is always start_s",
        ),
    ],
)
def test_values_that_no_cluster_has(values: dict[str, object], why: str) -> None:
    """A typing mistake, such as `node` for `nodes`, or a run that would never end."""
    with pytest.raises(BadCluster, match=f"^here: {re.escape(why)}"):
        with_values(SimulatedCluster(), values, "here")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("10,remove,0,junk", "line 1: '10,remove,0,junk'; SECONDS,add,NODE or SECONDS,remove,NODE is expected"),
        ("10,remove,0\n1e305,add,0", "line 2: the time is 1e305; at most 1e+09 s is expected"),
    ],
)
def test_lines_that_no_trace_has(text: str, why: str, tmp_path: Path) -> None:
    """Beside those above."""
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(BadCluster, match=re.escape(why)):
        read_trace(str(path), 4)


def test_a_trace_as_a_spreadsheet_writes_it(tmp_path: Path) -> None:
    """With a mark of the byte order, and a comment that is indented."""
    path = tmp_path / "trace"
    path.write_text("\ufeff  # seconds, what, node\n10,remove,0\n", encoding="utf-8")
    assert read_trace(str(path), 4) == [(10.0, False, 0)]
    with pytest.raises(BadCluster, match="embedded null byte"):
        read_trace("a\0b", 4)


def test_the_page_names_every_key_with_its_default() -> None:
    """Who sees a key in a message finds it on the page."""
    page = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text()
    rows = [line.split("|")[1:4] for line in page.partition("## Keys")[2].splitlines() if line.startswith("| `")]
    shown: dict[str, str] = {}
    for keys, defaults, _ in rows:
        shown.update(zip(re.findall(r"`(\w+)`", keys), map(str.strip, defaults.split(", ")), strict=False))
    for each in fields(SimulatedCluster):
        expected = "none" if each.default == "" else "false" if each.default is False else each.default
        told = shown.get(each.name, "missing")
        assert told == expected or float(told) == expected, each.name


def test_a_percentile_that_is_not_given_changes_with_its_median() -> None:
    """Somebody who knows how long a start takes may not know how long the slowest take."""
    slow = with_values(SimulatedCluster(), {"start_s": 120, "stop_s": 4.0, "stop_p99_s": 5.0, "repair_s": 0}, "here")
    assert (slow.start_p99_s, slow.stop_p99_s, slow.repair_p99_s, slow.warm_start_p99_s) == (360.0, 5.0, 0.0, 0.0)
