"""Conversion into FSDP1's flat format: the files that stock writes, bit for bit, and files that stock loads."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.legacy_fsdp_compat.migrate import (
    CheckpointError,
    LocalRanks,
    Wrapping,
    convert,
    open_checkpoint,
    shapes_of_file,
    wrapping_of_file,
    wrapping_of_model,
)
from shardkit.legacy_fsdp_compat.migrate.command import main
from shardkit.legacy_fsdp_compat.migrate.rank_files import StoredShards, leaves_of_file
from tests.legacy_fsdp_compat import both
from tests.legacy_fsdp_compat.both import CPU, OPTIMIZERS, OURS, STOCK, Block, Engine, records, train
from tests.support import run_ranks
from tests.support.twins import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore")


class Tied(nn.Module):
    """Ties in a unit, a frozen buffer between parameters, and an ignored module."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5))
        self.blocks = nn.Sequential(Block(7), Block(3))
        self.apart = nn.Linear(3, 2)
        self.head = nn.Linear(4, 7, bias=False)
        self.inp, self.out = nn.Linear(4, 5), nn.Linear(5, 4)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.out(self.blocks(self.inp(x))))[:, :1] + 0 * self.apart(x[:, :3].float()).sum()


def fsdp_arguments(names: Any, kind: str, model: nn.Module, use_orig_params: bool, mixed: bool) -> dict[str, Any]:
    return {
        "auto_wrap_policy": names.ModuleWrapPolicy({Block}),
        "use_orig_params": use_orig_params,
        "mixed_precision": names.MixedPrecision(param_dtype=torch.bfloat16) if mixed else None,
        "ignored_modules": [model.apart] if kind == "tied" else None,
    }


def build(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return both.Model() if kind == "model" else Tied()


def wrapped(engine: Engine, kind: str, use_orig_params: bool, seed: int, mixed: bool = False) -> tuple[Any, Any]:
    names, model = engine.api, build(kind, seed)
    model = names.FSDP(model, device_id=CPU, **fsdp_arguments(names, kind, model, use_orig_params, mixed))
    return model, OPTIMIZERS["adam"]([one for one in model.parameters() if one.requires_grad])


def write(rank: int, world_size: int, kind: str, use_orig_params: bool, mixed: bool, directory: Path) -> Any:
    """Stock's LOCAL file after two steps, and the model's shapes; returns the state."""
    model, optimizer = wrapped(STOCK, kind, use_orig_params, 0, mixed)
    train(model, optimizer, rank, range(2))
    state = STOCK.state_of("LOCAL", model, optimizer) | {"step": 2}
    (directory / "local").mkdir(exist_ok=True)
    torch.save(state, directory / "local" / f"rank{rank}.pt")
    # Copies, as of ignored parameters it is the optimizer's own state.
    weights, moments = STOCK.state(model), copy.deepcopy(STOCK.local_moments(model, optimizer))
    if rank == 0:
        torch.save(build(kind, 0).state_dict(), directory / "shapes.pt")
    return weights, moments


def same_files(rank: int, world_size: int, first: Path, second: Path) -> None:
    """Both load as the same values: containers, keys in order, values, and the metadata of ShardedTensors."""
    assert_equal(*(described(torch.load(path / f"rank{rank}.pt", weights_only=False)) for path in (first, second)))


def described(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, described(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value)(map(described, value))
    if hasattr(value, "local_shards"):
        shards = [(shard.metadata, described(shard.tensor)) for shard in value.local_shards()]
        return value.metadata(), value.sharding_spec(), shards
    if isinstance(value, torch.Tensor):
        return value, value.stride(), value.storage_offset(), value.requires_grad
    return value


@pytest.mark.parametrize(
    ("world_size", "kind", "use_orig_params", "mixed"),
    [(2, "model", True, True), (3, "tied", True, False), (3, "tied", False, True)],
)
def test_the_round_trip_is_what_stock_wrote(world_size: int, kind: str, use_orig_params: bool, mixed: bool, tmp_path):
    """LOCAL -> DTensor checkpoint -> LOCAL: everything that torch reads, and of weights every storage, with padding.

    (Of optimizers stock's flat parameters share one step counter, which is in the file once.)
    """
    run_ranks(world_size, write, kind, use_orig_params, mixed, tmp_path)
    checkpoint = open_checkpoint(tmp_path / "local", shapes_of_file(tmp_path / "shapes.pt"))
    convert(checkpoint, tmp_path / "dcp", "dcp")
    wrapping = wrapping_of_file(tmp_path / "dcp" / "migration.json")
    convert(open_checkpoint(tmp_path / "dcp"), tmp_path / "again", "local", ranks=LocalRanks(world_size, wrapping))
    weights = open_checkpoint(tmp_path / "dcp", without=["optim", "step"])
    convert(weights, tmp_path / "weights", "local", ranks=LocalRanks(world_size, wrapping))
    for rank in range(world_size):
        first, second = (records(tmp_path / name / f"rank{rank}.pt") for name in ("local", "weights"))
        assert len(second) > 3
        for key, value in second.items():
            assert value == first[key], f"storage {key} of rank {rank}"
    run_ranks(world_size, same_files, tmp_path / "local", tmp_path / "again")
    by_factory = wrapping_of_model(*factory(kind, use_orig_params, mixed))
    assert (by_factory.shapes, by_factory.buffers) == (wrapping.shapes, wrapping.buffers)
    assert by_factory.units.keys() == wrapping.units.keys()
    for unit, dtypes in by_factory.units.items():
        assert not use_orig_params or set(dtypes) <= set(wrapping.units[unit])


def factory(kind: str, use_orig_params: bool, mixed: bool) -> tuple[nn.Module, dict[str, Any]]:
    """With stock's classes, and arguments that do not matter here."""
    with torch.device("meta"):
        model = build(kind, 0)
    arguments = fsdp_arguments(STOCK.api, kind, model, use_orig_params, mixed)
    return model, {**arguments, "sharding_strategy": STOCK.api.ShardingStrategy.SHARD_GRAD_OP, "device_id": 0}


def load(rank: int, world_size: int, engine: Engine, kind: str, use_orig_params: bool, directory: Path) -> Any:
    """Loads this rank's file. Returns the losses of further steps, and the loaded values."""
    model, optimizer = wrapped(engine, kind, use_orig_params, 1)
    engine.load_state("LOCAL", model, optimizer, torch.load(directory / f"rank{rank}.pt", weights_only=False))
    weights, moments = engine.state(model), copy.deepcopy(engine.local_moments(model, optimizer))
    return train(model, optimizer, rank, range(2, 4)), weights, moments


def load_full(rank: int, world_size: int, kind: str, use_orig_params: bool, path: Path) -> list[float]:
    """Losses of stock after one full file."""
    model, optimizer = wrapped(STOCK, kind, use_orig_params, 1)
    STOCK.load_state("FULL", model, optimizer, torch.load(path, weights_only=True))
    return train(model, optimizer, rank, range(2, 4))


@pytest.mark.parametrize(
    ("kind", "source_size", "ranks", "use_orig_params"), [("tied", 3, 2, True), ("model", 2, 3, False)]
)
def test_stock_goes_on_from_what_was_written(kind: str, source_size: int, ranks: int, use_orig_params: bool, tmp_path):
    """Another number of ranks and the other layout than the files that were converted."""
    weights, moments = run_ranks(source_size, write, kind, not use_orig_params, False, tmp_path)[0]
    checkpoint = open_checkpoint(tmp_path / "local", shapes_of_file(tmp_path / "shapes.pt"))
    wrapping = wrapping_of_model(*factory(kind, use_orig_params, False))
    convert(checkpoint, tmp_path / "out", "local", ranks=LocalRanks(ranks, wrapping))
    convert(checkpoint, tmp_path / "full", "full")
    expected = run_ranks(ranks, load_full, kind, use_orig_params, tmp_path / "full" / "checkpoint.pt")[0]
    for engine in (STOCK, OURS):
        seen, held, state = run_ranks(ranks, load, engine, kind, use_orig_params, tmp_path / "out")[0]
        assert seen == pytest.approx(expected, rel=1e-5)
        assert held.keys() == weights.keys()
        assert all(torch.equal(held[name], value) for name, value in weights.items())
        for fqn, values in moments.items():
            assert all(torch.equal(state[fqn][key], value) for key, value in values.items()), fqn


def write_sharded(rank: int, world_size: int, directory: Path) -> None:
    """Stock's SHARDED file after a step."""
    model, optimizer = wrapped(STOCK, "tied", True, 0)
    train(model, optimizer, rank, range(1))
    torch.save(STOCK.state_of("SHARDED", model, optimizer), directory / f"rank{rank}.pt")


def test_sharded_files_have_ignored_parameters_whole(tmp_path):
    """With the arguments that --model returns, the files are cut as stock cuts them."""
    (tmp_path / "stock").mkdir()
    run_ranks(2, write_sharded, tmp_path / "stock")
    sharded = ["--to", "sharded", "--ranks", "2", "--no-progress", "--model", f"{__name__}:built"]
    assert main([str(tmp_path / "stock"), str(tmp_path / "out"), *sharded]) == 0
    for rank in range(2):
        stock, ours = (leaves_of_file(tmp_path / name / f"rank{rank}.pt") for name in ("stock", "out"))
        assert stock.keys() == ours.keys()
        assert {("model", "apart.weight"), ("optim", "state", "apart.weight", "exp_avg")} <= stock.keys()
        cut = [{path for path, leaf in one.items() if isinstance(leaf, StoredShards)} for one in (stock, ours)]
        assert cut[0] == cut[1]


# -- without ranks -----------------------------------------------------------------------------------------------------


def plain(directory: Path, **more: Any) -> Path:
    """A full checkpoint of a model that nobody trained."""
    torch.save({"model": build("tied", 0).state_dict(), **more}, directory / "full.pt")
    return directory / "full.pt"


def built() -> tuple[nn.Module, dict[str, Any]]:
    """For --model."""
    model = build("tied", 0)
    return model, fsdp_arguments(OURS.api, "tied", model, True, False)


def arguments(use_orig_params: bool, **units: Any) -> dict[str, Any]:
    shapes: dict[str, Any] = {name: list(value.shape) for name, value in build("tied", 0).state_dict().items()}
    shapes["head.weight"] = "emb.weight"
    return {
        "use_orig_params": use_orig_params,
        "units": {"": None, "blocks": None, "blocks.*": None} | units,  # "blocks" has no parameters of its own
        "buffers": [name for name in shapes if "scale" in name or "apart" in name],
        "shapes": shapes,
    }


def test_the_command(tmp_path, capsys):
    """The same files by --config, --model and --like, the last of other ranks; and the way back."""
    source, config = str(plain(tmp_path)), tmp_path / "config.json"
    config.write_text(json.dumps(arguments(True)))
    local = ["--to", "local", "--no-progress"]
    assert main([source, str(tmp_path / "a"), *local, "--ranks", "3", "--config", str(config)]) == 0
    by_model = "tests.legacy_fsdp_compat.test_migrate_to_local:built"
    assert main([source, str(tmp_path / "b"), *local, "--ranks", "3", "--model", by_model]) == 0
    assert main([source, str(tmp_path / "five"), *local, "--ranks", "5", "--config", str(config)]) == 0
    torch.save(build("tied", 0).state_dict(), tmp_path / "shapes.pt")
    like = ["--like", str(tmp_path / "five"), "--shapes", str(tmp_path / "shapes.pt")]
    assert main([source, str(tmp_path / "c"), *local, "--ranks", "3", *like]) == 0
    for other in ("b", "c"):
        for rank in range(3):
            files = [tmp_path / name / f"rank{rank}.pt" for name in ("a", other)]
            assert records(files[0]) == records(files[1])
    assert main([str(tmp_path / "a"), str(tmp_path / "back"), "--to", "full", "--config", str(config)]) == 0
    back = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.equal(back[name], value) for name, value in build("tied", 0).state_dict().items())
    capsys.readouterr()
    for wrong, text in (
        ([*local, "--ranks", "3"], "LOCAL files depend on how the model is wrapped"),
        ([*local, "--config", str(config)], "'local' need a number"),
        ([*local, "--ranks", "1", "--config", str(config)], "a single rank's state dicts are whole"),
        (["--to", "dcp", "--like", str(tmp_path / "a")], "only 'local' depends on the wrapping"),
        ([*local, "--ranks", "3", "--like", source], "does not show how the model is wrapped"),
    ):
        assert main([source, str(tmp_path / "no"), *wrong]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "no").exists() and not (tmp_path / "no.partial").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {**c, "units": {"blocks.*": None}}, "'emb.weight' lies in none of the FSDP modules"),
        (lambda c: {**c, "units": {"": None, "block": None}}, "no name of the shapes lies in an FSDP module 'block'"),
        (lambda c: {**c, "units": {"": "bf16"}}, "param_dtype 'bf16' is not a dtype of torch"),
        (lambda c: {**c, "units": {**c["units"], "head": None}}, "'head.weight' is tied to 'emb.weight' of another"),
        (lambda c: {**c, "use_orig_params": "yes"}, "use_orig_params is 'yes', expected true or false"),
        (lambda c: {**c, "buffers": ["lost"]}, r"lists the buffers \['lost'\], which have no shapes"),
        (lambda c: {**c, "units": {"": []}}, r"param_dtype \[\] is not a dtype of torch"),
        (lambda c: {**c, "buffers": list(c["shapes"])}, "no FSDP module has parameters: all 19 names"),
        (lambda c: {**c, "shapes": {**c["shapes"], "inp.bias": ["five"]}}, "the shape of 'inp.bias' is"),
        (lambda c: {"use_orig_params": True, "shapes": c["shapes"]}, "is not a configuration: KeyError"),
        (lambda c: [c], "is not a configuration"),
    ],
)
def test_configurations_that_say_nothing(change: Any, message: str, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(change(arguments(True))))
    with pytest.raises(CheckpointError, match=message):
        wrapping_of_file(path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        wrapping_of_file(path)


def wrapping(units: dict[str, Any], **shapes: Any) -> Wrapping:
    return Wrapping({name.replace("_", "."): shape for name, shape in shapes.items()}, units, frozenset(), True)


def test_what_does_not_fit_is_refused(tmp_path):
    torch.save({"a.w": torch.ones(3), "b.w": torch.ones(3, dtype=torch.float64)}, tmp_path / "two.pt")
    checkpoint = open_checkpoint(tmp_path / "two.pt")

    def into(made: Wrapping, ranks: int = 2) -> None:
        convert(checkpoint, tmp_path / "out", "local", ranks=LocalRanks(ranks, made))

    with pytest.raises(CheckpointError, match=r"'' has parameters of 2 dtypes: \{'a.w': torch.float32, 'b.w'"):
        into(wrapping({"": (None,)}, a_w=(3,), b_w=(3,)))
    with pytest.raises(CheckpointError, match=r"'b.w' has \(3,\), expected \(4,\)"):
        into(wrapping({"": (None,)}, a_w=(3,), b_w=(4,)))
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks the parameters \['c.w'\]"):
        into(wrapping({"": (None,)}, a_w=(3,), b_w=(3,), c_w=(1,)))
    with pytest.raises(CheckpointError, match="unknown format 'local' for NoneType"):
        convert(checkpoint, tmp_path / "out", "local")
    torch.save({"w": torch.ones(12), "b": torch.ones(4)}, tmp_path / "pair.pt")
    checkpoint = open_checkpoint(tmp_path / "pair.pt")
    either = wrapping({"": (None, "bfloat16")}, w=(12,), b=(4,))
    with pytest.raises(CheckpointError, match=r"one of the param_dtypes \[None, 'bfloat16'\].* over 2 ranks"):
        into(either)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_two_models_and_other_values(use_orig_params: bool, tmp_path):
    """Each dict that has the model's names is a model; other values are in every file."""
    average = {name: -value for name, value in build("tied", 0).state_dict().items()}
    source = plain(tmp_path, ema=average, extra={"seed": 3, "noise": torch.arange(3)})
    config = tmp_path / "config.json"
    config.write_text(json.dumps(arguments(use_orig_params)))
    found = wrapping_of_file(config)
    convert(open_checkpoint(source), tmp_path / "out", "local", ranks=LocalRanks(2, found))
    back = open_checkpoint(tmp_path / "out", found.shapes)
    assert back.objects == {("extra", "seed"): 3}
    for name, value in average.items():
        for base, expected in (("model", -value), ("ema", value)):
            stored = back.tensors[base, name]
            assert torch.equal(stored.read(0, stored.numel).view(stored.shape), expected), (base, name)
    assert {"rank0.pt", "rank1.pt", "migration.json"} == {path.name for path in (tmp_path / "out").iterdir()}
