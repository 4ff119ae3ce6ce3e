"""Reading the command line of a verb, by its table of options.

1. Everything after the script belongs to the script. A verb without a script takes options anywhere.
2. An option may be written with dashes or underscores, and shortened as long as no other option begins alike.
3. The command line decides, then the variable `PET_<NAME>` (as in torchrun), then the table.
4. A wrong option or variable is a `UsageError`: one line that names it and says what is expected.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from attrs import frozen

from reknit.app.input.readers import FALSE, TRUE

from .options import OPTIONS, PREFIX, Option, UsageError

USAGE_LINE = "reknit run [options] SCRIPT [script arguments]"
_NOT_HERE = ("print-completion",)
"""Options of torchrun that run no job. reknit does not have them."""


@frozen
class Table:
    """The options of one verb."""

    verb: str
    """As a user writes it: `reknit run`."""
    options: Sequence[Option]
    usage: str
    description: str
    epilog: str
    """The last lines of `--help`."""
    epilog_all: str = ""
    """The last lines of `--help-all`."""
    mixes: bool = False
    """Options may come after the first word that is none, as for most commands. False: what comes then belongs to the
    script."""


@frozen
class Parsed:
    """What a command line and the `PET_` variables say."""

    values: Mapping[str, Any]
    """By the name of the option: the value that its reader has made. The value of a flag is a bool."""
    script: str
    args: tuple[str, ...]
    given: Mapping[str, str]
    """By the name of the option: how the user has given it, as an option or as a variable. An option whose value comes
    from the table is missing."""
    texts: Mapping[str, str]
    """By the name of the option: the text of its value, for messages."""
    notices: tuple[str, ...] = ()
    """Lines that the user should see once."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def spelled(self, name: str) -> str:
        """`--max-restarts=x`, or `PET_MAX_RESTARTS=x` if that is where it comes from."""
        return f"{self.given.get(name, '--' + name)}={self.texts[name]}"


# ---- reading ----


def parse(argv: Sequence[str], environ: Mapping[str, str], table: Table | None = None) -> Parsed:
    """Read a command line. `table`: None means that of `reknit run`. Raises `UsageError`."""
    table = table or RUN
    words, rest = _split(argv, table)
    if table.mixes:
        found, rest = rest, []
        while found:
            rest.append(found[0])
            more, found = _split(found[1:], table)
            words += more
        names = [option.name for option, _ in words if option.metavar]
        for name in names:
            if names.count(name) > 1:  # torchrun takes the last one; here a value would be lost without a word
                raise UsageError(f"--{name} is given twice")
    asks_for_help = any(option.name.startswith("help") for option, _ in words)
    variables = {} if asks_for_help else dict(_from_environment(environ, table))
    given = {option.name: option.variable for option in variables} | {o.name: f"--{o.name}" for o, _ in words}
    texts = {o.name: o.default for o in table.options}
    parser = _parser(table)
    namespace = argparse.Namespace()
    for option, text in variables.items():
        _read(parser, namespace, [(option, text)], option.variable)
        texts[option.name] = text
    _read(parser, namespace, words)
    texts |= {option.name: text for option, text in words}
    values = {option.name: getattr(namespace, option.name) for option in table.options}
    script = rest[0] if rest else ""
    notices = () if asks_for_help else (*_unknown_variables(environ, table), *_without_effect(given, table))
    return Parsed(values, script, tuple(rest[1:]), given, texts, notices)


def _split(argv: Sequence[str], table: Table) -> tuple[list[tuple[Option, str]], list[str]]:
    """The options of reknit with the texts of their values, and the script with its arguments.

    argparse cannot find the end of reknit's options by itself. It reads the script's words as if they were options of
    reknit: Python 3.11 refuses `script.py --n`, because `--n` may stand for `--nnodes` or `--node-rank`.
    """
    found = []
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        if argv[at] == "--":
            at += 1
            break
        option, text = _recognised(argv[at], table)
        at += 1
        if option.bare and text == "":
            raise UsageError(
                f"--{option.name}= names nothing: --{option.name}={option.metavar}, or --{option.name} alone"
            )
        if option.bare and text is None:
            text = option.bare
        elif text is None and option.metavar:
            if at == len(argv) or argv[at].startswith("--"):
                raise UsageError(f"--{option.name} needs a value: --{option.name}={option.metavar}")
            text = argv[at]
            at += 1
        elif text is not None and not option.metavar:
            raise UsageError(f"--{option.name} takes no value")
        found.append((option, text or ""))
    return found, list(argv[at:])


def _recognised(word: str, table: Table) -> tuple[Option, str | None]:
    """The option that a word names, and the value in the same word. None: the word has no value."""
    if not word.startswith("--"):
        short = next((option for option in table.options if option.short and option.short == word[1:2]), None)
        if short is not None and (len(word) == 2 or short.metavar):
            return short, word[2:].removeprefix("=") if len(word) > 2 else None
        raise UsageError(f"unknown option {word.partition('=')[0]}; see {table.verb} --help")
    spelling, equals, value = word.partition("=")
    name = spelling[2:].replace("_", "-")
    by_name = {option.name: option for option in table.options}
    fitting = [name] if name in by_name else [other for other in by_name if name and other.startswith(name)]
    if len(fitting) > 1:
        raise UsageError(f"option {spelling} may be {' or '.join('--' + other for other in fitting)}")
    if not fitting:
        raise UsageError(f"unknown option {spelling}{_suggestion(name, table)}")
    return by_name[fitting[0]], value if equals else None


def _suggestion(name: str, table: Table) -> str:
    from difflib import get_close_matches

    if name in _NOT_HERE:
        return ": torchrun has it, reknit does not"
    close = get_close_matches(name, [option.name for option in table.options], n=1, cutoff=0.8)
    return f"; did you mean --{close[0]}?" if close else f"; see {table.verb} --help"


def _read(
    parser: argparse.ArgumentParser,
    namespace: argparse.Namespace,
    words: Sequence[tuple[Option, str]],
    variable: str = "",
) -> None:
    """Let argparse read the texts into `namespace`. `variable`: the variable that the text comes from. Empty: it comes
    from the command line."""
    argv = [f"--{option.name}={text}" if option.metavar else f"--{option.name}" for option, text in words]
    try:
        parser.parse_args(argv, namespace)
    except argparse.ArgumentError as error:
        spelled = variable or str(error.argument_name).rpartition("/")[2]
        raise UsageError(f"{spelled}{error.message}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AssertionError(f"every word was recognised before: {message}")


def _parser(table: Table, columns: int = 80, *, shows_all: bool = True) -> argparse.ArgumentParser:
    parser = _Parser(
        usage=table.usage,
        description=table.description,
        epilog=table.epilog_all if shows_all else table.epilog,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=_formatter(columns),
    )
    groups: dict[str, Any] = {}
    for option in table.options:
        if option.group not in groups:
            has_some = shows_all or any(other.is_common for other in table.options if other.group == option.group)
            groups[option.group] = parser.add_argument_group(option.group if has_some else None)
        _add(groups[option.group], option, shows_all=shows_all)
    return parser


def _add(group: Any, option: Option, *, shows_all: bool) -> None:
    default = f" (default: {option.default})" if option.default and shows_all else ""
    help_ = (option.help + default).replace("%", "%%") if shows_all or option.is_common else argparse.SUPPRESS
    names = [f"-{option.short}"] * bool(option.short) + [f"--{option.name}"]
    if option.metavar:
        group.add_argument(
            *names,
            dest=option.name,
            metavar=f"[={option.metavar}]" if option.bare else option.metavar,
            default=option.default,
            type=_typed(option.read),
            help=help_,
        )
    else:
        group.add_argument(*names, dest=option.name, action="store_true", help=help_)


def _typed(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """The reader, with the value in its error message. argparse adds only the option."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"={text}: {error}") from None

    return convert


# ---- the environment ----


def _from_environment(environ: Mapping[str, str], table: Table) -> Iterator[tuple[Option, str]]:
    for option in table.options:
        text = environ.get(option.variable)
        if text is None or option.name.startswith("help"):
            continue
        if not option.metavar:
            # torchrun reads the value as a number. Any number but 0 is true.
            if text.lower() in FALSE or (text.isdecimal() and not text.strip("0")):
                continue
            if text.lower() not in TRUE and not text.isdecimal():
                raise UsageError(f"{option.variable}={text}: 0 or 1 expected")
        yield option, text


def _unknown_variables(environ: Mapping[str, str], table: Table) -> Iterator[str]:
    known = {option.variable for option in table.options}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known and environ[name]:
            option = "--" + name.removeprefix(PREFIX).replace("_", "-").lower()
            yield f"{name}: without effect, there is no option {option}"


def _without_effect(given: Mapping[str, str], table: Table) -> Iterator[str]:
    for option in table.options:
        if option.no_effect and option.name in given:
            yield f"{given[option.name]}: without effect: {option.no_effect}"


# ---- the help text ----

_DESCRIPTION = "Start the workers of a PyTorch job on this node, watch them, and restart the group when one fails."
_EPILOG = "Every option may be given as a variable, for example PET_NPROC_PER_NODE=2."
_EPILOG_ALL = (
    "Every option can be given as a variable: PET_NPROC_PER_NODE=2 stands for --nproc-per-node=2."
    " --warm=torch,numpy names the modules to import once; without names they are those of torch. A mask of --redirects"
    " and --tee may be given by local rank: 0:1,1:3. SCRIPT may be -, which is the standard input. Some variables have"
    " no option: TORCHELASTIC_HEALTH_CHECK_PORT=PORT serves health checks and metrics,"
    " TORCHELASTIC_ENABLE_FILE_TIMER=1 watches timers that workers set, and docs/options.md lists the others."
)


RUN = Table("reknit run", OPTIONS, USAGE_LINE, _DESCRIPTION, _EPILOG, _EPILOG_ALL)


def _formatter(columns: int) -> Any:
    # argparse makes a formatter for each option. Without a width, each of them would ask for the size of the terminal.
    return lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=columns - 2)


def help_text(table: Table = RUN, *, shows_all: bool = False) -> str:
    """The text of `--help`, or of `--help-all`."""
    from shutil import get_terminal_size  # slow to import, and needed here alone

    return _parser(table, min(get_terminal_size().columns, 110), shows_all=shows_all).format_help()
