"""`reknit.elastic.metrics`: which handler gets which metric, and what `prof` publishes."""

from __future__ import annotations

import pytest

from reknit.elastic import metrics
from reknit.elastic.metrics import api
from tests.elastic.launched import Job, launched


class Kept(metrics.MetricHandler):
    """A handler that keeps its metrics."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, int]] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.found.append((metric_data.group_name, metric_data.name, metric_data.value))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers are global in torch's API, so each test begins without any."""
    monkeypatch.setattr(api, "_metrics_map", {})
    monkeypatch.setattr(api, "_default_metrics_handler", metrics.NullMetricHandler())


def test_a_group_has_its_handler_and_the_others_share_the_default() -> None:
    """A program may watch its own group without getting the agent's."""
    own, default = Kept(), Kept()
    metrics.put_metric("dropped", 1)
    metrics.configure(default)
    metrics.configure(own, group="mine")
    metrics.put_metric("a", 1, "mine")
    metrics.put_metric("b", 2)
    metrics.publish_metric("mine", "c", 3)
    assert own.found == [("mine", "a", 1), ("mine", "c", 3)]
    assert default.found == [("torchelastic", "b", 2)]


class Trainer:
    @metrics.prof
    def step(self) -> int:
        """Succeeds."""
        return 7

    @metrics.prof(group="mine")
    def stumble(self) -> None:
        """Fails."""
        raise ZeroDivisionError


@metrics.profile("mine")
def alone() -> None:
    """A function outside a class."""


def test_prof_publishes_success_failure_and_duration() -> None:
    """The names are torch's, so dashboards go on. The value and the exception of the function are kept."""
    kept = Kept()
    metrics.configure(kept)
    assert Trainer().step() == 7
    with pytest.raises(ZeroDivisionError):
        Trainer().stumble()
    alone()
    names = [(group, name) for group, name, _ in kept.found]
    assert names == [
        ("torchelastic", "Trainer.step.success"),
        ("torchelastic", "Trainer.step.duration.ms"),
        ("mine", "Trainer.stumble.failure"),
        ("mine", "Trainer.stumble.duration.ms"),
        ("mine", "test_metrics.alone.success"),
        ("mine", "test_metrics.alone.duration.ms"),
    ]


class Broken(metrics.MetricHandler):
    def emit(self, metric_data: metrics.MetricData) -> None:
        raise ConnectionError("no\nroute")


def test_a_handler_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dashboard that is down must not end a job. torch's agent ends with the handler's error."""
    monkeypatch.setattr(api, "_FAILED", set())
    metrics.configure(Broken())
    assert Trainer().step() == 7
    assert [record.getMessage() for record in caplog.records] == [
        "the metrics handler Broken fails: ConnectionError: no route"
    ]


def test_the_console_shows_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What a person reads while trying it out."""
    metrics.ConsoleMetricHandler().emit(metrics.MetricData(1.5, "g", "n", 3))
    assert capsys.readouterr().out == "[1.5][g]: n=3\n"


@pytest.mark.beside_torch
@pytest.mark.parametrize(
    "job", [Job("exit 0"), Job("exit $RANK", 1), Job("exit $((1 - TORCHELASTIC_RESTART_COUNT))", 2)], ids=str
)
def test_an_agent_publishes_what_torchs_agent_publishes(job: Job) -> None:
    """The same names in the same order, and the same values where they are no durations. Only the number of looks at
    the workers differs: torch looks again and again."""
    looks = ("LocalElasticAgent._monitor_workers.", "workers.trainer.healthy", "workers.trainer.remaining_restarts")
    found = []
    for package in ("torch.distributed", "reknit"):
        measured = launched(package, job).metrics
        others = [(g, n, 0 if n.endswith(".ms") else value) for g, n, value in measured if not n.startswith(looks)]
        found.append((others, {name for _, name, _ in measured} - {"workers.trainer.healthy"}))
    assert found[0] == found[1]
    assert ("torchelastic", "SimpleElasticAgent.run.success", 1) in found[1][0]
