"""A simulated cluster. The agents and their loops are real. Hosts, store, network, workers and time are simulated."""
