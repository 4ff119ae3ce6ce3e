"""`reknit completion`: completion for shells, and a manual page, from the tables of the verbs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module

from reknit.app.version import __version__

from .arguments import Parsed, Table
from .looking import HELP, main, put, words_of
from .options import Option, UsageError

TABLE = Table(
    "reknit completion",
    (HELP,),
    "reknit completion bash|zsh|fish|man",
    "Write a script that completes reknit's commands and options in a shell, or the manual page.",
    'bash: put  eval "$(reknit completion bash)"  into ~/.bashrc. zsh: the same with zsh, in ~/.zshrc after compinit.'
    " fish: reknit completion fish > ~/.config/fish/completions/reknit.fish. The manual page:"
    " reknit completion man > ~/.local/share/man/man1/reknit.1",
    mixes=True,
)


def completion(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns the exit status."""
    return main(argv, environ, TABLE, _completion)


def _completion(parsed: Parsed) -> int:
    makers = {"bash": _bash, "zsh": _zsh, "fish": _fish, "man": _man}
    words = words_of(parsed)
    if len(words) != 1 or words[0] not in makers:
        raise UsageError("reknit completion needs one of bash, zsh, fish, man")
    put("".join(f"{line}\n" for line in makers[words[0]](tables())))
    return 0


def tables() -> dict[str, Table]:
    """The verbs that people call, and the table of each."""
    from .main import VERBS

    return {verb: import_module(f"{__package__}.{verb}").TABLE for verb in VERBS}


def _options(table: Table) -> list[Option]:
    return [option for option in table.options if not option.no_effect]


def _spelled(option: Option) -> list[str]:
    return [f"--{option.name}", *([f"-{option.short}"] if option.short else [])]


def _bash(verbs: Mapping[str, Table]) -> Iterator[str]:
    yield "_reknit() {"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" verb="${COMP_WORDS[1]}" at'
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f'        COMPREPLY=($(compgen -W "{" ".join(verbs)} --help --version" -- "$word"))'
    yield "        return"
    yield "    fi"
    yield '    case "$verb" in'
    for verb, table in verbs.items():
        given = " ".join(word for option in _options(table) for word in _spelled(option))
        yield f'        {verb}) [[ "$word" == -* ]] && COMPREPLY=($(compgen -W "{given}" -- "$word")) ;;'
    yield "    esac"
    yield "}"
    yield "complete -o default -o bashdefault -F _reknit reknit"


def _zsh(verbs: Mapping[str, Table]) -> Iterator[str]:
    yield "#compdef reknit"
    yield "_reknit() {"
    yield "    local -a verbs"
    yield "    verbs=("
    yield from (f"        {_quoted(f'{verb}:{_first(table)}')}" for verb, table in verbs.items())
    yield "    )"
    yield "    if (( CURRENT == 2 )); then"
    yield "        _describe command verbs"
    yield "        return"
    yield "    fi"
    yield '    local verb="${words[2]}"'
    yield "    shift words; (( CURRENT-- ))"
    yield '    case "$verb" in'
    for verb, table in verbs.items():
        yield f"        {verb}) _arguments -S \\"
        for option in _options(table):
            told = re.sub(r"([\[\]:])", r"\\\1", option.help)
            value = f":{option.metavar}:_files" if option.metavar and not option.bare else ""
            mark = "=" if option.metavar and not option.bare else ""
            for word in _spelled(option):
                spelled = word + mark if word.startswith("--") else word
                yield f"            {_quoted(f'{spelled}[{told}]{value}')} \\"
        yield "            '*:file:_files' ;;"
    yield "    esac"
    yield "}"
    yield "compdef _reknit reknit"


def _fish(verbs: Mapping[str, Table]) -> Iterator[str]:
    for verb, table in verbs.items():
        yield f"complete -c reknit -n __fish_use_subcommand -a {verb} -d {_quoted(_first(table))}"
    for verb, table in verbs.items():
        for option in _options(table):
            short = f" -s {option.short}" if option.short else ""
            value = " -r" if option.metavar and not option.bare else ""
            condition = _quoted(f"__fish_seen_subcommand_from {verb}")
            yield f"complete -c reknit -n {condition} -l {option.name}{short}{value} -d {_quoted(option.help)}"


def _quoted(text: str) -> str:
    """For a shell, in single quotes. fish knows no other escape than a backslash there, so a quote becomes another
    character."""
    return "'" + text.replace("'", "\u2019") + "'"


def _first(table: Table) -> str:
    """The first sentence of its description."""
    return re.split(r"(?<=[a-z])[.:] ", table.description)[0].rstrip(".")


def _man(verbs: Mapping[str, Table]) -> Iterator[str]:
    yield f'.TH REKNIT 1 "" "reknit {__version__}" "User Commands"'
    yield ".SH NAME"
    yield "reknit \\- start, watch and restart the workers of a PyTorch job"
    yield ".SH SYNOPSIS"
    for table in verbs.values():
        yield f".B {_roff(table.usage)}"
        yield ".br"
    for verb, table in verbs.items():
        yield f".SH {verb.upper()}"
        yield _roff(table.description)
        group = ""
        for option in _options(table):
            if option.group != group:
                group = option.group
                yield f".SS {_roff(group)}"
            value = f"=\\fI{_roff(option.metavar)}\\fR" if option.metavar else ""
            yield ".TP"
            yield ", ".join(f"\\fB{_roff(word)}\\fR" for word in _spelled(option)) + value
            default = f" (default: {option.default})" if option.default else ""
            yield _roff(option.help + default)
        yield ".PP"
        yield _roff(table.epilog_all or table.epilog)


def _roff(text: str) -> str:
    """A line of text for troff: no character of it is a command."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("\u2026", "...")
    return f"\\&{escaped}" if escaped.startswith(".") else escaped
