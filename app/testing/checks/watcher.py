"""All checks, as a watcher of one world: they look at everything after every step. A violation carries the story."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from reknit.adapters.simulated.scene import Watcher
from reknit.app.testing import as_text
from reknit.app.testing.checked_proc import CheckedProc, Traced
from reknit.app.testing.checked_world import CheckedWorld
from reknit.core.agent import timers
from reknit.core.agent.agent import Agent
from reknit.core.agent.commands import Beat, Command
from reknit.core.agent.events import Event
from reknit.core.job.entries import Entry
from reknit.core.job.founding import Origin
from reknit.core.job.job import Job

from . import every_step, later, renamed, stretches


@frozen
class Checks(Watcher):
    world: CheckedWorld

    def stepped(  # type: ignore[override]  # all processes of its world are checked
        self, proc: CheckedProc, before: Agent, event: Event, commands: Sequence[Command]
    ) -> None:
        world = self.world
        world.steps += 1
        if world.setup.text:
            as_text.same_commands(commands)
        proc.trace.append(Traced(world.now, event, tuple(commands), timers.next_wake(proc.agent)))
        world.story.append((world.now, proc.name, event, commands))
        every_step.after_step(world, proc, before, event, commands)
        if not world.steps % 8:
            stretches.are_computed(proc.name, proc.agent)
        if not world.steps % 16:
            renamed.is_asked(world, before, event)
        if world.oracle is not None:
            has_said = any(not isinstance(command, Beat) for command in commands)
            if not world.steps % (8 if has_said else 64):
                later.goes_on_alike(proc.name, before, event, proc.agent, commands)

    def landed(self, entry: Entry, before: Job) -> None:
        self.world.story.append((self.world.now, "journal", entry, ()))
        every_step.after_landing(self.world, entry, before)

    def founded(self, origin: Origin) -> None:
        self.world.story.append(
            (self.world.now, "journal", f"goes on as {origin.life} from position {origin.position}", ())
        )
        every_step.after_founding(self.world, origin)
