"""Warm workers: forks of a Python that has imported what the workers import."""
