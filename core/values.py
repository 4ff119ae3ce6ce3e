"""`frozen` and `evolve`: attrs' own, made cheap where an agent pays for them.

attrs compiles an `__init__`, `__eq__`, `__hash__` and `__repr__` for each class. Of the time until the first worker
starts, the last three took a seventh. Here all classes share them: they differ only in the names of their fields.
To a type checker both names *are* attrs'.

A class made by `frozen` is immutable and slotted, equal to another of the same class with equal fields, hashable if
its fields are, and has no base class with fields.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import attrs

__all__ = ["evolve", "frozen"]

if TYPE_CHECKING:
    from attrs import evolve, frozen
else:

    def frozen(cls: type) -> type:
        names = tuple(cls.__annotations__)
        cls.__match_args__ = cls._names = names
        # Not a function, so an instance finds it unbound: `self._values(self)` is one call into C.
        cls._values = attrgetter(*names) if len(names) > 1 else _Few(names)
        cls.__eq__, cls.__hash__, cls.__repr__ = _eq, _hash, _repr
        cls = attrs.frozen(cls, eq=False, repr=False, match_args=False)
        cls._setters = {name: cls.__dict__[name].__set__ for name in names}
        return cls

    def evolve(value: Any, **changes: Any) -> Any:
        """A copy with some fields changed. Does not run converters or validators: there are none here."""
        cls = value.__class__
        new = object.__new__(cls)
        for setter, item in zip(cls._setters.values(), cls._values(value), strict=True):
            setter(new, item)
        for name, item in changes.items():
            cls._setters[name](new, item)
        return new


class _Few:
    """`attrgetter` gives no tuple for one name, and takes none for no name."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def __call__(self, value: Any) -> tuple[Any, ...]:
        return tuple(getattr(value, name) for name in self._names)


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self._values(self) == self._values(other)


def _hash(self: Any) -> int:
    return hash((self.__class__, self._values(self)))


def _repr(self: Any) -> str:
    values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._names)
    return f"{self.__class__.__name__}({values})"
