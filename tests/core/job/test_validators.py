"""A value out of range is refused where it is made. The message names the field and the value."""

from __future__ import annotations

import re
from typing import Any

import pytest
from attrs import evolve

from reknit.core.agent.agent import Spec
from reknit.core.job.entries import Entry, NodeId, Opened, RestartPolicy, Terms
from reknit.core.text.codec import CodecError, dumps, loads

NAN, INF = float("nan"), float("inf")
SPEC = Spec(NodeId("n0"), "10.0.0.1")


@pytest.mark.parametrize(
    ("value", "changes", "message"),
    [
        (Terms(), {"min_nodes": 0}, "Terms.min_nodes must be a whole number of at least 1, not 0"),
        (Terms(), {"min_nodes": 1.5}, "Terms.min_nodes must be a whole number of at least 1, not 1.5"),
        (Terms(), {"max_nodes": 0}, "Terms.max_nodes must be a whole number of at least 1, not 0"),
        (
            Terms(),
            {"min_nodes": 3, "max_nodes": 1},
            "Terms.max_nodes must be at least min_nodes, which is 3, not 1",
        ),
        (Terms(), {"join_timeout_s": -1.0}, "Terms.join_timeout_s must be a number of seconds, 0 or more, not -1.0"),
        (Terms(), {"last_call_s": NAN}, "Terms.last_call_s must be a number of seconds, 0 or more, not nan"),
        (Terms(), {"settle_s": "1"}, "Terms.settle_s must be a number of seconds, 0 or more, not '1'"),
        (Terms(), {"beat_s": 0.0}, "Terms.beat_s must be a number of seconds above 0, not 0.0"),
        (Terms(), {"silence_s": 1.0}, "Terms.silence_s must be longer than beat_s, which is 1, not 1.0"),
        (Terms(), {"silence_s": NAN}, "Terms.silence_s must be a number of seconds above 0, not nan"),
        (Terms(), {"fence_s": 4.0}, "Terms.fence_s must be shorter than silence_s, which is 4, not 4.0"),
        (Terms(), {"restarts": 3}, "Terms.restarts must be of type RestartPolicy, not 3"),
        (Terms(), {"admission": "soon"}, "Terms.admission must be of type Admission, not 'soon'"),
        (Terms(), {"fence_s": 0.0}, "Terms.fence_s must be a number of seconds above 0, not 0.0"),
        (
            RestartPolicy(),
            {"max_restarts": -1},
            "RestartPolicy.max_restarts must be a whole number of at least 0, not -1",
        ),
        (
            RestartPolicy(),
            {"max_unspent": True},
            "RestartPolicy.max_unspent must be a whole number of at least 0, not True",
        ),
        (RestartPolicy(), {"backoff_s": -0.1}, "RestartPolicy.backoff_s must be a number of seconds, 0 or more"),
        (RestartPolicy(), {"backoff_max_s": NAN}, "RestartPolicy.backoff_max_s must be a number of seconds, 0 or more"),
        (SPEC, {"node_id": ""}, "Spec.node_id must be a name of 1 to 1000 bytes, not ''"),
        (SPEC, {"node_id": "ä" * 501}, "Spec.node_id must be a name of 1 to 1000 bytes, not 'ä"),
        (SPEC, {"role": "r" * 1001}, "Spec.role must be a name of 1 to 1000 bytes, not 'r"),
        (SPEC, {"address": None}, "Spec.address must be a name of 1 to 1000 bytes, not None"),
        (SPEC, {"local_world_size": 0}, "Spec.local_world_size must be a whole number of at least 1, not 0"),
        (SPEC, {"grace_s": -1}, "Spec.grace_s must be a number of seconds, 0 or more, not -1"),
        (SPEC, {"opens_after_s": NAN}, "Spec.opens_after_s must be a number of seconds, 0 or more, not nan"),
        (SPEC, {"resay_s": 0}, "Spec.resay_s must be a number of seconds above 0, not 0"),
        (SPEC, {"store_timeout_s": None}, "Spec.store_timeout_s must be a number of seconds, 0 or more, not None"),
    ],
)
def test_nonsense_is_refused(value: Any, changes: dict[str, Any], message: str) -> None:
    """An agent with no workers would never end, and one with more nodes at least than at most starts on too few."""
    with pytest.raises(ValueError, match=re.escape(message)):
        type(value)(**({"node_id": "n0", "address": "a"} if value is SPEC else {}) | changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        evolve(value, **changes)


def test_the_borders_are_allowed() -> None:
    """What an operator may mean is never refused: waiting for ever, no grace, the longest name."""
    terms = Terms(1, 1, RestartPolicy(0, 0, 0.0, INF), join_timeout_s=INF, settle_s=0, silence_s=1.1, fence_s=1.05)
    Spec(NodeId("ü" * 500), "a", terms, grace_s=0, store_timeout_s=INF)
    Spec(NodeId("a name with a lone surrogate \udcff"), "a")


def test_a_journal_with_nonsense_cannot_be_read() -> None:
    """Another machine wrote it. `fold` stays total, because such an entry never reaches it."""
    text = dumps(Opened(Terms(2, 3), "j")).replace('"max_nodes":3', '"max_nodes":1')
    with pytest.raises(CodecError, match=r"Terms\.max_nodes must be at least min_nodes, which is 2, not 1"):
        loads(text, Entry)
