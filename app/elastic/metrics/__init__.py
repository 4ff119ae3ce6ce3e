"""The counterpart of `torch.distributed.elastic.metrics`."""
