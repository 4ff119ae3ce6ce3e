"""The options of `reknit run`: torchrun's names and meanings, as a table, and the parser that reads it.

Not argparse: it costs 5 to 8 ms before the first worker is spawned, of a hundred, and what is needed fits on a page.

1. Everything after the script belongs to the script.
2. An option has a dash and an underscore spelling. Its default comes from `PET_<NAME>` (torchrun's environment), then
   from the table; the command line beats both.
3. A wrong option is a `UsageError` that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reknit.core.values import frozen


class UsageError(Exception):
    """What the user asked for cannot be done. The message names the option, the variable or the file."""


@frozen
class Option:
    name: str
    """The long spelling without dashes; the key of the parsed value."""
    help: str
    metavar: str = ""
    """Empty: a flag."""
    default: str = ""
    short: str = ""
    only_for_many: bool = False
    """With one node there is nothing that it could change; accepted all the same."""

    @property
    def variable(self) -> str:
        return _PREFIX + self.name.replace("-", "_").upper()


OPTIONS = (
    Option("standalone", "one node, no rendezvous. It is also what happens without --nnodes"),
    Option("nnodes", "number of nodes, or MIN:MAX", "N", "1"),
    Option("nproc-per-node", "workers on this node: a number, cpu, gpu, xpu or auto", "N", "1"),
    Option("max-restarts", "failures that the whole job survives", "N", "0"),
    Option("rdzv-id", "id of the job (default: a random one; with several nodes: none, as in torchrun)", "ID"),
    Option("role", "role of the workers", "NAME", "default"),
    Option("module", "the script is a module: python -m", short="m"),
    Option("no-python", "execute the script itself, not Python with it"),
    Option("log-dir", "folder for what --redirects and --tee write (default: a temporary one)", "DIR"),
    Option("redirects", "what goes to files: 0 nothing, 1 stdout, 2 stderr, 3 both; or RANK:N,RANK:N", "N", "0", "r"),
    Option("tee", "likewise, but shown as well, with a prefix", "N", "0", "t"),
    Option("local-ranks-filter", "show the output of these local ranks only", "RANK,RANK"),
    Option("log-line-prefix-template", "prefix of teed lines, with ${role_name}, ${local_rank}, ${rank}", "TEXT"),
    Option(
        "signals-to-handle",
        "signals that end the job in order; any other kills the agent, and with it the workers",
        "NAMES",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ),
    Option("shutdown-timeout", "seconds between the signal that stops workers and SIGKILL", "S", "30"),
    Option("monitor-interval", "accepted and without effect: nothing is polled here", "S", "0.1"),
    Option("verbose", "say every event and command of the agent on stderr", short="v"),
    Option("help", "this text", short="h"),
    Option("rdzv-backend", "where nodes meet: static, c10d, file or etcd", "NAME", "static", only_for_many=True),
    Option(
        "rdzv-endpoint",
        "c10d: HOST[:29400], where one of the agents hosts the store; file: a folder that all nodes share;"
        " etcd: HOST[:2379],…",
        "PLACE",
        only_for_many=True,
    ),
    Option("rdzv-conf", "how nodes meet: join_timeout, last_call_timeout, heartbeat, …", "K=V,K=V", only_for_many=True),
    Option(
        "rdzv-secret",
        "only who knows it takes part. `ps` shows command lines: better set REKNIT_RDZV_SECRET; workers do not get it",
        "TEXT",
        only_for_many=True,
    ),
    Option("master-addr", "static: where nodes meet, without --rdzv-endpoint", "HOST", "127.0.0.1", only_for_many=True),
    Option("master-port", "static: likewise. The workers' MASTER_PORT is another", "PORT", "29500", only_for_many=True),
    Option("node-rank", "wished rank of this node; static: 0 to MAX-1 (default: 0)", "N", only_for_many=True),
    Option(
        "node-id",
        "name of this node, the same after a restart (default: the host's)",
        "NAME",
        only_for_many=True,
    ),
    Option(
        "local-addr",
        "address of this node for the others (default: found out)",
        "HOST",
        only_for_many=True,
    ),
    Option("admission", "when newcomers get a place: soon, at-failure or never", "WHEN", "soon", only_for_many=True),
    Option("store-timeout", "seconds without the store that workers are kept through", "S", "300", only_for_many=True),
    Option(
        "fence-after",
        "kill the workers of a node after so many seconds without the store; the others wait longer before they go on",
        "S",
        only_for_many=True,
    ),
)
_BY_SPELLING = {f"--{o.name}": o for o in OPTIONS} | {f"-{o.short}": o for o in OPTIONS if o.short}
_NOT_HERE = {
    "--run-path",
    "--start-method",
    "--event-log-handler",
    "--logs-specs",
    "--numa-binding",
    "--virtual-local-rank",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
}
_ONLY_TORCHRUN = ": torchrun has it, reknit does not"
_PREFIX = "PET_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@frozen
class Parsed:
    """What was asked for, as text. A flag is "1" or ""."""

    values: Mapping[str, str]
    script: str
    args: tuple[str, ...]
    given: Mapping[str, str]
    """What came from the command line or the environment, not from the table: how the user has spelled it."""
    notices: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def spelled(self, name: str) -> str:
        """`--max-restarts=x`, or `PET_MAX_RESTARTS=x` if that is where it comes from."""
        return f"{self.given.get(name, '--' + name)}={self.values[name]}"


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Parsed:
    """Read a command line. Raises `UsageError`."""
    values = {o.name: o.default for o in OPTIONS}
    given = {}
    for option, value in _from_environment(environ):
        values[option.name], given[option.name] = value, option.variable
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        if argv[at] == "--":
            at += 1
            break
        option, in_word = _recognised(argv[at])
        at += 1
        if in_word is None and option.metavar:
            if at == len(argv) or argv[at].startswith("--"):
                raise UsageError(f"--{option.name} needs a value: --{option.name}={option.metavar}")
            in_word = argv[at]
            at += 1
        elif in_word is not None and not option.metavar:
            raise UsageError(f"--{option.name} takes no value")
        values[option.name], given[option.name] = in_word or ("" if option.metavar else "1"), f"--{option.name}"
    script = argv[at] if at < len(argv) else ""
    return Parsed(values, script, tuple(argv[at + 1 :]), given, _unknown_variables(environ))


def _recognised(word: str) -> tuple[Option, str | None]:
    """The option that a word names, and the value that is in the same word."""
    if not word.startswith("--"):
        option = _BY_SPELLING.get(word[:2])
        if option is not None and (len(word) == 2 or option.metavar):
            return option, word[2:].removeprefix("=") if len(word) > 2 else None
    else:
        name, equals, value = word.partition("=")
        option = _BY_SPELLING.get(name.replace("_", "-"))
        if option is not None:
            return option, value if equals else None
    raise UsageError(f"unknown option {word.partition('=')[0]}{_suggestion(word)}")


def _suggestion(word: str) -> str:
    from difflib import get_close_matches

    spelling = word.partition("=")[0].replace("_", "-")
    if spelling in _NOT_HERE:
        return _ONLY_TORCHRUN
    close = get_close_matches(spelling, _BY_SPELLING, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else "; see reknit run --help"


def _unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each. Those of torchrun's options are refused, as these are."""
    known = {option.variable for option in OPTIONS}
    unknown = sorted(name for name in environ if name.startswith(_PREFIX) and name not in known and environ[name])
    for name in unknown:
        if _as_option(name) in _NOT_HERE:
            raise UsageError(f"{name}{_ONLY_TORCHRUN}")
    return tuple(f"{name}: without effect, there is no option {_as_option(name)}" for name in unknown)


def _as_option(variable: str) -> str:
    return "--" + variable.removeprefix(_PREFIX).replace("_", "-").lower()


def _from_environment(environ: Mapping[str, str]) -> list[tuple[Option, str]]:
    found = []
    for option in OPTIONS:
        value = environ.get(option.variable)
        if value is None or option.name == "help":
            continue
        if not option.metavar:
            if value.lower() not in _TRUE + _FALSE:
                raise UsageError(f"{option.variable}={value}: 0 or 1 expected")
            value = "1" if value.lower() in _TRUE else ""
        found.append((option, value))
    return found


def help_text() -> str:
    """The text of `reknit run --help`."""
    lines = ["usage: reknit run [options] script [script arguments]", ""]
    for option in OPTIONS:
        if not option.only_for_many:
            lines += _help_lines(option)
    lines += ["", "For several nodes; accepted, and without effect, for one:", ""]
    for option in OPTIONS:
        if option.only_for_many:
            lines += _help_lines(option)
    lines += ["", "Every option can be given as a variable: PET_NPROC_PER_NODE=2 for --nproc-per-node=2.", ""]
    return "\n".join(lines)


def _help_lines(option: Option) -> list[str]:
    spelling = f"--{option.name}" + (f"={option.metavar}" if option.metavar else "")
    if option.short:
        spelling = f"-{option.short}, {spelling}"
    default = f" (default: {option.default})" if option.default else ""
    return [f"  {spelling}", f"        {option.help}{default}"]
