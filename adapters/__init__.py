"""What touches the world: adapters do what they are told and report what they saw."""
