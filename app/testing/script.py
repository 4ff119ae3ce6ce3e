"""A history as data: how the cluster is set up, and what happens to it. A failure prints the history as text.

    setup nodes=3 min=2 max=3 budget=1 formed=3
    crash a
    wait 5

1. Every move is always allowed. A move that makes no sense now does nothing. So every history can be played.
2. A script decides everything. Delays and orders, which it does not name, depend on its `seed`. With 0 they are the
   shortest and plainest.
"""

from __future__ import annotations

from typing import Any

from attrs import Attribute, evolve, field, fields, frozen

from reknit.core.job.entries import Admission, NodeId, RestartPolicy, Terms

NAMES = "abcdefgh"
WAITS = (0.1, 0.4, 1.0, 2.0, 4.5, 7.0, 12.0, 25.0)
STEADY_S = 4.0
TROUBLES = ("lose", "lag", "double", "partial", "skip", "late", "outlive")
"""What may go wrong. In this order: an append is lost, lands late, or lands twice; a read brings only a part, or skips
to a fold; a wake-up comes late; what a killed agent had to say lands long after its death."""


@frozen
class Setup:
    """A cluster before anything happens. Times that matter are fixed: beats 1, silence 4, last call 5, give up 20.

    A round is steady after `STEADY_S`.
    """

    nodes: int = 3
    """Hosts that exist."""
    formed: int = 3
    """Hosts whose agents are started, and settled, before the first move."""
    min: int = 2
    max: int = 3
    budget: int = 1
    unspent: int = 1000
    renews: bool = False
    """A round that runs for long gives back the restarts spent."""
    admission: Admission = Admission.SOON
    fence: bool = False
    host: bool = False
    """The journal ends with the first agent."""
    echo: bool = True
    """Workers crash when a peer of theirs has died."""
    remembers: int = 1024
    """How many nodes that are gone the job remembers."""
    backoff: float = 0.0
    sizes: tuple[int, ...] = (1,)
    """Local world sizes, and below roles and rank hints, of the hosts in turn."""
    graces: tuple[int, ...] = (7,)
    """Seconds between the signal that stops workers and SIGKILL, of the hosts in turn."""
    rates: tuple[int, ...] = (100,)
    """How fast the clocks of the hosts run, in turn. 130: 1.3 seconds in one."""
    changing: bool = False
    """An agent that is started again has the next host's size, role and grace."""
    text: bool = False
    """What agents read and say goes through the codec, and folds go through the snapshot."""
    roles: str = "t"
    hints: tuple[int, ...] = ()
    weather: frozenset[str] = frozenset()
    """The troubles that exist."""
    seed: int = 0

    @property
    def terms(self) -> Terms:
        return Terms(
            min_nodes=self.min,
            max_nodes=max(self.min, self.max),  # a script that is being made shorter may lose either
            restarts=RestartPolicy(
                self.budget,
                max_unspent=self.unspent,
                renews=self.renews,
                steady_s=STEADY_S,
                backoff_s=self.backoff,
                backoff_max_s=4.0,
            ),
            admission=self.admission,
            join_timeout_s=20.0,
            last_call_s=5.0,
            settle_s=1.0,
            beat_s=1.0,
            silence_s=4.0,
            fence_s=2.0 if self.fence else None,
        )


@frozen
class Move:
    """One thing that happens: its name, the host that it happens to, and a number for those that need one."""

    name: str
    who: int = 0
    number: float = 0.0

    def __str__(self) -> str:
        if self.name == "wait":
            return f"wait {self.number:g}"
        if self.name in GLOBAL_MOVES:
            return self.name
        return f"{self.name} {NAMES[self.who]}"


GLOBAL_MOVES = ("wait", "settle", "outage", "restore", "wipe", "stall", "abort", "finish")
NODE_MOVES = (
    "start",  # an agent on a host that has none: a newcomer, or one that comes back
    "crash",  # SIGKILL of the agent; its workers die within a moment
    "fail",  # a worker raises
    "freeze",  # all workers of its round hang
    "succeed",  # all workers of the node exit with 0
    "part",  # one worker of the node exits with 0
    "suspend",
    "resume",
    "cut",  # the node reaches the store no more
    "mend",
    "full",  # it reads, and can say nothing
    "empty",
    "refuse",  # its link finds another journal than it knew
    "stop",  # somebody asks the node to leave
    "interrupt",  # with Ctrl-C
    "halt",  # and at once
    "twin",  # another host with the same id
    "other",  # an agent with other terms, on a host that has none
    "slow",  # its workers take all of their grace from now on, or no more
    "stuck",  # its workers survive SIGKILL from now on, or no more
    "stale",  # its beats are swallowed and its reads of the counters are old from now on, or no more
    "deaf",  # it hears no answers of the store from now on, or does again; and so below
    "blind",  # its reads hang
    "mute",  # its entries vanish
    "hang",  # its keeper stops no workers
    "lose",  # its next append
    "lag",
    "again",  # its next append lands twice, the second time late
)


@frozen
class Script:
    """A history: the cluster, and what happens to it. `str` makes the text that `parse` reads."""

    setup: Setup = field(factory=Setup)
    moves: tuple[Move, ...] = ()

    def __str__(self) -> str:
        return "\n".join([_setup_line(self.setup), *map(str, self.moves)])


def parse(text: str) -> Script:
    """The inverse of `str`. Ends at the first empty line: the story that follows is for the reader.

    `ValueError`: no setup, move or host has this name.
    """
    lines = [line.strip() for line in text.split("\n\n", 1)[0].splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    setup = Setup()
    for pair in lines[0].split()[1:]:
        name, _, value = pair.partition("=")
        if name not in {each.name for each in _setup_fields()}:
            raise ValueError(f"nothing of a setup is named {name!r}")
        made: Any = _parsed(name, value)
        setup = evolve(setup, **{name: made})
    return Script(setup, tuple(_move(line) for line in lines[1:]))


def node_id(index: int) -> NodeId:
    return NodeId(NAMES[index])


def _move(line: str) -> Move:
    name, *rest = line.split()
    if name == "wait":
        return Move(name, number=float(rest[0]))
    if name not in (*NODE_MOVES, *GLOBAL_MOVES):
        raise ValueError(f"no move is named {name!r}")
    if rest and rest[0] not in NAMES:
        raise ValueError(f"no host is named {rest[0]!r}")
    return Move(name, NAMES.index(rest[0]) if rest else 0)


def _setup_line(setup: Setup) -> str:
    shown = [
        f"{a.name}={_shown(getattr(setup, a.name))}" for a in _setup_fields() if a.default != getattr(setup, a.name)
    ]
    return " ".join(["setup", *shown])


def _setup_fields() -> tuple[Attribute[Any], ...]:
    found: Any = fields(Setup)
    return tuple(found)


def _shown(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case Admission():
            return value.value
        case tuple() | frozenset():
            return ",".join(map(str, sorted(value) if isinstance(value, frozenset) else value))
        case _:
            return str(value)


def _parsed(name: str, text: str) -> object:
    match getattr(Setup(), name):
        case bool():
            return text == "yes"
        case int():
            return int(text)
        case float():
            return float(text)
        case Admission():
            return Admission(text)
        case tuple():
            return tuple(int(x) for x in text.split(",") if x)
        case frozenset():
            return frozenset(x for x in text.split(",") if x)
        case _:
            return text
