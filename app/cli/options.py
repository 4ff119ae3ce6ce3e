"""The options of `reknit run` as a table, with torchrun's names and meanings. `arguments` reads a command line by it.

An option of torchrun that has no meaning here is in the table: it is accepted, and one line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, frozen

from reknit.app.input import readers
from reknit.app.settings import MOST_WORKERS

LEAST_HEARTBEAT_S = 0.5
LEAST_HANG_S = 1.0
LONGEST_S = 1e9
"""Upper bound on times that are added to others, in seconds. Near larger numbers a float cannot hold the sum."""
PREFIX = "PET_"
"""What the variables of options begin with, as in torchrun."""


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
    bare: str = ""
    """The text of the value if the option is given without one: `--warm`. Empty: it needs a value."""

    @property
    def variable(self) -> str:
        return PREFIX + self.name.replace("-", "_").upper()


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
    Option(
        "warm",
        "import once for all workers, so a restart is fast",
        "MODULE,…",
        "",
        readers.modules,
        bare="1",
    ),
    _rare("role", "role of the workers", "NAME", "default"),
    _rare("virtual-local-rank", "give each worker one GPU, as its device 0: LOCAL_RANK is 0 for all"),
    Option(
        "max-restarts",
        "failures that the job survives. N/S: after a round of S seconds, the count begins anew",
        "N",
        "0",
        readers.restarts,
        group=_END,
    ),
    Option("shutdown-timeout", "seconds between the stop signal and SIGKILL", "S", "30", readers.seconds, group=_END),
    Option(
        "hang-after",
        "a worker fails after S s without reknit.progress()",
        "S",
        "",
        readers.optional(readers.seconds_from(LEAST_HANG_S, LONGEST_S)),
        group=_END,
    ),
    _rare(
        "start-timeout",
        "as --hang-after, for a worker that has never called reknit.progress()",
        "S",
        "",
        readers.optional(readers.seconds_from(LEAST_HANG_S, LONGEST_S)),
        group=_END,
    ),
    _rare(
        "signals-to-handle",
        "signals that end the workers in order. Any other signal kills the agent, and its workers with it",
        "NAMES",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        readers.signals,
        group=_END,
    ),
    _rare(
        "stdin",
        "the worker with this local rank gets the terminal, for breakpoint(). With one worker on a terminal: 0",
        "RANK",
        "",
        readers.optional(readers.whole(0)),
        group=_OUTPUT,
    ),
    Option("log-dir", "folder for error files and output files", "DIR", group=_OUTPUT),
    Option(
        "redirects", "output to files only: 1 stdout, 2 stderr, 3 both", "N", "0", readers.masks, "r", group=_OUTPUT
    ),
    Option("tee", "output to files and, with a prefix, to the console", "N", "0", readers.masks, "t", group=_OUTPUT),
    Option(
        "local-ranks-filter",
        "show the output of these local ranks only: 0,2",
        "N,N",
        "",
        readers.ranks,
        group=_OUTPUT,
    ),
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
    _rare("quiet", "say nothing unless the job does not succeed", short="q", group=_OUTPUT),
    _rare(
        "log-times",
        "put the time before each line of reknit. auto: if stderr is no terminal",
        "WHEN",
        "auto",
        readers.one_of("auto", "always", "never"),
        group=_OUTPUT,
        bare="always",
    ),
    _rare(
        "log-format",
        "text, or json: each line of reknit is a JSON object with a time and a message",
        "FORMAT",
        "text",
        readers.one_of("text", "json"),
        group=_OUTPUT,
    ),
    _rare("no-trace", "keep no record of the agent's steps, for reknit explain and others", group=_OUTPUT),
    _rare(
        "event-log-handler",
        "where torchelastic's events go: null, console, the name of a handler, or its import path MODULE:NAME",
        "NAME",
        "null",
        group=_OUTPUT,
    ),
    Option("standalone", "one node, which is the default", group=_MANY),
    Option("nnodes", "number of nodes, or MIN:MAX", "N", "1", readers.nodes, group=_MANY),
    _many("rdzv-backend", "where nodes meet: static, c10d, file or etcd", "NAME", "static"),
    _many("rdzv-endpoint", "HOST[:PORT] of the store, or a folder", "PLACE"),
    Option("rdzv-id", "name of the job, the same on all nodes", "ID", group=_MANY),
    _many("rdzv-conf", "time limits, is_host, group, TLS and user of etcd", "K=V,K=V"),
    _many("master-addr", "static: host at which nodes meet", "HOST", "127.0.0.1"),
    Option(
        "master-port",
        "static: its port. With one node: MASTER_PORT",
        "PORT",
        "29500",
        readers.port,
        group=_MANY,
    ),
    _many("node-rank", "wished place of this node in rank order, from 0", "N", "", readers.optional(readers.whole(0))),
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
        readers.optional(readers.seconds_from(LEAST_HEARTBEAT_S, LONGEST_S)),
        is_common=False,
    ),
    _rare("dry-run", "show what would be started, and where each option comes from. Start nothing", group="Help"),
    Option("help", "this text", short="h", group="Help"),
    Option("help-all", "all options, with their defaults", group="Help"),
    _inert("monitor-interval", "reknit does not poll its workers", "S", "0.1", read=readers.seconds),
    _inert("start-method", "a script always gets a process of its own", "NAME", "spawn"),
    _inert("run-path", "each worker runs the script in a Python of its own anyway"),
    _inert("use-env", "workers always find their ranks in the environment"),
    _inert("logs-specs", "the output goes where --redirects and --tee say", "NAME"),
    _inert("duplicate-stdout-filters", "no filtered copy is written; the files of --tee hold every line", "TEXT,TEXT"),
    _inert("duplicate-stderr-filters", "no filtered copy is written; the files of --tee hold every line", "TEXT,TEXT"),
    _inert("numa-binding", "reknit binds no worker to CPUs", "NAME"),
)


def borrowed(texts: Mapping[str, str], group: str) -> tuple[Option, ...]:
    """Options of `reknit run` for another verb, which shows all of them. `texts`: their help texts there, by name."""
    of_run = {option.name: option for option in OPTIONS}
    options = ((of_run[name], text) for name, text in texts.items())
    return tuple(evolve(option, help=text, group=group, is_common=True, default="") for option, text in options)
