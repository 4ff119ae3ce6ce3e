"""The counterpart of `torch.distributed.elastic.events`."""
