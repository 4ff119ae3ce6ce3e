"""The bugs that the suite must catch: what the properties are worth.

Numbers are the rules of the protocol (design, section 3). What cannot be planted here:
 3   Waiting for a slow stopper has no line of its own: it is what is left when nobody seals over the expected (rule 1).
     An agent with stuck workers that says no `Left` lingers for the store timeout, and is then lost: late, not wrong.
 5   The gap after which an agent says nothing and renews: with either line removed, thousands of histories stay clean,
     because every `Lost` that it could meet shows in the read that it waits for. Kept by argument.
 6   "Starts anew per incarnation" is the type of `Pulse.heard`, whose keys are incarnations. That no read counts for
     more than two beats matters less than the slack that the check must allow (two beats).
 7   While gathering, whoever is back watches on to the next two that are back: without it k dead in a row are found two
     by two, within the bound of L2 where there are five nodes. That it ends somewhere (`EXPECTED`) shows where there
     are many. `benchmarks/crowd.py` shows both.
 12  Leaving without seeing one's own `Left` only costs the others the silence limit, again within L2. Once closed, an
     outage ends the wait at once, so the store timeout cannot strike. A host that is told to leave while it only waits
     for the others' end, and stays: they end soon, so it is late, not wrong.
 13  A batch is folded by one call: there is no line between its entries.
 14  An echo that is held for ever: its cause is reported, or its node is found lost, and ends the round instead.
 15  Before its first read an agent bears an outage for `join_timeout_s`, not `store_timeout_s`: either ends it.
 16  Which refusal is which is the journal's adapter to know. Nobody opens a job that has succeeded; that the fold would
     refuse it is asked in `test_laws`. That an opener waits for those of the epoch before: S2 is asked within an epoch.
"""

from __future__ import annotations

from .bug import Bug
from .late import LATE

EARLY = (
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
    Bug("death-spends", 2, "restart.judge", " and phase.excuse is None", "", "S4", "setup nodes=2 formed=2\ncrash a"),
    Bug(
        "late-failure-spends",
        2,
        "restart.judge",
        "if isinstance(job.why, WorkerFailed) and phase",
        "if phase.ledger and phase",
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
        "fold._excused",
        " or _has_failed(phase, why.node)",
        "",
        "S4",
        "setup\nslow a\nfail a\nwait 0.4\ncrash a",
        needs_oracle=True,
    ),
    Bug(
        "a-failure-is-blamed-for-a-death",
        2,
        "restart.judge",
        "why = phase.excuse if isinstance(job.why, WorkerFailed) else job.why",
        "why = job.why",
        "S4",
        "setup nodes=2 formed=2\ncrash a",
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
        "joins-unheard",
        5,
        "wanted._joining",
        "if agent.is_renewed and not is_fresh(agent):",
        "if False:",
        "fresh",
        "setup nodes=2 formed=2\nstale a\nwait 7\nwait 7",
    ),
    Bug(
        "alone-and-unheard",
        5,
        "watching.is_beating",
        "agent.joined or agent.is_renewed or serves_on",
        "agent.joined or serves_on",
        "fresh",
        "setup nodes=2 formed=2 max=1\nstale a\nwait 7\nwait 7",
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
        "accuses-after-an-outage-of-all",
        6,
        "watching.spared_until",
        "min(apart_s, RETURN_S)",
        "0.0",
        "silence",
        "setup\noutage\nwait 12\nrestore\nwait 7",
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
    Bug(
        "ring-without-newcomers",
        7,
        "fold._with_new",
        "with_node(job.ring, entry.node, job.seats)",
        "job.ring",
        "L2",
        "setup max=2\ncrash c",
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
)

BUGS = (*EARLY, *LATE)
