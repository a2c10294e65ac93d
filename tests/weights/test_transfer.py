"""Weights between processes: receivers have the values of the sharded model, whatever the layouts of both."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardkit.core import Blocks, CPUOffloadPolicy, Owned, fully_shard
from shardkit.weights import (
    Cut,
    DirectoryReceiver,
    Part,
    SendersClosed,
    Stack,
    Target,
    WeightReceiver,
    WeightSender,
    targets_for,
    targets_of,
)
from shardkit.weights.packing import describe
from tests.support import run_ranks
from tests.support.models import Composed
from tests.weights.processes import Cast, free_address


def trained() -> nn.Module:
    """Small, with dims that do not divide evenly, and a buffer."""
    torch.manual_seed(1)
    q, k, v = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(6, 4)
    model = Composed(None, q=q, k=k, v=v, o=nn.Linear(8, 6), head=nn.Linear(6, 7))
    model.register_buffer("scale", torch.tensor(0.5))
    return model


def engine_of() -> nn.Module:
    """The same on one of two tensor-parallel ranks, fused and padded."""
    return Composed(None, qkv=nn.Linear(6, 4 + 2 + 2), o=nn.Linear(4, 6), head=nn.Linear(6, 4))


RULES = {
    "qkv.*": Stack(Part("q", 8), Part("k", 4), Part("v", 4)),
    "o.*": Cut(1),
    "head.*": Cut(0, size=7),
}


def shard(model: nn.Module, kind: str) -> nn.Module:
    """The model as trainers lay it over four ranks."""
    axes = {"hsdp": (2, 2), "stock hsdp": (2, 2), "strided": (2, 2)}.get(kind, (4,))
    ranks = torch.arange(4).view(axes)
    if kind == "strided":
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        for linear in (model.q, model.k, model.v, model.head):
            linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh["tp"], [Shard(0)]))
        stock_fully_shard(model, mesh=mesh["dp"])
        return model
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[-len(axes) :])
    if kind.startswith("stock"):
        stock_fully_shard(model, mesh=mesh)
    elif kind == "dtensors":
        for name, parameter in model.named_parameters():
            placement = Shard(1) if parameter.ndim > 1 else Replicate()
            owner, _, leaf = name.rpartition(".")
            whole = nn.Parameter(distribute_tensor(parameter.data, mesh, [placement]))
            setattr(model.get_submodule(owner), leaf, whole)
    elif kind == "offload":
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    else:
        choose = {"owned": lambda one: Owned(), "blocks": lambda one: Blocks(elements=5)}.get(kind)
        fully_shard(model, mesh=mesh, shard_placement_fn=choose)
    return model


def send(rank: int, world_size: int, address: str, kind: str, shared: bool) -> None:
    """Three versions to two receivers."""
    os.environ["SHARDKIT_SHARED_MEMORY"] = "1" if shared else "0"
    model = shard(trained(), kind)
    with WeightSender(model, address, dtype=torch.bfloat16, receivers=2, timeout=40, bucket=64) as sender:
        for version in range(3):
            if version:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1)
            report = sender.send(version)
            assert report.version == version and not report.failed
            assert report.unused == ("scale",)


def receive(pipe: Pipe, address: str, number: int) -> None:
    engine = engine_of().bfloat16() if number else engine_of()  # one casts to its own dtype
    nn.init.constant_(engine.head.weight, 9)
    targets = targets_for(engine, RULES, tp_rank=number, tp_size=2)
    with WeightReceiver(address, targets, in_place=number == 1, timeout=40) as receiver:
        for version in range(3):
            assert receiver.receive() == version
            full = {
                name: (one + version).bfloat16().to(engine.o.weight.dtype) for name, one in trained().named_parameters()
            }
            for leaf in ("weight", "bias"):
                half = {one: full[f"{one}.{leaf}"].chunk(2)[number] for one in "qkv"}
                assert torch.equal(getattr(engine.qkv, leaf), torch.cat([half[one] for one in "qkv"]))
                rows = full[f"head.{leaf}"][4 * number : 4 * number + 4]
                assert torch.equal(getattr(engine.head, leaf)[: len(rows)], rows)
            assert torch.equal(engine.o.weight, full["o.weight"][:, 4 * number : 4 * number + 4])
            assert torch.equal(engine.o.bias, full["o.bias"])
            if number:  # the padding is not written
                assert (engine.head.weight[3:] == 9).all()
        with pytest.raises(SendersClosed):
            receiver.receive()
    pipe.send("right")


@pytest.mark.parametrize(
    "kind", [*("fsdp", "hsdp", "owned", "blocks", "offload"), *("stock", "stock hsdp", "dtensors", "strided")]
)
def test_models_of_all_layouts(kind, cast):
    shared = kind in ("fsdp", "stock")
    receivers = [cast.other(receive, number, shared=shared) for number in range(2)]
    run_ranks(4, send, cast.address, kind, shared, timeout=120)
    assert [one.says() for one in receivers] == ["right", "right"]


def test_one_process_with_a_snapshot(cast):
    """The receiver gets the model as it was at the call."""
    model = nn.Linear(3, 5)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    there = {name: torch.zeros_like(one) for name, one in before.items()}
    sender, receiver = cast.sender(model, timeout=20), cast.receiver(targets_of(there), timeout=20)
    sending = sender.send(3, async_op=True)
    nn.init.zeros_(model.weight)
    assert receiver.receive(20) == 3
    report = sending.wait()
    for one in (sender, receiver):
        one.close()
    for call in (receiver.receive, lambda: sender.send(4)):
        with pytest.raises(RuntimeError, match="has been closed; make another"):
            call()
    assert report.receivers == (receiver.name,) and report.nbytes == 4 * 20
    assert all(torch.equal(there[name], one) for name, one in before.items())


def receive_into_dtensors(rank: int, world_size: int, address: str) -> None:
    """A receiver's tensors may be DTensors, cut in another way."""
    full = torch.arange(35.0).view(7, 5)
    mesh = DeviceMesh("cpu", range(world_size))
    there = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])}
    state = {"w": distribute_tensor(full, mesh, [Shard(0)])}
    with (
        WeightReceiver(address, targets_of(there), timeout=40) as receiver,
        WeightSender(state, address, receivers=world_size, timeout=40) as sender,
    ):
        sending = sender.send(1, async_op=True)
        receiver.receive()
        sending.wait()
        assert isinstance(there["w"], DTensor) and torch.equal(there["w"].full_tensor(), full)


def test_receivers_with_dtensors():
    run_ranks(3, receive_into_dtensors, free_address(), timeout=120)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("wx", "x: no sender has this tensor"),
        ("w", "w: sent as torch.int64, its target is torch.float32; receive into"),
        ("f", "f: sent as torch.float8_e4m3fn, its target is torch.float32; receive"),
    ],
)
def test_wants_that_nobody_has_are_refused_on_both_sides(names, reason, cast):
    values = {"w": torch.zeros(3, dtype=torch.int64), "f": torch.zeros(3, dtype=torch.float8_e4m3fn)}
    wanted = [Target(name, None, torch.zeros(3)) for name in names]
    sender = cast.sender(values, dtype=torch.bfloat16, timeout=20)
    receiver = cast.receiver(wanted, name="bad", timeout=20)
    sending = sender.send(1, async_op=True)
    with pytest.raises(ValueError, match=reason):
        receiver.receive()
    assert reason in sending.wait().failed["bad"]
    assert sender.send(2).failed == {}  # it is not waited for


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_dtype_that_would_need_a_scale_is_refused(dtype, cast):
    """Its receiver would have cut off or rounded values, without an error."""
    with pytest.raises(ValueError, match="would change values, which need a scale"):
        cast.sender({"w": torch.tensor([0.3, 700.0])}, dtype=dtype)


class Adapted(nn.Module):
    """A linear layer with adapters, with the attributes and names of peft 0.21."""

    disable_adapters = merged = False
    adapter_layer_names = ("lora_A", "lora_B", "lora_embedding_A")

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({one: nn.Linear(base.in_features, 2, bias=False) for one in "ab"})
        self.lora_B = nn.ModuleDict({one: nn.Linear(2, base.out_features, bias=False) for one in "ab"})
        self.scaling, self.active_adapters = {"a": 2.0, "b": 0.5}, ["a", "b"]

    def plain(self) -> torch.Tensor:
        added = (self.scaling[one] * self.lora_B[one].weight @ self.lora_A[one].weight for one in "ab")
        return self.base_layer.weight + sum(added)


class Headed(nn.Module):
    """A head that is trained beside the original, as peft wraps it."""

    disable_adapters = False

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.original_module, self.modules_to_save = head, nn.ModuleDict({"a": nn.Linear(6, 7)})
        self.active_adapters = ["a"]


def adapted() -> nn.Module:
    model = trained()
    model.q, model.o, model.head = Adapted(model.q), Adapted(model.o), Headed(model.head)
    return model


def send_adapters(rank: int, world_size: int, address: str) -> None:
    model = adapted()
    placements = {7: lambda one: Owned(), 8: lambda one: Blocks(elements=5)}
    for layer in (model.q, model.o, model.k):
        fully_shard(layer, shard_placement_fn=placements.get(len(layer.state_dict())))
    fully_shard(model)
    with WeightSender(model, address, merge_adapters=True, timeout=40, bucket=64) as sender:
        sender.send(1)
        other = address.replace("127.0.0.1", "127.0.0.2")
        with WeightSender(model, other, names=lambda name: name if "lora" in name else None) as alone:
            alone.send(1)


def test_adapters_are_merged_or_alone():
    address = free_address()
    full = adapted()
    expected = {
        "q.weight": full.q.plain(),
        "o.weight": full.o.plain(),
        "head.weight": full.head.modules_to_save.a.weight,
        "k.bias": full.k.bias,
        "o.bias": full.o.base_layer.bias,
    }
    alone = {name: one for name, one in full.state_dict().items() if "lora" in name}
    there = {name: torch.zeros_like(one) for name, one in (expected | alone).items()}

    def receive() -> None:
        with WeightReceiver(address, targets_of({name: there[name] for name in expected}), timeout=40) as receiver:
            receiver.receive()
        other = address.replace("127.0.0.1", "127.0.0.2")
        with WeightReceiver(other, targets_of({name: there[name] for name in alone}), timeout=40) as receiver:
            receiver.receive()

    with ThreadPoolExecutor() as threads:
        receiving = threads.submit(receive)
        run_ranks(3, send_adapters, address, timeout=120)
        receiving.result()
    for name, tensor in (expected | alone).items():
        torch.testing.assert_close(there[name], tensor.detach(), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "wrong",
    [
        {"fan_in_fan_out": True},
        {"parameter_name": "experts"},
        {"lora_variant": {"a": object()}},
        {"adapter_layer_names": ("ia3_l",), "ia3_l": {"a": object()}},
        {"base_layer": Composed(None, weight=nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False))},
    ],
)
def test_adapters_of_other_kinds_are_named(wrong):
    model = adapted()
    for name, value in wrong.items():
        setattr(model.q, name, value)
    with pytest.raises(ValueError, match="'q': its adapter is not a product of two matrices"):
        describe(model, str, None, merge=True)


SIZE, BUCKET = 64 << 20, 4 << 20  # bytes


def extra_memory(pipe: Pipe, address: str, kind: str) -> None:
    """Tells how much more memory this process took for two versions than it had before."""
    with Cast() as first:  # touches pages of code
        test_targets_of_all_kinds(first)
    values = {"w": torch.ones(SIZE // 4, dtype=torch.float32)}
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = memory("VmRSS")
    if kind == "sender":
        with WeightSender(values, address, receivers=3, timeout=40, bucket=BUCKET) as sender:
            nbytes = [sender.send(version).nbytes for version in range(2)]
            assert nbytes == [SIZE] * 2
    else:
        with WeightReceiver(address, targets_of(values), in_place=kind == "in place", timeout=40) as receiver:
            assert [receiver.receive() for _ in range(2)] == [0, 1]
    pipe.send(memory("VmHWM") - before)


def memory(kind: str) -> int:
    """Of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


def test_memory_is_two_buckets_on_either_side(cast):
    """And the size of the targets where a version is kept beside them."""
    kinds = ["sender", "in place", "in place", "beside"]
    others = [cast.other(extra_memory, one, shared=False) for one in kinds]
    extra = [one.says() for one in others]
    slack = 6 << 20
    for kind, seen in zip(kinds, extra, strict=True):
        assert seen <= (SIZE if kind == "beside" else 0) + 2 * BUCKET + slack, (kind, seen)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shared", ["0", "1"])
def test_a_sender_sends_the_same_bytes_to_any_number_of_receivers(count, shared, cast, monkeypatch):
    """Each receiver but the last passes them on."""
    monkeypatch.setenv("SHARDKIT_SHARED_MEMORY", shared)
    values = {"w": torch.randn(1000), "v": torch.randn(10, 10)}
    there = [{name: torch.zeros_like(one) for name, one in values.items()} for _ in range(count)]
    options = {"world_size": 2, "receivers": count, "timeout": 40, "bucket": 300}
    senders = [cast.sender(values, rank=rank, **options) for rank in range(2)]
    receivers = [cast.receiver(targets_of(one), in_place=at % 2 == 1, timeout=40) for at, one in enumerate(there)]
    receiving = [cast.threads.submit(one.receive) for one in receivers]
    reports = list(cast.threads.map(WeightSender.send, senders, [1, 1]))
    assert [one.result() for one in receiving] == [1] * count
    assert sum(one.nbytes for one in reports) == 4400
    assert abs(reports[0].nbytes - reports[1].nbytes) < 440
    assert sorted(one.passed_on for one in receivers) == [0, *[4400] * (count - 1)]
    assert all(torch.equal(one[name], values[name]) for one in there for name in values)


def test_targets_of_all_kinds(cast):
    """Views, inference tensors, other dtypes, no elements, no dims; two names of one tensor."""
    tied = torch.randn(6, 4)
    values = {"a": tied, "b": tied, "none": torch.zeros(0, 3), "one": torch.tensor(3.0), "n": torch.arange(5)}
    with torch.inference_mode():
        frozen = torch.zeros(6, 4)
    wide = torch.zeros(4, 12)
    there = {
        "a": frozen,
        "b": wide.t()[::2],  # every other column
        "none": torch.zeros(0, 3, dtype=torch.bfloat16),
        "one": torch.tensor(0.0, dtype=torch.float64),
        "n": torch.zeros(5, dtype=torch.int64),
    }
    sender, receiver = cast.sender(values, timeout=20), cast.receiver(targets_of(there), timeout=20)
    sending = sender.send(1, async_op=True)
    assert receiver.receive() == 1 and sending.wait().failed == {}
    assert all(torch.equal(there[name], one.to(there[name].dtype)) for name, one in values.items())
    assert not wide[:, 1::2].any()


def test_targets_that_overlap_are_passed_on_as_they_came(cast, monkeypatch):
    """The first receiver has two rows of the first half, as a target of their own, before it has all of the tensor."""
    monkeypatch.setenv("SHARDKIT_SHARED_MEMORY", "0")
    values = {"w": torch.randn(100, 6)}
    senders = [cast.sender(values, rank=rank, world_size=2, receivers=2, timeout=40) for rank in range(2)]
    there = [[torch.zeros(100, 6), torch.zeros(100, 2)] for _ in range(2)]
    receivers = []
    for whole, part in there:
        targets = [Target("w", None, whole), Target("w", (slice(100), slice(2, 4)), part)]
        receivers.append(cast.receiver(targets, in_place=True, timeout=40))
    packed = senders[1]._packed

    def late(*args):
        while not any(one.passed_on for one in receivers):
            time.sleep(0.01)
        return packed(*args)

    senders[1]._packed = late
    receiving = [cast.threads.submit(one.receive) for one in receivers]
    list(cast.threads.map(WeightSender.send, senders, [1, 1]))
    assert [one.result() for one in receiving] == [1, 1]
    for whole, part in there:
        assert torch.equal(whole, values["w"]) and torch.equal(part, values["w"][:, 2:4])


def test_versions_that_are_sent_without_waiting_do_not_mix(cast):
    values, there = ({name: torch.zeros(500) for name in "abc"} for _ in range(2))
    sender = cast.sender(values, timeout=40, bucket=256)
    receiver = cast.receiver(targets_of(there), timeout=40)

    def train() -> None:
        for version in range(1, 20):
            for one in values.values():
                one.fill_(version)
            sender.send(version, async_op=True)

    training = cast.threads.submit(train)
    for version in range(1, 20):
        assert receiver.receive() == version
        assert all((one == version).all() for one in there.values())
    training.result()


def test_a_directory_that_could_not_be_prepared(tmp_path, cast):
    """As when the disk is full: the next call prepares it anew, and the version before stays."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    beside = tmp_path / "config"
    beside.mkdir()
    values = {"w": torch.ones(3)}
    sender = cast.sender(values, timeout=40)
    receiver = cast.enter_context(DirectoryReceiver(cast.address, tmp_path / "out", values, beside=beside, timeout=40))
    for version in (1, 2):
        if version == 2:
            beside.rmdir()
            with pytest.raises(FileNotFoundError):
                receiver.receive()
            beside.mkdir()
        values["w"].fill_(version)
        sending = sender.send(version, async_op=True)
        assert receiver.receive() == version and sending.wait().failed == {}
    for version in (1, 2):
        (file,) = receiver.path(version).glob("*.safetensors")
        assert torch.equal(load_file(file)["w"], torch.full((3,), float(version)))


def test_a_directory_whose_receiver_is_interrupted_as_it_appears(tmp_path, cast, monkeypatch):
    """The next call finishes the version, which stays."""
    values, rename, interrupts = {"w": torch.ones(3)}, Path.rename, [KeyboardInterrupt]

    def interrupted(self, target):
        rename(self, target)
        if interrupts:
            raise interrupts.pop()

    sender = cast.sender(values, timeout=40)
    receiver = cast.enter_context(DirectoryReceiver(cast.address, tmp_path, values, timeout=40))
    monkeypatch.setattr(Path, "rename", interrupted)
    sending = sender.send(1, async_op=True)
    with pytest.raises(KeyboardInterrupt):
        receiver.receive()
    assert receiver.receive() == 1 and sending.wait().failed == {}
    assert [one.name for one in receiver.path(1).iterdir()] == ["model.safetensors"]


def test_versions_in_directories(tmp_path, monkeypatch):
    """Each appears when it is complete, with the files beside it, and goes at once; a few are kept."""
    remove, removed, busy = shutil.rmtree, list[str](), True

    def remove_unless_busy(path, **more):
        removed.append(Path(path).name)
        if not busy or not removed[-1].startswith(".removed"):
            remove(path, **more)

    monkeypatch.setattr(shutil, "rmtree", remove_unless_busy)
    transformers = pytest.importorskip("transformers")
    address = free_address()
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "config")
    with torch.device("meta"):
        like = {
            **transformers.LlamaForCausalLM(config).bfloat16().state_dict(),
            "odd": torch.zeros(3, dtype=torch.float32),
        }
    values = {**model.state_dict(), "odd": torch.randn(3)}
    with (
        WeightSender(values, address, timeout=40, bucket=256) as sender,
        DirectoryReceiver(
            address, tmp_path / "out", like, beside=tmp_path / "config", file_bytes=2000, timeout=40
        ) as receiver,
    ):
        for version in (1, 2, 3, 2, 4):
            busy = version != 4
            with torch.no_grad():
                model.lm_head.weight.fill_(version)
            sending = sender.send(version, async_op=True)
            assert receiver.receive() == version and sending.wait().failed == {}
            loaded = transformers.LlamaForCausalLM.from_pretrained(receiver.path(version), dtype=torch.bfloat16)
            assert all(torch.equal(one, values[name].bfloat16()) for name, one in loaded.state_dict().items())
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["version-2", "version-4"]
    assert removed and all(name.startswith(".") for name in removed)
