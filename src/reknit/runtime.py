"""For programs that run agents themselves. docs/embedding.md shows how.

run, run_async   run one agent until it ends, and return its `Result`
start            run one agent in a thread, and return its `Session`
Loop, Ports      run `reknit.core` with parts of your own: another journal, other workers, another clock
"""

from __future__ import annotations

from reknit.adapters.runtime.loop import Loop, Ports
from reknit.app.python.session import Session, run, run_async, start
from reknit.core.agent.commands import Result

__all__ = ["Loop", "Ports", "Result", "Session", "run", "run_async", "start"]
