"""`reknit simulate`, as a user calls it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from reknit.app.cli.simulate import simulate
from reknit.app.simulation import plot
from tests.support.command import REKNIT

SMALL = ("nodes=6", "days=2", "failures=60", "--runs=3", "--processes=1")


def test_a_job_is_played(capfd: pytest.CaptureFixture[str]) -> None:
    """Which part of the time is training, with its interval, and where the rest goes."""
    assert simulate(SMALL, {}) == 0
    said, errors = capfd.readouterr()
    assert said.startswith("2 days of 6 nodes, played 3 times\nassumed: failures=")
    assert " ± " in said
    assert "recovery, median" in said
    assert not errors


def test_values_are_compared_on_the_same_failures(capfd: pytest.CaptureFixture[str]) -> None:
    """One column each, and which of the differences are real."""
    assert simulate((*SMALL, "--compare", "spares=0,2", "heartbeat_s=2,5"), {}) == 0
    said, _ = capfd.readouterr()
    header = said.splitlines()[2].split("  ")
    assert [word.strip() for word in header if word.strip()] == [
        "heartbeat_s=2 spares=0",
        "heartbeat_s=2 spares=2",
        "heartbeat_s=5 spares=0",
        "heartbeat_s=5 spares=2",
    ]
    assert len([line for line in said.splitlines() if line.startswith("heartbeat_s=")]) == 3


def test_the_same_seed_gives_the_same_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    """As JSON, with all that was asked."""
    found = []
    for _ in range(2):
        assert simulate((*SMALL, "--json", "--seed=7"), {}) == 0
        found.append(capfd.readouterr().out)
    assert found[0] == found[1]
    (answer,) = json.loads(found[0])
    assert answer["cluster"]["nodes"] == 6
    assert sum(answer["causes"].values()) == pytest.approx(1.0)
    assert "than_first" not in answer


def test_jobs_are_compared_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    """With what the last lines of the table say."""
    assert simulate((*SMALL, "--json", "--compare=spares=0,2"), {}) == 0
    first, second = json.loads(capfd.readouterr().out)
    assert (first["than_first"], first["than_first_95"]) == (0.0, [0.0, 0.0])
    assert second["than_first"] == pytest.approx(second["effective"] - first["effective"])
    least, most = second["than_first_95"]
    assert least <= second["than_first"] <= most


@pytest.mark.slow
def test_a_key_is_swept(capfd: pytest.CaptureFixture[str]) -> None:
    """One line for each value, the least first. The best is marked, and the others are compared with it."""
    often = ("nodes=6", "days=2", "failures=3000", "node=0", "hang=0", "leave=0", "--runs=3", "--processes=1")
    assert (
        simulate(
            (*often, "--sweep", "checkpoint_s=20000,1200,10,10.0"),
            {},
        )
        == 0
    )
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "2 days of 6 nodes, played 3 times"
    assert said[1].startswith("assumed: failures="), "and not the key that is swept"
    assert " checkpoint_s=" not in said[1]
    assert said[2].startswith("checkpoint_s        training  lost steps  checkpoints")
    assert [(line.split()[0], line.split()[-1]) for line in said[3:6]] == [
        ("10.0", "worse"),
        ("1200", "best"),
        ("20000", "worse"),
    ]
    assert [line.split()[0] for line in said[6:]] == ["checkpoint_s=10.0", "checkpoint_s=20000"]
    assert all(line.endswith("% less than checkpoint_s=1200") for line in said[6:])


@pytest.mark.slow
def test_the_same_sweep_gives_the_same_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As JSON: what --compare has of each value, and how it differs from the best. The picture is drawn as well."""
    pytest.importorskip("matplotlib")
    found = []
    for _ in range(2):
        asked = ("--sweep=spares=2,0", f"--plot={tmp_path / 'a.png'}", "--json")
        assert simulate((*SMALL, *asked), {}) == 0
        found.append((capfd.readouterr().out, (tmp_path / "a.png").read_bytes()))
    assert found[0] == found[1]
    data = json.loads(found[0][0])
    assert data["key"] == "spares"
    assert [one["value"] for one in data["values"]] == [0, 2]
    (best,) = (one for one in data["values"] if one["mark"] == "best")
    assert (best["value"], best["than_best"]) == (data["best"], 0.0)
    assert best["effective"] == max(one["effective"] for one in data["values"])


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """That is told before anything is simulated."""
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert simulate(("days=1e9", "--sweep=spares=0,1", "--plot=a.png"), {}) == 2
    assert capfd.readouterr().err == "reknit: --plot=a.png: it needs matplotlib: pip install 'reknit[plots]'\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sweep=spares=0",), "--sweep=spares=0: two values or more are expected, for example checkpoint_s=600"),
        (("--sweep=spares=0,0",), "two values or more are expected"),
        (("--sweep=spares",), "spares is no KEY=VALUE"),
        (("--sweep=sparse=0,1",), "there is no key sparse; did you mean spares?"),
        (("--sweep=spares=0,few",), "spares=few: spares is few; a whole number is expected"),
        (("--sweep=renews=true,false",), "renews is no number; --compare takes its values"),
        (("--sweep=spares=0,1", "nodes=2,3"), "no other key may have several values"),
        (("--sweep=spares=0,1", "--compare=nodes=2,3"), "no other key may have several values"),
        (("--sweep=spares=0,1", "--plot=a.jpg"), "--plot=a.jpg: a name that ends with .png, .svg, .pdf is expected"),
        (("--plot=a.png",), "--plot=a.png: a picture is drawn of --sweep=KEY=A,B… only"),
        (("nodez=3",), "nodez=3: there is no key nodez"),
        (("nodes",), "nodes is no KEY=VALUE"),
        (("nodes=few",), "nodes=few: nodes is few; a whole number is expected"),
        (("--scenario=llama4",), "there is no such job; there are llama3"),
        (("trace=/nowhere",), "/nowhere: No such file or directory"),
        (("trace=/nowhere", "failures=5"), "failures has no effect beside trace"),
        (("days=0",), "days is 0.0; a number above 0 is expected"),
    ],
)
def test_what_cannot_be_played(words: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, and the status of a usage error."""
    assert simulate((*words, "--processes=1", "--runs=1"), {}) == 2
    errors = capfd.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_a_trace_of_the_first_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Beside the answers. Of one job, and never into a folder that holds something."""
    seen = str(tmp_path / "seen")
    assert simulate((*SMALL, f"--save-trace={seen}"), {}) == 0
    assert list(Path(seen).iterdir())
    assert simulate((*SMALL, f"--save-trace={seen}"), {}) == 2
    assert simulate((*SMALL, "spares=0,2", f"--save-trace={tmp_path / 'other'}"), {}) == 2
    errors = capfd.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in errors] == [
        f"--save-trace={seen}: a new or empty folder is expected",
        f"--save-trace={tmp_path / 'other'}: one job is traced, and 2 are asked for",
    ]


@pytest.mark.parametrize(
    "words", [("nodes=4", "nodes=5"), ("spares=1", "--sweep=spares=0,1"), ("spares=0,1", "spares=2,3")]
)
def test_a_key_twice(words: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    """One of the two would be dropped in silence."""
    assert simulate(words, {}) == 2
    assert capfd.readouterr().err.rstrip().endswith("is given twice")


def test_one_run_tells_no_difference(capfd: pytest.CaptureFixture[str]) -> None:
    """It has no interval of confidence."""
    assert simulate(("nodes=3", "days=1", "spares=0,1", "--runs=1", "--processes=1"), {}) == 0
    assert "one run tells no difference" in capfd.readouterr().out


def test_equal_columns_are_said_to_be_equal(capfd: pytest.CaptureFixture[str]) -> None:
    """Not that no difference can be told."""
    assert simulate((*SMALL[:2], "failures=0", *SMALL[3:], "max_restarts=1,2"), {}) == 0
    assert "max_restarts=2 trains as much as max_restarts=1" in capfd.readouterr().out.splitlines()


def test_the_least_value_that_is_good_enough(capfd: pytest.CaptureFixture[str]) -> None:
    """Spare nodes cost money. So the best value may not be the one that somebody wants."""
    words = ("nodes=16", "days=10", "failures=20", "--sweep=spares=0,2", "--runs=3", "--seed=3", "--processes=1")
    assert simulate(words, {}) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[4].endswith("best")
    assert not any("is enough" in line for line in said), "three runs leave open what one of them brings"
    assert simulate((*words[:3], "--sweep=spares=1,2,4", *words[4:]), {}) == 0
    assert "spares=1 is enough: more would surely gain less than 0.5 % of the time" in capfd.readouterr().out


@pytest.mark.parametrize("words", [("--json",), (), ("--help",)], ids=["json", "table", "help"])
def test_a_full_disk_is_no_success(words: tuple[str, ...]) -> None:
    """`reknit simulate > answer.json` would leave an empty file, and a script would go on."""
    with open("/dev/full", "w") as full:
        argv = [REKNIT, "simulate", "nodes=2", "days=0.1", "--runs=1", *words]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (74, "reknit: stdout cannot be written: No space left on device\n")


def test_an_option_that_is_given_twice(capfd: pytest.CaptureFixture[str]) -> None:
    """One of the two would be left out without a word."""
    assert simulate(("--sweep=spares=0,1", "nodes=3", "--sweep", "checkpoint_s=600,900"), {}) == 2
    assert capfd.readouterr().err == "reknit: --sweep is given twice\n"


def test_a_trace_stands_beside_the_file_that_names_it(tmp_path: Path) -> None:
    """Both may be in a folder of their own."""
    (tmp_path / "job.toml").write_text('nodes = 3\ndays = 0.1\ntrace = "failures.csv"\n')
    (tmp_path / "failures.csv").write_text("3600,remove,n00001\n7200,add,1\n")
    assert simulate((f"--file={tmp_path}/job.toml", "--runs=1", "--processes=1"), {}) == 0
