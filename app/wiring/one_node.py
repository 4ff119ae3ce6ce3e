"""What an agent of a job with one node needs: workers, and a journal in the memory of this process."""

from __future__ import annotations

import os

from attrs import evolve

from reknit.adapters.journals.in_memory import MemoryJournal, MemoryLink
from reknit.adapters.runtime.loop import Ports
from reknit.app.settings import Settings

from .surroundings import Surroundings, Wired, end_left, open_workers, spec_of


def wire_one(settings: Settings, world: Surroundings, nonce: str) -> Wired:
    workers = open_workers(settings, world, nonce, mark=nonce)
    lock = None
    try:
        # Only now, while the keeper gets ready: the first worker does not wait for this import.
        from reknit.adapters.host.lock import take_alone

        lock = take_alone(nonce)
        notes = end_left()
        if settings.warm or settings.start_method == "forkserver":
            from .warm_workers import warm_up

            warm_up(workers, settings)
    except BaseException:  # for example an import that finds no free descriptor
        try:
            workers.close()
        finally:
            if lock is not None:
                lock.release()
        raise

    def close() -> None:
        try:
            workers.close()
        finally:  # a signal's handler may raise an error while this waits
            link.close()
            if lock is not None:
                lock.release()

    link = MemoryLink(MemoryJournal(), world.clock)
    name = settings.node_id or os.uname().nodename or "localhost"
    spec = evolve(spec_of(settings, world, name, settings.address or "127.0.0.1"), shares_journal=False)
    return Wired(spec, Ports(world.clock, link, workers, world.requests), close, notes)
