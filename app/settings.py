"""What one agent is to do, as one typed value: `Settings`. The command line and the functions for programs make it, and
the wiring (app/wiring) reads nothing else.

1. A field is a number, a name or a typed value. No field is a text that must still be parsed.
2. A value out of range raises `ValueError` where it is made. The message names class, field and value.
3. Times are in seconds.

    Settings(command=("python", "train.py"), local_world_size=2)

    Settings(
        command=("python", "train.py"),
        local_world_size=8,
        terms=Terms(min_nodes=2, max_nodes=4, restarts=RestartPolicy(max_restarts=3)),
        meeting=Meeting("c10d", endpoints=(("node0", 29400),)),
        run_id="job42",
    )
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import Attribute, Factory, field, frozen
from attrs.validators import optional

from reknit.adapters.keeper.client.calling import METHODS
from reknit.adapters.keeper.output.streams import StreamSettings
from reknit.core.job.entries import Terms

MOST_WORKERS = 10_000
"""Limit for the workers on one node. No host can run more. A larger number is a typing error, and would fill the
memory.
"""
LONGEST_NAME = 1000
"""Limit for a name that becomes part of a key in the store, in bytes. torch's server cuts the connection at a key of
8 KiB."""
BACKENDS = ("c10d", "file", "etcd")
NO_EVENTS = "null"
"""The event handler that drops events. With it nothing is imported, and no event is made."""
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

Validator = Callable[[Any, "Attribute[Any]", Any], None]


# ---- what fields refuse ----


def _refuse(instance: object, name: str, value: object, wanted: str) -> None:
    raise ValueError(f"{type(instance).__name__}.{name} must be {wanted}, not {value!r:.100}")


def _whole(least: int, most: int) -> Validator:
    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if type(value) is not int or not least <= value <= most:
            _refuse(instance, attribute.name, value, f"a whole number from {least} to {most}")

    return check


def _seconds(instance: object, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        _refuse(instance, attribute.name, value, "a number of seconds, 0 or more")


def _name(least: int) -> Validator:
    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        # The name of a host may hold bytes that are not UTF-8. In a Python text they are lone surrogates.
        if not isinstance(value, str) or not least <= len(value.encode(errors="surrogatepass")) <= LONGEST_NAME:
            _refuse(instance, attribute.name, value, f"a name of {least} to {LONGEST_NAME} bytes")

    return check


def _address(instance: object, attribute: Attribute[Any], value: Any) -> None:
    from ipaddress import ip_address  # slow to import, and rarely needed

    try:
        if isinstance(value, str):
            ip_address(value)
            return
    except ValueError:
        pass
    _refuse(instance, attribute.name, value, "a numeric address, for example 127.0.0.1")


def _one_of(*words: str) -> Validator:
    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value not in words:
            _refuse(instance, attribute.name, value, f"one of {', '.join(words)}")

    return check


def _a(kind: type) -> Validator:
    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if not isinstance(value, kind):
            _refuse(instance, attribute.name, value, f"a {kind.__name__}")

    return check


def _words(value: Any) -> Any:
    """A list becomes a tuple. A text, or what holds no values, stays as it is, and is refused later."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else value


def _pairs(value: Any) -> Any:
    """Lists become tuples. A text stays a text, and is refused later."""
    return tuple(map(_words, value)) if isinstance(value, list | tuple) else value


def _path(value: Any) -> Any:
    """A path becomes a text. Anything else stays as it is."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# ---- the values ----


@frozen
class Meeting:
    """The store at which the nodes of a job meet. All nodes must name the same store, and have the same secret. The
    other fields may differ between nodes.

        Meeting("c10d", endpoints=(("node0", 29400),))
        Meeting("file", folder="/shared/folder")
        Meeting("etcd", endpoints=(("etcd0", 2379), ("etcd1", 2379)))

    A value out of range raises `ValueError`.
    """

    backend: str = field(validator=_one_of(*BACKENDS))
    """`c10d`: a TCPStore that one of the agents hosts. `file`: a folder that all nodes share. `etcd`: etcd v3."""
    endpoints: tuple[tuple[str, int], ...] = field(default=(), converter=_pairs)
    """Pairs of host and port. c10d: one. etcd: one or more servers of a cluster. file: none."""
    folder: str = ""
    """file: the folder of the journal. Other backends: empty."""
    secret: str = field(default="", repr=False)
    """Signs what agents write into the journal. Empty: nothing is signed."""
    is_host: bool | None = None
    """c10d: whether this agent hosts the store. None: every agent tries, and the first that succeeds is the host."""
    protocol: str = field(default="http", validator=_one_of("http", "https"))
    """etcd: the protocol of its servers."""
    ca_cert: str | None = None
    """etcd: file with the certificate of the authority that has signed the servers' certificates."""
    ssl_cert: str | None = None
    """etcd: file with the certificate of this client. It needs `ssl_cert_key`."""
    ssl_cert_key: str | None = None
    """etcd: file with the private key for `ssl_cert`."""
    group: int | None = field(default=None, validator=optional(_whole(0, 2**32 - 2)))
    """file: the number of a group whose members may use the journal. None: only the user whose agents make it."""
    user: str = ""
    """etcd: its user. Empty: etcd asks for no user. A user needs `password` or `password_file`."""
    password: str = field(default="", repr=False)
    """etcd: the password of `user`."""
    password_file: str = ""
    """etcd: file with the password of `user`. It is read again when etcd asks for the password again."""

    @endpoints.validator
    def _suits_the_backend(self, attribute: Attribute[Any], value: Any) -> None:
        for pair in value if isinstance(value, tuple) else [value]:
            host, port = pair if isinstance(pair, tuple) and len(pair) == 2 else ("", 0)
            if not (isinstance(host, str) and host and type(port) is int and 0 < port <= 65535):
                wanted = 'pairs of a host and a port from 1 to 65535, for example (("node0", 29400),)'
                _refuse(self, "endpoints", value, wanted)
        if self.backend == "c10d" and len(value) != 1:
            _refuse(self, "endpoints", value, "one endpoint for c10d; a job that must outlive any host needs etcd")
        if self.backend == "etcd" and not value:
            _refuse(self, "endpoints", value, "at least one endpoint for etcd")
        if self.backend == "file" and value:
            _refuse(self, "endpoints", value, "empty for file")

    def __attrs_post_init__(self) -> None:
        if (self.backend == "file") != bool(self.folder):
            _refuse(self, "folder", self.folder, "a folder for the backend file, and empty for others")
        if self.group is not None and self.backend != "file":
            _refuse(self, "group", self.group, "None unless the backend is file")
        if (self.ssl_cert is None) != (self.ssl_cert_key is None):
            _refuse(self, "ssl_cert", self.ssl_cert, "given together with ssl_cert_key")
        if self.user and not (self.password or self.password_file):
            _refuse(self, "user", self.user, "given together with password or password_file")

    @property
    def place(self) -> str:
        """The store as one text, for messages."""
        hosts = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.endpoints)
        return f"{self.backend}://{self.folder or ','.join(hosts)}"

    @property
    def shown(self) -> str:
        """The same without `c10d://`. `static` is `c10d` with a fixed number of nodes, so the text names neither."""
        return self.place.removeprefix("c10d://")


@frozen
class HealthCheck:
    """Where the agent serves /healthz, /readyz, /state and /metrics over HTTP (docs/health.md)."""

    port: int = field(validator=_whole(0, 65535))
    """0: a free one, which a line of reknit's own names."""
    host: str = field(default="127.0.0.1", validator=_address)
    """The numeric address at which the server listens. `0.0.0.0`: all addresses. The pages need no password: whoever
    reaches the port can read them."""
    timeout_s: float = field(default=60.0, validator=_seconds)
    """/healthz takes an agent that does not answer for so long for hung."""


@frozen(kw_only=True)
class Settings:
    """What one agent is to do.

        Settings(command=("python", "train.py"), local_world_size=2)
        Settings(function=train, args=(0.1,), local_world_size=2)

    Give `command` or `function`. Every other field has a default, except `run_id` if there is a `meeting`. All fields
    are given by name. `run`, `start` and `run_async` take the value. It cannot be changed: `attrs.evolve` makes another
    one. A value out of range raises `ValueError`. The message names the field and the value. Times are in seconds.
    """

    # The workers.
    command: tuple[str, ...] = field(default=(), converter=_words)
    """The workers' command line: the program and its arguments. `${local_rank}` in an argument is replaced by the
    worker's local rank. Empty: the workers call `function`."""
    function: Callable[..., object] | None = field(default=None)
    """What each worker calls, in a process of its own. None: the workers run `command`. Exactly one of the two must be
    given."""
    args: tuple[object, ...] = field(default=(), converter=_words, repr=False)
    """The arguments of `function`. Every worker gets the same."""
    start_method: str = field(default="spawn", validator=_one_of(*METHODS))
    """How workers that call a function are started, as in `multiprocessing`. spawn: a new interpreter, which gets the
    function by pickle. fork: a copy of this process. forkserver: a fork of a process that has imported the installed
    packages that the function's module has imported."""
    warm: bool | tuple[str, ...] = field(default=False, converter=_words)
    """The workers are forks of a process that has imported modules for them, so a restart does not import them again
    (docs/warm.md). True: what most scripts with torch import. Names: these modules. False: every worker imports for
    itself. For a function it needs start method forkserver, which always has such a process: names are then imported
    besides."""
    terminal: int | None = field(default=None, validator=optional(_whole(0, MOST_WORKERS)))
    """The local rank of the worker of `command` that has this process's stdin, and its terminal if that is one: so
    `breakpoint()` works in this worker. For `reknit run` alone: the worker joins the process group of the agent. None:
    no worker has it."""
    stdin: bytes | None = field(default=None, repr=False)
    """What each worker reads from its standard input. None: the worker inherits the agent's standard input."""
    env: Mapping[str, str] = field(default=Factory(dict))
    """Variables for the workers besides the environment with which they begin (`Running`)."""
    local_world_size: int = field(default=1, validator=_whole(1, MOST_WORKERS))
    """Number of workers on this node."""
    virtual_local_rank: bool = False
    """Each worker sees one GPU, as its device 0: LOCAL_RANK is 0, and CUDA_VISIBLE_DEVICES names that GPU alone."""
    role: str = field(default="default", validator=_name(1))
    """The role of this node's workers, as in torchelastic. Workers of one role have ranks of their own within it."""
    # The job, and where its nodes meet.
    terms: Terms = field(default=Terms(), validator=_a(Terms))
    """Number of nodes, number of restarts, and everything else that must be equal on all nodes."""
    meeting: Meeting | None = field(default=None)
    """Where the nodes meet. None: the job has one node."""
    run_id: str = field(validator=_name(1))
    """Name of the job. Without a meeting the default is a random name. With a meeting it must be given, the same on all
    nodes."""
    store_timeout_s: float = field(default=300.0, validator=_seconds)
    """When the store cannot be reached for so long, the agent ends, and its workers with it."""

    # This node.
    node_id: str = field(default="", validator=_name(0))
    """Name of this node, the same each time when its agent is started. Empty: the name of the host."""
    address: str = field(default="", validator=_name(0))
    """The address at which other nodes reach this one. Empty: the address from which this node reaches the store."""
    rank_hint: int | None = field(default=None)
    """Wished group rank in the first round, from 0. None: no wish."""
    master_port: int = field(default=0, validator=_whole(0, 65535))
    """MASTER_PORT of every round, for a job with one node. 0: each round gets another free port."""

    # What is watched.
    timer_file: str | None = field(default=None)
    """Workers can set timers for their own work, through a named pipe at this path (docs/watchdog.md#timers). Empty: at
    a new path. None: they cannot."""

    # The end.
    signals: tuple[int, ...] = field(default=DEFAULT_SIGNALS, converter=_words)
    """Signals that end `reknit run` in order, and are forwarded to its workers. An agent that a program runs itself
    takes no signals."""
    grace_s: float = field(default=30.0, validator=_seconds)
    """Time between the signal that stops workers and SIGKILL."""

    # Workers that are hung.
    hang_after_s: float | None = field(default=None)
    """A worker that reports no progress (`reknit.progress`) for so many seconds counts as failed: reknit shows its
    stacks and ends it. More than 0. None: a worker that has reported once is not watched."""
    start_timeout_s: float | None = field(default=None)
    """The same for a worker that has not reported since its start, so many seconds ago. None: as `hang_after_s` says.
    """

    # What is shown, and what is kept.
    streams: StreamSettings = field(default=StreamSettings(), validator=_a(StreamSettings))
    """What becomes of the workers' stdout and stderr."""
    log_dir: str = field(default="", converter=_path, validator=_a(str))
    """The folder in which the folder of this run is made. Empty: the host's folder for temporary files, and the folder
    of this run is removed at the end unless `streams` writes files. `/dev/null`: there are no files."""
    trace: bool = field(default=True, validator=_a(bool))
    """Whether the agent writes down what it sees and decides, into its log folder or a folder of this host
    (docs/records.md)."""
    verbose: bool = field(default=False, validator=_a(bool))
    """Show every event and command of the agent."""
    event_handler: str = field(default=NO_EVENTS, validator=_name(1))
    """Where torchelastic's events go (docs/events.md): `console`, the name of a handler, or its import path,
    `module:name`. `null`: there are no events."""
    health: HealthCheck | None = field(default=None)
    """The server by which supervisors see how the agent is. None: there is none."""

    @env.validator
    def _are_variables(self, attribute: Attribute[Any], value: Any) -> None:
        """No system can hold another variable: it would be found out by a round that fails."""
        wanted = "a mapping from the names of variables to texts"
        if not isinstance(value, Mapping):
            _refuse(self, "env", value, wanted)
        for name, text in value.items():
            if not (isinstance(name, str) and isinstance(text, str) and name) or "=" in name or "\0" in name + text:
                _refuse(self, "env", {name: text}, wanted)

    @run_id.default
    def _random(self) -> str:
        return os.urandom(8).hex() if self.meeting is None else ""

    @command.validator
    def _is_a_command_line(self, attribute: Attribute[Any], value: Any) -> None:
        if self.function is not None:
            if value:
                _refuse(self, "command", value, "empty, because a function is given")
            return
        if not isinstance(value, tuple) or not value or not all(isinstance(word, str) for word in value):
            _refuse(self, "command", value, "a program and its arguments, each a text of its own")
        if not value[0]:
            _refuse(self, "command", value, "the name of a program first")

    @function.validator
    def _can_be_called(self, attribute: Attribute[Any], value: object) -> None:
        if value is not None and not callable(value):
            _refuse(self, "function", value, "a function, or None")

    @args.validator
    def _are_of_the_function(self, attribute: Attribute[Any], value: object) -> None:
        if not isinstance(value, tuple):
            _refuse(self, "args", value, "a tuple")
        if value and self.function is None:
            _refuse(self, "args", value, "empty, because no function is given. A command has its arguments in itself")

    @warm.validator
    def _can_be_warm(self, attribute: Attribute[Any], value: Any) -> None:
        names = value if isinstance(value, tuple) else ()
        is_named = all(isinstance(name, str) and all(map(str.isidentifier, name.split("."))) for name in names)
        if not isinstance(value, bool | tuple) or not is_named:
            _refuse(self, "warm", value, "True, False or names of modules")
        if value and self.function is not None and self.start_method != "forkserver":
            _refuse(self, "warm", value, "False for a function, unless start_method is 'forkserver'")
        if value and self.function is None:
            from reknit.adapters.keeper.zygote.commandline import NotWarm, parts_of  # needed by few jobs

            try:
                parts_of(self.command)
            except NotWarm as error:
                _refuse(self, "warm", value, f"False: {error}")

    @stdin.validator
    def _is_bytes(self, attribute: Attribute[Any], value: object) -> None:
        if value is not None and not isinstance(value, bytes):
            _refuse(self, "stdin", value, "bytes, or None")

    @meeting.validator
    def _is_there_for_several(self, attribute: Attribute[Any], value: object) -> None:
        if value is not None and not isinstance(value, Meeting):
            _refuse(self, "meeting", value, "a Meeting, or None")
        if value is None and self.terms.max_nodes > 1:
            _refuse(self, "meeting", value, f"given for a job of up to {self.terms.max_nodes} nodes")
        if value is not None and self.master_port:
            _refuse(self, "master_port", self.master_port, "0 with a meeting: each round has a port of its own")

    @health.validator
    def _is_a_place(self, attribute: Attribute[Any], value: object) -> None:
        if value is not None and not isinstance(value, HealthCheck):
            _refuse(self, "health", value, "a HealthCheck, or None")

    @hang_after_s.validator
    @start_timeout_s.validator
    def _is_some_time(self, attribute: Attribute[Any], value: object) -> None:
        if value is not None:
            _seconds(self, attribute, value)
            if not value:
                _refuse(self, attribute.name, value, "more than 0, or None")

    @rank_hint.validator
    def _is_a_rank(self, attribute: Attribute[Any], value: object) -> None:
        if value is not None and (type(value) is not int or value < 0):
            _refuse(self, "rank_hint", value, "a whole number of at least 0, or None")

    @timer_file.validator
    def _is_a_path(self, attribute: Attribute[Any], value: object) -> None:
        if value is not None and (not isinstance(value, str) or "\0" in value):
            _refuse(self, "timer_file", value, "a path, an empty text, or None")

    @signals.validator
    def _can_be_handled(self, attribute: Attribute[Any], value: Any) -> None:
        handled = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        if not isinstance(value, tuple) or not all(isinstance(number, int) and number in handled for number in value):
            _refuse(self, "signals", value, "numbers of signals that a process can handle")

    @streams.validator
    def _name_workers_that_exist(self, attribute: Attribute[Any], value: StreamSettings) -> None:
        for name, masks in (("redirects", value.redirects), ("tee", value.tee)):
            used = {masks} if isinstance(masks, int) else set(masks.values())
            if not used <= {0, 1, 2, 3}:
                _refuse(value, name, masks, "masks from 0 to 3")
        if value.output not in ("relay", "inherit"):
            _refuse(value, "output", value.output, "relay or inherit")
        if any(rank < 0 for rank in value.shown):
            _refuse(value, "shown", sorted(value.shown), "local ranks, from 0")
