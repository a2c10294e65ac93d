"""Lightning's Trainer on shardkit: a small byte-level language model on the text of Python's standard library.

Everything but the line `shardkit.core.install()` is as for torch's own FSDP2. Start it with

    python examples/lightning/train.py

or leave that line out and start `shardkit run examples/lightning/train.py`.
"""

import argparse
import os
from pathlib import Path

import shardkit.core

shardkit.core.install()  # the one line

import torch  # noqa: E402
from lightning.pytorch import LightningModule, Trainer, seed_everything  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

LENGTH, WIDTH = 128, 128


class LanguageModel(LightningModule):
    """Transformer blocks over bytes; `configure_model` runs where Lightning knows the mesh."""

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        self.embedding = nn.Embedding(256, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, norm_first=True, dropout=0.0)
        self.blocks = nn.ModuleList(nn.TransformerEncoder(block, 1, enable_nested_tensor=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, 256)
        mesh = self.device_mesh["data_parallel"]
        for one in self.blocks:
            fully_shard(one, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, mask=mask, is_causal=True)
        return self.head(hidden)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        logits = self(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        if index % 10 == 0:
            self.print(f"step {index}: loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def samples(count: int) -> list[torch.Tensor]:
    """Pieces of the standard library's source as byte values."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: (count + 1) * LENGTH]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return list(rows.split(LENGTH)[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a byte-level language model with Lightning on shardkit.")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=2, max_steps=options.steps,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(LanguageModel(), DataLoader(samples(16 * options.steps), batch_size=8))


if __name__ == "__main__":
    main()
