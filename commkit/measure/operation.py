"""The buffers and arguments of one call, and what is derived from them once."""

from __future__ import annotations

from functools import cached_property

import torch

from commkit.measure.collectives import Collective, Shape


class Operation:
    """What a back end needs to make a call again and again.

    `send` and `receive` are one-dimensional; in place they overlap as the row says.  `rank`,
    `root` and the partners count within the group.  A back end may keep what it has prepared for
    this operation in `prepared`.
    """

    def __init__(
        self,
        row: Collective,
        shape: Shape,
        send: torch.Tensor,
        receive: torch.Tensor,
        redop: str,
        rank: int,
        world_size: int,
        root: int,
        in_place: bool,
    ) -> None:
        self.row = row
        self.shape = shape
        self.send: torch.Tensor = send
        self.receive: torch.Tensor = receive
        self.redop: str = redop
        self.rank = rank
        self.world_size = world_size
        self.root = root
        self.in_place = in_place
        self.partner = row.partner(rank, world_size)
        self.prepared: object = None

    @cached_property
    def staging(self) -> torch.Tensor:
        """A buffer like `send`: of what a library cannot replace in place."""
        return torch.empty_like(self.send)

    @cached_property
    def send_parts(self) -> list[torch.Tensor]:
        return self.parts(self.send)

    @cached_property
    def receive_parts(self) -> list[torch.Tensor]:
        return self.parts(self.receive)

    def parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        part = self.shape.part
        return [buffer[rank * part : (rank + 1) * part] for rank in range(self.world_size)]
