"""Offline conversion of real files, which stock FSDP1 has written, into everything that it can write."""

import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as stock_fsdp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard

import shardkit.core
from shardkit.commands.migrate import TARGETS
from shardkit.legacy_fsdp_compat.migrate import (
    CheckpointError,
    Ranks,
    convert,
    open_checkpoint,
    parameters_in_groups,
    shapes_of_file,
)
from shardkit.legacy_fsdp_compat.migrate.command import main
from shardkit.legacy_fsdp_compat.migrate.conversion import FORMATS, LOCAL, SHARDED
from shardkit.legacy_fsdp_compat.migrate.rank_files import StoredShards, leaves_of_file
from tests.core.checkpoint.trainee import whole
from tests.faults.fuzzing import Reduced
from tests.legacy_fsdp_compat.both import OURS, STOCK, Engine, Setting, build, shapes_of, tensors_of, train
from tests.support import rank_mesh, run_ranks
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore")

Values = dict[tuple[str, ...], Tensor]


def values_of(weights: dict[str, Tensor], moments: dict[str, dict[str, Tensor]]) -> Values:
    """Weights and optimizer state under their paths in a checkpoint."""
    states = {("optim", "state", fqn, name): one for fqn, state in moments.items() for name, one in state.items()}
    return {("model", name): value for name, value in weights.items()} | states


KINDS = ["FULL", "SHARDED", "SHARDED-DCP", "LOCAL", "LOCAL-RAW"]


@dataclass(frozen=True)
class Written:
    """The checkpoint of a training run, and the values that it must hold."""

    path: Path
    values: Values


def write(rank: int, world_size: int, engine: str, setting: Setting, directory: Path) -> Values:
    """Every kind of checkpoint of one run, each in a directory of its own. Returns weights and optimizer state."""
    model, optimizer = engine.start(setting, 0)
    train(model, optimizer, rank, range(2))
    for kind in KINDS:
        state = engine.state_of(kind.split("-")[0], model, optimizer)
        (directory / kind).mkdir(exist_ok=True)
        if kind == "LOCAL-RAW":
            state["optim"] = optimizer.state_dict()
        if kind == "SHARDED-DCP":
            dcp.save(state, checkpoint_id=directory / kind)
        elif kind != "FULL":
            torch.save(state, directory / kind / f"checkpoint-rank{rank}.pt")
        elif rank == 0:
            torch.save(state, directory / kind / "checkpoint.pt")
    return values_of(engine.state(model), engine.local_moments(model, optimizer))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Any:
    """Checkpoints by (engine, use_orig_params, world size), made once."""
    made: dict[Any, Written] = {}

    def make(engine: str, use_orig_params: bool, world_size: int) -> Written:
        key = (engine, use_orig_params, world_size)
        if key not in made:
            directory = tmp_path_factory.mktemp("written")
            setting = Setting(use_orig_params=use_orig_params, optimizer="adam")
            made[key] = Written(directory, run_ranks(world_size, write, engine, setting, directory)[0])
            torch.save(build().state_dict(), directory / "shapes.pt")
        return made[key]

    return make


def assert_holds(found: Values, expected: Written, *, moments: bool = True) -> None:
    found = {path: value for path, value in found.items() if path[0] == "model" or path[:2] == ("optim", "state")}
    assert found.keys() == expected.values.keys()
    for path, value in expected.values.items():
        assert torch.equal(found[path], value) or (path[-1] == "exp_avg" and not moments), path


# Writers do not know the source of a tensor, so kinds of source go through them in turn; world sizes, too.
CASES = [
    (STOCK, 2 + number % 2, use_orig_params, kind, ["dcp", "safetensors", "full"][number % 3])
    for number, (use_orig_params, kind) in enumerate(itertools.product([True, False], KINDS))
]
CASES += [(OURS, 2, True, kind, "dcp") for kind in KINDS[:-1]]


@pytest.mark.parametrize(("engine", "world_size", "use_orig_params", "kind", "to"), CASES, ids=str)
def test_every_kind_converts(
    written: Any, engine: Engine, world_size: int, use_orig_params: bool, kind: str, to: str, tmp_path
):
    source = written(engine, use_orig_params, world_size)
    shapes = shapes_of_file(source.path / "shapes.pt")
    before = {path: path.read_bytes() for path in (source.path / kind).iterdir()}
    checkpoint = open_checkpoint(source.path / kind, shapes)
    assert checkpoint.world_size == (1 if kind == "FULL" else world_size)
    # Stock's full optimizer state has wrong values for exp_avg: there the file is the truth.
    right = not (engine == STOCK and kind == "FULL" and use_orig_params)
    assert_holds(tensors_of(checkpoint), source, moments=right)
    convert(checkpoint, tmp_path / "out", to)
    back = open_checkpoint(tmp_path / "out")
    assert_holds(tensors_of(back), source, moments=right)
    (groups,) = [value for path, value in back.objects.items() if path[-1] == "param_groups"]
    assert groups[0]["lr"] == 0.01
    assert sorted(groups[0]["params"]) == sorted({path[2] for path in source.values if path[0] == "optim"})
    assert {path: path.read_bytes() for path in (source.path / kind).iterdir()} == before
    assert not (tmp_path / "out.partial").exists()


def test_the_options_offer_every_format():
    assert (*FORMATS, SHARDED, LOCAL) == TARGETS


def test_values_are_right_where_torch_reads_them(written: Any, tmp_path):
    """The output is read by torch's and safetensors' own readers."""
    from safetensors.torch import load_file

    source = written(STOCK, False, 2)
    checkpoint = open_checkpoint(source.path / "SHARDED")
    for to in ("full", "safetensors"):
        convert(checkpoint, tmp_path / to, to)
    full = torch.load(tmp_path / "full" / "checkpoint.pt", weights_only=True)
    tensors = load_file(tmp_path / "safetensors" / "model.safetensors")
    weights = {path[1]: value for path, value in source.values.items() if path[0] == "model"}
    assert_equal(full["model"], weights)
    for name, value in weights.items():
        assert torch.equal(tensors[f"model.{name}"], value)
    assert full["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)


def load_sharded(rank: int, world_size: int, engine: str, directory: Path) -> Values:
    """A DTensor model with its optimizer, on another number of ranks, from the converted directory."""
    model = build(1)
    placement = {"owned": shardkit.core.Owned(), "elements": shardkit.core.Blocks(elements=3)}.get(engine)
    api = stock_fsdp if engine == STOCK else shardkit.core
    shard_each(*model.blocks, model, api=api, shard_placement_fn=lambda parameter: placement)
    optimizer = torch.optim.Adam(model.parameters())
    weights, optim = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": optim}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert optimizer.param_groups[0]["lr"] == 0.01

    moments = {
        name: {key: whole(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
    }
    return values_of({name: whole(value) for name, value in model.state_dict().items()}, moments)


@pytest.mark.parametrize(
    ("engine", "kind"), [(STOCK, "LOCAL"), (OURS, "LOCAL-RAW"), ("owned", "SHARDED"), ("elements", "LOCAL")]
)
def test_fsdp2_and_core_load_what_was_converted(written: Any, engine: str, kind: str, tmp_path):
    source = written(STOCK, True, 2)
    checkpoint = open_checkpoint(source.path / kind, shapes_of_file(source.path / "shapes.pt"))
    convert(checkpoint, tmp_path / "out", "dcp")
    assert_holds(run_ranks(3, load_sharded, engine, tmp_path / "out")[0], source)


# -- interruption and damage -------------------------------------------------------------------------------------------


def at_tensor(number: int, call: Callable[[], Any]) -> Callable[[int], None]:
    """For `progress` of a conversion: makes the call when that many tensors were written, the first of them noted."""
    seen = itertools.count(1)
    return lambda nbytes: call() if next(seen) == number else None


def interrupted(source: Path, out: Path, to: str, number: int) -> Path:
    """A conversion that ends while it writes that tensor; returns its journal."""
    with pytest.raises(ZeroDivisionError):
        convert(open_checkpoint(source), out, to, progress=at_tensor(number, lambda: 1 / 0))
    assert not out.exists()
    return out.with_name(f"{out.name}.partial") / "journal.jsonl"


@pytest.mark.parametrize("to", ["dcp", "safetensors", "full"])
def test_an_interrupted_conversion_goes_on(written: Any, to: str, tmp_path):
    source = written(STOCK, False, 2)
    with interrupted(source.path / "SHARDED", tmp_path / "out", to, 8).open("a") as journal:
        journal.write('{"name": "torn')  # the line that a power cut tears
    done = convert(open_checkpoint(source.path / "SHARDED"), tmp_path / "out", to)
    assert done.resumed == 7
    assert_holds(tensors_of(open_checkpoint(tmp_path / "out")), source)
    report = json.loads((tmp_path / "out" / "migration.json").read_text())
    assert {name: entry["sha256"] for name, entry in report["tensors"].items()} == done.hashes


def test_an_attempt_from_before_a_restart_of_the_system_is_not_believed(written: Any, tmp_path):
    """Its journal may have reached the disk although the tensors that it lists have not."""
    source = written(STOCK, False, 2)
    journal = interrupted(source.path / "SHARDED", tmp_path / "out", "full", 5)
    header, *entries = journal.read_text().splitlines()
    journal.write_text("\n".join([json.dumps(json.loads(header) | {"boot": "before"}), *entries, ""]))
    done = convert(open_checkpoint(source.path / "SHARDED"), tmp_path / "out", "full")
    assert entries and done.resumed == 0
    assert_holds(tensors_of(open_checkpoint(tmp_path / "out")), source)


def test_what_changed_between_two_attempts(tmp_path):
    """The output of the first attempt is gone; or the source was replaced by another of the same size."""
    path, out = tmp_path / "full.pt", tmp_path / "out"
    torch.save({"a": torch.ones(4), "b": torch.zeros(4)}, path)
    interrupted(path, out, "safetensors", 2).with_name("model.safetensors").unlink()
    assert convert(open_checkpoint(path), out, "safetensors").resumed == 0
    assert torch.equal(open_checkpoint(out).tensors["a",].read(0, 4), torch.ones(4))
    with pytest.raises(CheckpointError, match="exists"):
        convert(open_checkpoint(path), out, "safetensors")
    shutil.rmtree(out)
    interrupted(path, out, "safetensors", 2)
    size = path.stat().st_size
    torch.save({"a": torch.zeros(4), "b": torch.ones(4)}, path)
    os.utime(path, ns=(1, 1))
    assert path.stat().st_size == size
    with pytest.raises(CheckpointError, match="another source"):
        convert(open_checkpoint(path), out, "safetensors")


def test_a_journal_that_is_damaged(tmp_path):
    path, out = tmp_path / "state.pt", tmp_path / "out"
    torch.save({"a": torch.ones(2)}, path)
    journal = interrupted(path, out, "full", 1)
    journal.write_text(journal.read_text().splitlines()[0] + "\n[3]\n")
    with pytest.raises(CheckpointError, match=r"journal.jsonl is damaged"):
        convert(open_checkpoint(path), out, "full")


def test_damaged_output_is_noticed(written: Any, tmp_path):
    checkpoint = open_checkpoint(written(STOCK, False, 2).path / "SHARDED")

    def damage() -> None:
        path = tmp_path / "out.partial" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)

    written_but_not_read_back = at_tensor(len(checkpoint.tensors), damage)
    with pytest.raises(CheckpointError, match="reads back differently"):
        convert(checkpoint, tmp_path / "out", "safetensors", progress=written_but_not_read_back)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def copied(written: Any, tmp_path) -> Path:
    """A copy of the two-rank checkpoints, to damage."""
    source = written(STOCK, False, 2).path
    shutil.copytree(source, tmp_path / "copy")
    return tmp_path / "copy"


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


EVIL = Reduced(print, "ran")
DAMAGES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("SHARDED/checkpoint-rank1.pt", Path.unlink, r"ranks \[0, 1\], but there is no file of rank 1"),
    ("SHARDED-DCP/__1_0.distcp", Path.unlink, r"__1_0.distcp does not exist"),
    ("LOCAL/checkpoint-rank1.pt", lambda path: shutil.copy(path, path.with_name("rank7.pt")), "both of rank 1"),
    ("FULL/checkpoint.pt", halve, "checkpoint.pt"),
    ("SHARDED/checkpoint-rank1.pt", halve, "checkpoint-rank1.pt"),
    ("SHARDED-DCP/__1_0.distcp", halve, "__1_0.distcp"),
    (
        "FULL/checkpoint.pt",
        lambda path: torch.save({"a": EVIL}, path),
        r"checkpoint.pt holds more than tensors.*print",
    ),
    ("SHARDED-DCP/.metadata", lambda path: path.write_bytes(pickle.dumps(EVIL)), "builtins.print is not allowed"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_damaged_sources_are_named_and_run_nothing(copied: Path, name: str, damage: Any, message: str, capsys):
    damage(copied / name)
    shapes = shapes_of_file(copied / "shapes.pt") if "LOCAL" in name else None
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint((copied / name).parent, shapes)
    assert "ran" not in capsys.readouterr().out


def test_files_of_different_steps(tmp_path):
    for rank in range(2):
        state = {"optim": {"state": {"w": {"step": torch.tensor(2.0 + rank)}}}}
        torch.save(state, tmp_path / f"rank{rank}.pt")
    with pytest.raises(CheckpointError, match=r"is 2 in .*rank0.pt and 3 in .*rank1.pt: the files are of different"):
        open_checkpoint(tmp_path)


def _of_two_dtypes(rank: int, world_size: int, directory: Path, rows: int) -> None:
    local = torch.full((rows // 2 + (rows % 2 and not rank), 2), 1.5, dtype=(torch.float32, torch.bfloat16)[rank])
    shape = {"shape": torch.Size((rows, 2)), "stride": (2, 1)}
    weight = DTensor.from_local(local, rank_mesh((2,)), (Shard(0),), run_check=False, **shape)
    torch.save({"w": weight}, directory / f"rank{rank}.pt")


def test_parts_of_two_dtypes(tmp_path):
    """An empty part may have another dtype, as nobody reads it."""
    run_ranks(2, _of_two_dtypes, tmp_path, 1)
    convert(open_checkpoint(tmp_path), tmp_path / "one", "full")
    assert torch.equal(torch.load(tmp_path / "one" / "checkpoint.pt")["w"], torch.full((1, 2), 1.5))
    run_ranks(2, _of_two_dtypes, tmp_path, 4)
    of_both = r"'w' is of torch.float32 in .*rank0.pt and torch.bfloat16 in .*rank1.pt; are these files of one"
    with pytest.raises(CheckpointError, match=of_both):
        open_checkpoint(tmp_path)


def test_local_needs_the_right_shapes(copied: Path):
    with pytest.raises(CheckpointError, match="pass them with --shapes"):
        open_checkpoint(copied / "LOCAL")
    shapes = shapes_of_file(copied / "shapes.pt")
    with pytest.raises(
        CheckpointError,
        match=r"'model._flat_param' has \d+ elements in .*rank0.pt and others, the parameters .* make \d+",
    ):
        open_checkpoint(copied / "LOCAL", {**shapes, "inp.weight": (6, 4)})


def test_shapes_of_another_model_name_the_file(tmp_path):
    torch.save({"b": torch.ones(2)}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"none of the 1 names of the shapes \(a\) is in .*state.pt; it has b"):
        open_checkpoint(tmp_path / "state.pt", {"a": (2,)})
    with pytest.raises(CheckpointError, match=r"state.pt: .* does not fit the shapes at its top: .*\(a\), 1 other"):
        open_checkpoint(tmp_path / "state.pt", {"a": (2,), "b": (3,)})


def write_two_groups(rank: int, world_size: int, directory: Path) -> None:
    model = STOCK.wrapped(Setting())
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam([{"params": parameters[1:]}, {"params": parameters[:1]}])
    train(model, optimizer, rank, range(1))
    with STOCK.of_type("LOCAL", model):
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    torch.save(state, directory / f"rank{rank}.pt")


def test_numbers_that_tell_nothing_are_refused(tmp_path):
    """With several groups, only the script knows the order of the parameters."""
    run_ranks(2, write_two_groups, tmp_path)
    shapes = shapes_of(build())
    with pytest.raises(CheckpointError, match=r"in 2 groups.*optim_state_dict, which writes names"):
        open_checkpoint(tmp_path, shapes)


# -- into rank files ---------------------------------------------------------------------------------------------------


def load_rank_file(rank: int, world_size: int, engine: str, use_orig_params: bool, directory: Path) -> Any:
    """The parameters of a model that has loaded this rank's file, and the moments of its optimizer."""
    model, optimizer = engine.start(Setting(use_orig_params=use_orig_params, optimizer="adam"), 1)
    engine.load_state("SHARDED", model, optimizer, torch.load(directory / f"rank{rank}.pt", weights_only=False))
    return values_of(engine.state(model), engine.local_moments(model, optimizer))


@pytest.mark.daily(ranks=[2, 3])
@pytest.mark.parametrize(
    ("kind", "source_size", "use_orig_params", "ranks"),
    [("LOCAL", 2, False, 3), ("SHARDED-DCP", 3, True, 2), ("SHARDED", 2, True, 3), ("FULL", 2, False, 4)],
    ids=str,
)
def test_rank_files_for_stock(written: Any, kind: str, source_size: int, use_orig_params: bool, ranks: int, tmp_path):
    source = written(STOCK, use_orig_params, source_size)
    checkpoint = open_checkpoint(source.path / kind, shapes_of_file(source.path / "shapes.pt"))
    names = parameters_in_groups(checkpoint)
    assert names == {name for name, _ in build().named_parameters()}
    convert(checkpoint, tmp_path / "out", "sharded", ranks=Ranks(ranks, names))
    for engine in (STOCK, OURS):
        assert_holds(run_ranks(ranks, load_rank_file, engine, use_orig_params, tmp_path / "out")[0], source)
    assert_holds(tensors_of(open_checkpoint(tmp_path / "out")), source)


def test_rank_files_by_command(written: Any, tmp_path, capsys):
    source = str(written(STOCK, False, 2).path / "FULL")
    assert main([source, str(tmp_path / "out"), "--to", "sharded", "--ranks", "2", "--no-progress"]) == 0
    assert open_checkpoint(tmp_path / "out").world_size == 2
    for wrong in (["--to", "sharded"], ["--to", "dcp", "--ranks", "2"]):
        assert main([source, str(tmp_path / "no"), *wrong]) == 2
        assert "need a number, others none" in capsys.readouterr().err
    assert main([source, str(tmp_path / "no"), "--to", "sharded", "--ranks", "1"]) == 2
    assert "a single rank's state dicts are whole; convert to 'full'" in capsys.readouterr().err
    weights_only = [source, str(tmp_path / "w"), "--to", "sharded", "--ranks", "2", "--without", "optim"]
    assert main(weights_only) == 2
    assert "does not distinguish parameters, which are sharded, from buffers" in capsys.readouterr().err
    assert main([*weights_only, "--model", "tests.legacy_fsdp_compat.both:Model", "--no-progress"]) == 0
    leaves = leaves_of_file(tmp_path / "w" / "rank0.pt")
    assert type(leaves["model", "inp.weight"]) is StoredShards
    assert type(leaves["model", "blocks.0.scale"]) is Tensor, "a buffer, which every rank has"


def test_rank_files_say_what_no_group_lists(tmp_path, capsys):
    weights = {"trained": torch.ones(4), "frozen": torch.ones(4), "steps": torch.tensor(1)}
    optim = {"state": {"trained": {"momentum_buffer": torch.ones(4)}}, "param_groups": [{"params": ["trained"]}]}
    torch.save({"model": weights, "optim": optim}, tmp_path / "full.pt")
    assert main([str(tmp_path / "full.pt"), str(tmp_path / "out"), "--to", "sharded", "--ranks", "2"]) == 0
    assert "no group of an optimizer lists ['model.frozen'] (1 in all), so every rank" in capsys.readouterr().err


def test_rank_files_need_names(tmp_path):
    weights = {"w": torch.ones(4, 2)}
    torch.save({"model": weights, "optim": {"state": {0: {"m": torch.ones(4, 2)}}}}, tmp_path / "raw.pt")
    with pytest.raises(CheckpointError, match=r"'optim.state.0.m' is optimizer state by number"):
        convert(open_checkpoint(tmp_path / "raw.pt"), tmp_path / "out", "sharded", ranks=Ranks(2, {"w"}))
    with pytest.raises(CheckpointError, match=r"lacks the parameters \['v'\]"):
        convert(open_checkpoint(tmp_path / "raw.pt"), tmp_path / "out", "sharded", ranks=Ranks(2, {"w", "v"}))
    with pytest.raises(CheckpointError, match="unknown format 'sharded'"):
        convert(open_checkpoint(tmp_path / "raw.pt"), tmp_path / "out", "sharded")


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(copied: Path, tmp_path, capsys, monkeypatch):
    files = sorted(str(path) for path in (copied / "LOCAL").iterdir())
    arguments = [*files, str(tmp_path / "out"), "--shapes", str(copied / "shapes.pt"), "--no-progress"]
    assert main([*arguments, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "model.inp.weight\t(5, 4)\ttorch.float32" in shown.out
    assert "LOCAL checkpoint of 2 ranks" in shown.err
    assert not (tmp_path / "out").exists()
    assert main(arguments) == 0
    assert "wrote and verified" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "error:" in capsys.readouterr().err
    by_model = [*files, str(tmp_path / "again"), "--model", "tests.legacy_fsdp_compat.both:Model"]
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as rich sees it
    monkeypatch.setenv("TERM", "xterm")
    assert main(by_model) == 0
    assert "write dcp" in capsys.readouterr().err
