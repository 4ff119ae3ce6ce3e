"""The checks of the fields of a job's and an agent's settings.

A value out of range raises `ValueError` where the settings are made. The message names the class, the field and the
value. When such a value comes from a journal, the codec turns the error into `CodecError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import Attribute

LONGEST_NAME = 1000
"""Upper bound on a name, in bytes of UTF-8. Names are part of every `Joined`, of file names and of the stores' keys."""

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def refuse(instance: object, field: str, value: object, wanted: str) -> None:
    """Raise the error for a field whose value is not what is wanted."""
    raise ValueError(f"{type(instance).__name__}.{field} must be {wanted}, not {value!r:.100}")


def whole(least: int) -> Validator:
    """The field is a whole number of at least `least`."""

    def check(instance: object, attribute: Attribute[Any], value: Any) -> None:
        if type(value) is not int or value < least:
            refuse(instance, attribute.name, value, f"a whole number of at least {least}")

    return check


def seconds(instance: object, attribute: Attribute[Any], value: Any) -> None:
    """The field is a duration of 0 s or more. Infinity is allowed: it means never."""
    if not _is_number(value) or not value >= 0:
        refuse(instance, attribute.name, value, "a number of seconds, 0 or more")


def positive_seconds(instance: object, attribute: Attribute[Any], value: Any) -> None:
    """The field is a duration of more than 0 s. Infinity is allowed: it means never."""
    if not _is_number(value) or not value > 0:
        refuse(instance, attribute.name, value, "a number of seconds above 0")


def name(instance: object, attribute: Attribute[Any], value: Any) -> None:
    """The field is text of 1 to `LONGEST_NAME` bytes."""
    # The name of a host or of a file may hold bytes that are not UTF-8. In Python's text they are lone surrogates.
    if not isinstance(value, str) or not 1 <= len(value.encode(errors="surrogatepass")) <= LONGEST_NAME:
        refuse(instance, attribute.name, value, f"a name of 1 to {LONGEST_NAME} bytes")


def of_type(kind: type) -> Validator:
    """The field is a value of this type."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if not isinstance(value, kind):
            refuse(instance, attribute.name, value, f"of type {kind.__name__}")

    return check


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
