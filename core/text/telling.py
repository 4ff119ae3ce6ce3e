"""The story of a job as lines for people."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import assert_never

from reknit.core.agent.workers import asks_somebody
from reknit.core.job import reasons
from reknit.core.job.entries import Admission, Terms
from reknit.core.job.job import Verdict
from reknit.core.job.restart import is_echo
from reknit.core.job.workers import NoProgress

from .describe import early_text, failure_text, hang_lines, others_text, reason_text, signal_name, spent_text, time_text
from .doing import Doing
from .story import KINDS, Key, RoundStory, Story, round_name, time_spent

When = Callable[[float], str]
"""Makes the text of a time, which is given in seconds since 1970."""

_FIRST, _LAST = 3, 10
"""Rounds at the beginning and at the end that are told one by one, if there are many."""
_NOTEWORTHY_S = 0.5
"""A wait that is shorter is not told. Seconds."""
_LEAST_S = 0.05
"""A kind of time of which there is less is left out of the table, in a job that has run for some seconds."""
_MOST_NAMED = 8
"""If there are more nodes, they are counted and not named."""


def told(story: Story, name: str, when: When, *, live: Collection[str], shows_all: bool) -> Iterator[str]:
    """The whole story. `name`: of the job. `live`: the nodes whose agents run now. `shows_all`: tell each round one by
    one, even if there are many."""
    yield from head_lines(story, name, when, live)
    rounds = story.rounds
    middle = range(0) if shows_all or len(rounds) <= _FIRST + _LAST + 1 else range(_FIRST, len(rounds) - _LAST)
    remarks = deque(sorted((remark.at, node.node, remark.text) for node in story.nodes for remark in node.remarks))
    stops = _slowest_stops(story)
    for number, round in enumerate(rounds):
        until = _begins(rounds[number + 1]) if number + 1 < len(rounds) else None
        own = []
        while remarks and (until is None or remarks[0][0] < until):
            own.append(remarks.popleft())
        if number in middle:
            if number == middle[0]:
                yield ""
                yield from _summary(rounds[middle[0] : middle[-1] + 1])
            continue
        yield ""
        yield from _beginning(round, rounds[number - 1] if number else None, story.terms, when)
        noticed = [remark for remark in own if round.ended_at is None or remark[0] <= round.ended_at]
        yield from _remarks(noticed, when)
        slowest = stops.get(round.key, (0.0, ""))
        yield from _ending(round, story.terms, when, slowest, goes_on=story.goes_on_after(round))
        yield from _remarks(own[len(noticed) :], when)
    if remarks:
        yield ""
        yield from _remarks(list(remarks), when)
    yield ""
    yield from _table(story)
    if any("(rule " in _rule(round, story.terms, goes_on=story.goes_on_after(round)) for round in rounds):
        yield "the rules are those of docs/protocol.md"


def _remarks(remarks: Sequence[tuple[float, str, str]], when: When) -> Iterator[str]:
    """`remarks`: time, node and text, in the order of the times. What several nodes have in common is told once."""
    alike: dict[str, list[tuple[float, str]]] = {}
    for at, node, text in remarks:
        alike.setdefault(text, []).append((at, node))
    for text, seen in alike.items():
        yield f"  {when(seen[0][0])}  {_nodes(list(dict.fromkeys(node for _, node in seen)))}: {text}"


# ---- the job ---------------------------------------------------------------------------------------------------------


def head_lines(story: Story, name: str, when: When, live: Collection[str]) -> Iterator[str]:
    """What has become of the job in all. The arguments are those of `told`."""
    yield f'job "{name}": {"runs" if live and story.outcome is None else verdict_text(story)}'
    lasted = time_text(story.ended - story.began)
    yield f"from {when(story.began)} to {when(story.ended)} ({lasted}), as seen by {_nodes(_names(story))}"
    yield from _commands(story)
    for node, ahead_s in story.skews.items():
        which = "ahead of" if ahead_s > 0 else "behind"
        yield f"the clock of node {node} is {abs(ahead_s):.1f} s {which} the others; its times are corrected here"
    latest = {one.node: one.began for one in story.nodes}  # in the order in which they began
    for one in story.nodes:
        if not one.has_ended:
            is_last = latest[one.node] == one.began
            runs = one.node in live and is_last
            gone = f"ended without a word some time after {when(one.ended)}: it was killed, or its host died"
            now = (
                f"runs: now {one.last.doing.value}, round {round_name((one.last.epoch, one.last.round))}"
                if runs
                else gone
            )
            yield f"{'the' if is_last else 'an earlier'} agent of node {one.node} {now}"


def _commands(story: Story) -> Iterator[str]:
    """The command lines of the workers. Nodes are named if their workers have different ones."""
    nodes: dict[str, list[str]] = {}
    for node in story.nodes:
        nodes.setdefault(node.command, []).append(node.node)
    for command, names in list(nodes.items())[:_MOST_NAMED]:
        whose = f" of {_nodes(sorted(set(names)))}" if len(nodes) > 1 else ""
        if command:
            yield f"workers{whose}: {command}"


def verdict_text(story: Story) -> str:
    """`failed: rank 1 failed, and all 2 restarts are spent`"""
    outcome = story.outcome
    if outcome is None:
        return _stopped_text(story.stopped_by) if story.stopped_by else "not ended, as far as these traces go"
    match outcome.verdict, outcome.why:
        case Verdict.SUCCEEDED, _:
            restarts = story.rounds[-1].restarts
            return "succeeded" + (f" after {restarts} restart{'s' * (restarts != 1)}" if restarts else "")
        case verdict, reasons.BudgetSpent() as why:
            return f"{verdict.value}: {spent_text(why)}"
        case verdict, why:
            return f"{verdict.value}: {reason_text(why)}"


def _stopped_text(signals: Sequence[int]) -> str:
    """`stopped by SIGTERM`"""
    return f"stopped by {' and '.join(map(signal_name, signals))}"


def _summary(rounds: Sequence[RoundStory]) -> Iterator[str]:
    first, last = round_name(rounds[0].key), round_name(rounds[-1].key)
    yield f"rounds {first} to {last} are not told one by one (--all does). They ended because:"
    causes = Counter(_cause(round) for round in rounds)
    for cause, count in causes.most_common(10):
        yield f"  {count:>6} ×  {cause}"
    if len(causes) > 10:
        yield f"  {sum(causes.values()) - sum(count for _, count in causes.most_common(10)):>6} ×  another cause"


def _cause(round: RoundStory) -> str:
    match round.why:
        case reasons.WorkerFailed(node, failure, _):
            return failure_text(failure, node)
        case None:
            return "nothing was seen of an end"
        case why:
            return reason_text(why)


# ---- one round -------------------------------------------------------------------------------------------------------


def _begins(round: RoundStory) -> float:
    """When it is told."""
    known = [round.sealed_at, *round.joined.values(), round.ended_at]
    return round.sealed_at or min((at for at in known if at is not None), default=0.0)


def _beginning(round: RoundStory, before: RoundStory | None, terms: Terms, when: When) -> Iterator[str]:
    number = f"round {round_name(round.key)}"
    if round.sealed_at is None and round.members:
        yield f"{number}  (its beginning was not seen)  {_nodes(round.members)}, master {round.master}"
        return
    if round.sealed_at is None:
        there = _nodes(tuple(round.joined)) if round.joined else "no node"
        yield f"{number}  not formed: {there} had joined, and the job needs at least {terms.min_nodes}"
        return
    workers = f"{round.workers} worker{'s' * (round.workers != 1)}"
    yield f"{number}  {when(round.sealed_at)}  {_nodes(round.members)}, {workers}, master {round.master}"
    yield from (f"  {line}" for line in _waits(round, round.sealed_at, before, terms))


def round_lines(
    round: RoundStory, before: RoundStory | None, terms: Terms, when: When, *, goes_on: bool = True
) -> Iterator[str]:
    """The story of one round. `before`: the round before it. None: there is none, or it is not known. `goes_on`: a
    later round was formed."""
    yield from _beginning(round, before, terms, when)
    yield from _ending(round, terms, when, (0.0, ""), goes_on=goes_on)


def _waits(round: RoundStory, sealed_at: float, before: RoundStory | None, terms: Terms) -> Iterator[str]:
    """Who was waited for, and how long."""
    ended_at = None if before is None else before.ended_at
    if ended_at is not None and sealed_at - ended_at > _NOTEWORTHY_S:
        yield f"{sealed_at - ended_at:.1f} s passed since the round before had ended"
    # A standby has joined while the round before ran. Nobody waited then.
    since = ended_at or 0.0
    by_time = sorted((max(at, since), node) for node, at in round.joined.items() if node in round.members)
    if len(by_time) > 1:
        (first, _), (last, node) = by_time[0], by_time[-1]
        if last - first > _NOTEWORTHY_S:
            yield f"node {node} came last, {last - first:.1f} s after the first, which waited for it"
    if by_time and sealed_at - by_time[-1][0] > _NOTEWORTHY_S and before is None and terms.max_nodes > 1:
        waited_s = sealed_at - by_time[-1][0]
        yield f"then {waited_s:.1f} s passed in which more nodes could have come (--rdzv-conf=last_call_timeout)"


def _slowest_stops(story: Story) -> dict[Key, tuple[float, str]]:
    """By round: how long stopping the workers took on the node where it took longest, and that node."""
    found: dict[Key, tuple[float, str]] = {}
    for node in story.nodes:
        for span in node.spans:
            if span.doing is Doing.STOPPING:
                found[span.key] = max(found.get(span.key, (0.0, "")), (span.ended - span.began, node.node))
    return found


def _ending(round: RoundStory, terms: Terms, when: When, slowest: tuple[float, str], *, goes_on: bool) -> Iterator[str]:
    """`slowest`: how long stopping the workers took where it took longest, and on which node."""
    if round.ended_at is None:
        return
    ran = "" if round.sealed_at is None else f" after {_length(round.ended_at - round.sealed_at)}"
    yield f"  {when(round.ended_at)}  ended{ran}: {_why(round)}"
    yield from (f"    {line}" for line in _details(round))
    if rule := _rule(round, terms, goes_on=goes_on):
        yield f"    {rule}"
    late_s = 0.0 if round.failed_at is None else round.ended_at - round.failed_at
    if late_s > _NOTEWORTHY_S:
        yield f"    it was noticed {late_s:.1f} s after it had happened"
    if slowest[0] > _NOTEWORTHY_S:
        yield f"    stopping the workers took {slowest[0]:.1f} s on node {slowest[1]}"


def _why(round: RoundStory) -> str:
    if round.stopped_by:
        return f"the job was {_stopped_text(round.stopped_by)}"
    if round.outcome is None:
        return "for a reason that was not seen" if round.why is None else reason_text(round.why)
    why = round.outcome.why
    return reason_text(reasons.blamed_failure(why) or why)


def _details(round: RoundStory) -> Iterator[str]:
    """More about the failure that is blamed, and the other failures."""
    blamed = reasons.blamed_failure(round.why if round.outcome is None else round.outcome.why)
    lines = [] if blamed is None else list(hang_lines(blamed))
    if blamed is not None:
        failure = blamed.failure
        yield from (line.strip() for line in lines)
        early = round.early.get(blamed.node.id)
        if early and is_echo(failure):
            yield early_text(sorted(early))
        shown = failure.traceback.splitlines()
        if shown:
            yield "its traceback:" if failure.cause is None else "what it was doing, innermost call first:"
            yield from (f"  {line}" for line in shown)
        elif failure.stderr:
            yield "its last lines of output:"
            yield from (f"  {line}" for line in failure.stderr)
        if failure.log:
            yield f"its output: {failure.log}"
    others = [(node, f) for node, f in round.failures if blamed is None or f != blamed.failure]
    yield from others_text(
        [(node, f) for node, f in others if not lines or not isinstance(f.cause, NoProgress)], blamed
    )


def _rule(round: RoundStory, terms: Terms, *, goes_on: bool) -> str:
    """What was decided, and by which rule of docs/protocol.md. `goes_on`: a later round was formed."""
    most = terms.restarts.max_restarts
    if round.stopped_by:
        return ""
    if round.outcome is not None:
        return _last_rule(round.outcome.why, terms)
    match round.why:
        case reasons.WorkerFailed() if not goes_on:
            return "so all workers were stopped (rule 2)"
        case reasons.WorkerFailed():
            return f"so all workers were stopped and started again: restart {round.spent} of {most} (rule 2)"
        case reasons.NodeGone(_, how, _) if not goes_on and how is not reasons.Departure.REPLACED:
            return ""  # there are no others
        case reasons.NodeGone(_, how, _):
            return f"{_GONE[how].format(silence_s=terms.silence_s)} This costs no restart (rule 2)."
        case reasons.NodesAdmitted():
            wait = f" {terms.settle_s:g} s after the first of them came" if terms.admission is Admission.SOON else ""
            return f"so a new round began with them{wait} (--admission={terms.admission.value}, rule 11)"
        case None:
            return ""
        case why:
            assert_never(why)


def _last_rule(why: reasons.JobEnd, terms: Terms) -> str:
    """Why the job has ended, and by which rule."""
    match why:
        case reasons.BudgetSpent(_, root) if asks_somebody(root.failure):
            return "so the job failed: a worker that waits for input is not started again"
        case reasons.BudgetSpent(most, _):
            return f"so the job failed: a failed worker costs a restart (rule 2), and --max-restarts={most}"
        case reasons.Unstable():
            return "so the job failed: too many rounds in a row ended without a failure of a worker (rule 2)"
        case reasons.TooFewNodes():
            waited = f"{terms.join_timeout_s:g} s (--rdzv-conf=join_timeout)"
            return f"so the job failed: a round waits for enough nodes for {waited} (rule 9)"
        case _:
            return ""


_GONE = {
    reasons.Departure.LOST: "A node that does not beat for {silence_s:g} s counts as lost (rule 6), and the others go"
    " on without it.",
    reasons.Departure.LEFT: "The others go on without a node that has left (rule 11).",
    reasons.Departure.LEAVING: "The others go on without a node that leaves (rule 11).",
    reasons.Departure.REPLACED: "The workers of the agent that was there before are gone, so a new round begins with"
    " the new agent (rule 4).",
}

# ---- tables ----------------------------------------------------------------------------------------------------------


def _table(story: Story) -> Iterator[str]:
    """Where the time went."""
    spent = [(node.node, time_spent(node, story.rounds)) for node in story.nodes]
    total = sum(sum(one.values()) for _, one in spent) or 1.0
    yield "where the time went" + (f" (of {len(spent)} agents together)" if len(spent) > 1 else "")
    for kind in KINDS:
        length = sum(one[kind] for _, one in spent)
        if length <= min(_LEAST_S, total / 200):
            continue
        node, most = max(((node, one[kind]) for node, one in spent), key=lambda pair: pair[1])
        where = f"   most on node {node}: {_length(most)}" if len(spent) > 1 and kind != "training" else ""
        yield f"  {kind:<12} {_length(length):>12}  {100 * length / total:5.1f} %{where}"


def _length(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else time_text(seconds)


def _names(story: Story) -> tuple[str, ...]:
    return tuple(sorted({node.node for node in story.nodes}))


def _nodes(names: Sequence[str]) -> str:
    """`2 nodes (n0, n1)`, or `node n0`, or `40 nodes`"""
    if len(names) == 1:
        return f"node {names[0]}"
    return f"{len(names)} nodes" + (f" ({', '.join(names)})" if len(names) <= _MOST_NAMED else "")
