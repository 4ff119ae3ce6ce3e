"""Values of the core as text: a round trip changes nothing, and no other text is taken for a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import Phase, assume, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from reknit.core.agent import agent, commands, events
from reknit.core.agent import reasons as own_reasons
from reknit.core.agent import worker_words as own_workers
from reknit.core.agent.agent import Agent, Spec
from reknit.core.job import entries, job, reasons, workers
from reknit.core.job.entries import (
    Admission,
    Entries,
    Entry,
    Filler,
    Joined,
    LastCall,
    Left,
    Node,
    NodeId,
    Opened,
    RestartPolicy,
    Terms,
)
from reknit.core.job.ranks import Members
from reknit.core.text import codec
from reknit.core.text.codec import CodecError, decode, dumps, loads

MODULES = (entries, events, commands, workers, own_workers, reasons, own_reasons, job, agent)
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


def few(hint: Any) -> st.SearchStrategy[Any]:
    """A collection of at most three items.

    An `Agent` nests collections five levels deep. With Hypothesis's own sizes it has hundreds of values, and almost all
    the time of these tests goes into drawing them. The codec treats a fourth item like the third.
    """
    items = [st.from_type(arg) for arg in get_args(hint) if arg is not Ellipsis]
    if get_origin(hint) is frozenset:
        return st.frozensets(*items, max_size=3)
    if get_origin(hint) is Mapping:
        return st.dictionaries(*items, max_size=3)
    return st.lists(*items, max_size=3).map(tuple) if Ellipsis in get_args(hint) else st.tuples(*items)


for collection in (frozenset, Mapping, tuple):
    st.register_type_strategy(collection, few)

for several, item in ((Entries, Entry), (Members, Joined)):
    st.register_type_strategy(several, st.lists(st.from_type(item), max_size=3).map(several))  # type: ignore[arg-type]

WAITS = st.floats(0)
POLICIES = st.builds(
    RestartPolicy,
    st.integers(0),
    st.integers(0),
    WAITS,
    WAITS,
    st.booleans(),
    st.floats(0, exclude_min=True),
)
NAMES = st.text(min_size=1, max_size=9)


@st.composite
def terms(draw: st.DrawFn) -> Terms:
    """Terms that make sense: others cannot be made. Each field may be left out, as the codec leaves out defaults."""
    least, beat_s = draw(st.integers(1, 99)), draw(st.floats(1e-3, 1e9))
    silence_s = draw(st.floats(beat_s, exclude_min=True))
    given: dict[str, Any] = {
        "min_nodes": least,
        "max_nodes": draw(st.integers(least, 1000)),
        "restarts": draw(POLICIES),
        "admission": draw(st.sampled_from(Admission)),
        "join_timeout_s": draw(WAITS),
        "last_call_s": draw(WAITS),
        "settle_s": draw(WAITS),
        "beat_s": beat_s,
        "silence_s": silence_s,
        "fence_s": draw(st.none() | st.floats(0, silence_s, exclude_min=True, exclude_max=True)),
        "format": draw(st.integers()),
    }
    groups = (("min_nodes", "max_nodes"), ("beat_s", "silence_s", "fence_s"), ("restarts",), ("settle_s", "format"))
    for group in draw(st.sets(st.sampled_from(groups))):
        for name in group:
            del given[name]
    return Terms(**given)


st.register_type_strategy(RestartPolicy, POLICIES)
st.register_type_strategy(Terms, terms())
st.register_type_strategy(
    Spec,
    st.builds(
        Spec,
        NAMES,
        NAMES,
        terms(),
        NAMES,
        st.integers(1),
        st.none() | st.integers(),
        st.booleans(),
        st.booleans(),
        WAITS,
        WAITS,
        st.floats(0, exclude_min=True),
        WAITS,
    ),
)


@cache
def values(cls: type) -> st.SearchStrategy[Any]:
    """Any value of that class, its fields' defaults among them."""
    return st.from_type(cls)


def forms(hint: Any) -> set[Any]:
    """What a field of that type can look like: kinds, members of enums, and collections both empty and not."""
    if get_origin(hint) in (Union, UnionType):
        return set().union(*map(forms, get_args(hint)))
    if get_origin(hint) in (frozenset, Mapping) or Ellipsis in get_args(hint) or hint in (Entries, Members):
        return {"no item", "one item", "several items"}
    if get_origin(hint) is tuple:
        return {tuple}
    if hint is object:
        return {NoneType, bool, int, str}
    plain = getattr(hint, "__supertype__", hint)
    return set(plain) if issubclass(plain, Enum) else {plain}


def form(value: Any, hint: Any) -> Any:
    """Which of `forms(hint)` the value has."""
    if isinstance(value, Enum):
        return value
    if isinstance(value, Mapping | frozenset) or (isinstance(value, tuple) and tuple not in forms(hint)):
        return ("no item", "one item", "several items")[min(len(value), 2)]
    return type(value)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_survives(cls: type) -> None:
    """A trace is replayed from what was written; a field that got lost would replay another run."""

    @settings(max_examples=25)  # of each of a hundred classes, and the large ones hold the small ones
    @given(values(cls))
    def check(value: Any) -> None:
        text = dumps(value)
        assert loads(text, cls) == value
        assert loads(text.encode(), cls) == value
        assert "\n" not in text, "a journal has one entry a line"
        assert dumps(loads(text, cls)) == text, "the same bytes for the same value"

    check()


@pytest.mark.slow
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_form_of_every_field_is_drawn(cls: type) -> None:
    """The test above says nothing about a kind, a None or a filled collection that no example has."""
    hints = get_type_hints(cls)
    missing = {(name, wanted) for name, hint in hints.items() for wanted in forms(hint)}

    def has_all(value: Any) -> bool:
        missing.difference_update([(name, form(getattr(value, name), hint)) for name, hint in hints.items()])
        return not missing

    search = settings(phases=[Phase.generate], max_examples=2000, database=None, deadline=None)
    with suppress(NoSuchExample):
        find(values(cls), has_all, settings=search)
    assert not missing


@given(st.from_type(Entry))  # type: ignore[arg-type]  # a union is not a `type` to mypy
def test_every_entry_is_found_by_its_kind(entry: Entry) -> None:
    """A reader does not know what comes next."""
    assert loads(dumps(entry), Entry) == entry


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
    failure = workers.WorkerFailure(0, 0, 1, message="a\udcffb\n\u2028\0")
    assert loads(dumps(failure), workers.WorkerFailure) == failure


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
        ('{"kind":"Left","node":"a"}', "is no Node"),
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
        loads(text, Entry)


@pytest.mark.parametrize("value", ["b", 0, True, None, [], "1"])
def test_a_literal_is_one_of_its_values(value: object) -> None:
    """A value of the same type is not enough, and neither is an equal value of another type."""
    hint = Literal["a", 1]
    assert (decode("a", hint), decode(1, hint)) == ("a", 1)
    with pytest.raises(CodecError, match="is none of 'a', 1"):
        decode(value, hint)


def test_a_list_is_told_from_a_plain_value() -> None:
    """A field may be either."""
    assert decode([1, 2], str | tuple[int, ...]) == (1, 2)
    assert decode("a", str | tuple[int, ...]) == "a"


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


@given(st.from_type(Entry), st.data())  # type: ignore[arg-type]  # a union is not a `type` to mypy
def test_a_torn_entry_is_refused(entry: Entry, data: st.DataObject) -> None:
    """A prefix of an entry is never another entry."""
    text = dumps(entry)
    with pytest.raises(CodecError):
        loads(text[: data.draw(st.integers(0, len(text) - 1))], Entry)


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
    for union in (Entry, events.Event, commands.Command, own_reasons.Reason, job.Phase):
        assert set(get_args(union)) <= set(CLASSES)
    assert {Agent, Spec, LastCall} <= set(CLASSES)
    assert not any(issubclass(cls, Enum) for cls in CLASSES)
    assert codec.T
