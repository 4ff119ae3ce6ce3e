"""The budgets and habits of this repository, held by a test: nobody has to say them in a review."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("core", "adapters", "app", "tests", "property_tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
CORE = sorted((ROOT / "core").glob("*.py"))
PAIRED = [p for p in SOURCES if p.relative_to(ROOT).parts[0] in ("core", "adapters", "app") and p.name != "__init__.py"]

CORE_MAY_IMPORT = {
    "attrs",
    "__future__",
    "collections",
    "bisect",
    "enum",
    "functools",
    "inspect",  # in values, when somebody asks for a signature
    "itertools",
    "json",
    "operator",
    "signal",  # the names of signals, in `describe`
    "types",
    "typing",
}

NO_TEST_OF_ITS_OWN = {
    "core/agent.py": "values: test_step and the playbooks read them all",
    "core/commands.py": "vocabulary",
    "core/entries.py": "vocabulary; test_codec writes and reads every kind",
    "core/events.py": "vocabulary",
    "core/reasons.py": "vocabulary; test_describe makes a sentence of each",
    "adapters/ports.py": "protocols: the contract suites are their tests",
    "adapters/bootstrap.py": "test_processes: the port, with torch's store on it",
    "adapters/relay.py": "test_streams",
    "adapters/tracebacks.py": "test_errors",
    "adapters/workers/leaders.py": "test_processes_stopping",
    "adapters/workers/strays.py": "test_processes_stopping",
}
"""Why each of these has no `tests/test_<name>.py`. May only become shorter."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_files_and_functions_keep_their_budget(path: Path) -> None:
    """A reader holds one screen of a function and a few of a file. The core is read most."""
    lines, longest = (300, 50) if path in CORE else (500, 70)
    text = path.read_text()
    assert len(text.splitlines()) <= lines, f"{name(path)} has more than {lines} lines"
    for function in functions(ast.parse(text)):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        assert length <= longest, f"{name(path)}:{function.lineno} {function.name} has {length} lines, not {longest}"


@pytest.mark.parametrize("path", CORE, ids=name)
def test_the_core_imports_nothing_that_touches_the_world(path: Path) -> None:
    """Embedders use it without torch or psutil; the simulator trusts that it holds no clock and no dice."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            assert module.split(".")[0] in CORE_MAY_IMPORT, f"{name(path)}:{node.lineno} imports {module}"


def test_every_source_file_has_its_test_file() -> None:
    """Who changes a file must find its tests without searching."""
    tests = {p.name for p in (ROOT / "tests").rglob("test_*.py")}
    missing = {name(p) for p in PAIRED if f"test_{p.name}" not in tests}
    missing -= NO_TEST_OF_ITS_OWN.keys()
    assert not missing, f"no tests/test_<name>.py for {sorted(missing)}"


def test_what_needs_no_test_of_its_own_is_there_and_has_none() -> None:
    """A list of exceptions that outlives its reasons hides the next one."""
    stale = [p for p in NO_TEST_OF_ITS_OWN if not (ROOT / p).exists() or (ROOT / f"tests/test_{Path(p).name}").exists()]
    assert not stale


TESTS = [
    p for p in SOURCES if p.relative_to(ROOT).parts[0] in ("tests", "property_tests") and p.name.startswith("test_")
]


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_tests_do_not_sleep(path: Path) -> None:
    """A sleep is a guess about somebody's machine. One that is none says so on its line: `# not a guess: …`."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep", "asyncio.sleep"):
            line = text.splitlines()[node.lineno - 1]
            assert "# not a guess:" in line, f"{name(path)}:{node.lineno} sleeps"


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_every_test_says_why_it_matters(path: Path) -> None:
    """The name says what; when it fails in a year, its reader needs to know whether to care."""
    for function in functions(ast.parse(path.read_text())):
        if function.name.startswith("test_"):
            assert ast.get_docstring(function), f"{name(path)}:{function.lineno} {function.name} does not say why"
