"""A journal in a TCPStore: torch's server, our client."""
