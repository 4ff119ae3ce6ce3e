"""The command `reknit`: one file for each verb, and the reading of its command line."""
