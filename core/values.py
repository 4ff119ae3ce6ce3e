"""Immutable values: attrs classes to whoever looks, made without importing attrs.

`@frozen` reads like attrs' own and *is* that to a type checker. Importing attrs, with the `inspect`, `typing` and `re`
that it needs, took half of the time that an agent needs before it can start a worker, and the process that pays for it
is idle ever after. So the classes are made here, and attrs is asked only when somebody asks for it: `attrs.has`,
`fields`, `evolve` and `asdict` work on them.

1. A class made by `frozen` is slotted and immutable, equal to another of the same class with equal fields, hashable
   if its fields are, and has no base class with fields. No converters, validators or factories: a default is a value,
   `EMPTY` where it is a mapping.
2. Equality, hash and repr are shared, `__init__` is compiled when the first instance is made.
"""

from __future__ import annotations

from operator import attrgetter
from types import MappingProxyType

TYPE_CHECKING = False  # under this name type checkers take it for true; importing it from `typing` costs 4 ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Never, NoReturn

    from attrs import evolve, frozen

__all__ = ["EMPTY", "assert_never", "defaults_of", "evolve", "frozen", "is_frozen"]

EMPTY: Mapping[Any, Any] = MappingProxyType({})


def assert_never(value: Never) -> NoReturn:
    """The `case _` of a match that a type checker knows to be exhaustive."""
    raise AssertionError(f"no case for {value!r}")


class _Late:
    """A class attribute that is made when it is first looked at, and then takes this one's place."""

    def __init__(self, name: str, make: Callable[[Any], Any]) -> None:
        self._name = name
        self._make = make

    def __get__(self, instance: object, cls: Any) -> Any:
        made = self._make(cls)
        setattr(cls, self._name, made)
        return made


def _attributes(cls: Any) -> Any:
    """What attrs would know of the class, from a twin that it makes."""
    import attrs

    twin: Any = attrs.make_class(
        cls.__name__,
        {n: attrs.field(default=cls._defaults.get(n, attrs.NOTHING), type=cls.__annotations__[n]) for n in cls._names},
    )
    return twin.__attrs_attrs__


def _signature(cls: Any) -> Any:
    import inspect

    full = inspect.signature(_compiled_init(cls))
    return full.replace(parameters=list(full.parameters.values())[1:])


def _compiled_init(cls: Any) -> Any:
    lines = [f"def __init__(self, {', '.join(cls._names)}):", "    pass", *(f"    _{n}(self, {n})" for n in cls._names)]
    scope: dict[str, Any] = {f"_{name}": setter for name, setter in cls._setters.items()}
    exec("\n".join(lines), scope)
    init = scope["__init__"]
    init.__defaults__ = tuple(cls._defaults.values())
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


def _first_init(self: Any, *args: Any, **kwargs: Any) -> None:
    cls = self.__class__
    cls.__init__ = _compiled_init(cls)
    self.__init__(*args, **kwargs)


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self._values(self) == self._values(other)


def _hash(self: Any) -> int:
    return hash((self.__class__, self._values(self)))


def _repr(self: Any) -> str:
    values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._names)
    return f"{self.__class__.__qualname__}({values})"


def _reduce(self: Any) -> Any:
    return self.__class__, self._values(self)


def _refuse(self: Any, name: str, value: object = None) -> NoReturn:
    from attrs.exceptions import FrozenInstanceError

    raise FrozenInstanceError


_SHARED = {
    "__init__": _first_init,
    "__eq__": _eq,
    "__hash__": _hash,
    "__repr__": _repr,
    "__reduce__": _reduce,
    "__setattr__": _refuse,
    "__delattr__": _refuse,
    "__attrs_attrs__": _Late("__attrs_attrs__", _attributes),
    "__signature__": _Late("__signature__", _signature),
}


def is_frozen(cls: object) -> bool:
    """Whether it is a class made by `frozen`. Its `__slots__` are its fields, in order."""
    return hasattr(cls, "_setters")


def defaults_of(cls: Any) -> Mapping[str, Any]:
    """The fields of a class made by `frozen` that have a default."""
    defaults: Mapping[str, Any] = cls._defaults
    return defaults


class _Few:
    """`attrgetter` gives no tuple for one name, and takes none for no name."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def __call__(self, value: Any) -> tuple[Any, ...]:
        return tuple(getattr(value, name) for name in self._names)


if not TYPE_CHECKING:

    def frozen(cls: type) -> type:
        names = tuple(cls.__annotations__)
        own = {k: v for k, v in cls.__dict__.items() if k not in names and k not in ("__dict__", "__weakref__")}
        # Not a function, so an instance finds it unbound: `self._values(self)` is one call into C.
        values = attrgetter(*names) if len(names) > 1 else _Few(names)
        made = type(
            cls.__name__,
            cls.__bases__,
            _SHARED
            | own
            | {"__slots__": names, "__match_args__": names, "__qualname__": cls.__qualname__}
            | {"_names": names, "_values": values},
        )
        made._defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
        made._setters = {name: made.__dict__[name].__set__ for name in names}
        return made

    def evolve(value: Any, **changes: Any) -> Any:
        """A copy with some fields changed."""
        cls = value.__class__
        new = object.__new__(cls)
        for setter, item in zip(cls._setters.values(), cls._values(value), strict=True):
            setter(new, item)
        for name, item in changes.items():
            cls._setters[name](new, item)
        return new
