"""Completion and the manual page, from the tables of the verbs: what a shell makes of them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from reknit.app.cli.completion import tables
from reknit.app.cli.main import VERBS
from tests.support.command import REKNIT


def made(kind: str) -> str:
    return subprocess.run([REKNIT, "completion", kind], check=True, capture_output=True, text=True).stdout


def completed(words: str) -> list[str]:
    """What bash completes the last of these words to."""
    given = words.split(" ")
    array = " ".join(f"'{word}'" for word in given)
    ask = f'{made("bash")}\nCOMP_WORDS=({array}); COMP_CWORD={len(given) - 1}; _reknit; echo "${{COMPREPLY[@]}}"'
    return subprocess.run(["bash", "-c", ask], check=True, capture_output=True, text=True).stdout.split()


def test_bash_completes_verbs_and_options() -> None:
    """The tables of the verbs are the only list of options."""
    assert completed("reknit ")[: len(VERBS)] == list(VERBS)
    assert completed("reknit ex") == ["explain"]
    assert completed("reknit run --max") == ["--max-restarts"]
    assert completed("reknit status --w") == ["--watch"]
    assert completed("reknit run trai") == [], "bash completes files then"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_is_one_that_the_shell_can_read(shell: str) -> None:
    """A wrong quote would break the start of every shell of the user."""
    text = made(shell)
    assert all(option.name in text for option in tables()["run"].options if not option.no_effect)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=text, check=True, text=True)


def test_the_manual_page() -> None:
    """Each verb has a section, and each option stands there with its help."""
    page = made("man")
    assert page.startswith(".TH REKNIT 1")
    for verb, table in tables().items():
        assert f".SH {verb.upper()}\n" in page
        for option in table.options:
            spelled = option.name.replace("-", "\\-")
            assert option.no_effect or f"\\-\\-{spelled}" in page
    if shutil.which("man") is None:
        pytest.skip("man is not installed")
    shown = subprocess.run(["man", "-l", "-"], input=page, check=True, capture_output=True, text=True)
    assert shown.stderr == ""


def test_another_shell_is_refused() -> None:
    """One line, and the status of a wrong command line."""
    done = subprocess.run([REKNIT, "completion", "tcsh"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "reknit: reknit completion needs one of bash, zsh, fish, man\n")
