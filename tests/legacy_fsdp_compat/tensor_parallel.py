"""A model that FSDP1 and tensor parallelism cut together."""

import torch
from torch import nn


class Pair(nn.Module):
    """Parameters that both parallelisms cut on dim 0, that they cut on dims 1 and 0, and that only FSDP cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def batch(place: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + place))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
