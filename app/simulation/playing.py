"""`reknit.simulate`: plays a job on a cluster several times, with the decisions of the real agents.

The failures of a node depend on the seed and the node alone. So two clusters that are compared on the same seeds have
the same failures.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from math import exp, gamma, sqrt
from random import Random
from statistics import NormalDist, fmean, stdev
from threading import Thread

from attrs import define, field, frozen

from reknit.adapters.simulated.fleet import Fleet, Onlooker, StoreSpeed
from reknit.app.input.devices import cpus
from reknit.core.job.entries import NodeId
from reknit.core.text.describe import reason_text

from .accounts import CAUSES, Accounts, SimulatedRun
from .cluster import SCENARIOS, BadCluster, SimulatedCluster, read_trace, with_values

DAY_S = 86400.0
COHORTS = 4
"""Kinds of nodes with the same delays in a round. Beside them there are `STRAGGLERS`."""
STRAGGLERS = 2
"""Nodes of a round that are slower than all others. A round waits for the slowest one. If that one fails, the next
round waits for the second."""
MOST_LESS = 0.005
"""A number of spares is enough if the job trains less by at most this part of the time than with the best number."""
_NORMAL = NormalDist()
_P99 = _NORMAL.inv_cdf(0.99)


@frozen
class Simulation:
    """What several runs of one cluster say. Times in seconds."""

    cluster: SimulatedCluster
    runs: tuple[SimulatedRun, ...]

    @property
    def effective(self) -> tuple[float, float]:
        """The part of the time that was training: the mean, and half the width of its 95 % interval of confidence."""
        return interval([run.effective for run in self.runs])

    @property
    def causes(self) -> Mapping[str, float]:
        """The part of the time that each cause takes."""
        return {cause: fmean(run.causes[cause] / run.lasted_s for run in self.runs) for cause in CAUSES}

    def recovery_s(self, part: float) -> float | None:
        """This quantile of the times from a break in training until all workers train again. None: there was none."""
        times = sorted(time for run in self.runs for time in run.recoveries)
        return times[min(len(times) - 1, int(part * len(times)))] if times else None

    @property
    def rounds(self) -> float:
        return fmean(run.rounds for run in self.runs)

    @property
    def restarts(self) -> float:
        return fmean(run.restarts for run in self.runs)

    @property
    def most_out(self) -> int:
        return max(run.most_out for run in self.runs)

    @property
    def ended_early(self) -> float:
        """The part of the runs that have ended before their time."""
        return fmean(bool(run.outcome) for run in self.runs)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval of confidence. Infinite for one value."""
    n = len(values)
    if n < 2:
        return fmean(values), float("inf")
    few = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45}
    t = few.get(n, 1.96 + 2.37 / (n - 1) + 2.82 / (n - 1) ** 2)  # Student's t, to the second digit
    return fmean(values), t * stdev(values) / sqrt(n)


def difference(a: Simulation, b: Simulation) -> tuple[float, float]:
    """How much more `b` trains than `a`. Runs with the same seed are compared. Returns the mean of the differences, and
    half the width of its interval of confidence."""
    return interval([y.effective - x.effective for x, y in zip(a.runs, b.runs, strict=True)])


def is_real(mean: float, half: float) -> bool:
    """Whether a difference is more than chance. Less than a millionth is rounding."""
    return abs(mean) > half and abs(mean) > 1e-6


def _is_enough(mean: float, half: float) -> bool:
    return mean - half > -MOST_LESS


def title(found: Sequence[Simulation]) -> str:
    """What was played: `30 days of 8 to 16 nodes, played 10 times`."""
    days, nodes = (
        " to ".join(f"{end:g}" for end in sorted({min(all_of), max(all_of)}))
        for all_of in ([one.cluster.days for one in found], [one.cluster.nodes for one in found])
    )
    count = len(found[0].runs)
    played = "once" if count == 1 else f"{count} times"
    return (
        f"{days} {'day' if days == '1' else 'days'} of {nodes} {'node' if nodes == '1' else 'nodes'}, played {played}"
    )


@frozen
class Sweep:
    """What several values of one key say, on the same seeds."""

    key: str
    values: tuple[float, ...]
    """The least first."""
    answers: tuple[Simulation, ...]
    """One for each value."""

    @property
    def best(self) -> int:
        """The place of the value with which the job trains most."""
        return max(range(len(self.answers)), key=lambda place: self.answers[place].effective[0])

    def than_best(self, place: int) -> tuple[float, float]:
        """By how much the job trains more than with the best value. See `difference`."""
        return difference(self.answers[self.best], self.answers[place])

    @property
    def least_spares(self) -> float | None:
        """The fewest spares with which the job trains as much as with the best number of them, but for `MOST_LESS`. It
        must be certain, so wide intervals speak for more spares. None: another key is swept."""
        if self.key != "spares":
            return None
        places = range(len(self.values))
        return self.values[next(at for at in places if at == self.best or _is_enough(*self.than_best(at)))]

    def mark(self, place: int) -> str:
        """What to think of the value: `best`, `not really different` from the best, or `worse`."""
        if place == self.best:
            return "best"
        mean, half = self.than_best(place)
        return "worse" if is_real(mean, half) else "not really different"


def simulate(
    scenario: str = "",
    *,
    runs: int = 10,
    seed: int = 0,
    processes: int | None = None,
    **values: object,
) -> Simulation:
    """Play a job on a cluster.

        simulate(nodes=64, spares=2, failures=6.5, days=30).effective      (0.9921, 0.0013)

    `scenario`: llama3, rsc1 or byterobust, whose values `values` change. `values`: the keys of docs/simulation.md#keys.
    `runs`: how often it is played, at least once, with the seeds from `seed` on. `processes`: how many do so at once.
    None: one for each CPU that this process may use. Raises `ValueError`, and `OSError` if a process that plays was
    killed.
    """
    if scenario and scenario not in SCENARIOS:
        raise BadCluster(f"there is no scenario {scenario}; there are {', '.join(SCENARIOS)}")
    cluster = with_values(SimulatedCluster(), {**SCENARIOS.get(scenario, {}), **values}, "simulate")
    asked: tuple[tuple[str, object, int], ...] = (("runs", runs, 1), ("seed", seed, 0))
    for name, value, least in asked:
        if not isinstance(value, int) or value < least:
            raise BadCluster(f"{name} is {value!r}; a whole number of at least {least} is expected")
    return answers([cluster], range(seed, seed + runs), processes)[0]


def answers(
    clusters: Sequence[SimulatedCluster],
    seeds: Sequence[int],
    processes: int | None = None,
    shown: Callable[[Iterable[SimulatedRun], int], Iterable[SimulatedRun]] = lambda runs, total: runs,
) -> list[Simulation]:
    """One answer for each cluster. `shown` gets the runs as they end, and their number. It passes them on, and may show
    how many are done. Raises `OSError` if a process that plays was killed."""
    jobs = [(cluster, seed) for cluster in clusters for seed in seeds]
    count = min(len(jobs), processes or cpus())
    if count > 1:
        try:
            with ProcessPoolExecutor(count, initializer=_begun) as pool:
                runs = list(shown(pool.map(play, *zip(*jobs, strict=True)), len(jobs)))
        except BrokenProcessPool:
            text = "a process that plays has ended early, perhaps because no memory was left"
            raise OSError(errno.ENOMEM, text) from None
    else:
        runs = list(shown((play(cluster, seed) for cluster, seed in jobs), len(jobs)))
    n = len(seeds)
    return [Simulation(cluster, tuple(runs[i * n : (i + 1) * n])) for i, cluster in enumerate(clusters)]


def collect_rarely() -> None:
    """Let this process look for garbage in cycles rarely. A fleet makes many values and no cycles, and the search costs
    a quarter of the time. It is for processes that do nothing but play."""
    gc.set_threshold(1_000_000)


def _begun() -> None:
    """Prepare a process that plays runs. It must not outlive the one that wants them."""
    collect_rarely()
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


# ---- one run ---------------------------------------------------------------------------------------------------------


def traced(cluster: SimulatedCluster, seed: int, folder: str) -> None:
    """Play the job once, and write the trace of its first node. Raises `OSError`."""
    from .node_trace import NodeTrace

    trace = NodeTrace(folder, name_of(0))
    lasted_s = 0.0
    try:
        lasted_s = play(cluster, seed, trace).lasted_s
    finally:
        trace.close(lasted_s)


def play(cluster: SimulatedCluster, seed: int, *watchers: Onlooker) -> SimulatedRun:
    """Play the job once."""
    accounts = Accounts(cluster.checkpoint_s, cluster.checkpoint_cost_s, cluster.step_s)
    delays = Drawn(cluster, seed)
    fleet = Fleet(
        cluster.terms,
        seed=seed,
        speed=StoreSpeed(way_s=cluster.append_ms / 1000, appends_per_s=cluster.appends_per_s),
        delays=delays,
        grace_s=cluster.grace_s,
        store_timeout_s=cluster.store_timeout_s,
        local_world_size=cluster.nproc_per_node,
        watchers=[accounts, *watchers],
    )
    delays.clock = lambda: fleet.now
    job = _Job(cluster, seed, fleet, accounts, delays)
    job.plan()
    end = cluster.days * DAY_S
    fleet.run_until(1.0)
    while fleet.now < end and fleet.job.outcome is None and (job.returning or not fleet.is_over):
        fleet.run_until(min(end, fleet.now + 3600.0))
    outcome = fleet.job.outcome
    why = "" if outcome is None else reason_text(outcome.why)
    if not why and fleet.is_over and not job.returning:
        last = next(reversed(fleet.results.values()), None)
        why = "no agent was left" + ("" if last is None else f" ({reason_text(last.why)})")
    accounts.close(end, over_at=fleet.emptied_at if fleet.is_over and outcome is None else None, is_over=bool(why))
    return SimulatedRun(
        seed,
        end,
        accounts.causes,
        tuple(accounts.recoveries),
        accounts.rounds,
        fleet.job.restarts,
        job.most_out,
        why,
        fleet.steps,
        fleet.shared,
    )


def name_of(number: int) -> NodeId:
    return NodeId(f"n{number:05}")


@define(eq=False)
class _Job:
    """Plans and makes the failures of one run."""

    cluster: SimulatedCluster
    seed: int
    fleet: Fleet
    accounts: Accounts
    delays: Drawn
    most_out: int = 0
    returning: int = 0
    """Nodes that will be back."""
    _out: set[int] = field(factory=set)

    def plan(self) -> None:
        cluster, count = self.cluster, self.cluster.nodes + self.cluster.spares
        trace = read_trace(cluster.trace, count) if cluster.trace else []
        begins = {node: is_added for _, is_added, node in reversed(trace)}  # what the first line of each node says
        late = {node for node, is_added in begins.items() if is_added}
        self.fleet.start([name_of(i) for i in range(count) if i not in late])
        for node in late:
            self._count(node)
        if cluster.trace:
            for at, is_there, node in trace:
                if is_there:
                    self._returns(at, node)
                else:
                    self._at(at, self._gone, node)
            return
        for node in range(count):
            self._plan_node(node)
        if cluster.rack:
            for first in range(0, count, cluster.rack):
                luck = self._luck(f"rack {first}")
                for at in self._times(luck, cluster.rack_failures / 1000.0, 1.0):
                    for node in range(first, min(count, first + cluster.rack)):
                        self._at(at, self._dies, node, self._repair_s(luck))
        luck = self._luck("store")
        for at in self._times(luck, cluster.store_outages / 30.0, 1.0):
            self.fleet.after(at, self.fleet.lose_store)
            self.fleet.after(at + cluster.store_outage_s, self.fleet.restore_store)

    def _plan_node(self, node: int) -> None:
        cluster, luck = self.cluster, self._luck(f"node {node}")
        kinds, weights = zip(*cluster.mix.items(), strict=True)
        for at in self._times(luck, cluster.failures / 1000.0, cluster.shape):
            kind, repair_s = luck.choices(kinds, weights)[0], self._repair_s(luck)
            match kind:
                case "worker":
                    self._at(at, self._fails, node)
                case "node":
                    self._at(at, self._dies, node, repair_s)
                case "hang":
                    self._at(at, self._hangs, node)
                case "leave":
                    self._at(at, self._leaves, node, repair_s)
                case _:
                    self._at(at, self._is_cut, node)

    def _luck(self, what: str) -> Random:
        return Random(f"{self.seed}/{what}")

    def _times(self, luck: Random, per_day: float, shape: float) -> list[float]:
        """Times of failures, in seconds from the start."""
        found: list[float] = []
        if per_day <= 0.0:
            return found
        scale_s = DAY_S / per_day / gamma(1 + 1 / shape)
        at = luck.weibullvariate(scale_s, shape)
        while at < self.cluster.days * DAY_S:
            found.append(at)
            at += luck.weibullvariate(scale_s, shape)
        return found

    def _repair_s(self, luck: Random) -> float:
        return lognormal(self.cluster.repair_s, self.cluster.repair_p99_s, luck.random())

    def _at(self, at: float, what: Callable[..., None], *args: float) -> None:
        self.fleet.after(at, partial(what, *args))

    def _is_member(self, node: int) -> bool:
        crew = self.fleet.of.get(name_of(node))
        return crew is not None and crew.agent.workers.alive and crew.agent.workers.round == self.accounts.round

    # ---- what fails ----

    def _fails(self, node: int) -> None:
        if self._is_member(node) and self.fleet.fail(name_of(node)):
            self.accounts.break_down(self.fleet.now)

    def _hangs(self, node: int) -> None:
        if self._is_member(node) and self.accounts.trains:
            self.accounts.break_down(self.fleet.now)
            round, for_s = self.accounts.round, self.cluster.hang_after_s
            # The last progress was the end of the step before.
            wait_s = max(0.0, for_s - self.accounts.since_step_s(self.fleet.now))
            self.fleet.after(wait_s, lambda: self._noticed(node, round, for_s))

    def _noticed(self, node: int, round: int, for_s: float) -> None:
        if self.accounts.round == round:
            self.fleet.hang(name_of(node), for_s)

    def _dies(self, node: int, repair_s: float) -> None:
        if name_of(node) in self.fleet.of:
            self._gone(node)
            self._returns(repair_s, node)

    def _leaves(self, node: int, repair_s: float) -> None:
        if name_of(node) in self.fleet.of:
            if self._is_member(node):
                self.accounts.break_down(self.fleet.now)
            self.fleet.ask_to_leave(name_of(node))
            self._count(node)
            self._returns(repair_s, node)

    def _is_cut(self, node: int) -> None:
        if self.fleet.cut(name_of(node)):
            self._at(self.cluster.cut_s, lambda: self.fleet.mend(name_of(node)))

    def _gone(self, node: int) -> None:
        if self._is_member(node):
            self.accounts.break_down(self.fleet.now)
        self.fleet.kill(name_of(node))
        self._count(node)
        if self.fleet.is_over:
            self.accounts.emptied(self.fleet.now)

    def _count(self, node: int) -> None:
        self._out.add(node)
        self.most_out = max(self.most_out, len(self._out))

    def _returns(self, delay_s: float, node: int) -> None:
        """The node is back in so many seconds."""
        self.returning += 1
        self._at(delay_s, self._back, node)

    def _back(self, node: int) -> None:
        name = name_of(node)
        agent = None if name not in self.fleet.of else self.fleet.of[name].agent
        if agent is not None and agent.causes.request is not None:
            self._at(1.0, self._back, node)  # it still leaves
            return
        self.returning -= 1
        self._out.discard(node)
        if agent is None:
            self.delays.up_since[name] = self.fleet.now
            self.fleet.start([name])


# ---- delays ----------------------------------------------------------------------------------------------------------


def lognormal(median: float, p99: float, part: float) -> float:
    """The quantile `part` of the log-normal distribution with this median and this 99th percentile."""
    if not median or p99 <= median:
        return median
    return float(median * (p99 / median) ** (_NORMAL.inv_cdf(min(max(part, 1e-9), 1 - 1e-9)) / _P99))


@define(eq=False)
class Drawn:
    """Delays of workers, drawn for each round. A round waits for the slowest of its nodes. So the slowest few are drawn
    one by one, from the end of the distribution. The others share a few delays."""

    cluster: SimulatedCluster
    seed: int
    clock: Callable[[], float] = lambda: 0.0
    up_since: dict[NodeId, float] = field(factory=dict)
    """When a node has come up. Missing: at time 0."""
    _cohorts: dict[NodeId, int] = field(init=False)
    """The cohort of each node, from 0."""
    _round: int = -1
    _starts: list[tuple[float, float]] = field(factory=list)
    """Of each cohort: on a cold node, and on a warm one. The same if no time is known for warm ones."""
    _stops: list[float] = field(factory=list)
    _slow_starts: dict[NodeId, tuple[float, float]] = field(factory=dict)
    """Of the slowest nodes."""
    _slow_stops: dict[NodeId, float] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._cohorts = {name_of(i): i % COHORTS for i in range(self.cluster.nodes + self.cluster.spares)}

    def starts(self, round: int, nodes: Iterable[NodeId]) -> Mapping[float, Sequence[NodeId]]:
        """Implements `Delays`."""
        self._draw(round)
        cold_until, now = self.cluster.start_s, self.clock()
        came_late = {node for node, since in self.up_since.items() if now - since < cold_until}
        found: dict[float, list[NodeId]] = {}
        for node in nodes:
            starts = self._slow_starts.get(node) or self._starts[self._cohorts[node]]
            found.setdefault(starts[now >= cold_until and node not in came_late], []).append(node)
        return found

    def stops(self, round: int, nodes: Iterable[NodeId], grace_s: float) -> Mapping[float, Sequence[NodeId]]:
        """Implements `Delays`."""
        self._draw(round)
        most_s = grace_s + 0.05
        shared = [min(most_s, stop_s) for stop_s in self._stops]
        slow = {node: min(most_s, stop_s) for node, stop_s in self._slow_stops.items()}
        found: dict[float, list[NodeId]] = {}
        for node in nodes:
            found.setdefault(slow[node] if node in slow else shared[self._cohorts[node]], []).append(node)
        return found

    def _draw(self, round: int) -> None:
        if round == self._round:
            return
        self._round = round
        luck, count = Random(f"{self.seed}/delays/{round}"), self.cluster.nodes + self.cluster.spares
        few = min(STRAGGLERS, count // COHORTS)
        self._starts = [self._start(part) for part in self._shared(luck, few / count)]
        self._stops = [self._stop(part) for part in self._shared(luck, few / count)]
        self._slow_starts, self._slow_stops = {}, {}
        for place, number in enumerate(luck.sample(range(count), few)):
            start, stop = (1 - (place + luck.random()) / count for _ in range(2))
            self._slow_starts[name_of(number)] = self._start(start)
            self._slow_stops[name_of(number)] = self._stop(stop)

    def _shared(self, luck: Random, slow: float) -> list[float]:
        order = luck.sample(range(COHORTS), COHORTS)
        return [(1 - slow) * (k + luck.random()) / COHORTS for k in order]

    def _start(self, part: float) -> tuple[float, float]:
        cluster = self.cluster
        cold_s = lognormal(cluster.start_s, cluster.start_p99_s, part)
        warm_s = lognormal(cluster.warm_start_s, cluster.warm_start_p99_s, part)
        return cold_s, warm_s if cluster.warm_start_s else cold_s

    def _stop(self, part: float) -> float:
        return lognormal(self.cluster.stop_s, self.cluster.stop_p99_s, part)


def expected(failures_per_s: float, restart_s: float, checkpoint_s: float, cost_s: float) -> float:
    """The part of the time that is training, exactly, if failures are a Poisson process and each costs `restart_s`.

    In each try for a checkpoint, training for `checkpoint_s + cost_s` succeeds or begins anew."""
    rate = failures_per_s
    if not rate:
        return checkpoint_s / (checkpoint_s + cost_s)
    return rate * checkpoint_s * exp(-rate * restart_s) / (exp(rate * (checkpoint_s + cost_s)) - 1)
