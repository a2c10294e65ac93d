"""A proposal as Python code to paste."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardkit.tools.estimating.hf import COLUMNS, ROWS, cut_projections
from shardkit.tools.estimating.job import Policies, TensorParallel, muon_placements
from shardkit.tools.planning.search import Proposal

_RECOMPUTE = '''\
def recompute(block: nn.Module) -> None:
    """Makes a block compute its activations again in backward."""
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


'''


_CUT = f'''\
def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts attention heads and feed-forward features of every layer over `mesh`."""
    styles = {{name: ColwiseParallel() for name in {list(COLUMNS)}}}
    styles |= {{name: RowwiseParallel() for name in {list(ROWS)}}}
    for block in model.modules():
        if hasattr(block, "self_attn") and hasattr(block, "mlp"):
            parallelize_module(block, mesh, styles)


'''


def code_of(proposal: Proposal) -> str:
    """A module with a function `shard(model)`, which makes the mesh and shards the model in place."""
    candidate, policies = proposal.candidate, proposal.candidate.policies
    device = "cuda" if proposal.estimate.machine.device == "cuda" else "cpu"
    sizes, names = (tuple(column) for column in zip(*((size, name) for name, size in candidate.axes), strict=True))
    keywords = ["mesh=mesh", *_keywords(policies)]
    keywords += ["shard_placement_fn=placements"] if policies.placements is not None else []
    loop = [f"    for block in {_blocks(proposal)}:"]
    loop += ["        recompute(block)"] if policies.checkpoint else []
    reshard = f"reshard_after_forward={policies.reshard_after_forward}"
    loop.append(f"        fully_shard(block, {', '.join([keywords[0], reshard, *keywords[1:]])})")
    lines = [
        _docstring(proposal),
        *_imports(proposal),
        "\n",
        (_RECOMPUTE if policies.checkpoint else "")
        + (_CUT if _cut_with(proposal) is cut_projections else "")
        + "def shard(model: nn.Module) -> nn.Module:",
        f'    """Shards `model` in place; every rank makes micro-batches of {candidate.micro_batch}."""',
        f"    mesh = init_device_mesh({device!r}, {sizes!r}, mesh_dim_names={names!r})",
        *_tensor_parallel(proposal),
        *_placements(policies),
        *(loop if proposal.blocks else []),
        f"    fully_shard(model, {', '.join(keywords)})",
        f"    model.set_prefetch_depth({policies.prefetch_depth})"
        if policies.prefetch_budget is None
        else f"    model.set_prefetch_budget({policies.prefetch_budget})",
        "    return model",
    ]
    return "\n".join(lines) + "\n"


def _cut_with(proposal: Proposal) -> TensorParallel | None:
    """What cuts the model over the axis "tp", if the proposal has one."""
    return proposal.tensor_parallel if any(name == "tp" for name, _ in proposal.candidate.axes) else None


def _tensor_parallel(proposal: Proposal) -> list[str]:
    plan = _cut_with(proposal)
    if plan is None:
        return []
    cut = "cut" if plan is cut_projections else _name_of(plan)[1]
    lines = [f'    {cut}(model, mesh["tp"])  # needs shardkit-tp-adapter']
    if proposal.candidate.samplers > 1:
        lines.append("    # Ranks that differ only in the axis 'tp' need the same samples.")
    rest = ", ".join(repr(name) for name, _ in proposal.candidate.axes if name != "tp")
    return [*lines, f"    mesh = mesh[{rest}]"]


def _placements(policies: Policies) -> list[str]:
    if policies.placements is None:
        return []
    if policies.placements is muon_placements:
        return ["    placements = placements_for(model, torch.optim.Muon)"]
    return [f"    placements = {_name_of(policies.placements)[1]}(model)"]


def _name_of(plan: Callable[..., Any]) -> tuple[str, str]:
    """Module and name to import a user's function by."""
    return plan.__module__, plan.__name__


def _docstring(proposal: Proposal) -> str:
    text = "\n".join(f"- {reason}" for reason in proposal.reasons)
    return f'"""{proposal.candidate.describe()}\n\n{text}\n"""\n'


def _imports(proposal: Proposal) -> list[str]:
    policies, plan = proposal.candidate.policies, _cut_with(proposal)
    core = ["fully_shard"]
    if policies.offload:
        core.append("CPUOffloadPolicy")
    if policies.param_dtype or policies.reduce_dtype:
        core.append("MixedPrecisionPolicy")
    suits_muon = policies.placements is muon_placements
    core += ["placements_for"] if suits_muon else []
    torch_lines = ["import torch"] if policies.param_dtype or policies.reduce_dtype or suits_muon else []
    torch_lines.append("from torch import nn")
    mesh_names = "init_device_mesh" if plan is not cut_projections else "DeviceMesh, init_device_mesh"
    torch_lines.append(f"from torch.distributed.device_mesh import {mesh_names}")
    if plan is cut_projections:
        styles = "ColwiseParallel, RowwiseParallel, parallelize_module"
        torch_lines.append(f"from torch.distributed.tensor.parallel import {styles}")
    torch_lines += ["from torch.utils.checkpoint import checkpoint"] if policies.checkpoint else []
    own = [] if plan is None or plan is cut_projections else ["", "from {} import {}".format(*_name_of(plan))]
    if policies.placements is not None and not suits_muon:
        own += [*([] if own else [""]), "from {} import {}".format(*_name_of(policies.placements))]
    return [*torch_lines, "", f"from shardkit.core import {', '.join(sorted(core, key=str.swapcase))}", *own]


def _keywords(policies: Policies) -> list[str]:
    dtypes: list[tuple[str, torch.dtype | None]] = [
        ("param_dtype", policies.param_dtype),
        ("reduce_dtype", policies.reduce_dtype),
    ]
    told = ", ".join(f"{name}={dtype}" for name, dtype in dtypes if dtype is not None)
    keywords = [f"mp_policy=MixedPrecisionPolicy({told})"] if told else []
    return [*keywords, "offload_policy=CPUOffloadPolicy()"] if policies.offload else keywords


def _blocks(proposal: Proposal) -> str:
    """The blocks as an expression: a whole list of the model where they are one, else by name."""
    if proposal.container is None:
        return f"map(model.get_submodule, {list(proposal.blocks)!r})"
    if all(part.isidentifier() for part in proposal.container.split(".") if part):
        return ".".join(["model", *filter(None, [proposal.container])])
    return f"model.get_submodule({proposal.container!r})"
