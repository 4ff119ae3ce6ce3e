"""What must hold after every step, whatever happens.

The checks are plain functions that raise `Violation`. They ask the oracle what the journal means, and the world what is
true.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from reknit.adapters.simulated.store import RETRY_S
from reknit.adapters.simulated.workers import ECHO
from reknit.app.testing.checked_proc import CheckedProc
from reknit.app.testing.checked_world import CheckedWorld
from reknit.app.testing.violation import demand
from reknit.core.agent import timers
from reknit.core.agent.agent import Agent, Stage
from reknit.core.agent.commands import SIGKILL, SIGTERM, Append, Beat, Command, Finish, StopWorkers
from reknit.core.agent.contact import is_entry_late
from reknit.core.agent.events import EntriesRead, Event, Started, Woken
from reknit.core.agent.lifecycle import sequel
from reknit.core.agent.reasons import JournalRefused, Replaced, StoreLost, TermsDiffer
from reknit.core.agent.states import WorkerState
from reknit.core.agent.step import Step, step
from reknit.core.agent.timers import ECHO_S, PAUSE_S
from reknit.core.agent.worker_words import (
    MOST_AWAITED,
    PortReserved,
    StartWorkers,
    WorkerExit,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.agent.workers import QUICK_S
from reknit.core.job.entries import Admit, Entry, Failed, Joined, Leaving, Left, Lost, Node, Opened, Steady
from reknit.core.job.founding import Origin
from reknit.core.job.job import Closed, Gathering, Job, Running, Unopened, Verdict
from reknit.core.job.reasons import BudgetSpent, Refusal, Unstable, WorkerFailed
from reknit.core.job.restart import Sequel
from reknit.core.job.workers import WorkerFailure

from . import ends, lasting, meaning, prompt, results, rhythm
from .alone import is_alive, starts_alone
from .oracle import Oracle, ranks

SLACK = 1e-6
MOST_SAYINGS = 7
"""Different entries that one agent has a reason to say in one round, besides accusations."""
MOST_LANDED = 6
"""Entries per agent and round when there are no faults: its own, what it announces, and the accusations of one node."""
MOST_WATCHED = 66
BACK_S = 8.0
"""An agent that can reach the store again has said its entries anew, and has read them, after so many seconds."""
SOONER_S = 0.6
"""By how much less than the silence limit a node was silent when it is accused: answers arrive late, unevenly."""


# ---- after every step ------------------------------------------------------------------------------------------------


def after_step(
    world: CheckedWorld, proc: CheckedProc, before: Agent, event: Event, commands: Sequence[Command]
) -> None:
    agent = proc.agent
    wakes_at = timers.next_wake(agent)
    demand(wakes_at is None or wakes_at > agent.at, "wake", f"{proc.name} wants to be woken in the past")
    note(world, proc, before, event)
    has_a_stage(proc)
    stops_in_time(proc)
    keeps_its_causes(proc, before)
    foresees(proc, before, commands)
    rhythm.keeps(world, proc, event)
    for command in commands:
        match command:
            case Append():
                may_say(world, proc, command.entry)
                if isinstance(command.entry, Lost):
                    prompt.may_accuse(proc, before, event, command.entry)
            case Beat():
                demand(len(command.watch) <= MOST_WATCHED, "L3", f"{proc.name} watches {len(command.watch)}")
                rhythm.beats(world, proc, event, command)
            case StartWorkers():
                may_start(world, proc, command)
            case StopWorkers():
                may_stop(world, proc, command)
            case Finish():
                may_finish(world, proc)
    if commands or not world.steps % 8:
        again = step(agent, Woken(agent.at))
        demand(not again.commands, "wake", f"{proc.name}: a second look at nothing new made {again.commands}")
        if not world.steps % 32:
            ignores_other_rounds(proc, again)
        rhythm.is_small(world, proc)
    count = sum(isinstance(c, StartWorkers | StopWorkers) for c in commands)
    demand(count <= 1, "step", f"{proc.name} starts or stops workers more than once in a step")
    if agent.result is not None and proc.spec.hosts_journal:
        ends.host_ends(world, proc)


def ignores_other_rounds(proc: CheckedProc, again: Step) -> None:
    """An event about workers of another round is late, and like any wake-up."""
    agent = proc.agent
    for round in (agent.workers.round - 1, agent.workers.round + 1):
        exits = (WorkerExit(0), WorkerExit(1, WorkerFailure(1, 1, 1)))
        for late in (
            WorkersStarted(agent.at, round),
            WorkersExited(agent.at, round, exits),
            WorkersStopped(agent.at, round, 1, (1,)),
        ):
            demand(step(agent, late) == again, "stop", f"{proc.name} takes {late} for its own")


STAGES = {
    # Stage: whether it has an epoch, and whether this incarnation may have workers alive, and be renewed.
    Stage.STARTING: (False, False, False),
    Stage.READING: (False, False, True),
    Stage.OUTSIDE: (True, False, True),
    Stage.JOINING: (True, False, True),
    Stage.LIVE: (True, True, True),
}


def has_a_stage(proc: CheckedProc) -> None:
    """The table in `Stage`: no other combination exists."""
    agent = proc.agent
    has_epoch, may_work, may_be_renewed = STAGES[agent.stage]
    text = f"{proc.name} is {agent.stage.value}"
    demand((agent.epoch is not None) == has_epoch, "stage", f"{text} in epoch {agent.epoch}")
    demand(may_be_renewed or not agent.is_renewed, "stage", f"{text} and renewed")
    is_own = agent.workers.alive and agent.workers.node == agent.me
    demand(may_work or not is_own, "stage", f"{text} with workers alive")
    may_have = has_epoch and agent.stage is not Stage.JOINING
    demand(may_have or not agent.workers.alive, "stage", f"{text} with workers alive")


def keeps_its_causes(proc: CheckedProc, before: Agent) -> None:
    """No cause to end is taken back. A refusal of the journal comes in the place of another reason to be unable."""
    old, new = before.causes, proc.agent.causes
    for name in ("request", "budget", "unable", "outcome", "stuck"):
        is_kept = bool(getattr(new, name)) or not getattr(old, name)
        demand(is_kept, "causes", f"{proc.name} has lost its cause to end: {getattr(old, name)}")
    is_other = old.unable not in (None, new.unable) and not isinstance(new.unable, JournalRefused)
    demand(not is_other, "causes", f"{proc.name} could take no part: {old.unable}, and now {new.unable}")


def stops_in_time(proc: CheckedProc) -> None:
    """Workers get no longer grace than the latest request to stop allows. Processes that outlive SIGKILL are no
    ordinary end of the workers."""
    workers, request = proc.agent.workers, proc.agent.causes.request
    kill_at = workers.kill_at
    late = request is not None and kill_at is not None and kill_at > request.kill_at + SLACK
    demand(not late, "stop", f"{proc.name} kills its workers later than it was asked to")
    stuck = proc.agent.causes.stuck
    is_odd = stuck and workers.state is not WorkerState.UNHEALTHY
    demand(not is_odd, "stop", f"{proc.name} has the stuck processes {stuck}, and is {workers.state.value}")


def foresees(proc: CheckedProc, before: Agent, commands: Sequence[Command]) -> None:
    """What the agent answers when it is asked what follows is true, in every step."""
    agent, job = proc.agent, proc.agent.job
    starts = any(isinstance(command, StartWorkers) for command in commands)
    demand(not (starts and proc.is_out), "sequel", f"{proc.name} starts workers, though it knew that no round follows")
    answer = sequel(agent)
    demand(answer is Sequel.END or not proc.is_out, "sequel", f"{proc.name} no longer knows that no round follows")
    proc.is_out = answer is Sequel.END
    if answer is Sequel.ROUND:
        proc.foreseen.add((agent.workers.epoch, agent.workers.round))
    for command in commands:
        if isinstance(command, StopWorkers):
            awaits(proc, before, command)
    outcome = job.outcome
    if outcome is not None and isinstance(outcome.why, BudgetSpent | Unstable):
        last = job.epoch, job.round - 1
        demand(last not in proc.foreseen, "sequel", f"{proc.name} has foreseen another round after {last[1]}")
        is_hasty = last in proc.hasty and isinstance(outcome.why, BudgetSpent)
        demand(not is_hasty, "exits", f"{proc.name} has waited for nobody in the last round, {last[1]}")


def awaits(proc: CheckedProc, before: Agent, command: StopWorkers) -> None:
    """The report of a failed job names all who have failed. Before a restart, nobody reads one."""
    agent, has_failed = proc.agent, isinstance(command.why, WorkerFailed)
    if command.await_exits_s:
        # An agent that bears no further failure learns in the same step that no round follows for it.
        is_right = has_failed and command.signal != SIGKILL and sequel(agent) is not Sequel.ROUND
        demand(is_right, "exits", f"{proc.name} waits for exits of round {command.round}: {command.why}")
    elif has_failed and command.signal != SIGKILL and not (before.workers.stopping or agent.causes.request):
        phase = agent.job.phase
        is_unjudged = isinstance(phase, Gathering) and phase.round == command.round + 1 and phase.excuse is None
        if phase == Running(command.round) or is_unjudged:
            proc.hasty.add((agent.workers.epoch, command.round))


def note(world: CheckedWorld, proc: CheckedProc, before: Agent, event: Event) -> None:
    """Remember when this agent learned what the checks ask about."""
    agent = proc.agent
    proc.was_late = is_entry_late(before)
    if isinstance(event, EntriesRead):
        same_job(world, proc)
        proc.read_at = world.now
        if (agent.job.epoch, agent.job.round) != (before.job.epoch, before.job.round):
            proc.ended_at = world.now
    if agent.contact.count > before.contact.count:
        proc.heard_at = world.now
    proc.was_out = proc.was_out or lasting.is_faulty(world, proc)
    proc.was_full = proc.was_full or proc.full
    lasting.note_out(world, proc)
    if agent.causes.unable is not None and before.causes.unable is None:
        proc.bore_s = _bore_s(world, proc)
        out_s = proc.felt(world.now - max(proc.out_at, proc.returns_at))
        is_over = isinstance(agent.causes.unable, StoreLost) and out_s > BACK_S
        is_over = is_over and not world.setup.weather & {"lose", "lag"}
        demand(not is_over, "outage", f"{proc.name} ends for want of the store, which is back for {out_s:.1f} s")
    if agent.causes.outcome is not None and before.causes.outcome is None:
        proc.learned_at = world.now
    if agent.workers.state is WorkerState.FAILED and before.workers.state is not WorkerState.FAILED:
        proc.failed_at = world.now
        if proc.group is not None:
            up_at = proc.group.up_at
            proc.group.was_quick = up_at is None or proc.felt(world.now - up_at) < QUICK_S - SLACK
    if isinstance(event, WorkersStarted) and proc.group is not None and event.round == proc.group.command.round:
        proc.group.up_at = world.now


def same_job(world: CheckedWorld, proc: CheckedProc) -> None:
    """S1, S9: an agent's job is the fold of what it has read, however that was cut into batches."""
    mine, theirs = proc.agent.job, world.read_by(proc)
    demand(mine == theirs and list(mine.live) == list(theirs.live), "S1", f"{proc.name} derives another job")


def may_say(world: CheckedWorld, proc: CheckedProc, entry: Entry) -> None:
    """L3, and what an entry promises to the others."""
    is_new = proc.agent.unread.get(entry, proc.agent.at) == proc.agent.at
    demand(not (proc.agent.contact.gap and is_new), "fresh", f"{proc.name} says {entry} in a gap")
    # A new incarnation forgets what the one before has said, also entries that name no node.
    life = proc.agent.life  # in another life of the journal, everything is said anew
    words = (life, proc.agent.me, entry)
    at = proc.said.get(words)
    resay_s = proc.spec.resay_s
    # An accusation is forgotten between two fresh reads, so it is said with each: once per beat and watcher.
    in_time = at is None or proc.felt(world.now - at) >= resay_s - SLACK
    # One that comes back and is not heard wants nothing said meanwhile, and forgets that it has.
    in_time = in_time or (isinstance(entry, Joined) and proc.agent.is_renewed and proc.was_cut)
    # So does a host whose goodbye has not landed, and that serves others after the job has closed.
    in_time = in_time or (isinstance(entry, Left) and proc.spec.hosts_journal and proc.learned_at is not None)
    demand(in_time, "L3", f"{proc.name} says {entry} again too soon")
    proc.said[words] = world.now
    if isinstance(entry, Joined):
        offer = life, entry.node, entry.round
        first = proc.offers.setdefault(entry.port, offer)
        demand(first == offer, "port", f"{proc.name} offers the port of {first} again, for {offer}")
    job = proc.agent.job
    said = proc.per_round.setdefault((life, job.epoch, job.round, proc.agent.me), set())
    if not isinstance(entry, Lost):
        said.add(entry)
    demand(len(said) <= MOST_SAYINGS, "L3", f"{proc.name} says too much in one round: {said}")
    is_ours = proc.agent.epoch != job.epoch or job.terms == proc.spec.terms  # of an epoch that is over: its goodbye
    demand(is_ours or isinstance(entry, Opened), "terms", f"{proc.name} says {entry} to a job with other terms")
    group = proc.group
    if isinstance(entry, Joined):
        demand(not is_alive(group), "S2", f"{proc.name} says Joined with workers alive")
        quiet = proc.felt(world.now - world.moved.get(entry.node, -1e9))
        heard = not proc.agent.is_renewed or job.is_live(entry.node) or quiet <= proc.spec.terms.silence_s + 1.0
        demand(heard, "fresh", f"{proc.name} comes back unheard for {quiet:.2f} s")
        if isinstance(job.phase, Gathering) and isinstance(job.why, WorkerFailed) and entry.node in job.phase.expected:
            backoff_s = min(world.setup.backoff * 2**job.spent, 4.0) * (job.spent < job.terms.restarts.max_restarts)
            waited_s = proc.felt(world.now - proc.ended_at)
            if group is not None and group.was_quick and job.spent < job.terms.restarts.max_restarts:
                backoff_s = max(backoff_s, PAUSE_S)
            demand(waited_s >= backoff_s - SLACK, "backoff", f"{proc.name} joins again after {waited_s:.2f} s")
    elif isinstance(entry, Left):
        stuck = group is not None and group.is_stuck and bool(entry.stuck)
        demand(not is_alive(group) or stuck, "S2", f"{proc.name} says Left with workers alive")
        told = proc.agent.causes.request is not None and proc.agent.causes.outcome is None and job.is_live(entry.node)
        has_told = any((life, entry.node, Leaving(entry.node)) in proc.said for life in world.lives)
        # A node with stuck processes has said goodbye already. In a gap it says nothing new.
        has_told = has_told or (stuck and at is not None)
        demand(not told or has_told, "order", f"{proc.name} says Left before Leaving")
    elif isinstance(entry, Lost):
        quiet = proc.felt(proc.quiet.get(entry.node, 1e9))
        terms = proc.spec.terms
        demand(entry.node != proc.agent.me, "silence", f"{proc.name} accuses itself")
        demand(job.is_live(entry.by) and job.is_live(entry.node), "silence", f"{entry} is by or about the gone")
        limit = terms.silence_s - SOONER_S
        # An agent that was started again has beaten under the old incarnation, and takes another one soon. Its first
        # counts are not greater than those of the agent before, so they are no news.
        before, count = proc.agent.silence.heard.get(entry.node), proc.counts.get(entry.node, 0)
        beater = world.beaten_by.get(entry.node)
        is_other = beater is not None and world.now - beater.started_at < limit
        # Two processes with one id set the counter in turn, each to its own count. Both may hear no answers.
        is_other = is_other or any(p.twin and p.id == entry.node.id for p in world.procs)
        is_set_back = before is not None and (count < before.count or (count == before.count and is_other))
        demand(quiet >= limit or is_set_back, "silence", f"{proc.name} accuses {entry.node}, silent for {quiet:.2f} s")
        demand(
            not _is_returning(world, proc, entry.node),
            "silence",
            f"{proc.name} accuses {entry.node} after an outage of all",
        )


def _is_returning(world: CheckedWorld, proc: CheckedProc, node: Node) -> bool:
    """It is silent for no other reason than that its link has yet to find out that the store is back."""
    heard_at = min(world.moved.get(node, -1e9), world.now - proc.quiet.get(node, 1e9))  # it may have beaten since
    if world.outage_at - heard_at > 2 * world.setup.terms.beat_s:
        return False  # it was silent before
    if proc.felt(1.0) != 1.0:
        return False  # such a clock may count a short outage, which is no pause, and the time before and after it
    return any(
        p.agent.me == node
        and p.up
        and not (p.suspended or p.cut or p.full or p.refused or p.host in world.stale)
        and world.now < p.returns_at + RETRY_S
        and proc.started_at <= world.outage_at  # one that started since knows nothing of an outage
        for p in world.procs
    )


def _bore_s(world: CheckedWorld, proc: CheckedProc) -> float:
    """For how long this agent has missed a round trip of some kind."""
    if proc.was_out or proc.was_late or proc.was_full:
        return inf  # what it has said may have vanished for long, under more than one incarnation
    return proc.felt(world.now - max(min(proc.read_at, proc.heard_at), proc.started_at))


def may_start(world: CheckedWorld, proc: CheckedProc, command: StartWorkers) -> None:
    """S1, S2, S3."""
    job, me, round = proc.agent.job, proc.agent.me, command.round
    demand(
        isinstance(job.phase, Running) and job.round == round, "S3", f"{proc.name} starts round {round}, not running"
    )
    members = world.sealed.get((proc.agent.life, job.epoch, round))
    demand(members is not None, "S3", f"{proc.name} starts round {round}, which was never sealed")
    if members is None:
        return
    demand(me in {m.node for m in members}, "S3", f"{proc.name} is no member of round {round}")
    made = command.assignment
    mine = [(w.local_rank, w.rank, w.role_rank) for w in made.workers]
    demand(mine == ranks(members, me), "S1", f"{proc.name} derives ranks {mine}, not {ranks(members, me)}")
    head = (members[0].address, members[0].port)
    sizes = (len(members), sum(m.local_world_size for m in members))
    demand((made.master_addr, made.master_port) == head, "S1", f"{proc.name} has another master")
    demand((made.group_world_size, made.world_size) == sizes, "S1", f"{proc.name} has other sizes")
    demand(made.group_rank == [m.node for m in members].index(me), "S1", f"{proc.name} has another group rank")
    same_role = sum(m.local_world_size for m in members if m.role == made.role)
    demand(made.role_world_size == same_role, "S1", f"{proc.name} has another role world size")
    # The bootstrap port is the store's of this round alone: no key of an earlier round can be read there.
    hosted = {g.key for g in world.groups if g.command.assignment.group_rank == 0 and g.hosts == head}
    demand(hosted <= {(job.epoch, round)}, "S1", f"{proc.name}: rounds {hosted} had the same bootstrap port before")
    starts_alone(world, proc, (job.epoch, round), head)
    ports = [t.event.port for t in proc.trace if isinstance(t.event, Started | WorkersStopped | PortReserved)]
    holds = made.group_rank > 0 or made.master_port == ports[-1]
    demand(holds, "port", f"{proc.name} starts workers at port {made.master_port}, and holds {ports[-1]}")
    terms = proc.spec.terms
    quiet = proc.felt(world.now - world.moved.get(me, -1e9))
    limit = terms.silence_s + SLACK if terms.fence_s is None else terms.fence_s
    demand(quiet <= limit, "fresh", f"{proc.name} starts, though it has been silent for {quiet:.2f} s")


def may_stop(world: CheckedWorld, proc: CheckedProc, command: StopWorkers) -> None:
    agent, why, request = proc.agent, command.why, proc.agent.causes.request
    demand(agent.workers.alive, "stop", f"{proc.name} stops workers that it has not")
    demand(command.round == agent.workers.round, "stop", f"{proc.name} stops another round's workers")
    kill_at, latest_s = agent.workers.kill_at, MOST_AWAITED * command.await_exits_s + command.grace_s
    is_noted = kill_at is not None and abs(kill_at - agent.at - latest_s) < SLACK
    demand(is_noted, "stop", f"{proc.name} has not noted when its workers are killed")
    rhythm.has_a_fence(proc, why)
    most_s, signal = proc.spec.grace_s, SIGTERM if request is None else request.signal
    if request is not None and signal == SIGKILL:
        most_s = 0.0
    left_s = command.grace_s
    ok = command.signal == signal and left_s <= most_s + SLACK and (request is not None or left_s >= most_s - SLACK)
    # With a fence they may also be killed at once: `rhythm` asks whether that comes in time.
    ok = ok or (proc.spec.terms.fence_s is not None and (command.signal, left_s) == (SIGKILL, 0.0))
    if isinstance(agent.causes.unable, JournalRefused) and agent.causes.unable.refusal is Refusal.LEFT_BEHIND:
        ok = (command.signal, left_s) == (SIGKILL, 0.0)
    demand(ok, "stop", f"{proc.name} gives its workers {left_s:g} s after signal {command.signal}")
    if isinstance(why, StoreLost):
        bore_s = _bore_s(world, proc)
        demand(bore_s >= proc.spec.store_timeout_s - SLACK, "outage", f"{proc.name} bore an outage for {bore_s:.1f} s")
    elif isinstance(why, WorkerFailed) and why.failure.message == ECHO and why.node == agent.me:
        group = proc.group
        alone = len(agent.job.members) == 1 and group is not None and not group.running
        held_s = proc.felt(world.now - proc.failed_at)
        demand(alone or held_s >= ECHO_S - SLACK, "echo", f"{proc.name} acts on an echo after {held_s:.2f} s")


def may_finish(world: CheckedWorld, proc: CheckedProc) -> None:
    """S5, S7."""
    group, agent = proc.group, proc.agent
    stuck = group is not None and group.is_stuck
    demand(not is_alive(group) or stuck, "S7", f"{proc.name} finishes with workers alive")
    result = agent.result
    demand(result is not None, "S7", f"{proc.name} finishes without a result")
    if result is None:
        return
    if result.state is WorkerState.SUCCEEDED:
        outcome = agent.causes.outcome or agent.job.outcome  # a latecomer of a finished job takes part in no epoch
        ok = outcome is not None and outcome.verdict is Verdict.SUCCEEDED
        demand(ok, "S5", f"{proc.name} reports success of a job that did not succeed")
    if isinstance(result.why, Replaced):
        by = result.why.by
        nonce = next(e.nonce for e in reversed(world.journal) if isinstance(e, Joined) and e.node == by)
        other = next(p for p in world.procs if p.agent.nonce == nonce)
        was_dead = other.dead and other.dead_at <= proc.started_at
        demand(not was_dead, "replaced", f"{proc.name} is replaced by {other.name}, which was dead before it started")
    results.is_true(world, proc, result)
    if isinstance(result.why, TermsDiffer):
        demand(agent.job.terms != proc.spec.terms, "terms", f"{proc.name} ends over terms that are its own")
    if isinstance(result.why, JournalRefused | StoreLost):
        is_refused = isinstance(result.why, JournalRefused)
        either = proc.was_cut or world.store_dead  # out of patience already when it was refused
        ok = is_refused == proc.refused or (proc.refused and either)
        demand(ok, "outage", f"{proc.name} ends with {result.why}, refused: {proc.refused}")
        has_reason = is_refused or either or world.outage or proc.out_at or proc.was_out
        demand(has_reason, "outage", f"{proc.name} ends with {result.why}, though nothing kept it from the store")


# ---- after every entry -----------------------------------------------------------------------------------------------


def _replaces(entry: Joined, before: Job) -> bool:
    old = before.live.get(entry.node.id)
    return old is not None and old.node != entry.node


def after_landing(world: CheckedWorld, entry: Entry, before: Job) -> None:
    job = world.jobs[-1]
    _note_seal(world, job)
    if world.oracle is not None:
        world.oracle.feed(entry)
        meaning.same(job, world.oracle, entry)
    if isinstance(job.phase, Unopened):
        return
    demand(len(set(job.seats.values())) == len(job.seats), "S1", f"two nodes have one seat: {dict(job.seats)}")
    policy = job.terms.restarts
    demand(job.spent <= policy.max_restarts, "S4", "more restarts than the budget")
    if isinstance(entry, Steady) or job.epoch > before.epoch:
        world.steady_round = job.round
    most = policy.max_restarts + policy.max_unspent + (not isinstance(job.phase, Running))
    demand(job.round - world.steady_round <= most, "S4", f"round {job.round} is one too many")
    if isinstance(entry, Lost) and before.is_live(entry.node):
        world.excess += MOST_LANDED  # the work of a fault, and it may come back
    world.excess += isinstance(entry, Steady)  # the ends of many rounds may be forgiven in one
    if isinstance(entry, Joined) and world.was_troubled and _replaces(entry, before):
        world.excess += MOST_LANDED  # for example, a stall made a gap in its beats, and it is another incarnation
    key = job.epoch, job.round
    world.entries[key] += 1
    most = MOST_LANDED * len(world.procs) + world.excess
    demand(world.entries[key] <= most, "L3", f"{world.entries[key]} entries in round {job.round}")
    if isinstance(entry, Joined):
        failed_first(world, entry)
    _note_end(world, entry, before, job)
    if job.epoch == before.epoch:
        costs_what_it_must(world, job, before)
    if (job.epoch, job.spent) == (before.epoch, before.spent) and job.unspent > before.unspent:
        demand(not isinstance(job.why, WorkerFailed), "S4", f"{job.why} is blamed for a round that spent nothing")
    if isinstance(job.phase, Closed):
        ends.closed(world, job, before)
    else:
        demand(not isinstance(before.phase, Closed) or job.epoch > before.epoch, "S6", "closed is for ever")
        spends_are_earned(world, job)


def _note_seal(world: CheckedWorld, job: Job) -> None:
    if isinstance(job.phase, Running) and world.origin is not None:
        world.sealed.setdefault((world.origin.life, job.epoch, job.round), job.members)


def _note_end(world: CheckedWorld, entry: Entry, before: Job, job: Job) -> None:
    if isinstance(before.phase, Running) and isinstance(job.phase, Gathering | Running) and job.round > before.round:
        world.ended_by = entry


def after_founding(world: CheckedWorld, origin: Origin) -> None:
    """The store had lost the journal. What nobody has read is gone, and everybody joins again."""
    job = world.jobs[-1]
    for earlier in world.jobs:
        _note_seal(world, earlier)
    world.excess += 3 * MOST_LANDED * len(world.procs)
    for entry, earlier, later in zip(world.journal, world.jobs, world.jobs[1:], strict=False):
        _note_end(world, entry, earlier, later)
    if not origin.life.name:
        world.groups = [group for group in world.groups if group.running]  # rounds are counted anew
        world.blows = []
    world.outcomes = {epoch: outcome for epoch in range(job.epoch + 1) if (outcome := job.outcome_of(epoch))}
    world.steady_round = min(world.steady_round, job.round)
    if world.oracle is not None:
        world.oracle = Oracle(world.oracle.remembers)
        starts = {o.position for o, _, _ in world.lives.values() if (o.life.name, o.position) in origin.line}
        for position, entry in enumerate(world.journal):
            if position in starts and position:
                world.oracle.move()
            world.oracle.feed(entry)
        if origin.life.name:
            world.oracle.move()
        meaning.same(job, world.oracle, "the journal was founded again")


def failed_first(world: CheckedWorld, entry: Joined) -> None:
    """A node that knows of a failure says so before it joins again: else the job would forget who is to blame."""
    for proc in world.procs:
        workers = proc.agent.workers
        if not proc.up or workers.node != entry.node or workers.epoch != world.jobs[-1].epoch:
            continue
        failed = [e.failure for e in workers.exits.values() if e.failure is not None]
        if workers.round != entry.round - 1 or not failed:
            continue
        said = [
            e.failures
            for e in world.journal
            if isinstance(e, Failed) and (e.node, e.round) == (entry.node, workers.round)
        ]
        ok = any(len(failures) == len(failed) for failures in said)
        demand(ok, "order", f"{proc.name} joins again before it has said that {len(failed)} of its workers failed")


def costs_what_it_must(world: CheckedWorld, job: Job, before: Job) -> None:
    """S4: a failure spends one restart if nobody went, and the end of a round costs one thing."""
    outcome = job.outcome if before.outcome is None else None
    spent = job.spent - before.spent + isinstance(outcome and outcome.why, BudgetSpent)
    unspent = max(0, job.unspent - before.unspent) + isinstance(outcome and outcome.why, Unstable)
    demand(spent + unspent <= 1, "S4", f"one end costs {spent} restarts, and {unspent} that are unspent")
    went = [n for n in before.member_nodes if not job.is_live(n) or n in job.leaving]
    if unspent:
        ok = went or isinstance(world.ended_by, Admit)
        demand(ok, "S4", f"{world.ended_by} ended a round that nobody has left, and spent nothing")
    if spent > 0:
        demand(isinstance(world.ended_by, Failed), "S4", f"{world.ended_by} has spent a restart")


def spends_are_earned(world: CheckedWorld, job: Job) -> None:
    """S4 against the truth: a restart is spent only on a worker that failed by itself, once per round."""
    blown = {g.key for g in world.blows if g.key[0] == job.epoch}
    if world.setup.fence:
        return  # a fence kills workers, whose peers crash: a failure for all that anybody can tell
    demand(job.spent <= len(blown), "S4", f"{job.spent} restarts spent on {len(blown)} rounds in which a worker failed")
