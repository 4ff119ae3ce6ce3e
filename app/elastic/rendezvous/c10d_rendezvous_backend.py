"""This module is torch's own `torch.distributed.elastic.rendezvous.c10d_rendezvous_backend`.

It is not a copy of its names. So what a test patches here is patched there, and a class has one identity.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

sys.modules[__name__] = c10d_rendezvous_backend
