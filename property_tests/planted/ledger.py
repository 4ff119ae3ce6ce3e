"""The bugs that the suite must catch: what the properties are worth.

A bug is one changed line of one core function, planted by recompiling that function in its own module's namespace and
putting it wherever the original had been imported. A line that is no longer there fails loudly: replant the bug.

Numbers are the rules of the protocol (design, section 3). What cannot be planted here:
 3   Waiting for a slow stopper has no line of its own: it is what is left when nobody seals over the expected (rule 1).
     An agent with stuck workers that says no `Left` lingers for the store timeout, and is then lost: late, not wrong.
 5   The gap after which an agent says nothing and renews: with either line removed, thousands of histories stay clean,
     because every `Lost` that it could meet shows in the read that it waits for. Kept by argument.
 6   "Starts anew per incarnation" is the type of `Pulse.heard`, whose keys are incarnations. That no read counts for
     more than two beats matters less than the slack that the check must allow (two beats).
 7   "While gathering, watch all expected" shortens a wait only, within the bound of L2.
 12  Leaving without seeing one's own `Left` only costs the others the silence limit, again within L2. Once closed, an
     outage ends the wait at once, so the store timeout cannot strike.
 13  A batch is folded by one call: there is no line between its entries.
 16  A journal with another identity is refused by the journal's adapter: the core only obeys `fatal`. Nobody opens a
     job that has succeeded; that the fold would refuse it is asked in `test_laws`.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest import mock

from attrs import frozen


@frozen
class Bug:
    name: str
    rule: int
    """0: none of the numbered ones, but part of the design."""
    where: str
    """Module and function within the core."""
    old: str
    new: str
    check: str
    """The rule of the check that should catch it, without the help of the oracle where that is possible."""
    hint: str
    """Where to look first: a script, whose seed is varied."""
    needs_oracle: bool = False
    """Every agent draws the same wrong conclusion, which harms nobody: only the second implementation knows."""


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The core with this bug in it."""
    module_name, name = bug.where.split(".")
    module = import_module(f"reknit.core.{module_name}")
    original = getattr(module, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(bug.old) == 1, f"{bug.name}: {bug.old!r} is not once in {bug.where}: plant it anew"
    namespace: dict[str, object] = {}
    code = "from __future__ import annotations\n" + source.replace(bug.old, bug.new)
    exec(compile(code, f"<{bug.name}>", "exec"), vars(module), namespace)
    core = [m for n, m in sys.modules.items() if n.startswith("reknit.core.") and vars(m).get(name) is original]
    with ExitStack() as stack:
        for user in core:
            stack.enter_context(mock.patch.object(user, name, namespace[name]))
        yield


BUGS = (
    Bug(
        "sealed-at-the-maximum",
        1,
        "fold._settled",
        "if phase.expected:",
        "if phase.expected and coming(job) < room(job):",
        "S2",
        "setup max=2\nfail a",
    ),
    Bug(
        "last-call-over-the-expected",
        1,
        "job.can_seal",
        "and not job.phase.expected",
        "",
        "S2",
        "setup\nstuck b\nstop b",
    ),
    Bug(
        "newcomer-before-an-old-seat",
        1,
        "sealing.sealed",
        ", j.node.id not in job.seats",
        "",
        "S1",
        "setup max=2\ntwin c",
        needs_oracle=True,
    ),
    Bug("death-spends", 2, "restart.judge", " and not phase.excused", "", "S4", "setup nodes=2 formed=2\ncrash a"),
    Bug(
        "late-failure-spends",
        2,
        "restart.judge",
        "isinstance(job.why, WorkerFailed)",
        "phase.ledger",
        "S4",
        "setup formed=2\nstart c\nwait 1\ncut b\nwait 2\nmend b",
    ),
    Bug(
        "budget-off-by-one",
        2,
        "restart.judge",
        "job.spent >= policy",
        "job.spent > policy",
        "S4",
        "setup nodes=2 formed=2 budget=0\nfail a",
    ),
    Bug(
        "flapping-for-ever",
        2,
        "restart.judge",
        "job.unspent >= policy.max_unspent",
        "False",
        "S4",
        "setup min=1 budget=0 unspent=0\ncrash a\nwait 12\ncrash b\nwait 12",
    ),
    Bug(
        "failure-then-death-excuses",
        2,
        "fold._departed",
        "phase.excused or not _has_failed(phase, node)",
        "True",
        "S4",
        "setup\nslow a\nfail a\nwait 0.4\ncrash a",
        needs_oracle=True,
    ),
    Bug(
        "stuck-joins-again",
        3,
        "working.stopped",
        "stuck=event.stuck",
        "stuck=()",
        "S2",
        "setup echo=no\nstuck a\nfail b\nwait 12",
    ),
    Bug(
        "old-incarnation-stays",
        4,
        "fold._joined",
        'job = _departed(job, known.node, NodeGone(known.node, "replaced"))',
        "pass",
        "L1",
        "setup\ncrash a\nstart a",
    ),
    Bug(
        "back-from-the-dead",
        4,
        "fold._joined",
        " or job.is_gone(entry.node)",
        "",
        "L1",
        "setup min=3 weather=lag,late,partial seed=273\nstop b\nsettle\nstart b",
    ),
    Bug(
        "any-nonce-will-do",
        4,
        "identity._identified",
        " and known.nonce == agent.nonce",
        "",
        "S2",
        "setup nodes=1 formed=0 min=1\ntwin a\nstart a",
    ),
    Bug(
        "twins-oust-each-other",
        4,
        "identity._identified",
        "return evolve(agent, end=Replaced(known.node))",
        "return _renewed(agent)",
        "L1",
        "setup nodes=2 formed=2\ntwin a",
    ),
    Bug(
        "never-comes-back",
        4,
        "identity._identified",
        "return _renewed(agent) if job.is_gone(me) else agent",
        "return agent",
        "L1",
        "setup\nsuspend a\nwait 7",
    ),
    Bug(
        "private-loss-is-kept-private",
        5,
        "identity.after_private_loss",
        "_renewed(agent) if",
        "agent if",
        "L1",
        "setup nodes=1 formed=0 min=1 fence=yes\nstart a\nwait 12\ncut a\nwait 2",
    ),
    Bug(
        "stale-reader-accuses",
        6,
        "watching.heard",
        " or count <= pulse.count",
        "",
        "silence",
        "setup nodes=2 formed=2\nstale a\nwait 7",
    ),
    Bug(
        "accuses-at-any-time",
        6,
        "step._accusations",
        "if is_fresh_read else ()",
        "",
        "silence",
        "setup\nlose b\nlose c\ncrash a\nwait 7\nwait 4.5",
    ),
    Bug("ring-over-members", 7, "watching.watched", "job.live.values()", "job.members", "L2", "setup max=2\ncrash c"),
    Bug(
        "no-beats-beside-a-standby",
        7,
        "watching.is_beating",
        "not alone or agent.pulse.beat_at is not None",
        "job.terms.max_nodes > 1",
        "L2",
        "setup nodes=2 formed=2 min=1 max=1\ncrash a",
    ),
    Bug(
        "joined-for-any-round",
        8,
        "fold._joined",
        "and entry.round == phase.round",
        "",
        "S2",
        "setup budget=2 echo=no\nagain a\nfail b\nwait 4.5\nslow a\nfail b\nwait 4",
    ),
    Bug(
        "joins-before-it-reports",
        8,
        "wanted._wanted",
        "    else:\n        yield from _joining(agent)",
        "    yield from _joining(agent)",
        "order",
        "setup nodes=2 formed=2\nlose a\nfail a\nwait 7",
    ),
    Bug(
        "short-is-forgotten",
        9,
        "fold._settled",
        "evolve(phase, short=True)",
        "phase",
        "S1",
        "setup nodes=2 formed=2\ncrash b\nwait 7\nstart b\nsettle",
        needs_oracle=True,
    ),
    Bug(
        "gives-up-anyway",
        9,
        "fold._given_up",
        "have >= job.terms.min_nodes",
        "False",
        "S1",
        "setup nodes=2 formed=1 max=3\nlag a\nlag a\nlag a\nwait 7\nwait 2\nwait 1\nstart b",
        needs_oracle=True,
    ),
    Bug(
        "never-gives-up",
        9,
        "deadlines._conditions",
        "yield Timer.GIVE_UP, job.round",
        "pass",
        "L1",
        "setup nodes=2 formed=1\nwait 1",
    ),
    Bug(
        "admits-after-a-success",
        10,
        "job.admissible",
        " or job.succeeded",
        "",
        "S1",
        "setup formed=2\nsucceed a\nwait 0.4\nstart c\nwait 7",
        needs_oracle=True,
    ),
    Bug(
        "first-finisher-wins",
        10,
        "fold._succeeded",
        "job.succeeded == job.member_nodes",
        "job.succeeded",
        "S5",
        "setup\nsucceed a\nwait 1",
    ),
    Bug(
        "lost-success-is-lost",
        10,
        "fold._departed",
        "leaving=job.leaving - {node},",
        "leaving=job.leaving - {node}, succeeded=job.succeeded - {node},",
        "L1",
        "setup nodes=2 formed=2 min=1\nsucceed a\nwait 1\nsuspend a\nwait 7",
    ),
    Bug(
        "never-admits",
        11,
        "deadlines._conditions",
        "yield Timer.ADMIT, job.round",
        "pass",
        "L1",
        "setup formed=2\nstart c",
    ),
    Bug(
        "admits-into-a-full-round",
        11,
        "job.admissible",
        " or len(job.members) >= room(job)",
        "",
        "L1",
        "setup min=1 max=2\nwait 7",
    ),
    Bug(
        "host-leaves-first",
        12,
        "ending._has_said_farewell",
        "if agent.outcome is not None and has_guests(agent):",
        "if False:",
        "host",
        "setup host=yes budget=0\nfail b",
    ),
    Bug(
        "starts-on-a-stale-beat",
        13,
        "working._should_start",
        "and is_fresh(agent)",
        "",
        "fresh",
        "setup nodes=2 formed=2\nslow b\nfail b\nwait 1\nstale a\nsuspend b\nwait 7\nresume b\nwait 1",
    ),
    Bug(
        "no-backoff",
        13,
        "wanted._joining",
        "if not is_due(agent, Timer.BACKOFF):",
        "if False:",
        "backoff",
        "setup backoff=1.0\nfail a\nwait 2",
    ),
    Bug(
        "first-failure-is-blamed",
        14,
        "restart.root_cause_of",
        "next((f for f in failures if not is_echo(f)), failures[0])",
        "failures[0]",
        "S5",
        "setup nodes=2 formed=2 budget=0\nfail a",
    ),
    Bug(
        "no-fence",
        15,
        "watching.is_fenced",
        "at is not None and",
        "False and at is not None and",
        "S2",
        "setup nodes=2 formed=2 min=1 fence=yes echo=no\ncut a\nwait 12",
    ),
    Bug(
        "impatient",
        15,
        "step._out_of_patience",
        " or not is_due(agent, Timer.OUTAGE)",
        "",
        "outage",
        "setup\noutage\nwait 7",
    ),
    Bug(
        "no-patience-ends",
        15,
        "step._out_of_patience",
        "return evolve(agent, end=StoreLost(agent.outage))",
        "return agent",
        "L1",
        "setup host=yes\ncrash a",
    ),
    Bug(
        "latecomer-waits",
        16,
        "identity._taking_part",
        "if job.phase.outcome.verdict is Verdict.SUCCEEDED:",
        "if False:",
        "L1",
        "setup\nfinish\nwait 4.5\nstart a",
    ),
    Bug(
        "no-second-epoch",
        16,
        "wanted._wanted",
        "epoch=job.epoch + 1",
        "epoch=job.epoch",
        "L1",
        "setup budget=0\nfail a\nwait 4.5\nstart a\nstart b",
    ),
    Bug(
        "closed-twice",
        0,
        "fold._closed",
        "isinstance(job.phase, Closed)",
        "False",
        "S6",
        "setup budget=0\nfail a\nwait 0.4\nwait 0.4\nabort",
    ),
    Bug(
        "world-size-counts-nodes",
        0,
        "ranks.assign",
        "world_size=sum(m.local_world_size for m in members)",
        "world_size=len(members)",
        "S1",
        "setup sizes=2",
    ),
    Bug(
        "role-rank-is-rank", 0, "ranks.assign", "role_rank=role_base + i", "role_rank=base + i", "S1", "setup roles=ts"
    ),
    Bug(
        "seat-by-arrival",
        0,
        "sealing.sealed",
        "sorted(chosen, key=lambda j: seats[j.node.id])",
        "chosen",
        "S1",
        "setup hints=1,0",
        needs_oracle=True,
    ),
    Bug(
        "said-once",
        0,
        "wanted.drive_sayings",
        " or agent.at >= at + agent.spec.resay_s",
        "",
        "L1",
        "setup nodes=1 formed=0 min=1 max=1\nstart a\nlose a\nwait 1",
    ),
    Bug(
        "says-it-all-the-time",
        0,
        "wanted.drive_sayings",
        "agent.at >= at + agent.spec.resay_s",
        "True",
        "wake",
        "setup",
    ),
    Bug("wakes-in-the-past", 0, "deadlines.next_wake", " and at > agent.at", "", "wake", "setup"),
    Bug(
        "workers-outlive-the-agent", 0, "ending.drive_end", "if agent.workers.alive:", "if False:", "S7", "setup\nabort"
    ),
    Bug(
        "dice",
        0,
        "working._start",
        "max_restarts=job.terms.restarts.max_restarts",
        "max_restarts=__import__('random').getrandbits(60)",
        "S9",
        "setup",
    ),
)
