"""What holds of the functions of the core, whatever they are given."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import reduce
from typing import get_args, get_origin, get_type_hints
from unittest import mock

import pytest
from attrs import evolve, has
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.app.testing.checks import meaning, oracle
from reknit.app.testing.checks.later import later
from reknit.app.testing.checks.shifted import is_time, shifted
from reknit.app.testing.play import play
from reknit.app.testing.script import Script
from reknit.app.testing.weather import scripts
from reknit.core.agent import events, worker_words
from reknit.core.agent.agent import Agent, Contact, Spec
from reknit.core.agent.lifecycle import sequel
from reknit.core.agent.states import WorkerState
from reknit.core.agent.step import step
from reknit.core.agent.timers import next_wake
from reknit.core.agent.worker_words import StartWorkers
from reknit.core.job import entries as said
from reknit.core.job import memory
from reknit.core.job.entries import Entry, Joined, Node, NodeId, Terms
from reknit.core.job.fold import fold, fold_all
from reknit.core.job.hanging import Certainty, blamed
from reknit.core.job.job import Closed, Job
from reknit.core.job.ranks import Members, assign
from reknit.core.job.reasons import Refusal
from reknit.core.job.restart import Sequel
from reknit.core.job.workers import (
    Activity,
    Assignment,
    Collective,
    NoProgress,
    Stance,
    WorkerFailure,
    WorkerRanks,
)

from .journals import PLAUSIBLE
from .planted.bug import Bug, planted

NODES = st.builds(Node, st.sampled_from([NodeId("a"), NodeId("b"), NodeId("c")]), st.integers(0, 2))
ROUNDS = st.integers(0, 3)
FAILURES = st.lists(st.builds(WorkerFailure, st.integers(0, 1), st.integers(0, 3), st.just(1)), max_size=2).map(tuple)
TERMS = Terms(min_nodes=1, max_nodes=3, silence_s=4.0, restarts=said.RestartPolicy(1, max_unspent=3))
JOINED = st.builds(
    Joined,
    NODES,
    st.sampled_from("xy"),
    ROUNDS,
    st.just("host"),
    st.integers(1, 3),
    st.sampled_from("tu"),
    st.integers(1, 2),
    st.none(),
    st.integers(-1, 2),
)
ENTRIES: st.SearchStrategy[Entry] = st.one_of(
    JOINED,
    JOINED,
    st.builds(said.Opened, st.just(TERMS), st.sampled_from("jk"), st.integers(0, 2)),
    st.builds(said.LastCall, ROUNDS),
    st.builds(said.Admit, ROUNDS),
    st.builds(said.Steady, ROUNDS),
    st.builds(said.GaveUp, ROUNDS),
    st.builds(said.Failed, NODES, ROUNDS, FAILURES),
    st.builds(said.Succeeded, NODES, ROUNDS),
    st.builds(said.Lost, NODES, NODES),
    st.builds(said.Leaving, NODES),
    st.builds(said.Left, NODES, st.just(()), st.integers(-1, 2)),
    st.builds(said.Aborted, st.just("because")),
    st.just(said.Filler()),
)
BLIND = st.lists(ENTRIES, max_size=30).map(lambda e: [said.Opened(TERMS, "j"), *e])
JOURNALS = st.one_of(PLAUSIBLE, PLAUSIBLE, PLAUSIBLE, BLIND)


@given(JOURNALS, st.sampled_from((1024, 1, 0)))
def test_fold_agrees_with_the_oracle_on_any_journal(journal: list[Entry], remembers: int) -> None:
    """Total, and the same as the dumb implementation, on entries that no agent would say in that order."""
    job, other = Job(), oracle.Oracle(remembers)
    for entry in journal:
        with mock.patch.object(memory, "REMEMBERED", remembers):
            job = fold(job, entry)
        other.feed(entry)
        meaning.same(job, other, entry)


@given(JOURNALS, ENTRIES)
def test_an_entry_twice_in_a_row_is_the_entry_once(journal: list[Entry], entry: Entry) -> None:
    """The journal is at-least-once. It holds of neighbours; a late copy may find a round that it fits."""
    once = fold(fold_all(Job(), journal), entry)
    assert fold(once, entry) == once


@given(JOURNALS, st.integers(0, 31))
def test_batches_do_not_matter(journal: list[Entry], cut: int) -> None:
    """However a journal is cut into reads, it is the same job."""
    whole = fold_all(Job(), journal)
    assert fold_all(fold_all(Job(), journal[:cut]), journal[cut:]) == whole
    assert repr(fold_all(Job(), journal)) == repr(whole)


@settings(max_examples=100)
@given(PLAUSIBLE, st.integers(1, 31))
def test_rounds_and_epochs_are_only_counted(journal: list[Entry], cut: int) -> None:
    """A job in its thousandth round goes on like a job in its first."""
    job = fold_all(Job(), journal[:cut])
    other = later(job)
    for entry in journal[cut:]:
        if not isinstance(entry, said.Opened):  # it begins again with round 0
            job, other = fold(job, entry), fold(other, later(entry))
            assert other == later(job)


NEW = st.builds(Node, st.sampled_from("abcdef").map(NodeId))
NEWCOMERS = st.builds(Joined, NEW, st.just("x"), ROUNDS, st.just("host"), st.just(1))
GOERS = st.one_of(st.builds(said.Lost, NEW, NEW), st.builds(said.Leaving, NEW), st.builds(said.Left, NEW))


@given(st.integers(1, 6), st.lists(st.one_of(NEWCOMERS, NEWCOMERS, NEWCOMERS, GOERS, ENTRIES), max_size=40))
def test_a_batch_is_folded_like_its_entries_one_by_one(least: int, entries: list[Entry]) -> None:
    """New nodes that join one after another are taken in together."""
    terms = Terms(min_nodes=least, max_nodes=6, restarts=said.RestartPolicy(2, max_unspent=3))
    journal = [said.Opened(terms, "j"), *entries]
    job, other = fold_all(Job(), journal), reduce(fold, journal, Job())
    assert job == other
    assert list(job.live) == list(other.live), "the order in which they came"


MANY = st.integers(said.FEW, 3 * said.FEW)
"""So many entries that a batch does not look through all of them."""
CROWD = MANY.map(lambda n: [Joined(Node(NodeId(f"n{i}")), "x", 0, "host", 1) for i in range(n)])


@given(CROWD, st.lists(st.one_of(NEWCOMERS, GOERS, ENTRIES), max_size=12), ENTRIES)
def test_a_batch_knows_what_it_holds(crowd: list[Entry], others: list[Entry], other: Entry) -> None:
    """A batch of many entries finds one of them, the ids that they name, and the nodes of which they say alike."""
    plain = (*others[::2], *crowd, *others[1::2])
    batch = said.Entries(plain)
    for entry in (*plain, other, *(evolve(joined, round=1) for joined in crowd if isinstance(joined, Joined))):
        assert (entry in batch) == (entry in plain), entry
    told: dict[Node, list[type]] = {}
    for entry in plain:
        if hasattr(entry, "node"):
            told.setdefault(entry.node, []).append(type(entry))
    assert batch.names == {node.id for node in told}
    assert sorted(map(sorted, batch.kinds)) == sorted(
        sorted(node for node in told if told[node] == kind)
        for kind in {tuple(its): its for its in told.values()}.values()
    )


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[Entry], list[Entry]]:
    """A journal whose round runs on some nodes, and what these nodes say when it ends: mostly failures, then mostly
    that they are back, with a few other entries among them."""
    nodes = [Node(NodeId(name)) for name in "abcdef"[: draw(st.integers(2, 6))]]
    terms = Terms(min_nodes=draw(st.integers(1, len(nodes))), max_nodes=6, restarts=said.RestartPolicy(3))
    begun: list[Entry] = [said.Opened(terms, "j"), *(Joined(node, node.id, 0, "host", 1) for node in nodes)]
    begun.append(said.LastCall(0))
    whom = st.sampled_from(nodes)
    failed = st.builds(said.Failed, whom, st.sampled_from((0, 0, 0, 1)), st.just((WorkerFailure(0, 0, 1),)))
    back = whom.flatmap(
        lambda node: st.builds(
            Joined, st.just(node), st.sampled_from((node.id, node.id, "x")), st.sampled_from((1, 1, 1, 0, 2)),
            st.just("host"), st.integers(2, 9), seen=st.integers(-1, 0),
        )
    )  # fmt: skip
    others = st.one_of(
        st.builds(said.Lost, whom, whom), st.builds(said.Leaving, whom), st.builds(said.Left, whom), NEWCOMERS
    )
    ends = draw(st.lists(st.one_of(failed, failed, failed, others, back), max_size=12))
    returns = draw(st.lists(st.one_of(back, back, back, back, others, failed), max_size=20))
    return begun, [*ends, *returns]


@given(crowds())
def test_a_crowd_that_fails_or_comes_back_is_folded_like_its_entries_one_by_one(
    journal: tuple[list[Entry], list[Entry]],
) -> None:
    """A thousand nodes fail of one loss, and come back together. What they say is folded at once."""
    begun, said_since = journal
    job = fold_all(Job(), begun)
    together, apart = fold_all(job, said_since), reduce(fold, said_since, job)
    assert together == apart
    assert list(together.live) == list(apart.live), "the order in which they came"


@given(JOURNALS, ENTRIES, st.sampled_from((1024, 1, 0)))
def test_the_gone_stay_gone_and_closed_is_for_ever(journal: list[Entry], entry: Entry, remembers: int) -> None:
    """Of that epoch: only a new one opens a closed job again, and no epoch brings an incarnation back, nor does it if
    the node is forgotten."""
    with mock.patch.object(memory, "REMEMBERED", remembers):
        before = fold_all(Job(), journal)
        after = fold(before, entry)
    everybody = [Node(NodeId(name), incarnation) for name in "abcd" for incarnation in range(4)]
    assert all(after.is_gone(node) for node in everybody if before.is_gone(node))
    assert all(not after.is_gone(j.node) for j in after.live.values())
    if isinstance(before.phase, Closed) and after.phase != before.phase:
        assert isinstance(entry, said.Opened)
        assert after.epoch == before.epoch + 1
    if after.epoch == before.epoch:
        if not isinstance(entry, said.Steady):  # which forgives
            assert (after.round, after.spent, after.unspent) >= (before.round, before.spent, before.unspent)
        assert all(after.seats.get(node_id, seat) == seat for node_id, seat in before.seats.items())


MEMBERS = st.lists(st.tuples(st.sampled_from("tuv"), st.integers(1, 4)), min_size=1, max_size=6).map(
    lambda nodes: [
        Joined(Node(NodeId(f"n{i}")), "x", 0, f"host{i}", 4000 + i, role, size) for i, (role, size) in enumerate(nodes)
    ]
)


@given(MEMBERS)
def test_ranks_are_dense(members: list[Joined]) -> None:
    """0..W-1, contiguous per node; role ranks 0.. per role."""
    made = [assign(Members(members), m.node) for m in members]
    assert [w.rank for a in made for w in a.workers] == list(range(made[0].world_size))
    for role in {m.role for m in members}:
        ranks = [w.role_rank for a in made if a.role == role for w in a.workers]
        assert ranks == list(range(len(ranks)))
        assert {a.role_world_size for a in made if a.role == role} == {len(ranks)}


@settings(max_examples=100)
@given(MEMBERS)
def test_ranks_are_torchs(members: list[Joined]) -> None:
    """The same numbers as torchelastic's own exchange over a store gives: a job can move between the two."""
    pytest.importorskip("torch")
    for member, theirs in zip(members, _torch_ranks(members), strict=True):
        made = assign(Members(members), member.node)
        mine = [(w.rank, w.role_rank, made.world_size, made.role_world_size) for w in made.workers]
        assert mine == theirs


def _torch_ranks(members: list[Joined]) -> list[list[tuple[int, int, int, int]]]:
    """What torch's agents find out. Its rank 0 computes for all once every key is there, so it goes first."""
    from torch.distributed import HashStore
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec, _RoleInstanceInfo

    store = HashStore()
    store.set_timeout(datetime.timedelta(seconds=5))
    for i, m in enumerate(members):
        store.set(f"torchelastic/role_info/{i}", _RoleInstanceInfo(m.role, i, m.local_world_size).serialize())
    found = []
    for i, m in enumerate(members):
        spec = WorkerSpec(m.role, m.local_world_size, None, entrypoint="x", args=())
        workers = SimpleElasticAgent._assign_worker_ranks(None, store, i, len(members), spec)
        found.append([(w.global_rank, w.role_rank, w.world_size, w.role_world_size) for w in workers])
    return found


JOBS = JOURNALS.map(lambda journal: fold_all(Job(), journal))
TIMES = st.floats(0, 100)
WHY = st.sampled_from([None, WorkerFailure(0, 0, 1), WorkerFailure(0, 0, 1, message="Connection reset by peer")])
EXITS = st.lists(st.builds(worker_words.WorkerExit, st.integers(0, 1), WHY), max_size=2).map(tuple)
ELSEWHERE = Assignment(7, 1, 2, 8, "other", 4, "elsewhere", 1, (WorkerRanks(0, 6, 2), WorkerRanks(1, 7, 3)))
"""Ranks that another rendezvous has decided."""
EVENTS: st.SearchStrategy[events.Event] = st.one_of(
    st.builds(events.EntriesRead, TIMES, st.lists(ENTRIES, max_size=4).map(tuple)),
    st.builds(events.EntriesRead, TIMES, st.just((said.Opened(TERMS, "j"),))),
    st.builds(events.Counters, TIMES, st.dictionaries(NODES, st.integers(0, 5), max_size=3)),
    st.builds(events.EntriesRead, TIMES, st.lists(ENTRIES, max_size=2).map(tuple), JOBS),
    st.builds(events.JournalFailed, TIMES, st.just("why"), st.sampled_from([None, None, *Refusal])),
    st.builds(worker_words.WorkersStarted, TIMES, ROUNDS, st.sampled_from([None, None, ELSEWHERE])),
    st.builds(worker_words.WorkersExited, TIMES, ROUNDS, EXITS),
    st.builds(worker_words.WorkersStopped, TIMES, ROUNDS, st.just(5), st.sampled_from([(), (7,)])),
    st.builds(worker_words.PortReserved, TIMES, st.just(6)),
    st.builds(events.StopRequested, TIMES, st.sampled_from([15, 2, 9])),
    st.builds(events.RestartsLimited, TIMES, st.integers(-1, 2)),
    st.builds(events.Woken, TIMES),
    st.builds(events.Started, TIMES, st.just("x"), st.just(4)),
)


@given(st.lists(EVENTS, max_size=30))
def test_step_is_total(happens: list[events.Event]) -> None:
    """Any event at any time, forwards or backwards: nothing raises, time never goes back, a second look is idle."""
    agent = step(Agent(Spec(NodeId("a"), "host", TERMS)), events.Started(0.0, "x", 4)).agent
    for event in happens:
        made = step(agent, event)
        assert made == step(agent, event)
        assert made.agent.at >= agent.at
        agent = made.agent
        assert next_wake(agent) is None or next_wake(agent) > agent.at
        for at in (agent.at, agent.at - 1.0):
            assert step(agent, events.Woken(at)).commands == ()


def at_work(terms: Terms) -> tuple[events.Event, ...]:
    """They make `a` a member of round 0, whose workers run."""
    return (
        events.Started(0.0, "x", 4),
        events.EntriesRead(0.0, (said.Opened(terms, "j"),)),
        events.EntriesRead(0.0, tuple(evolve(joined, round=0) for joined in BACK)),
        events.Counters(0.0, {Node(NodeId("a")): 1}),
        worker_words.WorkersStarted(0.0, 0),
    )


PEERS = st.sampled_from([Node(NodeId("b")), Node(NodeId("c"))])
BACK = [Joined(Node(NodeId(name)), "x", 1, "host", 4) for name in "abc"]
OF_ROUND_0: st.SearchStrategy[Entry] = st.one_of(
    st.builds(said.Failed, PEERS, st.just(0), st.just((WorkerFailure(0, 1, 1),))),
    st.builds(said.Lost, PEERS, PEERS),
    st.builds(said.Leaving, PEERS),
    st.builds(said.Left, PEERS),
    st.sampled_from(BACK),
)
AFTER_WORK: st.SearchStrategy[events.Event] = st.one_of(
    st.builds(events.EntriesRead, st.just(0.0), st.lists(OF_ROUND_0, min_size=1, max_size=3).map(tuple)),
    st.builds(
        worker_words.WorkersExited,
        st.just(0.0),
        st.just(0),
        st.just((worker_words.WorkerExit(0, WorkerFailure(0, 0, 1)),)),
    ),
    st.builds(worker_words.WorkersStopped, st.just(0.0), st.just(0), st.just(5)),
    st.builds(events.StopRequested, st.just(0.0), st.just(15)),
    st.builds(events.RestartsLimited, st.just(0.0), st.integers(0, 1)),
)


@given(st.integers(0, 1), st.lists(AFTER_WORK, max_size=10))
def test_the_answer_that_no_round_follows_holds(max_restarts: int, happens: list[events.Event]) -> None:
    """Whoever asks an agent what follows a stop may let go of everything when the answer is the end."""
    terms = Terms(min_nodes=1, max_nodes=3, restarts=said.RestartPolicy(max_restarts))
    agent, is_out = Agent(Spec(NodeId("a"), "host", terms)), False
    for event in (*at_work(terms), *happens):
        made = step(agent, event)
        agent = made.agent
        assert not is_out or not any(isinstance(command, StartWorkers) for command in made.commands)
        assert not is_out or sequel(agent) is Sequel.END
        is_out = sequel(agent) is Sequel.END


def test_the_events_at_work_make_workers_run() -> None:
    """The property above begins where something follows."""
    agent = Agent(Spec(NodeId("a"), "host", TERMS))
    for event in at_work(TERMS):
        agent = step(agent, event).agent
    assert (agent.workers.state, agent.workers.alive) == (WorkerState.HEALTHY, True)
    failed = worker_words.WorkersExited(1.0, 0, (worker_words.WorkerExit(0, WorkerFailure(0, 0, 1)),))
    assert sequel(step(agent, failed).agent) is Sequel.ROUND
    limited = step(agent, events.RestartsLimited(1.0, 0)).agent
    assert sequel(step(limited, failed).agent) is Sequel.END


@settings(max_examples=20)  # each of them has hundreds of steps
@given(scripts())
def test_a_clock_may_begin_anywhere(script: Script) -> None:
    """No decision depends on what a time is, only on how far two times are apart."""
    world = play(script, is_ending=False)
    for proc in world.procs:
        agent = Agent(proc.spec)
        for traced in proc.trace:
            now = step(shifted(agent, 0.0), shifted(traced.event, 0.0))
            for by_s in (2.0**20, -(2.0**20)):
                # Before its first event an agent has no time.
                before = shifted(agent, by_s) if agent.nonce else agent
                then = step(before, shifted(traced.event, by_s))
                assert then.commands == now.commands
                assert shifted(then.agent, 0.0) == shifted(now.agent, by_s)
            agent = step(agent, traced.event).agent


def test_a_field_says_whether_it_holds_a_time_or_a_duration() -> None:
    """The law above moves what is called a time."""
    seen, todo = set(), [Agent]
    while todo:
        cls = todo.pop()
        seen.add(cls)
        for name, hint in get_type_hints(cls).items():
            kinds = {hint, *get_args(hint)}
            if get_origin(hint) is not Mapping:
                assert float not in kinds or is_time(name) or name.endswith(("_s", "seconds")), f"{cls.__name__}.{name}"
            todo += [kind for kind in kinds if has(kind) and kind not in seen]
    assert Contact in seen


WAITING = st.builds(
    Activity, st.sampled_from(Stance), st.sampled_from(("all_reduce", "barrier")), st.sampled_from(("a.py:1", "a.py:2"))
)
RECORDS = st.builds(
    Collective, st.just("all_reduce"), st.integers(3, 4), st.sampled_from(("", "", "tp")), st.booleans()
)
ACCUSING = Bug(
    "records-blame",
    14,
    "job.hanging._place",
    "activity.stance is Stance.STOPPED",
    "activity.stance is Stance.STOPPED, activity.collective",
)


@given(st.lists(st.tuples(WAITING, st.none() | RECORDS), min_size=2, max_size=6))
def test_a_flight_record_accuses_nobody(hung: list[tuple[Activity, Collective | None]]) -> None:
    """It may be missing on some nodes, and ranks may stand in different collectives for good reasons."""

    def blame(*, with_records: bool) -> tuple[int, Certainty]:
        seen = [evolve(activity, collective=last if with_records else None) for activity, last in hung]
        worst, hang = blamed(
            WorkerFailure(rank, rank, -9, cause=NoProgress(30.0, 3, activity=each)) for rank, each in enumerate(seen)
        )
        return worst.rank, hang.certainty

    assert blame(with_records=True) == blame(with_records=False)


def test_a_record_that_accuses_is_found() -> None:
    """The law above can fail."""
    with planted(ACCUSING), pytest.raises(AssertionError):
        test_a_flight_record_accuses_nobody()
