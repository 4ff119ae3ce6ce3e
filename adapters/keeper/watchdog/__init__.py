"""Workers that hang: how they are found, looked at and ended."""
