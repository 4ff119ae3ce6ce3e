"""What both wirings share: what an agent gets from its program, and the port of its workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

from attrs import Factory, evolve, frozen

from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.adapters.keeper.client.start import Start, by_exec
from reknit.adapters.keeper.common.run_folder import working_folder
from reknit.adapters.keeper.protocol.wire import Configure, variables
from reknit.adapters.runtime.loop import Observer, Ports
from reknit.adapters.runtime.ports import Clock, Requests, Workers
from reknit.app.settings import Settings
from reknit.core.agent.agent import Spec
from reknit.core.agent.reasons import RunEnd
from reknit.core.job.entries import NodeId

SECRETS = ("PET_RDZV_SECRET", "REKNIT_RDZV_SECRET", "REKNIT_RDZV_PASSWORD")
"""Variables that workers do not get."""


class Prevented(Exception):
    """This agent cannot begin. The text is one line for the operator. `why`: the reason as a value."""

    __module__ = "reknit"  # as people import it, and as a traceback shows it

    def __init__(self, line: str, why: RunEnd) -> None:
        super().__init__(line)
        self.why = why


OpenWorkers = Callable[[str, str], Workers]
"""Makes a port `Workers` from the agent's nonce and the mark of its workers. The mark is a text in the environment of
the workers (`orphans.MARK`), by which they are found if nobody ends them. The wiring closes the port."""


@frozen
class Surroundings:
    """What an agent gets from the program that runs it, besides its settings."""

    clock: Clock
    requests: Requests
    environ: Mapping[str, str]
    """The variables with which the workers' environment begins."""
    say: Callable[[str], None]
    """Shows a line of reknit's own while there is no keeper that can. Never waits."""
    has_said: Callable[[float], bool] = lambda wait_s: True
    """Whether every line that `say` was given is written. Until then no later line goes to the keeper. Waits for that,
    for so many seconds at most."""
    console: tuple[int, int] = (1, 2)
    """The descriptors of this process that become stdout and stderr of its keepers."""
    start: Start | None = None
    """Starts the first keeper. None: it is started by exec on this host."""
    restart: Start | None = None
    """Starts every later keeper. None: it is started by exec on this host."""
    on_keeper_death: Callable[[], None] = lambda: None
    """Called when a keeper has died, before another one is started."""
    workers: OpenWorkers | None = None
    """Makes the port of the workers. None: a keeper holds the workers."""
    children: set[int] = Factory(set)
    """The pids of this agent's child processes, besides its keeper. The wiring adds the server of the store."""


class Wired:
    """The ports of one agent, and the function that closes them."""

    def __init__(self, spec: Spec, ports: Ports, close: Callable[[], None], notes: Sequence[str] = ()) -> None:
        self.spec = spec
        self.ports = ports
        self.close = close
        """Ends workers, keeper, journal and store, in this order. Bounded in time. May be repeated."""
        self.notes = notes
        """Lines for the operator."""
        self.observers: list[Observer] = []
        """What the wiring itself wants to be told of every step."""
        self.trace = ""
        """The folder with the trace of this agent. Empty: there is none, or it is not made yet."""

    @property
    def keeper(self) -> KeeperClient:
        """The keeper of this agent's workers. There is none if `Surroundings.workers` has made the port."""
        if not isinstance(self.ports.workers, KeeperClient):
            raise AssertionError("the program has brought a port of its own for the workers")
        return self.ports.workers


def end_left() -> list[str]:
    """End what killed agents have left on this host. Returns lines for the operator."""
    from reknit.adapters.host import left as hostleft

    return left_lines(*hostleft.end_left())


def left_lines(ended: int, stuck: Sequence[int]) -> list[str]:
    """Lines for the operator. The arguments are what `hostleft.end_left` returns."""
    notes = [ended_text(ended)] if ended else []
    if stuck:
        notes.append(f"processes {', '.join(map(str, stuck))}, which an earlier agent left here, survive SIGKILL")
    return notes


def ended_text(ended: int) -> str:
    """A line for the operator: so many processes of an earlier agent were ended."""
    return f"ended {ended} process{'es' * (ended != 1)} that an earlier agent had left behind"


def spec_of(settings: Settings, world: Surroundings, node_id: str, address: str) -> Spec:
    """The part of the settings that the core needs. What depends on the journal is not in them."""
    spec = Spec(
        node_id=NodeId(node_id),
        address=address,
        terms=settings.terms,
        role=settings.role,
        local_world_size=settings.local_world_size,
        rank_hint=settings.rank_hint,
        grace_s=settings.grace_s,
        store_timeout_s=settings.store_timeout_s,
    )
    return spec if world.workers is None else evolve(spec, stop_s=inf)  # hooks may take longer than a keeper


def open_workers(settings: Settings, world: Surroundings, nonce: str, *, mark: str) -> Workers:
    """Make the port of this agent's workers. `mark`: a text in the environment of the workers, by which they are found
    if agent and keeper were killed. Raises `CannotStart`, and `FunctionError` if the function of the settings cannot be
    a worker."""
    if world.workers is not None:
        return world.workers(nonce, mark)
    function = None
    if settings.function is not None:
        from reknit.adapters.keeper.client.function_workers import Function, verify

        function = Function(settings.function, settings.args)
        verify(function, settings.start_method)
    by_exec_here = partial(by_exec, world.environ, world.console)
    configure = Configure(
        argv=settings.command,
        run_id=settings.run_id,
        env=variables(settings.env),
        withheld=SECRETS,
        cwd=working_folder(),
        stdin=None if settings.stdin is None else settings.stdin.decode("latin-1"),
        terminal=settings.terminal,
        streams=settings.streams,
        log_base=settings.log_dir,
        master_port=settings.master_port,
        virtual_local_rank=settings.virtual_local_rank,
        timer_file=settings.timer_file,
        hang_after_s=settings.hang_after_s,
        start_timeout_s=settings.start_timeout_s,
        mark=mark,
    )
    return KeeperClient(
        world.clock,
        configure,
        nonce,
        world.start or by_exec_here,
        restart=world.restart or by_exec_here,
        say=world.say,
        has_said=world.has_said,
        on_death=world.on_keeper_death,
        function=function,
        start_method=settings.start_method,
        console=world.console,
    )
