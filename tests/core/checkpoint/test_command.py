"""`python -m shardkit.core checkpoint`: offline, streamed, against the libraries that read the results."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardkit.core.checkpoint import CheckpointManager, DamagedCheckpointError, TrainingState
from shardkit.core.checkpoint.command import differences as lines
from shardkit.core.checkpoint.command import main
from shardkit.core.checkpoint.directory import open_index
from shardkit.core.checkpoint.sources import SAFETENSORS_DTYPES, open_file
from shardkit.core.checkpoint.writers import DcpWriter
from tests.core.checkpoint.trainee import Held, flip, restore, save_trained
from tests.support import run_ranks
from tests.support.twins import differences


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Checkpoints of two steps from four ranks, and the state after the second."""
    path = tmp_path_factory.mktemp("saved")
    return path, run_ranks(4, save_trained, path, (2, 2), 1, 2)[0][-1][0]


def weights(full: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): value for name, value in full.items() if name.startswith("model.")}


def test_reshard_and_diff(tmp_path, saved: tuple[Path, Any], capsys):
    path, expected = saved
    for ranks in (1, 3):
        target = tmp_path / f"resharded-{ranks}"
        assert main(["reshard", str(path), str(target), "--ranks", str(ranks)]) == 0
        assert sorted(one.name for one in target.glob("*.distcp")) == [f"__{rank}_0.distcp" for rank in range(ranks)]
        assert main(["diff", str(path / "step-000002"), str(target)]) == 0
        assert main(["verify", str(target)]) == 0
        for seen in run_ranks(2, restore, tmp_path / "none", target):
            assert differences(seen, expected) == []
    assert open_index(target).world_size == 4
    dcp_to_torch_save(target, tmp_path / "whole.pt")  # stock reads it as well
    read = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert differences(read["model"], weights(expected)) == []
    capsys.readouterr()
    assert main(["diff", str(path / "step-000001"), str(path / "step-000002")]) == 1
    printed = capsys.readouterr().out
    assert "model.embed.weight: 77 of 77 elements differ, by at most" in printed
    assert "optimizer.param_groups.0.lr: " in printed and "optimizer.param_groups.0.eps" not in printed


def test_torch_files_there_and_back(tmp_path, saved: tuple[Path, Any]):
    path, expected = saved
    assert main(["export", str(path), str(tmp_path / "weights.pt"), "--to", "torch"]) == 0
    read = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert differences(dict(sorted(read.items())), dict(sorted(weights(expected).items()))) == []
    assert main(["export", str(path), str(tmp_path / "all.pt"), "--to", "torch", "--all"]) == 0
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert differences(everything["model"], read) == []
    assert everything["scheduler"] == expected["scheduler"]
    assert everything["loader"]["3"]["workers"][0] == {"at": 2.0} and everything["loader"]["3"]["workers"]["none"] == {}
    assert torch.equal(
        everything["optimizer"]["state"]["embed.weight"]["exp_avg"], expected["optimizer.embed.weight.exp_avg"]
    )
    assert main(["import", str(tmp_path / "weights.pt"), str(tmp_path / "back")]) == 0
    state = {"model": {name: torch.zeros_like(value) for name, value in read.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "back", no_dist=True)
    assert differences(state["model"], read) == []


def test_inspect(saved: tuple[Path, Any], capsys):
    assert main(["inspect", str(saved[0])]) == 0
    printed = capsys.readouterr().out
    assert "step-000002: step 2, written by 4 ranks\n  note = 'x'\n" in printed
    assert "model.embed.weight\tfloat32\t[11, 7]\t2 chunks\n" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{tmp}"], "is not a checkpoint, and contains none"),
        (["export", "{saved}", "{tmp}"], "exists; it would be overwritten"),
        (["reshard", "{saved}", "{tmp}", "--ranks=1"], "exists; it would be overwritten"),
        (["reshard", "{saved}", "/dev/null/x", "--ranks=1"], "Not a directory"),
        (["inspect", "{tmp}/none"], "/none does not exist; choose another directory"),
        (["import", "{tmp}/none", "{tmp}/x"], "none does not exist, or is not a file"),
        (["export", "{saved}", "{tmp}/x", "--prefix", "nothing."], "no tensor whose name begins with 'nothing.'"),
        (["export", "{saved}", "{tmp}/x", "--all"], "add --to torch"),
        (["import", "{tmp}", "{tmp}/x"], "has no model.safetensors.index.json and 0 safetensors files"),
    ],
)
def test_errors_are_one_line(tmp_path, saved: tuple[Path, Any], capsys, arguments: list[str], message: str):
    assert main([one.format(tmp=tmp_path, saved=saved[0]) for one in arguments]) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: COMMAND (shardkit checkpoint --help says more)"),
        ("repair here", "invalid choice: 'repair'"),
        ("reshard a b --ranks 0", "argument --ranks: must be a whole number, at least 1, got '0' (shardkit checkpoint"),
        ("reshard a b --ranks x", "argument --ranks: must be a whole number, at least 1, got 'x' (shardkit checkpoint"),
        ("inspect here \x1b[2J", "unrecognized arguments: \\x1b[2J (shardkit checkpoint --help says more)"),
    ],
)
def test_errors_of_usage_are_one_line(words: str, message: str, capsys):
    with pytest.raises(SystemExit) as end:
        main(words.split(" ") if words else [])
    (error,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert error.startswith("error: ") and message in error


def save_user(path: Path, step: int, value: Any) -> Path:
    """A checkpoint of one value of user state."""
    state = TrainingState(torch.nn.Linear(1, 1, bias=False), user={"user": Held({"value": value})}, rng=False)
    torch.nn.init.zeros_(state.model.weight)
    CheckpointManager(path).save(step, state, blocking=True)
    return path / f"step-{step:06d}"


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main([str(one) for one in arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.daily(unbuffered=["1"])
@pytest.mark.parametrize(("unbuffered", "expected"), [("1", 128 + signal.SIGPIPE), ("", 0)])
def test_a_reader_that_goes_away_is_no_error(saved: tuple[Path, Any], unbuffered: str, expected: int):
    """Output after the pipe closes is dropped without an error, for example by `| head`.

    The status is not 0 if the output was cut off: `verify` would not have verified everything. If Python buffers all
    output until the end, the command keeps its own status.
    """
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shardkit.core", "checkpoint", "inspect", str(saved[0])]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False, env=env)
    os.close(writer)
    assert (done.returncode, done.stderr) == (expected, "")


def test_the_newest_of_a_run_is_meant(tmp_path, capsys):
    """The newest step counts even if it is damaged, has seven digits, or lies beside a step that a restore renamed."""
    run, exported = tmp_path / "run", tmp_path / "exported"
    for step in (999_998, 999_999, 10**6):
        save_user(run, step, torch.full((3,), float(step)))
    shutil.copytree(run / "step-999998", run / "step-1000001.damaged")
    assert "step-1000000: 2 files verified" in said(capsys, "verify", run)[1]
    (run / "step-1000000" / "manifest.json").unlink()
    missing = f"{run / 'step-1000000' / 'manifest.json'} is missing"
    for arguments in (["inspect"], ["verify"], ["export", exported], ["reshard", exported, "--ranks", 1]):
        status, text = said(capsys, arguments[0], run, *arguments[1:])
        assert (status, text) == (2, f"error: {missing}; add --fallback to take the checkpoint before it\n")
        assert not exported.exists()
    # one of stock, of which it has all files, has no checksums
    assert "so this checkpoint cannot be verified" in said(capsys, "inspect", run / "step-1000000")[1]
    flip(run / "step-999999" / "__0_0.distcp")
    for arguments in (["verify"], ["reshard", exported, "--ranks", 1], ["export", tmp_path / "user", "--prefix=user."]):
        status, text = said(capsys, arguments[0], run, *arguments[1:], "--fallback")
        assert status == 0 and text.startswith(f"damaged: {missing}\ndamaged: {run / 'step-999999'}")
    assert "value\tfloat32\t[3]" in said(capsys, "inspect", exported)[1]
    assert list(lines(*((path, open_index(path)) for path in (exported, run / "step-999998")))) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "run", "user"]
    flip(run / "step-999998" / "__0_0.distcp")
    status, text = said(capsys, "verify", run, "--fallback")
    assert status == 2 and "error: " in text and "step-999998/__0_0.distcp is damaged" in text
    assert "; --fallback" not in text


def test_a_checkpoint_of_stock_has_no_checksums(tmp_path, capsys):
    """So `verify` cannot compare it with anything."""
    dcp.save({"model": {"a": torch.ones(3)}, "step": 3}, checkpoint_id=tmp_path / "stock", no_dist=True)
    status, text = said(capsys, "inspect", tmp_path / "stock")
    assert status == 0 and text.endswith("1 tensor, 12 B, 1 other value, 1 file, without checksums\n")
    status, text = said(capsys, "verify", tmp_path / "stock")
    assert status == 2 and "stock has no checksums to compare: it has no manifest.json" in text
    assert said(capsys, "reshard", tmp_path / "stock", tmp_path / "x" / "y", "--ranks", 2)[0] == 0
    status, text = said(capsys, "inspect", tmp_path / "x" / "y")
    assert status == 0 and text.endswith("1 tensor, 12 B, 1 other value, 3 files, with checksums\n")
    assert said(capsys, "diff", tmp_path / "stock", tmp_path / "x" / "y") == (0, "no differences; 2 equal\n")


def test_what_only_one_of_two_has(tmp_path, capsys):
    tensors, objects = {"a": torch.ones(2)}, {"b": 1}
    paths = [save_user(tmp_path / name, 1, value) for name, value in (("both", tensors | objects), ("one", {}))]
    expected = [f"user.value.{name}: only in {paths[0]}" for name in "ab"]
    for first, second in (paths, paths[::-1]):
        status, text = said(capsys, "diff", first, second)
        assert (status, text.splitlines()) == (1, [*expected, "2 differences; 1 equal"])


LARGE = torch.arange(5000.0)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.5]), "2 of 2 elements differ, by at most 0.5"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), "1 of 1 elements differ, by at most inf"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), r"torch.float32 \(2,\) and torch.float64 \(2,\)"),
        (torch.ones(2), torch.ones(2, 1), r"torch.float32 \(2,\) and torch.float32 \(2, 1\)"),
        (torch.ones(2), 1, "a tensor in .*one/step-000001, another value"),
        (*(torch.tensor([n, 3], dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for n in (1, 2)), "1 of 2 elements"),
        ((LARGE,), (LARGE.index_fill(0, torch.tensor(2500), -1.0),), r"\(tensor"),
        ({"a": ({"x", "y"}, float("nan"), LARGE.to(torch.complex64).conj())},) * 2 + (None,),
        ((1, [{"a": 0.0}]), (1, [{"a": -0.0}]), r"\(1, \[\{'a': 0.0"),
        (1, True, "1 and True"),
    ],
)
def test_differences_of_values(tmp_path, one: Any, other: Any, expected: str | None):
    saved = [save_user(tmp_path / name, 1, value) for name, value in (("one", one), ("other", other))]
    found = list(lines(*((path, open_index(path)) for path in saved)))
    if expected is None:
        assert found == []
    else:
        assert len(found) in (1, 2)
        assert [text for text in found if re.match(f"user.value: {expected}", text)]


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES.values(), ids=str)
def test_every_dtype_of_safetensors(tmp_path, dtype: torch.dtype):
    """The library reads our files with the same dtype and values, and we read the library's."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype), "b": torch.ones((), dtype=dtype)}
    safetensors.save_file(tensors, tmp_path / "theirs.safetensors")
    assert main(["import", str(tmp_path / "theirs.safetensors"), str(tmp_path / "x")]) == 0
    assert main(["export", str(tmp_path / "x"), str(tmp_path / "ours")]) == 0
    assert differences(safetensors.load_file(tmp_path / "ours" / "model.safetensors"), tensors) == []


def test_the_layout_of_hugging_face(tmp_path, capsys):
    """Files in which transformers finds the framework, whose values are aligned, and no larger than they may be."""
    safetensors = pytest.importorskip("safetensors")
    state = {"first": torch.ones(300_000), "a": torch.ones(100_000), "bc": torch.ones(150_000), "d": torch.ones(1)}
    torch.save(state, tmp_path / "model.pt")
    for arguments in (["import", tmp_path / "model.pt"], ["export", tmp_path / "in", "--file-mb", 1]):
        command, source, *options = arguments
        target = tmp_path / "in" if command == "import" else tmp_path / "new" / "hf"
        assert said(capsys, command, source, target, *options)[0] == 0
    index = json.loads((tmp_path / "new" / "hf" / "model.safetensors.index.json").read_text())
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["weight_map"] == {"first": names[0], "a": names[1], "bc": names[1], "d": names[2]}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
    assert sorted(path.name for path in (tmp_path / "new" / "hf").iterdir()) == [*names, "model.safetensors.index.json"]
    for name in names:
        file = tmp_path / "new" / "hf" / name
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


def test_a_download_of_the_hugging_face_hub_is_links(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for name in ("a", "b"):
        safetensors.save_file({name: torch.ones(2)}, blobs / name)
        (snapshot / f"model-{name}.safetensors").symlink_to(f"../blobs/{name}")
    (blobs / "index").write_text(json.dumps({"weight_map": {name: f"model-{name}.safetensors" for name in "ab"}}))
    (snapshot / "model.safetensors.index.json").symlink_to("../blobs/index")
    assert main(["import", str(snapshot), str(tmp_path / "imported")]) == 0
    assert list(open_index(tmp_path / "imported").tensors) == ["model.a", "model.b"]


@pytest.mark.parametrize("arguments", [["export"], ["export", "--to=torch"], ["reshard", "--ranks=2"]], ids=str)
def test_a_damaged_source_leaves_no_target(tmp_path, saved: tuple[Path, Any], capsys, arguments: list[str]):
    path = tmp_path / "run"
    shutil.copytree(saved[0] / "step-000002", path)
    flip(path / "__2_0.distcp")
    status, text = said(capsys, arguments[0], path, tmp_path / "target", *arguments[1:])
    assert status == 2 and "__2_0.distcp is damaged" in text
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_file_that_holds_more_than_weights(tmp_path, capsys):
    """As training scripts save. A file of `export --all` keeps the order of the state; parts of it can be imported."""
    value = {"b": 1, "a": torch.ones(2), 0: torch.zeros(0), "c": {}}
    run, exported = save_user(tmp_path / "run", 1, value), tmp_path / "all.pt"
    assert main(["export", str(run), str(exported), "--to", "torch", "--all"]) == 0
    assert repr(torch.load(exported)["user"]) == repr({"value": value})
    capsys.readouterr()
    status, text = said(capsys, "import", exported, tmp_path / "x")
    assert status == 2 and "model: " in text and "is nested" in text and "import: --key model" in text
    status, text = said(capsys, "import", exported, tmp_path / "x", "--key", "none")
    assert status == 2 and "all.pt cannot be read: no dict under 'none', only model, user" in text
    assert main(["import", str(exported), str(tmp_path / "x"), "--key", "model"]) == 0
    model = torch.nn.Linear(1, 1, bias=False)
    CheckpointManager(tmp_path / "none").restore(TrainingState(model, rng=False), source=tmp_path / "x")
    assert model.weight.item() == 0.0


@pytest.mark.parametrize("key", [None, "model"])
def test_a_file_of_torch_that_is_cut_off(tmp_path, capsys, key: str | None):
    torch.save({"model": {"a": torch.ones(99)}}, tmp_path / "model.pt")
    os.truncate(tmp_path / "model.pt", 300)
    with pytest.raises(DamagedCheckpointError, match=r"model\.pt \(300 bytes\) is not a whole file of torch\.save"):
        open_file(tmp_path / "model.pt", key)
    status, text = said(capsys, "import", tmp_path / "model.pt", tmp_path / "x", *(["--key", key] if key else []))
    assert (status, text.count("\n")) == (2, 1) and "model.pt (300 bytes) is not a whole file of torch.save" in text


def test_files_that_cannot_be_imported(tmp_path, capsys):
    safetensors, file = pytest.importorskip("safetensors.torch"), tmp_path / "file"

    def refused(text: str, *options: str) -> None:
        status, seen = said(capsys, "import", file, tmp_path / "x", *options)
        assert status == 2 and seen.startswith(f"error: {file} ") and text in seen

    for value, what in (
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "torch.qint8"),
        (torch.ones(2, device="meta"), "without values"),
    ):
        torch.save({"weight": value}, file)
        refused("cannot be read: weight: ")
        refused(what)
    torch.save({"epoch": 3}, file)
    refused("file holds no tensors; choose another file")
    safetensors.save_file({"a": torch.ones(2)}, file)
    refused("file is a safetensors file, all of it tensors: leave out the key 'model'", "--key", "model")
    file.write_text("neither of them")
    refused("file is neither a safetensors file nor one written by torch.save", "--key", "model")


def test_a_checkpoint_that_is_resharded_keeps_what_is_no_tensor(tmp_path):
    """Step, ranks and info; empty dicts, tensors without elements and the order of keys."""
    user = {"b": 1, "a": torch.ones(2), "c": 2, "e": torch.ones(3, 0), "d": {}}
    state = TrainingState(torch.nn.Linear(1, 1), user={"user": Held(user)})
    manager = CheckpointManager(tmp_path / "run")
    manager.save(7, state, info={"loss": 0.5}, blocking=True)
    assert main(["reshard", str(tmp_path / "run"), str(tmp_path / "x"), "--ranks", "3"]) == 0
    expected, state.user["user"].state = repr(state.user["user"].state), {}
    restored = manager.restore(state, source=tmp_path / "x")
    assert restored is not None and (restored.step, restored.info, restored.world_size) == (7, {"loss": 0.5}, 1)
    assert repr(state.user["user"].state) == expected


def test_options_that_conversions_share(tmp_path, capsys):
    run = save_user(tmp_path / "run", 1, {"a": torch.ones(2), "b": {"c": torch.zeros(3)}, "d": {}, "e": 4})
    full = tmp_path / "full.pt"
    torch.save({"a": torch.ones(2), "b": torch.zeros(3)}, full)
    for command, without in (
        (["export", run, tmp_path / "x", "--to", "torch", "--all"], "user.value.b"),
        (["reshard", run, tmp_path / "x", "--ranks", 2], "user.value.b"),
        (["import", full, tmp_path / "x"], "model.b"),
    ):
        status, text = said(capsys, *command, "--without", without, "--dry-run", "--no-progress")
        assert status == 0 and "\t(2,)\ttorch.float32\n" in text and "nothing was written" in text
        assert without not in text and not (tmp_path / "x").exists()
        status, text = said(capsys, *command, "--without", "nothing")
        assert status == 2 and "has no 'nothing', which is to be left out" in text
    assert main(["reshard", str(run), str(tmp_path / "y"), "--ranks=2", "--without=user.value.b", "--without=rng"]) == 2
    assert main(["reshard", str(run), str(tmp_path / "y"), "--ranks=2", "--without=user.value.b"]) == 0
    index = open_index(tmp_path / "y")
    assert set(index.objects) == set(open_index(run).objects) and "user.value.b.c" not in index.tensors
    assert main(["verify", str(tmp_path / "y"), "--no-progress"]) == 0


def test_an_interrupted_reshard_goes_on(tmp_path, saved: tuple[Path, Any], capsys, monkeypatch):
    arguments = ["reshard", str(saved[0]), str(tmp_path / "x"), "--ranks", "3"]
    write, written = DcpWriter.write, []

    def stop(self: DcpWriter, *rest: Any) -> Any:
        written.append(rest)
        if len(written) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(DcpWriter, "write", stop)
        assert said(capsys, *arguments)[0] == 2
    with (tmp_path / "x.partial" / "__1_0.distcp").open("ab") as file:
        file.write(b"what a write that failed has left")
    status, text = said(capsys, *arguments)
    assert status == 0 and "(5 by an earlier attempt)" in text
    assert main(["verify", str(tmp_path / "x")]) == 0
    assert main(["diff", str(saved[0]), str(tmp_path / "x")]) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


def test_the_index_decides_which_tensors_are_the_model(tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "f.safetensors")
    safetensors.save_file({"a": torch.zeros(2)}, tmp_path / "g.safetensors")
    status, text = said(capsys, "import", tmp_path, tmp_path / "x")
    ambiguous = "has no model.safetensors.index.json and 2 safetensors files; name one file, or add the index"
    assert status == 2 and ambiguous in text
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "f.safetensors", "c": "f.safetensors"}}))
    status, text = said(capsys, "import", tmp_path, tmp_path / "x")
    assert status == 2 and "no file has c, which is in its index" in text
    index.write_text(json.dumps({"weight_map": {"a": "f.safetensors"}}))
    assert said(capsys, "import", tmp_path, tmp_path / "x")[0] == 0
    assert main(["export", str(tmp_path / "x"), str(tmp_path / "x.pt"), "--to", "torch"]) == 0
    assert {name: one.tolist() for name, one in torch.load(tmp_path / "x.pt").items()} == {"a": [1, 1]}
