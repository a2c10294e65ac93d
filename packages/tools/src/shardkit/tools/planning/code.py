"""A proposal as Python code to paste."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardkit.tools.estimating.policies import Policies
from shardkit.tools.planning.proposals import Proposal

__all__ = ["code_of"]

_RECOMPUTE = '''\
def recompute(block: nn.Module) -> None:
    """Makes a block compute its activations again in backward."""
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


'''


def code_of(proposal: Proposal) -> str:
    """A module with a function `shard(model)`, which makes the mesh and shards the model in place."""
    candidate, policies = proposal.candidate, proposal.candidate.policies
    device = "cuda" if proposal.estimate.machine.device == "cuda" else "cpu"
    sizes, names = (tuple(column) for column in zip(*((size, name) for name, size in candidate.axes), strict=True))
    keywords = ["mesh=mesh", *_keywords(policies)]
    loop = [f"    for block in {_blocks(proposal.blocks)}:"]
    loop += ["        recompute(block)"] if policies.checkpoint else []
    reshard = f"reshard_after_forward={policies.reshard_after_forward}"
    loop.append(f"        fully_shard(block, {', '.join([keywords[0], reshard, *keywords[1:]])})")
    lines = [
        _docstring(proposal),
        *_imports(policies),
        "\n",
        (_RECOMPUTE if policies.checkpoint else "") + "def shard(model: nn.Module) -> nn.Module:",
        f'    """Shards `model` in place; every rank makes micro-batches of {candidate.micro_batch}."""',
        f"    mesh = init_device_mesh({device!r}, {sizes!r}, mesh_dim_names={names!r})",
        *(loop if proposal.blocks else []),
        f"    fully_shard(model, {', '.join(keywords)})",
        f"    model.set_prefetch_depth({policies.prefetch_depth})",
        "    return model",
    ]
    return "\n".join(lines) + "\n"


def _docstring(proposal: Proposal) -> str:
    text = "\n".join(f"- {reason}" for reason in proposal.reasons)
    return f'"""{proposal.candidate.describe()}\n\n{text}\n"""\n'


def _imports(policies: Policies) -> list[str]:
    core = ["fully_shard"]
    if policies.offload:
        core.append("CPUOffloadPolicy")
    if policies.param_dtype or policies.reduce_dtype:
        core.append("MixedPrecisionPolicy")
    torch_lines = ["import torch"] if policies.param_dtype or policies.reduce_dtype else []
    torch_lines += ["from torch import nn", "from torch.distributed.device_mesh import init_device_mesh"]
    torch_lines += ["from torch.utils.checkpoint import checkpoint"] if policies.checkpoint else []
    return [*torch_lines, "", f"from shardkit.core import {', '.join(sorted(core, key=str.swapcase))}"]


def _keywords(policies: Policies) -> list[str]:
    dtypes: list[tuple[str, torch.dtype | None]] = [
        ("param_dtype", policies.param_dtype),
        ("reduce_dtype", policies.reduce_dtype),
    ]
    told = ", ".join(f"{name}={dtype}" for name, dtype in dtypes if dtype is not None)
    keywords = [f"mp_policy=MixedPrecisionPolicy({told})"] if told else []
    return [*keywords, "offload_policy=CPUOffloadPolicy()"] if policies.offload else keywords


def _blocks(blocks: Sequence[str]) -> str:
    """The blocks as an expression: a whole list of the model where it is one, else by name."""
    parents = {fqn.rpartition(".")[0] for fqn in blocks}
    numbers = [fqn.rpartition(".")[2] for fqn in blocks]
    if len(parents) == 1 and numbers == [str(i) for i in range(len(blocks))]:
        (parent,) = parents
        return f"model.{parent}" if parent else "model"
    return f"map(model.get_submodule, {list(blocks)!r})"
