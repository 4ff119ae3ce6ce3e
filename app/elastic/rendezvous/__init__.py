"""The counterpart of `torch.distributed.elastic.rendezvous`."""
