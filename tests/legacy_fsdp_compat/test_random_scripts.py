"""Random FSDP1 scripts: losses, weights, gradients and state dicts are those of stock."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.legacy_fsdp_compat.both import (
    CPU,
    OPTIMIZERS,
    OURS,
    STOCK,
    Block,
    api,
    build,
    loss_of,
    named_parameters,
    whole_gradients,
    whole_state,
)
from tests.support import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

ACTIONS = (
    "step",
    "accumulate",
    "zero after no_sync",
    "zero in place",
    "clip",
    "scale while summoned",
    "summon with gradients",
    "evaluate",
    "reload FULL_STATE_DICT",
    "reload SHARDED_STATE_DICT",
    "reload LOCAL_STATE_DICT",
    "reload optimizer",
    "freeze",
    "write in place",
)


@dataclass(frozen=True)
class Script:
    """How a model is wrapped, and the actions on it."""

    strategy: str
    use_orig_params: bool
    policy: str
    dtypes: tuple[str | None, str | None]
    ignored: str
    frozen: str
    tied: bool
    early_optimizer: bool
    optimizer: str
    groups: bool
    actions: tuple[str, ...]


SCRIPTS = st.builds(
    Script,
    strategy=st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
    use_orig_params=st.booleans(),
    policy=st.sampled_from(["", "Block", "Linear"]),
    dtypes=st.sampled_from([(None, None), ("bfloat16", None), ("bfloat16", "float32"), (None, "float64")]),
    ignored=st.sampled_from(["", "out", "blocks.1.up", "blocks.0"]),
    frozen=st.sampled_from(["", "", "inp", "blocks.0", "norm"]),
    tied=st.booleans(),
    early_optimizer=st.booleans(),
    optimizer=st.sampled_from(["sgd", "momentum", "adam"]),
    groups=st.booleans(),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=6).map(tuple),
)


class Run:
    """A script on one engine; the values that it sees go into `log`."""

    def __init__(self, engine: str, rank: int, script: Script, log: list[Any]) -> None:
        self.engine, self.rank, self.script, self.log = engine, rank, script, log
        self.names: Any = api(engine)
        self._batches = 0
        plain = build()
        if script.tied and script.policy != "Linear":  # within one unit: stock cannot have ties across units
            plain.norm.bias = plain.inp.bias
        if script.frozen and script.use_orig_params:
            plain.get_submodule(script.frozen).requires_grad_(False)
        early = script.early_optimizer and script.use_orig_params
        optimizer = self._optimizer(plain) if early else None
        self.model = self._wrapped(plain)
        self.optimizer = optimizer or self._optimizer(self.model)

    def _wrapped(self, plain: nn.Module) -> Any:
        script, names = self.script, self.names
        param_dtype, reduce_dtype = (getattr(torch, one) if one else None for one in script.dtypes)
        classes = {"": None, "Block": {Block}, "Linear": {nn.Linear}}[script.policy]
        return names.FSDP(
            plain,
            sharding_strategy=names.ShardingStrategy[script.strategy],
            auto_wrap_policy=classes and names.ModuleWrapPolicy(classes),
            mixed_precision=names.MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
            ignored_modules=[plain.get_submodule(script.ignored)] if script.ignored else None,
            use_orig_params=script.use_orig_params,
            device_id=CPU,
        )

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [parameter for _, parameter in named_parameters(model)]
        if not (self.script.groups and self.script.use_orig_params):
            return OPTIMIZERS[self.script.optimizer](parameters)
        return OPTIMIZERS[self.script.optimizer](
            [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]
        )

    def _loss(self) -> torch.Tensor:
        self._batches += 1
        return loss_of(self.model, self.rank, self._batches)

    def _step(self) -> None:
        loss = self._loss()
        self.log.append(loss.item())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward_without_sync(self) -> None:
        with self.model.no_sync():
            self._loss().backward()

    def do(self, action: str) -> None:
        """One action and a step, which leave no gradient behind."""
        fsdp = self.names.FSDP
        if action in ("accumulate", "zero after no_sync", "zero in place"):
            self._backward_without_sync()
            if action != "accumulate":
                self.model.zero_grad(set_to_none=action == "zero after no_sync")
                self._backward_without_sync()
        elif action == "clip" and not self.script.ignored:  # whose gradients make the norm another one on each rank
            self._loss().backward()
            self.log.append(self.model.clip_grad_norm_(0.1))
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif action == "scale while summoned":
            with fsdp.summon_full_params(self.model), torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.9)
        elif action == "summon with gradients" and self.script.use_orig_params:
            self._loss().backward()
            trained = {name for name, one in named_parameters(self.model) if one.requires_grad}
            gradients = whole_gradients(self.engine, self.model)  # of frozen parameters stock has zeros
            self.log.append({name: one for name, one in gradients.items() if name in trained})
            self.optimizer.zero_grad()
        elif action == "evaluate":
            self.model.eval()
            with torch.no_grad():
                self.log.append(self._loss().item())
            self.model.train()
        elif action == "reload optimizer" and self.script.optimizer != "adam":  # stock mixes up its state on CPU
            state = fsdp.optim_state_dict(self.model, self.optimizer)
            self.log.append({name: _copied(dict(values)) for name, values in sorted(state["state"].items())})
            self.optimizer.load_state_dict(fsdp.optim_state_dict_to_load(self.model, self.optimizer, state))
        elif action.endswith("_STATE_DICT") and not ("LOCAL" in action and self.script.use_orig_params):
            self._reload(self.names.StateDictType[action.removeprefix("reload ")])  # stock cannot load those LOCAL ones
        elif action == "freeze" and self.script.use_orig_params:
            for name, parameter in named_parameters(self.model):
                if name.startswith("blocks.1"):
                    parameter.requires_grad_(not parameter.requires_grad)
        elif action == "write in place":
            for parameter in self.model.parameters():
                parameter.data.mul_(1.1)
        self._step()

    def _reload(self, kind: Any) -> None:
        with self.names.FSDP.state_dict_type(self.model, kind):
            state = self.model.state_dict()
            self.log.append({name: type(value).__name__ for name, value in state.items()})
            self.model.load_state_dict(_copied(dict(state)))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return value.clone() if type(value) is torch.Tensor else value


def log_of(engine: str, rank: int, script: Script) -> tuple[list[Any], str]:
    """The values that a script sees, and the error that ended it."""
    log: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run = Run(engine, rank, script, log)
            for action in script.actions:
                log.append(action)
                run.do(action)
            log.append(whole_state(engine, run.model))
        except Exception as error:  # noqa: BLE001 - whichever it is, it is part of the result
            return log, f"{type(error).__name__}: {error}"
    return log, ""


def difference(theirs: Any, mine: Any, tolerance: float) -> str | None:
    """Where two logs differ first."""
    if isinstance(theirs, torch.Tensor | float) and isinstance(mine, torch.Tensor | float):
        close = torch.allclose(torch.as_tensor(theirs).double(), torch.as_tensor(mine).double(), tolerance, tolerance)
        return None if close else f"{theirs} and {mine}"
    if not isinstance(theirs, dict | list) or type(theirs) is not type(mine):
        return None if theirs == mine else f"{theirs!r} and {mine!r}"
    if isinstance(theirs, list):
        theirs, mine = dict(enumerate(theirs)), dict(enumerate(mine))
    if list(theirs) != list(mine):
        return f"names {list(theirs)} and {list(mine)}"
    found = ((name, difference(one, mine[name], tolerance)) for name, one in theirs.items())
    return next((f"{name}: {text}" for name, text in found if text is not None), None)


def compare(rank: int, world_size: int, script: Script) -> str | None:
    """Compares up to the point where stock raises: ours may go on, because it supports more."""
    (theirs, their_error), (mine, error) = log_of(STOCK, rank, script), log_of(OURS, rank, script)
    if their_error:
        mine = mine[: len(theirs)]
    elif error:
        return error
    return difference(theirs, mine, 3e-2 if "bfloat16" in script.dtypes else 1e-4)


@settings(max_examples=16, derandomize=True, suppress_health_check=list(HealthCheck))
@given(SCRIPTS)
def test_random_scripts(script: Script):
    found = run_ranks(2, compare, script)
    assert not any(found), found
