"""What an agent and its keeper say to each other, and how it gets there."""
