"""Conversion keeps orders in memory, keys, lists, and values that differ from rank to rank."""

import dataclasses
import fcntl
import io
import json
import os
import pickle
import subprocess
import sys
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING

from shardkit.core.checkpoint import stored
from shardkit.core.checkpoint.leaves import name_of
from shardkit.core.checkpoint.torch_files import load_torch_bytes
from shardkit.legacy_fsdp_compat.migrate import CheckpointError, convert, open_checkpoint, shapes_of_file
from shardkit.legacy_fsdp_compat.migrate.command import main
from shardkit.legacy_fsdp_compat.migrate.rank_files import ALLOWED
from shardkit.legacy_fsdp_compat.torch_compat import PickledShards
from tests.faults.fuzzing import Reduced
from tests.support.twins import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore")

FORMATS = ["dcp", "safetensors", "full"]


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors that torch.save keeps in their order in memory."""
    base = torch.arange(240.0)
    return {
        "transposed": base.view(12, 20).t(),
        "permuted": base.view(4, 5, 12).permute(2, 0, 1),
        "channels_last": torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last),
        "columns": base.view(12, 20)[:, 3:7],
        "strided": base[5::7],
        "expanded": torch.arange(3.0).expand(4, 3),
        "low": torch.randn(6, 4).bfloat16().t(),
        "conjugated": torch.randn(6, 4, dtype=torch.complex64).conj(),
        "negated": torch.randn(6, 4, dtype=torch.complex64).conj().imag,
        "wide": torch.arange(6, dtype=torch.int32).to(torch.uint16),
        "float8": torch.randn(6, 4).to(torch.float8_e4m3fn).t(),
        "plain": torch.randn(37, 3),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "empty": torch.empty(0, 3),
    }


@pytest.mark.parametrize("kind", ["DCP", "FULL"])
@pytest.mark.parametrize("to", FORMATS)
def test_any_order_in_memory(kind: str, to: str, tmp_path, monkeypatch):
    """In slabs of a few rows, from files of torch's own."""
    monkeypatch.setattr(stored, "CHUNK_BYTES", 64)
    tensors = odd_tensors()
    source = tmp_path / "source"
    if kind == "DCP":
        dcp.save(dict(tensors), checkpoint_id=source, no_dist=True)
    else:
        source.mkdir()
        torch.save(tensors, source / "full.pt")
    checkpoint = open_checkpoint(source)
    assert checkpoint.kind == kind
    convert(checkpoint, tmp_path / "out", to)
    found = open_checkpoint(tmp_path / "out").tensors
    assert set(found) == {(name,) for name in tensors}
    for name, value in tensors.items():
        one = found[name,]
        assert one.shape == tuple(value.shape)
        assert torch.equal(one.read(0, one.numel).view(one.shape).to(torch.complex64), value.to(torch.complex64)), name


_PEAK = """
import re, sys
from pathlib import Path
from shardkit.core.checkpoint import stored
from shardkit.legacy_fsdp_compat.migrate import convert, open_checkpoint
stored.CHUNK_BYTES = 2**23
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
convert(open_checkpoint(sys.argv[1]), sys.argv[3], "full")  # loads all code
checkpoint = open_checkpoint(sys.argv[2])
before = peak()
convert(checkpoint, sys.argv[4], "full")
print(peak() - before, checkpoint.bound_bytes, checkpoint.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_one_large_tensor_stays_within_the_bound(tmp_path):
    """Also one whose rows lie scattered over the whole file. A third of the tensor is left for pages that the system
    maps around one that is read, and for threads: some megabytes.
    """
    torch.save({"small": torch.ones(8, 8).t()}, tmp_path / "small.pt")
    torch.save({"large": torch.zeros(1500, 16000).t()}, tmp_path / "large.pt")
    files = [str(tmp_path / name) for name in ("small.pt", "large.pt", "small", "large")]
    seen = subprocess.run([sys.executable, "-c", _PEAK, *files], check=True, capture_output=True, text=True).stdout
    rise, bound, nbytes = map(int, seen.split())
    assert bound < 34e6 < nbytes == 96e6
    assert rise < bound + 45e6


def training_state() -> dict[str, Any]:
    """With tensors in lists and numbers for keys."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters(), lr=0.1), [3, 5, 5])
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    return {
        "model": dict(model.state_dict()),
        "optim": {
            "state": {names[number]: value for number, value in state["state"].items()},
            "param_groups": [{**group, "params": names} for group in state["param_groups"]],
        },
        "plain": {"state": {}, "param_groups": [{"lr": 0.1, "params": names, "betas": (0.9, 0.99)}]},
        "rng": [torch.get_rng_state(), [torch.ones(2), 5]],
        "schedule": schedule.state_dict(),
        "epochs": {1: "one", 2: {"loss": float("nan")}},
    }


@pytest.mark.parametrize("by_way_of", [[], ["dcp"], ["safetensors"], ["dcp", "full", "dcp"]], ids="-".join)
def test_nothing_is_lost(by_way_of: list[str], tmp_path):
    """After every format the file holds the same tree, to the type of each key."""
    state = training_state()
    if "safetensors" in by_way_of:
        state["schedule"].pop("milestones")  # JSON has no Counter
        state["plain"]["param_groups"][0].pop("betas")  # and no tuple
        state["optim"]["param_groups"][0].pop("betas")
    source = tmp_path / "state.pt"
    torch.save(state, source)
    for number, to in enumerate([*by_way_of, "full"]):
        convert(open_checkpoint(source), tmp_path / f"{number}", to)
        source = tmp_path / f"{number}"
    found = torch.load(source / "checkpoint.pt", weights_only=True)
    assert repr(found.pop("epochs")) == repr(state.pop("epochs"))  # NaN is not equal to itself
    assert_equal(found, state)


def test_torch_loads_tensors_in_lists(tmp_path):
    torch.save({"optim": {"param_groups": [{"lr": torch.tensor(0.25), "eps": 1.0}]}}, tmp_path / "state.pt")
    convert(open_checkpoint(tmp_path / "state.pt"), tmp_path / "out", "dcp")
    state = {"optim": {"param_groups": [{"lr": torch.tensor(0.0), "eps": 0.0}]}}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["optim"]["param_groups"][0] == {"lr": torch.tensor(0.25), "eps": 1.0}


def test_an_optimizer_goes_on_from_numbers(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"optim": optimizer.state_dict()}, tmp_path / "state.pt")
    convert(open_checkpoint(tmp_path / "state.pt"), tmp_path / "out", "full")
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["optim"])
    assert again.state[model.weight]["step"] == 1
    with pytest.raises(CheckpointError, match=r"'optim.state.0.step' is a tensor under the key 0.*optim_state_dict"):
        convert(open_checkpoint(tmp_path / "state.pt"), tmp_path / "dcp", "dcp")


@pytest.mark.parametrize(
    ("more", "to", "text"),
    [
        ({"seen": Counter([3, 5])}, "safetensors", r"'seen' is Counter.*only store JSON values"),
        ({"model.w": torch.zeros(3)}, "full", r"are called 'model.w'"),
    ],
)
def test_what_has_no_place_in_a_format(more: dict[str, Any], to: str, text: str, tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, **more}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=text):
        convert(open_checkpoint(tmp_path / "state.pt"), tmp_path / "out", to)


@pytest.mark.parametrize("what", ["optimizer", "random state", "position", "dtype"])
def test_values_that_differ_from_rank_to_rank(what: str, tmp_path):
    for rank in range(2):
        value: Any = {
            "optimizer": {"state": {0: {"exp_avg": torch.arange(4.0) + rank}}, "param_groups": [{"params": [0]}]},
            "random state": [torch.full((5,), rank, dtype=torch.uint8)],
            "position": {"sample": 100 + rank},
            "dtype": torch.zeros(2, dtype=[torch.int32, torch.float32][rank]),
        }[what]
        torch.save({"it": value, "same": torch.ones(3)}, tmp_path / f"r{rank}.pt")
    with pytest.raises(
        CheckpointError, match=r"'it.*differs between .*r0.pt and .*r1.pt.*FSDP.optim_state_dict.*--without"
    ):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, without=["it"]).tensors.keys() == {("same",)}


def test_files_that_are_of_no_ranks(tmp_path):
    """Weights and optimizer in separate files are not one checkpoint, and must not be merged."""
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    torch.save({"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": []}, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"model.pt and .*optimizer.pt hold no ShardedTensors.* by itself"):
        open_checkpoint(tmp_path)


def test_flat_parameters_in_a_distributed_checkpoint(tmp_path):
    dcp.save({"model": {"blocks.0._flat_param": torch.ones(5)}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"'model.blocks.0._flat_param' .* flat parameter of LOCAL_STATE_DICT"):
        open_checkpoint(tmp_path)


def test_what_is_left_out(tmp_path, capsys):
    """Values and dicts, from every kind of file; a name that is only the beginning of another one stays apart."""
    state = {"model": {"a": torch.ones(2, 3), "ab": torch.zeros(1)}, "extra": {"rng": torch.ones(5), "seen": 7}, "n": 3}
    torch.save(state, tmp_path / "full.pt")
    convert(open_checkpoint(tmp_path / "full.pt"), tmp_path / "safe", "safetensors")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for source in ("full.pt", "safe", "dcp"):
        found = open_checkpoint(tmp_path / source, without=["extra", "model.a"])
        assert found.tensors.keys() == {("model", "ab")}, source
        assert found.objects == {("n",): 3}, source
        with pytest.raises(CheckpointError, match=r"has no 'model\.x', 'mod', which is to be left out"):
            open_checkpoint(tmp_path / source, without=["model.x", "n", "mod"])
    arguments = [tmp_path / "full.pt", tmp_path / "out", "--without", "extra.rng", "--without", "n"]
    assert main([*map(str, arguments), "--no-progress"]) == 0
    left = open_checkpoint(tmp_path / "out")
    assert {name_of(path) for path in (*left.tensors, *left.objects)} == {"model.a", "model.ab", "extra.seen"}
    assert "'o', which is to be left out" in refused(capsys, tmp_path / "full.pt", tmp_path / "2", "--without", "o")


def _read(value: Any) -> Any:
    file = io.BytesIO()
    torch.save({"value": value}, file)
    return load_torch_bytes(file.getvalue(), "file", ALLOWED)["value"]


def test_a_member_is_read_by_value_and_by_name():
    """Of an enumeration in files of ShardedTensors, as every version of Python writes it."""
    by_value = _read(Reduced(MEM_FORMAT_ENCODING, 0))
    by_name = _read(Reduced(getattr, MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert type(by_value) is type(by_name)


def test_no_other_attribute_is_read():
    with pytest.raises(CheckpointError, match=r"getattr\(.*OrderedDict.*'fromkeys'\) is not allowed"):
        _read(Reduced(getattr, OrderedDict, "fromkeys"))


# -- errors ------------------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main([*map(str, arguments), "--no-progress"]) == 2
    return capsys.readouterr().err.rpartition("error: ")[2]


def test_shapes_are_checked_for_every_kind(tmp_path, capsys):
    source, shapes = tmp_path / "state.pt", tmp_path / "shapes.json"
    torch.save({"model": {"a": torch.ones(2, 3), "b": torch.ones(1)}}, source)
    shapes.write_text(json.dumps({"a": [3, 2], "c": [1]}))
    told = refused(capsys, source, tmp_path / "out", "--shapes", shapes)
    for text in ("1 unknown names (b)", "1 missing (c)", "'a' has (2, 3), expected (3, 2)"):
        assert text in told
    for wrong in ("{", "[1]", '{"a": "b"}', '{"a": [1, -1]}'):
        shapes.write_text(wrong)
        assert refused(capsys, source, tmp_path / "out", "--shapes", shapes)
    shapes.write_text(json.dumps({"a": [2, 3], "b": [1]}))
    assert main([str(source), str(tmp_path / "out"), "--shapes", str(shapes), "--no-progress"]) == 0


def test_ties_are_found_in_a_file(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    torch.save({"model": model.state_dict()}, tmp_path / "full.pt")
    assert shapes_of_file(tmp_path / "full.pt") == {
        "0.weight": (3, 3),
        "0.bias": (3,),
        "1.weight": "0.weight",
        "1.bias": (3,),
    }


def test_damaged_and_foreign_files(tmp_path, capsys):
    (tmp_path / "bad.safetensors").write_bytes((50).to_bytes(8, "little") + b"{" + b"x" * 60)
    assert "bad.safetensors (69 bytes) is damaged" in refused(capsys, tmp_path / "bad.safetensors", tmp_path / "out")
    torch.save({"w": torch.sparse_coo_tensor([[0]], [1.0], (3,))}, tmp_path / "sparse.pt")
    assert "'w'" in refused(capsys, tmp_path / "sparse.pt", tmp_path / "out")
    torch.save({}, tmp_path / "nothing.pt")
    assert "nothing.pt" in refused(capsys, tmp_path / "nothing.pt", tmp_path / "out")
    for rank in range(2):
        torch.save({"step": [1, 2], "w": torch.ones(2)}, tmp_path / f"r{rank}.pt")
    assert open_checkpoint([tmp_path / "r0.pt", tmp_path / "r1.pt"]).objects == {("step",): [1, 2]}


def test_places_that_are_not_written_or_read(tmp_path):
    source = tmp_path / "dcp"
    dcp.save({"a": torch.ones(2, 3)}, checkpoint_id=source, no_dist=True)
    with pytest.raises(CheckpointError, match="lies in the source"):
        convert(open_checkpoint(source), source / "out", "full")
    (tmp_path / "out.partial").mkdir()
    holder = os.open(tmp_path / "out.partial", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="another process is writing"):
        convert(open_checkpoint(source), tmp_path / "out", "full")
    os.close(holder)
    metadata = pickle.loads((source / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(info, relative_path="../dcp/" + info.relative_path)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"file name '../dcp/.*expected a plain name inside the checkpoint"):
        open_checkpoint(source)


def test_links_that_lead_elsewhere(tmp_path):
    """A link among the source's files is not read, and a link that exists at the target is not written through."""
    torch.save({"a": torch.ones(2)}, tmp_path / "secret.pt")
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank0.pt").symlink_to(tmp_path / "secret.pt")
    with pytest.raises(CheckpointError, match=r"rank0.pt is a link that leads out of its directory"):
        open_checkpoint(tmp_path / "ranks")
    (tmp_path / "mine").mkdir()
    (tmp_path / "out.partial").symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError, match=r"out.partial is a link, or belongs to another user"):
        convert(open_checkpoint(tmp_path / "secret.pt"), tmp_path / "out", "full")
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize("to", FORMATS)
def test_permissions_follow_the_umask(to: str, tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "state.pt")
    before = os.umask(0o077)
    try:
        convert(open_checkpoint(tmp_path / "state.pt"), tmp_path / "out", to)
    finally:
        os.umask(before)
    made = [tmp_path / "out", *(tmp_path / "out").iterdir()]
    assert len(made) > 2 and not any(one.stat().st_mode & 0o077 for one in made)


def test_control_characters_stay_in_the_file(tmp_path, capsys):
    torch.save({"a\x1b[2J\n": torch.ones(2), "b\x9b": 3}, tmp_path / "state.pt")
    assert main([str(tmp_path / "state.pt"), str(tmp_path / "out"), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "a\\x1b[2J\\n\t(2,)" in shown.out
    assert not {"\x1b", "\x9b"} & set(shown.out + shown.err)
    said = refused(capsys, tmp_path / "state.pt", tmp_path / "out", "--without", "\x1b[1m")
    assert "\x1b" not in said and "\\x1b[1m" in said


def test_a_sharded_tensor_where_a_dict_should_be(tmp_path):
    """Its stand-in has no values to print."""
    path = tmp_path / "rank0.pt"
    torch.save(PickledShards(torch.ones(2), torch.Size([4]), torch.float32, [([0], [2]), ([2], [2])], 0, 2), path)
    with pytest.raises(CheckpointError, match=r"rank0.pt holds a StoredShards: a ShardedTensor; give a file"):
        open_checkpoint(path)
