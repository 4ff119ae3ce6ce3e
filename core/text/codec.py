"""JSON for every value of the core. Each value is one line, and equal values have the same bytes.

A value is `{"kind": its class, field: …}`. Fields at their default are left out. Decoding checks the type of every
field: other machines write the journal, and `fold` trusts what it is given. Decoding never runs code from the text, as
pickle would.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from functools import cache
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
    return _decode(data, type_)


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


def _decode(data: Any, hint: Any) -> Any:
    if type(data) is hint:
        return data  # text, a number or a bool, as most fields are
    origin = get_origin(hint)
    if hint is object:
        if type(data) is dict:  # `encode` writes mappings as pairs, so it has not written this one
            raise CodecError(f"{data!r:.80} is no value of a worker")
        return data
    if origin in (Union, UnionType):
        return _decode_union(data, get_args(hint))
    if origin is Literal:
        return _decode_literal(data, get_args(hint))
    if origin is tuple or (isinstance(hint, type) and issubclass(hint, tuple)):
        return _decode_tuple(data, hint)
    if origin is frozenset:
        return frozenset(_decode(d, get_args(hint)[0]) for d in _a(list, data))
    if origin is not None and issubclass(origin, Mapping):
        key, value = get_args(hint)
        return {_decode(k, key): _decode(v, value) for k, v in (_pair(p) for p in _a(list, data))}
    if hasattr(hint, "__supertype__"):
        return _decode(data, hint.__supertype__)
    if hint is float and type(data) is int:
        return _decode_float(data)
    if issubclass(hint, Enum):
        return _decode_enum(data, hint)
    return _decode_class(data, hint) if attrs.has(hint) else _a(hint, data)


def _decode_float(data: int) -> float:
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


def _decode_union(data: Any, hints: tuple[Any, ...]) -> Any:
    if data is None and NoneType in hints:
        return None
    if isinstance(data, dict):
        for hint in hints:
            if getattr(hint, "__name__", "") == data.get("kind"):
                return _decode(data, hint)
        raise CodecError(f"unknown kind {data.get('kind')!r}")
    # A list is a tuple, a set or a mapping, and nothing else is.
    is_list = isinstance(data, list)
    plain = [h for h in hints if h is not NoneType and not attrs.has(h) and (get_origin(h) is not None) == is_list]
    if len(plain) != 1:
        raise CodecError(f"{data!r} has no kind")
    return _decode(data, plain[0])


def _decode_tuple(data: Any, hint: Any) -> tuple[Any, ...]:
    """`hint`: a tuple, or a class of tuples with items of one kind."""
    items = _a(list, data)
    hints = get_args(hint) or get_args(hint.__orig_bases__[0])
    if len(hints) == 2 and hints[1] is Ellipsis:
        make = tuple if get_origin(hint) is tuple else hint
        return make(_decode(item, hints[0]) for item in items)
    if len(items) != len(hints):
        raise CodecError(f"{len(items)} items instead of {len(hints)}")
    return tuple(_decode(item, hint) for item, hint in zip(items, hints, strict=True))


def _decode_class(data: Any, cls: type) -> Any:
    given = dict(_a(dict, data))
    if given.pop("kind", None) != cls.__name__:
        raise CodecError(f"{data!r:.80} is no {cls.__name__}")
    hints = _hints(cls)
    unknown = given.keys() - hints.keys()
    if unknown:
        raise CodecError(f"{cls.__name__} has no {', '.join(sorted(unknown))}")
    missing = [name for name in _required(cls) if name not in given]
    if missing:
        raise CodecError(f"{cls.__name__} without {', '.join(missing)}")
    fields = {name: _decode(item, hints[name]) for name, item in given.items()}
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
def _required(cls: Any) -> tuple[str, ...]:
    """The fields of a class that have no default."""
    return tuple(name for name, default in _defaults(cls).items() if default is attrs.NOTHING)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {name: hints[name] for name in _defaults(cls)}
