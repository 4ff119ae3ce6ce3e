"""The side of the keeper: the process that starts, watches and ends the workers."""
