"""Files of others that `migrate` reads: every one is read, or refused by `CheckpointError` in one line with its place.

Bytes are changed anywhere, and values where they stand: opcodes of pickles, values of JSON. `SHARDKIT_FUZZ` multiplies
the number of examples.
"""

import io
import json
import pickletools
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from shardkit.legacy_fsdp_compat.migrate import (
    CheckpointError,
    LocalRanks,
    Ranks,
    Wrapping,
    convert,
    open_checkpoint,
    shapes_of_file,
    wrapping_of_file,
)
from tests.faults.fuzzing import fuzzed, takes_at_most, with_bytes, with_values
from tests.support import run_ranks
from tests.support.meshes import rank_mesh

pytestmark = pytest.mark.filterwarnings("ignore")

FORMATS = ("full", "sharded", "dtensors", "local", "local_flat", "distributed", "safetensors")
SHAPES = {"a": (6, 3), "b": (4,), "c": (5, 2)}


def write_dtensors(rank: int, world_size: int, directory: Path) -> None:
    mesh = rank_mesh((2,), ("dp",))
    model = {name: DTensor.from_local(torch.randn(2, 3), mesh, (Shard(0),), run_check=False) for name in ("a", "b")}
    torch.save({"model": model, "step": 3}, directory / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("written")
    model = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    optim = {"state": {name: {"exp_avg": one} for name, one in model.items()}}
    state = {"model": model, "optim": {**optim, "param_groups": [{"params": list(model), "lr": 0.1}]}, "step": [1, 2]}
    (root / "full").mkdir()
    torch.save({**state, "seen": {3: (1, "x")}}, root / "full" / "state.pt")
    dcp.save(state, checkpoint_id=root / "distributed", no_dist=True)
    (root / "dtensors").mkdir()
    run_ranks(2, write_dtensors, root / "dtensors")
    wrapping = Wrapping(SHAPES, {"": (None,)}, frozenset(), use_orig_params=True)
    torch.save(state, root / "state.pt")
    checkpoint = open_checkpoint(root / "state.pt")
    convert(checkpoint, root / "sharded", "sharded", ranks=Ranks(2, set(SHAPES)))
    convert(checkpoint, root / "local", "local", ranks=LocalRanks(2, wrapping))
    flat = replace(wrapping, use_orig_params=False)  # flat tensors alone, none of the parameters
    convert(checkpoint, root / "local_flat", "local", ranks=LocalRanks(2, flat))
    convert(checkpoint, root / "safetensors", "safetensors")
    (root / "config.json").write_text(json.dumps(wrapping.as_config()))
    return {one.name: one for one in root.iterdir()}


def read_all(path: Path) -> int:
    """Reads every value, and returns the bytes that they took."""
    checkpoint = open_checkpoint(path, SHAPES if path.name.startswith("local") else None)
    repr(checkpoint.objects)
    return sum(slab.nbytes for one in checkpoint.tensors.values() for slab in one.slabs())


def refused(path: Path, read: Callable[[Path], object] = read_all, *, named: bool = True) -> bool:
    text = None
    with takes_at_most(64):
        try:
            read(path)
        except CheckpointError as error:
            text = str(error)
    assert text is None or ("\n" not in text and (str(path) in text or not named)), text
    return text is not None


# -- changes of files --------------------------------------------------------------------------------------------------


def with_opcodes(data: bytes, generator: random.Random) -> bytes:
    """A pickle whose opcodes are dropped, doubled, swapped, or have other arguments."""
    places = [place for _, _, place in pickletools.genops(data)]
    codes = [data[start:end] for start, end in zip(places, [*places[1:], len(data)], strict=True)]
    numbers = (b"K\x00", b"K\xff", b"J" + b"\xff" * 4, b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"J\x00\x00\x00\x7f", b"N")
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(1, len(codes))
        change = generator.randrange(6)
        if change == 0:
            del codes[at]
        elif change == 1:
            codes.insert(at, generator.choice(codes))
        elif change == 2:
            other = generator.randrange(1, len(codes))
            codes[at], codes[other] = codes[other], codes[at]
        elif change == 3:
            codes[at] = generator.choice([*(bytes([one]) for one in b"Rb\x81]})(tue2"), b"h\x02"])
        else:
            chosen = [number for number, code in enumerate(codes) if code[:1] in (b"K", b"M", b"J", b"\x88", b"\x89")]
            codes[generator.choice(chosen or [at])] = generator.choice(numbers)
    return b"".join(codes)


def with_structure(path: Path, generator: random.Random) -> bytes:
    data = path.read_bytes()
    if path.name == ".metadata":
        return with_opcodes(data, generator)
    if path.suffix == ".pt":
        packed = io.BytesIO()
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w") as new:
            for one in old.infolist():
                opened = old.open(one)
                opened._expected_crc = None  # those that were filled in later have none
                content = opened.read()
                is_pickle = one.filename.endswith(".pkl")
                new.writestr(one.filename, with_opcodes(content, generator) if is_pickle else content)
        return packed.getvalue()
    if path.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        notes = header["__metadata__"]
        if generator.random() < 0.5:
            name = generator.choice([name for name in notes if name.startswith("shardkit")])
            notes[name] = json.dumps(with_values(json.loads(notes[name]), generator))
        else:
            header = with_values(header, generator)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]
    if path.suffix == ".json":
        return json.dumps(with_values(json.loads(data), generator)).encode()
    return with_bytes(data, generator)


def changed(path: Path, generator: random.Random) -> bytes:
    change = generator.random()
    data = path.read_bytes()
    if change < 0.1:
        return data[: generator.randrange(len(data))]
    return with_bytes(data, generator) if change < 0.5 else with_structure(path, generator)


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_changed_files(written: dict[str, Path], tmp_path: Path, kind: str):
    target, seen = tmp_path / kind, set[bool]()

    @fuzzed
    def run(generator: random.Random) -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(written[kind], target)
        files = [one for one in target.iterdir() if one.name != "migration.json"]
        victim = generator.choice(sorted(files))
        victim.write_bytes(changed(victim, generator))
        seen.add(refused(target))

    run()
    assert len(seen) == 2, "some are refused, some say the same as before"


def test_changed_json(written: dict[str, Path], tmp_path: Path):
    path = tmp_path / "config.json"

    @fuzzed
    def run(generator: random.Random) -> None:
        path.write_bytes(changed(written["config.json"], generator))
        refused(path, wrapping_of_file)
        refused(path, lambda one: open_checkpoint(written["local"], shapes_of_file(one)), named=False)

    run()
