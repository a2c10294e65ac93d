"""Activations on the host: the same bits as without, within bounds of memory. On a CPU they go to files."""

import copy
import errno
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from shardkit.core import MixedPrecisionPolicy, fully_shard
from shardkit.core.beyond import activations, offload_activations
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal
from tests.tools.measured import Meter

WIDTH, HEADS, SEQUENCE, VOCABULARY = 16, 2, 8, 24


class Block(nn.Module):
    """Saves views of one storage, an expanded mask, what dropout drew, integers, and one tensor several times."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, sequence, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k * k, v, attn_mask=mask.expand(batch, HEADS, -1, -1))
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, sequence, width)), 0.2, self.training)
        order = x.detach().argsort(dim=-1)
        return x + self.down(F.gelu(self.up(x.gather(-1, order)[..., ::2].repeat_interleave(2, -1))))


class Model(nn.Module):
    """Blocks between a tied embedding and head. `reentrant`: whether blocks are recomputed, and how."""

    def __init__(self, reentrant: bool | None = None, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.randn(SEQUENCE, SEQUENCE))
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            mask = self.mask.to(x.dtype)
            if self.reentrant is None:
                x = block(x, mask)
            else:
                x = checkpoint(block, x, mask, use_reentrant=self.reentrant)
        return self.head(x)


def sharded(model: nn.Module, **options: Any) -> None:
    shard_each(*model.blocks, model, **options)


def compiled(model: nn.Module, **options: Any) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager", **options)


def tokens(number: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(number))


def one_by_one(model: nn.Module) -> list[Tensor]:
    losses = []
    for number in range(2):
        losses.append(model(tokens(number)).square().mean())
        losses[-1].backward()
    return losses


def pipelined(model: nn.Module) -> list[Tensor]:
    """Forwards before backwards, the last one without any; and one that is evaluated."""
    losses = [model(tokens(number)).square().mean() for number in range(4)]
    for loss in losses[:2]:
        loss.backward()
    with torch.no_grad():
        losses.append(model(tokens(4)).mean())
    losses[2].backward()
    return losses


def twice(model: nn.Module) -> list[Tensor]:
    """A backward that retains the graph, one of a part, and one of both."""
    middle: list[Tensor] = []
    handle = model.blocks[2].register_forward_hook(lambda block, args, output: middle.append(output))
    loss = model(tokens(0)).square().mean()
    handle.remove()
    (part,) = torch.autograd.grad(loss, middle, retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss, part]


def double_backward(model: nn.Module) -> list[Tensor]:
    """A penalty on gradients: backward through backward."""
    for block in model.blocks:
        block.forward = partial(_smooth, block)
    loss = model(tokens(0)).square().mean()
    gradients = torch.autograd.grad(loss, list(model.blocks.parameters()), create_graph=True, allow_unused=True)
    (loss + sum(one.square().sum() for one in gradients if one is not None)).backward()
    return [loss, *(one for one in gradients if one is not None)]


def _smooth(block: Block, x: Tensor, mask: Tensor) -> Tensor:
    return x + block.down(torch.tanh(block.up(block.norm(x))))


def recomputed(model: nn.Module) -> list[Tensor]:
    """The whole model in a checkpoint: its hooks have their say."""
    loss = checkpoint(model, tokens(0), use_reentrant=False).square().mean()
    loss.backward()
    return [loss]


Run = Callable[[nn.Module], list[Tensor]]


def results(place: Path | None, run: Run, prepare: list[Callable[..., Any]], **options: Any) -> list[Tensor]:
    """Losses and gradients. With `place`, activations go there."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(options.pop("reentrant", None))
    for one in prepare:
        one(model)
    offload = None
    if place is not None:
        offload = offload_activations(model, directory=place, **{"min_bytes": 0} | options)
    torch.manual_seed(1)
    found = [one.detach().clone() for one in run(model)]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None or run is double_backward, name
        if parameter.grad is not None:
            found.append(getattr(parameter.grad, "_local_tensor", parameter.grad).clone())
    if offload is not None:
        assert bool(offload.host_bytes) is (run is not recomputed)
        assert len(offload._pool.free) == offload._pool.count  # every page has come back
        assert not list(place.iterdir())
    return found


def odd_ones(name: str, block: nn.Module) -> bool:
    return name in ("blocks.1", "blocks.3")


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
IN_BF16, KEPT = partial(sharded, mp_policy=BF16), partial(sharded, reshard_after_forward=False)
WHOLE = partial(compiled, fullgraph=True)


@pytest.mark.parametrize(
    ("run", "prepare", "options"),
    [
        pytest.param(one_by_one, [], {}, id="plain"),
        pytest.param(one_by_one, [], {"keep": odd_ones, "min_bytes": 2000}, id="keep-named-and-large"),
        pytest.param(double_backward, [], {"keep": 0}, id="double-backward"),
        pytest.param(recomputed, [], {}, id="checkpoint-around"),
        pytest.param(one_by_one, [compiled], {}, id="compiled"),
        pytest.param(one_by_one, [KEPT], {"keep": 0}, id="sharded-until-backward"),
        pytest.param(one_by_one, [IN_BF16], {}, id="sharded-bf16"),
        pytest.param(pipelined, [sharded], {}, id="sharded-pipelined"),
        pytest.param(twice, [sharded], {"keep": 0}, id="sharded-twice"),
        pytest.param(one_by_one, [sharded], {"reentrant": False}, id="sharded-checkpointed"),
        pytest.param(one_by_one, [sharded], {"reentrant": True}, id="sharded-checkpointed-reentrant"),
        pytest.param(one_by_one, [WHOLE, sharded], {}, id="sharded-compiled"),
    ],
)
@on_ranks(2, timeout=240)
def test_the_same_bits(
    rank: int, world_size: int, tmp_path: Path, run: Run, prepare: list[Callable[..., Any]], options: dict[str, Any]
) -> None:
    place = tmp_path / str(rank)
    place.mkdir()
    assert_equal(*(results(where, run, prepare, **options) for where in (place, None)))


def sequence_cut() -> nn.Module:
    """A block whose activations are DTensors, cut on the sequence between its matrices."""
    return Composed(
        lambda block, x: x + block.down(F.gelu(block.up(block.norm(x)))),
        norm=nn.LayerNorm(WIDTH),
        up=nn.Linear(WIDTH, 4 * WIDTH),
        down=nn.Linear(4 * WIDTH, WIDTH),
    )


def tensor_parallel(place: Path | None, writes: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(sequence_cut() for _ in range(3)))
    mesh = rank_mesh((2,), ("tp",))
    cut = Shard(1)
    plan = {
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=cut, use_local_output=False),
        "down": RowwiseParallel(output_layouts=cut, use_local_output=False),
    }
    for block in model:
        parallelize_module(block, mesh, plan)
    if place is not None:
        offload = offload_activations(model, directory=place, min_bytes=0)
    x = DTensor.from_local(torch.randn(2, SEQUENCE // 2, WIDTH), mesh, [cut]).requires_grad_()
    middle: list[Tensor] = []
    model[0].down.register_forward_pre_hook(lambda module, args: middle.append(args[0]))
    loss = model(x).square().sum()
    if writes:
        with torch.no_grad():
            middle[0].mul_(2)
    loss.backward()
    if place is not None:
        assert offload.host_bytes
    return [loss.full_tensor().detach(), *(p.grad.to_local() for p in (x, *model.parameters()))]


@on_ranks(2)
def test_activations_that_are_dtensors(rank: int, world_size: int, tmp_path: Path) -> None:
    assert_equal(tensor_parallel(tmp_path), tensor_parallel(None))
    for place in (None, tmp_path):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            tensor_parallel(place, writes=True)


def exp(block: Any, x: Tensor) -> Tensor:
    """Saves its output; `writes` to it, or to a view of it, from within."""
    y = x.exp()
    if block.writes:
        y[1:].mul_(2)
    return y


def written(place: Path | None, when: str) -> Tensor:
    """Writes to a tensor that is saved: in the block that saved it, in the next one, or after forward."""
    model = nn.Sequential(*(Composed(exp, writes=False) for _ in range(3)))
    if place is not None:
        offload_activations(model, directory=place, min_bytes=0)
    outputs: list[Tensor] = []
    model[0].register_forward_hook(lambda block, args, output: outputs.append(output))
    model[0].writes = when == "within"
    if when == "next":
        model[1].register_forward_pre_hook(lambda block, args: args[0].mul_(1))
    x = torch.linspace(0, 0.1, 6).requires_grad_()
    loss = model(x).sum()
    if when == "after":
        with torch.no_grad():
            outputs[0].view(2, 3).zero_()
    loss.backward()
    if when == "done":
        with torch.no_grad():
            outputs[0].zero_()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("when", ["within", "next", "after"])
def test_a_write_after_saving_raises_as_without(when: str, tmp_path: Path) -> None:
    for place in (None, tmp_path):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1; expected version 0"):
            written(place, when)
    assert torch.equal(written(None, "done"), written(tmp_path, "done"))  # after backward it is fine


class OnDevice(Meter):
    """Counts what is not a page: the memory of a device, if this were one."""

    def keep(self, tensor: Any) -> None:
        if type(tensor) is not torch.Tensor or tensor.untyped_storage().nbytes() != activations.PAGE:
            super().keep(tensor)


def wide(blocks: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout()) for _ in range(blocks)))


def peak_of_step(blocks: int, place: Path | None, **options: Any) -> tuple[int, int]:
    """The most bytes on the device in a second step, and those on the host."""
    model = wide(blocks)
    offload = None if place is None else offload_activations(model, directory=place, min_bytes=2**14, **options)
    x = torch.randn(1024, 64)
    for last in (False, True):
        with OnDevice() if last else nullcontext() as meter:
            model(x).sum().backward()
    return meter.peak, offload.host_bytes if offload else 0


def test_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device: two blocks, and what stays with the last one, however many there are. On the host: the others."""
    monkeypatch.setattr(activations, "PAGE", 2**16)
    activation = 1024 * 64 * 4
    block = activation * 3  # inputs of the matrix and of the GELU, and what dropout drew
    peaks = {count: peak_of_step(count, tmp_path) for count in (6, 12)}
    without = {count: peak_of_step(count, None)[0] for count in (6, 12)}
    parameters = 64 * 65 * 4 * 2  # with gradients
    assert without[12] - without[6] >= 6 * block
    assert peaks[12][0] - peaks[6][0] <= 6 * (parameters + 1024)
    assert peaks[12][0] <= 3 * block + 4 * activation + 12 * (parameters + 1024)
    for count, (_, on_host) in peaks.items():
        assert (count - 1) * block <= on_host <= (count - 1) * block + activation + 2 * 2**16
    limited, on_host = peak_of_step(12, tmp_path, host_bytes=4 * block)
    assert 3 * block <= on_host <= 4 * block
    assert peaks[12][0] < limited < without[12]


def moved(model: nn.Module, place: Path, x: Tensor) -> int:
    """Bytes that a forward moves."""
    send = activations._Tier.send
    with mock.patch.object(activations._Tier, "send", autospec=True, side_effect=send) as sent:
        offload = offload_activations(model, directory=place, min_bytes=0, keep=0)
        model(x).sum().backward()
        offload.remove()
    return sum(span.nbytes for call in sent.call_args_list for _, span in call.args[1])


def held() -> nn.Module:
    """A block that saves views of its parameters and buffers, its input three times, and half of a wider tensor."""

    def run(block: Any, x: Tensor) -> Tensor:
        y = x @ block.weight[1].t() + (x * x).view(-1, 256) @ block.weight[2]
        return (y * block.scale + x.t().flip(0).t().expand_as(x)).unflatten(0, (-1, 2)).flatten(0, 1)

    block = Composed(run, weight=nn.Parameter(torch.randn(4, 256, 256)))
    block.register_buffer("scale", torch.randn(256))
    return block


@on_ranks(1, 2)
def test_parameters_stay_and_tensors_saved_twice_move_once(rank: int, world_size: int, tmp_path: Path) -> None:
    for shards in (False, True):
        model = nn.Sequential(held(), held())
        for block in model if shards else ():
            fully_shard(block)
        x = torch.randn(2, 256, requires_grad=True)
        # The input of each block, and its square: 512 numbers each. Weights would be 65,536.
        assert moved(model, tmp_path, x) == 2 * 2 * 2 * 256 * 4


def odd() -> nn.Module:
    """Has a parameter without memory yet, a sparse buffer, and a parameter that consists of two tensors."""
    two = nn.Parameter(TwoTensor(torch.eye(WIDTH), torch.eye(WIDTH)), requires_grad=False)
    run = lambda block, x: torch.sparse.mm(block.neighbours, torch.tanh(block.lazy(x))) @ block.two.a  # noqa: E731
    block = Composed(run, lazy=nn.LazyLinear(WIDTH), two=two)
    block.register_buffer("neighbours", torch.eye(SEQUENCE).to_sparse())
    return block


def test_tensors_that_are_not_plain(tmp_path: Path) -> None:
    found = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(odd() for _ in range(3)))
        offload = offload_activations(model, directory=tmp_path, min_bytes=0) if moves else None
        model(torch.ones(SEQUENCE, WIDTH)).sum().backward()
        found.append([one.grad for one in model.parameters() if one.requires_grad])
    assert offload is not None
    assert offload.host_bytes
    assert all(map(torch.equal, *found))


def test_what_ends_early_leaves_nothing_behind(tmp_path: Path) -> None:
    """An error, Ctrl-C, a model that is gone: no hooks of autograd stay, and pages go back."""
    model = wide(3)
    offload = offload_activations(model, directory=tmp_path, min_bytes=0)
    x = torch.randn(4, 64)
    for error in (ValueError, KeyboardInterrupt):
        handle = model[1].register_forward_pre_hook(mock.Mock(side_effect=error))
        with pytest.raises(error):
            model(x)
        handle.remove()
        model(x).sum().backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert len(offload._pool.free) == offload._pool.count
    pool = weakref.ref(offload._pool)
    del model, offload, handle
    assert pool() is None


def test_threads_run_forward_at_once(tmp_path: Path) -> None:
    model, expected = wide(3).eval(), []
    inputs = [torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    for x in inputs:
        expected.append(torch.autograd.grad(model(x).sum(), [*model.parameters()]))
    offload_activations(model, directory=tmp_path, min_bytes=0)
    meeting = threading.Barrier(2, timeout=60)

    def meet(*given: Any) -> None:
        meeting.wait()

    model[1].register_forward_pre_hook(meet)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        loss = model(x).sum()
        meeting.wait()
        return torch.autograd.grad(loss, [*model.parameters()])

    with ThreadPoolExecutor(2) as threads:
        for seen, plain in zip(threads.map(run, inputs), expected, strict=True):
            assert all(map(torch.equal, seen, plain))


def test_copies_have_pages_of_their_own(tmp_path: Path) -> None:
    model = wide(3)
    offload = offload_activations(model, directory=tmp_path, min_bytes=0)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 64)
    for one in (twin, model):
        torch.manual_seed(0)
        one(x).sum().backward()
        assert bool(offload.host_bytes) is (one is model)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    offload.remove()
    taken = offload.host_bytes
    [model(x) for _ in range(9)]
    assert offload.host_bytes == taken


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, full = wide(2), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    offload_activations(model, directory=tmp_path, min_bytes=0)
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=full))
    with pytest.raises(RuntimeError, match=f"{tmp_path}.*No space left on device; pass a smaller host_bytes"):
        model(torch.randn(4, 64))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (nn.Linear(1, 1), {}, "no blocks in Linear.*pass the module that holds"),
        (wide(1), {"keep": -1}, "keep is -1; pass the number"),
        (wide(1), {"keep": True}, "keep is True; pass the number"),
        (wide(1), {"min_bytes": 1.5}, "min_bytes is 1.5; pass a number of bytes"),
        (wide(1), {"host_bytes": -4}, "host_bytes is -4; pass a number of bytes"),
        (wide(1), {"directory": "/nowhere/at/all"}, "'/nowhere/at/all' is not there; make it"),
    ],
)
def test_bad_arguments(made: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offload_activations(made, **options)


def test_what_moves_nothing_says_so_once(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model, whole = wide(2), Model()
    offload_activations(model, min_bytes=0)
    offload_activations(whole, min_bytes=0, directory=tmp_path)
    for one in (Model(), whole):  # the second one runs the graph of the first, which knows no hooks
        one.compile(backend="aot_eager")
        one(tokens(0))
    for _ in range(2):
        model(torch.randn(4, 64)).sum().backward()
        whole(tokens(0)).sum().backward()
    messages = [str(one.message).partition(";")[0] for one in recwarn if "offload_activations" in str(one.message)]
    assert [message.partition(": ")[2].split(",")[0] for message in messages] == [
        "no block has ended within forward",
        "the activations are in the memory of a CPU",
    ]
