"""Docstrings of classes that include those of the fields, for `help()`. For attrs classes and dataclasses."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

_Kind = TypeVar("_Kind", bound=type)


def with_fields(kind: _Kind) -> _Kind:
    """A decorator for a class: its docstring includes those of its fields."""
    kind.__doc__ = FieldDocs(kind.__doc__ or "")  # type: ignore[assignment]  # a text when it is read
    return kind


class FieldDocs:
    """Stands in the place of a class's docstring. The text is made when somebody reads it, from the source file. So it
    costs nothing until then.

    In the source, the docstring of a field stands below the field."""

    def __init__(self, own: str) -> None:
        """`own`: the docstring of the class."""
        self._own = own

    def __get__(self, instance: object, owner: type) -> str:
        import inspect

        own = inspect.cleandoc(self._own)
        try:
            parts = [f"{name}\n{_indented(text)}" for name, text in _fields(owner)]
        except (OSError, TypeError, SyntaxError):
            return own  # there is no source, as in an archive of compiled modules
        return "\n\n".join([own, "Fields:", *parts]) if parts else own


def _fields(owner: type) -> list[tuple[str, str]]:
    """The fields that have a docstring, in their order, with the docstring."""
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(owner))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = []
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                found.append((name, inspect.cleandoc(text)))
    return found


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
