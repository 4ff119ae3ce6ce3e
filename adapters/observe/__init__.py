"""Observers of a loop: each is told of every step, and changes nothing."""
