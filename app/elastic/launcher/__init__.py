"""The counterpart of `torch.distributed.launcher`."""
