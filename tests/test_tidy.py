"""The limits and habits of this repository. A test holds them, so that no reviewer needs to."""

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
CORE = sorted((ROOT / "core").rglob("*.py"))
HOUSE = [p for p in SOURCES if p.relative_to(ROOT).parts[0] in ("core", "adapters", "app")]
"""What is installed."""
PAIRED = [p for p in HOUSE if p.name != "__init__.py" and ROOT / "app/elastic" not in p.parents]
"""Files with a test file of their own. The tests of `app/elastic` follow the modules of torch: see `tests/elastic`."""

NO_ASSERTS = HOUSE
"""Files without an assert statement."""

CORE_MAY_IMPORT = {
    "attrs",
    "reknit",
    "__future__",
    "collections",
    "bisect",
    "enum",
    "functools",
    "itertools",
    "json",
    "math",
    "signal",  # the names of signals, in `describe`
    "types",
    "typing",
}

NO_TEST_OF_ITS_OWN = {
    "core/agent/agent.py": "values: test_step and the playbooks read them all",
    "core/agent/commands.py": "vocabulary",
    "core/job/entries.py": "vocabulary; test_codec writes and reads every kind",
    "core/agent/events.py": "vocabulary",
    "core/agent/hosting.py": "test_ending plays every way in which a host stays or goes",
    "core/agent/situation.py": "test_wanted, test_ending and test_deadlines ask it through `step`",
    "core/agent/reasons.py": "vocabulary; test_describe makes a sentence of each",
    "core/job/reasons.py": "vocabulary; test_describe makes a sentence of each",
    "adapters/ports.py": "protocols: the contract suites are their tests",
    "adapters/keeper/bootstrap.py": "test_processes: the port, with torch's store on it",
    "adapters/keeper/relay.py": "test_streams",
    "adapters/keeper/staff.py": "test_keeper_client",
    "adapters/keeper/tracebacks.py": "test_errors",
    "adapters/keeper/leaders.py": "test_processes_stopping",
    "adapters/keeper/strays.py": "test_processes_stopping",
}
"""Why each of these has no `tests/test_<name>.py`. May only become shorter."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_functions_keep_their_budget(path: Path) -> None:
    """A reader holds one screen of a function. The core is read most. A file ends where its idea ends."""
    longest = 50 if path in CORE else 70
    for function in functions(ast.parse(path.read_text())):
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


PRIVATE_FOR_NOW = {}
"""Private modules that a file may still import. May only become shorter."""


@pytest.mark.parametrize("path", HOUSE, ids=name)
def test_only_public_modules_are_imported(path: Path) -> None:
    """A private module of the interpreter may change or vanish with any release."""
    found = {module for module in imported(path) for part in module.split(".") if part.startswith("_")}
    assert found - {"__future__"} == PRIVATE_FOR_NOW.get(name(path), set())


WRITES_ENVIRONMENT = {"adapters/keeper/forking.py": "a forked worker has no other way to get its own"}


@pytest.mark.parametrize("path", [p for p in HOUSE if name(p) not in WRITES_ENVIRONMENT], ids=name)
def test_the_environment_is_never_written(path: Path) -> None:
    """It belongs to the host process: what a worker or a server needs goes along with its start."""
    for node in ast.walk(ast.parse(path.read_text())):
        text = ""
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            text = ast.unparse(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_change = node.func.attr in ("update", "setdefault", "pop", "popitem", "clear")
            text = ast.unparse(node.func.value) if is_change else ast.unparse(node.func)
        assert text not in ("os.environ", "os.environb", "os.putenv", "os.unsetenv"), f"{name(path)}:{node.lineno}"


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


@pytest.mark.parametrize("path", NO_ASSERTS, ids=name)
def test_no_bug_is_hidden_by_an_optimized_interpreter(path: Path) -> None:
    """PYTHONOPTIMIZE removes the assert statement. A check that must stop workers raises instead."""
    asserts = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert not asserts, f"{name(path)}: assert statements in lines {asserts}"


def test_every_source_file_has_its_test_file() -> None:
    """Who changes a file must find its tests without searching."""
    tests = {p.name for p in (ROOT / "tests").rglob("test_*.py")}
    missing = {
        name(p)
        for p in PAIRED
        if not tests & {f"test_{p.name}", f"test_{p.parent.name}_{p.name}", f"test_{p.parent.name}.py"}
    }
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
