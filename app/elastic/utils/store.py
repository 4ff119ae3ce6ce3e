"""torch's own module, under reknit's name. Both names are the same module, so what is patched in one is patched in the
other."""

import sys

import torch.distributed.elastic.utils.store

sys.modules[__name__] = torch.distributed.elastic.utils.store
