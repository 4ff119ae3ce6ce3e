"""The functions for programs: `launch`, and agents that a program runs itself."""
