"""A whole cluster of agents as one value under one virtual clock, and what must hold of it whatever happens."""
