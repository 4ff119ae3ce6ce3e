"""`reknit run --dry-run`: what would be started, and where each option comes from. Nothing is started or written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from reknit.adapters.host.orphans import MARK
from reknit.adapters.keeper.common.environment import SOCKET, TIMER_FILE, arguments, given_by
from reknit.adapters.keeper.watchdog import flight_recorder, progress
from reknit.app.settings import Settings
from reknit.core.job.entries import Joined, Node, NodeId
from reknit.core.job.ranks import Members, assign

from .arguments import Parsed
from .options import OPTIONS, Option
from .parsing import Asked

_HIDDEN = "(not shown)"
_PASSWORD = re.compile("((?:^|,)password=)[^,]+")
_WHEN_MET = "(known when the nodes have met)"
_FREE = "(a free port of each round)"
_RANDOM = "(a random name)"
_BY_RANK = ("LOCAL_RANK", "RANK", "ROLE_RANK", "CUDA_VISIBLE_DEVICES")
_BY_MEETING = ("RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR")


def plan(parsed: Parsed, wanted: Asked, environ: Mapping[str, str]) -> Iterator[str]:
    """The lines of the plan."""
    settings = wanted.settings
    for notice in wanted.notices:
        yield f"note: {notice}"
    yield from _job(settings, is_named=bool(parsed["rdzv-id"]))
    yield ""
    yield from _workers(settings, environ, is_named=bool(parsed["rdzv-id"]))
    yield ""
    yield from _options(parsed, is_alone=settings.meeting is None)


def _options(parsed: Parsed, *, is_alone: bool) -> Iterator[str]:
    """What the user has set, and where. With -v the defaults as well, without those that mean nothing for this job."""
    options = [o for o in OPTIONS if not o.no_effect and not o.name.startswith(("help", "dry-run"))]
    others = [o for o in options if o.name not in parsed.given]
    unused = [o for o in others if is_alone and (o.only_for_many or o.name == "master-port")]
    defaults = [o for o in others if o not in unused]
    given = [_line(parsed, o) for o in options if o.name in parsed.given]
    yield from ("options that are set, and where:", *given) if given else ("no option is set",)
    if not parsed["verbose"]:
        yield f"{len(defaults)} defaults: -v before the script shows them"
        return
    yield from ("defaults:", *(_line(parsed, o) for o in defaults))
    if unused:
        yield f"not given, and without effect for one node: {', '.join(f'--{o.name}' for o in unused)}"


def _job(settings: Settings, *, is_named: bool) -> Iterator[str]:
    terms, meeting = settings.terms, settings.meeting
    least, most = terms.min_nodes, terms.max_nodes
    name = settings.run_id if is_named else _RANDOM if meeting is None else f"{settings.run_id} (no --rdzv-id is given)"
    yield f"name of the job: {name}"
    yield f"nodes: {least if least == most else f'{least} to {most}'}"
    yield f"workers of this node: {settings.local_world_size}"
    yield f"store: {'none, because the job has one node' if meeting is None else meeting.shown}"
    policy = terms.restarts
    renewal = f", given back by a round that has run for {policy.steady_s:g} s" if policy.renews else ""
    yield f"restarts: {policy.max_restarts}{renewal}"
    yield f"files: {settings.log_dir or '(the folder for temporary files)'}"


def _workers(settings: Settings, environ: Mapping[str, str], *, is_named: bool) -> Iterator[str]:
    """The command and the variables of each worker. The other variables are those of this process."""
    base = {**environ, **dict(settings.env)}
    first, *others = [_variables(settings, base, local_rank) for local_rank in range(settings.local_world_size)]
    yield "variables of every worker, beside those of this process:"
    unknown = {} if is_named or settings.meeting is not None else {"TORCHELASTIC_RUN_ID": _RANDOM}
    for name, value in {**dict(settings.env), **first, **unknown, **_of_the_keeper(settings, base)}.items():
        if name not in _BY_RANK:
            yield f"  {name}={value}"
    for local_rank, own in enumerate((first, *others)):
        told = " ".join(f"{name}={own[name]}" for name in _BY_RANK if name in own)
        yield f"worker {local_rank}: {told}"
        yield f"  {shlex.join(arguments(settings.command, local_rank))}"


def _variables(settings: Settings, base: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The variables of a worker of the first round, with remarks in the place of values that are not known yet."""
    node = Node(NodeId("this"))
    joined = Joined(node, "", 0, "127.0.0.1", settings.master_port, settings.role, settings.local_world_size)
    assignment = assign(Members((joined,)), node, max_restarts=settings.terms.restarts.max_restarts)
    virtual = settings.virtual_local_rank
    ranks = assignment.workers[local_rank]
    found = given_by(base, assignment, ranks, run_id=settings.run_id, virtual_local_rank=virtual)
    if not settings.master_port:
        found["MASTER_PORT"] = _FREE
    if settings.meeting is not None:
        found |= dict.fromkeys((*_BY_MEETING, "MASTER_PORT"), _WHEN_MET)
    return found


def _of_the_keeper(settings: Settings, base: Mapping[str, str]) -> dict[str, str]:
    """The variables whose values the keeper makes, with remarks in the place of the values."""
    found = {
        "TORCHELASTIC_ERROR_FILE": "(a file for each worker)",
        progress.VARIABLE: "(a place in shared memory for each worker)",
        MARK: "(a mark of this node's agent)",
    }
    watches_hangs = settings.hang_after_s is not None or settings.start_timeout_s is not None
    if (watches_hangs or settings.timer_file is not None) and "PYTHONFAULTHANDLER" not in base:
        found["PYTHONFAULTHANDLER"] = "1"
    if watches_hangs and flight_recorder.is_on(base) and SOCKET not in base:
        found[SOCKET] = "(a socket for each worker)"
    if settings.timer_file is not None:
        found[TIMER_FILE] = settings.timer_file or "(a pipe of this node)"
    return found


def _value(parsed: Parsed, name: str) -> str:
    """`=3`. Empty for a flag that is not given, and for an option without a value."""
    value = parsed[name]
    if value is True or value is False:
        return ""
    text = _PASSWORD.sub(r"\1" + _HIDDEN, parsed.texts[name])
    return f"={_HIDDEN if name == 'rdzv-secret' and text else text}"


def _line(parsed: Parsed, option: Option) -> str:
    name, origin = option.name, parsed.given.get(option.name)
    if origin is None:
        return f"  --{name}{_value(parsed, name)}" if option.default else f"  --{name}: not given"
    return f"  --{name}{_value(parsed, name)}: {'command line' if origin.startswith('--') else f'variable {origin}'}"
