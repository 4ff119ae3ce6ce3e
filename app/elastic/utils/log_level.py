"""The level of the loggers of `reknit.elastic`."""


def get_log_level() -> str:
    """WARNING, as in torch. A platform may put its own function in this place."""
    return "WARNING"
