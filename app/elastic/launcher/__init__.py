"""The counterpart of `torch.distributed.launcher`: run a function or a program as the workers of an elastic job.

    from reknit.elastic.launcher import LaunchConfig, elastic_launch

    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=4, rdzv_backend="c10d")
    by_rank = elastic_launch(config, train)("argument")

The last line waits until the job has ended. `by_rank` holds what each worker of this node has returned.
"""

from .api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
