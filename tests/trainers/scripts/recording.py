"""The notes of every script here: losses, gradient norms, final weights, and which engine ran."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# The engine that SHARDKIT_INSTALL asks for was imported with the line above, or must never be.
SHARDKIT = "shardkit.core" in sys.modules
_runs = {"stock": 0, "shardkit": 0}


def arguments() -> argparse.Namespace:
    """--out: where rank 0 saves the notes. --own: a directory for checkpoints.

    --other: the other engine's checkpoints, to resume from as well. --only-across: do nothing but that.
    """
    parser = argparse.ArgumentParser()
    for name in ("out", "own", "other"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--only-across", action="store_true")
    return parser.parse_args()


def resumptions(options: argparse.Namespace) -> dict[str, Path]:
    """The cases that resume, and whose checkpoints they resume from."""
    own = {} if options.only_across else {"resumed": options.own}
    return own | ({} if options.other is None else {"across": options.other})


def _count_engines() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    original = FSDPParamGroup.unshard

    def unshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        _runs["stock"] += 1
        return original(self, *args, **kwargs)

    FSDPParamGroup.unshard = unshard
    if SHARDKIT:
        from shardkit.core import events

        def listener(event: Any) -> None:
            _runs["shardkit"] += isinstance(event, events.GatherFinished)

        events.subscribe(listener)


class Recording:
    """Results by case, as plain tensors and numbers."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, Any]] = {}
        self._case = ""
        _count_engines()

    def begin(self, case: str) -> None:
        torch.manual_seed(0)
        self._case = case
        self.cases[case] = {"runs": dict(_runs)}

    def note(self, key: str, value: Any) -> None:
        """A number, text or tensor; a DTensor is gathered (collective)."""
        self.cases[self._case].setdefault(key, []).append(_plain(value))

    def step(self, model: nn.Module, optimizer: Any, loss: Tensor, backward: Any = Tensor.backward) -> None:
        """Takes a step; notes the loss and the norm of all gradients."""
        backward(loss)
        self.note("losses", loss)
        self.note("gradient norms", gradient_norm(model))
        optimizer.step()
        optimizer.zero_grad()

    def end(self, model: nn.Module) -> None:
        """Notes whole weights, and how often each engine has gathered since `begin` (collective)."""
        case = self.cases[self._case]
        case["weights"] = {_name(name): _plain(value) for name, value in model.state_dict().items()}
        case["runs"] = {engine: _runs[engine] - before for engine, before in case["runs"].items()}

    def write(self, path: Path) -> None:
        torch.save({"cases": self.cases, "shardkit": SHARDKIT}, path)

    def save(self, path: Path) -> None:
        """Rank 0 writes the file and the process group ends; a rank of stock ends here as well (collective)."""
        if int(os.environ.get("RANK", "0")) == 0:
            self.write(path)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        if not SHARDKIT:
            # One rank in fifty died at its exit: a thread of gloo freed its last work and asked for the GIL of an
            # interpreter that was ending. shardkit waits for these threads (core/runtime/gloo_threads.py).
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _name(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def gradient_norm(model: nn.Module) -> Tensor:
    """Of all gradients together, from whole ones, so that both engines add up in the same order (collective)."""
    norms = [_plain(parameter.grad).float().norm() for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack(norms).norm()


def shard_llama(model: nn.Module, mesh: Any = None) -> nn.Module:
    for layer in model.model.layers:
        fsdp.fully_shard(layer, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def sharded_modules(model: nn.Module) -> int:
    return sum(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def tiny_llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64} | settings
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.config.use_cache = False
    return model


def tokens(step: int, rank: int, batch: int = 2, length: int = 12, vocabulary: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocabulary, (batch, length), generator=generator)


def accelerators_of_cpu() -> None:
    """Accelerate turns FSDP on for several accelerators, and not for several CPUs: takes these for accelerators."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    original = PartialState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = init
