"""`torch_files.py`, `pickled.py`: archives and pickles that torch.save never writes are refused unread."""

import io
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardkit.core.checkpoint import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.pickled import check_pickle
from shardkit.core.checkpoint.sources import open_file
from shardkit.core.checkpoint.torch_files import layout_in, load_torch_bytes, storages_in, values_in

NOISE = torch.randn(3000, generator=torch.Generator().manual_seed(0))


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def packed(data: bytes) -> bytes:
    """The archive with deflated entries. Deflating makes noise longer, so no size reveals it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        for one in source.infolist():
            target.writestr(one.filename, source.read(one), zipfile.ZIP_DEFLATED if "/data/" in one.filename else 0)
        target.writestr("archive/padding", bytes(20_000), zipfile.ZIP_STORED)
    return file.getvalue()


def shared(data: bytes) -> bytes:
    """A hundred entries over the same bytes."""
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a") as archive:
        (storage,) = (one for one in archive.infolist() if one.filename.endswith("/data/0"))
        for number in range(100):
            other = zipfile.ZipInfo(f"{storage.filename}{number}")
            for name in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(other, name, getattr(storage, name))
            archive.filelist.append(other)
        archive.writestr("archive/padding", b"")
    return file.getvalue()


def test_packed_values_are_not_taken_for_values(tmp_path):
    """Otherwise compressed bytes would be read as values, as torch.load(mmap=True) does."""
    data = packed(saved({"weight": NOISE}))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert sum(one.file_size for one in archive.infolist()) <= len(data)
    (tmp_path / "packed.pt").write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"packed\.pt: its \d+ bytes are compressed"):
        open_file(tmp_path / "packed.pt")
    with pytest.raises(DamagedCheckpointError, match=r"f: bytes 0 to .*: a compressed storage"):
        storages_in(io.BytesIO(data), 0, len(data), "f")


def test_bytes_that_many_storages_share_count_for_each():
    data = shared(saved(NOISE))
    with pytest.raises(
        DamagedCheckpointError, match=rf"f: its {len(data)} bytes are compressed or claim to hold 12\d+"
    ):
        load_torch_bytes(data, "f")


def longer(data: bytearray, entry: int, header: int) -> None:
    struct.pack_into("<II", data, entry + 20, 10**6, 10**6)


def elsewhere(data: bytearray, entry: int, header: int) -> None:
    data[header : header + 4] = b"PK\x05\x06"


def before(data: bytearray, entry: int, header: int) -> None:
    """If the directory lies before the offset that is given for it, Python assumes missing bytes before the archive."""
    for mark, place, size in ((b"PK\x05\x06", 16, "<I"), (b"PK\x06\x06", 48, "<Q")):
        if (at := data.rfind(mark)) >= 0:
            struct.pack_into(size, data, at + place, struct.unpack_from(size, data, at + place)[0] + header + 100)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (before, "f: bytes 7 to .* are not an archive of torch.save: BadZipFile"),
        # a zipfile that looks for zip bombs sees it first
        (longer, "f: bytes 7 to .*(: the storage inside claims 1000000 bytes|BadZipFile.*Overlapped entries)"),
        (elsewhere, "f: bytes 7 to .* are not an archive of torch.save: BadZipFile"),
    ],
)
def test_a_storage_that_is_not_where_the_directory_says(change: Callable[[bytearray, int, int], None], text: str):
    data = bytearray(saved(NOISE))
    entry = data.index(b"/data/0", data.index(b"PK\x01\x02"))
    entry = data.rindex(b"PK\x01\x02", 0, entry)
    (header,) = struct.unpack_from("<I", data, entry + 42)
    change(data, entry, header)
    # Enough bytes follow in the file: without the check they would be read as values.
    with pytest.raises(DamagedCheckpointError, match=text):
        values_in(io.BytesIO(b"before " + data + bytes(2 * 10**6)), 7, len(data), "f")


def test_a_pickle_that_is_looked_at_is_the_one_that_is_loaded():
    """Torch takes `DATA.PKL` for `data.pkl`, so the second pickle, which asks for two gigabytes, must be checked."""
    asks = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + (2 * 10**9).to_bytes(5, "little") + b"\x85R."
    file = io.BytesIO(saved(torch.arange(24.0).view(4, 6).t()))
    with zipfile.ZipFile(file, "a") as archive:
        (plain,) = (one.filename for one in archive.infolist() if one.filename.endswith("/data.pkl"))
        archive.writestr(plain.replace("data.pkl", "DATA.PKL"), asks)
    data = file.getvalue()
    with pytest.raises(DamagedCheckpointError, match="entries of different names"):
        load_torch_bytes(data, "f")
    with pytest.raises(DamagedCheckpointError, match="entries of different names"):
        layout_in(file, 0, len(data), 96, "f")


def test_one_tensor_is_not_two():
    data = saved((NOISE, NOISE.clone()))
    with pytest.raises(DamagedCheckpointError, match=f"f: bytes 0 to {len(data)} hold 2 storages, expected one"):
        values_in(io.BytesIO(data), 0, len(data), "f")


class Odd(torch.Tensor):
    pass


def hidden(tensor: torch.Tensor) -> torch.Tensor:
    tensor.__dict__["numel"] = 3
    return tensor


@pytest.mark.parametrize(
    ("tensor", "change", "text"),
    [
        (
            torch.ones(2, 3).t(),
            (b"K\x03K\x02\x86", b"K\x7fK\x7f\x86"),
            "a storage of 24 bytes, and its tensor needs 2020",
        ),
        (torch.ones(2, 3).t(), (b"K\x01K\x03\x86", b"K\x01K\x7f\x86"), "a storage of 24 bytes, and its tensor needs"),
        (hidden(torch.ones(6)), (b"", b""), "hold no plain tensor: .*numel"),
        (torch.nn.Parameter(torch.ones(6)), (b"", b""), "hold no plain tensor: .*a Parameter"),
        (torch.eye(2).to_sparse(), (b"", b""), "hold no plain tensor"),
        (torch.ones(6).as_subclass(Odd), (b"", b""), "hold no plain tensor"),
    ],
)
def test_what_is_no_plain_tensor_in_its_storage(tensor: torch.Tensor, change: tuple[bytes, bytes], text: str):
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as source, zipfile.ZipFile(file := io.BytesIO(), "w") as target:
        for one in source.infolist():
            assert "pkl" not in one.filename or change[0] in source.read(one)
            target.writestr(one.filename, source.read(one).replace(*change) if change[0] else source.read(one))
    data = file.getvalue()
    with pytest.raises(DamagedCheckpointError, match=f"f: bytes 7 to .*{text}"):
        layout_in(io.BytesIO(b"before " + data), 7, len(data), 24, "f")


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def remembered(value: bytes) -> bytes:
    return value + b"q\x010"


LONG = "x" * 10**6
BOMBS = {
    "bytearray": b"cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R",
    "bytearray by way of another": b"ctorch._tensor\n_rebuild_from_type_v2\n"
    b"(cbuiltins\nbytearray\ncbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85}tR",
    "tensor": b"ctorch\nFloatTensor\nJ\x00\x00\x00\x40\x85R",
    "encoded": remembered(text(LONG)) + b"]" + (b"c_codecs\nencode\nh\x01" + text("utf-32") + b"\x86Ra") * 1000,
    "copied": remembered(b"](" + b"K\x01" * 10**5 + b"e") + b"]" + b"ccollections\nCounter\nh\x01\x85Ra" * 5000,
    "sets": b"(" + b"\x8f" * 10**6 + b"t",
    "hashed": b"}" + b"N\x85q\x01" + b"h\x01h\x01\x86q\x01" * 40 + b"K\x01s",
    "memo": b"Nr\x00\x00\x00\x7f",  # the memo of an unpickler is as long as its largest index
    "lists of lists": b"]q\x01" + b"](h\x01h\x01eq\x01" * 60,  # small, and without end for whoever walks over them
}


def archive(data: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("x/data.pkl", data)
        file.writestr("x/byteorder", b"little")
        file.writestr("x/version", b"3\n")
    return packed.getvalue()


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickles_that_would_take_memory(bomb: str):
    data = archive(b"\x80\x02" + BOMBS[bomb] + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        CheckpointError, match=r"evil.pt( .*refused|: its containers .* or contain each other too often)"
    ):
        load_torch_bytes(data, "evil.pt")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (64 << 10) + (len(data) >> 10)


def test_a_memo_in_text_takes_no_memory_either():
    with pytest.raises(pickle.UnpicklingError, match=r"memo number 10000000 in a pickle of \d+ bytes"):
        check_pickle(b"\x80\x02Np10000000\n.")


def test_usual_pickles_pass():
    check_pickle(pickle.dumps({"model": dict.fromkeys(map(str, range(1000)), (1, 2.5, [3, {"x"}]))}))
    check_pickle(pickle.dumps(list(range(10**5))))
