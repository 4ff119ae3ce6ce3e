"""Bugs that the suite must catch."""
