"""This module is torch's own `torch.distributed.elastic.rendezvous.static_tcp_rendezvous`.

It is not a copy of its names. So what a test patches here is patched there, and a class has one identity.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

sys.modules[__name__] = static_tcp_rendezvous
