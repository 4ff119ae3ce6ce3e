"""What turns an agent: the ports, the loop that carries out its commands, the ways to wait for it, time and threads."""
