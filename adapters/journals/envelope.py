"""What a journal in a store writes around an entry: one line of JSON.

    {"token":"f3a1-7","place":"12","by":"node-a pid 41","at":1795871234.5,"seen":"12 9f2c…","entry":{…},"mac":"…"}

    token   names this append. A call that is repeated has the same token.
    place   where the record lies. In another place it does not count.
    by, at  who wrote it, and when, in seconds of Unix time by the writer's clock. For people and tools. No agent
            decides by them.
    seen    a position up to which the writer had read the journal, and the digest of all records before it (`Prefix`).
            Empty: the writer does not say.
    entry   the entry.
    mac     HMAC-SHA256 (RFC 2104) of the job's id, the journal's id, the place and the text before it. The key is the
            secret.

1. Because of what `mac` covers, a record counts in no other job, in no later run of this job, and in no other place.
   Without a secret the key is empty. Then `mac` protects against damage, and not against people.
2. Every agent takes two kinds of record for a `Filler`. A record with a wrong `mac` was not written by an agent of the
   job, or was damaged. A record that is no JSON object was torn.
3. The header is the first record of a journal. It names the journal, so that an agent notices when another journal has
   taken its place. From the header an agent also learns that it has a wrong secret, before it reads an entry.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Mapping
from copy import copy
from functools import lru_cache
from typing import Any, NamedTuple

from attrs import asdict

from reknit.adapters.runtime.ports import Record, Refused
from reknit.core.job.entries import FORMAT, Entry, Filler
from reknit.core.job.founding import Life, Line, Offer, Origin
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from reknit.core.text.codec import CodecError, decode, dumps
from reknit.core.text.snapshot import freeze, thaw

from .history import LONGEST_NUMBER, read_to

_MAC = ',"mac":"'
_OF_ALL = ("header", "offer")
"""Places of records that are read before it is known which journal counts. Their `mac` covers no journal."""

_DAMAGED = "has a damaged header: another program has written there; use another --rdzv-id"


class Envelope:
    """Writes and opens the records of one job."""

    def __init__(self, job: str, secret: str = "", author: str = "") -> None:
        """`job`: the job's id. `secret`: signs the records. Empty: everybody who can reach the store is trusted.
        `author`: who writes, in words for people. Empty: this process, by its host and pid."""
        self.job = job
        self._author = json.dumps(author or f"{os.uname().nodename} pid {os.getpid()}")
        self._key = _Key(job, _bytes(secret))

    # ---- entries ----

    def wrap(self, token: str, entry: Entry, place: str, seen: str = "") -> bytes:
        """A record of `entry`. Two calls make two records, because the time is in them."""
        head = f'"token":{json.dumps(token)},"place":{json.dumps(place)},"by":{self._author},"at":{time.time():.3f}'
        return self._key.signed(f'{{{head},"seen":{json.dumps(seen)},"entry":{dumps(entry)}}}', place)

    def unwrap(self, record: bytes, place: str) -> Record | None:
        """What the record says. None: no agent of this job has written it here, or it is damaged.

        Raises `Refused` if an agent of this job has written what cannot be read here.
        """
        return _unwrapped(record, place, self._key)

    def open(self, record: bytes, place: str) -> tuple[str, Entry]:
        """Token and entry: a `Filler` where `unwrap` finds nothing. Raises `Refused` like `unwrap`."""
        found = self.unwrap(record, place)
        return ("", Filler()) if found is None else (found.token, found.entry)

    # ---- the fold of a prefix ----

    def wrap_job(self, position: int, job: Job, digest: str = "") -> bytes:
        """`digest`: of all records before `position` (`Prefix.digest`)."""
        return self._key.signed(f'{{"position":{position},"digest":"{digest}","job":{freeze(job)}}}', "job")

    def open_fold(self, record: bytes) -> tuple[int, Job, str] | None:
        """Position, fold and digest. None if the record cannot be used."""
        return _opened_fold(record, self._key)

    # ---- the end of a journal ----

    def wrap_end(self, seen: str) -> bytes:
        """What a writer leaves beside the journal: where the journal ended, and the digest of all before."""
        return self._key.signed(f'{{"seen":{json.dumps(seen)}}}', "end")

    def open_end(self, record: bytes) -> tuple[int, str] | None:
        """Position and digest. None if the record cannot be used."""
        text = self._key.checked(record, "end")
        position, digest = read_to(str(_json(text or "").get("seen")))
        return (position, digest) if position >= 0 else None

    # ---- other values of the store ----

    def seal(self, fields: Mapping[str, object], place: str) -> bytes:
        """A record that is no entry. `place`: tells its kind from others."""
        return self._key.signed(json.dumps(fields, separators=(",", ":")), place)

    def unseal(self, record: bytes, place: str) -> dict[str, Any]:
        """The fields. Empty: no agent of this job has written the record, or it is damaged."""
        text = self._key.checked(record, place)
        return {} if text is None else _json(text)

    # ---- offers to found the journal again ----

    def wrap_offer(self, offer: Offer) -> bytes:
        return self.seal(asdict(offer), "offer")

    def open_offer(self, record: bytes) -> Offer | None:
        """None: no agent of this job has made the offer, or it is damaged."""
        fields = self.unseal(record, "offer")
        kinds = {"has_workers": bool, "number": int, "position": int, "name": str}
        is_whole = fields.keys() == kinds.keys() and all(type(fields[name]) is kind for name, kind in kinds.items())
        return Offer(**fields) if is_whole else None

    # ---- the header ----

    def header(self, origin: Origin = Origin()) -> bytes:
        """A header. `origin`: where the journal goes on. By default the header is that of a new journal."""
        life = origin.life
        journal = life.journal if life.name else os.urandom(8).hex()
        data = {"format": FORMAT, "job": self.job, "journal": journal, "signed": bool(self._key.secret)}
        if life.name:
            data |= {"life": life.name, "position": origin.position, "digest": origin.digest}
            data |= {"number": origin.number, "before": origin.before}
        return self.seal(data, "header")

    @property
    def journal(self) -> str:
        """The id of the journal that was taken. Empty: none was."""
        return self._key.journal

    def of(self, origin: Origin) -> Envelope:
        """For another journal of the same job."""
        other = copy(self)
        other.take(origin)
        return other

    def take(self, origin: Origin) -> None:
        """From now on the records are those of this journal."""
        self._key = self._key._replace(journal=origin.life.journal)

    def admit(self, record: bytes) -> Origin:
        """Check the header that was found in the store, and take its journal. `record`: empty if there is none. Raises
        `Refused`, also if another journal was taken before."""
        origin = self.read_header(record)
        if self._key.journal not in ("", origin.life.journal):
            raise self.is_another()
        self.take(origin)
        return origin

    def is_another(self) -> Refused:
        """The error for a journal that has taken the place of the one that was read before."""
        return Refused(
            Refusal.IDENTITY,
            f"the journal of job {self.job} is another one than before: its store was replaced; start this agent again",
        )

    def read_header(self, record: bytes) -> Origin:
        """Check a header of any journal of the job. `record`: empty if there is none. Raises `Refused`."""
        header, what = _json(record), f"the journal of job {self.job}"
        is_signed = bool(header.get("signed"))
        if not record:
            raise Refused(Refusal.IDENTITY, f"{what} is gone: its store has lost it; start all agents of the job again")
        if type(header.get("format")) is not int:
            raise Refused(Refusal.IDENTITY, f"{what} {_DAMAGED}")
        if header["format"] != FORMAT:
            raise Refused(
                Refusal.FORMAT,
                f"{what} has format {header['format']}, and this node reads format {FORMAT}: "
                "all nodes need the same version of reknit",
            )
        if is_signed and not self._key.secret:
            raise Refused(
                Refusal.SECRET, f"{what} is signed, and this node has no --rdzv-secret: give all nodes the same"
            )
        if self._key.secret and not is_signed:
            raise Refused(Refusal.SECRET, f"{what} is not signed: give --rdzv-secret on all nodes, or on none")
        if header.get("job") != self.job:
            raise Refused(Refusal.OTHER_JOB, f"the place of {what} holds the journal of job {header.get('job')}")
        if self._key.checked(record, "header") is None:
            if not is_signed:
                raise Refused(Refusal.IDENTITY, f"{what} {_DAMAGED}")
            raise Refused(
                Refusal.SECRET, f"{what} is signed with another secret (--rdzv-secret): give all nodes the same"
            )
        try:
            return _origin(header)
        except (KeyError, TypeError, ValueError):
            raise Refused(Refusal.IDENTITY, f"{what} {_DAMAGED}") from None


class _Key(NamedTuple):
    """What records are signed with."""

    job: str
    secret: bytes
    journal: str = ""
    """The id of the journal. Empty until a header was admitted."""

    def signed(self, body: str, place: str) -> bytes:
        return f'{body[:-1]}{_MAC}{self._mac(body, place)}"}}'.encode()

    def checked(self, record: bytes, place: str) -> str | None:
        """The record without its `mac`. None if that is wrong."""
        try:
            text = record.decode()
        except UnicodeDecodeError:
            return None
        body, found, end = text.rpartition(_MAC)
        body += "}"
        if not found or not hmac.compare_digest(end[:-2].encode(), self._mac(body, place).encode()):
            return None
        return body

    def _mac(self, body: str, place: str) -> str:
        # Each part has its length in front, so that no two lists of parts make the same text. Without the journal's id,
        # a record of an earlier run of the job would count again in the same place.
        journal = "" if place in _OF_ALL else self.journal
        text = "".join(f"{len(part)}:{part}" for part in (self.job, journal, place)) + body
        return hmac.digest(self.secret, _bytes(text), hashlib.sha256).hex()


def glimpsed(record: bytes) -> Record | None:
    """What a record says, whoever has written it: for tools that have no secret. None: it is no record.

    Raises `Refused` like `unwrap`."""
    body, found, _ = record.decode(errors="replace").rpartition(_MAC)
    return _opened(body + "}") if found else None


def is_of_this_format(header: bytes) -> bool:
    """Whether this version of reknit reads journals with this header. It may be signed with any secret."""
    return _json(header).get("format") == FORMAT


@lru_cache(maxsize=4096)
def _unwrapped(record: bytes, place: str, key: _Key) -> Record | None:
    # Remembered, because many agents of one process may read the same records. Entries are values, so they can share.
    text = key.checked(record, place)
    return None if text is None else _opened(text)


def _opened(text: str) -> Record | None:
    data = _json(text)
    if not data:
        return None
    by, at, seen = data.get("by"), data.get("at"), data.get("seen")
    try:
        entry = decode(data.get("entry"), Entry)
    except CodecError as e:
        raise Refused(
            Refusal.FORMAT, f"the journal holds an entry that this version of reknit cannot read: {e}"
        ) from None
    return Record(entry, str(data.get("token")), str(by or ""), at if isinstance(at, float) else None, str(seen or ""))


@lru_cache(maxsize=4)
def _opened_fold(record: bytes, key: _Key) -> tuple[int, Job, str] | None:
    # Remembered as well. The fold of a thousand nodes is so long that even its `mac` takes time.
    data = _json(key.checked(record, "job") or "")
    position = data.get("position")
    try:
        return (position, thaw(data.get("job")), str(data.get("digest", ""))) if type(position) is int else None
    except CodecError:
        return None


def _origin(header: Mapping[str, Any]) -> Origin:
    """Raises KeyError, TypeError or ValueError if a field is missing or is none. Without a secret, anybody can have
    written it."""
    life = Life(str(header["journal"]), str(header.get("life", "")))
    if not life.name:
        return Origin(life)
    before: Line = tuple((str(name), int(position)) for name, position in header["before"])
    return Origin(life, int(header["position"]), str(header["digest"]), int(header["number"]), before)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # a command line or an environment may hold any bytes


def _json(text: str | bytes) -> dict[str, Any]:
    try:
        data = json.loads(text, parse_constant=_constant)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _constant(name: str) -> object:
    # NaN stays text, which no field takes. NaN is not equal to itself, so no two folds that hold it would be equal.
    return name if name == "NaN" else float(name)


def number(text: bytes) -> int:
    """A number that a store holds. It has no signature, so that anybody may have written it. 0 if it is no number."""
    return int(text) if is_number(text) else 0


def is_number(text: bytes) -> bool:
    """Whether it is a number that an agent may have written."""
    return text.isdigit() and len(text) < LONGEST_NUMBER
