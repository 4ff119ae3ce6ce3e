"""What an agent holds of a keeper that starts, and of one that is ready. The keeper here only notes what it is sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reknit.adapters.keeper.client import keeper_states as standing
from reknit.adapters.keeper.client.keeper_connection import KeeperConnection
from reknit.adapters.keeper.client.keeper_states import ReadyKeeper, StartingKeeper
from reknit.adapters.keeper.protocol import wire
from reknit.adapters.keeper.remote.command import by_command
from reknit.adapters.keeper.remote.pings import PING_S, SILENCE_S
from reknit.adapters.runtime.clock import SystemClock
from tests.support.waiting import until

Sent = Callable[[int], list[str]]


@pytest.fixture
def line(clock: SystemClock, tmp_path: Path) -> Iterator[KeeperConnection]:
    line = KeeperConnection(clock, lambda: by_command(["sh", "-c", f"exec cat > {tmp_path}/sent"]))
    yield line
    line.end()


@pytest.fixture
def sent(tmp_path: Path) -> Sent:
    """A function that waits for so many messages, and returns the kinds of all that came."""

    def kinds(count: int) -> list[str]:
        found = list[str]()

        def has_all() -> bool:
            path = tmp_path / "sent"
            text = path.read_text() if path.exists() else ""
            found[:] = [json.loads(line)["kind"] for line in text.splitlines(keepends=True) if line.endswith("\n")]
            return len(found) >= count

        until(has_all)
        return found

    return kinds


def test_messages_wait_for_the_keeper_and_keep_their_order(line: KeeperConnection, sent: Sent) -> None:
    """A stop that overtook its start would leave workers that nobody stops."""
    keeper = StartingKeeper(line, 0.0, [wire.Say("kept from the last keeper")])
    keeper.tell(wire.Resized())
    ready = keeper.ready(1.0, pings=False)
    ready.tell(wire.Flush())
    assert sent(3) == ["Say", "Resized", "Flush"]


def test_the_fence_comes_before_the_start_of_workers(line: KeeperConnection, sent: Sent) -> None:
    """Workers that were started without it would live on if the agent were suspended now. A fence that has not changed
    is not told again, and a keeper on another host has no use for the time of this one."""
    keeper = StartingKeeper(line, 0.0, [wire.Say("starts the workers")])
    keeper.fence(1.0)
    ready = keeper.ready(1.0, pings=False)
    ready.fence(1.0)
    ready.fence(2.0)
    remote = ReadyKeeper(line, 1.0, pings=True)
    remote.fence(3.0)
    ready.tell(wire.Flush())
    assert sent(4) == ["Fence", "Say", "Fence", "Flush"]


def test_a_keeper_has_its_time_to_become_ready(line: KeeperConnection) -> None:
    """One that hangs while it starts would hang the agent, which wakes at this time to look."""
    keeper = StartingKeeper(line, 5.0, ())
    assert keeper.wakes_at == 5.0 + standing.HELLO_S
    assert not keeper.overdue(keeper.wakes_at - 1.0)
    assert "not ready" in keeper.overdue(keeper.wakes_at)


def test_silence_ends_only_a_keeper_that_pings(line: KeeperConnection) -> None:
    """A keeper on this host says nothing for hours, and its end is seen at once in another way."""
    quiet, remote = (ReadyKeeper(line, 0.0, pings=pings) for pings in (False, True))
    assert not quiet.overdue(1e9)
    assert quiet.wakes_at is None
    assert "nothing was heard" in remote.overdue(SILENCE_S)
    remote.heard(1.0)
    assert not remote.overdue(SILENCE_S)
    assert "nothing was heard" in remote.overdue(1.0 + SILENCE_S)


def test_pings_come_in_their_time(line: KeeperConnection, sent: Sent) -> None:
    """The other side counts silence, too."""
    keeper = ReadyKeeper(line, 0.0, pings=True)
    for now in (0.0, 0.0, PING_S - 1.0, PING_S):
        keeper.heard(now)
        keeper.ping(now)
    assert keeper.wakes_at == 2 * PING_S
    keeper.tell(wire.Flush())
    assert sent(3) == ["Ping", "Ping", "Flush"]


def test_nothing_is_asked_or_granted_twice(line: KeeperConnection, sent: Sent) -> None:
    """Credit that is granted twice fills the memory of a console that nobody reads."""
    keeper = ReadyKeeper(line, 0.0, pings=False)
    keeper.grant()
    for _ in range(3):
        keeper.note_output()
    for _ in range(2):
        keeper.grant()
        keeper.ask_for_flush()
    assert sent(2) == ["Credit", "Flush"]
    keeper.owes_flush = False
    keeper.ask_for_flush()
    assert sent(3) == ["Credit", "Flush", "Flush"]


def test_only_a_keeper_that_was_ready_for_long_has_failed_for_another_reason(line: KeeperConnection) -> None:
    """Otherwise a keeper that fails at once would be replaced for ever, or one failure a day would add up."""
    keeper = ReadyKeeper(line, 7.0, pings=False)
    assert not keeper.was_steady(7.0 + standing._STEADY_S)
    assert keeper.was_steady(8.0 + standing._STEADY_S)
