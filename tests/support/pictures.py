"""Pages in a real browser, Chromium without a window: what it has made of a page, and in which colours.

told = shown(page, after="note(data.nodes.length)")     runs the script in a copy of the page
told.noted, told.tags, told.texts["title"]
brightness(page, dark=True)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_NOTE = """
const noted = [], strange = [];
function note(value) { noted.push(value); }
addEventListener("error", event => strange.push(event.message));
"""
_SHOW = """
const shown = document.createElement("pre");
shown.id = "noted"; shown.textContent = JSON.stringify([noted, strange]);
document.body.append(shown);
"""


class Document(HTMLParser):
    """A document as the browser has it when all scripts of the page have run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        """Of all elements, in their order."""
        self.attributes: dict[str, dict[str, str | None]] = {}
        """By tag: the attributes of the first element with it."""
        self.texts: dict[str, str] = {}
        """The texts of the elements that have an id, by the id."""
        self._id = ""
        self.feed(html)
        self.close()
        noted, strange = json.loads(self.texts["noted"])
        self.noted: list[Any] = noted
        """What scripts have given to `note`."""
        assert strange == [], "an error in a script of the page"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.setdefault(tag, dict(attrs))
        self._id = dict(attrs).get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        self._id = ""

    def handle_data(self, data: str) -> None:
        if self._id:
            self.texts[self._id] = self.texts.get(self._id, "") + data


def shown(page: Path, *, before: str = "", after: str = "") -> Document:
    """Show a copy of the page. `before` and `after`: scripts that run before and after those of the page."""
    text = page.read_text()
    assert text.count("<script>") == 1, "the page has one script, and nothing of the job is another one"
    text = text.replace("<script>", f"<script>{_NOTE}{before}</script><script>")
    copy = page.with_name(f"copy-of-{page.name}")
    copy.write_text(text.replace("</html>", f"<script>{after}{_SHOW}</script></html>"))
    return Document(_chromium(copy, "--dump-dom").decode())


def brightness(page: Path, *, dark: bool) -> float:
    """How bright the page is on average, from 0 to 255, for a user who wants it dark or light."""
    picture = page.with_name(f"{page.name}.png")
    _chromium(page, f"--blink-settings=preferredColorScheme={int(not dark)}", f"--screenshot={picture}")
    total = count = 0
    for row in _rows(picture.read_bytes()):
        total += sum(row)
        count += len(row)
    return total / count


def _chromium(page: Path, *options: str) -> bytes:
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("Chromium is not installed")
    how = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=800,400"]
    # It makes a socket in its folder, whose path must not be long. Its last processes may still write there.
    with TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as own:
        done = subprocess.run(
            [program, *how, f"--user-data-dir={own}", *options, page.as_uri()],
            check=False,
            env={**os.environ, "TMPDIR": own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _rows(png: bytes) -> Iterator[bytearray]:
    """The rows of a picture in PNG with 8 bits a colour, as Chromium writes it."""
    data, at, width, size = b"", 8, 0, 0
    while at < len(png):
        length, kind = int.from_bytes(png[at : at + 4]), png[at + 4 : at + 8]
        chunk = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, size = int.from_bytes(chunk[:4]), {2: 3, 6: 4}[chunk[9]]
            assert (chunk[8], chunk[12]) == (8, 0), "8 bits, and not interlaced"
        elif kind == b"IDAT":
            data += chunk
        at += length + 12
    raw, length = zlib.decompress(data), width * size
    above = bytearray(length)
    for begin in range(0, len(raw), length + 1):
        row = bytearray(raw[begin + 1 : begin + 1 + length])
        _unfilter(raw[begin], row, above, size)
        yield row
        above = row


def _unfilter(how: int, row: bytearray, above: bytearray, size: int) -> None:
    """`size`: bytes of a point."""
    if how == 0:
        return
    for i in range(len(row)):
        left, up, corner = (row[i - size], above[i], above[i - size]) if i >= size else (0, above[i], 0)
        row[i] = (row[i] + (left, up, (left + up) // 2, _paeth(left, up, corner))[how - 1]) & 255


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda each: abs(guess - each))
