"""`reknit.elastic.events`: values, destinations, and the same lines as torch writes."""

from __future__ import annotations

import logging
import os

import pytest

from reknit.elastic import events
from reknit.elastic.events import handlers


class Kept(logging.Handler):
    """A destination that keeps its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """A handler for the destinations `mine` and `dynamic_rendezvous`. Loggers of other tests are not used."""
    handler = Kept()
    monkeypatch.setattr(events, "_events_loggers", {})
    monkeypatch.setitem(handlers._log_handlers, "mine", handler)
    monkeypatch.setitem(handlers._log_handlers, "dynamic_rendezvous", handler)
    for name in ("mine", "dynamic_rendezvous"):
        monkeypatch.setattr(logging.getLogger(f"torchelastic-events-{name}"), "handlers", [])
    return handler


def test_an_event_is_one_line_of_torch() -> None:
    """Platforms parse these lines already, so both write the same."""
    from torch.distributed.elastic import events as theirs

    fields = {"name": "x", "timestamp": 5, "metadata": {"a": 1, "b": None, "c": "é"}}
    ours = events.Event(source=events.EventSource.WORKER, **fields)  # type: ignore[arg-type]
    assert ours.serialize() == theirs.Event(source=theirs.EventSource.WORKER, **fields).serialize() == str(ours)
    assert events.Event.deserialize(ours.serialize()) == ours
    assert events.Event.deserialize(ours) is ours


def test_an_event_goes_to_its_destination(kept: Kept) -> None:
    """A platform adds its own destination as with torch. A name that nobody added is an error and not silence."""
    event = events.Event("x", events.EventSource.AGENT)
    events.record(event, "mine")
    events.record(event)
    assert kept.lines == [event.serialize()]
    with pytest.raises(KeyError):
        events.record(event, "nowhere")


def test_a_rendezvous_event_names_who_tells_it(kept: Kept) -> None:
    """The defaults are the caller, this host and this process. A failure brings its traceback."""
    try:
        raise ValueError("gone")
    except ValueError:
        events.construct_and_record_rdzv_event("job", "left", events.NodeState.FAILED, rank=2)
    found = events.RdzvEvent.deserialize(kept.lines[0])
    assert found.name == "test_events:test_a_rendezvous_event_names_who_tells_it"
    assert (found.pid, found.rank, found.node_state) == (os.getpid(), 2, events.NodeState.FAILED)
    assert "ValueError: gone" in found.error_trace


def test_a_rendezvous_event_costs_nothing_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for the caller is slow, and the destination drops events by default."""
    monkeypatch.setattr(events, "record_rdzv_event", lambda event: pytest.fail("recorded"))
    events.construct_and_record_rdzv_event("job", "joined", events.NodeState.RUNNING)
