"""The counterpart of `torch.distributed.elastic.multiprocessing`."""
