"""Random histories of a whole simulated cluster, and the checks of what must hold whatever happens."""
