"""The counterpart of `torch.distributed.elastic.events.api`: events as values."""

from __future__ import annotations

from reknit.adapters.observe.records import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]
