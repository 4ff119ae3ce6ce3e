"""The rooms of the house: no circle of files anywhere, and one name per thing."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules(root: Path) -> dict[str, Path]:
    """The files of reknit by the names under which they are imported."""
    found = {f"reknit.{path.stem}": path for path in (root / "src" / "reknit").glob("*.py")}
    for top in ("core", "adapters", "app"):
        for path in (root / top).rglob("*.py"):
            name = ".".join(("reknit", *path.relative_to(root).with_suffix("").parts))
            found[name.replace("reknit.app.elastic", "reknit.elastic")] = path
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """What a file imports of the others: also inside of functions, and for types alone."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                found = f"{base}.{alias.name}"
                yield found if found in known else base


def graph(root: Path) -> dict[str, set[str]]:
    known = modules(root)
    return {name: set(imported(name, path, known)) & known.keys() - {name} for name, path in known.items()}


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """The files of one circle. Empty: there is none."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    """A reader of one file of a circle has to read them all."""
    assert circle(graph(ROOT)) == []


def test_a_circle_would_be_found(tmp_path: Path) -> None:
    """One inside of a function, one for a type, and one through the package that exports both."""
    (tmp_path / "core").mkdir()
    (tmp_path / "src" / "reknit").mkdir(parents=True)
    (tmp_path / "core" / "__init__.py").write_text("")
    (tmp_path / "core" / "a.py").write_text("def f():\n    from .b import g\n")
    (tmp_path / "core" / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a\n"
    )
    assert set(circle(graph(tmp_path))) == {"reknit.core.a", "reknit.core.b"}


def twice(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names that several modules have, each with these modules. `names`: pairs of a name and a module."""
    found: dict[str, list[str]] = {}
    for name, module in names:
        found.setdefault(name, []).append(module)
    return {name: places for name, places in found.items() if len(places) > 1}


def ours() -> dict[str, Path]:
    """The modules whose names we choose. In `reknit.elastic` most are torchelastic's."""
    return {name: path for name, path in modules(ROOT).items() if not name.startswith("reknit.elastic")}


def test_no_two_classes_have_the_same_name() -> None:
    """A reader who looks for a class finds one."""
    trees = {name: ast.parse(path.read_text()) for name, path in ours().items()}
    classes = (
        (node.name, name) for name, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert twice(classes) == {}


PARALLEL = (
    ("reknit.adapters.journals.etcd", "reknit.adapters.journals.file", "reknit.adapters.journals.tcpstore"),
    ("reknit.core.job", "reknit.core.agent"),
)
"""These folders have files of the same names, for the same purpose. So has `simulated`, beside all others: each of its
files has the name of what it simulates."""


def test_no_two_files_have_the_same_name() -> None:
    """A reader who is told of `keeper_client.py` need not ask which."""
    files = [name for name, path in ours().items() if path.stem not in ("__init__", "__main__")]
    files = [name for name in files if not name.startswith("reknit.adapters.simulated.")]
    for name, places in twice((name.rpartition(".")[2], name) for name in files).items():
        folders = {place.rpartition(".")[0] for place in places}
        assert any(folders <= set(parallel) for parallel in PARALLEL), f"{name}: {places}"


@pytest.mark.parametrize("room", ["core", "adapters", "app"])
def test_every_folder_says_what_it_holds(room: str) -> None:
    """The docstring of a package is the first thing that a reader of its folder sees."""
    packages = [path for path in (ROOT / room).rglob("__init__.py") if "elastic" not in path.parts]
    assert [path for path in packages if not ast.get_docstring(ast.parse(path.read_text()))] == []
