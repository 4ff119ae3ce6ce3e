"""What starting and signalling one process needs."""
