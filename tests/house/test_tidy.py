"""The limits and habits of this repository. A test holds them, so that no reviewer needs to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
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

CORE_MAY_IMPORT = {
    "attrs",
    "reknit",
    "__future__",
    "collections",
    "bisect",
    "enum",
    "functools",
    "itertools",
    "operator",
    "json",
    "math",
    "signal",  # the names of signals, in `describe`
    "types",
    "typing",
}

NO_TEST_OF_ITS_OWN = {
    "core/agent/agent.py": "values: test_step and the playbooks read them all",
    "core/agent/commands.py": "vocabulary",
    "core/job/crowds.py": "property_tests/test_laws.py folds crowds at once and one by one",
    "core/job/entries.py": "vocabulary; test_codec writes and reads every kind",
    "core/agent/events.py": "vocabulary",
    "core/agent/terms.py": "test_incarnation comes to jobs with other terms",
    "core/agent/reasons.py": "vocabulary; test_describe makes a sentence of each",
    "core/job/reasons.py": "vocabulary; test_describe makes a sentence of each",
    "adapters/elastic/foreign_rendezvous.py": "tests/elastic",
    "adapters/elastic/hooked_workers.py": "tests/elastic",
    "adapters/keeper/client/start.py": "test_keeper_client starts keepers in both ways",
    "adapters/keeper/functions/forks.py": "test_forking",
    "adapters/keeper/protocol/wire.py": "vocabulary; test_stream",
    "adapters/link/messages.py": "vocabulary; test_machine",
    "adapters/observe/pages.py": "test_health asks for them over HTTP",
    "app/cli/run.py": "test_main and test_running",
    "app/version.py": "test_main asks for it",
    "adapters/runtime/ports.py": "protocols: the contract suites are their tests",
    "adapters/keeper/common/bootstrap.py": "test_processes: the port, with torch's store on it",
    "adapters/keeper/output/relay.py": "test_streams",
    "adapters/keeper/client/round.py": "test_keeper_client",
    "adapters/keeper/failures/tracebacks.py": "test_errors",
    "adapters/keeper/common/spawn.py": "test_processes_stopping",
    "adapters/keeper/process/strays.py": "test_processes_stopping",
}
"""Why each of these has no `tests/test_<name>.py`. May only become shorter."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_functions_keep_their_budget() -> None:
    """A reader holds one screen of a function. The core is read most. A file ends where its idea ends."""
    found = []
    for path in SOURCES:
        longest = 50 if path in CORE else 70
        for function in functions(parsed(path)):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > longest:
                found.append(f"{name(path)}:{function.lineno} {function.name} has {length} lines, not {longest}")
    assert found == []


def test_the_core_imports_nothing_that_touches_the_world() -> None:
    """Embedders use it without torch or psutil; the simulator trusts that it holds no clock and no dice."""
    found = {(name(path), module) for path in CORE for module in imported(path)}
    assert {each for each in found if each[1].split(".")[0] not in CORE_MAY_IMPORT} == set()


DOCUMENTED = ("__future__", "_thread")
"""Modules of Python that are documented under such a name."""


def test_only_public_modules_are_imported() -> None:
    """A private module of the interpreter may change or vanish with any release."""
    found = {(name(path), module) for path in HOUSE for module in imported(path)}
    is_private = {each for each in found if any(part.startswith("_") for part in each[1].split("."))}
    assert {each for each in is_private if each[1] not in DOCUMENTED} == set()


WRITES_ENVIRONMENT = {
    "adapters/keeper/common/settling.py": "a forked worker has no other way to get its own",
    "adapters/keeper/zygote/program.py": "a zygote, and its forks, are processes of reknit's own",
    "adapters/keeper/zygote/hook/sitecustomize.py": "what makes a Python a zygote is not handed down",
}


def test_the_environment_is_never_written() -> None:
    """It belongs to the host process: what a worker or a server needs goes along with its start."""
    found = []
    for path in HOUSE:
        for node in ast.walk(parsed(path)) if name(path) not in WRITES_ENVIRONMENT else ():
            text = ""
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                text = ast.unparse(node.value)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_change = node.func.attr in ("update", "setdefault", "pop", "popitem", "clear")
                text = ast.unparse(node.func.value) if is_change else ast.unparse(node.func)
            if text in ("os.environ", "os.environb", "os.putenv", "os.unsetenv"):
                found.append(f"{name(path)}:{node.lineno}")
    assert found == []


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def test_no_bug_is_hidden_by_an_optimized_interpreter() -> None:
    """PYTHONOPTIMIZE removes the assert statement. A check that must stop workers raises instead."""
    nodes = ((path, node) for path in HOUSE for node in ast.walk(parsed(path)))
    assert [f"{name(path)}:{node.lineno}" for path, node in nodes if isinstance(node, ast.Assert)] == []


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
    stale = [
        p
        for p in NO_TEST_OF_ITS_OWN
        if not (ROOT / p).exists() or (ROOT / "tests" / Path(p).parent / f"test_{Path(p).name}").exists()
    ]
    assert not stale


TESTS = [
    p for p in SOURCES if p.relative_to(ROOT).parts[0] in ("tests", "property_tests") and p.name.startswith("test_")
]


def test_tests_do_not_sleep() -> None:
    """A sleep is a guess about somebody's machine. One that is none says so on its line: `# not a guess: …`."""
    found = []
    for path in TESTS:
        lines = path.read_text().splitlines()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep", "asyncio.sleep"):
                if "# not a guess:" not in lines[node.lineno - 1]:
                    found.append(f"{name(path)}:{node.lineno}")
    assert found == []


def test_every_test_says_why_it_matters() -> None:
    """The name says what; when it fails in a year, its reader needs to know whether to care."""
    tests = ((path, f) for path in TESTS for f in functions(parsed(path)) if f.name.startswith("test_"))
    assert [f"{name(path)}:{f.lineno} {f.name}" for path, f in tests if not ast.get_docstring(f)] == []
