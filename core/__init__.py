"""The judgement of an elastic agent, with no side effects.

A job is the fold of its journal; an agent is a step function.

    fold(job, entry) -> job                     the job that all agents share: rounds, ranks, restarts, outcome
    step(agent, event) -> Step(agent, commands) one node's agent: its workers, what it says, when it must be woken

Read `entries`, `events` and `commands` for the vocabulary, then `step`; docs/protocol.md has the rules by which agents
agree. Words:

job       what a run id names; node: one agent's host; worker: one process; role: a kind of worker
round     one formation of the group, counted from 0; epoch: only for a journal that is used again
member    a node of the sealed round; standby: joined, not a member; seat: a node's sticky place in rank order
seal      a round's membership becomes final
lost      fell silent; left: said goodbye
spend     a restart of the job's budget

Nothing here reads a clock, draws a number, does IO or logs. Time arrives with events, and what an embedder needs is
these modules and `attrs`: neither torch nor psutil.
"""
