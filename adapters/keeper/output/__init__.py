"""The way of the workers' output: pipes, the relay, consoles and files."""
