"""Events as values, with torch as the oracle."""

from __future__ import annotations

from typing import Any

from reknit.adapters.observe import records


def test_an_event_is_one_line_of_torch() -> None:
    """Platforms parse these lines already, so both write the same."""
    from torch.distributed.elastic import events as theirs

    fields: dict[str, Any] = {"name": "x", "timestamp": 5, "metadata": {"a": 1, "b": None, "c": "é"}}
    ours = records.Event(source=records.EventSource.WORKER, **fields)
    assert ours.serialize() == theirs.Event(source=theirs.EventSource.WORKER, **fields).serialize() == str(ours)
    assert records.Event.deserialize(ours.serialize()) == ours
    assert records.Event.deserialize(ours) is ours


def test_an_event_of_a_rendezvous_is_one_line_of_torch() -> None:
    """The same holds for these."""
    from torch.distributed.elastic import events as theirs

    fields: dict[str, Any] = {"name": "f:x", "run_id": "j", "message": "m", "hostname": "h", "pid": 7, "rank": 2}
    ours = records.RdzvEvent(node_state=records.NodeState.FAILED, **fields)
    assert ours.serialize() == theirs.RdzvEvent(node_state=theirs.NodeState.FAILED, **fields).serialize() == str(ours)
    assert records.RdzvEvent.deserialize(ours.serialize()) == ours
    assert records.RdzvEvent.deserialize(ours) is ours
