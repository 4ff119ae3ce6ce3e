"""Simulated jobs: what a cluster, its failures and reknit's settings make of the time of a training job."""
