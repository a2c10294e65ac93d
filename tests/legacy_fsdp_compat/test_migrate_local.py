"""Files of ranks that are easily misread: ties, alignment, two models, optimizers by number, hybrid runs, DTensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardkit.legacy_fsdp_compat.migrate import (
    CheckpointError,
    LocalRanks,
    convert,
    open_checkpoint,
    shapes_of_model,
    wrapping_of_model,
)
from tests.legacy_fsdp_compat import both
from tests.legacy_fsdp_compat.both import CPU, OURS, STOCK, Engine, shapes_of, tensors_of
from tests.support import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


def tied() -> nn.Module:
    model = both.Tied()
    model.register_buffer("scale", torch.linspace(0.5, 1.5, 5))
    return model


def two() -> nn.Module:
    """A unit of one parameter, whose length no world size but 1 and 5 divides, around one of several."""
    return nn.ModuleDict({"a": nn.Linear(5, 1, bias=False), "b": nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5))})


def pair() -> nn.Module:
    """12 and 4 elements: on 5 ranks alignments of 4 and of 8 elements pad to 20 elements alike."""
    model = nn.Module()
    model.w = nn.Parameter(torch.arange(12.0).view(6, 2))
    model.b = nn.Parameter(100 + torch.arange(4.0))
    return model


GROUPS = [{"lr": 0.1, "params": list(two().state_dict())}]


def build(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def wrapped(
    kind: Callable[[], nn.Module], use_orig_params: bool, engine: Engine = STOCK, **arguments: Any
) -> nn.Module:
    names = engine.api
    policy = names.ModuleWrapPolicy({nn.Sequential})
    return names.FSDP(build(kind), auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=CPU, **arguments)


def local_state(model: nn.Module, engine: Engine = STOCK) -> dict[str, Any]:
    with engine.of_type("LOCAL", model):
        return model.state_dict()


def whole(checkpoint: Any, *base: Any) -> dict[str, torch.Tensor]:
    """The tensors right below `base`."""
    return {path[0]: value for path, value in tensors_of(checkpoint, *base).items() if len(path) == 1}


def assert_is(found: dict[str, torch.Tensor], kind: Callable[[], nn.Module], factor: float = 1.0) -> None:
    expected = build(kind).state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value * (1.0 if name == "scale" else factor)), name


def write(rank: int, world_size: int, what: str, use_orig_params: bool, directory: Path) -> None:
    state: dict[str, Any]
    if what == "ties":
        state = {"model": local_state(wrapped(tied, use_orig_params))}
    elif what == "copies":
        policy = STOCK.api.ModuleWrapPolicy({nn.Embedding})
        model = STOCK.api.FSDP(build(tied), auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=CPU)
        state = {"model": local_state(model)}
    elif what == "buffers":
        model = wrapped(tied, use_orig_params)
        model.scale.fill_(rank)
        state = {"model": local_state(model)}
    elif what == "alignment":
        mixed = STOCK.api.MixedPrecision(param_dtype=torch.bfloat16)
        state = local_state(wrapped(pair, use_orig_params, mixed_precision=mixed))
    elif what == "two models":
        model, average = wrapped(two, use_orig_params), wrapped(two, use_orig_params)
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.mul_(-2)
        state = {"model": local_state(model), "ema": local_state(average)}
    elif what == "hybrid":
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        # stock writes none in groups of some ranks
        state = local_state(wrapped(two, use_orig_params, OURS, process_group=pairs[rank % 2]), OURS)
    elif what == "names":
        state = {"model": local_state(wrapped(two, use_orig_params)), "optim": {"state": {}, "param_groups": GROUPS}}
    else:
        model = wrapped(two, use_orig_params)
        kind = "adam" if what == "two dtypes" else what
        state = {"model": local_state(model), "optim": optimizer_state(kind, list(model.parameters()))}
        if what == "two dtypes" and rank == 1:
            averages = state["optim"]["state"][0]
            averages["exp_avg"] = averages["exp_avg"].bfloat16()
    torch.save(state, directory / f"rank{rank}.pt")


def write_dtensors(rank: int, world_size: int, engine: Engine, hybrid: bool, directory: Path) -> None:
    """SHARDED_STATE_DICT of FSDP with a mesh, and for ours the optimizer by number: DTensors."""
    names = engine.api
    mesh = init_device_mesh("cpu", (2, 2) if hybrid else (world_size,))
    strategy = names.ShardingStrategy["HYBRID_SHARD" if hybrid else "FULL_SHARD"]
    model = names.FSDP(build(two), device_mesh=mesh, use_orig_params=True, device_id=CPU, sharding_strategy=strategy)
    with engine.of_type("SHARDED", model):
        state: dict[str, Any] = {"model": model.state_dict()}
    assert isinstance(state["model"]["a.weight"], DTensor)
    if engine == OURS:
        state["optim"] = optimizer_state("adam", list(model.parameters()))
    torch.save(state, directory / f"rank{rank}.pt")


@pytest.mark.parametrize(("engine", "hybrid"), [(STOCK, False), (OURS, False), (OURS, True)])
def test_files_with_dtensors(engine: Engine, hybrid: bool, tmp_path):
    run_ranks(4 if hybrid else 3, write_dtensors, engine, hybrid, tmp_path)
    convert(open_checkpoint(tmp_path), tmp_path / "out", "full")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert_is(whole(checkpoint, "model"), two)
    if engine == OURS:
        for number, value in enumerate(build(two).state_dict().values()):
            assert torch.equal(whole(checkpoint, "optim", "state", number)["exp_avg"], 2 * value)
    (tmp_path / "rank1.pt").unlink()
    if hybrid:
        (tmp_path / "rank3.pt").unlink()
    with pytest.raises(CheckpointError, match="there is no file of rank"):
        open_checkpoint(sorted(tmp_path.glob("*.pt")))


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_ties(use_orig_params: bool, tmp_path):
    run_ranks(3, write, "ties", use_orig_params, tmp_path)
    shapes = shapes_of(build(tied)) | {"head.weight": "emb.weight"}
    files = sorted(tmp_path.glob("*.pt"))
    convert(open_checkpoint(files, shapes), tmp_path / "out", "full")
    assert_is(whole(open_checkpoint(tmp_path / "out"), "model"), tied)
    unknown = {name: shape for name, shape in shapes.items() if name != "head.weight"}
    if use_orig_params:
        with pytest.raises(CheckpointError, match=r"\['head.weight'\] beside .* tied"):
            open_checkpoint(files, unknown)
        with pytest.raises(CheckpointError, match=r"elements of parameters and .* in its flat tensors"):
            open_checkpoint(files, {**shapes, "head.weight": (7, 4)})
    else:
        with pytest.raises(CheckpointError, match="mark tied parameters"):
            open_checkpoint(files, {**shapes, "head.weight": (7, 4)})


def test_alignment_that_fits_by_chance(tmp_path):
    """Mixed precision aligns by its own dtype, which the file does not name."""
    run_ranks(5, write, "alignment", True, tmp_path)
    assert_is(whole(open_checkpoint(tmp_path, {"w": (6, 2), "b": (4,)})), pair)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_two_models_in_a_file(use_orig_params: bool, tmp_path):
    run_ranks(2, write, "two models", use_orig_params, tmp_path)
    checkpoint = open_checkpoint(tmp_path, shapes_of(build(two)))
    assert_is(whole(checkpoint, "model"), two)
    assert_is(whole(checkpoint, "ema"), two, -2.0)


def optimizer_state(kind: str, parameters: list[nn.Parameter]) -> dict[str, Any]:
    """By number; Adam's average is twice the parameter."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1).state_dict()
    adam = torch.optim.Adam(parameters, lr=torch.tensor(0.25))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    for parameter in parameters:
        adam.state[parameter]["exp_avg"].copy_(2 * parameter.detach())
    return adam.state_dict()


@pytest.mark.parametrize(("optimizer", "use_orig_params"), [("sgd", True), ("adam", True), ("adam", False)])
def test_state_by_number(optimizer: str, use_orig_params: bool, tmp_path):
    run_ranks(3, write, optimizer, use_orig_params, tmp_path)
    expected = build(two).state_dict()
    checkpoint = open_checkpoint(tmp_path, shapes_of(build(two)))
    convert(checkpoint, tmp_path / "out", "full")
    found = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["optim"]
    assert found["param_groups"][0]["params"] == list(expected)
    assert found["param_groups"][0]["lr"] == (0.1 if optimizer == "sgd" else torch.tensor(0.25))
    if optimizer == "sgd":
        assert found["state"] == {}
        return
    for name, value in expected.items():
        assert torch.equal(found["state"][name]["exp_avg"], 2 * value)
        assert found["state"][name]["step"] == 1


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_state_of_two_dtypes(use_orig_params: bool, tmp_path):
    """Whichever dtype were assumed, one rank's values would be wrong."""
    run_ranks(2, write, "two dtypes", use_orig_params, tmp_path)
    of_both = r"'optim.state.0.exp_avg' is of torch.float32 in .*rank0.pt and torch.bfloat16 in .*rank1.pt"
    with pytest.raises(CheckpointError, match=of_both):
        open_checkpoint(tmp_path, shapes_of(build(two)))


def test_state_by_name_of_an_optimizer_without_any(tmp_path):
    run_ranks(2, write, "names", True, tmp_path)
    checkpoint = open_checkpoint(tmp_path, shapes_of(build(two)))
    assert checkpoint.objects == {("optim", "state"): {}, ("optim", "param_groups"): GROUPS}


def test_files_of_a_hybrid_run(tmp_path):
    """Ranks 1 and 3 shard, and 0 and 2: one group's files are the checkpoint."""
    run_ranks(4, write, "hybrid", False, tmp_path)
    shapes = shapes_of(build(two))
    files = [tmp_path / f"rank{rank}.pt" for rank in range(4)]
    for chosen in (files, files[1::2]):
        checkpoint = open_checkpoint(chosen, shapes)
        assert checkpoint.world_size == 2
        assert_is(whole(checkpoint), two)
    with pytest.raises(CheckpointError, match="there is no file of rank 3"):
        open_checkpoint([files[1]], shapes)


def test_buffers_that_differ_from_rank_to_rank(tmp_path):
    """Buffers may differ by rank, as batch norm's do. The first rank's count, as in stock's full state dict."""
    run_ranks(2, write, "buffers", True, tmp_path)
    shapes = shapes_of(build(tied)) | {"head.weight": "emb.weight"}
    checkpoint = open_checkpoint(sorted(tmp_path.glob("*.pt")), shapes)
    assert not whole(checkpoint, "model")["scale"].any()
    assert "'model.scale' differs from rank to rank" in checkpoint.notes[0]


def test_a_parameter_of_two_units(tmp_path):
    """Stock keeps a copy in each, and trains the copies apart: they are two parameters."""
    run_ranks(2, write, "copies", False, tmp_path)
    shapes = shapes_of(build(tied))
    assert_is(whole(open_checkpoint(tmp_path, shapes), "model"), tied)
    with pytest.raises(CheckpointError, match="not those of two FSDP modules: FSDP1 keeps a copy in each"):
        open_checkpoint(tmp_path, shapes_of_model(build(tied)))
    with pytest.raises(CheckpointError, match=r"'head.weight' is tied to 'emb.weight' of another FSDP module"):
        wrapping_of_model(build(tied), {"auto_wrap_policy": OURS.api.ModuleWrapPolicy({nn.Embedding})})


def test_tied_parameters_with_different_values(tmp_path):
    separate = build(tied)
    separate.head.weight = nn.Parameter(-separate.emb.weight.detach())
    torch.save(separate.state_dict(), tmp_path / "full.pt")

    def into(model: nn.Module) -> None:
        wrapping = wrapping_of_model(model, {"use_orig_params": True})
        convert(open_checkpoint(tmp_path / "full.pt"), tmp_path / "out", "local", ranks=LocalRanks(2, wrapping))

    with pytest.raises(CheckpointError, match=r"'head.weight' is tied to 'emb.weight' .* other values"):
        into(build(tied))
    into(separate)
    with pytest.raises(CheckpointError, match=r"the shapes tie 'head.weight' to 'emb.weight', but .*rank0.pt"):
        open_checkpoint(tmp_path / "out", shapes_of_model(build(tied)))
