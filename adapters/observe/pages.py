"""The pages by which a supervisor learns how an agent is: /healthz, /readyz, /state and /metrics.

    round_trips = RoundTrips(clock, requests)     in the place of the loop's port `Requests`, and an observer
    watch = Watch(agent, clock.now())             an observer of the loop

1. /healthz asks the loop itself. It wakes the clock, and waits until the loop has taken its requests, which the loop
   does in every turn. A loop that hangs does not. Probes that come meanwhile share one round trip.
2. A program may have a second thread, which carries out what the loop decides. Around a call there that must return
   soon, the thread uses `calling`. Then /healthz waits for the return of this call as well.
3. The other pages read frozen values that the observer has kept. They do not touch the loop.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from reknit.adapters.runtime.ports import Clock, Requests
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Command
from reknit.core.agent.events import Event
from reknit.core.text.doing import doing_text, takes_part
from reknit.core.text.picture import agent_picture, job_picture, workers_picture

from .http import Page, Response, line
from .metrics import KIND, Metrics, MetricsObserver, Processes, standings, workers
from .progress_seen import progress_of, with_progress

JSON = "application/json"


class RoundTrips:
    """Implements `ports.Requests` over another one, and notes when the loop asks it. Any thread may call `is_back`,
    `alive_at` and `release`. One thread may use `calling`."""

    def __init__(self, clock: Clock, requests: Requests) -> None:
        self._clock = clock
        self._requests = requests
        self._asked = self._back = 0
        """Numbers of the latest round trip that was asked for, and of the latest one that came back."""
        self._asked_at = 0.0
        """When the latest round trip was asked for, in seconds since 1970."""
        self._called = self._returned = 0
        """Numbers of the latest call that has begun, and of the latest one that has returned. See `calling`."""
        self._called_at = 0.0
        """When the latest call has begun, in seconds since 1970."""
        self._is_over = False
        self._changed = threading.Condition()

    def taken(self) -> Sequence[int]:
        if self._asked != self._back:
            with self._changed:
                self._back = self._asked
                self._changed.notify_all()
        return self._requests.taken()

    def is_back(self, timeout_s: float) -> bool:
        """Ask for a round trip, or take the one that is under way, and wait for it. Wait as well for the return of a
        call that is under way. A loop that has ended is not waited for: it makes no further turn."""
        with self._changed:
            number, call = self._ask(), self._called
            return self._changed.wait_for(
                lambda: (self._is_over or self._back >= number) and self._returned >= call, timeout_s
            )

    def alive_at(self) -> int:
        """When the agent was last known to be alive, in seconds since 1970, and ask its loop again. This is a callback
        as torch's `HealthCheckServer` wants it: it does not wait."""
        with self._changed:
            number, now = self._ask(), time.time()
            loop_at = now if self._is_over or self._back >= number else self._asked_at
            return int(loop_at if self._returned == self._called else min(loop_at, self._called_at))

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A context: something is called on behalf of the loop, and an agent that lives returns from it soon."""
        self._called_at = time.time()
        self._called += 1
        try:
            yield
        finally:
            with self._changed:
                self._returned = self._called
                self._changed.notify_all()

    def __call__(self, before: Agent, event: Event, after: Agent, commands: Sequence[Command]) -> None:
        """As an observer of the loop: after its last step nobody waits for it any more."""
        if after.result is not None:
            self.release()

    def release(self) -> None:
        """End all waits for an answer. Called when the loop has ended or is closed."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _ask(self) -> int:
        if self._asked == self._back:
            self._asked_at = time.time()
            self._asked += 1
            self._clock.wake()
        return self._asked


class Pages:
    """The pages of one agent."""

    def __init__(
        self,
        round_trips: RoundTrips,
        watch: MetricsObserver,
        now: Callable[[], float],
        *,
        timeout_s: float,
        run_id: str,
        about: Mapping[str, object],
        processes: Processes,
    ) -> None:
        """`now`: the clock of the loop. `timeout_s`: an agent that does not answer for so many seconds is hung.
        `run_id`: the name of the job. `about`: what else /state tells of the agent."""
        self._about = about
        self._round_trips = round_trips
        self._watch = watch
        self._now = now
        self._timeout_s = timeout_s
        self._run_id = run_id
        self._processes = processes
        self._metrics = Metrics(watch, now, run_id, processes)

    def by_path(self) -> dict[str, Page]:
        return {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/state": self._state,
            "/metrics": self._metrics_page,
        }

    def _healthz(self, query: Mapping[str, str]) -> Response:
        timeout_s = patience_s(query, self._timeout_s)
        if timeout_s is None:
            return line(400, f"timeout={query['timeout']:.40}: a number of seconds expected")
        if self._round_trips.is_back(timeout_s):
            return line(200, "ok")
        return line(503, f"the agent has not answered within {timeout_s:g} s")

    def _readyz(self, query: Mapping[str, str]) -> Response:
        agent = self._watch.agent
        return line(200 if takes_part(agent) else 503, _clean(doing_text(agent)))

    def _state(self, query: Mapping[str, str]) -> Response:
        agent, counts, own = self._watch.agent, self._watch.counts, self._watch.agent.workers
        parent, pids = self._processes()
        data = {
            "job": {"run_id": self._run_id, **job_picture(agent.job), "nodes": standings(agent.job)},
            "agent": {
                **agent_picture(agent),
                "for_s": round(max(0.0, self._now() - counts.since), 3),
                **self._about,
            },
            "workers": {
                "round": own.round if own.round >= 0 else None,
                "state": own.state.value,
                "count": workers(agent),
                "pids": {str(rank): pid for rank, pid in pids.items()},
                "ranks": with_progress(workers_picture(agent), progress_of(parent)),
            },
        }
        return Response(200, json.dumps(data, indent=1) + "\n", JSON)

    def _metrics_page(self, query: Mapping[str, str]) -> Response:
        return Response(200, self._metrics.text(), KIND)


def patience_s(query: Mapping[str, str], most_s: float) -> float | None:
    """The parameter `timeout` of a query, in seconds, at most `most_s`, which is also the default. None: it is no
    number."""
    try:
        wanted = float(query.get("timeout", most_s))
    except ValueError:
        return None
    return min(wanted, most_s) if 0 <= wanted < float("inf") else None


def _clean(text: str) -> str:
    """One line. The reason of a failure may have several."""
    return " ".join(text.split())
