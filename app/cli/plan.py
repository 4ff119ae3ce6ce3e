"""`reknit run --dry-run`: what would be started, and where each option comes from. Nothing is started or written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from reknit.adapters.keeper.common.environment import arguments, given_by
from reknit.app.settings import Settings
from reknit.core.job.entries import Joined, Node, NodeId
from reknit.core.job.ranks import Members, assign

from .arguments import Parsed
from .options import OPTIONS
from .parsing import Asked

_HIDDEN = "(not shown)"
_PASSWORD = re.compile("((?:^|,)password=)[^,]+")
_WHEN_MET = "(known when the nodes have met)"
_FREE = "(a free port of each round)"
_BY_RANK = ("LOCAL_RANK", "RANK", "ROLE_RANK", "CUDA_VISIBLE_DEVICES")
_BY_MEETING = ("RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR")


def plan(parsed: Parsed, wanted: Asked, environ: Mapping[str, str]) -> Iterator[str]:
    """The lines of the plan."""
    settings = wanted.settings
    for notice in wanted.notices:
        yield f"note: {notice}"
    yield from _job(settings)
    yield ""
    yield from _workers(settings, environ)
    yield ""
    yield "options, and where each comes from:"
    for option in OPTIONS:
        if not option.no_effect and not option.name.startswith(("help", "dry-run")):
            yield f"  --{option.name}{_value(parsed, option.name)}: {_origin(parsed, option.name)}"


def _job(settings: Settings) -> Iterator[str]:
    terms, meeting = settings.terms, settings.meeting
    least, most = terms.min_nodes, terms.max_nodes
    yield f"job: {settings.run_id or '(a random name)'}"
    yield f"nodes: {least if least == most else f'{least} to {most}'}"
    yield f"workers of this node: {settings.local_world_size}"
    yield f"store: {'none, because the job has one node' if meeting is None else meeting.place}"
    yield f"restarts: {terms.restarts.max_restarts}"
    yield f"files: {settings.log_dir or '(the folder for temporary files)'}"


def _workers(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    """The command and the variables of each worker. The other variables are those of this process."""
    base = {**environ, **dict(settings.env)}
    first, *others = [_variables(settings, base, local_rank) for local_rank in range(settings.local_world_size)]
    yield "variables of every worker, besides those of this process:"
    for name, value in {**dict(settings.env), **first}.items():
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


def _value(parsed: Parsed, name: str) -> str:
    """`=3`. Empty for a flag that is not given, and for an option without a value."""
    value = parsed[name]
    if value is True or value is False:
        return ""
    text = _PASSWORD.sub(r"\1" + _HIDDEN, parsed.texts[name])
    return f"={_HIDDEN if name == 'rdzv-secret' and text else text}"


def _origin(parsed: Parsed, name: str) -> str:
    origin = parsed.given.get(name)
    if origin is None:
        return "not given" if parsed[name] is False else "default"
    return "command line" if origin.startswith("--") else f"variable {origin}"
