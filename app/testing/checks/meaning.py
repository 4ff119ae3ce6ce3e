"""What the fold and the oracle must agree on after every entry: all that an agent may read in a job."""

from __future__ import annotations

from reknit.adapters.simulated.workers import HANGS
from reknit.app.testing.violation import demand
from reknit.core.job.entries import Node
from reknit.core.job.job import Closed, Gathering, Job, Running, Unopened, admissible, coming, has_admissible
from reknit.core.job.memory import EPOCHS
from reknit.core.job.reasons import BudgetSpent
from reknit.core.job.restart import ECHOES, Cost, cost
from reknit.core.job.workers import NoProgress, WorkerFailure

from .oracle import Oracle

PHASES = {Unopened: "unopened", Gathering: "gathering", Running: "running", Closed: "closed"}


def same(job: Job, oracle: Oracle, after: object) -> None:
    """S1, S4, S5: the fold says what the second implementation says. `after`: the last entry, for the message."""
    phase = PHASES[type(job.phase)]
    demand(phase == oracle.phase, "S1", f"the fold says {phase}, the oracle {oracle.phase} after {after}")
    if phase == "unopened":
        return
    here, there = (job.epoch, job.round), (oracle.epoch, oracle.round)
    demand(here == there, "S1", f"the fold is in {here}, the oracle in {there} after {after}")
    spent, unspent = oracle.spent, oracle.unspent
    if phase == "closed":  # the restart that was one too many is not counted
        policy = job.terms.restarts
        spent, unspent = min(spent, policy.max_restarts), min(unspent, policy.max_unspent)
    demand(job.spent == spent, "S4", f"{job.spent} spent, not {spent} after {after}")
    demand(job.unspent == unspent, "S4", f"{job.unspent} unspent, not {unspent} after {after}")
    _same_nodes(job, oracle, after)
    if isinstance(job.phase, Closed):
        _same_end(job, oracle)


def _same_nodes(job: Job, oracle: Oracle, after: object) -> None:
    mine: dict[str, object] = {
        "members": list(job.members),
        "live": list(job.live.values()),
        "succeeded": job.succeeded,
        "seats": list(job.seats),
        "size": job.size,
        "ring": list(job.ring),
        "terms": job.terms,
        "gone": [Node(*pair) for pair in job.gone.items()],
        "floor": job.floor,
        "journal": job.journal,
        "verdicts": [outcome.verdict.value for outcome in job.past],
    }
    theirs: dict[str, object] = {
        "members": oracle.sealed.get((oracle.epoch, oracle.last_sealed), []),
        "live": list(oracle.live.values()),
        "succeeded": oracle.done,
        "seats": oracle.seats,
        "size": oracle.first_size,
        "ring": _ring(oracle),
        "terms": oracle.terms,
        "gone": oracle.departed,
        "floor": oracle.floor,
        "verdicts": [oracle.verdicts[epoch] for epoch in range(oracle.epoch)][-EPOCHS:],
        "journal": oracle.journal,
    }
    if isinstance(job.phase, Gathering):
        phase = job.phase
        mine |= {"expected": phase.expected, "failed": phase.ledger, "short": phase.short, "judged": phase.judged}
        theirs |= {"expected": oracle.expected, "failed": tuple(oracle.reports), "short": oracle.short}
        theirs |= {"judged": oracle.judged}
        if not phase.judged:
            mine["will spend"] = cost(job, phase) is Cost.RESTART
            theirs["will spend"] = oracle.by_failure and not oracle.excused
    if not isinstance(job.phase, Closed):
        mine |= {"leaving": job.leaving, "coming": coming(job)}
        theirs |= {"leaving": oracle.leaving, "coming": sum(j.node not in oracle.leaving for j in oracle.live.values())}
    shortcuts = job.member_nodes == {m.node for m in job.members} and has_admissible(job) == bool(admissible(job))
    demand(shortcuts, "S1", f"what the fold keeps is not what could be made anew after {after}")
    for what, value in mine.items():
        demand(value == theirs[what], "S1", f"{what} is {value}, not {theirs[what]} after {after}")
    for node_id in {*oracle.live, *(node.id for node in oracle.departed), "never seen"}:
        top = oracle.top(node_id)
        is_right = job.highest_incarnation(node_id) == top  # type: ignore[arg-type]  # ids are plain text here
        demand(is_right, "S1", f"{node_id} was seen up to incarnation {top}, and the fold says otherwise after {after}")


def _ring(oracle: Oracle) -> list[Node]:
    """Those with a seat by their seats, the others by name."""
    seated = [oracle.live[node_id].node for node_id in oracle.seats if node_id in oracle.live]
    return seated + sorted(j.node for node_id, j in oracle.live.items() if node_id not in oracle.seats)


def _same_end(job: Job, oracle: Oracle) -> None:
    outcome = job.outcome
    if outcome is None:
        return
    verdict = oracle.verdicts[job.epoch]
    demand(outcome.verdict.value == verdict, "S5", f"the verdict is {outcome.verdict.value}, the oracle's {verdict}")
    if verdict != "failed":
        demand(not outcome.failures, "S5", f"failures of a job that has {verdict}")
        return
    demand(outcome.failures == tuple(oracle.reports), "S5", f"failures {outcome.failures}, not {oracle.reports}")
    if isinstance(outcome.why, BudgetSpent):
        all_ = [(report.node, failure) for report in oracle.reports for failure in report.failures]
        own = [pair for pair in all_ if pair[1].cause or not any(e in pair[1].message.lower() for e in ECHOES)]
        cause = (own or all_)[0]
        if isinstance(cause[1].cause, NoProgress):
            cause = _last_of([pair for pair in all_ if isinstance(pair[1].cause, NoProgress)])
        blamed = outcome.why.root.node, outcome.why.root.failure
        demand(blamed == cause, "S5", f"{blamed} is blamed, not {cause}")


def _last_of(hung: list[tuple[Node, WorkerFailure]]) -> tuple[Node, WorkerFailure]:
    """The one of these workers without progress that the others must be waiting for. One that waits in a collective is
    not blamed while another one stands outside."""
    outside = [pair for pair in hung if isinstance(pair[1].cause, NoProgress) and pair[1].cause.activity == HANGS]
    hung = outside or hung
    causes = [failure.cause for _, failure in hung if isinstance(failure.cause, NoProgress)]
    steps = [-1 if cause.since_start else cause.step for cause in causes]
    low = min((step for step in steps if step is not None), default=None)
    behind = [i for i, step in enumerate(steps) if None in steps or step == low]
    longest = max(causes[i].for_s for i in behind)
    return next(hung[i] for i in behind if causes[i].for_s == longest)
