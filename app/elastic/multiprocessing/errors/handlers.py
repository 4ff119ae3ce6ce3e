"""Which error handler `record` uses. The counterpart of `torch.distributed.elastic.multiprocessing.errors.handlers`."""

from .error_handler import ErrorHandler

__all__ = ["get_error_handler"]


def get_error_handler() -> ErrorHandler:
    """A new handler. A program puts its own function in this place."""
    return ErrorHandler()
