"""Lightning: Trainer with ModelParallelStrategy, and Fabric; the user's function calls fully_shard."""

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from recording import Recording, arguments, gradient_norm, resumptions, shard_llama, sharded_modules, tiny_llama, tokens
from torch.utils.data import DataLoader


class Tuned(LightningModule):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = shard_llama(tiny_llama(), self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.recording.note("losses", loss)
        return loss

    def on_before_optimizer_step(self, optimizer) -> None:
        self.recording.note("gradient norms", gradient_norm(self))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader() -> DataLoader:
    return DataLoader([tokens(step, 0, batch=1)[0] for step in range(32)], batch_size=2)


def trainer_for(options, steps: int) -> Trainer:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=options.own, accumulate_grad_batches=1,
    )  # fmt: skip


def train(recording: Recording, options) -> None:
    recording.begin("Trainer")
    module, trainer = Tuned(recording), trainer_for(options, 3)
    trainer.fit(module, loader())
    recording.note("sharded modules", sharded_modules(module))
    trainer.save_checkpoint(options.own / "trainer.ckpt")
    recording.end(module)


def fabric(recording: Recording, options) -> None:
    recording.begin("Fabric")
    strategy = FabricStrategy(
        lambda model, mesh: shard_llama(model, mesh["data_parallel"]), data_parallel_size=2, tensor_parallel_size=1
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup(tiny_llama())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        batch = tokens(step, fabric.global_rank)
        recording.step(model, optimizer, model(input_ids=batch, labels=batch).loss, fabric.backward)
    fabric.save(options.own / "fabric", {"model": model})
    fabric.load(options.own / "fabric", {"model": model})
    recording.end(model)


def main() -> None:
    options, recording = arguments(), Recording()
    lightning.seed_everything(0)
    if not options.only_across:
        train(recording, options)
    for case, checkpoints in resumptions(options).items():
        recording.begin(case)
        module, trainer = Tuned(recording), trainer_for(options, 5)
        trainer.fit(module, loader(), ckpt_path=str(checkpoints / "trainer.ckpt"))
        recording.end(module)
    if not options.only_across:
        fabric(recording, options)
    recording.save(options.out)


main()
