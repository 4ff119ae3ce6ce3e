"""docs/protocol.md says how entries, records and folds are written. The classes and the golden journals say the same.

python -m tests.house.test_format_page      # prints the rows of the tables
"""

from __future__ import annotations

import re
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs

from reknit.core.job import job, reasons
from reknit.core.job.entries import Entry, Node, RestartPolicy, Terms
from reknit.core.job.hanging import Hang, Spot
from reknit.core.job.job import Job
from reknit.core.job.workers import Activity, Collective, NoProgress, TimerExpired, WorkerFailure
from reknit.core.text.codec import dumps, encode, loads
from tests.support.alone import ROOT

PAGE = ROOT / "docs" / "protocol.md"
PARTS = (Node, Terms, RestartPolicy, WorkerFailure, TimerExpired, NoProgress, Activity, Collective)
FOLD = (Job, *get_args(job.Phase), job.Outcome, *get_args(reasons.RoundEnd), *get_args(reasons.JobEnd), Hang, Spot)
PLAIN = {str: "text", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
COLUMNS = ("live", "gone", "members", "ring", "seats")
"""Fields of a job that a fold holds in another form."""


def json_type(hint: Any) -> str:
    hint = getattr(hint, "__supertype__", hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if get_origin(hint) in (tuple, frozenset):
        return f"list of {json_type(get_args(hint)[0])}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(json_type, get_args(hint)))
    if issubclass(hint, Enum):
        return " or ".join(f'`"{each.value}"`' for each in hint)
    return f"`{hint.__name__}`"


def default(field: Any) -> str:
    if field.default is attrs.NOTHING:
        return ""
    value = field.default
    return f" = {'its defaults' if attrs.has(type(value)) else dumps(encode(value))}"


def row(cls: Any) -> str:
    hints = get_type_hints(cls)
    fields = [f for f in attrs.fields(cls) if cls is not Job or f.name not in COLUMNS]
    told = ", ".join(f"`{f.name}`: {json_type(hints[f.name])}{default(f)}" for f in fields)
    return f"| `{cls.__name__}` | {told or 'none'} |"


def rows() -> list[str]:
    return [row(cls) for cls in (*get_args(Entry), *PARTS, *FOLD)]


def test_every_class_stands_in_the_tables() -> None:
    """Other programs read journals by this page. A field that it lacks is a record that they cannot read."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [each for each in rows() if each not in lines] == []


def test_every_example_of_an_entry_is_what_is_written() -> None:
    """An example shows what a table leaves open: the order of fields, and what is left out."""
    found = re.findall(r'^    (\{"kind":.*\})$', PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    entries = [loads(line, Entry) for line in found]
    assert [dumps(entry) for entry in entries] == found
    assert {type(entry) for entry in entries} == set(get_args(Entry))


def test_the_examples_of_records_stand_in_a_golden_journal() -> None:
    """A golden journal holds what the real code has written."""
    golden = (ROOT / "tests" / "golden" / "tcpstore.txt").read_text(encoding="utf-8")
    found = re.findall(r'^    (\{.*"mac":"[0-9a-f]{64}"\})$', PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == 4
    assert [each for each in found if each not in golden] == []


if __name__ == "__main__":
    print("\n".join(rows()))
