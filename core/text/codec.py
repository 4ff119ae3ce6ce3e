"""JSON for every value of the core. Each value is one line, and equal values have the same bytes.

A value is `{"kind": its class, field: …}`. Fields at their default are left out. Decoding checks the type of every
field: other machines write the journal, and `fold` trusts what it is given. Decoding never runs code from the text, as
pickle would.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import attrs

T = TypeVar("T")


class CodecError(ValueError):
    """The text is not the JSON of a value of the wanted type.

    A reader of a journal must end then. If it went on, its fold would differ from the others'.
    """


def dumps(value: object) -> str:
    """One line of JSON without a line break."""
    return json.dumps(encode(value), ensure_ascii=True, separators=(",", ":"))


@overload
def loads(text: str | bytes, type_: type[T]) -> T: ...


@overload
def loads(text: str | bytes, type_: UnionType) -> Any: ...


def loads(text: str | bytes, type_: Any) -> Any:
    """The value of type `type_` (a class or a union of classes). Raises `CodecError`."""
    try:
        data = json.loads(text, parse_constant=_constant)
    except (ValueError, RecursionError) as e:
        raise CodecError(f"not JSON: {e}") from None
    return decode(data, type_)


@overload
def decode(data: object, type_: type[T]) -> T: ...


@overload
def decode(data: object, type_: UnionType) -> Any: ...


def decode(data: object, type_: Any) -> Any:
    """Like `loads`, for JSON that has been parsed already."""
    return _decoder(type_)(data)


def _constant(name: str) -> float:
    if name == "NaN":
        raise CodecError("NaN is not even equal to itself: no two folds would agree")
    return float(name)


def encode(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return [[encode(k), encode(v)] for k, v in value.items()]
    if isinstance(value, frozenset):
        return [encode(v) for v in sorted(value)]
    if isinstance(value, tuple):
        return [encode(v) for v in value]
    cls: Any = type(value)
    if attrs.has(cls):
        data: dict[str, Any] = {"kind": cls.__name__}
        for name, default in _defaults(cls).items():
            item = getattr(value, name)
            if default is attrs.NOTHING or item != default:
                data[name] = encode(item)
        return data
    return value


Decoder = Callable[[Any], Any]
"""Makes a value of a type from JSON. Raises `CodecError`."""


@cache
def _decoder(hint: Any) -> Decoder:
    """That of a type. It is made once: to find out what a type is takes longer than to decode a value."""
    origin = get_origin(hint)
    if hint is object:
        return _decode_any
    if origin in (Union, UnionType):
        return _of_union(get_args(hint))
    if origin is Literal:
        return partial(_decode_literal, allowed=get_args(hint))
    if origin is tuple or (isinstance(hint, type) and issubclass(hint, tuple)):
        return _of_tuple(hint)
    if origin is frozenset:
        item = _decoder(get_args(hint)[0])
        return lambda data: frozenset(map(item, _a(list, data)))
    if origin is not None and issubclass(origin, Mapping):
        key, value = map(_decoder, get_args(hint))
        return lambda data: {key(k): value(v) for k, v in map(_pair, _a(list, data))}
    if hasattr(hint, "__supertype__"):
        return _decoder(hint.__supertype__)
    if hint is float:
        return _decode_float
    if issubclass(hint, Enum):
        return partial(_decode_enum, hint=hint)
    return partial(_decode_class, hint) if attrs.has(hint) else partial(_a, hint)


def _decode_any(data: Any) -> Any:
    if type(data) is dict:  # `encode` writes mappings as pairs, so it has not written this one
        raise CodecError(f"{data!r:.80} is no value of a worker")
    return data


def _decode_float(data: Any) -> float:
    if type(data) is not int:
        return float(_a(float, data))
    try:
        return float(data)
    except OverflowError:
        raise CodecError("a number that no float can hold") from None


def _decode_literal(data: Any, allowed: tuple[Any, ...]) -> Any:
    if not any(type(data) is type(value) and data == value for value in allowed):
        raise CodecError(f"{data!r:.80} is none of {', '.join(map(repr, allowed))}")
    return data


def _decode_enum(data: Any, hint: type[Enum]) -> Enum:
    try:
        return hint(data)
    except ValueError:
        raise CodecError(f"{data!r} is no {hint.__name__}") from None


def _of_union(hints: tuple[Any, ...]) -> Decoder:
    classes = {hint.__name__: _decoder(hint) for hint in hints if attrs.has(hint)}
    plain = [hint for hint in hints if hint is not NoneType and not attrs.has(hint)]
    # A list is a tuple, a set or a mapping, and nothing else is.
    lists = [_decoder(hint) for hint in plain if get_origin(hint) is not None]
    others = [_decoder(hint) for hint in plain if get_origin(hint) is None]
    has_none = NoneType in hints

    def decode_union(data: Any) -> Any:
        if data is None and has_none:
            return None
        if isinstance(data, dict):
            kind = data.get("kind")
            decoder = classes.get(kind) if isinstance(kind, str) else None
            if decoder is None:
                raise CodecError(f"unknown kind {kind!r}")
            return decoder(data)
        fitting = lists if isinstance(data, list) else others
        if len(fitting) != 1:
            raise CodecError(f"{data!r} has no kind")
        return fitting[0](data)

    return decode_union


def _of_tuple(hint: Any) -> Decoder:
    """`hint`: a tuple, or a class of tuples with items of one kind."""
    hints = get_args(hint) or get_args(hint.__orig_bases__[0])
    if len(hints) == 2 and hints[1] is Ellipsis:
        make, item = tuple if get_origin(hint) is tuple else hint, _decoder(hints[0])
        return lambda data: make(map(item, _a(list, data)))
    decoders = [_decoder(hint) for hint in hints]

    def decode_tuple(data: Any) -> tuple[Any, ...]:
        items = _a(list, data)
        if len(items) != len(decoders):
            raise CodecError(f"{len(items)} items instead of {len(decoders)}")
        return tuple(decoder(item) for decoder, item in zip(decoders, items, strict=True))

    return decode_tuple


def _decode_class(cls: type, data: Any) -> Any:
    if type(data) is not dict or data.get("kind") != cls.__name__:
        raise CodecError(f"{data!r:.80} is no {cls.__name__}")
    decoders, required = _fields(cls)
    fields = {}
    for name, item in data.items():
        known = decoders.get(name)
        if known is not None:
            plain, decoder = known
            fields[name] = item if type(item) is plain else decoder(item)
        elif name != "kind":
            raise CodecError(f"{cls.__name__} has no {name}")
    if not required <= fields.keys():
        raise CodecError(f"{cls.__name__} without {', '.join(sorted(required - fields.keys()))}")
    try:
        return cls(**fields)
    except ValueError as e:  # a validator's: no agent could have made this value
        raise CodecError(str(e)) from None


def _a(type_: type, data: Any) -> Any:
    """`data`, which must be exactly of that type: a bool is no int here."""
    if type(data) is not type_:
        raise CodecError(f"{data!r:.80} is no {type_.__name__}")
    return data


def _pair(data: Any) -> tuple[Any, Any]:
    if type(data) is not list or len(data) != 2:
        raise CodecError(f"{data!r:.80} is no pair")
    return data[0], data[1]


@cache
def _defaults(cls: Any) -> dict[str, Any]:
    """Every field of a class in its order, and its default: `attrs.NOTHING` if it has none."""
    return {a.name: a.default for a in attrs.fields(cls)}


@cache
def _fields(cls: Any) -> tuple[dict[str, tuple[type | None, Decoder]], frozenset[str]]:
    """For each field its plain type and its decoder, and the fields that have no default. A value of exactly the plain
    type needs no decoder. Most fields are plain, and their decoders would take half of the time."""
    hints, defaults = get_type_hints(cls), _defaults(cls)
    required = frozenset(name for name, default in defaults.items() if default is attrs.NOTHING)
    return {name: (_plain(hints[name]), _decoder(hints[name])) for name in defaults}, required


def _plain(hint: Any) -> type | None:
    """None: a value of this type always needs its decoder."""
    hint = getattr(hint, "__supertype__", hint)
    return hint if hint in (str, int, float, bool) else None
