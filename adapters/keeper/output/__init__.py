"""The way of the workers' output: from their pipes (`streams`, which also makes the prefix of their lines) through the
relay to consoles and files."""
