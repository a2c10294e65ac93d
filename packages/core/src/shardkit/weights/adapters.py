"""LoRA adapters, as peft adds them, merged into the weights that are sent: for the parts that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Factors = tuple[torch.Tensor, torch.Tensor]
"""Two whole matrices, which are small, whose product is added to a weight."""


def merged(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Factors]]:
    """The state of a model by the names that it has without adapters, and what its active adapters add. Collective.
    Adapters of another kind than low-rank factors of a linear layer are refused.
    """
    whole = model.state_dict()
    state: dict[str, torch.Tensor] = {}
    copies: dict[str, torch.Tensor] = {}
    factors: dict[str, Factors] = {}
    layer: Any
    for path, layer in model.named_modules():
        # A module that is trained as a whole, such as a head, has the original beside it.
        if hasattr(layer, "modules_to_save") and hasattr(layer, "original_module") and not layer.disable_adapters:
            for adapter in layer.active_adapters:
                inside = f"{path}.modules_to_save.{adapter}."
                copies |= {
                    f"{path}.{one.removeprefix(inside)}": t for one, t in whole.items() if one.startswith(inside)
                }
        if (
            hasattr(layer, "base_layer")
            and hasattr(layer, "active_adapters")
            and (found := _factors(path, layer, whole))
        ):
            factors[_plain(f"{path}.weight")] = found
    for name, tensor in whole.items():
        if ".modules_to_save." not in name and ".lora_" not in name:
            plain = name.replace(".original_module.", ".")
            state[_plain(plain)] = copies.get(plain, tensor)
    return state, factors


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _factors(path: str, layer: Any, state: Mapping[str, torch.Tensor]) -> Factors | None:
    """Of the active adapters of a layer together; None if there are none, or if they are merged already."""
    if layer.merged or layer.disable_adapters:
        return None
    others = {*layer.adapter_layer_names, "lora_variant", "lora_magnitude_vector"} - {"lora_A", "lora_B"}
    odd = any(one in getattr(layer, kind, ()) for kind in others for one in layer.active_adapters)
    odd |= getattr(layer, "fan_in_fan_out", False) or getattr(layer, "parameter_name", "weight") != "weight"
    active = [one for one in layer.active_adapters if one in getattr(layer, "lora_A", ())]
    if odd or (active and not (layer.base_layer.weight.ndim == 2 and layer.base_layer.weight.is_floating_point())):
        raise ValueError(
            f"'{path}': its adapter is not a product of two matrices that is added to a linear layer; pass a copy of "
            "the model with the adapter merged"
        )
    left, right = [], []
    for one in active:
        if f"{path}.lora_B.{one}.bias" in state:
            raise ValueError(f"'{path}': its adapter has a bias; pass a copy of the model with it merged")
        left.append(_whole(state[f"{path}.lora_B.{one}.weight"]).float() * layer.scaling[one])
        right.append(_whole(state[f"{path}.lora_A.{one}.weight"]).float())
    return (torch.cat(left, 1), torch.cat(right)) if active else None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
