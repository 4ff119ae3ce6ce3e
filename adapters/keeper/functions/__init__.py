"""Functions as workers: what runs in their processes, and the process that forks them."""
