"""Output for the user: the progress bar, metrics.jsonl, the plot of the losses, the sample."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from checkpointing import Checkpoint
from data import Corpus
from processes import total

FLUSH_EVERY = 10
"""Steps whose losses are summed over the ranks by one collective, so that a GPU need not be waited for at each."""


class Report:
    """Gathers the losses of all ranks; rank 0 alone draws and writes.

    `metrics.jsonl` holds one record a step (`step`, `train_loss`) and one a validation (`step`, `val_loss`,
    `tokens_per_s`, `peak_memory_mib`). A resumed run drops the records after its checkpoint and goes on, so that the
    file is the one that an uninterrupted run writes.
    """

    def __init__(self, out: Path, first_step: int, steps: int, tokens_a_step: int, device: torch.device) -> None:
        self.out, self.device, self.tokens_a_step = out, device, tokens_a_step
        self.writes = dist.get_rank() == 0
        self.pending: list[tuple[int, Tensor]] = []
        self.records: list[dict[str, Any]] = []
        self.seconds = 0.0  # spent in training steps, without validations and checkpoints
        self.trained = 0
        self.speed = 0.0
        self.started = self.since = time.perf_counter()
        # Disabled where stderr is not a terminal: a log file gets a line for each validation instead.
        self.bar = tqdm(total=steps, initial=first_step, unit="step", disable=None if self.writes else True)
        if self.writes:
            out.mkdir(parents=True, exist_ok=True)
            self.records = [record for record in read_metrics(out) if record["step"] <= first_step]
            if first_step == 0:
                self.records = []
            (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in self.records))

    def introduce(self, model: nn.Module, corpus: Corpus, found: Checkpoint | None, training: dict[str, Any]) -> None:
        """Print the model and its text, and the settings in which a resumed run differs from the checkpoint's."""
        size = sum(parameter.numel() for parameter in model.parameters())
        train, held_out = len(corpus.train) / 1e6, len(corpus.held_out) / 1e6
        self.say(
            f"{size / 1e6:.1f} M parameters on {dist.get_world_size()} processes ({self.device.type}); "
            f"{corpus.files} files: {train:.2f} MB to train on, {held_out:.2f} MB held out"
        )
        if found is None:
            return
        self.say(f"resumed from {found.path}")
        for name, value in training.items():
            before = found.training.get(name)
            if before != value:
                flag = f"--{name.replace('_', '-')}"
                change = "--data is another text" if name == "text" else f"{flag} is {value}, was {before}"
                self.say(f"note: {change}; the losses will not be those of a run that never stopped")

    def step(self, done: int, loss: Tensor) -> None:
        """Note this rank's part of the global loss after `done` steps. Collective at every `FLUSH_EVERY`th call."""
        self.pending.append((done, loss.detach()))
        if len(self.pending) == FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        """Sum the losses noted since the last flush over the ranks and write them. Collective."""
        if not self.pending:
            return
        losses = total(torch.stack([loss for _, loss in self.pending]))
        now = time.perf_counter()
        self.seconds += now - self.since
        self.trained += len(self.pending)
        self.speed = len(self.pending) * self.tokens_a_step / (now - self.since)
        self.since = now
        self.write([{"step": done, "train_loss": loss} for (done, _), loss in zip(self.pending, losses, strict=True)])
        self.bar.update(len(self.pending))
        self.pending = []
        self.bar.set_postfix(loss=f"{losses[-1]:.3f}", tok_s=f"{self.speed:,.0f}", peak=f"{self.peak_memory():.0f}MiB")

    def validation(self, done: int, loss: float) -> None:
        """Note the held-out loss after `done` steps; restarts the clock of the training steps."""
        peak = self.peak_memory()
        self.write([{"step": done, "val_loss": loss, "tokens_per_s": round(self.speed), "peak_memory_mib": peak}])
        recent = [r["train_loss"] for r in self.records if "train_loss" in r][-FLUSH_EVERY:]
        train = f"train loss {sum(recent) / len(recent):.4f}, " if recent else ""
        speed = f", {self.speed:,.0f} tokens/s" if recent else ""
        self.say(f"step {done}: {train}held-out loss {loss:.4f}{speed}, peak memory {peak} MiB")
        self.resume_clock()

    def resume_clock(self) -> None:
        """Leave the time since the last flush out of tokens/s: it went into a validation or a checkpoint."""
        self.since = time.perf_counter()

    def finish(self, text: str) -> None:
        """Close the bar; write and announce sample and plot."""
        self.bar.close()
        if not self.writes:
            return
        if text:
            (self.out / "sample.txt").write_text(text, encoding="utf-8")
            self.say(f"---- sample (the first 64 bytes are the prompt) ----\n{text}\n----")
        plot(self.records, self.out / "losses.png")
        trained = self.trained * self.tokens_a_step
        speed = f"{trained / self.seconds:,.0f} tokens/s in training, " if self.seconds else ""
        final = [record["val_loss"] for record in self.records if "val_loss" in record][-1]
        self.say(
            f"held-out loss {final:.4f} (a uniform guess: 5.5452); {speed}"
            f"{time.perf_counter() - self.started:.0f} s in all; see {self.out}/losses.png"
        )

    def say(self, line: str) -> None:
        """Print on rank 0, above the progress bar."""
        if self.writes:
            tqdm.write(line)
            sys.stdout.flush()

    def write(self, records: list[dict[str, Any]]) -> None:
        """Append to metrics.jsonl."""
        if not self.writes:
            return
        self.records += records
        with (self.out / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def peak_memory(self) -> int:
        """MiB: of the GPU's allocator, else resident memory of this process; the highest so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) >> 20
        import resource  # not there on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak >> 20 if sys.platform == "darwin" else peak >> 10


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl up to one that a crash cut short; none if there is no such file."""
    records: list[dict[str, Any]] = []
    path = out / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw both loss curves, in nats a byte over steps, into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats a byte)")
    train = [(r["step"], r["train_loss"]) for r in records if "train_loss" in r]
    held_out = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    if train:
        axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.45, linewidth=1, label="training")
    if held_out:
        last = f"held-out ({held_out[-1][1]:.3f} at the end)"
        axes.plot(*zip(*held_out, strict=True), color="tab:orange", marker="o", markersize=4, label=last)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
