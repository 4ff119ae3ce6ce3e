"""Bugs that the checks must catch."""
