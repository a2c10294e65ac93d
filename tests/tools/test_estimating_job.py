"""Jobs: the part that a rank holds and its dtypes, by the axes of a mesh and owners; communication; refusals."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from shardkit.core import fully_shard
from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES
from shardkit.tools import EstimateError, Policies, TrainingJob, estimate, estimate_job, preset
from shardkit.tools.command import main
from shardkit.tools.estimating.hf import cut_projections
from shardkit.tools.estimating.job import Precision, muon, muon_placements
from shardkit.tools.estimating.trace import Awaited, Ran, Transfer
from shardkit.tools.machine import MachineError
from tests.support.models import Composed
from tests.tools.llama_shaped import LlamaShaped, few_tokens

JOB = TrainingJob(partial(LlamaShaped, 32, 64, 160, 4, 4, 2), few_tokens, tensor_parallel=cut_projections)


def _facts(mesh: dict[str, int]) -> tuple[object, ...]:
    found = estimate_job(JOB, mesh)
    return found.idle_bytes, found.peak, found.traffic, found.timeline.step, found.checkpoint


@pytest.mark.parametrize(
    ("mesh", "ranks", "shards"),
    [
        ({"dp_shard": 8, "dp_replicate": 2}, 16, 8),
        ({"dp_replicate": 2, "dp": 8}, 16, 8),
        ({"dp_replicate": 4}, 4, 1),
        ({"dp_shard": 4, "cp": 2}, 8, 8),
        ({"cp": 4}, 4, 4),
        ({"cp": 2, "dp_shard": 2, "dp_replicate": 2}, 8, 4),
        ({"tp": 2, "dp_replicate": 2, "dp_shard": 2}, 8, 4),
    ],
)
def test_a_rank_holds_the_part_that_the_names_say(mesh: dict[str, int], ranks: int, shards: int):
    found = estimate_job(JOB, mesh)
    assert found.axes == mesh and found.world_size == ranks
    # Of weights and optimizer state. Norms are not cut over tp, and rounding gives rank 0 the larger rows.
    assert found.checkpoint.own / found.checkpoint.whole == pytest.approx(1 / shards, rel=0.03)
    assert any(note.startswith("cp: ") for note in found.notes) == ("cp" in mesh)


def test_ranks_along_cp_hold_shards_and_the_order_of_axes_says_nothing():
    assert _facts({"cp": 2, "dp_shard": 4}) == _facts({"dp": 8})
    assert _facts({"dp_shard": 2, "tp": 2, "dp_replicate": 2}) == _facts({"dp_replicate": 2, "dp_shard": 2, "tp": 2})


RANKS = 4


def model() -> LlamaShaped:
    return LlamaShaped(128, 32, 80, 3, 4, 2)


OWNED = TrainingJob(
    model,
    lambda: torch.randint(128, (2, 16)),
    optimizer=muon,
    policies=Policies(placements=muon_placements, checkpoint=True),
)


def test_each_rank_holds_what_it_owns():
    held = [
        estimate_job(OWNED, RANKS, "h100", rank=rank).peak.by_category["sharded_parameters"] for rank in range(RANKS)
    ]
    made = model()
    plan = muon_placements(made).plan
    sizes = dict.fromkeys(range(RANKS), 0)
    for name, rank in zip(plan.names, plan.owners(RANKS), strict=True):
        sizes[rank] += made.get_parameter(name).nbytes
    assert [nbytes - held[0] for nbytes in held] == [sizes[rank] - sizes[0] for rank in range(RANKS)]


def test_a_plan_keeps_the_placements(tmp_path, capsys):
    code = tmp_path / "shard.py"
    arguments = ["tests.tools.test_estimating_job:OWNED", "--world-size", "2", "--most-micro-batch", "2"]
    assert main(["plan", *arguments, "--count", "1", "--write", str(code)]) == 0
    text = code.read_text()
    assert "placements = placements_for(model, torch.optim.Muon)" in text
    assert text.count("shard_placement_fn=placements") == 2
    compile(text, str(code), "exec")


def test_muon_needs_placements(capsys):
    name = "tests.tools.test_estimating_job:"
    arguments = [f"{name}model", "--vocabulary", "128", "--sequence", "16", "--world-size", "4", "--optimizer", "muon"]
    assert main(["estimate", *arguments]) == 2
    assert "add --placements auto" in capsys.readouterr().err
    assert main(["estimate", *arguments[:-1], "tests.tools.jobs:sgd", "--placements", "auto"]) == 2
    assert "--placements auto knows what suits" in capsys.readouterr().err


ELEMENTS = 64 * 64 * 4


def job(precision: Precision) -> TrainingJob:
    return TrainingJob(
        lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))),
        lambda: torch.rand(2, 64, dtype=precision.parameters or torch.float32),
        policies=Policies(param_dtype=torch.bfloat16),
        precision=precision,
    )


def state(precision: Precision) -> tuple[int, int, dict[str, str]]:
    """Bytes of weights and of optimizer state of all ranks, without Adam's step counts; the dtypes."""
    found = estimate_job(job(precision), 2, "h100")
    counts = 4 * 4  # one number in float32 for each parameter
    return found.recording.sizes.whole_weights, found.recording.sizes.whole_optimizer - counts, found.dtypes


def test_the_state_of_the_optimizer_follows_what_the_script_does():
    weights, moments, dtypes = state(Precision())
    assert (weights, moments) == (4 * ELEMENTS, 2 * 4 * ELEMENTS)
    assert dtypes == {
        "parameters": "float32",
        "optimizer state": "float32",
        "computation": "bfloat16",
        # `reduce_dtype=None` has meant the parameters' `grad_dtype` since torch 2.15.
        "reduction": "float32" if GRAD_DTYPE_DECIDES else "bfloat16",
    }
    half = Precision(parameters=torch.bfloat16)
    assert state(half)[:2] == (2 * ELEMENTS, 2 * 2 * ELEMENTS)
    master = Precision(parameters=torch.bfloat16, master_weights=True)
    assert state(master)[:2] == (2 * ELEMENTS, (2 * 4 + 4) * ELEMENTS)
    small = Precision(optimizer=torch.bfloat16)
    weights, moments, dtypes = state(small)
    assert (weights, moments, dtypes["optimizer state"]) == (4 * ELEMENTS, 2 * 2 * ELEMENTS, "bfloat16")


def in_float8(enabled: bool) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    if enabled:
        float8 = pytest.importorskip("torchao.float8")
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        float8.convert_to_float8_training(model, config=config)
    return model


def test_float8_gathers_a_byte_for_each_element_and_has_a_rate_of_its_own():
    """Torchao's training in float8, in a factory, as a script would apply it."""
    found = {}
    for enabled in (False, True):
        job = TrainingJob(partial(in_float8, enabled), lambda: torch.rand(2**16, 1024, dtype=torch.bfloat16))
        wrapped = Policies(wrap=("Linear", "Float8Linear")[enabled:][:1], param_dtype=torch.bfloat16)
        found[enabled] = estimate_job(replace(job, policies=wrapped), 8, "h100")
    plain, cast = ({row.bytes for row in one.traffic if row.collective == "all-gather"} for one in found.values())
    assert max(plain) == 2 * 1024**2 and max(cast) == 1024**2
    for enabled, one in found.items():
        ran = [step.operator for step in one.recording.trace.steps if isinstance(step, Ran)]
        assert {each.dtype.itemsize for each in ran if each.flops} == {1 if enabled else 2}
    with pytest.raises(MachineError, match="FLOP/s in float8_e4m3fn"):
        estimate_job(replace(job, policies=wrapped), 8, "a100")


def routed() -> nn.Module:
    return Composed(lambda m, x: m.expert(x[x.sum(-1) > 0]), expert=nn.Linear(4, 4))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def four() -> Tensor:
    return torch.ones(3, 4)


def broken() -> nn.Module:
    raise FileNotFoundError("weights.bin")


def leaves() -> nn.Module:
    raise SystemExit(0)


def sharded(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(linear(), mesh=mesh)


def reads_loss(model, optimizer, batch) -> None:
    loss = model(batch).sum()
    loss.backward()
    assert loss.item() == 1
    optimizer.step()


WRONG = partial(torch.ones, 3, 5)
BF16, BLOCKS = Policies(param_dtype=torch.bfloat16), Policies(wrap=("Block",))


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        (broken, four, {}, r"building the model raised FileNotFoundError in line \d+ of .*: weights\.bin"),
        (leaves, four, {}, "building the model raised SystemExit"),
        (routed, four, {"mesh": 2}, r"(?s)called in forward of ''.*shape depends on data"),
        (linear, WRONG, {"mesh": 2}, "an iteration raised "),
        (sharded, four, {"mesh": 2, "policies": BF16}, "the model comes sharded"),
        *((linear, four, {"mesh": mesh}, "cannot be simulated") for mesh in (0, 16_385, {"dp": 0}, {})),
        (linear, four, {"mesh": {"pp": 2, "dp_shard": 4}}, "the axis 'pp' of the mesh is not known; expected dp_repl"),
        (linear, four, {"mesh": {"dp_shard": 4, "ep": 2}}, "the axis 'ep' of the mesh is not known"),
        (linear, four, {"mesh": {"replica": 2, "shard": 4}}, "the axis 'replica' of the mesh is not known"),
        (linear, four, {"mesh": {"dp": 2, "dp_shard": 4}}, "'dp' and 'dp_shard' mean the same"),
        (linear, four, {"mesh": {"dp_shard": 4, "tp": 2}}, "the axis 'tp' needs a plan"),
        (linear, four, {"mesh": 2, "rank": 2}, "no rank 2 among 2 ranks"),
        (linear, four, {"mesh": 2, "policies": BLOCKS}, "no module has the FQN or class name 'Block'"),
    ],
)
def test_what_cannot_be_estimated_is_told(model: Any, inputs: Any, options: dict[str, Any], message: str):
    with pytest.raises(EstimateError, match=message):
        estimate(model, inputs, **options)


def test_a_value_that_is_read_is_made_up_and_noted():
    found = estimate(linear, four, mesh=2, step=reads_loss)
    assert any("was read in between" in note for note in found.notes)


def test_a_factory_that_shards_the_model_names_axes_freely():
    assert estimate(sharded, four, mesh={"replicas": 2, "shards": 2}).axes == {"replicas": 2, "shards": 2}
    assert estimate(sharded, four, mesh=2).parameters == 40


def test_an_estimate_that_failed_leaves_the_process_clean():
    with pytest.raises(EstimateError):
        estimate(linear, WRONG, mesh=2)
    assert not torch.distributed.is_initialized()
    assert type(torch.ones(1)) is torch.Tensor
    assert estimate(linear, four, mesh=2).peak.bytes > 0


FOUR = [6, 6, 6, 6]
# Kind, function, the sizes of its tensors or lists of them, and what else it takes. Those of `functional` get the group
# last, and return what is waited for. Each is about 24 numbers of four bytes, or two tensors of 8 and 16.
COLLECTIVES: list[tuple[str, Callable[..., Any], tuple[int | list[int], ...], tuple[Any, ...]]] = [
    ("all-gather", functional.all_gather_into_tensor_coalesced, ([2, 4],), ()),
    ("reduce-scatter", functional.reduce_scatter_tensor_coalesced, ([8, 16],), ("avg", [0, 0])),
    ("all-reduce", functional.all_reduce_coalesced, ([8, 16],), ("sum",)),
    ("all-reduce", functional.all_reduce_coalesced, ([8, 16],), ("bor",)),
    ("all-gather", functional.all_gather_tensor, (6,), (0,)),
    ("reduce-scatter", functional.reduce_scatter_tensor, (24,), ("sum", 0)),
    ("all-to-all", functional.all_to_all_single, (24,), (None, None)),
    ("all-reduce", dist.all_reduce, (24,), ()),
    ("all-gather", dist.all_gather_into_tensor, (24, 6), ()),
    ("all-gather", dist.all_gather, (FOUR, 6), ()),
    ("reduce-scatter", dist.reduce_scatter_tensor, (6, 24), ()),
    ("reduce-scatter", dist.reduce_scatter, (6, FOUR), ()),
    ("all-to-all", dist.all_to_all_single, (24, 24), ()),
    ("all-to-all", dist.all_to_all, (FOUR, FOUR), ()),
    ("broadcast", dist.broadcast, (24,), (0,)),
]


@pytest.mark.parametrize(
    ("kind", "function", "sizes", "more"), COLLECTIVES, ids=[one[1].__name__ for one in COLLECTIVES]
)
def test_collectives(kind: str, function: Callable[..., Any], sizes: tuple[Any, ...], more: tuple[Any, ...]) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        dtype = torch.int32 if "bor" in more else torch.float32
        tensors = pytree.tree_map(partial(torch.ones, dtype=dtype), sizes)
        if function.__module__ != functional.__name__:
            function(*tensors, *more)
            return
        found = function(*tensors, *more, dist.group.WORLD)
        for one in reversed(found if isinstance(found, list) else [found]):
            assert functional.wait_tensor(one).numel()

    job = TrainingJob(partial(nn.Linear, 4, 4), partial(torch.ones, 1, 4), step=step)
    steps = estimate_job(job, RANKS).recording.trace.steps
    transfer, awaited = (one for one in steps if isinstance(one, Transfer | Awaited))
    assert (transfer.collective, transfer.bytes) == (kind, 96)
    assert transfer.wire_bytes == (2 if kind == "all-reduce" else 1) * 96 * (RANKS - 1) // RANKS
    assert awaited.about == transfer.about


@pytest.mark.parametrize(
    ("version", "settings", "packs"),
    [("2.13.0", {}, False), ("2.15.0", {}, True), ("2.15.0", {"TORCH_DIST_USE_NCCL2": "0"}, False)],
)
def test_nccl_of_torch_2_15_gets_packed_buffers(
    version: str, settings: dict[str, str], packs: bool, monkeypatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    job = TrainingJob(lambda: nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), partial(torch.ones, 1, 256))
    buffers = estimate_job(job, RANKS, preset("a100")).peak.by_category["communication"]
    assert (buffers >= 256 * 256 * 4) == packs
