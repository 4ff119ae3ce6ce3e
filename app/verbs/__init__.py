"""One module per verb of the `reknit` command."""
