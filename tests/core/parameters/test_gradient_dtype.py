"""In which dtypes parameters compute, and gradients accumulate, are summed and arrive."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import Tensor, nn

import shardkit.core as shardkit
from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed
from tests.support.sharding import shard_children
from tests.support.twins import assert_equal

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
since_2_15 = pytest.mark.skipif(not GRAD_DTYPE_DECIDES, reason="stock follows grad_dtype from torch 2.15 on")


def _dtypes() -> Any:
    """Notes the dtypes of its parameters while it runs."""

    def run(module: Any, x: Tensor) -> Tensor:
        module.seen = {fqn: parameter.dtype for fqn, parameter in module.named_parameters()}
        return x @ module.linear.weight.to(x.dtype).T + module.linear.bias.to(x.dtype)

    return Composed(run, linear=nn.Linear(8, 8))


def _keep_biases(parameter: nn.Parameter) -> torch.dtype | None:
    return parameter.dtype if parameter.ndim == 1 else None


def _trained(api: Any, shape: tuple[int, ...], own: str, micro_batches: int, **policy: Any) -> dict[str, Tensor]:
    """Gradients and parameters of two steps; `own` selects the `grad_dtype` of some parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(_dtypes(), _dtypes())
    for parameter in model.parameters():
        if own != "unset" and parameter.ndim == 2:
            parameter.grad_dtype = {"bfloat16": BFLOAT16, "float32": FLOAT32, "None": None}[own]
    mesh = rank_mesh(shape, ("replicate", "shard")[-len(shape) :])
    mp_policy = api.MixedPrecisionPolicy(**policy)
    api.fully_shard(model[0], mesh=mesh, mp_policy=mp_policy)
    api.fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    seen = {}
    for step in range(2):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            torch.manual_seed(100 * dist.get_rank() + 10 * step + micro)
            model(torch.randn(5, 8)).float().square().sum().backward()
        for fqn, parameter in model.named_parameters():
            assert parameter.grad is not None
            seen[f"step {step}: gradient of {fqn}"] = parameter.grad.to_local().clone()
            parameter.grad = None
            with torch.no_grad():
                local = parameter.to_local()
                local.sub_(0.01 * seen[f"step {step}: gradient of {fqn}"].to(local.dtype))
            seen[f"step {step}: {fqn}"] = local.clone()
    return seen


POLICIES = {
    "full": {},
    "bfloat16": {"param_dtype": BFLOAT16},
    "bfloat16-reduced-so": {"param_dtype": BFLOAT16, "reduce_dtype": BFLOAT16},
    "reduced-in-bfloat16": {"reduce_dtype": BFLOAT16},
}
DEFAULTS = [*POLICIES]
for name in ("bfloat16", "bfloat16-reduced-so"):
    POLICIES[f"{name}, biases kept"] = POLICIES[name] | {"param_dtype_override_fn": _keep_biases}


NEWER = [
    *((2, own, policy) for own in ("bfloat16", "float32", "None") for policy in DEFAULTS),
    *((4, own, "bfloat16") for own in ("unset", "bfloat16", "None")),
    *((2, "unset", policy) for policy in POLICIES if policy not in DEFAULTS),
]


@pytest.mark.parametrize(
    ("world_size", "own", "policy"),
    [
        *((world_size, "unset", policy) for world_size in (1, 2) for policy in DEFAULTS),
        *(pytest.param(*case, marks=since_2_15) for case in NEWER),
    ],
)
@on_ranks()
def test_dtypes_of_parameters(rank: int, world_size: int, own: str, policy: str) -> None:
    """A group whose parameters differ in `grad_dtype` is summed in the wider dtype. Four ranks are two replicas."""
    shape = (2, 2) if world_size == 4 else (world_size,)
    for micro_batches in (1, 3):
        assert_equal(*(_trained(api, shape, own, micro_batches, **POLICIES[policy]) for api in (shardkit, stock)))


# -- on every torch ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_override_is_asked_once_for_each_parameter(rank: int, world_size: int) -> None:
    model, calls = _dtypes(), []

    def choose(parameter: nn.Parameter) -> torch.dtype | None:
        calls.append(tuple(parameter.shape))
        return _keep_biases(parameter)

    policy = shardkit.MixedPrecisionPolicy(BFLOAT16, param_dtype_override_fn=choose)
    shardkit.fully_shard(model, mesh=rank_mesh((world_size,)), mp_policy=policy)
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
    assert model.seen == {"linear.weight": BFLOAT16, "linear.bias": FLOAT32}
    assert sorted(calls) == [(8,), (8, 8)]
    assert {parameter.grad.dtype for parameter in model.parameters()} == {FLOAT32}
    other = shardkit.MixedPrecisionPolicy(BFLOAT16, param_dtype_override_fn=lambda _: torch.float16)
    with pytest.raises(ValueError, match=r"returned torch\.float16 for parameter 'weight'; expected torch\.float32"):
        shardkit.fully_shard(nn.Linear(3, 3), mesh=rank_mesh((world_size,)), mp_policy=other)
    model = Composed(None, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    model.second.weight = known = model.first.weight
    policy = shardkit.MixedPrecisionPolicy(BFLOAT16, param_dtype_override_fn=lambda p: p.dtype if p is known else None)
    shard_children(model, mesh=rank_mesh((world_size,)), mp_policy=policy)
    model.second.unshard()
    assert (model.second.weight.dtype, model.second.bias.dtype) == (FLOAT32, BFLOAT16)


@on_ranks(1, 2)
def test_a_policy_does_not_cast_complex_parameters(rank: int, world_size: int) -> None:
    seen = []
    for policy in (shardkit.MixedPrecisionPolicy(), shardkit.MixedPrecisionPolicy(BFLOAT16, FLOAT32)):
        torch.manual_seed(0)
        model = Composed(lambda module, x: (x * module.filter).abs().sum(), filter=nn.Parameter(torch.randn(4, 3) * 1j))
        shardkit.fully_shard(model, mp_policy=policy)
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model(torch.ones(4, 3)).backward()
        assert model.filter.grad is not None
        seen.append(model.filter.grad.to_local())
    assert_equal(seen[1], seen[0])


@on_ranks(2)
def test_grad_dtype_outlives_casts_and_loads(rank: int, world_size: int) -> None:
    model = nn.Linear(8, 8)
    model.weight.grad_dtype = BFLOAT16
    shardkit.fully_shard(model, mesh=rank_mesh((world_size,)))
    for parameter_dtype in (FLOAT32, torch.float64):
        model(torch.randn(3, 8, dtype=parameter_dtype)).sum().backward()
        assert model.weight.grad.dtype == BFLOAT16
        assert model.bias.grad.dtype == parameter_dtype
        before = model.weight.grad.to_local().clone()
        model.double()
        assert model.weight.grad_dtype == BFLOAT16
        assert torch.equal(model.weight.grad.to_local(), before)
        assert model.bias.grad.dtype == torch.float64
        model.zero_grad()
    loaded = {fqn: nn.Parameter(tensor.float()) for fqn, tensor in model.state_dict().items()}
    loaded["weight"].grad_dtype = torch.float64
    model.load_state_dict(loaded, assign=True)
    assert model.weight is loaded["weight"]
    model(torch.randn(3, 8)).sum().backward()
    assert (model.weight.grad.dtype, model.bias.grad.dtype) == (BFLOAT16, FLOAT32)


@on_ranks(2)
def test_grad_dtype_of_gradients_without_sync(rank: int, world_size: int) -> None:
    """Gradients without sync are summed and reduced in the dtype that the user has set."""
    model = nn.Linear(8, 8, bias=False)
    model.weight.grad_dtype = BFLOAT16
    shardkit.fully_shard(model, mesh=rank_mesh((world_size,)))
    x = torch.randn(3, 8)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    ((unreduced, _),) = model.get_pending_gradients().values()
    assert unreduced is not None and unreduced.dtype == BFLOAT16
    model.synchronize_gradients()
    assert model.weight.grad.dtype == BFLOAT16


class _PreciseWeight(torch.autograd.Function):
    """A linear layer whose weight's gradient comes in float32, whatever it computes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.float().T @ x.float()


@on_ranks(2)
def test_a_wider_gradient_than_the_sum_that_waits_for_its_all_reduce(rank: int, world_size: int) -> None:
    """256 + 1 is 256 in bfloat16; sums of replicas wait for their all-reduce."""

    def run(module: Any, x: Tensor, precise: bool) -> Tensor:
        return _PreciseWeight.apply(x, module.weight) if precise else x @ module.weight.T

    model = Composed(run, weight=nn.Parameter(torch.ones(2, 1, dtype=BFLOAT16)))
    model.weight.grad_dtype = None
    shardkit.fully_shard(model, mesh=rank_mesh((2, 1), ("replicate", "shard")))
    for last, value in enumerate((256.0, 1.0, 1.0)):
        model.set_requires_all_reduce(last == 2)
        model(torch.full((1, 1), value, dtype=BFLOAT16), precise=value == 1).sum().backward()
    assert model.weight.grad.to_local().tolist() == [[258.0], [258.0]]
