"""torch's TCPStore without torch in this process: a client of its wire protocol, and a server in a child process."""
