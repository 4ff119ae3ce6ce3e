"""The composition root: which adapters this run has. What several nodes need is in `several`, loaded only for them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from reknit.adapters.clock import Clock, Signals
from reknit.adapters.journals.memory import MemoryJournal, MemoryLink
from reknit.adapters.workers.processes import Processes
from reknit.core.values import TYPE_CHECKING

from .config import Config
from .driver import Ports
from .options import UsageError

if TYPE_CHECKING:
    from typing import Any

    from reknit.adapters.ports import Console
    from reknit.core.agent import Spec
    from reknit.core.reasons import Reason

SECRETS = ("PET_RDZV_SECRET", "REKNIT_RDZV_SECRET")
"""Variables that are for agents alone."""


class Requests:
    """Signals to the agent; the end of its warden counts as SIGKILL."""

    def __init__(self, clock: Clock, signals: Sequence[int], life_line: int) -> None:
        self._clock = clock
        self._signals = Signals(clock, signals)
        self._life_line = life_line
        os.set_blocking(life_line, False)
        clock.watch(life_line)

    def taken(self) -> Sequence[int]:
        return [*self._signals.taken(), *([signal.SIGKILL] if self._is_cut() else [])]

    def _is_cut(self) -> bool:
        """Once: nobody writes to the life-line, so it is readable only at its end."""
        if self._life_line < 0:
            return False
        try:
            os.read(self._life_line, 1)
        except BlockingIOError:
            return False
        self._clock.unwatch(self._life_line)
        self._life_line = -1
        from .report import say  # slow to import, and rarely needed

        say("the process that started this agent was killed")
        return True


class LogFolder:
    """Where the workers' files go: a folder of this run alone."""

    def __init__(self, config: Config) -> None:
        self._is_wanted = bool(config.log_base or config.streams.redirects or config.streams.tee)
        self.path = ""
        """Empty: there is none. Error files alone are not worth failing for."""
        if config.log_base == os.devnull:
            return  # torchrun's way to say: no files at all
        base = config.log_base or _temporary_base()
        # A run id may hold anything, and decides over no other folder than this one.
        name = f"{config.run_id.replace('/', '_')[:100]}_{os.urandom(4).hex()}"
        try:
            self.path = os.path.abspath(os.path.join(base, name if config.log_base else f"reknit_{name}"))
            os.makedirs(self.path, mode=0o700)
        except OSError as e:
            self.path = ""
            if not self._is_wanted:
                return
            flag = f"--log-dir={base}" if config.log_base else f"temporary folder {base}"
            raise UsageError(f"{flag}: {e.strerror}") from None

    @property
    def notice(self) -> str:
        """Where the output goes, if the user cannot know."""
        return f"the workers' output: {self.path}" if self.path and self._is_wanted else ""

    def close(self) -> None:
        """Remove a folder that nobody asked for: what it held has been reported."""
        if self._is_wanted or not self.path:
            return
        for folder, _, files in os.walk(self.path, topdown=False):
            try:
                for name in files:
                    os.unlink(os.path.join(folder, name))
                os.rmdir(folder)
            except OSError:
                pass  # a folder left behind must not turn a success into a failure


def _temporary_base() -> str:
    base = os.environ.get("TMPDIR", "")
    return base if os.path.isdir(base) else "/tmp"


class Prevented(Exception):
    """This agent cannot begin. The text is one line for its operator."""

    def __init__(self, line: str, why: Reason) -> None:
        super().__init__(line)
        self.why = why


class Wired:
    """One agent's world, and how to let go of it."""

    def __init__(self, spec: Spec, ports: Ports, console: Console, close: Callable[[], None]) -> None:
        self.spec = spec
        self.ports = ports
        self.console = console
        """What the workers' output goes through as well."""
        self.close = close
        """In order and bounded in time: nothing is left."""


def wire(config: Config, environ: Mapping[str, str], life_line: int, log_dir: str, nonce: str) -> Wired:
    """Raises `Prevented`. `nonce`: unique to this agent."""
    clock = Clock()
    requests = Requests(clock, config.signals, life_line)
    if config.rendezvous is not None:
        from .several import wire_several

        return wire_several(config, config.rendezvous, environ, clock, requests, log_dir, nonce)
    workers = worker_processes(config, environ, clock, log_dir)
    link = MemoryLink(MemoryJournal(), clock)
    return Wired(config.spec, Ports(clock, link, workers, requests), workers, workers.close)


def worker_processes(
    config: Config, environ: Mapping[str, str], clock: Clock, log_dir: str, **settings: Any
) -> Processes:
    """Operating-system processes as workers."""
    return Processes(
        clock=clock,
        argv=config.argv,
        env={**{name: value for name, value in environ.items() if name not in SECRETS}, **config.env},
        run_id=config.run_id,
        log_dir=log_dir,
        streams=config.streams,
        # Where nobody adopts orphans, a child of this process may be anybody's.
        own_children=sys.platform == "linux",
        **settings,
    )
