"""This module is torch's own `torch.distributed.elastic.rendezvous.etcd_server`.

It is not a copy of its names. So what a test patches here is patched there, and a class has one identity.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.rendezvous import etcd_server

sys.modules[__name__] = etcd_server
