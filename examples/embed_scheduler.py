"""A scheduler of one's own, in asyncio. It runs three jobs at once, and reknit's core decides what becomes of each. A
fourth job can never have its slots, and is refused.

    python examples/embed_scheduler.py

Each job has an agent in this process. Three of its four ports are reknit's. The fourth, `Workers`, is the scheduler's
own: it starts processes as children of this program (docs/embedding.md#scheduler).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from reknit import RestartPolicy, Terms, report_lines
from reknit.adapters.journals.in_memory import MemoryJournal, MemoryLink
from reknit.adapters.runtime.clock import SystemClock
from reknit.adapters.runtime.shells import Wishes, run_async
from reknit.app.report import Reporter
from reknit.core import Agent, Spec
from reknit.core.agent import worker_words as words
from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.events import Event, Started
from reknit.core.job.entries import NodeId
from reknit.core.job.workers import WorkerFailure
from reknit.runtime import Loop, Ports

SLOTS = 5
WAITERS = ThreadPoolExecutor(SLOTS)
FAILS_ONCE = "import os; raise SystemExit(os.environ['RANK'] == '1' and os.environ['ROUND'] == '0')"
JOBS = {  # the code of each worker, the number of workers, and how many restarts the job may spend
    "plain": ("print('trained', flush=True)", 2, 0),
    "shaky": (FAILS_ONCE, 2, 3),
    "broken": ("raise SystemExit(3)", 1, 1),
    "greedy": ("print('trained', flush=True)", SLOTS + 1, 0),
}


class Children:
    """The workers of one job. Implements `reknit.adapters.runtime.ports.Workers`."""

    wakes_at = None

    def __init__(self, code: str, clock: SystemClock) -> None:
        self._code, self._clock = code, clock
        self._running: list[subprocess.Popen[bytes]] = []
        self._ends: list[asyncio.Future[None]] = []
        self._stop: asyncio.Future[None] | None = None
        self._news: list[Event] = [Started(clock.now(), os.urandom(8).hex(), free_port())]

    def start(self, command: words.StartWorkers) -> None:
        made, self._stop = command.assignment, None
        shared = {"WORLD_SIZE": made.world_size, "MASTER_ADDR": made.master_addr, "MASTER_PORT": made.master_port}
        self._running, self._ends, failed = [], [], []
        for worker in made.workers:
            env = {**shared, "RANK": worker.rank, "LOCAL_RANK": worker.local_rank, "ROUND": command.round}
            argv, texts = [sys.executable, "-c", self._code], {name: str(value) for name, value in env.items()}
            try:
                process = subprocess.Popen(argv, env=os.environ | texts, start_new_session=True)
            except OSError as error:
                why = WorkerFailure(worker.local_rank, worker.rank, 127, message=str(error))
                failed.append(words.WorkerExit(worker.local_rank, why))
                continue
            self._running.append(process)
            self._ends.append(asyncio.ensure_future(self._end(command.round, worker.local_rank, worker.rank, process)))
        self._tell(words.WorkersStarted(self._clock.now(), command.round))
        if failed:
            self._tell(words.WorkersExited(self._clock.now(), command.round, tuple(failed)))

    def stop(self, command: StopWorkers) -> None:
        """Another command for the same round shortens the grace."""
        before, self._stop = self._stop, asyncio.ensure_future(self._stopped(command))
        if before is not None:
            before.cancel()

    def renew_port(self) -> None:
        self._tell(words.PortReserved(self._clock.now(), free_port()))

    def events(self, now: float) -> list[Event]:
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        self._signal(signal.SIGKILL)

    async def _end(self, round: int, local_rank: int, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = await asyncio.get_running_loop().run_in_executor(WAITERS, process.wait)
        if self._stop is None:  # the end of a worker that was stopped is no news
            failure = WorkerFailure(local_rank, rank, code, pid=process.pid) if code else None
            self._tell(words.WorkersExited(self._clock.now(), round, (words.WorkerExit(local_rank, failure),)))

    async def _stopped(self, command: StopWorkers) -> None:
        self._signal(command.signal)
        if self._ends:
            await asyncio.wait(self._ends, timeout=command.grace_s)
        self._signal(signal.SIGKILL)
        await asyncio.gather(*self._ends)
        self._tell(words.WorkersStopped(self._clock.now(), command.round, free_port()))

    def _signal(self, signum: int) -> None:
        for process in self._running:
            process.send_signal(signum)  # does nothing to one that was waited for

    def _tell(self, event: Event) -> None:
        self._news.append(event)
        self._clock.wake()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


async def run_job(name: str, code: str, workers: int, max_restarts: int) -> list[str]:
    """The lines that say how the job has ended: for a failed one, which worker failed first, and how."""
    clock = SystemClock()
    link, children = MemoryLink(MemoryJournal(), clock), Children(code, clock)
    terms = Terms(1, 1, RestartPolicy(max_restarts))
    spec = Spec(NodeId("here"), "127.0.0.1", terms, local_world_size=workers, shares_journal=False)
    report = Reporter(lambda line: print(f"{name}: {line}", flush=True), verbose=False)
    try:
        loop = Loop(Agent(spec), Ports(clock, link, children, Wishes(clock)), [report])
        return report_lines(await run_async(loop), restarts=loop.agent.job.restarts)
    finally:
        for part in (children, link, clock):
            part.close()


async def main() -> None:
    turn, slots = asyncio.Lock(), asyncio.Semaphore(SLOTS)

    async def scheduled(name: str, code: str, workers: int, max_restarts: int) -> None:
        if workers > SLOTS:  # it would wait for ever, and all jobs behind it
            print(f"{name}: refused: it needs {workers} slots, and there are {SLOTS}", flush=True)
            return
        async with turn:  # a job waits for all of its slots before the next one takes any
            for _ in range(workers):
                await slots.acquire()
        try:
            for line in await run_job(name, code, workers, max_restarts):
                print(f"{name}: {line}", flush=True)
        finally:
            for _ in range(workers):
                slots.release()

    await asyncio.gather(*(scheduled(name, *job) for name, job in JOBS.items()))


if __name__ == "__main__":
    asyncio.run(main())
