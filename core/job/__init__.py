"""The job that all agents share: its journal's entries, and what they mean."""
