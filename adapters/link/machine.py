"""What a link does, as a value: which calls of the journal it makes next, and what it tells the agent.

    link, calls = step(link, input, at)

The inputs are the wishes of the agent (`Append`, `Beat`, `Folded`), and what has become of the calls. Nothing here
waits, has a thread or reads a clock. Threads (`threads.py`) or the simulated cluster carry out the calls.

1. A link has three *lanes*: it reads, it says, and it beats. Each lane has one call under way at most. No lane waits
   for another for longer than a moment (`threads.py`). So a node beats while an append waits for its turn, or for the
   answer of a slow store.
2. A call that has failed is made again after a pause, for as long as it takes. When to stop trying is the agent's
   decision (`Spec.store_timeout_s`), never an adapter's.
3. Entries are said in the order in which the agent wants them said. If the agent wants an entry that is still on its
   way, nothing is added. During an outage the agent says the same things again and again, and the store must not be
   flooded when it is back. An entry is on its way until it was read back. A read that began after the journal had
   taken the entry, and that finds nothing new, shows that the journal has lost the entry. Then the agent may say it
   again.
4. A beat that the agent wants while one is on its way is not added either. If the one on its way fails, the newest
   takes its place. The exception is a beat of another incarnation. It follows at once, because nobody has heard the
   new incarnation yet.
5. While something cannot be said, or no beat gets through, the agent is told nothing that is read. So it sees one
   outage, and not many short ones. Nothing is read meanwhile, and what was under way is read again afterwards, because
   it may be out of date.
6. After an acknowledged beat, the agent is told of the next read even if it is empty. The first beat is the exception.
   The same holds at the end of an outage, and for the first read of another life of the journal. Nothing else tells the
   agent that the journal answers again, or that it has begun anew.
7. After a read that was told, nothing is read before the agent has folded it. Only the fold tells how many entries are
   worth waiting for. So at most one read waits for an agent that does not run.
8. An entry is said in the life of the journal that the agent had folded when it wanted the entry. The journal says
   nothing of another life. When the agent has folded another life, everything that it wanted before is forgotten. It
   wants anew what still holds.
9. After a refusal or the close, no call is made and nothing is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, assert_never

from reknit.core.agent.commands import Append, Beat
from reknit.core.agent.events import Counters, EntriesRead, Event, JournalFailed
from reknit.core.job.entries import Entry, Node
from reknit.core.job.founding import Life
from reknit.core.job.job import Job, lacking

from .messages import (
    Appended,
    BatchRead,
    Beaten,
    Call,
    CallFailed,
    Folded,
    Forbidden,
    Input,
    Lane,
    LinkClosed,
    Read,
    SendBeat,
    SendEntry,
)

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Batch

LOOK_S = 1.0
"""A read that finds nothing returns after this. So the next look is at most this far away, except in a large crowd of
nodes. Seconds."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
_MOST_DOUBLINGS = 10
"""The pause has reached its maximum before it has doubled so often."""


# ---- the link ----


class Saying(NamedTuple):
    queue: tuple[SendEntry, ...] = ()
    """What the journal has not taken yet, in order."""
    underway: frozenset[Entry] = frozenset()
    """Entries that the agent has said and that were not read back yet."""
    taken: frozenset[Entry] = frozenset()
    """Those of them that the journal has taken."""
    tokens: int = 0
    """How many tokens were given away."""
    call: SendEntry | None = None
    """The call that is under way. None: none is."""
    failures: int = 0
    """How often the first of `queue` has failed."""


class Beating(NamedTuple):
    wanted: Beat | None = None
    """The beat that the agent wanted last. None: the last one was acknowledged."""
    call: SendBeat | None = None
    failures: int = 0
    has_beaten: bool = False


class Reading(NamedTuple):
    position: int = 0
    """Where the next read begins: after everything that the agent was told."""
    life: Life = Life()
    """Of what the agent was told last."""
    told: int = 0
    """How many entries the agent was told of."""
    enough_at: int = 0
    """The count from which on something can change for the agent, as far as its fold tells."""
    is_owed: bool = True
    """The next read does not wait for news, and is told even if it is empty."""
    call: Read | None = None
    tells: bool = False
    """The call that is under way is told even if it finds nothing."""
    is_stale: bool = False
    """What the call that is under way finds is not told: something could not be said meanwhile."""
    taken: frozenset[Entry] = frozenset()
    """`Saying.taken` when the call that is under way began."""
    is_told: bool = False
    """The agent was told of a read and has not folded it yet."""
    failures: int = 0


class LinkState(NamedTuple):
    nonce: str
    """Unique to this agent. The tokens of its entries begin with it."""
    look_s: float = LOOK_S
    """A read that finds nothing returns after so many seconds."""
    saying: Saying = Saying()
    beating: Beating = Beating()
    reading: Reading = Reading()
    life: Life = Life()
    """The life of the journal that the agent has folded."""
    news: tuple[Event, ...] = ()
    """What the agent is to be told."""
    is_ended: bool = False

    @property
    def is_stuck(self) -> bool:
        """Something cannot be said, or no beat gets through."""
        return bool(self.saying.failures or self.beating.failures)


class LinkStep(NamedTuple):
    link: LinkState
    calls: tuple[Call, ...]
    """What is to be called now, at most one call for each lane."""


def begun(nonce: str, look_s: float = LOOK_S) -> LinkStep:
    """A new link, and its first read."""
    return _driven(LinkState(nonce, look_s))


def step(link: LinkState, happened: Input, at: float) -> LinkStep:
    """`at`: the time on the agent's clock."""
    if link.is_ended:
        return LinkStep(link, ())  # what was under way at the end may still return
    return _driven(_noted(link, happened, at))


def taken(link: LinkState) -> tuple[LinkState, tuple[Event, ...]]:
    """The link without its news, and the news."""
    return (link._replace(news=()), link.news) if link.news else (link, ())


def _noted(link: LinkState, happened: Input, at: float) -> LinkState:
    match happened:
        case Append(entry):
            return _wanted(link, entry)
        case Beat():
            return link._replace(beating=link.beating._replace(wanted=happened))
        case Folded(job):
            return _folded(link, job)
        case BatchRead(batch):
            return _found(link, batch, at)
        case Appended(is_taken):
            return _appended(link, is_taken=is_taken)
        case Beaten(counts):
            return _beaten(link, counts, at)
        case CallFailed(lane, why, answers):
            return _failed(link, lane, JournalFailed(at, why, answers=answers))
        case Forbidden(refusal, why):
            return link._replace(is_ended=True, news=(*link.news, JournalFailed(at, why, refusal)))
        case LinkClosed():
            return link._replace(is_ended=True)
        case _:
            assert_never(happened)


# ---- saying ----


def _wanted(link: LinkState, entry: Entry) -> LinkState:
    saying = link.saying
    if entry in saying.underway:
        return link
    tokens = saying.tokens + 1
    say = SendEntry(f"{link.nonce}-{tokens}", entry, link.life)
    saying = saying._replace(queue=(*saying.queue, say), underway=saying.underway | {entry}, tokens=tokens)
    return link._replace(saying=saying)


def _appended(link: LinkState, *, is_taken: bool) -> LinkState:
    saying, (say, *rest) = link.saying, link.saying.queue
    underway, taken = saying.underway, saying.taken
    # An earlier try may have succeeded without an answer. Then the entry may have been read back already.
    if say.entry in underway and all(other.entry != say.entry for other in rest):
        underway, taken = (underway, taken | {say.entry}) if is_taken else (underway - {say.entry}, taken)
    after = saying._replace(queue=tuple(rest), underway=underway, taken=taken, call=None, failures=0)
    return _with_read_owed(link._replace(saying=after), saying.failures)


# ---- beating ----


def _beaten(link: LinkState, counts: Mapping[Node, int], at: float) -> LinkState:
    before = link.beating
    call, wanted = before.call, before.wanted
    is_another = call is not None and wanted is not None and call.beat.node != wanted.node
    beating = Beating(wanted if is_another else None, has_beaten=True)
    link = link._replace(beating=beating, news=(*link.news, Counters(at, counts)))
    return _with_read_owed(link, before.failures or before.has_beaten)


# ---- reading ----


def _found(link: LinkState, batch: Batch, at: float) -> LinkState:
    before = link.reading
    reading = before._replace(call=None, tells=False, is_stale=False, taken=frozenset(), failures=0)
    if before.is_stale:
        return link._replace(reading=reading._replace(is_owed=True))
    is_empty = not batch.entries and batch.base is None
    link = link._replace(saying=_read_back(link.saying, batch, before.taken if is_empty else frozenset()))
    reading = reading._replace(position=batch.position, life=batch.life, told=reading.told + len(batch.entries))
    if is_empty and not before.tells and batch.life == before.life:
        return link._replace(reading=reading)
    event = EntriesRead(at, batch.entries, batch.base, batch.life, batch.is_anew)
    return link._replace(reading=reading._replace(is_told=True), news=(*link.news, event))


def _read_back(saying: Saying, batch: Batch, lost: frozenset[Entry]) -> Saying:
    """`lost`: what the journal has taken and does not hold."""
    gone = {e for e in saying.underway if e in batch.entries or e in lost}
    if batch.base is not None:
        gone |= saying.taken  # these entries may be among those that were skipped
    return saying._replace(underway=saying.underway - gone, taken=saying.taken - gone) if gone else saying


def _folded(link: LinkState, job: Job) -> LinkState:
    reading = link.reading._replace(is_told=False, enough_at=link.reading.told + lacking(job))
    if link.life != reading.life:
        # What is under way belongs to the life before, and goes on alone.
        saying = Saying(link.saying.queue[:1] if link.saying.call else (), tokens=link.saying.tokens)
        saying = saying._replace(call=link.saying.call, failures=link.saying.failures if link.saying.call else 0)
        link = link._replace(life=reading.life, saying=saying)
    return link._replace(reading=reading)


def _with_read_owed(link: LinkState, is_owed: object) -> LinkState:
    # The journal answers. So a read that has failed is made again without a pause.
    return link._replace(reading=link.reading._replace(is_owed=True, failures=0)) if is_owed else link


# ---- failures ----


def _failed(link: LinkState, lane: Lane, event: JournalFailed) -> LinkState:
    if not (link.news and isinstance(link.news[-1], JournalFailed)):
        link = link._replace(news=(*link.news, event))  # otherwise the agent has yet to be told of the failure before
    reading = link.reading
    if lane is Lane.READ:
        # The next try must not wait for news.
        failed = reading._replace(call=None, is_stale=False, is_owed=True, failures=reading.failures + 1)
        return link._replace(reading=failed)
    if reading.call is not None:
        link = link._replace(reading=reading._replace(is_stale=True))
    if lane is Lane.BEAT:
        return link._replace(beating=link.beating._replace(call=None, failures=link.beating.failures + 1))
    return link._replace(saying=link.saying._replace(call=None, failures=link.saying.failures + 1))


def _pause_s(failures: int) -> float:
    return min(_FIRST_RETRY_S * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), _LAST_RETRY_S) if failures else 0.0


# ---- which calls are made ----


def _driven(link: LinkState) -> LinkStep:
    if link.is_ended:
        return LinkStep(link, ())
    calls: list[Call] = []
    saying, beating, reading = link.saying, link.beating, link.reading
    if saying.call is None and saying.queue:
        say = saying.queue[0]._replace(pause_s=_pause_s(saying.failures))
        calls.append(say)
        link = link._replace(saying=saying._replace(call=say))
    if beating.call is None and beating.wanted is not None:
        beat = SendBeat(beating.wanted, _pause_s(beating.failures))
        calls.append(beat)
        link = link._replace(beating=beating._replace(call=beat))
    if reading.call is None and not reading.is_told and not link.is_stuck:
        wait_s = 0.0 if reading.is_owed else link.look_s
        least = max(1, reading.enough_at - reading.told)
        read = Read(reading.position, wait_s, least, _pause_s(reading.failures))
        calls.append(read)
        begun = reading._replace(call=read, tells=reading.is_owed, is_owed=False, taken=saying.taken)
        link = link._replace(reading=begun)
    return LinkStep(link, tuple(calls))
