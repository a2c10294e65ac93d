"""The flags of the job, and the checks that need neither a process group nor a device."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from errors import UserError
from model import ModelConfig

DESCRIPTION = """\
Train a byte-level GPT with shardkit.core.fully_shard, on two CPU processes or on all GPUs of this machine.

Writes to --out: checkpoints/step-NNNNNN (sharded, in the format of torch.distributed.checkpoint),
metrics.jsonl, losses.png, sample.txt.
"""


@dataclass(frozen=True)
class Settings:
    """One run, as its flags describe it. `--help` is the documentation of each field."""

    data: tuple[Path, ...]
    out: Path
    resume: bool
    fallback: bool
    restarts: int
    nproc: int | None
    tp: int
    device: str
    model: ModelConfig
    steps: int
    batch: int
    optimizer: str
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    seed: int
    precision: str
    reshard_after_forward: bool
    offload: str
    resident: int
    val_every: int
    save_every: int
    sample: int

    def training(self) -> dict[str, Any]:
        """The settings besides model and text that decide the losses: a run resumed with other values differs."""
        names = ("steps", "batch", "optimizer", "lr", "warmup", "weight_decay", "clip", "seed", "precision")
        return {name: getattr(self, name) for name in names}


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad flag as `UserError`, so that one rank can print it in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines and adds each flag's default."""


def whole(least: int) -> Any:
    """An argparse type: a whole number of at least `least`."""

    def convert(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    convert.__name__ = "whole number"
    return convert


def real(least: float, inclusive: bool = True) -> Any:
    """An argparse type: a finite number of at least (or, if not `inclusive`, above) `least`."""

    def convert(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value < least or (value == least and not inclusive):
            raise argparse.ArgumentTypeError(f"must be {'at least' if inclusive else 'above'} {least:g}, got {text}")
        return value

    convert.__name__ = "number"
    return convert


def parser() -> argparse.ArgumentParser:
    """All flags, each with its help text and default."""
    p = OneLineParser("train_lm", description=DESCRIPTION, formatter_class=HelpWithDefaults, allow_abbrev=False)
    run = p.add_argument_group("run")
    add = run.add_argument
    add(
        "--data",
        nargs="+",
        type=Path,
        default=[],
        metavar="PATH",
        help="text to learn: files, or directories of .py, .txt, .md and .rst files; without it, the sources of this "
        "Python's standard library",
    )
    add(
        "--out",
        type=Path,
        default=Path("runs/train_lm"),
        metavar="DIR",
        help="where to write; a finished or broken-off run found there is moved to DIR.1, DIR.2, ... unless --resume",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the newest complete checkpoint in --out; give the other flags as before. On the same "
        "number of processes the losses are those of a run that never stopped",
    )
    add(
        "--fallback",
        action="store_true",
        help="when going on: if the newest checkpoint is damaged, take the one before it",
    )
    add(
        "--restarts",
        type=whole(0),
        default=0,
        metavar="N",
        help="how often processes that died are started again; the run then goes on from its newest checkpoint by "
        "itself, as it does under torchrun --max-restarts",
    )
    add(
        "--nproc",
        type=whole(1),
        default=None,
        metavar="N",
        help="processes to start; without it, one for each GPU, or 2 times --tp where there is none. Unused under "
        "torchrun",
    )
    add(
        "--tp",
        type=whole(1),
        default=1,
        metavar="N",
        help="tensor parallelism (shardkit-tp-adapter): each block's matrices are cut over N processes, which share "
        "their sequences; must divide --nproc and --heads. Checkpoints fit any value",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes GPUs where there are some")
    add(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype of the gathered parameters and of the computation; weights, gradient sums and optimizer stay fp32",
    )
    add(
        "--reshard-after-forward",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="free each block's gathered parameters after its forward and gather them again in backward: less memory, "
        "more communication",
    )
    add(
        "--offload",
        choices=("none", "step", "files", "activations"),
        default="none",
        help="step: weights and optimizer are in the host's memory, and the optimizer steps while the next forward "
        "computes; files: besides, its state lies in files below --out; activations: what forward saves for backward "
        "waits on the host (on the CPU: in files below --out). The losses are the same",
    )
    add(
        "--resident",
        type=whole(1),
        default=1024,
        metavar="MIB",
        help="with --offload files: state that each process keeps in memory; a block's must fit",
    )
    add("--val-every", type=whole(1), default=50, metavar="N", help="steps between validations on held-out text")
    add(
        "--save-every", type=whole(1), default=100, metavar="N", help="steps between checkpoints; the last two are kept"
    )
    add("--sample", type=whole(0), default=200, metavar="N", help="bytes of text to generate at the end")
    add("--seed", type=whole(0), default=0, metavar="N", help="of initial weights, order of the text, and the sample")

    train = p.add_argument_group("training")
    add = train.add_argument
    add("--steps", type=whole(1), default=250, metavar="N", help="optimizer steps")
    add("--batch", type=whole(1), default=4, metavar="N", help="sequences a step, over all processes together")
    add(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon: torch.optim.Muon for the blocks' matrices, each whole on one process, and AdamW for the rest",
    )
    add("--lr", type=real(0, inclusive=False), default=1e-3, metavar="X", help="learning rate at its highest")
    add(
        "--warmup",
        type=whole(0),
        default=30,
        metavar="N",
        help="steps in which the learning rate rises from zero; it then falls as a cosine to a twentieth",
    )
    add("--weight-decay", type=real(0), default=0.1, metavar="X", help="weight decay of matrices")
    add("--clip", type=real(0, inclusive=False), default=1.0, metavar="X", help="largest norm of the gradient")

    model = p.add_argument_group("model (a checkpoint fits only the values that it was written with)")
    add = model.add_argument
    add("--layers", type=whole(1), default=6, metavar="N", help="transformer blocks; each is sharded on its own")
    add("--width", type=whole(1), default=384, metavar="N", help="size of the residual stream")
    add("--heads", type=whole(1), default=6, metavar="N", help="attention heads; twice this must divide --width")
    add("--context", type=whole(2), default=128, metavar="N", help="bytes in a sequence")
    return p


def parse(argv: Sequence[str]) -> Settings:
    """Flags to settings. Raises `UserError` for an unknown flag or a bad value; `--help` prints and exits."""
    values = vars(parser().parse_args(argv))
    try:
        model = ModelConfig(**{name: values.pop(name) for name in ("layers", "width", "heads", "context")})
    except ValueError as error:
        raise UserError(str(error)) from error
    if model.heads % values["tp"]:
        raise UserError(f"--tp {values['tp']} must divide --heads {model.heads}: each process computes whole heads")
    if values["optimizer"] == "muon" and values["tp"] > 1:
        raise UserError("--optimizer muon needs whole matrices and --tp cuts them: leave --tp at 1")
    if values["optimizer"] == "muon" and values["offload"] in ("step", "files"):
        raise UserError(
            f"--offload {values['offload']} needs an optimizer that updates each element by itself: use adamw"
        )
    return Settings(model=model, data=tuple(values.pop("data")), **values)
