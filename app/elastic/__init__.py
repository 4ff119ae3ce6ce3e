"""torchelastic's Python API on reknit's agent.

The tree of modules is that of `torch.distributed.elastic`. So code that was written for torch runs after its imports
were changed:

    torch.distributed.elastic    becomes    reknit.elastic
    torch.distributed.launcher   becomes    reknit.elastic.launcher
    torch.distributed.run        becomes    reknit.elastic.run

The files are in `app/elastic`, and `src/reknit/elastic` is a link to that folder. There is one name to import them:
under two names, each class would exist twice.

Some modules of that tree have no file: they are torch's own, see `aliases.py`.
"""

import sys

if __name__ != "reknit.elastic":
    raise ImportError("this package is imported as reknit.elastic")

from .aliases import Finder

sys.meta_path.append(Finder())
