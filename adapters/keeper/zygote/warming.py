"""The zygote of one keeper, from one to the next: when one is started, and what is said about it.

1. The agent asks for a zygote when it begins, so the zygote imports while the nodes meet. Another one takes its place
   if it has ended, or if a file that it has imported has changed.
2. Workers that it cannot fork start cold. Nothing fails because there is no zygote.
3. A zygote that ends because of something harmful is followed by one that leaves this out. After `_MOST_PASSES` of
   them, and after `_TRIES` that have ended in another way before they were ready, the workers stay cold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from signal import Signals
from typing import TYPE_CHECKING, Any

from reknit.adapters.keeper.common.guard import Guard
from reknit.adapters.keeper.common.run_folder import working_folder
from reknit.adapters.keeper.common.spawn import spawn
from reknit.adapters.keeper.protocol.wire import Warm

from .commandline import NotWarm, folders_of, parts_of
from .zygote import NotForked, Zygote, ZygoteFailed

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Clock

READY_S = 120.0
"""Time until everything is imported, with all zygotes that it takes. Seconds."""
_PATIENCE_S = 10.0
"""A round that waits for longer says so. Seconds."""
_MOST_PASSES = 6
_TRIES = 3
_SHOWN = 3
"""So many modules that are left out are named. With `-v`: all."""


class Warming:
    """What a keeper has for warm workers. Without it, all workers start cold."""

    def __init__(
        self,
        warm: Warm,
        env: Mapping[str, str],
        *,
        telling: Collection[str],
        clock: Clock,
        guard: Guard,
        given_back: Collection[Signals],
        is_abandoned: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        """Starts a zygote. `env`: the environment with which that of every worker begins. `telling`: the variables that
        a worker gets when its round begins. The other arguments are those of `Processes`."""
        self._env = dict(env)
        self._telling = sorted(telling)
        self._clock = clock
        self._guard = guard
        self._given_back = given_back
        self._is_abandoned = is_abandoned
        self._say = say
        self._zygote: Zygote | None = None
        self._warm = warm
        self._left_out: dict[str, str] = {}
        """By module: why."""
        self._told: set[str] = set()
        """What is left out and was named before."""
        self._first: list[str] = []
        """Modules that are imported before all others."""
        self._passes = 0
        self._failures = 0
        self._began_at = 0.0
        """When the first zygote was started since the last one that was ready, on the clock's time."""
        self._tell_at: float | None = None
        """When it is said that a round waits, on the clock's time. None: it was said, or no round waits."""
        self._may_start_again = True
        """Since the last round began, no zygote was started in the place of one that was ready."""
        self._said = ""
        """The latest reason why a worker was started cold."""
        self._why_cold = ""
        """Why there is no zygote, and will be none. Empty: there may be one."""
        try:
            parts = parts_of(warm.argv)
        except NotWarm as error:
            self._options, self._module = tuple[str, ...](), ""
            self._be_cold(str(error))
            return
        self._options, self._module = parts.options, parts.module
        # Workers with paths of their own look nowhere before these.
        self._folders = () if warm.paths else folders_of(parts, working_folder(), env)
        self._begin()

    # ---- coming and going ----

    def _begin(self) -> None:
        self._began_at = self._clock.now()
        self._start()

    def _start(self) -> None:
        plan: dict[str, Any] = {
            "argv": self._warm.argv,
            "environ": self._env,
            "modules": self._warm.modules,
            "program": self._module,
            "paths": self._warm.paths,
            "folders": self._folders,
            "telling": self._telling,
            "first": self._first,
            "left_out": sorted(self._left_out),
        }
        try:
            self._zygote = Zygote(
                plan,
                self._options,
                guard=self._guard,
                given_back=self._given_back,
                is_abandoned=self._is_abandoned,
            )
        except (OSError, ValueError) as error:
            self._be_cold(str(error))
            return
        self._clock.watch(self._zygote.fd)

    def look(self) -> None:
        """Hear what the zygote says. To be called whenever the clock has woken up, and at `wakes_at`."""
        if (zygote := self._zygote) is None:
            return
        if self.delays and self._tell_at is not None and self._clock.now() >= self._tell_at:
            self._tell_at = None
            self._say(f"reknit: the workers wait until their modules are imported ({READY_S:g} s at most)")
        try:
            message = zygote.hear()
        except ZygoteFailed:
            self._end()
            self._failed(zygote)
            return
        if message is None:
            if not zygote.is_ready and self._clock.now() >= self._began_at + READY_S:
                self._end()
                self._be_cold(f"the modules were not imported within {READY_S:g} s")
        elif "harms" in message:
            self._end()
            self._left_out |= message["harms"]
            self._first += message["first"]
            self._passes += 1
            if self._passes < _MOST_PASSES:
                self._start()
            else:
                self._be_cold(self._listed(self._left_out))
        elif "fails" in message:
            self._end()
            self._be_cold(message["fails"])
        elif "ready" in message:
            zygote.is_ready = True
            self._failures = 0
            self._tell(self._left_out | message["ready"])
            took = self._clock.now() - self._began_at
            self._say_if_verbose(f"workers are now forks of a zygote: {message['modules']} modules, in {took:.1f} s")

    def _failed(self, zygote: Zygote) -> None:
        if zygote.is_ready:
            if self._may_start_again:
                self._may_start_again = False
                self._say_if_verbose("the zygote has ended, and another one is started")
                self._begin()
            return
        self._failures += 1
        if self._failures < _TRIES:
            self._start()
        else:
            self._be_cold(f"the zygote has ended {_TRIES} times before it was ready")

    def _tell(self, left_out: Mapping[str, str]) -> None:
        new = {name: why for name, why in left_out.items() if name not in self._told}
        if new:
            self._told |= new.keys()
            self._say(f"reknit: not imported ahead of the workers: {self._listed(new)}")

    def _be_cold(self, why: str) -> None:
        self._why_cold = why
        self._say(f"reknit: the workers start cold: {why}")

    def _say_if_verbose(self, text: str) -> None:
        if self._warm.is_verbose:
            self._say(f"reknit: {text}")

    def _end(self) -> None:
        if self._zygote is not None:
            self._clock.unwatch(self._zygote.fd)
            self._zygote.close()
            self._zygote = None

    # ---- what the launcher asks ----

    @property
    def delays(self) -> bool:
        """Whether the start of a round should wait: the zygote will be ready sooner than workers that start cold."""
        return self._zygote is not None and not self._zygote.is_ready

    @property
    def wakes_at(self) -> float | None:
        """When `look` must be called at the latest, on the clock's time. None: there is no such time."""
        if self._zygote is None or self._zygote.is_ready:
            return None
        give_up_at = self._began_at + READY_S
        return give_up_at if self._tell_at is None else min(self._tell_at, give_up_at)

    @property
    def children(self) -> Collection[int]:
        return () if self._zygote is None else (self._zygote.pid,)

    def begin(self) -> None:
        """A round begins: end a zygote whose modules are out of date."""
        self.look()
        self._may_start_again = True
        if self._zygote is None and not self._why_cold:
            self._begin()
        elif self._zygote is not None and self._zygote.is_ready and (why := self._stale(self._zygote)):
            self._end()
            self._say(f"reknit: the zygote is replaced: {why}")
            self._begin()
        self._tell_at = self._clock.now() + _PATIENCE_S if self.delays else None

    @staticmethod
    def _stale(zygote: Zygote) -> str:
        try:
            return zygote.stale()
        except ZygoteFailed as error:
            return str(error)

    def start(self, argv: Sequence[str], env: Mapping[str, str], ends: Mapping[int, int]) -> int:
        """Start a worker, warm if that is possible. Returns its pid. Takes and raises what `spawn` does."""
        zygote = self._zygote
        if zygote is not None and zygote.is_ready:
            try:
                return zygote.fork(argv, env, ends, guard=self._guard)
            except (NotForked, ZygoteFailed) as error:
                if str(error) != self._said:
                    self._said = str(error)
                    self._say(f"reknit: workers start cold: {error}")
                if isinstance(error, ZygoteFailed):
                    self._end()
                    self._failed(zygote)
        return spawn([*argv], env, ends, guard=self._guard, given_back=self._given_back)

    def close(self) -> None:
        """End the zygote. May be repeated."""
        self._end()

    def _listed(self, left_out: Mapping[str, str]) -> str:
        most = len(left_out) if self._warm.is_verbose else _SHOWN
        shown = [f"{name} {why}" for name, why in [*left_out.items()][:most]]
        rest = len(left_out) - len(shown)
        return "; ".join(shown) + (f"; and {rest} more" if rest > 0 else "")
