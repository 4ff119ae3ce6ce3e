"""A journal in a folder on a file system that all nodes share."""
