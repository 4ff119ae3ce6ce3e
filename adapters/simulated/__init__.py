"""A simulated cluster: real agents in real loops; hosts, store, network and workers are simulated, under one clock."""
