"""Sentences about values, for people. Each is one line. The core makes text nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from signal import Signals
from typing import assert_never

from reknit.core.agent import reasons as own
from reknit.core.agent.agent import Agent, NodeWorkers, Timer
from reknit.core.agent.commands import SIGKILL, Command, StopWorkers
from reknit.core.agent.reasons import Reason
from reknit.core.agent.timers import pause_s
from reknit.core.agent.worker_words import WorkersStopped
from reknit.core.agent.workers import QUICK_S, asks_somebody, failures, why_failed
from reknit.core.job import reasons
from reknit.core.job.hanging import Certainty, Hang
from reknit.core.job.job import Closed, Gathering, Job, Running, has_enough
from reknit.core.job.restart import backoff_s, is_echo, is_last
from reknit.core.job.workers import UNSEEN, Activity, Collective, NoProgress, Stance, TimerExpired, WorkerFailure


def signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_text(exitcode: int) -> str:
    return f"killed by {signal_name(-exitcode)}" if exitcode < 0 else f"exit code {exitcode}"


def how_text(failure: WorkerFailure) -> str:
    """`exit code 1, ValueError: no such file`, or `no progress for 30 s after step 12, in load (data.py:41), not in a
    collective (killed by SIGABRT)`"""
    message = failure.message.partition("\n")[0]
    if failure.cause is not None:
        activity = (failure.cause.activity if isinstance(failure.cause, NoProgress) else None) or UNSEEN
        is_told = activity.op or activity.stance is Stance.STOPPED
        where = f", {'in ' if activity.op else ''}{activity_text(activity)}" if is_told else ""
        return f"{cause_text(failure.cause)}{where} ({exit_text(failure.exitcode)}{f', {message}' if message else ''})"
    return exit_text(failure.exitcode) + (f", {message}" if message else "")


def cause_text(cause: TimerExpired | NoProgress) -> str:
    """`no progress for 30 s after step 12`"""
    match cause:
        case TimerExpired(scope):
            return f"the timer {scope!r} ran out" if scope else "a timer ran out"
        case NoProgress(for_s, step, since_start, _):
            after = ", and none since its start" if since_start else "" if step is None else f" after step {step}"
            return f"no progress for {for_s:g} s{after}"
        case _:
            assert_never(cause)


def activity_text(activity: Activity) -> str:
    """`all_reduce (train.py:88), in collective 4`, or `load (data.py:41), not in a collective`"""
    place = " ".join([activity.op, f"({activity.site})" if activity.site else ""]).strip()
    remark, last = _STANCE[activity.stance], activity.collective
    recorded = "" if last is None else collective_text(last, known_as=activity.op)
    return ", ".join(filter(None, [place or "at an unknown place" * (not remark), remark, recorded]))


def collective_text(collective: Collective, *, known_as: str = "") -> str:
    """`in collective 4`, or `after collective 3 (all_reduce) of group 'tp'`. `known_as`: the name that is shown."""
    name = f" ({collective.name})" if collective.name != known_as else ""
    group = f" of group {collective.group!r}" if collective.group else ""
    return f"{'after' if collective.is_over else 'in'} collective {collective.number}{name}{group}"


def hang_lines(why: reasons.WorkerFailed) -> Iterator[str]:
    """Where the workers stood that hung together, and which of them hold up the others. Nothing if `why` is no hang, or
    if only one worker hung."""
    hang = why.hang
    if hang is None or (len(hang.spots) == 1 and len(hang.spots[0].ranks) == 1):
        return
    for spot in hang.spots:
        yield f"  {ranks_text(spot.ranks)}: {activity_text(spot.activity)}"
    if hang.unlisted:
        yield f"  {_count(hang.unlisted, 'other worker')}: elsewhere"
    yield f"  {_blame_text(why, hang)}"


def _blame_text(why: reasons.WorkerFailed, hang: Hang) -> str:
    named = f"rank {why.failure.rank} on node {why.node}"
    ranks = hang.spots[0].ranks
    has_step = isinstance(why.failure.cause, NoProgress) and why.failure.cause.step is not None
    rest = f"{named} is the furthest behind" if has_step else f"{named} is named in their place"
    if hang.certainty is Certainty.UNKNOWN:
        return f"it cannot be told which worker holds up the others; {rest}"
    if len(hang.spots) == 1:
        return f"all of them stand there; {rest}"
    probably = "probably " if hang.certainty is Certainty.PROBABLE else ""
    if len(ranks) == 1:
        return f"{probably}{named} holds up the others"
    return f"{probably}{ranks_text(ranks)} hold up the others"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0,2-7`. `ranks`: the lowest first."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def stacks_lines(failure: WorkerFailure) -> Iterator[str]:
    """The stacks of a worker that reknit has ended, or what else is known of it. Nothing for any other failure."""
    if failure.cause is not None and failure.traceback:
        yield f"rank {failure.rank} (pid {failure.pid}), innermost call first:"
        yield from (f"  {line}" for line in failure.traceback.splitlines())


def failure_text(failure: WorkerFailure, node: object = "") -> str:
    """`rank 3 on node n1 failed: exit code 1, ValueError: no such file`. The node stands before the text of the
    exception, which may be long. `node`: empty if the reader knows it. Of a worker without progress it says `hung`,
    because another one may be to blame."""
    where = f" on node {node}" if node else ""
    verb = "hung" if isinstance(failure.cause, NoProgress) else "failed"
    return f"rank {failure.rank}{where} {verb}: {how_text(failure)}"


_MOST_FAILURES = 8
"""Failures that are told one by one."""
_ECHO_LENGTH = 160
"""Number of characters that are shown of the text of a consequence."""


def others_text(failures: Sequence[tuple[object, WorkerFailure]], blamed: reasons.WorkerFailed | None) -> Iterator[str]:
    """The failures besides the one that is blamed, each with its node as in `failure_text`. Those with the same text
    are one line. What looks like the consequence of another worker's end is one line as well, and so are the many that
    remain. If the blamed failure looks like a consequence too, nothing tells them apart."""
    all_alike = blamed is not None and is_echo(blamed.failure)
    own: dict[str, list[int]] = {}
    for node, failure in failures:
        if all_alike or not is_echo(failure):
            own.setdefault(failure_text(failure, node).removeprefix(f"rank {failure.rank}"), []).append(failure.rank)
    told, rest = [*own.items()][:_MOST_FAILURES], [*own.values()][_MOST_FAILURES:]
    for text, ranks in told:
        yield f"likewise {ranks_text(sorted(ranks))}{text}"
    if rest:
        yield f"likewise {ranks_text(sorted(rank for ranks in rest for rank in ranks))} failed"
    echoes = sorted((f for _, f in failures if not all_alike and is_echo(f)), key=lambda f: f.rank)
    if echoes:
        how = how_text(echoes[0])
        how = how if len(how) <= _ECHO_LENGTH else f"{how[:_ECHO_LENGTH]} …"
        whose = f"rank {echoes[0].rank} with " if len(echoes) > 1 else ""
        yield f"{ranks_text([f.rank for f in echoes])} failed, probably as a consequence: {whose}{how}"


def killed_text(stopped: WorkersStopped) -> str:
    """`ranks 1,3 did not end within 30 s: killed by SIGKILL`. There is at least one such rank."""
    return f"{ranks_text(stopped.killed)} did not end within {stopped.grace_s:.3g} s: {exit_text(-SIGKILL)}"


def reason_text(reason: Reason) -> str:  # noqa: C901  # a dispatcher: one arm per reason
    match reason:
        case reasons.WorkerFailed(node, failure, _):
            return failure_text(failure, node)
        case reasons.NodeGone(node, how, by):
            return f"node {node} {_HOW[how]}" + (f", noticed by node {by}" if by else "")
        case reasons.NodesAdmitted(nodes):
            return f"{_count(len(nodes), 'node')} admitted: {', '.join(map(str, nodes))}"
        case reasons.BudgetSpent(max_restarts, root):
            return f"{reason_text(root)}, and {_budget_text(max_restarts, root.failure, 'no restarts are allowed')}"
        case reasons.Unstable(max_unspent):
            return f"more than {max_unspent} rounds ended without a failure"
        case reasons.TooFewNodes(have, need):
            return f"{_count(have, 'node')} joined in time, but the job needs at least {need}"
        case reasons.LongOver(epoch):
            return f"run {epoch} of the job has ended long ago, and nothing more is known of it"
        case reasons.AbortedByOperator(why):
            return f"aborted: {why}"
        case reasons.AllSucceeded():
            return "all workers succeeded"
        case own.SignalReceived(signal):
            # No process can receive SIGKILL. Here it stands for a request to stop without a grace.
            return "told to end at once" if signal == SIGKILL else f"{signal_name(signal)} received"
        case own.Replaced(by):
            return f"another agent has joined with this node's id, as {by}: each node needs its own --node-id"
        case own.DeclaredLost():
            return "the other nodes have declared this node lost"
        case own.CutOff(seconds):
            return f"the store has acknowledged no beat of this node for {seconds:g} s (--fence-after)"
        case own.StoreLost(why, answers):
            return f"{_OUTAGE[answers]}: {why}"
        case own.JournalRefused(_, why):
            return why
        case own.TermsDiffer():
            return terms_text(reason, {})
        case own.AlreadyFinished():
            return "the job has already finished"
        case own.CannotStop(pids):
            return f"processes of this node survive SIGKILL: {', '.join(map(str, pids))}"
        case _:
            assert_never(reason)


def terms_text(why: own.TermsDiffer, names: Mapping[str, str]) -> str:
    """`the job runs on other terms: max_restarts: 0 there, 3 here (node n0 began the job)`. `names`: by term, the name
    that the reader knows."""
    listed = "; ".join(f"{names.get(name, name)}: {there} there, {here} here" for name, there, here in why.differences)
    return f"the job runs on other terms: {listed}" + (f" (node {why.by} began the job)" if why.by else "")


def time_text(seconds: float) -> str:
    """`0.4 s`, `12 s`, `2 min 5 s`, `3 h 40 min`, `2 d 4 h`"""
    if seconds < 0.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit_s, unit, next_s, next_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            rest = whole % unit_s // next_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {next_unit}" if rest else "")
    return f"{whole} s"


def spent_text(why: reasons.BudgetSpent, option: str = "--max-restarts") -> str:
    """`rank 1 failed, and all 2 restarts are spent`. The details of the failure are told elsewhere. `option`: the name
    by which the reader sets the number of restarts."""
    failure = why.root.failure
    return f"rank {failure.rank} failed, and {_budget_text(why.max_restarts, failure, f'{option}=0 allows no restart')}"


def _budget_text(max_restarts: int, failure: WorkerFailure, none: str) -> str:
    """Why no restart follows. `none`: the text if the job has no restarts."""
    if asks_somebody(failure):
        return "a worker that waits for input is not started again"
    if max_restarts == 0:
        return none
    return "the only restart is spent" if max_restarts == 1 else f"all {max_restarts} restarts are spent"


def decisions(
    before: Agent, after: Agent, commands: Sequence[Command], told: reasons.WorkerFailed | None = None
) -> Iterator[str]:
    """Lines that tell the operator of this agent what one step has decided. Most steps have none. `told`: the failure
    of this round that was told last, by this step or an earlier one (`failure_told`)."""
    yield from _store_news(before, after)
    yield from _name_news(before, after)
    if after.me in after.job.succeeded and after.me not in before.job.succeeded and after.causes.outcome is None:
        yield "all workers of this node succeeded; it waits for the other nodes (a signal ends the wait)"
    yield from _hang_news(before, after, told)
    causes, why_leaving = after.causes, after.causes.why_leaving
    if after.is_serving and causes.outcome is None and not before.is_serving:
        if isinstance(causes.unable, own.Replaced) and not before.workers.alive:
            yield reason_text(causes.unable)
        which = "a" if causes.request is None else "another"
        yield f"this node hosts the store, and stays until the other nodes have ended; {which} signal ends it at once"
    stops = [each for each in commands if isinstance(each, StopWorkers)]
    for stop in stops:
        if not isinstance(stop.why, reasons.AllSucceeded):
            yield _stop_text(before, after, stop)
            yield from _early_ends(before.workers, stop.why)
    if why_leaving is not None and before.causes.why_leaving is None:
        yield from _leaving_news(before, why_leaving, has_stopped=bool(stops))
    if causes.unable is None:
        yield from _job_news(before, after)
        yield from _rank_news(before, after)
        yield from _pause_news(before, after)


def failure_told(before: Agent, after: Agent, commands: Sequence[Command]) -> reasons.WorkerFailed | None:
    """The failure that the lines of this step name as the reason of a stop, or of the end of a round. None: they name
    none."""
    whys: list[Reason] = [after.job.why] if after.job.why is not None and _tells_end(before, after) else []
    whys += [each.why for each in commands if isinstance(each, StopWorkers) and before.workers.stopping is None]
    return next((why for why in whys if isinstance(why, reasons.WorkerFailed)), None)


def _leaving_news(before: Agent, why: Reason, *, has_stopped: bool) -> Iterator[str]:
    """`has_stopped`: this step stops the workers, and the line about that names the failure or the signal."""
    text = reason_text(why)
    if isinstance(why, own.SignalReceived) and (has_stopped or before.workers.stopping is None):
        return
    if isinstance(why, reasons.BudgetSpent) and has_stopped:
        text = _budget_text(why.max_restarts, why.root.failure, "no restarts are allowed here")
    yield f"{text}; this node takes part in no further round"


def _stop_text(before: Agent, after: Agent, command: StopWorkers) -> str:
    grace_s = command.grace_s
    if command.round == before.workers.round and before.workers.stopping is not None:
        asked, asked_before = after.causes.request, before.causes.request
        when = f"within {grace_s:g} s" if grace_s else "now"
        if asked is None or asked is asked_before:
            return f"no time is left: the workers get SIGKILL {when}"
        why = f"{signal_name(asked.signal)} received" if asked_before is None else "asked again to stop"
        return f"{why}: the workers get SIGKILL {when}"
    why = reason_text(command.why)
    if isinstance(command.why, reasons.WorkerFailed) and is_echo(command.why.failure):
        why += " (probably a consequence of another worker's end)"
    if len(after.workers.exits) == after.spec.local_world_size:
        return why  # no worker is left that could be stopped
    when = " once no other fails" if command.await_exits_s else ""
    kill = f", SIGKILL after {grace_s:g} s" if grace_s else ""
    return f"{why}; stopping this node's workers{when} ({signal_name(command.signal)}{kill})"


def _early_ends(workers: NodeWorkers, why: Reason) -> Iterator[str]:
    """Workers that had ended without a failure before another one failed because it lost its peer. `workers`: as they
    were before that. Nobody else tells of them."""
    if not isinstance(why, reasons.WorkerFailed) or not is_echo(why.failure) or workers.assignment is None:
        return
    ended = [workers.assignment.workers[i].rank for i, exit in sorted(workers.exits.items()) if exit.failure is None]
    if ended:
        yield early_text(ended)


def early_text(ranks: Sequence[int]) -> str:
    """Workers that had ended without a failure before others lost their peer. `ranks`: the lowest first."""
    them = "it" if len(ranks) == 1 else "them"
    return f"{ranks_text(ranks)} had ended before that with exit code 0: the others may have needed {them}"


_NO_CALL = (
    "no worker of this node has called reknit.progress() since its start: does the script call it?"
    " A slow start needs --start-timeout"
)
_MOST_STACKS = 4
"""Number of workers of this node whose stacks are shown when they hang."""


def _hang_news(before: Agent, after: Agent, told: reasons.WorkerFailed | None) -> Iterator[str]:
    """Workers of this node were found to hang: where they stand, and the stacks of those that tell most. And once the
    hang is judged, where the workers of all nodes stood."""
    old, new = before.workers, after.workers
    hung = _hung(new) if new.exits is not old.exits else []  # in most steps no worker ends
    if hung and new.round == old.round and len(hung) > len(_hung(old)):
        why = why_failed(new)
        silent = all(isinstance(failure.cause, NoProgress) and failure.cause.since_start for failure in hung)
        if silent and not is_last(before.job, new.round):  # otherwise the report says it
            yield _NO_CALL
        # The last line blames a worker. With several nodes, that is one of the job, which is not known yet.
        if lines := list(hang_lines(why))[: -1 if len(after.job.members) > 1 else None]:
            yield f"{_count(len(hung), 'worker')} of this node hung:"
            yield from lines
        is_known = why.hang is not None and why.hang.certainty is not Certainty.UNKNOWN
        shown = [why.failure] if is_known else _one_of_each(hung)
        for failure in shown[:_MOST_STACKS]:
            yield from stacks_lines(failure)
    if after.job.spent > before.job.spent and isinstance(after.job.why, reasons.WorkerFailed):
        yield from _verdict(before, after.job.why, told)


def _hung(workers: NodeWorkers) -> list[WorkerFailure]:
    """The failures of workers that reknit has ended because they hung."""
    return [f for f in failures(workers) if f.cause is not None]


def _verdict(before: Agent, why: reasons.WorkerFailed, told: reasons.WorkerFailed | None) -> Iterator[str]:
    """The failure that is blamed, now that all failures of the round are known, unless it was told last."""
    if len(before.job.members) > 1 and (lines := list(hang_lines(why))):
        yield "the workers of all nodes that hung:"
        yield from lines
        return
    if why.hang is not None and len(before.job.members) == 1:
        return  # the lines about where the workers stood have named it
    if told is None or told.failure != why.failure:
        yield f"to blame: {reason_text(why)}"


def _one_of_each(hung: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """One worker of each place."""
    return list({f.cause.activity if isinstance(f.cause, NoProgress) else f.rank: f for f in reversed(hung)}.values())


def _name_news(before: Agent, after: Agent) -> Iterator[str]:
    if _takes_over(before, after):
        yield f"node {after.me.id} is in the job already: this agent takes its place as {after.me}"
    elif after.me.incarnation > before.me.incarnation and after.causes.unable is None:
        yield f"this node is {after.me} for the others from now on"


def _store_news(before: Agent, after: Agent) -> Iterator[str]:
    old, new = before.contact, after.contact
    is_news = not old.outage or new.answers > old.answers
    if new.outage and is_news and after.causes.outcome is None:
        limit_s = after.spec.store_timeout_s if after.was_read else after.spec.terms.join_timeout_s
        left_s = limit_s - _runs_for_s(after, Timer.OUTAGE, 0)
        for_s = f"for {left_s:.0f} s more" if old.outage else f"for {limit_s:g} s"
        yield f"{_OUTAGE[new.answers]}{_runs_on(after)}; reknit tries again {for_s}: {new.outage}"
    elif old.outage and not new.outage:
        how = "used" if old.answers else "reached"
        yield f"the store can be {how} {'again' if before.was_read else 'now'}"
    has_ended_them = before.workers.alive > after.workers.alive
    if new.outage and has_ended_them and after.is_working:
        yield "this node has no workers now; it waits until the store can be reached"


def _runs_on(agent: Agent) -> str:
    """What happens to this node's workers during an outage. Empty if there are none."""
    fence_s = agent.job.terms.fence_s
    if not agent.workers.alive:
        return ""
    return ", workers keep running" + ("" if fence_s is None else f" for at most {fence_s:g} s (--fence-after)")


def _job_news(before: Agent, after: Agent) -> Iterator[str]:
    old, new = before.job, after.job
    if new.renewed > old.renewed:
        policy = new.terms.restarts
        left = "the only restart is" if policy.max_restarts == 1 else f"all {policy.max_restarts} restarts are"
        yield f"a round has run for {policy.steady_s:g} s: {left} left again"
    if isinstance(old.phase, Gathering) and old.phase.excuse is None and isinstance(old.why, reasons.WorkerFailed):
        gone = new.phase.excuse if isinstance(new.phase, Gathering) else None
        if gone is not None and gone.node != after.me:
            yield reason_text(gone)  # usually the workers of the others have failed because of that
    has_come = new.is_live(after.me) and not old.is_live(after.me)
    if old.phase == new.phase and len(old.live) == len(new.live) and not has_come:
        return
    match new.phase:
        case Running() if not isinstance(old.phase, Running) or old.round != new.round:
            stands_by = after.me not in new.member_nodes and not new.is_gone(after.me)
            yield sealed_text(new) + "; this node stands by" * stands_by
        case Gathering() if new.why is not None and _tells_end(before, after):
            yield f"round {old.round} ended: {reason_text(new.why)}"
        case Gathering(expected=expected) if new.is_live(after.me) and not expected:
            if has_come or not _was_waiting(old, new):
                yield _waiting_text(after)
        case _:
            pass


def _rank_news(before: Agent, after: Agent) -> Iterator[str]:
    """The workers have got other ranks than the journal says."""
    old, new = before.workers, after.workers
    if new.assignment is None or new.assignment == old.assignment or new.round != old.round:
        return
    made = new.assignment
    ranks = [worker.rank for worker in made.workers]
    span = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}" if ranks else "no rank"
    yield (
        f"round {new.round}, by another rendezvous: {_count(made.group_world_size, 'node')},"
        f" {_count(made.world_size, 'worker')}, {span} here, master {made.master_addr}:{made.master_port}"
    )


def _pause_news(before: Agent, after: Agent) -> Iterator[str]:
    wait_s, running = pause_s(after), after.since.get(Timer.BACKOFF)
    if not after.is_working:
        return
    if wait_s and running is not None and before.since.get(Timer.BACKOFF) != running:
        wait_s = max(wait_s, backoff_s(after.job))
        then = ", and start again" if after.spec.terms.max_nodes == 1 else ": this node joins again"
        yield f"the workers failed within {QUICK_S:g} s of their start{then} in {wait_s:g} s"


def _takes_over(before: Agent, after: Agent) -> bool:
    """This agent has read for the first time, and a node with its id is live. Either the agent of this node was started
    again, or two nodes have one id."""
    if before.was_read or not after.was_read or after.causes.unable is not None or isinstance(after.job.phase, Closed):
        return False
    return after.me.id in after.job.live


def _was_waiting(old: Job, new: Job) -> bool:
    """The job waited for nodes before as well, with the same number of live nodes. So there is nothing new to tell."""
    phase = old.phase
    return isinstance(phase, Gathering) and not phase.expected and len(old.live) == len(new.live)


def _waiting_text(agent: Agent) -> str:
    """`waiting for nodes: 1 joined, 2 to 4 wanted, for at most 600 s`"""
    job, terms = agent.job, agent.job.terms
    most = f" to {terms.max_nodes}" if terms.max_nodes > terms.min_nodes else ""
    timer, for_s = (Timer.LAST_CALL, terms.last_call_s) if has_enough(job) else (Timer.GIVE_UP, terms.join_timeout_s)
    left_s = max(0.0, for_s - _runs_for_s(agent, timer, job.round))
    left = f"{left_s:g} s" if left_s == for_s else f"{left_s:.0f} s"
    until = f"{left} more" if has_enough(job) else f"at most {left}"
    return f"waiting for nodes: {len(job.live)} joined, {terms.min_nodes}{most} wanted, for {until}"


def _runs_for_s(agent: Agent, timer: Timer, round: int) -> float:
    """Seconds since the timer about this round started. 0: it does not run."""
    running = agent.since.get(timer)
    return agent.at - running[1] if running is not None and running[0] == round else 0.0


def _tells_end(before: Agent, after: Agent) -> bool:
    """A line tells why the round has ended: no line about the stop of this node's workers does, in this step or in a
    later one."""
    ends = isinstance(before.job.phase, Running) and isinstance(after.job.phase, Gathering)
    return ends and not after.workers.alive and getattr(after.job.why, "node", None) != after.me


def sealed_text(job: Job) -> str:
    """`round 2 (restart 1 of 3): 2 nodes, 8 workers, master 10.0.0.5:41231`"""
    why = ""
    if job.round:
        if isinstance(job.why, reasons.WorkerFailed):
            why = f" (restart {job.spent} of {job.terms.restarts.max_restarts})"
        elif job.why is not None:
            why = f" ({reason_text(job.why)})"
    workers = sum(m.local_world_size for m in job.members)
    first = job.members[0]
    return (
        f"round {job.round}{why}: {_count(len(job.members), 'node')}, {_count(workers, 'worker')}, "
        f"master {first.address}:{first.port}"
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


_STANCE = {
    Stance.COLLECTIVE: "",
    Stance.WAITING: "probably waiting for others",
    Stance.UNKNOWN: "",
    Stance.OWN: "not in a collective",
    Stance.STOPPED: "stopped by a signal",
}
_OUTAGE = {
    False: "the store cannot be reached",
    True: "the store answers, but the job cannot use it yet",
}
"""By whether the store answers."""
_HOW = {
    reasons.Departure.LOST: "fell silent",
    reasons.Departure.LEFT: "left",
    reasons.Departure.LEAVING: "is leaving",
    reasons.Departure.REPLACED: "was started again",
}
