"""Makes the pages of the site that no file in docs/ holds. mkdocs calls the functions `on_…` (see mkdocs.yml).

1. The README is the front page. Other pages at the top of the repository become pages as well.
2. Pages link the source files that they speak of. Each linked file becomes a page, so that the links work wherever the
   site is read.
3. The reference has a page for each public module, with every name in its `__all__`. So no public name can be missing.
   A public name without a docstring stops the build.
   A docstring describes one parameter per line. On its page each parameter begins a line as well.
4. The page of options ends with tables that are made from the parser's.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc, isclass, isroutine
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
AT_THE_TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""By file at the top of the repository: its page."""
PUBLIC = (
    "reknit",
    "reknit.runtime",
    "reknit.testing",
    "reknit.core",
    "reknit.elastic.agent.server",
    "reknit.elastic.agent.server.local_elastic_agent",
    "reknit.elastic.multiprocessing",
    "reknit.elastic.multiprocessing.errors",
    "reknit.elastic.launcher",
    "reknit.elastic.run",
    "reknit.elastic.rendezvous",
    "reknit.elastic.rendezvous.registry",
    "reknit.elastic.events",
    "reknit.elastic.metrics",
    "reknit.elastic.timer",
    "reknit.elastic.utils",
)
"""The modules of the reference."""
_TARGET = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
"""The file in a link, without its anchor. Not an address with a scheme."""
_PARAMETER = re.compile(r"(?:\n|(?<=[.)]) )(?=<code>[a-z_]\w*</code>: )")
"""What stands before a parameter in the text of a docstring: a line break, or the sentence before it."""
_PAGE_IN_TEXT = re.compile(r"(?<![\w/])docs/(\w[\w-]*)\.md(#[\w-]+)?")
"""A page that a docstring names."""


# ---- pages and files ----


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ does not hold."""
    for name, page in AT_THE_TOP.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    origins = [*AT_THE_TOP, *(f"docs/{f.src_uri}" for f in files.documentation_pages())]
    linked = {target for origin in origins if (ROOT / origin).exists() for target in _linked(origin)}
    for path in sorted(linked):
        if _page_of(path).startswith("source/"):
            files.append(File.generated(config, _page_of(path), content=_source_page(path)))
    sys.path.insert(0, str(ROOT / "src"))
    for module in PUBLIC:
        files.append(File.generated(config, f"reference/{module}.md", content=_reference_page(module)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page to pages of the site."""
    here = page.file.src_uri
    by_page = {site: name for name, site in AT_THE_TOP.items()}
    origin = by_page.get(here, f"docs/{here}")
    if not (ROOT / origin).exists():
        return markdown  # a page that was made here: its links are right
    if origin == "docs/options.md":
        markdown += _options()
    folder = posixpath.dirname(here) or "."
    return _TARGET.sub(lambda found: posixpath.relpath(_page_of(_path(origin, found[1])), folder), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """In the reference, begin a line with each parameter, and make links of the pages that docstrings name."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    html = re.sub(r"<p>.*?</p>", lambda paragraph: _PARAMETER.sub("<br>\n", paragraph[0]), html, flags=re.DOTALL)
    return _PAGE_IN_TEXT.sub(r'<a href="../../\1/\2">\1.md\2</a>', html)


def _linked(origin: str) -> Iterator[str]:
    for found in _TARGET.finditer((ROOT / origin).read_text()):
        yield _path(origin, found[1])


def _path(origin: str, target: str) -> str:
    """The file that a link leads to, from the top of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _page_of(path: str) -> str:
    """The page of a file of the repository."""
    if path in AT_THE_TOP:
        return AT_THE_TOP[path]
    if path.startswith("docs/") and path.endswith((".md", ".svg")):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def _source_page(path: str) -> str:
    file = ROOT / path
    if file.is_dir():
        listed = "\n".join(sorted(f.name for f in file.iterdir() if not f.name.startswith(("_", "."))))
        return f"# {path}\n\n```text\n{listed}\n```\n"
    language = {".py": "python", ".md": "markdown"}.get(file.suffix, "text")
    return f"# {path}\n\n````{language}\n{file.read_text()}````\n"


# ---- the reference ----


def _options() -> str:
    """Every option of `reknit run` with its value, its default and its variable."""
    from reknit.app.cli.options import OPTIONS

    lines = ["\n\n## All options\n", "The texts are those of `--help-all`. Without a default, an option is not set."]
    for group in dict.fromkeys(option.group for option in OPTIONS if option.group != "Help"):
        lines += [f"\n### {group}\n", "| option | default | variable | help text |", "|---|---|---|---|"]
        for option in OPTIONS:
            if option.group == group:
                names = f"--{option.name}" + f"={option.metavar}" * bool(option.metavar)
                short = f"`-{option.short}`, " * bool(option.short)
                default = f"`{option.default}`" * bool(option.default)
                lines.append(f"| {short}`{names}` | {default} | `{option.variable}` | {_cell(option.help)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _reference_page(module: str) -> str:
    imported = import_module(module)
    names = getattr(imported, "__all__", None) or [n for n in vars(imported) if _is_own(imported, n)]
    described, elsewhere, foreign = [], [], []
    for name in sorted(names):
        home = _home(module, name)
        page = "" if home is None else _described_on(module, name, home)
        if name.startswith("__"):
            continue
        if home is None:
            foreign.append(f"`{name}`")
        elif page != module:
            elsewhere.append(f"[`{name}`]({page}.md#{home})")
        else:
            described.append(f"::: {home}")
    lines = [f"# {module}", getdoc(imported) or ""]
    if elsewhere:
        lines.append(f"Also here: {', '.join(elsewhere)}.")
    if foreign:
        lines.append(f"These names are torch's own objects: {', '.join(foreign)}.")
    return "\n\n".join([*lines, *described]) + "\n"


def _described_on(module: str, name: str, home: str) -> str:
    """A name that several public modules have is described in the one in which it is defined, or else here."""
    homes = [m for m in PUBLIC if m.startswith(module) and home.startswith(f"{m}.") and hasattr(import_module(m), name)]
    return max(homes, key=len, default=module)


def _is_own(module: object, name: str) -> bool:
    value = getattr(module, name)
    return not name.startswith("_") and getattr(value, "__module__", "") == getattr(module, "__name__", None)


def _home(module: str, name: str) -> str | None:
    """Where a name is defined. None: it is an object of torch."""
    value = getattr(import_module(module), name)
    home = getattr(value, "__module__", "") if isclass(value) or isroutine(value) else module
    if not home.startswith("reknit"):
        return None
    if (isclass(value) or isroutine(value)) and not getdoc(value):
        raise PluginError(f"{home}.{name} is public and has no docstring")
    return f"{home}.{name}"
