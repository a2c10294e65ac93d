"""An operation that this rank has posted: a program yields it to wait for the peers, and releases their memory."""

from __future__ import annotations

import torch

from shardkit.core import events
from shardkit.core.runtime.shared.neighbours import Channel, Neighbours
from shardkit.core.runtime.shared.tables import Table


class Posting:
    """This rank's part of one operation, posted when this object is made. `release` must follow in any case."""

    def __init__(self, neighbours: Neighbours, channel: Channel, table: Table) -> None:
        self._neighbours = neighbours
        self._label = table.label
        self.released = False
        self._failed = False
        self.operation = neighbours.post(channel, table)
        self.peers: list[list[torch.Tensor] | None] = []

    def wait(self) -> None:
        """Waits until all peers have posted; afterwards `peers[rank]` are that rank's tensors, None for this rank's.

        Raises:
            ConnectionError, TimeoutError, RuntimeError: as `Neighbours.collect` says.
        """
        if self._failed:  # whoever clears up after an error waits again for whatever may still be under way
            return
        self._failed = True
        tables = self._neighbours.collect(self.operation, self._label)
        self._failed = False
        self.peers = [None if table is None else table.tensors for table in tables]

    def wait_released(self) -> None:
        """Waits until all peers have read this rank's part.

        Raises:
            RuntimeError: if one of them is gone or does not come, with the group's name.
        """
        try:
            if not events.hub.active or self._neighbours.is_released(self.operation):
                self._neighbours.wait_released(self.operation)
            else:
                with events.Waiting(self._label, "release"):
                    self._neighbours.wait_released(self.operation)
        except (ConnectionError, TimeoutError) as error:
            raise RuntimeError(f"{self._label}: waiting until peers have read the shards failed: {error}") from error

    def release(self) -> None:
        """Tells the peers that their tensors have been read, or will not be."""
        if not self.released:
            self.released = True
            self._neighbours.release(self.operation)
