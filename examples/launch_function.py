"""Fit a line on several workers. The workers are calls of a function, and this program gets what the function returns.

    python examples/launch_function.py

- `launch` starts `nproc` processes. Each one calls `fit`, with the environment that `init_process_group` needs.
- The workers are imported from this file. So the call of `launch` stands below `if __name__ == "__main__":`.
- Worker 1 fails in the first round, on purpose. `max_restarts=1` allows one restart, and all workers start again.
- A job that fails for good raises `JobFailed`. The text of this error is the report.
"""

import os
import sys

import torch
import torch.distributed as dist

from reknit import JobFailed, launch


def fit(slope, steps, fails):
    """Find `slope` by gradient descent. Each worker has data of its own, and the workers average their gradients."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    is_first_round = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    generator = torch.Generator().manual_seed(rank)
    x = torch.rand(256, generator=generator)
    found = torch.zeros(1, requires_grad=True)
    for step in range(steps):
        if fails and is_first_round and rank == 1 and step == steps // 2:
            raise RuntimeError("a failure on purpose")
        loss = (found * x - slope * x).square().mean()
        (gradient,) = torch.autograd.grad(loss, found)
        dist.all_reduce(gradient)
        with torch.no_grad():
            found -= gradient / world_size
    dist.destroy_process_group()
    return found.item()


def main():
    try:
        values = launch(fit, (3.0, 50, True), nproc=2, max_restarts=1)
    except JobFailed as error:
        sys.exit(str(error))
    for rank, value in sorted(values.items()):
        print(f"worker {rank} has found the slope {value:.2f}")


if __name__ == "__main__":
    main()
