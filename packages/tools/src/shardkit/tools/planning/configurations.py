"""A proposal as a configuration of accelerate or torchtitan."""

from __future__ import annotations

import math

from shardkit.tools.estimating.job import Policies
from shardkit.tools.planning.search import Proposal

_MIXED = {"bfloat16": "bf16", "float16": "fp16"}


def accelerate_of(proposal: Proposal) -> str:
    """A file for `accelerate launch --config_file`."""
    candidate, policies, axes = proposal.candidate, proposal.candidate.policies, dict(proposal.candidate.axes)
    ranks = math.prod(axes.values())
    selective = "selective recomputation" if policies.checkpoint == "selective" else ""
    return f"""\
{_head(proposal, selective)}
# In the script: micro-batches of {candidate.micro_batch}, {proposal.accumulate} for each step of the optimizer.
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: "{_MIXED.get(proposal.estimate.dtypes["computation"], "no")}"
num_machines: {math.ceil(ranks / proposal.estimate.machine.ranks_per_host)}
num_processes: {ranks}
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: {",".join(proposal.classes)}
  fsdp_reshard_after_forward: {str(policies.reshard_after_forward is not False).lower()}
  fsdp_activation_checkpointing: {str(bool(policies.checkpoint)).lower()}
  fsdp_offload_params: {str(policies.offload).lower()}
  fsdp_cpu_ram_efficient_loading: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
parallelism_config:
  parallelism_config_dp_replicate_size: {axes.get("dp_replicate", 1)}
  parallelism_config_dp_shard_size: {axes["dp_shard"]}
  parallelism_config_tp_size: {axes.get("tp", 1)}
"""


def torchtitan_of(proposal: Proposal) -> str:
    """Options of torchtitan's command. Versions from 0.3 on have no files of TOML."""
    candidate, policies, axes = proposal.candidate, proposal.candidate.policies, dict(proposal.candidate.axes)
    recompute = {False: "none", True: "FullAC", "selective": "SelectiveAC"}[policies.checkpoint]
    return f"""\
{_head(proposal, "offload" if policies.offload else "")}
# Activation checkpointing, which the config function of the model chooses: {recompute}.
--training.local_batch_size {candidate.micro_batch}
--training.global_batch_size {candidate.micro_batch * candidate.samplers * proposal.accumulate}
--parallelism.data_parallel_replicate_degree {axes.get("dp_replicate", 1)}
--parallelism.data_parallel_shard_degree {axes["dp_shard"]}
--parallelism.tensor_parallel_degree {axes.get("tp", 1)}
--parallelism.fsdp_reshard_after_forward {"never" if policies.reshard_after_forward is False else "always"}
"""


def _head(proposal: Proposal, *missing: str) -> str:
    """Comments: what the proposal is, and what the file does not say."""
    candidate, policies = proposal.candidate, proposal.candidate.policies
    prefetch = policies.prefetch_depth != Policies.prefetch_depth
    choices = {
        "prefetching": prefetch,
        "placements": policies.placements,
        "overlap_step": policies.overlap_step,
        "files": policies.resident,
        "offload_activations": policies.offload_activations,
    }
    left_out = [*filter(None, missing), *(name for name, chosen in choices.items() if chosen)]
    told = f"\n# The estimate also has {', '.join(left_out)}, which this file cannot say." if left_out else ""
    return f"# {candidate.describe()}{told}"
