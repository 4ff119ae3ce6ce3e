"""Values of the core as text: a round trip changes nothing, and no other text is taken for a value."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reknit.core import agent, codec, commands, entries, events, job, ranks, reasons
from reknit.core.agent import Agent, Spec
from reknit.core.codec import CodecError, dumps, load_entry, loads
from reknit.core.entries import Entry, Filler, Joined, LastCall, Left, Node, NodeId, Opened, Terms

MODULES = (entries, events, commands, reasons, ranks, job, agent)
CLASSES = sorted(
    {
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith("reknit.core") and hasattr(value, "__attrs_attrs__")
    },
    key=lambda cls: cls.__name__,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
st.register_type_strategy(float, st.floats(allow_nan=False))
SCALARS = st.none() | st.booleans() | st.integers() | st.text()
# What workers return is any object; JSON can hold these.
st.register_type_strategy(object, lambda type_: SCALARS if type_ is object else NotImplemented)


def values(cls: type) -> st.SearchStrategy[Any]:
    """Any value of that class, its fields' defaults among them."""
    return st.from_type(cls)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_survives(cls: type) -> None:
    """A trace is replayed from what was written; a field that got lost would replay another run."""

    @given(values(cls))
    def check(value: Any) -> None:
        text = dumps(value)
        assert loads(text, cls) == value
        assert loads(text.encode(), cls) == value
        assert "\n" not in text, "a journal has one entry a line"
        assert dumps(loads(text, cls)) == text, "the same bytes for the same value"

    check()


@given(st.from_type(Entry))  # type: ignore[arg-type]
def test_every_entry_is_found_by_its_kind(entry: Entry) -> None:
    """A reader does not know what comes next."""
    assert load_entry(dumps(entry)) == entry


def test_defaults_are_left_out() -> None:
    """A field that is added with a default does not change the entries of jobs that do not use it."""
    assert dumps(Filler()) == '{"kind":"Filler"}'
    assert dumps(Left(Node(NodeId("a")))) == '{"kind":"Left","node":{"kind":"Node","id":"a"}}'
    assert dumps(Opened(Terms(), "j")) == '{"kind":"Opened","terms":{"kind":"Terms"},"journal":"j"}'


def test_whole_numbers_are_seconds_too() -> None:
    """Other writers of JSON do not tell 30 from 30.0."""
    assert loads('{"kind":"Terms","settle_s":3}', Terms) == Terms(settle_s=3.0)
    assert type(loads('{"kind":"Terms","settle_s":3}', Terms).settle_s) is float


def test_any_text_survives() -> None:
    """A worker's last words may be anything, lone surrogates of a file name included."""
    failure = entries.WorkerFailure(0, 0, 1, message="a\udcffb\n\u2028\0")
    assert loads(dumps(failure), entries.WorkerFailure) == failure


# ---- what is no value ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5000, "not JSON"),
        ("null", "no kind"),
        ("1", "no kind"),
        ('"Filler"', "no kind"),
        ("[]", "no kind"),
        ("{}", "unknown kind None"),
        ('{"kind":"Sabotaged"}', "unknown kind 'Sabotaged'"),
        ('{"kind":["Filler"]}', "unknown kind"),
        ('{"kind":"Agent"}', "unknown kind 'Agent'"),
        ('{"kind":"Filler","x":1}', "Filler has no x"),
        ('{"kind":"LastCall"}', "LastCall without round"),
        ('{"kind":"LastCall","round":true}', "True is no int"),
        ('{"kind":"LastCall","round":1.0}', "1.0 is no int"),
        ('{"kind":"LastCall","round":null}', "None is no int"),
        ('{"kind":"Left","node":"a"}', "is no dict"),
        ('{"kind":"Left","node":{"kind":"Terms"}}', "is no Node"),
        ('{"kind":"Left","node":{"kind":"Node","id":"a"},"stuck":{}}', "is no list"),
        ('{"kind":"Opened","terms":{"kind":"Terms","admission":"later"},"journal":""}', "'later' is no Admission"),
        ('{"kind":"Opened","terms":{"kind":"Terms","admission":[1]},"journal":""}', "is no Admission"),
        ('{"kind":"Opened","terms":{"kind":"Terms","fence_s":"1"},"journal":""}', "'1' is no float"),
        ('{"kind":"Opened","terms":{"kind":"Terms","fence_s":{}},"journal":""}', "unknown kind"),
    ],
)
def test_a_corrupt_entry_says_what_is_wrong(text: str | bytes, message: str) -> None:
    """A journal is written by other machines, and `fold` trusts what it is given."""
    with pytest.raises(CodecError, match=message):
        load_entry(text)


def test_a_number_that_no_float_can_hold() -> None:
    """JSON knows no limits."""
    with pytest.raises(CodecError):
        loads('{"kind":"Terms","silence_s":1%s}' % ("0" * 400), Terms)


@given(st.sampled_from(CLASSES), JSON)
def test_no_json_makes_it_fail_otherwise(cls: type, data: Any) -> None:
    """Whatever the text: the value, or CodecError."""
    _loads_or_refuses(json.dumps(data), cls)


@given(st.data())
def test_one_wrong_place_is_found_or_harmless(data: st.DataObject) -> None:
    """A value with one place replaced by anything: another sound value, or CodecError, never a half-checked one."""
    cls = data.draw(st.sampled_from(CLASSES))
    document = json.loads(dumps(data.draw(values(cls))))
    places = [*_places(document)]
    assume(places)
    container, key = data.draw(st.sampled_from(places))
    container[key] = data.draw(JSON)
    found = _loads_or_refuses(json.dumps(document), cls)
    if found is not None:
        assert loads(dumps(found), cls) == found


@given(st.binary() | st.text())
def test_no_bytes_make_it_fail_otherwise(text: str | bytes) -> None:
    """A torn write on a shared file system."""
    _loads_or_refuses(text, Joined)


@given(st.from_type(Entry), st.data())  # type: ignore[arg-type]
def test_a_torn_entry_is_refused(entry: Entry, data: st.DataObject) -> None:
    """A prefix of an entry is never another entry."""
    text = dumps(entry)
    with pytest.raises(CodecError):
        load_entry(text[: data.draw(st.integers(0, len(text) - 1))])


def _loads_or_refuses(text: str | bytes, cls: type) -> Any:
    try:
        return loads(text, cls)
    except CodecError:
        return None


def _places(document: Any) -> Any:
    items = (
        enumerate(document) if isinstance(document, list) else document.items() if isinstance(document, dict) else ()
    )
    for key, value in items:
        yield document, key
        yield from _places(value)


def test_every_class_is_known_to_the_tests() -> None:
    """The list above is found, not written: it must find the unions' members, and no class twice."""
    names = [cls.__name__ for cls in CLASSES]
    assert len(set(names)) == len(names), "a kind is a name"
    for union in (Entry, events.Event, commands.Command, reasons.Reason, job.Phase):
        assert set(get_args(union)) <= set(CLASSES)
    assert {Agent, Spec, LastCall} <= set(CLASSES)
    assert not any(issubclass(cls, Enum) for cls in CLASSES)
    assert codec.T
