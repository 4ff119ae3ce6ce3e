"""The counterpart of `torch.distributed.elastic.timer`."""
