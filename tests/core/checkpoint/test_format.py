"""The format on disk: stock reads ours and we read stock's; damage of any kind, and contradictions, are named."""

import copyreg
import hashlib
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardkit.core.checkpoint import CheckpointError, CheckpointManager, DamagedCheckpointError
from shardkit.core.checkpoint.directory import open_index
from shardkit.core.checkpoint.index import (
    BLOCK_BYTES,
    Chunk,
    File,
    Index,
    ObjectEntry,
    TensorEntry,
    pack,
    seal,
    unpack,
    unseal,
)
from shardkit.core.checkpoint.saving import write_file
from shardkit.core.checkpoint.stock_metadata import unpickle_metadata
from shardkit.core.checkpoint.torch_files import archive_of
from shardkit.core.checkpoint.writers import DataFile
from tests.core.checkpoint.trainee import Trainee, flip, save_trained
from tests.faults.fuzzing import Reduced
from tests.support import run_ranks
from tests.support.twins import differences


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[Any]]:
    """Checkpoints of two steps on two ranks, and the states that they hold."""
    path = tmp_path_factory.mktemp("saved")
    return path, [full for full, _ in run_ranks(2, save_trained, path, (2,), 1, 2)[0]]


@pytest.mark.parametrize("shape", [(), (3, 5), (2, 1, 4), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_an_archive_is_what_torch_saves(tmp_path, dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = torch.randint(0, 2, shape).to(dtype)
    archive = archive_of(dtype, shape)
    data = archive.head + bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) + archive.tail
    (tmp_path / "archive").write_bytes(data)
    read = torch.load(tmp_path / "archive", weights_only=True)
    assert differences(read, tensor) == []
    assert len(data) == archive.length


def checksums(data: bytes) -> tuple[str, ...]:
    blocks = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
    return tuple(hashlib.sha256(block).hexdigest()[:32] for block in blocks)


@pytest.mark.parametrize(
    "sizes", [(), (5,), (BLOCK_BYTES,), (BLOCK_BYTES + 1,), (7, BLOCK_BYTES - 7, 3), (9, 2 * 2**20), (1,) * 20]
)
def test_blocks_over_parts(tmp_path, sizes: Any):
    """By a save; and offline, also where an earlier attempt wrote more than it noted."""
    parts, path, told = [os.urandom(size) for size in sizes], tmp_path / "file", list[int]()
    whole = b"".join(parts)
    expected = File("file", len(whole), checksums(whole))
    path.write_bytes(bytes(2 * BLOCK_BYTES))  # must be overwritten
    assert write_file(path, parts, told.append) == expected
    assert path.read_bytes() == whole and sum(told) == len(whole)
    half = len(whole) // 2
    for begun, rest in ((0, parts), (half, [memoryview(whole)[half:]])):
        path.write_bytes(whole[:begun] + b"more" * bool(begun))
        file = DataFile(path, begun, sealed=True)
        for part in rest:
            file.append(part)
        assert file.finish() == expected
        assert path.read_bytes() == whole


def test_what_the_system_takes_bit_by_bit(tmp_path, monkeypatch):
    """A write may end early, as one of more than 2 GiB does."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:100_000]))
    data = os.urandom(BLOCK_BYTES + 5)
    write_file(tmp_path / "file", [data], lambda _: None)
    assert (tmp_path / "file").read_bytes() == data


def test_a_file_is_written_where_no_thread_can_be_started(tmp_path):
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        written = write_file(tmp_path / "file", [b"one", b"two"], lambda _: None)
    assert written.blocks == checksums(b"onetwo")


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], None]] = {"flipped": flip, "missing": Path.unlink, "link": link, "pipe": pipe}


def try_damaged(rank: int, world_size: int, path: Path) -> Any:
    trainee = Trainee((world_size,), seed=3)
    manager = CheckpointManager(path)
    with pytest.raises(DamagedCheckpointError) as refused:
        manager.restore(trainee.state)
    restored = manager.restore(trainee.state, fallback=True)
    return str(refused.value), restored.step, restored.damaged, trainee.full()


@pytest.mark.parametrize(
    ("how", "file"),
    [*((how, "__1_0.distcp") for how in DAMAGES), *((how, "manifest.json") for how in ("flipped", "missing", "pipe"))],
)
def test_damage_is_named_and_passed_over(tmp_path, saved: tuple[Path, list[Any]], file: str, how: str):
    source, (before, _) = saved
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    damaged = tmp_path / "step-000002" / file
    DAMAGES[how](damaged)
    for text, step, passed_over, seen in run_ranks(2, try_damaged, tmp_path):
        assert str(damaged) in text
        assert text.endswith(
            "; pass fallback=True to take the checkpoint before it, or copy its files again from where they are intact"
        )
        assert step == 1 and len(passed_over) == 1 and str(damaged) in passed_over[0]
        assert differences(seen, before) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002.damaged"]


def test_every_flipped_byte_is_found(tmp_path, saved: tuple[Path, list[Any]]):
    """A hundred flips over each file of a checkpoint, read as a whole."""
    from shardkit.core.checkpoint.verified_file import verify

    path = tmp_path / "step-000002"
    shutil.copytree(saved[0] / "step-000002", path)
    index = open_index(path)
    for file in index.files.values():
        original = (path / file.name).read_bytes()
        for at in range(0, len(original), max(1, len(original) // 100)):
            data = bytearray(original)
            data[at] ^= 1 << (at % 8)
            (path / file.name).write_bytes(data)
            with pytest.raises(DamagedCheckpointError, match=f"{file.name} is damaged: bytes 0 to"):
                verify(path, file)
        (path / file.name).write_bytes(original)
        verify(path, file)


def test_stock_metadata_runs_nothing(tmp_path):
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=tmp_path, no_dist=True)
    assert list(open_index(tmp_path).tensors) == ["model.weight"]
    exploit = Reduced(os.system, "touch /tmp/shardkit-exploited")
    for payload in (pickle.dumps(exploit), b"", b"\x80\x02]q\x00."):
        (tmp_path / ".metadata").write_bytes(payload)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            open_index(tmp_path)
    assert not Path("/tmp/shardkit-exploited").exists()


_ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"


@pytest.mark.parametrize("builtins", [b"builtins", b"__builtin__"])  # the latter below pickle's protocol 3
def test_members_of_enumerations_may_be_named(builtins: bytes):
    """Python 3.11.2 writes them as `getattr(enumeration, name)`, other versions by their value."""
    by_name = b"c" + builtins + b"\ngetattr\n" + _ENCODING + b"X\x17\x00\x00\x00TORCH_CONTIGUOUS_FORMAT\x86R."
    by_value = _ENCODING + b"K\x00\x85R."
    assert type(unpickle_metadata(by_name)) is type(unpickle_metadata(by_value))
    with pytest.raises(pickle.UnpicklingError, match=r"attribute '__subclasses__' of .*StorageMeta"):
        unpickle_metadata(
            b"cbuiltins\ngetattr\nctorch.distributed.checkpoint.metadata\nStorageMeta\n"
            b"X\x0e\x00\x00\x00__subclasses__\x86R."
        )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "float32.__class__"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("pathlib", "os"),
        ("os", "system"),
    ],
)
def test_stock_metadata_is_made_of_nothing_but_its_own_classes(module: str, name: str):
    """Other names of the same modules are refused. A dtype is allowed."""
    assert unpickle_metadata(b"ctorch\nfloat32\n.") is torch.float32
    with pytest.raises(pickle.UnpicklingError, match=f"{module}.{name} is not allowed in the metadata"):
        unpickle_metadata(f"c{module}\n{name}\n.".encode())


def test_stock_metadata_takes_no_extensions():
    """Codes of copyreg lead past the list of classes, if this process has seen them before."""
    copyreg.add_extension("posix", "getcwd", 240)
    try:
        data = pickle.dumps(os.getcwd, 2)
        assert pickle.loads(data) is os.getcwd
        with pytest.raises(pickle.UnpicklingError, match="EXT1 is not allowed in a checkpoint"):
            unpickle_metadata(data)
    finally:
        copyreg.remove_extension("posix", "getcwd", 240)
        copyreg.clear_extension_cache()


def changed(path: Path, change: Callable[[Any], None]) -> Path:
    """A directory of stock's with two tensors, whose metadata has been changed."""
    dcp.save({"model": {"a": torch.ones(3), "b": torch.zeros(3)}}, checkpoint_id=path, no_dist=True)
    metadata = dcp.FileSystemReader(path).read_metadata()
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def test_stock_paths_that_contradict_their_names(tmp_path):
    """Otherwise two tensors would be read into one."""
    path = changed(tmp_path / "x", lambda metadata: metadata.planner_data.update({"model.a": ("model", "b")}))
    assert open_index(path).paths == {"model.a": ("model.a",), "model.b": ("model", "b")}


def transformed(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ("stream.zstd",)


def of_no_dtype(metadata: Any) -> None:
    described = metadata.state_dict_metadata["model.a"]
    described.size, described.chunks, described.properties.dtype = torch.Size([0]), [], "x"


def named_by_a_bool(metadata: Any) -> None:
    metadata.state_dict_metadata = {False: metadata.state_dict_metadata["model.a"]}


def lies_elsewhere(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../outside.distcp"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lies_elsewhere, r"file name '\.\./outside\.distcp': expected a plain name"),
        (transformed, r"model\.a: is transformed by \('stream\.zstd',\), which is not supported"),
        (lambda metadata: metadata.storage_data.clear(), r"model\.a: the metadata lists a chunk at \(0,\), and no"),
        (of_no_dtype, r"model\.a: dtype 'x'"),  # without elements, where nothing else would reveal it
        (named_by_a_bool, "False where a name should be"),
    ],
)
def test_stock_metadata_that_is_refused(tmp_path, change: Callable[[Any], None], text: str):
    with pytest.raises(CheckpointError, match=text):
        open_index(changed(tmp_path / "x", change))


def test_stock_files_that_are_links(tmp_path):
    path = changed(tmp_path / "x", lambda metadata: None)
    link(path / "__0_0.distcp")
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp does not exist, or is not a file"):
        open_index(path)


FILE = {"f": File("f", 1000, None)}


def whole(shape: tuple[int, ...], *chunks: Chunk) -> dict[str, TensorEntry]:
    return {"w": TensorEntry(("w",), torch.float32, shape, chunks)}


def piece(offsets: tuple[int, ...], sizes: tuple[int, ...], **other: Any) -> Chunk:
    return Chunk(**{"file": "f", "offset": 0, "length": 100, "values": None, **other}, offsets=offsets, sizes=sizes)


def test_what_fits_is_taken():
    rows = [piece((row, 0), (1, 6), offset=100 * row) for row in range(4)]
    Index(whole((4, 6), *rows, piece((4, 0), (0, 6))), {}, FILE)
    Index(whole((2, 2), *(piece((r, c), (1, 1), offset=200 * r + 100 * c) for r in (0, 1) for c in (0, 1))), {}, FILE)
    Index(whole((), piece((), (), values=96)), {"o": ObjectEntry(("o",), "f", 900, 100)}, FILE)
    Index(whole((0, 3)), {}, FILE)


@pytest.mark.parametrize(
    ("tensors", "objects", "text"),
    [
        (whole((4,), piece((0,), (3,))), {}, "w: the chunks .* leave holes: they hold 3 of its 4 elements"),
        (whole((2,)), {}, "hold 0 of its 2 elements"),
        (whole((4,), piece((0,), (3,)), piece((2,), (2,))), {}, r"overlap: \[0:3\] in f and \[2:4\] in f"),
        (whole((4,), piece((0,), (2,)), piece((3,), (1,)), piece((1,), (2,))), {}, "overlap"),
        (whole((), piece((), ()), piece((), ())), {}, "overlap"),
        (whole((2, 4), piece((0, 0), (2, 3)), piece((1, 1), (1, 2))), {}, "overlap"),
        (whole((4,), piece((1,), (4,))), {}, r"w: the chunks of shape \(4,\) stick out of it: \[1:5\]"),
        (whole((4,), piece((-1,), (5,))), {}, "stick out"),
        (whole((4,), piece((0, 0), (4, 1))), {}, "stick out"),
        (whole((4,), piece((0,), (4,), length=15)), {}, "w: .* a chunk of 16 bytes at .* in 15 bytes of f"),
        (
            whole((4,), piece((0,), (4,), values=85)),
            {},
            "w: the index places a chunk of 16 bytes at .* in 100 bytes of f",
        ),
        (whole((4,), piece((0,), (4,), offset=50, values=49)), {}, " in 100 bytes of f"),
        (whole((4,), piece((0,), (4,), offset=901)), {}, "w: .* at bytes 901 to 1001 of f, which has 1000"),
        (whole((4,), piece((0,), (4,), offset=-1)), {}, "the index places it at bytes -1"),
        (whole((4,), piece((0,), (4,), file="g")), {}, "of g, which is not among the files"),
        (whole((2**20, 0, 2**40)), {}, "w: no tensor has the shape"),
        ({}, {"o": ObjectEntry(("o",), "f", 990, 11)}, "o: the index places it at bytes 990 to 1001"),
        ({}, {"o": ObjectEntry(("o",), "f", 9, -1)}, "o: the index places it at bytes 9 to 8"),
        (whole((0,)), {"w": ObjectEntry(("w",), "f", 0, 1)}, "w: both a tensor and an object"),
        ({}, {n: ObjectEntry((n,), "f", 0, 600) for n in "ab"}, "f: the index places 1200 bytes in it, but"),
        # as a thousand tensors in the place of one would make a few kilobytes ask for a thousand times as much memory
        ({n: whole((2,), piece((0,), (2,), length=600))["w"] for n in "ab"}, {}, "f: .* places 1200 bytes in it, but"),
    ],
)
def test_what_contradicts_itself_is_refused(tensors: Any, objects: Any, text: str):
    with pytest.raises(DamagedCheckpointError, match=text):
        Index(tensors, objects, FILE)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0", "a\n", "\u00e9", "a" * 201])
def test_names_of_files_that_lead_elsewhere(name: str):
    with pytest.raises(DamagedCheckpointError, match="expected a plain name inside the checkpoint"):
        File(name, 0, None)


@pytest.mark.parametrize(("nbytes", "blocks"), [(-1, 0), (0, 1), (1, 0), (BLOCK_BYTES, 2), (BLOCK_BYTES + 1, 1)])
def test_a_checksum_for_each_block(nbytes: int, blocks: int):
    with pytest.raises(DamagedCheckpointError, match="bytes do not match its number of checksums"):
        File("f", nbytes, ("0" * 32,) * blocks)


def sealed(**changes: Any) -> bytes:
    document = unseal(pack(Index({}, {}, FILE, step=3), "now"), "manifest")
    return seal({**document, **changes})


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (sealed(version=2), CheckpointError, "m is of version 2, this code reads 1; use the newer shardkit"),
        (sealed(block_bytes=7), CheckpointError, "use the newer shardkit"),
        (sealed(format="x"), DamagedCheckpointError, "m is of format 'x'"),
        (sealed(step=-1), DamagedCheckpointError, "-1 where a whole number should be"),
        (sealed(step=True), DamagedCheckpointError, "True where a whole number should be"),
        (sealed(info=[]), DamagedCheckpointError, "info"),
        (sealed(files=[["f", 1, None]] * 2), DamagedCheckpointError, "'f' stands there twice"),
        (sealed(objects=[[["a"], -1, 0, 0]]), DamagedCheckpointError, "-1 where a whole number should be"),
        (sealed()[:-1], DamagedCheckpointError, "does not end with a seal"),
        (sealed() + b"\n", DamagedCheckpointError, "does not end with a seal"),
        (sealed().replace(b'"step":3', b'"step":4'), DamagedCheckpointError, "its seal does not fit"),
        (b"", DamagedCheckpointError, "does not end with a seal"),
    ],
)
def test_manifests_that_are_refused(data: bytes, kind: type[CheckpointError], text: str):
    with pytest.raises(CheckpointError, match=text) as refused:
        unpack(data, "m")
    assert type(refused.value) is kind
