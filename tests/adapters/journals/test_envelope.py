"""What a journal in a store writes around an entry. It tells who may have written the entry, and for which place."""

from __future__ import annotations

import json
import time

import pytest

from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.history import Prefix
from reknit.adapters.runtime.ports import Refused
from reknit.core.job.entries import FORMAT, Aborted, Entry, Filler, Joined, Node, NodeId, Opened, Succeeded, Terms
from reknit.core.job.fold import fold_all
from reknit.core.job.founding import Life, Line, Offer, Origin
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from reknit.core.text.codec import dumps

ME = Node(NodeId("me"))
SAID = Succeeded(ME, 1)
UGLY = Aborted('"mac":" \n\r\x00 ä \ud800 ","mac":"')
FOLDED = fold_all(Job(), [Opened(Terms(1, 2), "j"), Joined(ME, "n", 0, "h", 1)])
SECRETS = ("", "s", "ä\n", "\udcff")


def refusal(envelope: Envelope, header: bytes) -> Refusal:
    with pytest.raises(Refused) as refused:
        envelope.admit(header)
    assert "\n" not in str(refused.value)
    return refused.value.refusal


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("said", [SAID, UGLY, Filler()])
def test_what_is_wrapped_is_opened_by_another_agent_of_the_job(secret: str, said: Entry) -> None:
    """Whatever the texts hold: in a line of a file, too."""
    record = Envelope("job", secret).wrap("t-1", said, "7")
    assert b"\n" not in record
    assert Envelope("job", secret).open(record, "7") == ("t-1", said)


@pytest.mark.parametrize(("job", "secret", "place"), [("other", "s", "7"), ("job", "t", "7"), ("job", "s", "8")])
def test_a_signature_counts_for_one_job_one_secret_and_one_place(job: str, secret: str, place: str) -> None:
    """A record that is copied from elsewhere was never said here."""
    record = Envelope(job, secret).wrap("t", SAID, place)
    assert Envelope("job", "s").open(record, "7") == ("", Filler())


def test_a_record_names_its_author_its_time_and_what_its_writer_had_read() -> None:
    """People who look at a journal want to know who said something, and when."""
    before = time.time()
    record = Envelope("job", author="node-a pid 7").wrap("t", SAID, "7", "12 ab")
    found = Envelope("job").unwrap(record, "7")
    assert found is not None
    assert found.at is not None
    assert (found.token, found.entry, found.by, found.seen) == ("t", SAID, "node-a pid 7", "12 ab")
    assert before - 1 < found.at < time.time() + 1


def test_readers_of_the_same_records_have_the_same_digest() -> None:
    """Readers that have read something else notice it, as long as they remember the position."""
    one, other, third = Prefix(), Prefix(), Prefix()
    assert not one.contradicts(other.seen)  # nobody has read anything
    for n, record in enumerate((b"a", b"b", b"c"), 1):
        one.extend(record, n)
        third.extend(record if n != 2 else b"B", n)
    other.extend(b"a", 1)
    assert not one.contradicts(other.seen)
    assert not other.contradicts(one.seen)  # a position that is still ahead
    assert one.contradicts(third.seen)
    assert third.contradicts(one.seen)
    assert not Prefix(one.position, one.digest).contradicts(one.seen)
    assert not one.contradicts("")
    for strange in ("x y", "² x", f"{'9' * 5000} x"):
        assert not one.contradicts(strange)
    for n in range(4, 5000):
        one.extend(b"d", n)
    assert not one.contradicts("2 ab")  # forgotten


def test_job_and_place_cannot_be_divided_differently() -> None:
    """The job "a1" with place "2" must not sign for the job "a" with place "12"."""
    record = Envelope("a1", "s").wrap("t", SAID, "2")
    assert Envelope("a", "s").open(record, "12") == ("", Filler())


@pytest.mark.parametrize("secret", ["", "s"])
def test_no_part_of_a_record_is_an_entry_or_ends_the_job(secret: str) -> None:
    """Writers die in the middle of a record. All readers must see the same: nothing."""
    envelope = Envelope("job", secret)
    record = envelope.wrap("t", SAID, "7")
    for end in range(len(record)):
        assert envelope.open(record[:end], "7") == ("", Filler())
    assert envelope.open(record[:20] + b"\x00" * 20, "7") == ("", Filler())
    assert envelope.open(b"\xff" + record, "7") == ("", Filler())
    assert envelope.open(b"[]", "7") == ("", Filler())


@pytest.mark.parametrize("secret", ["", "s"])
def test_a_record_in_which_one_byte_is_changed_is_a_filler(secret: str) -> None:
    """Or who can write into the store could turn round 1 into round 2. Without a secret, a broken disk could."""
    envelope = Envelope("job", secret)
    record = envelope.wrap("t", SAID, "7")
    for i in range(len(record) - 2):
        changed = record[:i] + bytes([record[i] ^ 1]) + record[i + 1 :]
        assert envelope.open(changed, "7") == ("", Filler()), changed


def test_a_record_without_a_signature_counts_only_where_there_is_no_secret() -> None:
    """Leaving the signature out must not be a way in."""
    record = Envelope("job").wrap("t", SAID, "7")
    assert Envelope("job", "s").open(record, "7") == ("", Filler())
    assert Envelope("job").open(record, "7") == ("t", SAID)


@pytest.mark.parametrize("secret", ["", "s"])
@pytest.mark.parametrize(
    "entry",
    [
        '{"kind":"Promoted"}',
        '{"kind":"Succeeded","node":{"kind":"Node","id":"me"},"round":"1"}',
        '{"kind":"Succeeded","round":1}',
        "null",
        dumps(Opened(Terms(silence_s=4.5), "j")).replace("4.5", "NaN"),
    ],
)
def test_what_an_agent_of_the_job_said_and_cannot_be_read_here_ends_the_reader(secret: str, entry: str) -> None:
    """Who can read it folds another job; and a number that is not equal to itself makes no two folds agree."""
    envelope = Envelope("job", secret)
    record = envelope.seal({"token": "t", "entry": json.loads(entry)}, "7")
    with pytest.raises(Refused) as refused:
        envelope.open(record, "7")
    assert refused.value.refusal is Refusal.FORMAT


def test_infinite_waits_survive() -> None:
    """ "For ever" is a wait that an operator may choose."""
    said = Opened(Terms(join_timeout_s=float("inf")), "j")
    envelope = Envelope("job")
    assert envelope.open(envelope.wrap("t", said, ""), "") == ("t", said)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_published_fold_comes_back_with_its_position(secret: str) -> None:
    """Who is far behind folds on from it."""
    record = Envelope("job", secret).wrap_job(12, FOLDED)
    assert Envelope("job", secret).open_fold(record) == (12, FOLDED, "")


def test_a_fold_that_is_not_to_be_trusted_or_read_is_no_fold() -> None:
    """The entries are still there: nothing is worth ending for."""
    envelope = Envelope("job", "s")
    record = envelope.wrap_job(12, FOLDED)
    assert envelope.open_fold(b"") is None
    assert envelope.open_fold(record[:-1]) is None
    assert envelope.open_fold(record.replace(b"12", b"13", 1)) is None
    assert envelope.open_fold(Envelope("job").wrap_job(12, FOLDED)) is None
    assert envelope.open_fold(envelope.wrap("t", SAID, "job")) is None
    assert Envelope("job").open_fold(b'{"position":1,"job":{}}') is None
    assert Envelope("job").open_fold(b'{"position":true,"job":{}}') is None


# ---- the header ----


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("job", ["job", 'a "b"\n', "\udcff"])
def test_a_header_is_admitted_again_and_again(job: str, secret: str) -> None:
    """Every connection and every look begins with it."""
    header = Envelope(job, secret).header()
    assert b"\n" not in header
    envelope = Envelope(job, secret)
    envelope.admit(header)
    envelope.admit(header)


def test_a_journal_in_the_place_of_the_one_before_is_refused() -> None:
    """An empty successor after an outage knows nothing of the job."""
    envelope = Envelope("job")
    envelope.admit(Envelope("job").header())
    assert refusal(envelope, Envelope("job").header()) is Refusal.IDENTITY
    assert refusal(envelope, b"") is Refusal.IDENTITY
    assert refusal(Envelope("job"), b"") is Refusal.IDENTITY


def test_a_header_of_another_journal_can_be_read_before_it_is_taken() -> None:
    """An agent that remembers a journal decides what it does about the one that it finds."""
    envelope = Envelope("job", "s")
    mine = envelope.admit(envelope.header())
    theirs = envelope.read_header(Envelope("job", "s").header())
    assert theirs.life.journal not in ("", mine.life.journal)
    assert envelope.journal == mine.life.journal
    record = envelope.of(theirs).wrap("t", SAID, "7")
    assert envelope.open(record, "7") == ("", Filler()), "each journal has records of its own"
    envelope.take(theirs)
    assert envelope.open(record, "7") == ("t", SAID)


@pytest.mark.parametrize("before", [(), (("", 0),), (("", 0), ("x", 7))])
def test_a_header_names_where_the_journal_goes_on(before: Line) -> None:
    """Every agent compares this with what it has read itself."""
    envelope = Envelope("job", "s")
    journal = envelope.admit(envelope.header()).life.journal
    origin = Origin(Life(journal, "second"), 12, "a digest", len(before), before)
    assert Envelope("job", "s").admit(envelope.header(origin)) == origin


# ---- offers to found the journal again ----

OFFER = Offer(True, 1, 12, "mine")


@pytest.mark.parametrize("secret", SECRETS)
def test_an_offer_is_read_by_all_agents_of_the_job(secret: str) -> None:
    """Whichever journal they remember: they have to agree on the best offer."""
    one, other = Envelope("job", secret), Envelope("job", secret)
    for envelope in (one, other):
        envelope.admit(Envelope("job", secret).header())
    assert other.open_offer(one.wrap_offer(OFFER)) == OFFER


def test_what_no_agent_of_the_job_has_offered_is_no_offer() -> None:
    """Anybody who reaches the store can write there. The job would wait for an agent that there is not."""
    envelope = Envelope("job", "s")
    records = (
        b"",
        b"mine",
        b"{}",
        Envelope("job", "t").wrap_offer(OFFER),
        Envelope("other", "s").wrap_offer(OFFER),
        envelope.wrap_offer(OFFER)[:-3],
        envelope.wrap_offer(OFFER).replace(b"12", b"13"),
        envelope.header(),
        envelope.seal({"has_workers": True, "number": 1, "position": 12}, "offer"),
        envelope.seal({"has_workers": True, "number": True, "position": 12, "name": "n"}, "offer"),
        envelope.seal({"has_workers": True, "number": 1, "position": 1.5, "name": "n"}, "offer"),
    )
    assert [envelope.open_offer(record) for record in records] == [None] * len(records)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("theirs", "mine", "says"),
    [("", "s", "is not signed"), ("s", "", "this node has no --rdzv-secret"), ("s", "t", "another secret")],
)
def test_secrets_that_differ_are_told_apart(theirs: str, mine: str, says: str) -> None:
    """The operator of this node has to know which of the two to mend; and no secret is printed."""
    with pytest.raises(Refused, match=says) as refused:
        Envelope("job", mine).admit(Envelope("job", theirs).header())
    assert refused.value.refusal is Refusal.SECRET


def test_a_header_of_another_format_or_job_or_none_at_all_is_refused() -> None:
    """An older version, a file system that takes "A" for "a", a file that is something else."""
    header = json.loads(Envelope("job").header())
    for other in (FORMAT - 1, FORMAT + 1):
        changed = json.dumps(header | {"format": other}).encode()
        assert refusal(Envelope("job"), changed) is Refusal.FORMAT, other
    assert refusal(Envelope("job"), Envelope("Job").header()) is Refusal.OTHER_JOB


def test_a_damaged_header_is_told_from_one_of_another_version() -> None:
    """Another version of reknit would not help."""
    header = Envelope("job").header()
    strange = [json.dumps(json.loads(header) | {"format": other}).encode() for other in (None, "3", True)]
    for damaged in (b"#!/bin/sh", b"{}", b"\xff", header[:-1], header.replace(b'"mac":"', b'"mac":"0'), *strange):
        assert refusal(Envelope("job"), damaged) is Refusal.IDENTITY, damaged


def test_a_header_that_says_it_is_not_signed_does_not_open_a_signed_journal() -> None:
    """Or who can write into the store could do without the secret."""
    header = Envelope("job", "s").header()
    assert refusal(Envelope("job", "s"), header.replace(b'"signed":true', b'"signed":false')) is Refusal.SECRET
    forged = Envelope("job", "guess").header()
    assert refusal(Envelope("job", "s"), forged) is Refusal.SECRET


def test_what_was_said_in_an_earlier_run_does_not_count_in_this_one() -> None:
    """The same job id and secret, another journal: a recorded `Lost` must not be played again."""
    before, now = Envelope("job", "secret"), Envelope("job", "secret")
    before.admit(before.header())
    now.admit(now.header())
    record = before.wrap("t", Aborted("x"), "5")
    assert before.open(record, "5") == ("t", Aborted("x"))
    assert now.open(record, "5") == ("", Filler())
    assert now.open_fold(before.wrap_job(7, Job())) is None
