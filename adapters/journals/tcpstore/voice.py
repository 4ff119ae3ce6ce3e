"""What one agent has said, and under which nonce. A journal asks it before it appends an entry.

1. An agent that begins anew has another nonce from then on. Its link may still repeat what it wanted to say before.
   Most entries name only the node and the incarnation, and another process may have both in the other journal. So
   nothing is said until the agent wants an entry with its new nonce.
2. An agent may come to another life of the journal as the same process. What it has found out about others is about
   the life before: it has heard nobody in this one yet. A `Joined` of the life before may have been sealed there, with
   its port. So neither is said before the agent has read this life. If it is still so, the agent wants it said again.
"""

from __future__ import annotations

from reknit.core.job.entries import Entry, Joined, Left, Opened
from reknit.core.job.job import Job
from reknit.core.job.majority import OF_ONE_LIFE, is_over


class Voice:
    """`joined` and `has_left` are about this agent under its present nonce."""

    def __init__(self) -> None:
        self.joined: Joined | None = None
        """The last `Joined` that this agent has said. None: it has said none since it began as a new one."""
        self.has_left = False
        """This agent has said goodbye."""
        self.is_silent = False
        """This agent has begun as a new one, and has said nothing since."""
        self._retired = ""
        """The nonce under which this agent says nothing any more."""

    def may_say(self, entry: Entry, *, is_stranger: bool) -> bool:
        """Note that this agent is about to say this. False: the agent has wanted it for another life of the journal.
        `is_stranger`: the agent has come from another life. When it wanted this entry, it had not folded the fold with
        which this life begins."""
        if self._is_old(entry) or (is_stranger and isinstance(entry, OF_ONE_LIFE)):
            return False
        if isinstance(entry, Joined):
            self.joined = entry
        elif isinstance(entry, Left):
            self.has_left = True
        return True

    def _is_old(self, entry: Entry) -> bool:
        # What an agent wants is said in order. So everything before the first entry with its new nonce is old.
        nonce = entry.nonce if isinstance(entry, Joined) else entry.journal if isinstance(entry, Opened) else ""
        if self.is_silent and nonce not in ("", self._retired):
            self.is_silent = False
        return self.is_silent or (nonce != "" and nonce == self._retired)

    def may_have_workers(self, job: Job) -> bool:
        """`job`: what this agent has read. An agent that has joined a round that is not sealed has no workers."""
        return self.joined is not None and is_over(self.joined, job)

    def begin_anew(self) -> None:
        """What this agent wanted to say until now is not said any more."""
        self._retired = self._retired if self.joined is None else self.joined.nonce
        self.is_silent, self.joined, self.has_left = True, None, False
