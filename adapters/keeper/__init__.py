"""The workers of a node as processes: the keeper, which holds them, and its client in the agent."""
