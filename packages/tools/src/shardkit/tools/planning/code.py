"""A proposal as Python code to paste."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from shardkit.tools.estimating.hf import COLUMNS, ROWS, cut_projections
from shardkit.tools.estimating.job import KEPT, muon_placements
from shardkit.tools.planning.search import Proposal

_RECOMPUTE = '''\
def recompute(block: nn.Module) -> None:
    """Makes a block compute its activations again in backward{but}."""
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, {more}**kwargs)


'''
_KEPT = f"""\
kept = [getattr(torch.ops.aten, name).default for name in {list(KEPT)}]
contexts = partial(create_selective_checkpoint_contexts, kept)


"""


_CUT = f'''\
def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts attention heads and feed-forward features of every layer over `mesh`."""
    styles = {{name: ColwiseParallel() for name in {list(COLUMNS)}}}
    styles |= {{name: RowwiseParallel() for name in {list(ROWS)}}}
    for block in model.modules():
        if hasattr(block, "self_attn") and hasattr(block, "mlp"):
            parallelize_module(block, mesh, styles)


'''

# Names that the code may use, by the module to import them from.
_NAMES = {
    "functools": ("partial",),
    "torch": ("nn",),
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "torch.distributed.tensor.parallel": ("ColwiseParallel", "RowwiseParallel", "parallelize_module"),
    "torch.utils.checkpoint": ("checkpoint", "create_selective_checkpoint_contexts"),
    "shardkit.core": (
        "fully_shard",
        "placements_for",
        "CPUOffloadPolicy",
        "FileTier",
        "MixedPrecisionPolicy",
        "offload_activations",
        "overlap_step",
    ),
}


def code_of(proposal: Proposal) -> str:
    """A Python module with a function `shard(model)`, which makes the mesh and shards the model in place."""
    candidate, policies = proposal.candidate, proposal.candidate.policies
    names, sizes = zip(*candidate.axes, strict=True)
    times = f", {proposal.accumulate} for each step" if proposal.accumulate > 1 else ""
    lines = [
        "def shard(model: nn.Module) -> nn.Module:",
        f'    """Shards `model` in place; every rank makes micro-batches of {candidate.micro_batch}{times}."""',
        f"    mesh = init_device_mesh({proposal.estimate.machine.device!r}, {sizes!r}, mesh_dim_names={names!r})",
    ]
    before = ""
    theirs: list[Callable[..., Any]] = []  # the user's functions
    if policies.checkpoint:
        some = policies.checkpoint == "selective"
        but, more = (", but for `kept`", "context_fn=contexts, ") if some else ("", "")
        before += (_KEPT if some else "") + _RECOMPUTE.format(but=but, more=more)
    if proposal.tensor_parallel is not None and "tp" in names:
        if proposal.tensor_parallel is cut_projections:
            before, cut = before + _CUT, "cut"
        else:
            theirs.append(proposal.tensor_parallel)
            cut = proposal.tensor_parallel.__name__
        lines.append(f'    {cut}(model, mesh["tp"])  # needs shardkit-tp-adapter')
        if candidate.samplers > 1:
            lines.append("    # Ranks that differ only in the axis 'tp' need the same samples.")
        lines.append(f"    mesh = mesh[{', '.join(repr(name) for name in names if name != 'tp')}]")
    if policies.placements is muon_placements:
        lines.append("    placements = placements_for(model, torch.optim.Muon)")
    elif policies.placements is not None:
        theirs.append(policies.placements)
        lines.append(f"    placements = {policies.placements.__name__}(model)")
    keywords = _keywords(proposal)
    if proposal.blocks:
        reshard = f"reshard_after_forward={policies.reshard_after_forward}"
        lines.append(f"    for block in {_blocks(proposal)}:")
        lines += ["        recompute(block)"] if policies.checkpoint else []
        lines.append(f"        fully_shard(block, {', '.join(['mesh=mesh', reshard, *keywords])})")
    lines += [
        f"    fully_shard(model, {', '.join(['mesh=mesh', *keywords])})",
        f"    model.set_prefetch_depth({policies.prefetch_depth})",
        *(["    offload_activations(model)"] if policies.offload_activations else []),
        "    return model",
    ]
    if policies.overlap_step:
        states = f", states=FileTier(directory, {policies.resident})" if policies.resident is not None else ""
        taken = ", directory: str" if states else ""
        lines += ["", "", f"def overlap(optimizer: torch.optim.Optimizer{taken}) -> None:"]
        lines += ['    """Call it with the optimizer of the sharded model."""', f"    overlap_step(optimizer{states})"]
    body = before + "\n".join(lines) + "\n"
    imports = _imports(body) + [f"from {one.__module__} import {one.__name__}" for one in theirs]
    if theirs:
        imports.insert(-len(theirs), "")
    reasons = "\n".join(f"- {reason}" for reason in proposal.reasons)
    return f'"""{candidate.describe()}\n\n{reasons}\n"""\n\n' + "\n".join(imports) + f"\n\n\n{body}"


def _imports(body: str) -> list[str]:
    used = set(re.findall(r"\w+", body))
    found = {module: [name for name in names if name in used] for module, names in _NAMES.items()}
    lines = [f"from {module} import {', '.join(names)}" for module, names in found.items() if names]
    return [*(["import torch"] if "torch." in body else []), *lines[:-1], "", lines[-1]]


def _keywords(proposal: Proposal) -> list[str]:
    policies = proposal.candidate.policies
    keywords = []
    if policies.param_dtype is not None or policies.reduce_dtype is not None:
        reduced = proposal.estimate.dtypes["reduction"]  # of several dtypes, each is summed in its own
        reduced = "None" if " " in reduced else f"torch.{reduced}"
        keywords.append(f"mp_policy=MixedPrecisionPolicy(param_dtype={policies.param_dtype}, reduce_dtype={reduced})")
    keywords += ["offload_policy=CPUOffloadPolicy()"] if policies.offload else []
    return keywords + (["shard_placement_fn=placements"] if policies.placements is not None else [])


def _blocks(proposal: Proposal) -> str:
    """An expression for the blocks: lists of the model and other modules, or all by name if they are in no list."""
    if not proposal.lists:
        return f"map(model.get_submodule, {list(proposal.blocks)!r})"
    parts: dict[str, None] = {}  # ordered; a list stands where the first of its modules does
    for fqn in proposal.blocks:
        parent = fqn.rpartition(".")[0]
        parts[f"*{_submodule(parent)}" if parent in proposal.lists else _submodule(fqn)] = None
    return next(iter(parts))[1:] if len(parts) == 1 else f"[{', '.join(parts)}]"


def _submodule(fqn: str) -> str:
    if all(part.isidentifier() for part in fqn.split(".") if part):
        return ".".join(["model", *filter(None, [fqn])])
    return f"model.get_submodule({fqn!r})"
