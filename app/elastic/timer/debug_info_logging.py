"""torch's own module, under reknit's name. Both names are the same module, so what is patched in one is patched in the
other."""

import sys

import torch.distributed.elastic.timer.debug_info_logging

sys.modules[__name__] = torch.distributed.elastic.timer.debug_info_logging
