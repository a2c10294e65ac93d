"""The same numbers as stock's, no wait of the host, no race, and nothing that a checker of memory finds."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardkit.core as ours
from shardkit.core.beyond import offload_activations, overlap_step
from tests.gpu.training import ENGINES, NETWORKS, inputs, layers, synchronize, trainer
from tests.gpu.worlds import ON_CPU, Mirror, Place, Skip, needs_gpu
from tests.support import meshes
from tests.support.lacking import lacking
from tests.support.parity import Case, compare_training
from tests.support.pools import lies_in_pool

_CYCLES = 2_000_000  # of the device's clock: a millisecond


def collectives(place: Place) -> None:
    """All-reduce, and gathers and reduce-scatters of several tensors in one launch, against their known results."""
    world, rank = place.world, place.rank
    # gloo has no launch of several.
    together = contextlib.nullcontext if ON_CPU else partial(dist._coalescing_manager, device=place.device)
    for dtype in (torch.float32, torch.bfloat16):
        total = torch.full((1000,), float(rank + 1), dtype=dtype, device=place.device)
        dist.all_reduce(total)
        assert total.eq(world * (world + 1) / 2).all(), "all-reduce"
        flats = [torch.zeros(world * size, dtype=dtype, device=place.device) for size in (7, 4096, 333)]
        own = [flat.view(world, -1)[rank].fill_(rank + 1) for flat in flats]
        with together():
            for flat, chunk in zip(flats, own, strict=True):
                dist.all_gather_into_tensor(flat, chunk)
        for flat in flats:
            assert all(row.eq(other + 1).all() for other, row in enumerate(flat.view(world, -1))), "all-gather"
        rows, op = [chunk.clone() for chunk in own], dist.ReduceOp.SUM if ON_CPU else dist.ReduceOp.AVG
        with together():
            for row, flat in zip(rows, flats, strict=True):
                dist.reduce_scatter_tensor(row, flat, op=op)
        expected = (rank + 1) * (world if ON_CPU else 1)
        assert all(row.eq(expected).all() for row in rows), "reduce-scatter"


def parity(place: Place, model: str, features: list[str], optimizer: str) -> None:
    """Bit for bit on two ranks, whose sums have one order; beyond, where NCCL chooses it, within its rounding."""
    meshes.DEVICE = place.device.type
    exact = place.world <= 2 or isinstance(dist.group.WORLD, Mirror)
    case = Case(model, tuple(features), optimizer, oracle_sums="rank order" if exact else "gloo")
    compare_training(place.rank, place.world, case)


def poisoned(place: Place, *case: Any) -> None:
    """`parity` where memory that was not written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    parity(place, *case)


def small_training(place: Place, engine: str) -> None:
    """Two steps in each precision, for checkers of memory to watch."""
    for bf16 in (False, True):
        made = trainer(engine, NETWORKS["tiny"], place, bf16=bf16)
        for _ in range(2):
            made.step()
    synchronize()


def never_waits(place: Place) -> dict[str, str]:
    """A step with clipping and fused AdamW, while each wait of the host is an error; stock's is reported."""
    set_mode = (lambda mode: None) if ON_CPU else torch.cuda.set_sync_debug_mode
    said = {}
    for engine, clip in (("stock", torch.nn.utils.clip_grad_norm_), ("ours", ours.clip_grad_norm_)):
        made = trainer(engine, NETWORKS["uniform"], place, bf16=True)
        try:
            for number in range(4):
                synchronize()
                set_mode("error" if number > 1 else "default")
                made.forward_backward()
                clip(made.network.parameters(), 1.0)
                made.optimizer.step()
                made.optimizer.zero_grad()
            said[engine] = "no wait"
        except RuntimeError as error:
            if engine == "ours":
                raise
            said[engine] = str(error)[:200]
        finally:
            set_mode("default")
    return {**said, "text": f"stock: {said['stock']}"}


def reused_input(place: Place) -> dict[str, str]:
    """One pinned buffer for all batches, written again while the device is still far behind."""
    said = {}
    for engine in ("stock", "ours"):
        model = layers(ENGINES[engine], place.mesh())
        batches = [inputs(model, place.rank, step, torch.device("cpu")) for step in range(4)]
        buffer = batches[0].clone() if ON_CPU else batches[0].clone().pin_memory()
        seen, expected = [], []
        with torch.no_grad():
            for batch in batches:
                expected.append(model(batch.to(place.device)).sum())
            for batch in batches:
                synchronize()
                buffer.copy_(batch)
                if not ON_CPU:
                    torch.cuda._sleep(20 * _CYCLES)
                seen.append(model(buffer).sum())
                buffer.fill_(float("nan"))
        said[engine] = "right" if torch.equal(torch.stack(seen), torch.stack(expected)) else "wrong"
    text = f"stock is {said['stock']}"
    wrong = {"wrong": f"the model saw values that were written later; {text}"} if said["ours"] == "wrong" else {}
    return {**said, "text": text, **wrong}


def failed_launch(place: Place) -> None:
    """A collective that cannot be launched is an error at once, while those before it wait; then training goes on."""
    model = layers(ours, place.mesh(), count=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _stepped(model, optimizer, place, 0)
    x = inputs(model, place.rank, 1, place.device)
    synchronize()
    if not ON_CPU:
        torch.cuda._sleep(2000 * _CYCLES)
        slept = torch.cuda.Event()
        slept.record()
    Mirror.launches, said = 1, "no error"
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        said = str(error)
    finally:
        Mirror.launches = None
    assert "as the check wants it" in said, said
    assert ON_CPU or not slept.query(), "the host waited for the device before the error"
    model.reset_iter_state()
    optimizer.zero_grad()
    assert _stepped(model, optimizer, place, 1).isfinite()


def compiled(place: Place) -> None:
    """Blocks that are compiled train as those that are not."""
    losses = []
    for compiles in (False, True):
        model = layers(ours, place.mesh(), count=4)
        for layer in model if compiles else ():
            layer.compile(backend="eager" if ON_CPU else "inductor")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([_stepped(model, optimizer, place, step) for step in range(4)])
    torch.testing.assert_close(torch.stack(losses[1]), torch.stack(losses[0]), rtol=1e-4, atol=1e-5)


def _stepped(model: Any, optimizer: torch.optim.Optimizer, place: Place, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(inputs(model, place.rank, step, place.device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _locals(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.to_local().clone() for parameter in model.parameters()]


def races(place: Place, name: str) -> None:
    """Training while one kind of stream is late has the same bits as training without.

    "overlapped", with shards on the host or on the device, and "activations" are compared with training without.
    """
    options: dict[str, Any] = {"mesh": place.mesh()}
    if name == "bf16":
        options["mp_policy"] = ours.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if name == "kept":
        options["reshard_after_forward"] = False
    if name == "HSDP":
        options["mesh"] = place.mesh(place.world, 1, names=("replicate", "shard"))
    if name in ("offload", "overlapped"):
        options["offload_policy"] = ours.CPUOffloadPolicy(pin_memory=not ON_CPU)

    def trained(plain: bool = False, **delays: int) -> list[torch.Tensor]:
        model = layers(ours, count=6, **options)
        for layer in model:
            layer.up.register_forward_pre_hook(lambda *_: _late())
            layer.up.register_forward_hook(
                lambda module, given, output: output.register_hook(lambda _: _late()) and None
            )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        offload = None
        if name.startswith("overlapped") and not plain:
            overlap_step(optimizer, when="backward" if name.endswith("backward") else "auto")
        if name == "activations" and not plain:
            offload = offload_activations(model, min_bytes=1, directory=place.directory if ON_CPU else None)
        Mirror.delays = delays
        try:
            for step in range(4):
                _stepped(model, optimizer, place, step)
        finally:
            Mirror.delays = {}
        synchronize()
        assert offload is None or offload.host_bytes, "nothing was moved"
        return _locals(model)

    expected = trained(plain=True)
    for kind in ("none", "compute", "gather", "reduce"):
        same = [torch.equal(seen, own) for seen, own in zip(trained(**{kind: _CYCLES}), expected, strict=True)]
        assert all(same), f"{same.count(False)} of {len(same)} parameters differ; late stream: {kind}"
        needs_gpu()


def _late() -> None:
    if Mirror.delays.get("compute"):
        torch.cuda._sleep(Mirror.delays["compute"])


def side_streams(place: Place) -> None:
    """Forward on one stream after an unshard on another gives the same gradients as both on one stream."""
    plain, sided = layers(ours, place.mesh()), layers(ours, place.mesh())
    streams: list[Any] = [None, None] if ON_CPU else [torch.cuda.Stream() for _ in range(2)]
    for step in range(5):
        x = inputs(plain, place.rank, step, place.device)
        plain(x).square().mean().backward()
        for stream in filter(None, streams):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            handle = sided.unshard(async_op=True)
        with torch.cuda.stream(streams[1]):
            handle.wait()
            loss = sided(x).square().mean()
        if streams[1] is not None:
            torch.cuda.current_stream().wait_stream(streams[1])
        loss.backward()
        for (name, seen), expected in zip(sided.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(seen.grad.to_local(), expected.grad.to_local()), f"step {step}: gradient of {name}"
        for model in (plain, sided):
            model.zero_grad()


def placed(place: Place) -> None:
    """`Owned` and `Blocks` train as `Shard(0)` does, under an optimizer that does not tell them apart."""
    placements: dict[str, Callable[[nn.Parameter], Any] | None] = {
        "Shard(0)": None,
        "Owned": lambda parameter: ours.Owned() if parameter.ndim == 2 else None,
        "Blocks": lambda parameter: ours.Blocks(elements=32) if parameter.ndim == 2 else None,
    }
    values = {}
    for name, placement in placements.items():
        try:
            model = layers(ours, place.mesh(), count=4, shard_placement_fn=placement)
        except Exception as error:
            if why := lacking(error):
                raise Skip(f"{name}: {why}") from error
            raise
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            _stepped(model, optimizer, place, step)
        values[name] = [parameter.full_tensor() for parameter in model.parameters()]
    for name, seen in values.items():
        for own, expected in zip(seen, values["Shard(0)"], strict=True):
            torch.testing.assert_close(
                own, expected, rtol=1e-5, atol=1e-6, msg=lambda told, name=name: f"{name}: {told}"
            )


def registered(place: Place) -> None:
    """Memory of the process group: the same training, with unsharded parameters in NCCL's pool."""
    needs_gpu()

    def trained(enable: bool) -> tuple[Any, list[torch.Tensor]]:
        model = layers(ours, place.mesh())
        for module in (model, *model) if enable else ():
            module.set_allocate_memory_from_process_group_for_comm(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            _stepped(model, optimizer, place, step)
        return model, _locals(model)

    _, expected = trained(False)
    model, seen = trained(True)
    assert all(map(torch.equal, seen, expected)), "the bits differ"
    model[0].unshard()
    assert lies_in_pool(model[0], model[0].up.weight), "an unsharded parameter does not lie in the pool"
    assert not lies_in_pool(model[0], expected[0])
