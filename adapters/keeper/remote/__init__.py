"""What only a keeper on another host needs: the command that starts it there, its workers' output over the stream, and
pings. A keeper on the agent's host uses none of this."""
