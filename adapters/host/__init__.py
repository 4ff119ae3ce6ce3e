"""What the agents of one user on one host share: locks, and the processes that killed agents have left."""
