"""Full state dicts into and out of sharded modules, bit by bit, and how many bytes that takes."""

import json
import os
import re
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardkit.core import fully_shard
from shardkit.core.checkpoint import full_state_dict, load_full_state_dict, save_full_state_dict
from shardkit.core.checkpoint.sources import open_source
from tests.core.checkpoint.trainee import Extra
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.twins import assert_equal, differences
from tests.tools.measured import Meter


class Model(nn.Module):
    """Uneven, empty, strided-free and scalar parameters, several dtypes, a tie, a buffer."""

    def __init__(self, seed=0, extra=None):
        super().__init__()
        torch.manual_seed(seed)
        self.uneven = nn.Parameter(torch.randn(7, 5))
        self.short = nn.Parameter(torch.randn(1, 3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.columns = nn.Parameter(torch.randn(4, 9))
        self.bf16 = nn.Parameter(torch.randn(6, 2).bfloat16())
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.linear = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.linear.weight
        self.bn = nn.BatchNorm1d(5)
        self.bn.running_mean.copy_(torch.randn(5))
        if extra is not None:
            self.extra = Extra(extra)


def placements_of(name, mesh, kind):
    if kind == "both":  # two sharding axes
        inner = {"columns": [Shard(0), Shard(1)], "uneven": [_StridedShard(0, split_factor=2), Shard(0)]}
        if name in inner:
            return inner[name]
    last = Replicate() if name == "scalar" else Shard(1) if name == "columns" else Shard(0)
    return [Replicate()] * (mesh.ndim - 1) + [last]


def shard_by_hand(model, kind, meta=False):
    """Replaces every parameter by a DTensor, so that any placement can be tried."""
    world_size = dist.get_world_size()
    mesh = rank_mesh((world_size,), ("shard",)) if kind == "flat" else rank_mesh((2, 2), ("outer", "inner"))
    made = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            placements = placements_of(name, mesh, kind)
            full = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            made[id(parameter)] = nn.Parameter(full.to("meta") if meta else full)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, made[id(parameter)])
    if meta:
        model.bn.to("meta")
        for name in ("weight", "bias"):
            setattr(model.bn, name, made.get(id(getattr(model.bn, name)), getattr(model.bn, name)))
    return model


def assert_same(model, expected):
    """The module holds the full tensors `expected`, bit by bit. Computed without the code under test."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            want = expected[name].to(tensor.dtype)
            if isinstance(tensor, DTensor):
                want = distribute_tensor(want, tensor.device_mesh, tensor.placements, src_data_rank=None)
            assert_equal(tensor, want, name)


@pytest.mark.parametrize(
    ("world_size", "kind", "meta", "assign"),
    [
        (1, "flat", True, False),
        (2, "flat", True, True),
        (3, "flat", False, False),
        (4, "hsdp", False, True),
        (4, "both", True, False),
    ],
)
@on_ranks()
def test_load_dict_on_rank_0(rank, world_size, kind, meta, assign):
    source = Model(seed=1, extra="loaded").state_dict()
    model = shard_by_hand(Model(seed=2, extra="old"), kind, meta)
    given = source if rank == 0 else (None, "anything", {"x": 1}, Path("/nowhere"))[rank]
    result = load_full_state_dict(model, given, assign=assign)
    assert result == ([], [])
    assert_same(model, source)
    assert model.tied.weight is model.linear.weight
    assert model.extra.extra == "loaded"
    assert model.linear.weight.requires_grad
    assert isinstance(model.linear.weight, nn.Parameter)
    assert torch.equal(model.extra.table, torch.arange(3.0))


def check_load_file(rank, world_size, kind, path, on_ranks):
    source = Model(seed=1).state_dict()
    model = shard_by_hand(Model(seed=2), kind)
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=dist.batch_isend_irecv) as sends:
        load_full_state_dict(model, path if rank in on_ranks else None)
    assert sends.called != (set(on_ranks) >= set(range(world_size))), "ranks read for themselves if all can"
    assert_same(model, source)


@pytest.mark.parametrize(("world_size", "kind", "everyone"), [(1, "flat", True), (3, "flat", False), (4, "both", True)])
def test_load_file(tmp_path, world_size, kind, everyone):
    path = tmp_path / "model.pt"
    torch.save(Model(seed=1).state_dict(), path)
    run_ranks(world_size, check_load_file, kind, path, range(world_size) if everyone else (0,))


@on_ranks(2)
def test_ranks_with_different_files_take_that_of_rank_0(rank, world_size, tmp_path):
    """Their files are as large, and of other times."""
    path = tmp_path / f"rank{rank}.pt"
    torch.save({"weight": torch.full((5,), float(rank))}, path)
    os.utime(path, (1000 + rank, 1000 + rank))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(5), rank_mesh((2,), ("shard",)), [Shard(0)]))
    load_full_state_dict(model, path)
    assert torch.equal(model.weight.full_tensor(), torch.zeros(5))


def test_a_file_is_not_read_before_it_is_needed(tmp_path):
    """256 MiB that nobody has written take no memory."""
    with torch.serialization.skip_data():
        torch.save({"weight": torch.empty(2**26)}, tmp_path / "model.pt")
    resident = psutil.Process().memory_info().rss
    source = open_source(tmp_path / "model.pt")
    assert source.tensors["weight"][7:9].tolist() == [0.0, 0.0]
    assert psutil.Process().memory_info().rss - resident < 64 * 2**20


class NewMemory(Meter):
    """Counts what is not there already."""

    def __init__(self, existing):
        super().__init__()
        self.existing = {tensor.untyped_storage().data_ptr() for tensor in existing}

    def keep(self, tensor):
        if tensor.untyped_storage().data_ptr() not in self.existing:
            super().keep(tensor)


FEATURES = 64


def big_model(world_size, offset=0):
    mesh = rank_mesh((world_size,), ("shard",))
    model = nn.Module()
    for index in range(4):
        full = torch.arange(FEATURES * FEATURES, dtype=torch.float32).view(FEATURES, FEATURES) + index + offset
        shard = distribute_tensor(full, mesh, [Shard(index % 2)], src_data_rank=None)
        model.register_parameter(f"weight{index}", nn.Parameter(shard))
    return model


@on_ranks(4)
def test_other_ranks_never_hold_a_full_tensor(rank, world_size):
    full_bytes = 4 * FEATURES * FEATURES + 1024  # 1024: the ranks' messages
    piece_bytes = full_bytes // world_size
    source = {name: p.full_tensor().detach() for name, p in big_model(world_size, 5).named_parameters()}
    model = big_model(world_size)
    existing = [*source.values(), *(p.to_local().detach() for p in model.parameters())]
    with NewMemory(existing) as watch:
        load_full_state_dict(model, source if rank == 0 else None)
    limit = full_bytes if rank == 0 else piece_bytes
    assert watch.peak <= limit, f"rank {rank} held {watch.peak} new bytes while loading, expected at most {limit}"
    with NewMemory(existing) as watch:
        state = full_state_dict(model)
    # Rank 0 keeps the result; beyond it there is one piece at most.
    limit = len(source) * full_bytes + piece_bytes if rank == 0 else piece_bytes
    assert watch.peak <= limit, f"rank {rank} held {watch.peak} new bytes while gathering, expected at most {limit}"
    assert list(state) == (list(source) if rank == 0 else [])
    for name, tensor in state.items():
        assert torch.equal(tensor, source[name])
    assert rank != 0 or watch.peak >= 4 * 4 * FEATURES * FEATURES, "the meter sees rank 0's tensors"


@pytest.mark.parametrize(
    ("world_size", "kind", "rank0_only"), [(1, "flat", True), (3, "flat", False), (4, "hsdp", True), (4, "both", False)]
)
@on_ranks()
def test_full_state_dict(rank, world_size, kind, rank0_only):
    expected = Model(seed=3, extra="kept")
    model = shard_by_hand(Model(seed=3, extra="kept"), kind)
    state = full_state_dict(model, rank0_only=rank0_only, offload=rank0_only)
    if rank0_only and rank != 0:
        assert state == {}
        return
    assert differences(state, dict(expected.state_dict())) == []
    assert state["tied.weight"] is state["linear.weight"]
    own = {p.to_local().data_ptr() for p in model.parameters()} | {b.data_ptr() for b in model.buffers()}
    assert not {tensor.data_ptr() for tensor in state.values() if isinstance(tensor, torch.Tensor)} & own - {0}
    expected.load_state_dict(state)


@on_ranks(1, 3)
def test_round_trip_with_casts(rank, world_size):
    """Out of a model of fully_shard, and into others of another precision."""

    def build(device, dtype=torch.float32):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)).to(device, dtype)
        model[2].bias = nn.Parameter(torch.randn((), device=device, dtype=dtype))  # 0-dim
        model[1].bias = model[0].bias  # tied across groups
        for layer in (model[0], model[1], model):
            fully_shard(layer, mesh=rank_mesh((world_size,), ("shard",)))
        return model

    torch.manual_seed(0)
    first = build("cpu")
    inputs = torch.randn(2, 5)
    expected = first(inputs)  # leaves the root's parameters unsharded
    state = full_state_dict(first, rank0_only=False)
    low = {name: tensor.bfloat16() for name, tensor in state.items()}
    for given, device, dtype, assign in (
        *((state, "cpu", torch.bfloat16, False), (low, "cpu", torch.float32, True)),
        *((low, "meta", torch.float32, False), (low, "meta", torch.float32, True)),
    ):
        other = build(device, dtype)
        if device == "cpu":
            other(inputs.to(dtype))
        load_full_state_dict(other, given, assign=assign)
        for name, parameter in other.named_parameters():
            assert parameter.dtype == (given[name].dtype if assign else dtype)
            assert torch.equal(parameter.full_tensor(), given[name].to(parameter.dtype))
        seen = other(inputs.to(parameter.dtype))
        torch.testing.assert_close(seen, expected.to(seen.dtype), rtol=0.1, atol=0.1)
        seen.sum().backward()
        assert other[0].bias is other[1].bias
        assert all(parameter.grad is not None for parameter in other.parameters())


class StoreError(OSError):
    def __init__(self, bucket, reason):
        super().__init__(reason)


class Remote(dict):
    """As a library's view of an object store does: reads when asked, and raises an error of its own."""

    def items(self):
        raise StoreError("bucket", "gone")


@on_ranks(1, 3)
def test_errors_reach_every_rank(rank, world_size, tmp_path):
    model = shard_by_hand(Model(seed=2), "flat")
    untouched = Model(seed=2).state_dict()
    good = Model(seed=1).state_dict()

    def fails(source, kind, *patterns, **options):
        with pytest.raises(kind) as caught:
            load_full_state_dict(model, source if rank == 0 else None, **options)
        for pattern in patterns:
            assert re.search(pattern, str(caught.value)), str(caught.value)
        assert_same(model, untouched)

    missing = {name: tensor for name, tensor in good.items() if name not in ("uneven", "bn.running_mean")}
    fails(missing, RuntimeError, r"uneven: missing in the source, expected shape \(7, 5\)", "bn.running_mean: missing")
    fails(good | {"more": torch.ones(1)}, RuntimeError, "more: in the source, but not in the module", "strict=False")
    misshapen = good | {"uneven": torch.ones(5, 7)}
    for strict in (True, False):
        fails(misshapen, RuntimeError, r"uneven: seen shape \(5, 7\), expected shape \(7, 5\)", strict=strict)
    fails(good | {"uneven": 3}, RuntimeError, "uneven: seen a int, expected shape")
    fails(good | {"uneven": torch.ones(7, 5) * 1j}, RuntimeError, "uneven: seen torch.complex64.*imaginary")
    fails({"model": good}, TypeError, r"model: .*nested.*source\['model'\]")
    fails({3: torch.ones(1)}, TypeError, "the key 3, expected parameter names")
    fails(dict(model.state_dict()), TypeError, "uneven: .*DTensor.*full_state_dict")
    fails(17, TypeError, "neither a dict of tensors nor a path")
    fails(Remote(), OSError, "cannot read the source of type Remote: gone; pass a path that rank 0 can read")
    no_file = r"cannot read the source '{}' in /.*: No such file.*; pass a path that rank 0 can read"
    fails(Path("/nowhere/model.pt"), FileNotFoundError, no_file.format("/nowhere/model.pt"))
    fails("nope.safetensors", FileNotFoundError, no_file.format("nope.safetensors"))
    (tmp_path / str(rank)).write_bytes(b"neither of them")
    fails(str(tmp_path / str(rank)), ValueError, "neither a safetensors file nor")
    # A subset, and names to ignore.
    result = load_full_state_dict(model, missing | {"more": torch.ones(1)}, strict=False)
    assert result.missing_keys == ["uneven", "bn.running_mean"]
    assert result.unexpected_keys == ["more"]
    assert_same(model, good | {name: untouched[name] for name in result.missing_keys})


@on_ranks(2)
def test_ranks_that_cannot_go_on_together(rank, world_size):
    model = nn.Linear(3, 3 + rank)
    for function in (lambda: load_full_state_dict(model, {}), lambda: full_state_dict(model)):
        with pytest.raises(RuntimeError, match=r"weight: rank 0 has \(3, 3\).*, rank 1 \(4, 3\)"):
            function()
    partial = nn.Module()
    partial.weight = nn.Parameter(DTensor.from_local(torch.ones(2), rank_mesh((2,), ("shard",)), [Partial()]))
    for function in (lambda: load_full_state_dict(partial, {}), lambda: full_state_dict(partial)):
        with pytest.raises(ValueError, match=r"weight: placements \(Partial"):
            function()
    with torch.device("meta"):
        unmade = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="meta device have no values: weight, bias; call materialize"):
        full_state_dict(unmade)


@on_ranks(4)
def test_two_stages_of_a_pipeline(rank, world_size):
    """Of two ranks each, with equal names and shapes, sharded or plain: each has a group of its own, or is refused."""
    stage, group = rank // 2, rank_mesh((2, 2), ("outer", "inner"))["inner"].get_group()
    sharded, plain = nn.Linear(3, 3), nn.Linear(3, 3)
    for model in (sharded, plain):
        nn.init.constant_(model.weight, stage)
        nn.init.constant_(model.bias, stage)
    fully_shard(sharded, mesh=rank_mesh((2, 2), ("outer", "inner"))["inner"])
    outer = rank_mesh((2, 2), ("outer", "inner")).get_group("outer")
    over = r"no parameter is shared by ranks \[0, 1\] and \[2, 3\], .*; pass group="
    for function in (lambda: load_full_state_dict(sharded, {}), lambda: full_state_dict(sharded)):
        with pytest.raises(RuntimeError, match=over):
            function()
    with pytest.raises(RuntimeError, match=r"shared by ranks \[0, 1\] and \[2, 3\].*pass group="):
        full_state_dict(sharded, group=outer)
    with pytest.raises(RuntimeError, match=r"weight: ranks \[2, 3\] hold other values than ranks \[0, 1\].*group="):
        full_state_dict(plain)
    for model in (sharded, plain):
        state = full_state_dict(model, group=group)
        assert state == {} if rank % 2 else torch.equal(state["weight"], torch.full((3, 3), float(stage)))
    full = {name: torch.full_like(value, stage + 5) for name, value in plain.state_dict().items()}
    load_full_state_dict(sharded, None if rank % 2 else full, group=group)
    assert torch.equal(sharded.weight.full_tensor(), full["weight"])
    fully_shard(plain, mesh=rank_mesh((4,), ("shard",)))
    with pytest.raises(RuntimeError, match=r"weight: the ranks of the group hold .* expected 9; pass group="):
        full_state_dict(plain, group=outer)


def test_without_process_group(tmp_path):
    model = nn.Linear(3, 3)
    state = full_state_dict(model)
    other = nn.Linear(3, 3, device="meta")
    load_full_state_dict(other, state)
    assert torch.equal(other.weight, model.weight)
    torch.save(state, tmp_path / "linear.pt")
    load_full_state_dict(model, str(tmp_path / "linear.pt"))


@pytest.mark.parametrize(
    ("world_size", "kind", "file_bytes"),
    [(1, "flat", 10**9), (3, "flat", 200), (4, "hsdp", 10**9), (4, "both", 10**9)],
)
@on_ranks()
def test_directories(rank, world_size, tmp_path, kind, file_bytes):
    directory = tmp_path / "new"
    safe_open = pytest.importorskip("safetensors").safe_open
    save_full_state_dict(shard_by_hand(Model(seed=1), kind), directory, file_bytes=file_bytes)
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2 if file_bytes == 200 else len(files) == 1
    found = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {(path.name, name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    expected = {name: one for name, one in Model(seed=1).state_dict().items() if name != "tied.weight"}
    assert differences({name: one for (_, name), one in found.items()}, expected) == []
    index = directory / "model.safetensors.index.json"
    assert {*directory.iterdir()} == {*files, *([index] if len(files) > 1 else [])}
    if len(files) > 1:
        content = json.loads(index.read_text())
        assert content["weight_map"] == {name: file for file, name in found}
        assert content["metadata"] == {"total_size": sum(one.nbytes for one in expected.values())}
    for path in (directory, index if len(files) > 1 else files[0]):
        check_load_file(rank, world_size, kind, path, range(world_size))
    check_load_file(rank, world_size, kind, directory, (0,) if world_size > 1 else range(1))
    with pytest.raises(FileExistsError, match=r"holds model.*; give a directory without safetensors files"):
        save_full_state_dict(shard_by_hand(Model(seed=1), kind), directory)


@on_ranks(2)
def test_directories_that_are_refused(rank, world_size, tmp_path):
    pytest.importorskip("safetensors")
    directory = tmp_path
    with pytest.raises(ValueError, match=r"'extra\._extra_state' is not a tensor.*; write full_state_dict\(module\)"):
        save_full_state_dict(shard_by_hand(Model(seed=1, extra="x"), "flat"), directory)
    layer = fully_shard(nn.Linear(4, 4, dtype=torch.complex128))
    with pytest.raises(RuntimeError, match=r"'weight' has dtype torch\.complex128.*; write a file of torch\.save"):
        save_full_state_dict(layer, directory)
    layer = fully_shard(nn.Linear(4, 4))
    before = Path.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", before if rank == 0 else lambda *args: before(directory / "nowhere" / "x"))
        with pytest.raises(RuntimeError, match=r"writing .* failed on rank 1: No such file"):
            save_full_state_dict(layer, directory)
    assert not list(directory.glob("*.safetensors"))
    save_full_state_dict(layer, directory)
    if rank == 0:
        (directory / "model.safetensors").rename(directory / "one.safetensors")
    dist.barrier()
    load_full_state_dict(layer, directory)
    dist.barrier()
    (directory / f"rank{rank}.safetensors").write_bytes(b"")
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"has no model\.safetensors\.index\.json and 3 safetensors files"):
        load_full_state_dict(layer, directory)


def test_legacy_and_nested_files(tmp_path):
    torch.save({"weight": torch.ones(1)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"write it again with torch\.save"):
        open_source(tmp_path / "legacy.pt")
    torch.save({"model": {"weight": torch.ones(1)}}, tmp_path / "nested.pt")
    with pytest.raises(TypeError, match=r"model: .*nested"):
        open_source(tmp_path / "nested.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list, expected a dict"):
        open_source(tmp_path / "list.pt")


def test_safetensors_missing(tmp_path, monkeypatch):
    path = tmp_path / "any.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match="run: pip install safetensors"):
        load_full_state_dict(nn.Linear(3, 3), path)
