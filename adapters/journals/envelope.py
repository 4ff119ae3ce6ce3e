"""What a journal in a store writes around an entry: JSON, with its token and, if there is a secret, a signature.

    {"token":"f3a1-7","entry":{"kind":"Succeeded",…},"mac":"…64 hex digits…"}

1. A record is signed together with the job's id, the journal's id and the place where the record lies. So it counts in
   no other job, in no later run of this job, and in no other place. (HMAC-SHA256, RFC 2104.)
2. Every agent takes two kinds of record for a `Filler`. A record with a wrong signature was not written by an agent of
   the job. A record that is no JSON object was torn or overwritten.
3. The header is the first record of a journal. It names the journal, so that an agent notices when another journal has
   taken its place. From the header an agent also learns that it has a wrong secret, before it reads an entry.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from functools import lru_cache
from typing import Any

from reknit.adapters.ports import Refused
from reknit.core.job.entries import FORMAT, Entry, Filler
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal
from reknit.core.text.codec import CodecError, decode_entry, dumps
from reknit.core.text.snapshot import freeze, thaw

_MAC = ',"mac":"'


class Envelope:
    """Writes and opens the records of one job."""

    def __init__(self, job: str, secret: str = "") -> None:
        """`job`: the job's id. `secret`: signs the records. Empty: records have no signature, and everybody who can
        reach the store is trusted."""
        self.job = job
        self._secret = _bytes(secret)
        self._journal = ""
        """The id of the journal. Empty until a header was admitted."""

    # ---- entries ----

    def wrap(self, token: str, entry: Entry, place: str) -> bytes:
        return self._signed(f'{{"token":{json.dumps(token)},"entry":{dumps(entry)}}}', place)

    def open(self, record: bytes, place: str) -> tuple[str, Entry]:
        """Token and entry. Raises `Refused` if an agent of this job has written what cannot be read here."""
        text = self._checked(record, place)
        return ("", Filler()) if text is None else _opened(text)

    # ---- the fold of a prefix ----

    def wrap_job(self, position: int, job: Job) -> bytes:
        return self._signed(f'{{"position":{position},"job":{freeze(job)}}}', "job")

    def open_job(self, record: bytes) -> tuple[int, Job] | None:
        """Position and fold. None if the record cannot be used: the reader then reads the entries."""
        text = self._checked(record, "job")
        return None if text is None else _opened_job(text)

    # ---- the header ----

    def header(self) -> bytes:
        """A header for a new journal."""
        data = {"format": FORMAT, "job": self.job, "journal": os.urandom(8).hex(), "signed": bool(self._secret)}
        return self._signed(json.dumps(data, separators=(",", ":")), "header")

    def admit(self, record: bytes) -> None:
        """Check the header that was found in the store. `record`: empty if there is none. Raises `Refused`."""
        header, what = _json(record), f"the journal of job {self.job}"
        is_signed = bool(header.get("signed"))
        if not record:
            raise Refused(Refusal.IDENTITY, f"{what} is gone: its store has lost it; start all agents of the job again")
        if not header:
            raise Refused(
                Refusal.FORMAT, f"{what} has no valid header: another program has written there; use another --rdzv-id"
            )
        if header.get("format") != FORMAT:
            raise Refused(
                Refusal.FORMAT,
                f"{what} has format {header.get('format')}, and this node reads format {FORMAT}: "
                "all nodes need the same version of reknit",
            )
        if is_signed and not self._secret:
            raise Refused(
                Refusal.SECRET, f"{what} is signed, and this node has no --rdzv-secret: give all nodes the same"
            )
        if self._secret and not is_signed:
            raise Refused(Refusal.SECRET, f"{what} is not signed: give --rdzv-secret on all nodes, or on none")
        if self._checked(record, "header") is None:
            raise Refused(
                Refusal.SECRET, f"{what} is signed with another secret (--rdzv-secret): give all nodes the same"
            )
        if header.get("job") != self.job:
            raise Refused(Refusal.OTHER_JOB, f"the place of {what} holds the journal of job {header.get('job')}")
        journal = str(header.get("journal"))
        if self._journal and journal != self._journal:
            raise Refused(
                Refusal.IDENTITY, f"{what} is another one than before: its store was replaced; start all agents again"
            )
        self._journal = journal

    # ---- signatures ----

    def _signed(self, body: str, place: str) -> bytes:
        if not self._secret:
            return body.encode()
        return f'{body[:-1]}{_MAC}{self._mac(body, place)}"}}'.encode()

    def _checked(self, record: bytes, place: str) -> str | None:
        """The record without its signature. None if the signature is wrong."""
        try:
            text = record.decode()
        except UnicodeDecodeError:
            return None
        if not self._secret:
            return text
        body, found, end = text.rpartition(_MAC)
        body += "}"
        if not found or not hmac.compare_digest(end[:-2].encode(), self._mac(body, place).encode()):
            return None
        return body

    def _mac(self, body: str, place: str) -> str:
        # Each part has its length in front, so that no two lists of parts make the same text. Without the journal's id,
        # a record of an earlier run of the job would count again in the same place.
        journal = "" if place == "header" else self._journal
        text = "".join(f"{len(part)}:{part}" for part in (self.job, journal, place)) + body
        return hmac.digest(self._secret, _bytes(text), hashlib.sha256).hex()


@lru_cache(maxsize=4096)
def _opened(text: str) -> tuple[str, Entry]:
    # Remembered, because many agents of one process may read the same records. Entries are values, so they can share.
    data = _json(text)
    if not data:
        return "", Filler()
    try:
        return str(data.get("token")), decode_entry(data.get("entry"))
    except CodecError as e:
        raise Refused(
            Refusal.FORMAT, f"the journal holds an entry that this version of reknit cannot read: {e}"
        ) from None


@lru_cache(maxsize=4)
def _opened_job(text: str) -> tuple[int, Job] | None:
    data = _json(text)
    position = data.get("position")
    try:
        return (position, thaw(data.get("job"))) if type(position) is int else None
    except CodecError:
        return None


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
    return int(text) if text.isdigit() and len(text) < 20 else 0
