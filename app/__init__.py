"""The faces of reknit: the command `reknit`, and the functions for programs. No other folder imports this one."""
