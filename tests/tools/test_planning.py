"""Plans: the proposals under a limit, and their code on real ranks."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES
from shardkit.tools import EstimateError, Policies, TrainingJob, estimate_job
from shardkit.tools.estimating.hf import cut_projections
from shardkit.tools.estimating.job import micro_batch_of, with_micro_batch
from shardkit.tools.machine import Efficiency, Link, Machine, preset
from shardkit.tools.planning import search
from shardkit.tools.planning.code import code_of
from shardkit.tools.planning.configurations import accelerate_of, torchtitan_of
from shardkit.tools.planning.search import NothingFits, Proposal, propose
from shardkit.tools.quantities import parse_quantity
from tests.support import run_ranks
from tests.support.models import Composed
from tests.tools.jobs import tokens as token_ids
from tests.tools.jobs import two_dimensions
from tests.tools.llama_shaped import LlamaShaped, few_tokens
from tests.tools.measured import Meter, shared_memory


def narrow() -> nn.Module:
    """Two blocks, and an embedding that holds a large part of the parameters."""

    def run(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        x = model.embedding(tokens)
        for block in model.blocks:
            x = x + block(x)
        return model.head(x)

    blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2))
    return Composed(run, embedding=nn.Embedding(200, 32), head=nn.Linear(32, 200), blocks=nn.ModuleList(blocks))


JOB = TrainingJob(narrow, partial(torch.randint, 200, (2, 32)))
RECOMPUTED = replace(JOB, policies=Policies(checkpoint=True))  # a third of the ways
MACHINE = preset("h100").replace(
    device="cpu", transport="gloo", flops={"float32": 1e10}, memory_bandwidth=1e10, memory=2**33, ranks_per_host=2,
    inside=Link(1e9, 1e-4), between=None, efficiency=Efficiency(1.0, 1.0, 1.0), process_bytes=0,
)  # fmt: skip


def proposals(job: TrainingJob, most: int = 2, machine: Machine = MACHINE, **options: Any) -> list[Proposal]:
    """Of two ranks; all of them, with as much memory as the machine has."""
    return propose(job, 2, machine, machine.memory, most_micro_batch=most, count=100, **options)


@pytest.fixture(scope="module")
def ample() -> list[Proposal]:
    return proposals(JOB)


def test_with_memory_to_spare_speed_decides(ample: list[Proposal]):
    seconds = [proposal.sample_seconds for proposal in ample]
    assert seconds == sorted(seconds)
    best = ample[0].candidate
    assert not best.policies.checkpoint
    assert {proposal.candidate.micro_batch for proposal in ample} == {micro_batch_of(JOB)} == {2}
    assert any("of the limit" in reason for reason in ample[0].reasons)


def test_a_limit_forces_a_choice(ample: list[Proposal]):
    least = min(proposal.estimate.reserved_bytes for proposal in ample)
    limit = (least + ample[0].estimate.reserved_bytes) // 2
    found = propose(JOB, 2, MACHINE, limit, most_micro_batch=2)
    assert found and all(proposal.estimate.reserved_bytes <= limit for proposal in found)
    assert found[0].candidate != ample[0].candidate
    measured = run_ranks(2, follow, code_of(found[0]), found[0].candidate.micro_batch)
    assert max(measured) <= limit
    assert measured[0] == pytest.approx(found[0].estimate.peak.bytes, rel=0.01)


def test_the_margin_stays_free(ample: list[Proposal]):
    limit = max(one.estimate.reserved_bytes for one in ample)  # the largest fits exactly
    found = proposals(JOB, machine=MACHINE.replace(memory=limit), margin=0.1)
    assert max(one.estimate.reserved_bytes for one in found) <= 0.9 * limit


def test_micro_batches_grow_to_the_largest_and_samples_are_what_is_compared():
    found = proposals(RECOMPUTED, 4, micro_batch=1)
    assert {proposal.candidate.micro_batch for proposal in found} == {1, 2, 4}
    for proposal in found:
        samples = 2 * proposal.candidate.micro_batch
        assert proposal.sample_seconds == pytest.approx(proposal.estimate.timeline.step / samples)
    ranks = [(float(f"{one.sample_seconds:.4g}"), one.estimate.reserved_bytes) for one in found]
    assert ranks == sorted(ranks)  # of equal times the one that takes least memory comes first
    assert found[0].candidate.micro_batch == 4


def follow(rank: int, world_size: int, code: str, micro_batch: int, name: str = "JOB") -> int:
    """Pastes the code of a plan, trains with it, and measures the peak of tensor bytes in a later step."""
    plain: TrainingJob = globals()[name]
    pasted: dict[str, Any] = {}
    exec(compile(code, "pasted", "exec"), pasted)
    with shared_memory(False), Meter() as meter:
        model = pasted["shard"](plain.model())
        optimizer = torch.optim.AdamW(model.parameters())
        job = with_micro_batch(plain, micro_batch)
        for _ in range(3):
            meter.peak = 0
            batch = job.inputs()
            job.run(model, optimizer, [batch])
            del batch
    return meter.peak


def test_selective_recomputation_lies_between_and_its_code_can_be_followed(ample: list[Proposal]):
    reserved: dict[Any, int] = {}
    for one in ample:
        if one.candidate.micro_batch == 2 and one.candidate.policies.prefetch_depth == 1:
            reserved.setdefault(one.candidate.policies.checkpoint, one.nbytes)
    assert reserved[True] < reserved["selective"] < reserved[False]
    selective = next(one for one in ample if one.candidate.policies.checkpoint == "selective")
    assert "recompute selectively" in selective.candidate.describe()
    measured = run_ranks(2, follow, code_of(selective), selective.candidate.micro_batch)
    assert measured[0] == pytest.approx(selective.estimate.peak.bytes, rel=0.01)


def test_a_global_batch_is_made_of_micro_batches():
    found = proposals(RECOMPUTED, 4, micro_batch=1, global_batch=16)
    assert {(one.candidate.micro_batch, one.accumulate) for one in found} == {(1, 8), (2, 4), (4, 2)}
    for one in found:
        line = one.estimate.timeline
        assert one.step_seconds == pytest.approx(one.accumulate * (line.step - line.optimizer) + line.optimizer)
        assert one.sample_seconds == pytest.approx(one.step_seconds / 16)
        assert one.nbytes - one.estimate.reserved_bytes == one.estimate.recording.sizes.own_weights > 0
        assert one.rate == pytest.approx(8 * 32 / one.step_seconds)
    assert f"{found[0].accumulate} for each step" in code_of(found[0])
    assert any("micro-batches for each step of the optimizer" in reason for reason in found[0].reasons)
    alone = [one for one in proposals(RECOMPUTED, 4, micro_batch=1, global_batch=8) if one.accumulate == 1]
    assert alone and all(one.nbytes == one.estimate.reserved_bytes for one in alone)
    with pytest.raises(EstimateError, match="a global batch of 3 cannot be made of micro-batches of 2 in all"):
        proposals(RECOMPUTED, 4, micro_batch=1, global_batch=3)


def test_a_device_that_is_too_small_gets_memory_of_the_host_and_then_files():
    h100 = preset("h100").replace(process_bytes=0, ranks_per_host=2)
    deep = TrainingJob(partial(LlamaShaped, 32, 1024, 2560, 4, 4, 2), few_tokens, policies=Policies(checkpoint=True))
    limit = estimate_job(deep, 2, h100).reserved_bytes // 2
    best, *_ = propose(deep, 2, h100, limit, most_micro_batch=2)
    assert best.candidate.policies.overlap_step and best.candidate.policies.resident is None
    assert "shards on the host, overlapped step" in best.candidate.describe()
    assert "    overlap_step(optimizer)\n" in code_of(best)
    short = h100.replace(host_memory=int(1.5 * best.estimate.host_bytes))
    filed, *_ = propose(deep, 2, short, limit, most_micro_batch=2)
    code = code_of(filed)
    assert f"states=FileTier(directory, {filed.candidate.policies.resident})" in code
    exec(compile(code, "pasted", "exec"), {})
    stepped = replace(deep, policies=best.candidate.policies)
    with pytest.raises(NothingFits, match=r"on the device .*2 ranks need .* of host memory\. Use more hosts"):
        propose(stepped, 2, short.replace(host_memory=1000), limit, most_micro_batch=2)


def test_proposals_differ_by_more_than_the_error(ample: list[Proposal]):
    apart = proposals(JOB, error=0.05)
    assert apart[0].candidate == ample[0].candidate and len(apart) < len(ample)
    for number, one in enumerate(apart):
        for other in apart[:number]:
            slower, smaller = one.sample_seconds > 1.05 * other.sample_seconds, one.nbytes < 0.95 * other.nbytes
            assert slower or smaller


def test_model_flops_do_not_count_what_is_recomputed(ample: list[Proposal]):
    """MFU: three times the products of forward, over the peak."""
    for one in ample:
        rows = one.candidate.micro_batch * 32
        products = 2 * rows * (2 * 2 * 32 * 128 + 32 * 200)
        assert one.mfu == pytest.approx(3 * products / 1e10 / one.step_seconds)


def test_configurations_of_trainers_say_what_they_leave_out(ample: list[Proposal]):
    selective = next(one for one in ample if one.candidate.policies.checkpoint == "selective")
    text = accelerate_of(selective)
    assert "  fsdp_transformer_layer_cls_to_wrap: Sequential" in text and "\nnum_processes: 2\n" in text
    assert "# The estimate also has selective recomputation" in text
    text = torchtitan_of(ample[0])
    assert "--parallelism.data_parallel_shard_degree 2\n" in text and "--training.local_batch_size 2\n" in text


def llama_of(layers: int, heads: int, groups: int) -> TrainingJob:
    model = partial(LlamaShaped, 32, 64, 160, layers, heads, groups)
    return TrainingJob(model, few_tokens, policies=Policies(checkpoint=True), tensor_parallel=cut_projections)


LLAMA = llama_of(2, 4, 2)


@pytest.fixture(scope="module")
def llama() -> list[Proposal]:
    return proposals(LLAMA, 1, micro_batch=1)


@pytest.fixture(scope="module")
def cut(llama: list[Proposal]) -> list[Proposal]:
    return [proposal for proposal in llama if dict(proposal.candidate.axes).get("tp") == 2]


def test_tensor_parallelism_is_proposed_where_there_is_a_plan_for_it(cut: list[Proposal], ample: list[Proposal]):
    assert not any("tp" in dict(proposal.candidate.axes) for proposal in ample)
    assert cut and cut[0].candidate.axes == (("dp_shard", 1), ("tp", 2))
    # Both ranks work on the same sample.
    assert cut[0].sample_seconds == pytest.approx(cut[0].estimate.timeline.step)
    assert cut[0].rate == pytest.approx(few_tokens().shape[1] / cut[0].estimate.timeline.step / 2)
    assert any(reason.startswith("tensor parallelism") for reason in cut[0].reasons)
    assert any(row.collective == "all-reduce" for row in cut[0].estimate.traffic)


def test_tensor_parallelism_is_tried_where_nothing_fits_without_it(llama: list[Proposal], cut: list[Proposal]):
    plain = [one.estimate.reserved_bytes for one in llama if "tp" not in dict(one.candidate.axes)]
    smallest = min(one.estimate.reserved_bytes for one in cut)
    assert 1.1 * smallest < min(plain)
    limit = (smallest + min(plain)) // 2
    found = proposals(LLAMA, 1, MACHINE.replace(memory=limit), micro_batch=1)
    assert found and all(dict(one.candidate.axes)["tp"] == 2 for one in found)


def test_the_code_of_tensor_parallelism_can_be_followed(cut: list[Proposal]):
    measured = run_ranks(2, follow, code_of(cut[0]), 1, "LLAMA")
    assert measured[0] == pytest.approx(cut[0].estimate.peak.bytes, rel=0.01)


def test_a_plan_of_the_users_own_is_imported_by_its_name(cut: list[Proposal]):
    code = code_of(replace(cut[0], tensor_parallel=two_dimensions))
    assert "from tests.tools.jobs import two_dimensions" in code
    assert 'two_dimensions(model, mesh["tp"])' in code


def test_heads_that_cannot_be_shared_evenly_are_refused():
    one_head = llama_of(1, 1, 1)
    with pytest.raises(EstimateError, match=r"'layers\.0\.self_attn\.q_proj' has 1 heads, which 2 ranks"):
        estimate_job(one_head, {"dp": 1, "tp": 2}, MACHINE)
    told: list[str] = []
    found = proposals(one_head, 1, tell=told.append)
    assert found and any(text.startswith("gave up ") for text in told)


def test_when_nothing_fits_the_closest_is_told(ample: list[Proposal]):
    least = min(proposal.estimate.reserved_bytes for proposal in ample)
    with pytest.raises(
        NothingFits, match=r"none of \d+ ways fits .*; the smallest takes .*largest part of it"
    ) as raised:
        propose(JOB, 2, MACHINE, least // 2)
    assert "the process" not in str(raised.value) and "Use more ranks, " in str(raised.value)


def test_a_process_that_is_too_large_by_itself_is_told():
    heavy = MACHINE.replace(process_bytes=2**30)
    with pytest.raises(NothingFits) as raised:
        propose(JOB, 2, heavy, 2**30, margin=0.5)
    assert "fits 512.0 MiB (1.0 GiB less 50% for errors)" in str(raised.value)
    assert "the process without a model (1.0 GiB, process_bytes of the machine)" in str(raised.value)
    enough = parse_quantity(str(raised.value).rpartition("give at least ")[2], "bytes")
    assert propose(JOB, 2, heavy, int(enough), margin=0.5, most_micro_batch=1)


def test_without_the_adapter_tensor_parallelism_is_left_out(monkeypatch):
    monkeypatch.setattr(search, "entry_points", lambda group: ())  # as where shardkit-tp-adapter is not installed
    told: list[str] = []
    found = proposals(LLAMA, 1, micro_batch=1, tell=told.append)
    assert found and not any("tp" in dict(one.candidate.axes) for one in found)
    assert told == ["fewer ways: tensor parallelism needs the package shardkit-tp-adapter, which is not installed"]


def test_a_factory_that_asks_for_the_mesh_cannot_be_planned():
    with pytest.raises(EstimateError, match="must not ask for the mesh"):
        proposals(TrainingJob(two_dimensions, token_ids))


def make_stack(nested: bool) -> nn.Module:
    """Blocks and a head in one list, or blocks in a list that has a number for a name."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]
    return nn.Sequential(*([nn.Sequential(*blocks)] if nested else blocks), nn.Linear(8, 3))


@pytest.mark.parametrize("nested", [False, True])
def test_code_names_the_blocks_that_were_estimated(nested: bool):
    job = TrainingJob(partial(make_stack, nested), lambda: torch.rand(2, 8))
    best, *_ = propose(job, 1, MACHINE, MACHINE.memory, most_micro_batch=2, count=1)
    assert best.blocks == (("0.0", "0.1") if nested else ("0", "1"))
    pasted: dict[str, Any] = {}
    exec(compile(code_of(best), "pasted", "exec"), pasted)
    made: list[nn.Module] = []
    model = make_stack(nested)
    pasted["fully_shard"] = lambda module, **_: made.append(module)
    pasted["init_device_mesh"] = lambda *_, **__: None
    model.set_prefetch_depth = lambda _: None
    pasted["shard"](model)
    assert made == [*(model.get_submodule(name) for name in best.blocks), model]


def test_code_names_lists_once_and_both_dtypes(ample: list[Proposal]):
    wrapped = ("blocks.0", "blocks.1", "embedding", "head")
    mixed = replace(RECOMPUTED, policies=Policies(param_dtype=torch.bfloat16, wrap=wrapped, checkpoint=True))
    best, *_ = propose(mixed, 2, MACHINE.replace(flops={"bfloat16": 1e10}), 2**33, most_micro_batch=2, count=1)
    code = code_of(best)
    assert "    for block in [*model.blocks, model.embedding, model.head]:" in code
    reduced = "float32" if GRAD_DTYPE_DECIDES else "bfloat16"
    assert f"mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.{reduced})" in code
    plain = code_of(ample[0])
    assert "    for block in model.blocks:" in plain and "mp_policy" not in plain
