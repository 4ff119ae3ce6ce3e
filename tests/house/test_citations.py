"""Everything that a comment, a docstring or a page cites exists. Each rule of the protocol names what guards it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from property_tests.planted.ledger import BUGS
from tests.support.citations import LAW, problems

ROOT = Path(__file__).parents[2]
RULES = range(1, 17)
INVARIANTS = [*(f"s{i}" for i in range(1, 10)), *(f"l{i}" for i in range(1, 4))]


def test_every_citation_leads_somewhere() -> None:
    """A reader who follows a citation must find what is cited. A rename includes mending the citations."""
    assert problems(ROOT) == []


# ---- the law ----


def law() -> dict[str, str]:
    """The parts of docs/protocol.md by their anchors."""
    parts = re.split(r'<a id="([\w-]+)"></a>\n', (ROOT / LAW).read_text())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def guards(part: str) -> set[str]:
    """The planted bugs that a part of the law links."""
    return set(re.findall(r"\]\(\.\./property_tests/planted/histories/([\w-]+)\.txt\)", part))


@pytest.mark.parametrize("number", RULES)
def test_every_rule_has_its_reason_history_code_and_guards(number: int) -> None:
    """A rule without a history looks arbitrary, and one without code or guard may not be kept at all."""
    part = law()[f"rule-{number}"]
    assert part.startswith(f"## Rule {number}: ")
    for needed in (r"^\*Reason\.\*", r"^\*History", r"^1\. ", r"^\*Code\.\*.*\.py\)", r"^\*Planted bugs\.\*"):
        assert re.search(needed, part, re.M), f"rule {number} has no {needed}"
    assert guards(part) == {bug.name for bug in BUGS if bug.rule == number}


@pytest.mark.parametrize("name", INVARIANTS)
def test_every_invariant_has_its_check(name: str) -> None:
    """Who doubts that an invariant is checked must be able to read the check."""
    part = law()[name]
    assert part.startswith(f"### {name.upper()}: ")
    assert re.search(r"Checks?:\s+\[`\w+`\]\(\.\./(property_tests|app/testing)/(checks/)?\w+\.py\)", part)


def test_the_law_names_every_planted_bug() -> None:
    """A bug of no numbered rule guards something as well."""
    assert set().union(*(guards(part) for part in law().values())) == {bug.name for bug in BUGS}


# ---- a citation that leads nowhere is found ----

LAW_TEXT = "# The law\n\n## Rule 1: One\n\n### S1: Same\n"
SOURCE = '"""One thing.\n\n1. The only rule.\n"""\n\n\nclass Wheel:\n    spokes = 3\n\n\ndef turn() -> None: ...\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small repository in which every citation leads somewhere."""
    for path, text in {LAW: LAW_TEXT, "core/job/wheel.py": SOURCE, "README.md": "# The readme\n"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


GOOD = [
    "Rule 1: see rule 1, rules 1 and 1, S1.",
    "core/job/wheel.py, core/job/, core/job/*.py, docs/protocol.md#rule-1-one and `wheel.py`.",
    "`Wheel.spokes` and `wheel.turn`; reknit.core.job.wheel.turn; tests/test_<name>.py",
]
BAD = {
    "Rule 2: no such rule.": "docs/protocol.md has no rule 2",
    "See rules 1\nand 3.": "docs/protocol.md has no rule 3",
    "S2 is not there.": "docs/protocol.md has no S2",
    "L1 neither.": "docs/protocol.md has no L1",
    "As section 3 says.": "'section 3'",
    "torchelastic's contract 2.1": "'contract 2.1'",
    "DESIGN says so.": "'DESIGN'",
    "See core/wheel.py.": "there is no core/wheel.py",
    "See core/{job,agent}/wheel.py.": "there is no core/agent/wheel.py",
    "See docs/protocol.md#rule-2.": "docs/protocol.md has no anchor #rule-2",
    "See `cart.py`.": "there is no cart.py",
    "floors.md describes it": "there is no floors.md",
    "`Wheel.rim` is round": "Wheel has no rim",
    "call `wheel.roll`": "wheel has no roll",
    "reknit.core.wheel.turn": "there is no reknit.core.wheel.turn",
}


@pytest.mark.parametrize("text", GOOD)
def test_what_exists_may_be_cited(tree: Path, text: str) -> None:
    """A check that complains about sound citations would be switched off."""
    (tree / "README.md").write_text(text)
    (tree / "core/job/cart.py").write_text(f'"""{text}"""\n\n# {text}\n')
    assert problems(tree) == []


@pytest.mark.parametrize("form", ['"""{}"""\n', '"""A file."""\n\nx = 1  # {}\n', 'x = 1\n"""About x. {}"""\n'])
@pytest.mark.parametrize("text", BAD)
def test_a_wrong_citation_in_a_source_file_is_found(tree: Path, text: str, form: str) -> None:
    """In docstrings of a file and of a value, and in comments, over the end of a line as well."""
    comment = form.startswith('"""A')
    path = tree / "core" / "job" / "axle.py"
    path.write_text(form.format(text.replace("\n", "\n# ") if comment else text))
    found = problems(tree)
    assert len(found) == 1, found
    assert BAD[text] in found[0]
    assert found[0].startswith("core/job/axle.py:")


LINKS = {
    "[page](docs/missing.md)": "there is no docs/missing.md",
    "[page](docs/protocol.md#rule-9)": "protocol.md has no anchor #rule-9",
    "[`spin`](core/job/wheel.py)": "wheel.py has no spin",
    "[`Wheel.rim`](core/job/wheel.py)": "wheel.py has no Wheel.rim",
    "[`death-spends`](docs/protocol.md)": "death-spends is not protocol.md",
    "```python\nfrom reknit.core.job.wheel import turn, roll\n```": "there is no reknit.core.job.wheel.roll",
}


@pytest.mark.parametrize("text", [*BAD, *LINKS])
def test_a_wrong_citation_on_a_page_is_found(tree: Path, text: str) -> None:
    """Pages have links and examples as well; a link to code names a function that is there."""
    (tree / "README.md").write_text(f"# The readme\n\n{text}\n")
    found = problems(tree)
    assert any((BAD | LINKS)[text] in problem for problem in found), found
    assert all(re.match(r"README.md:[34]:", problem) for problem in found)


def test_a_rule_of_the_file_itself_says_above(tree: Path) -> None:
    """With that word a rule at the top of the same file is meant, and none of the law."""
    path = tree / "core" / "job" / "wheel.py"
    path.write_text(SOURCE + "\n\nx = 1  # rule 1 above\ny = 2  # rule 2 above\n")
    assert problems(tree) == ["core/job/wheel.py:15: the top of this file has no rule 2"]


def test_the_id_of_a_check_is_a_citation(tree: Path) -> None:
    """Checks of the simulated cluster name the invariant that they ask for."""
    (tree / "core/job/axle.py").write_text('demand(True, "S1", "text")\ndemand(True, "S7", "text")\n')
    assert problems(tree) == ["core/job/axle.py:2: docs/protocol.md has no S7"]
