"""What a journal in a store writes around an entry: JSON, with its token and, if there is a secret, a signature.

    {"token":"f3a1-7","entry":{"kind":"Succeeded",…},"mac":"…64 hex digits…"}

1. A record is signed together with the job's id, the journal's and the *place* where it lies, so it counts in no other
   job, in no later run of this one, and in no other place. (HMAC-SHA256, RFC 2104.)
2. A record with a wrong signature, or that is no JSON object at all (torn, overwritten), was not written by an agent of
   the job: it counts as a `Filler`, for every agent alike. Whose secret is wrong finds out by the header, before
   anything is read.
3. The header is the first thing that a journal holds. It names the journal, so that an empty successor is known.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from functools import lru_cache
from typing import Any

from reknit.core.codec import CodecError, decode_entry, dumps
from reknit.core.entries import FORMAT, Entry, Filler
from reknit.core.job import Job
from reknit.core.reasons import Refusal
from reknit.core.snapshot import freeze, thaw

from .ports import Refused

_MAC = ',"mac":"'


class Envelope:
    """Writes and opens the records of one job."""

    def __init__(self, job: str, secret: str = "") -> None:
        """`secret`: empty if the network is trusted."""
        self.job = job
        self._secret = _bytes(secret)
        self._journal = ""
        """The id of the journal, once a header has been seen."""

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
        """None if it cannot be used: the entries themselves are still there."""
        text = self._checked(record, "job")
        return None if text is None else _opened_job(text)

    # ---- the header ----

    def header(self) -> bytes:
        """A header for a new journal."""
        data = {"format": FORMAT, "job": self.job, "journal": os.urandom(8).hex(), "signed": bool(self._secret)}
        return self._signed(json.dumps(data, separators=(",", ":")), "header")

    def admit(self, record: bytes) -> None:
        """Check the header of the journal that is there; empty: there is none. Raises `Refused`."""
        header, what = _json(record), f"the journal of job {self.job}"
        is_signed = bool(header.get("signed"))
        if not record:
            raise Refused(Refusal.IDENTITY, f"{what} is gone: its store has lost it")
        if not header:
            raise Refused(Refusal.FORMAT, f"{what} does not begin with a header: something else has written there")
        if header.get("format") != FORMAT:
            raise Refused(Refusal.FORMAT, f"{what} has format {header.get('format')}, and this version reads {FORMAT}")
        if is_signed and not self._secret:
            raise Refused(Refusal.SECRET, f"{what} is signed: it takes --rdzv-secret")
        if self._secret and not is_signed:
            raise Refused(Refusal.SECRET, f"{what} is not signed, and here is a secret (--rdzv-secret)")
        if self._checked(record, "header") is None:
            raise Refused(Refusal.SECRET, f"{what} is signed with another secret (--rdzv-secret)")
        if header.get("job") != self.job:
            raise Refused(Refusal.OTHER_JOB, f"in the place of {what} is that of job {header.get('job')}")
        journal = str(header.get("journal"))
        if self._journal and journal != self._journal:
            raise Refused(Refusal.IDENTITY, f"{what} is another one than before: its store was replaced")
        self._journal = journal

    # ---- signatures ----

    def _signed(self, body: str, place: str) -> bytes:
        if not self._secret:
            return body.encode()
        return f'{body[:-1]}{_MAC}{self._mac(body, place)}"}}'.encode()

    def _checked(self, record: bytes, place: str) -> str | None:
        """The record without its signature; None if that is wrong."""
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
        # Lengths in front, so that no two make the same text. The journal's id: or what was said in an earlier run of
        # the job would count again, in the same place.
        journal = "" if place == "header" else self._journal
        text = "".join(f"{len(part)}:{part}" for part in (self.job, journal, place)) + body
        return hmac.digest(self._secret, _bytes(text), hashlib.sha256).hex()


@lru_cache(maxsize=4096)
def _opened(text: str) -> tuple[str, Entry]:
    # Remembered, as entries are values: many agents in one process (an embedder's, a benchmark's) read the same ones.
    data = _json(text)
    if not data:
        return "", Filler()
    try:
        return str(data.get("token")), decode_entry(data.get("entry"))
    except CodecError as e:
        raise Refused(Refusal.FORMAT, f"the journal holds what this version cannot read: {e}") from None


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
    return name if name == "NaN" else float(name)  # left as text it fits nowhere: no two folds of it would be equal


def number(text: bytes) -> int:
    """What a store holds as a number, unsigned; 0 if it is none: whoever can write there may have."""
    return int(text) if text.isdigit() and len(text) < 20 else 0
