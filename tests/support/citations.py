"""Finds what a repository's comments, docstrings and pages cite, and says which citations lead nowhere.

A citation is one of these (CONTRIBUTING.md, "Citations", explains them to a writer):

1. `rule 7`: a rule of the protocol, with a heading in docs/protocol.md. `rule 7 above`: the item 7 of the numbered list
   in the docstring at the top of the same file.
2. `S2`, `L1`: an invariant, with a heading in docs/protocol.md.
3. A path that begins with a folder of the repository, perhaps with an anchor: `docs/torchelastic.md#ranks`.
4. The name of a file in code font without a folder, and the name of any page.
5. A link of a page. If the target is a Python file and the text is in code font, the text is a name in that file.
6. A name of the package: `reknit.core.job.fold`, and what a code block of a page imports from there.
7. A member in code font: `Terms.silence_s`, `reasons.WorkerFailed`.

A citation by the number of a section is always wrong: numbers of sections move, anchors do not.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("core", "adapters", "app", "tests", "property_tests", "benchmarks", "examples", "docs", "src")
LAW = "docs/protocol.md"

_RULES = re.compile(r"\brules?\s+(\d+(?:(?:,\s*|,?\s+and\s+|,?\s+or\s+|\s+to\s+)\d+)*)(\s+above\b)?", re.I)
_INVARIANT = re.compile(r"\b[SL]\d+\b")
_SECTION = re.compile(r"\bsections?\s+\d[\d.]*|\bcontract\s+\d[\d.]*|(?-i:\bDESIGN\b)", re.I)
_PATH = re.compile(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)}|\.ci)/(?:[\w./*<>-]|\{{[\w,]*\}})*)(?:#([\w-]+))?")
_FILE = re.compile(r"`([\w-]+\.(?:py|toml|txt))`|(?<![\w./*<-])([\w-]+\.md)\b(?!\()")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_DOTTED = re.compile(r"\breknit\.(?:core|adapters|app)(?:\.\w+)*")
_IMPORT = re.compile(r"^from (reknit\.[\w.]+) import ([\w, ]+)", re.M)
_MEMBER = re.compile(r"`(\w+)\.(\w+)(?:\([^`]*\))?`")
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)


class Text(NamedTuple):
    """A text that people read: a page, a docstring, or adjacent comments."""

    file: Path
    line: int
    """The number of the line in which the text begins."""
    text: str


class Tree:
    """A repository. Its root is a folder that holds some of `FOLDERS`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def files(self) -> list[Path]:
        found = [
            p for folder in FOLDERS[:-1] for p in (self.root / folder).rglob("*") if p.suffix in (".py", ".md", ".toml")
        ]
        tops = [*self.root.glob("*.md"), *self.root.glob("*.toml"), *self.root.glob("src/*/*.py")]
        return sorted(p for p in (*found, *tops) if "__pycache__" not in p.parts)

    @cached_property
    def basenames(self) -> set[str]:
        others = [p for folder in FOLDERS[:-1] for p in (self.root / folder).rglob("*.txt")]
        return {p.name for p in (*self.files, *others, *self.root.glob("*.txt"))}

    @cached_property
    def law(self) -> set[str]:
        """The rules and invariants that have a heading in the law, as `rule 7` and `s2`."""
        page = self.root / LAW
        text = page.read_text() if page.exists() else ""
        return {h.lower() for h in re.findall(r"^#+ (Rule \d+|[SL]\d+): ", text, re.M)}

    @cached_property
    def members(self) -> dict[str, set[str]]:
        """By the name of a class, and by the plain name of a module: the names that it holds."""
        found: dict[str, set[str]] = {}
        for path in self.files:
            if path.suffix == ".py" and path.relative_to(self.root).parts[0] in (
                "core",
                "adapters",
                "app",
                "property_tests",
            ):
                names = names_in(path)
                found.setdefault(path.stem, set()).update(n for n in names if "." not in n)
                for name in names:
                    owner, dot, member = name.partition(".")
                    if dot:
                        found.setdefault(owner, set()).add(member)
        return found

    def texts(self) -> Iterator[Text]:
        for path in self.files:
            if path.suffix == ".py":
                yield from _texts_of(path)
            else:
                yield Text(path, 1, path.read_text())


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes and constants of a Python file, and `Class.member` for what its classes hold."""

    def names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name
                if isinstance(node, ast.ClassDef):
                    yield from names(node.body, f"{node.name}.")
                elif prefix:  # names that a class sets in its methods
                    yield from (
                        prefix + n.attr
                        for n in ast.walk(node)
                        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                    )
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    yield from (prefix + n.id for n in ast.walk(target) if isinstance(n, ast.Name))
            elif isinstance(node, ast.If):
                yield from names([*node.body, *node.orelse], prefix)

    return frozenset(names(ast.parse(path.read_text()).body))


@cache
def anchors_in(page: Path) -> frozenset[str]:
    """The anchors of a page: those that it names, and those that GitHub makes of its headings."""
    text = _FENCE.sub("", page.read_text())
    slugs = (re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M))
    return frozenset({*re.findall(r'<a id="([\w-]+)">', text), *slugs})


def problems(root: Path) -> list[str]:
    """Every citation that leads nowhere, as `file:line: what is wrong`."""
    tree = Tree(root)
    found = []
    for text in tree.texts():
        for check in (_rules, _invariants, _sections, _paths, _bare_files, _links, _package, _members_cited):
            for at, what in check(tree, text):
                line = text.line + text.text.count("\n", 0, at)
                found.append(f"{text.file.relative_to(root)}:{line}: {what}")
    return found


Problems = Iterator[tuple[int, str]]


def _texts_of(path: Path) -> Iterator[Text]:
    """The docstrings, those of attributes included, and the comments. A string that is the id of a check counts as
    well."""
    block: list[str] = []
    start, last, opens = 0, -1, True
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield Text(path, start, "\n".join(block))
                block = []
            start, last = (start if block else token.start[0]), token.start[0]
            block.append(token.string.lstrip("# "))
        elif token.type == tokenize.STRING and (opens or _INVARIANT.fullmatch(token.string.strip("\"'"))):
            yield Text(path, token.start[0], token.string)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            opens = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    if block:
        yield Text(path, start, "\n".join(block))


def _rules(tree: Tree, text: Text) -> Problems:
    for match in _RULES.finditer(text.text):
        for number in re.findall(r"\d+", match[1]):
            if match[2]:
                if not re.search(rf"^\s*{number}\. ", _top(text.file), re.M):
                    yield match.start(), f"the top of this file has no rule {number}"
            elif f"rule {number}" not in tree.law:
                yield match.start(), f"{LAW} has no rule {number}"


def _top(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or "" if path.suffix == ".py" else path.read_text()


def _invariants(tree: Tree, text: Text) -> Problems:
    for match in _INVARIANT.finditer(text.text):
        if match[0].lower() not in tree.law:
            yield match.start(), f"{LAW} has no {match[0]}"


def _sections(_: Tree, text: Text) -> Problems:
    for match in _SECTION.finditer(text.text):
        yield match.start(), f"{match[0]!r}: cite a page and its anchor, as in docs/torchelastic.md#ranks"


def _paths(tree: Tree, text: Text) -> Problems:
    for match in _PATH.finditer(text.text):
        if "<" in match[1]:
            continue  # a pattern for the reader
        for path in _spelled_out(match[1].rstrip(".,")):
            hits = list(tree.root.glob(path)) if "*" in path else [tree.root / path, tree.root / f"{path}.py"]
            if not any(hit.exists() for hit in hits):
                yield match.start(), f"there is no {path}"
            elif match[2] and match[2] not in anchors_in(hits[0]):
                yield match.start(), f"{path} has no anchor #{match[2]}"


def _spelled_out(path: str) -> Iterator[str]:
    """`a/{b,c}` is `a/b` and `a/c`."""
    parts = re.split(r"\{([^}]*)\}", path)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ("".join(words) for words in product(*choices))


def _bare_files(tree: Tree, text: Text) -> Problems:
    for match in _FILE.finditer(_without_fences(text)):
        name = match[1] or match[2]
        if name not in tree.basenames:
            yield match.start(), f"there is no {name}"


def _without_fences(text: Text) -> str:
    blank = _FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text.text)
    return blank if text.file.suffix == ".md" else text.text


def _links(tree: Tree, text: Text) -> Problems:
    if text.file.suffix != ".md":
        return
    for match in _LINK.finditer(text.text):
        told, (place, _, anchor) = match[1], match[2].partition("#")
        if "://" in place or place.startswith("mailto:"):
            continue
        target = (text.file.parent / place).resolve() if place else text.file
        if not target.exists():
            yield match.start(), f"there is no {place}"
        elif anchor and anchor not in anchors_in(target):
            yield match.start(), f"{target.name} has no anchor #{anchor}"
        elif code := re.fullmatch(r"`([^`]+)`", told):
            if wrong := _is_not_named(tree, target, code[1]):
                yield match.start(), wrong


def _is_not_named(tree: Tree, target: Path, name: str) -> str:
    """Why a link's target does not have the name in the link's text. Empty: it has."""
    if "/" in name:
        return "" if (tree.root / name).resolve() == target else f"{name} is not where the link leads"
    if target.suffix == ".py" and name != target.name:
        if name == _module(tree, target):
            return ""
        return "" if name in names_in(target) else f"{target.name} has no {name}"
    return "" if target.stem == name or target.name == name or target.is_dir() else f"{name} is not {target.name}"


def _module(tree: Tree, file: Path) -> str:
    """The name under which this file is imported."""
    place = file.parent if file.stem == "__init__" else file.with_suffix("")
    parts = place.relative_to(tree.root).parts
    return ".".join(parts[1:] if parts[0] == "src" else ("reknit", *parts))


def _package(tree: Tree, text: Text) -> Problems:
    for match in _DOTTED.finditer(text.text):
        if not _is_in_package(tree, match[0]):
            yield match.start(), f"there is no {match[0]}"
    if text.file.suffix == ".md":
        for match in _IMPORT.finditer(text.text):
            for name in re.findall(r"\w+", match[2]):
                if not _is_in_package(tree, f"{match[1]}.{name}"):
                    yield match.start(), f"there is no {match[1]}.{name}"


def _is_in_package(tree: Tree, dotted: str) -> bool:
    words = dotted.removeprefix("reknit.").split(".")
    if words[0] == "elastic":
        words.insert(0, "app")  # `src/reknit/elastic` is a link into this folder
    for count in range(len(words), 0, -1):
        rest = ".".join(words[count:])
        for path in (tree.root.joinpath(*words[:count]), tree.root.joinpath("src", "reknit", *words[:count])):
            if path.is_dir():
                package = path / "__init__.py"
                return not rest or (package.exists() and rest in _exported(package))
            if path.with_suffix(".py").exists():
                return not rest or rest in _exported(path.with_suffix(".py"))
    return False


def _exported(path: Path) -> frozenset[str]:
    """The names of a module: those that its file defines, and those that it lists in `__all__`."""
    listed = (
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return names_in(path).union(*listed)


def _members_cited(tree: Tree, text: Text) -> Problems:
    for match in _MEMBER.finditer(_without_fences(text)):
        owner, member = match[1], match[2]
        # `agent.since` may mean the module `agent` or, more often, a value of the class `Agent`.
        known = tree.members.get(owner, set()) | tree.members.get(owner.capitalize(), set())
        if known and member not in known and member not in ("py", "md", "toml", "txt"):
            yield match.start(), f"{owner} has no {member}"
