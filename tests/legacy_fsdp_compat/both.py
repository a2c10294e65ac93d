"""The same FSDP1 script on stock and on ours: how to build, wrap, train and look at a model with either."""

import functools
import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock_fsdp
import torch.distributed.fsdp.wrap as stock_wrap
import torch.nn.functional as F
from torch import Tensor, nn

import shardkit.legacy_fsdp_compat as our_fsdp
import shardkit.legacy_fsdp_compat.wrap as our_wrap
from shardkit.core.checkpoint.torch_files import storages_in

CPU = torch.device("cpu")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


class Block(nn.Module):
    """A residual block whose dims no world size but 1 divides, with a buffer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, hidden), nn.Linear(hidden, 5)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale.to(x.dtype)


class Model(nn.Module):
    """Blocks between a layer of one row and a norm; rank 2 of 3 holds nothing of some parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 5)
        self.blocks = nn.ModuleList([Block(7), Block(2)])
        self.norm = nn.LayerNorm(5)
        self.out = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.emb(tokens))))


@dataclass(frozen=True)
class Setting:
    """One way to wrap and train. Everything pickles, so that settings travel to the ranks."""

    strategy: str = "FULL_SHARD"
    use_orig_params: bool = True
    optimizer: str = "sgd"
    policy: bool = True

    def __str__(self) -> str:
        return f"{self.strategy}-{'orig' if self.use_orig_params else 'flat'}-{self.optimizer}"


def build(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-3, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, amsgrad=True, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 1, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, target = batch(rank, step)
    return F.mse_loss(model(inputs).float(), target)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    """Takes plain steps. Returns the losses, averaged over ranks so that every rank has the same list."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def alone(world_size: int, steps: int = 3, optimizer: Any = OPTIMIZERS["sgd"]) -> tuple[Model, torch.optim.Optimizer]:
    """The same training in one process, without any FSDP."""
    model = build()
    its = optimizer(model.parameters())
    for step in range(steps):
        its.zero_grad()
        backward_alone(model, world_size, step)
        its.step()
    return model, its


def backward_alone(model: nn.Module, world_size: int, step: int) -> None:
    (sum(loss_of(model, rank, step) for rank in range(world_size)) / world_size).backward()


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The model's parameters, with names as in a state dict."""
    return [(name.replace("_fsdp_wrapped_module.", ""), parameter) for name, parameter in model.named_parameters()]


def assert_same_tensors(expected: dict[str, Any], seen: dict[str, Any], **tolerance: Any) -> None:
    assert list(expected) == list(seen)
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def records(path: Path) -> dict[str, bytes]:
    """Every storage in a file of torch.save, by its number."""
    data = path.read_bytes()
    places = storages_in(io.BytesIO(data), 0, len(data), str(path))
    return {key: data[start : start + length] for key, (start, length) in places.items()}


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def tensors_of(checkpoint: Any, *base: Any) -> dict[tuple[Any, ...], Tensor]:
    """The tensors of a checkpoint that migrate has opened, by the paths below `base`."""
    return {
        path[len(base) :]: stored.read(0, stored.numel).view(stored.shape)
        for path, stored in checkpoint.tensors.items()
        if path[: len(base)] == base
    }


@functools.cache
def _api(engine: str) -> Any:
    package, wrapping = (stock_fsdp, stock_wrap) if engine == "stock" else (our_fsdp, our_wrap)
    names = {name: getattr(package, name) for name in dir(package) if not name.startswith("__")}
    names |= {name: getattr(wrapping, name) for name in dir(wrapping) if not name.startswith("_")}
    return SimpleNamespace(**names, FSDP=package.FullyShardedDataParallel)


@dataclass(unsafe_hash=True)
class Engine:
    """Stock's or our FSDP1."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def api(self) -> Any:
        """Every public name of the package and of its wrap module."""
        return _api(self.name)

    def wrapped(self, setting: Setting, model: nn.Module | None = None, **arguments: Any) -> Any:
        """The model as an FSDP module, blocks as units of their own if the setting says so."""
        arguments.setdefault("sharding_strategy", self.api.ShardingStrategy[setting.strategy])
        if setting.policy:
            arguments.setdefault("auto_wrap_policy", self.api.ModuleWrapPolicy({Block}))
        return self.api.FSDP(model or build(), use_orig_params=setting.use_orig_params, device_id=CPU, **arguments)

    def start(self, setting: Setting, seed: int, **arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
        model = self.wrapped(setting, build(seed), **arguments)
        return model, OPTIMIZERS[setting.optimizer](model.parameters())

    def of_type(self, kind: str, model: nn.Module) -> Any:
        """A context in which state dicts are FULL, SHARDED or LOCAL."""
        return self.api.FSDP.state_dict_type(model, self.api.StateDictType[f"{kind}_STATE_DICT"])

    def state_of(self, kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        with self.of_type(kind, model):
            return {"model": model.state_dict(), "optim": self.api.FSDP.optim_state_dict(model, optimizer)}

    def load_state(self, kind: str, model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads the state dicts; the optimizer's if there is one."""
        # Stock cannot load a LOCAL state dict that it wrote with use_orig_params=True in strict mode.
        strict = not (kind == "LOCAL" and self == STOCK)
        with self.of_type(kind, model):
            found = model.load_state_dict(state["model"], strict=strict)
            assert strict or not found.missing_keys
            assert strict or all(name.endswith("_flat_param") for name in found.unexpected_keys)
            if "optim" in state:
                optimizer.load_state_dict(self.api.FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """The full state dict, on every rank."""
        with self.of_type("FULL", model):
            return {name: value.clone() for name, value in model.state_dict().items()}

    def gradients(self, model: nn.Module) -> dict[str, Tensor | None]:
        """By clean name, whole."""
        with self.api.FSDP.summon_full_params(model, with_grads=True):
            return {name: None if p.grad is None else p.grad.clone() for name, p in named_parameters(model)}

    def local_moments(self, model: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
        """Whole optimizer state put together from the ranks' rows, as stock's own gathering is wrong."""
        whole: dict[str, dict[str, Tensor]] = {}
        for fqn, values in self.state_of("SHARDED", model, optimizer)["optim"]["state"].items():
            for name, value in values.items():
                if not hasattr(value, "local_shards"):
                    whole.setdefault(fqn, {})[name] = value
                    continue
                rows: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(rows, [shard.tensor for shard in value.local_shards()])
                whole.setdefault(fqn, {})[name] = torch.cat([row for found in rows for row in found])
        return whole


STOCK, OURS = Engine("stock"), Engine("ours")
