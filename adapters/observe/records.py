"""torchelastic's events as values: each is written as one line of JSON, and can be read again.

`reknit.elastic.events` shows these values under torch's names. They import nothing of reknit, because a worker may use
them as well.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Self

EventMetadataValue = str | int | float | bool | None


class EventSource(str, Enum):
    """Who tells the event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):
    """How a node stands in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class _Serial:
    """A value that is written as one JSON object."""

    def serialize(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]  # both subclasses are dataclasses

    def __str__(self) -> str:
        return self.serialize()

    @classmethod
    def _read(cls, data: str | Self, **kinds: type[Enum]) -> Self:
        """`kinds`: the fields whose values are of an enum."""
        if isinstance(data, cls):
            return data
        fields = json.loads(str(data))
        return cls(**{**fields, **{name: kind(fields[name]) for name, kind in kinds.items()}})


@dataclass
class Event(_Serial):
    """One event of an agent or a worker."""

    name: str
    source: EventSource
    timestamp: int = 0
    """When it happened, in milliseconds since 1970. 0: not known."""
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    __str__ = _Serial.__str__

    @classmethod
    def deserialize(cls, data: str | Self) -> Self:
        """The event that `serialize` has written. An event is returned as it is."""
        return cls._read(data, source=EventSource)


@dataclass
class RdzvEvent(_Serial):
    """One event of a rendezvous."""

    name: str
    run_id: str
    """The name of the job."""
    message: str
    """A sentence for people."""
    hostname: str
    pid: int
    """The process that tells the event."""
    node_state: NodeState
    master_endpoint: str = ""
    """HOST:PORT at which the workers meet. Empty: not known yet."""
    rank: int | None = None
    """The group rank of the node. None: it has none yet."""
    local_id: int | None = None
    """Events of torch may have it. None in events of reknit."""
    error_trace: str = ""
    """The traceback of the exception that was being handled. Empty: there was none."""

    __str__ = _Serial.__str__

    @classmethod
    def deserialize(cls, data: str | Self) -> Self:
        """The event that `serialize` has written. An event is returned as it is."""
        return cls._read(data, node_state=NodeState)
