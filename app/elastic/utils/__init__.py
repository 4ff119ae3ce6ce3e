"""The counterpart of `torch.distributed.elastic.utils`."""
