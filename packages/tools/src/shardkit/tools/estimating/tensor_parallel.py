"""Tensor parallelism of Llama-shaped models, by the names that Hugging Face gives their projections."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shardkit.tools.estimating.errors import EstimateError
from shardkit.tools.estimating.job import TensorParallel
from shardkit.tools.estimating.llama import is_llama_shaped, read_config

__all__ = ["COLUMNS", "ROWS", "cut_llama", "plan_of_config"]

# Projections whose output features are cut, and those that take what these give.
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def cut_llama(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts attention heads and feed-forward features of every layer of a Llama-shaped model over `mesh`, in place.

    Raises:
        EstimateError: if heads or features cannot be dealt out evenly.
    """
    for fqn, block in model.named_modules():
        if not all(_has(block, name) for name in (*COLUMNS, *ROWS)):
            continue
        head_dim = block.get_submodule("self_attn").head_dim
        _check(fqn, block, head_dim if isinstance(head_dim, int) else 1, mesh.size())
        styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
        parallelize_module(block, mesh, styles | {name: RowwiseParallel() for name in ROWS})


def _has(block: nn.Module, name: str) -> bool:
    inner: nn.Module | None = block
    for part in name.split("."):
        inner = getattr(inner, part, None)
    return isinstance(inner, nn.Linear)


def _check(fqn: str, block: nn.Module, head_dim: int, ranks: int) -> None:
    for name in COLUMNS:
        projection = block.get_submodule(name)
        assert isinstance(projection, nn.Linear)
        unit = head_dim if name.startswith("self_attn.") else 1
        if projection.out_features // unit % ranks:
            raise EstimateError(
                f"'{fqn}.{name}' has {projection.out_features // unit} {'heads' if unit > 1 else 'features'}, which "
                f"{ranks} ranks of the axis 'tp' cannot share evenly; use a size that divides them"
            )


def plan_of_config(path: Path) -> TensorParallel | None:
    """How the model of a Hugging Face config is cut; None for one whose projections have other names."""
    return cut_llama if is_llama_shaped(read_config(path)) else None
