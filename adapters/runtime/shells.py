"""Ways to run a loop to its end: in the calling thread, in a thread of its own, and as a coroutine.

Each shell does the same: turn until the ports have nothing to tell, then wait for the clock or for the next deadline.
A shell closes nothing: the caller that made the ports closes them.
"""

from __future__ import annotations

from collections import deque
from signal import SIGTERM
from typing import TYPE_CHECKING

from .threads import Thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.core.agent.commands import Result

    from .loop import Loop
    from .ports import Clock


def run(loop: Loop) -> Result:
    """Run the loop in this thread until the agent ends. Raises what the loop raises: `CannotStart`, or a bug."""
    while loop.result is None:
        if not loop.turn():
            loop.ports.clock.wait(loop.wakes_at)
    return loop.result


def _nothing() -> None:
    """What is done at the end of a loop if nobody asks for anything."""


class LoopThread:
    """Runs a loop in a thread of its own, for a host program that has other things to do, such as a notebook."""

    def __init__(self, loop: Loop, on_end: Callable[[], None] = _nothing) -> None:
        """`on_end`: called in the thread when the loop has ended, with a result or with an error."""
        self._loop = loop
        self._on_end = on_end
        self._error: BaseException | None = None
        # A daemon thread: a program that ends does not wait for its job. The keeper then ends the workers.
        self._thread = Thread(self._run, name=f"reknit {loop.agent.spec.node_id}")

    def start(self) -> None:
        """To be called once. From now on only the thread may call the loop. Other threads may read `loop.result`."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> Result | None:
        """Wait until the agent has ended. None: it has not ended within `timeout_s` seconds. Raises what the loop has
        raised."""
        has_ended = self._thread.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return self._loop.result if has_ended else None

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the thread, and leave what it has raised to `join`."""
        self._thread.wait(timeout_s)

    def _run(self) -> None:
        try:
            run(self._loop)
        except BaseException as error:
            self._error = error  # `join` raises it
        # Whoever made this thread may hold on to it. It is dropped with all that it has, and not by a later collection.
        on_end, self._on_end = self._on_end, _nothing
        on_end()


async def run_async(loop: Loop) -> Result:
    """Run the loop in an asyncio event loop until the agent ends. Raises what the loop raises: `CannotStart`, or a bug.

    The coroutine never blocks the event loop. It needs a clock with a descriptor (see `Clock.fileno`). A coroutine that
    is cancelled leaves no reader and no timer behind. The agent then stands still. Run it again, or close its ports.
    """
    import asyncio

    running, clock = asyncio.get_running_loop(), loop.ports.clock
    woken = asyncio.Event()
    clock_fd = clock.fileno()
    running.add_reader(clock_fd, woken.set)
    try:
        while loop.result is None:
            woken.clear()
            clock.wait(clock.now())  # this does not wait: it takes the wake-ups that have come so far
            if loop.turn():
                await asyncio.sleep(0)  # lets other coroutines run
                continue
            timer = None
            if loop.wakes_at is not None and loop.wakes_at != float("inf"):
                timer = running.call_later(max(0.0, loop.wakes_at - clock.now()), woken.set)
            try:
                await woken.wait()
            finally:
                if timer is not None:
                    timer.cancel()
        return loop.result
    finally:
        running.remove_reader(clock_fd)


class Wishes:
    """Implements `ports.Requests` for a program that runs agents itself. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked: deque[int] = deque()

    def ask(self, signal: int = SIGTERM) -> None:
        """Ask the node to leave. Its workers get `signal` first, and then their grace. A second call shortens the
        grace.
        """
        self._asked.append(signal)
        self._clock.wake()

    def taken(self) -> Sequence[int]:
        taken = []
        while self._asked:
            taken.append(self._asked.popleft())
        return taken
