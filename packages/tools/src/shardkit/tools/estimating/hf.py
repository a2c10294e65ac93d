"""Training jobs from a Hugging Face config: transformers builds the model on the meta device; it can be cut (TP)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shardkit.commands.users_code import users_code
from shardkit.tools.estimating.job import EstimateError, MakeOptimizer, Policies, TrainingJob
from shardkit.tools.files import read_json

# Projections whose output features are cut, and those that take their outputs, by their usual names.
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")

_TASKS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "MASKED_LM")


def job_from_config(
    path: Path, batch: int, sequence: int, optimizer: MakeOptimizer, policies: Policies, *, own_dtype: bool = False
) -> TrainingJob:
    """A training job for the model of a config.json: next token, sequence to sequence, or image classes.

    Parameters are created in float32. Unless policies or `own_dtype` differ, computation uses the config's dtype.

    Raises:
        EstimateError: without transformers, if the file is not a config, or if transformers cannot build the model.
    """
    config = _config(path)
    config.use_cache = False
    dtype = getattr(config, "dtype", None)
    if policies.param_dtype is None and not own_dtype and dtype in (torch.bfloat16, torch.float16):
        policies = replace(policies, param_dtype=dtype)
    # Other ways to run experts have data-dependent shapes, or, without a kernel for float32, need more memory.
    experts = "grouped_mm" if policies.param_dtype == torch.bfloat16 else "batched_mm"
    model = partial(_built, _class_of(config, path), config, experts, path)
    inputs = partial(_batch, config, batch, sequence)
    return TrainingJob(model, inputs, optimizer, policies=policies, tensor_parallel=cut_projections)


def _config(path: Path) -> Any:
    """The config object of transformers. Nothing is downloaded, and no code that a config names is run."""
    settings = read_json(path, dict[str, Any], "a Hugging Face config", EstimateError)
    if not isinstance(settings.get("model_type"), str):
        raise EstimateError(f'{path} is not a Hugging Face config: it has no "model_type"; choose another file')
    if settings.get("torch_dtype") == "auto":  # "auto" means the dtype of weights, which do not exist here
        del settings["torch_dtype"]
    with users_code(f"the config {path}", "expected a config that this transformers knows", EstimateError):
        return _transformers().AutoConfig.for_model(settings.pop("model_type"), **settings)


def _transformers() -> Any:
    try:
        found: Any = importlib.import_module("transformers")  # partly annotated
    except ImportError as error:
        raise EstimateError(f"--hf-config needs transformers; run: pip install 'transformers>=5' ({error})") from error
    found.logging.set_verbosity_error()
    return found


def _class_of(config: Any, path: Path) -> Callable[[Any], nn.Module]:
    for task in _TASKS:
        mapping = getattr(_transformers(), f"MODEL_FOR_{task}_MAPPING")
        if type(config) in mapping:
            found: Callable[[Any], nn.Module] = mapping[type(config)]
            return found
    raise EstimateError(
        f"{path}: transformers has no language model or image classifier of model_type {config.model_type!r}; give a "
        "factory instead (shardkit estimate pkg.module:function --inputs ...)"
    )


def _built(model_class: Callable[[Any], nn.Module], config: Any, experts: str, path: Path) -> nn.Module:
    hint = "expected the config of a model that transformers builds without weights"
    with users_code(f"building the model of {path}", hint, EstimateError), torch.device("meta"):
        model = model_class(config)
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is not None and any(hasattr(module, "experts") for module in model.modules()):
        choose(experts)
    return model.to_empty(device="cpu").train()


def _batch(config: Any, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Token ids of shape (batch, sequence), or images of shape (batch, channels, height, width)."""
    size = getattr(config, "image_size", None)
    text = config.get_text_config()
    if not hasattr(text, "vocab_size") and size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.rand(batch, config.num_channels, height, width)}
    tokens = torch.randint(text.vocab_size, (batch, sequence))
    return {"input_ids": tokens, "decoder_input_ids": tokens} if config.is_encoder_decoder else {"input_ids": tokens}


def cut_projections(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts attention heads and feed-forward features of all layers with the usual projections over `mesh`, in place.

    Raises:
        EstimateError: if no layer has them, or heads or features cannot be divided evenly.
    """
    modules = model.named_modules(remove_duplicate=False)
    linear = {fqn: module for fqn, module in modules if isinstance(module, nn.Linear)}
    prefixes = {block: f"{fqn}." if fqn else "" for fqn, block in model.named_modules()}
    blocks = [block for block, fqn in prefixes.items() if all(fqn + name in linear for name in (*COLUMNS, *ROWS))]
    if not blocks:
        raise EstimateError(f"no layer of the model has the projections {', '.join((*COLUMNS, *ROWS))}; give --tp-plan")
    for block in blocks:
        head_dim = block.get_submodule("self_attn").head_dim
        for name in COLUMNS:
            unit = head_dim if isinstance(head_dim, int) and name.startswith("self_attn.") else 1
            units, fqn = linear[prefixes[block] + name].out_features // unit, prefixes[block] + name
            if units % mesh.size():
                raise EstimateError(
                    f"'{fqn}' has {units} {'heads' if unit > 1 else 'features'}, which {mesh.size()} ranks of the axis "
                    "'tp' cannot share evenly; use a size that divides them"
                )
        styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
        styles |= {name: RowwiseParallel() for name in ROWS}
        parallelize_module(block, mesh, styles, src_data_rank=None)  # nothing is sent: there is no data
