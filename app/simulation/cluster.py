"""What `reknit simulate` is asked: a cluster, what fails in it, a training job, and reknit's settings."""

from __future__ import annotations

import os.path
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from math import isnan
from typing import Any

from attrs import Attribute, evolve, field, fields, frozen

from reknit.core.job.entries import RestartPolicy, Terms
from reknit.core.job.validators import positive_seconds, seconds, whole


class BadCluster(ValueError):
    """Something that cannot be simulated was asked for. The text is one line, and says what is accepted."""


def _at_least_0(_: object, attribute: Attribute[float], value: float) -> None:
    if not (value >= 0.0 and value != float("inf")):
        raise ValueError(f"{attribute.name} is {value!r}; a number of at least 0 is expected")


def _above_0(_: object, attribute: Attribute[float], value: float) -> None:
    if not (0.0 < value < float("inf")):
        raise ValueError(f"{attribute.name} is {value!r}; a number above 0 is expected")


LONGEST_S = 1e9
"""Seconds: thirty years."""


@frozen
class SimulatedCluster:
    """A cluster and a job on it. All times are in seconds, unless the name says something else. A value out of range
    raises `ValueError`.

    Where a pair `…_s` and `…_p99_s` stands, the time is drawn from a log-normal distribution with this median and this
    99th percentile.
    """

    nodes: int = field(default=16, validator=whole(1))
    """Nodes of a round, at most (`--nnodes=MIN:MAX`)."""
    min_nodes: int = field(default=0, validator=whole(0))
    """Nodes without which no round starts. 0: as many as `nodes`."""
    spares: int = field(default=0, validator=whole(0))
    """Further nodes, which wait until one is needed."""
    nproc_per_node: int = field(default=8, validator=whole(1))
    days: float = field(default=30.0, validator=_above_0)
    """How long the job runs."""

    failures: float = field(default=5.0, validator=_at_least_0)
    """Failures for each 1,000 days of a node."""
    shape: float = field(default=1.0, validator=_above_0)
    """Of the Weibull distribution of the times between the failures of one node. 1: exponential. Below 1: failures
    come in clusters."""
    worker: float = field(default=0.5, validator=_at_least_0)
    """The part of the failures in which a worker ends with an error, and the node is fine."""
    node: float = field(default=0.35, validator=_at_least_0)
    """The part in which the node is gone without a word, until it is repaired."""
    hang: float = field(default=0.1, validator=_at_least_0)
    """The part in which a worker makes no progress any more."""
    leave: float = field(default=0.05, validator=_at_least_0)
    """The part in which the node is told to leave, as before maintenance, and comes back when it is repaired."""
    network: float = field(default=0.0, validator=_at_least_0)
    """The part in which the node cannot reach the store for a while (`cut_s`)."""
    repair_s: float = field(default=3600.0, validator=seconds)
    repair_p99_s: float = field(default=86400.0, validator=seconds)
    cut_s: float = field(default=60.0, validator=seconds)
    rack: int = field(default=0, validator=whole(0))
    """Nodes of a rack. 0: there are no racks."""
    rack_failures: float = field(default=0.0, validator=_at_least_0)
    """For each 1,000 days of a rack: all its nodes are gone, until each is repaired."""
    store_outages: float = field(default=0.0, validator=_at_least_0)
    """For each 30 days: the store answers nobody for a while (`store_outage_s`)."""
    store_outage_s: float = field(default=60.0, validator=seconds)
    trace: str = ""
    """A file with lines `time,remove,node` and `time,add,node`: seconds from the start, and the number of the node from
    0, also as `n00003`. It takes the place of all drawn failures. A node that is added first is not there before."""

    step_s: float = field(default=0.0, validator=seconds)
    """Seconds of a step of training, after which a worker has made progress. 0: too short to matter."""
    checkpoint_s: float = field(default=1800.0, validator=positive_seconds)
    """Seconds of training between two checkpoints. A checkpoint comes after a whole step, so they may be more."""
    checkpoint_cost_s: float = field(default=5.0, validator=seconds)
    """Seconds for which training stands still for a checkpoint."""
    start_s: float = field(default=30.0, validator=seconds)
    """From the start of the workers until all of them train: imports, loading the checkpoint, the first collective."""
    start_p99_s: float = field(default=90.0, validator=seconds)
    warm_start_s: float = field(default=0.0, validator=seconds)
    """The same on a warm node (`--warm`). A node is warm when it has been up for `start_s`. That may be a spare. 0: no
    node gets warm."""
    warm_start_p99_s: float = field(default=0.0, validator=seconds)
    stop_s: float = field(default=2.0, validator=seconds)
    stop_p99_s: float = field(default=15.0, validator=seconds)

    max_restarts: int = field(default=100_000, validator=whole(0))
    renews: bool = False
    """A round that has run for `steady_s` gives the restarts back (`--restarts-renew`)."""
    steady_s: float = field(default=60.0, validator=positive_seconds)
    hang_after_s: float = field(default=600.0, validator=positive_seconds)
    """After so long without progress a worker counts as hung (`--hang-after`)."""
    join_timeout_s: float = field(default=86400.0, validator=seconds)
    last_call_s: float = field(default=30.0, validator=seconds)
    settle_s: float = field(default=5.0, validator=seconds)
    heartbeat_s: float = field(default=5.0, validator=positive_seconds)
    silence_s: float = field(default=15.0, validator=positive_seconds)
    """A node that has not beat for so long is lost."""
    grace_s: float = field(default=30.0, validator=seconds)
    store_timeout_s: float = field(default=300.0, validator=seconds)
    """An agent ends that cannot reach the store for so long, and with it its workers (`--store-timeout`)."""

    append_ms: float = field(default=10.0, validator=_at_least_0)
    """From a node to the store, or back."""
    appends_per_s: float = field(default=5000.0, validator=_above_0)
    """Entries that the store takes in a second."""

    def __attrs_post_init__(self) -> None:
        if self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes is {self.min_nodes}, and nodes is {self.nodes}; min_nodes must not be more")
        if not self.trace and self.failures and not sum(self.mix.values()):
            raise ValueError("all of worker, node, hang, leave and network are 0; one of them must be above 0")
        for name, most in MOST.items():
            if not getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)!r}; at most {most:.15g} is expected")
        for name in (each.name for each in fields(type(self)) if each.name.endswith("_p99_s")):
            median = name.replace("_p99_s", "_s")
            if 0.0 < getattr(self, name) < getattr(self, median):
                values = f"{name} is {getattr(self, name):g}, and {median} is {getattr(self, median):g}"
                raise ValueError(f"{values}; {name} must not be less. 0: it is always {median}")
        if self.shape < 0.1:
            raise ValueError(f"shape is {self.shape!r}; a number of at least 0.1 is expected")
        if 0.0 < self.step_s < 0.001:
            raise ValueError(f"step_s is {self.step_s!r}; 0 or at least 0.001 is expected")
        self._check_together()
        self.terms  # noqa: B018  # the terms have rules of their own

    def _check_together(self) -> None:
        """Values that contradict each other."""
        if self.step_s and self.step_s + self.checkpoint_cost_s >= self.hang_after_s:
            both = f"step_s is {self.step_s:g}, and checkpoint_cost_s is {self.checkpoint_cost_s:g}"
            most = f"together they must be less than hang_after_s, which is {self.hang_after_s:g}"
            raise ValueError(f"{both}; {most}, or every worker would count as hung")
        if self.nodes + self.spares > MOST_NODES:
            raise ValueError(
                f"nodes and spares are together {self.nodes + self.spares}; at most {MOST_NODES} is expected"
            )
        if self.rack_failures and not self.rack:
            raise ValueError("rack_failures is given, and rack is 0; rack says how many nodes stand in a rack")
        if self.warm_start_s > self.start_s:
            both = f"warm_start_s is {self.warm_start_s:g}, and start_s is {self.start_s:g}"
            raise ValueError(f"{both}; warm_start_s must not be more")
        if self.silence_s <= self.heartbeat_s:
            both = f"silence_s is {self.silence_s:g}, and heartbeat_s is {self.heartbeat_s:g}"
            raise ValueError(f"{both}; silence_s must be more")

    @property
    def mix(self) -> Mapping[str, float]:
        """The kinds of failures and their weights."""
        return {kind: getattr(self, kind) for kind in ("worker", "node", "hang", "leave", "network")}

    @property
    def terms(self) -> Terms:
        """What the agents of the job agree on."""
        policy = RestartPolicy(self.max_restarts, 1_000_000, renews=self.renews, steady_s=self.steady_s)
        return Terms(
            self.min_nodes or self.nodes,
            self.nodes,
            policy,
            join_timeout_s=self.join_timeout_s,
            last_call_s=self.last_call_s,
            settle_s=self.settle_s,
            beat_s=round(self.heartbeat_s * 2**20) / 2**20,  # on the grid of the fleet's times
            silence_s=self.silence_s,
        )


SCENARIOS: Mapping[str, Mapping[str, Any]] = {
    # Grattafiori et al., "The Llama 3 Herd of Models" (2024): 419 unexpected interruptions
    # in 54 days on 16,384 GPUs, of which about 78 % were hardware; 3.8 for each 1,000 node-days.
    "llama3": {"nodes": 2048, "spares": 32, "days": 54.0, "failures": 3.79, "worker": 0.45, "node": 0.45, "hang": 0.1},
    # Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (2024): 6.50 failures
    # for each 1,000 node-days of the cluster RSC-1.
    "rsc1": {"nodes": 128, "spares": 8, "days": 30.0, "failures": 6.5, "checkpoint_s": 3600.0},
    # Wan et al., "Robust LLM Training Infrastructure at ByteDance" (2025): 9,600 GPUs for three months, hot spares, and
    # a checkpoint at nearly every step.
    "byterobust": {
        "nodes": 1200,
        "spares": 12,
        "days": 90.0,
        "failures": 3.5,
        "checkpoint_s": 60.0,
        "checkpoint_cost_s": 0.3,
        "hang_after_s": 300.0,
    },
}
"""Published jobs. docs/simulation.md says what each leaves out."""


def read_value(key: str, text: str, where: str) -> object:
    """A value that a user has written as text. Raises `BadCluster`."""
    kind = _kind(key, where)
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise BadCluster(f"{where}: {key} is {text or 'empty'}; {_WORDS[kind]} is expected") from None


def of_file(cluster: SimulatedCluster, path: str) -> SimulatedCluster:
    """The cluster with the values of a TOML file. Raises `BadCluster`."""
    try:
        with open(path, "rb") as file:
            text = file.read().decode()
        values = tomllib.loads(text)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadCluster(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    lines = {line.split("=")[0].strip(): number for number, line in enumerate(text.splitlines(), 1)}
    for key, value in values.items():
        _check(key, value, f"{path}, line {lines.get(key, 1)}")
    if isinstance(values.get("trace"), str):  # beside the file
        values["trace"] = os.path.join(os.path.dirname(path), values["trace"])
    return with_values(cluster, values, path)


def with_values(cluster: SimulatedCluster, values: Mapping[str, object], where: str) -> SimulatedCluster:
    """The cluster with these values, each of which is checked. A 99th percentile that is not given changes with its
    median. `where`: their place, for the message. Raises `BadCluster`."""
    for key, value in values.items():
        _check(key, value, where)
    try:
        made: dict[str, Any] = {key: _kind(key, where)(value) for key, value in values.items()}
        made |= _percentiles(cluster, made)
        return evolve(cluster, **made)
    except (ValueError, OverflowError) as error:
        raise BadCluster(f"{where}: {str(error).removeprefix('SimulatedCluster.')}") from None


def _percentiles(cluster: SimulatedCluster, values: Mapping[str, Any]) -> dict[str, float]:
    """The 99th percentiles of those times of which only the median is given."""
    found = {}
    for key, median in values.items():
        name = key.removesuffix("_s") + "_p99_s"
        if name not in values and hasattr(cluster, name) and (before := getattr(cluster, key)):
            found[name] = getattr(cluster, name) * median / before
    return found


def _check(key: str, value: object, where: str) -> None:
    kind = _kind(key, where)
    if type(value) is not kind and not (kind is float and type(value) is int):
        several = "; several are for --compare or --sweep" if isinstance(value, list | tuple) else ""
        raise BadCluster(f"{where}: {key} is {value!r}; {_WORDS[kind]} is expected{several}")


MOST: Mapping[str, float] = {
    **{each.name: LONGEST_S for each in fields(SimulatedCluster) if each.name.endswith("_s")},
    **dict.fromkeys(("worker", "node", "hang", "leave", "network"), 1.0),
    "nproc_per_node": 1000.0,
    "days": 10_000.0,
    "failures": 1e6,
    "rack_failures": 1e6,
    "store_outages": 1e6,
    "shape": 100.0,
    "append_ms": 1e6,
}
"""The greatest values. Beyond them a typing mistake is likely, or a run would never end."""
MOST_NODES = 12_000
"""Each node reads what all nodes have said. A store cannot hand that out in time to many more nodes."""

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_KINDS = {"int": int, "float": float, "bool": bool, "str": str}


def _kind(key: str, where: str) -> type:
    known = {f.name: f for f in fields(SimulatedCluster)}
    if key not in known:
        near = get_close_matches(key, known, 2, 0.75)
        advice = f"did you mean {' or '.join(near)}?" if near else f"the keys are: {', '.join(known)}"
        raise BadCluster(f"{where}: there is no key {key}; {advice}")
    return _KINDS[str(known[key].type)]


def read_trace(path: str, nodes: int) -> list[tuple[float, bool, int]]:
    """The lines of a trace: the time, whether the node comes, and its number. Raises `BadCluster`."""
    found: list[tuple[float, bool, int]] = []
    here: dict[int, bool] = {}
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip() or line.lstrip().startswith("#"):
                    continue
                where = f"{path}, line {number}"
                entry = _entry(line, where, found[-1][0] if found else 0.0, nodes)
                _, is_there, node = entry
                if here.get(node) is is_there:
                    state = "there already" if is_there else "not there"
                    raise BadCluster(f"{where}: {line.strip()!r}; node {node} is {state}")
                here[node] = is_there
                found.append(entry)
    except (OSError, ValueError) as error:
        if isinstance(error, BadCluster):
            raise
        raise BadCluster(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return found


def _entry(line: str, where: str, after: float, nodes: int) -> tuple[float, bool, int]:
    try:
        time, kind, number = (word.strip() for word in line.split(","))
        at, what, node = float(time), {"add": True, "remove": False}[kind], int(number.removeprefix("n"))
    except (ValueError, KeyError):
        wanted = "SECONDS,add,NODE or SECONDS,remove,NODE is expected, where NODE is a number from 0"
        raise BadCluster(f"{where}: {line.strip()!r}; {wanted}") from None
    if isnan(at):
        raise BadCluster(f"{where}: {time!r} is no time")
    if not after <= at:
        raise BadCluster(f"{where}: the time {time} is before {after:g}; times must not go back")
    if at > LONGEST_S:
        raise BadCluster(f"{where}: the time is {time}; at most {LONGEST_S:g} s is expected")
    if not 0 <= node < nodes:
        raise BadCluster(f"{where}: there is no node {node}; the nodes are 0 to {nodes - 1}")
    return at, what, node
