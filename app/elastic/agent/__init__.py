"""The counterpart of `torch.distributed.elastic.agent`."""
