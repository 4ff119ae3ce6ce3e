"""From `Settings` to the adapters of one agent."""
