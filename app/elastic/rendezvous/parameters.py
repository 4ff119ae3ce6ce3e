"""What a rendezvous handler is made from. `api` exports these names, as torch's module does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TORCH = "torch:"
"""A backend name with this prefix asks for the handler that torch itself has registered under the rest of the name."""
NO_NAME = "The rendezvous backend name must be a non-empty string."


class RendezvousParameters:
    """Where and how the nodes of a job meet. The same as torch's class, and not the same class: this one needs no
    torch.

    `backend`: the name of a handler in the registry.
    `endpoint`: usually `host:port`. Empty: the job has one node, for the backends of reknit.
    `run_id`: the name of the job.
    `min_nodes`, `max_nodes`: how many nodes a round may have. At least 1.
    `local_addr`: the address of this node for the others. None: the handler finds it out.
    Further keywords are settings of the backend. They stand in `config`.

    Raises `ValueError` for an empty backend, or for numbers of nodes that cannot be.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError(NO_NAME)
        if min_nodes < 1:
            raise ValueError(f"The minimum number of rendezvous nodes ({min_nodes}) must be greater than zero.")
        if max_nodes < min_nodes:
            raise ValueError(
                f"The maximum number of rendezvous nodes ({max_nodes}) must be greater than or equal to the minimum"
                f" number of rendezvous nodes ({min_nodes})."
            )
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """The setting `key`, or `default` if it is not given."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """The setting `key` as a truth value: a bool, 0 or 1, or a word such as "true" or "no". None stays None. Raises
        `ValueError` for anything else."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        if isinstance(value, str):
            from reknit.app.input.readers import truth

            try:
                return truth(value)
            except ValueError:
                pass  # raised below, with the name of the setting
        raise ValueError(f"The rendezvous configuration option '{key}' does not represent a valid boolean value.")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """The setting `key` as a whole number. None stays None. Raises `ValueError` if it is none."""
        value = self.get(key, default)
        if value is None:
            return value
        try:
            return int(value)
        except ValueError as error:
            said = f"The rendezvous configuration option '{key}' does not represent a valid integer value."
            raise ValueError(said) from error


RendezvousHandlerCreator = Callable[[RendezvousParameters], Any]
"""Makes a handler from parameters. The handler is torch's `RendezvousHandler`, or has the same methods."""
