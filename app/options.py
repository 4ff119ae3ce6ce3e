"""The options of `reknit run` as a table, with torchrun's names and meanings, and the parser that is made from it.

1. Everything after the script belongs to the script.
2. An option may be written with dashes or underscores, and shortened as long as no other option begins alike.
3. The command line decides, then the variable `PET_<NAME>` (as in torchrun), then the table.
4. A wrong option or variable is a `UsageError`: one line that names it and says what is expected.
5. An option of torchrun that has no meaning here is accepted, and one line says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from attrs import frozen

from . import readers
from .settings import MOST_WORKERS

LEAST_HEARTBEAT_S = 0.5
USAGE_LINE = "reknit run [options] SCRIPT [script arguments]"


class UsageError(Exception):
    """What the user asked for cannot be done. The message names the option, the variable or the file."""


@frozen
class Option:
    name: str
    """The long spelling without the leading dashes. It is also the key of the parsed value."""
    help: str
    metavar: str = ""
    """What stands for the value in the help text. Empty: the option is a flag."""
    default: str = ""
    read: Callable[[str], Any] = readers.text
    """Makes the value of the text."""
    short: str = ""
    group: str = "Workers"
    """The heading above the option in the help text."""
    is_common: bool = True
    """True: shown by `--help`. False: shown by `--help-all` only."""
    only_for_many: bool = False
    """True: the option has no effect for a job with one node. It is accepted all the same."""
    no_effect: str = ""
    """Why this option of torchrun has no effect here. Empty: it has an effect."""

    @property
    def variable(self) -> str:
        return _PREFIX + self.name.replace("-", "_").upper()


_END, _OUTPUT, _MANY = "Failures and the end", "Output", "Several nodes"


def _rare(name: str, help: str, metavar: str = "", default: str = "", read: Any = readers.text, **more: Any) -> Option:
    return Option(name, help, metavar, default, read, is_common=False, **more)


def _many(name: str, help: str, metavar: str, default: str = "", read: Any = readers.text, **more: Any) -> Option:
    return Option(name, help, metavar, default, read, group=_MANY, only_for_many=True, **more)


def _inert(name: str, why: str, metavar: str = "", default: str = "", **more: Any) -> Option:
    return Option(name, why, metavar, default, group="Accepted, without effect", is_common=False, no_effect=why, **more)


OPTIONS = (
    Option("nproc-per-node", "workers here: a number, gpu, xpu, cpu or auto", "N", "1", readers.workers(MOST_WORKERS)),
    Option("module", "SCRIPT is a module, run by python -m", short="m"),
    Option("no-python", "execute SCRIPT itself, without Python"),
    _rare("role", "role of the workers", "NAME", "default"),
    _rare("virtual-local-rank", "give each worker one GPU, as its device 0: LOCAL_RANK is 0 for all"),
    Option("max-restarts", "failures that the whole job survives", "N", "0", readers.whole(0), group=_END),
    Option("shutdown-timeout", "seconds between the stop signal and SIGKILL", "S", "30", readers.seconds, group=_END),
    _rare(
        "signals-to-handle",
        "signals that end the workers in order. Any other signal kills the agent, and its workers with it",
        "NAMES",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        readers.signals,
        group=_END,
    ),
    Option("log-dir", "folder for the files of --redirects and --tee", "DIR", group=_OUTPUT),
    Option("redirects", "only to files: 1 stdout, 2 stderr, 3 both", "N", "0", readers.masks, "r", group=_OUTPUT),
    Option("tee", "to files and to the console, with a prefix", "N", "0", readers.masks, "t", group=_OUTPUT),
    Option("local-ranks-filter", "show only these local ranks: 0,2", "RANKS", "", readers.ranks, group=_OUTPUT),
    _rare(
        "log-line-prefix-template",
        "prefix of teed lines, with ${role_name}, ${local_rank}, ${rank}, ${hostname}",
        "TEXT",
        group=_OUTPUT,
    ),
    _rare(
        "output",
        "how workers write to the console. relay: through reknit, which keeps lines whole and shows the last lines of"
        " a worker that failed. inherit: directly",
        "HOW",
        "relay",
        readers.one_of("relay", "inherit"),
        group=_OUTPUT,
    ),
    Option("verbose", "show every event and command of the agent", short="v", group=_OUTPUT),
    Option("standalone", "one node, which is the default", group=_MANY),
    Option("nnodes", "number of nodes, or MIN:MAX", "N", "1", readers.nodes, group=_MANY),
    _many("rdzv-backend", "where nodes meet: static, c10d, file or etcd", "NAME", "static"),
    _many("rdzv-endpoint", "HOST[:PORT] of the store, or a shared folder", "PLACE"),
    Option("rdzv-id", "name of the job, the same on all nodes", "ID", group=_MANY),
    _many("rdzv-conf", "join_timeout, last_call_timeout, heartbeat, …", "K=V,K=V"),
    _many("master-addr", "static: host at which nodes meet", "HOST", "127.0.0.1"),
    Option(
        "master-port",
        "static: its port. With one node: MASTER_PORT",
        "PORT",
        "29500",
        readers.port,
        group=_MANY,
    ),
    _many("node-rank", "wished place of this node, from 0", "N", "", readers.optional(readers.whole(0))),
    _many("node-id", "name of this node, the same after a restart (default: the host's)", "NAME", is_common=False),
    _many("local-addr", "address of this node for the others (default: found out)", "HOST", is_common=False),
    _many(
        "rdzv-secret",
        "signs what nodes write; all must give the same. `ps` shows command lines, so better set REKNIT_RDZV_SECRET",
        "TEXT",
        is_common=False,
    ),
    _many(
        "admission",
        "when new nodes get a place: soon, at-failure or never",
        "WHEN",
        "soon",
        readers.one_of("soon", "at-failure", "never"),
        is_common=False,
    ),
    _many(
        "store-timeout",
        "seconds for which workers are kept running while the store cannot be reached",
        "S",
        "300",
        readers.seconds,
        is_common=False,
    ),
    _many(
        "fence-after",
        "kill the workers of a node that has not reached the store for S seconds (default: they run on)",
        "S",
        "",
        readers.optional(readers.seconds_from(LEAST_HEARTBEAT_S)),
        is_common=False,
    ),
    Option("help", "this text", short="h", group="Help"),
    Option("help-all", "all options, with their defaults", group="Help"),
    _inert("monitor-interval", "reknit does not poll its workers", "S", "0.1", read=readers.seconds),
    _inert("start-method", "a script always gets a process of its own", "NAME", "spawn"),
    _inert("run-path", "each worker runs the script in a Python of its own anyway"),
    _inert("use-env", "workers always find their ranks in the environment"),
    _inert("event-log-handler", "reknit writes no events of torchelastic", "NAME", "null"),
    _inert("logs-specs", "the output goes where --redirects and --tee say", "NAME"),
    _inert("duplicate-stdout-filters", "no filtered copy is written; the files of --tee hold every line", "TEXT,TEXT"),
    _inert("duplicate-stderr-filters", "no filtered copy is written; the files of --tee hold every line", "TEXT,TEXT"),
    _inert("numa-binding", "reknit binds no worker to CPUs", "NAME"),
)
_BY_NAME = {option.name: option for option in OPTIONS}
_BY_SHORT = {option.short: option for option in OPTIONS if option.short}
_NOT_HERE = ("print-completion",)
"""Options of torchrun that run no job. reknit does not have them."""
_PREFIX = "PET_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


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


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Parsed:
    """Read a command line. Raises `UsageError`."""
    words, rest = _split(argv)
    asks_for_help = any(option.name.startswith("help") for option, _ in words)
    variables = {} if asks_for_help else dict(_from_environment(environ))
    given = {option.name: option.variable for option in variables} | {o.name: f"--{o.name}" for o, _ in words}
    texts = {o.name: o.default for o in OPTIONS}
    parser = _parser()
    namespace = argparse.Namespace()
    for option, text in variables.items():
        _read(parser, namespace, [(option, text)], option.variable)
        texts[option.name] = text
    _read(parser, namespace, words)
    texts |= {option.name: text for option, text in words}
    values = {option.name: getattr(namespace, option.name) for option in OPTIONS}
    script = rest[0] if rest else ""
    notices = () if asks_for_help else (*_unknown_variables(environ), *_without_effect(given))
    return Parsed(values, script, tuple(rest[1:]), given, texts, notices)


def _split(argv: Sequence[str]) -> tuple[list[tuple[Option, str]], list[str]]:
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
        option, text = _recognised(argv[at])
        at += 1
        if text is None and option.metavar:
            if at == len(argv) or argv[at].startswith("--"):
                raise UsageError(f"--{option.name} needs a value: --{option.name}={option.metavar}")
            text = argv[at]
            at += 1
        elif text is not None and not option.metavar:
            raise UsageError(f"--{option.name} takes no value")
        found.append((option, text or ""))
    return found, list(argv[at:])


def _recognised(word: str) -> tuple[Option, str | None]:
    """The option that a word names, and the value in the same word. None: the word has no value."""
    if not word.startswith("--"):
        short = _BY_SHORT.get(word[1:2])
        if short is not None and (len(word) == 2 or short.metavar):
            return short, word[2:].removeprefix("=") if len(word) > 2 else None
        raise UsageError(f"unknown option {word.partition('=')[0]}; see reknit run --help")
    spelling, equals, value = word.partition("=")
    name = spelling[2:].replace("_", "-")
    fitting = [name] if name in _BY_NAME else [other for other in _BY_NAME if name and other.startswith(name)]
    if len(fitting) > 1:
        raise UsageError(f"option {spelling} may be {' or '.join('--' + other for other in fitting)}")
    if not fitting:
        raise UsageError(f"unknown option {spelling}{_suggestion(name)}")
    return _BY_NAME[fitting[0]], value if equals else None


def _suggestion(name: str) -> str:
    from difflib import get_close_matches

    if name in _NOT_HERE:
        return ": torchrun has it, reknit does not"
    close = get_close_matches(name, _BY_NAME, n=1, cutoff=0.8)
    return f"; did you mean --{close[0]}?" if close else "; see reknit run --help"


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


def _parser(columns: int = 80, *, shows_all: bool = True) -> argparse.ArgumentParser:
    parser = _Parser(
        usage=USAGE_LINE,
        description=_DESCRIPTION,
        epilog=_EPILOG_ALL if shows_all else _EPILOG,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=_formatter(columns),
    )
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if option.group not in groups:
            has_some = shows_all or any(other.is_common for other in OPTIONS if other.group == option.group)
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
            metavar=option.metavar,
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


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[Option, str]]:
    for option in OPTIONS:
        text = environ.get(option.variable)
        if text is None or option.name.startswith("help"):
            continue
        if not option.metavar:
            # torchrun reads the value as a number. Any number but 0 is true.
            if text.lower() in _FALSE or (text.isdecimal() and not text.strip("0")):
                continue
            if text.lower() not in _TRUE and not text.isdecimal():
                raise UsageError(f"{option.variable}={text}: 0 or 1 expected")
        yield option, text


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    known = {option.variable for option in OPTIONS}
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known and environ[name]:
            option = "--" + name.removeprefix(_PREFIX).replace("_", "-").lower()
            yield f"{name}: without effect, there is no option {option}"


def _without_effect(given: Mapping[str, str]) -> Iterator[str]:
    for option in OPTIONS:
        if option.no_effect and option.name in given:
            yield f"{given[option.name]}: without effect: {option.no_effect}"


# ---- the help text ----

_DESCRIPTION = "Start the workers of a PyTorch job on this node, watch them, and restart the group when one fails."
_EPILOG = "Every option can be given as a variable: PET_NPROC_PER_NODE=2 stands for --nproc-per-node=2."
_EPILOG_ALL = (
    "Every option can be given as a variable: PET_NPROC_PER_NODE=2 stands for --nproc-per-node=2. A mask of --redirects"
    " and --tee may be given by local rank: 0:1,1:3. SCRIPT may be -, which is the standard input."
)


def _formatter(columns: int) -> Any:
    # argparse makes a formatter for each option. Without a width, each of them would ask for the size of the terminal.
    return lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=columns - 2)


def help_text(*, shows_all: bool = False) -> str:
    """The text of `reknit run --help`, or of `--help-all`."""
    from shutil import get_terminal_size  # slow to import, and needed here alone

    return _parser(min(get_terminal_size().columns, 110), shows_all=shows_all).format_help()
