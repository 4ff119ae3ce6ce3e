"""The ways to run a node's workers."""
