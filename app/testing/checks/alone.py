"""S2: one round at a time."""

from __future__ import annotations

from reknit.adapters.simulated.hosts import Group
from reknit.app.testing.checked_proc import CheckedProc
from reknit.app.testing.checked_world import CheckedWorld
from reknit.app.testing.violation import demand, violated
from reknit.core.job.entries import Lost, Opened

HUNG_S = 15.0
"""A keeper that has hung has ended the workers so long afterwards: after the grace, and a little more."""


def is_alive(group: Group | None) -> bool:
    return group is not None and bool(group.running)


def starts_alone(world: CheckedWorld, proc: CheckedProc, key: tuple[int, int], head: tuple[str, int]) -> None:
    """S2: nobody but the lost still runs another round. `head`: where the workers of this one meet. Another round with
    the same number may have been sealed in a life of the journal that the store has lost."""
    demand(not is_alive(proc.group), "S2", f"{proc.name} starts {key} with workers alive")
    is_twin = any(p.id == proc.id and p.twin != proc.twin for p in world.procs)  # they may take the same incarnation
    again = [g for g in world.groups if (g.key, g.node) == (key, proc.agent.me)]
    # The node may take the same name and the same round after the store has lost the journal of a job that is over.
    is_anew = len(world.lives) > 1 and not any(g.running or g is proc.group for g in again)
    demand(not again or is_twin or is_anew, "S2", f"{proc.name} starts {key} twice")
    for other in world.procs:
        group = other.group
        is_same = group is not None and (group.key, group.hosts) == (key, head)
        if group is None or not group.running or is_same or group.is_stuck or other.dead:
            continue
        if any(p.id == other.id and p.twin != other.twin for p in world.procs):
            continue  # another host has its id, and neither can see to the workers of the other
        if group.key[0] != key[0]:
            if _is_late(world, other, key[0]):
                continue
        elif _is_excused(world, other, group) or _is_forgotten(world, group):
            continue
        violated("S2", f"{proc.name} starts {key} while {other.name} still runs {group.key}")


def _is_excused(world: CheckedWorld, other: CheckedProc, group: Group) -> bool:
    """Declared lost, and not bound to kill first. Neither an agent that is suspended nor a keeper that hangs can."""
    if other.spec.terms.fence_s is not None and not (other.was_suspended or _hung_lately(world, other)):
        return False
    return any(isinstance(e, Lost) and e.node == group.node for e in world.journal)


def _is_forgotten(world: CheckedWorld, group: Group) -> bool:
    """The store has lost that this node takes part. Its agent kills the workers when it reaches the store."""
    begin = 0 if world.origin is None else world.origin.position
    return not any(job.is_live(group.node) for job in world.jobs[begin:])


def _hung_lately(world: CheckedWorld, other: CheckedProc) -> bool:
    """Its keeper hangs, or did until lately, and has not ended the workers yet."""
    return world.now - other.hung_at < HUNG_S


def _is_late(world: CheckedWorld, other: CheckedProc, epoch: int) -> bool:
    """It may still have workers of an epoch before: rule 16 gives its node the grace and silence of the opener."""
    opened = next(e for e in world.journal if isinstance(e, Opened) and e.epoch == epoch)
    opener = next(p for p in world.procs if p.agent.nonce == opened.journal)
    waits_s = (opener.spec.grace_s + opener.spec.terms.silence_s) / opener.rate
    could_not_know = other.was_cut or other.was_suspended or other.refused or not other.up
    could_not_know = could_not_know or _hung_lately(world, other)  # its keeper ends no workers
    return could_not_know or other.spec.grace_s / other.rate > waits_s - 1.0
