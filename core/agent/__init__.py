"""One node's agent: what happens to it, what it wants done, and the step between."""
