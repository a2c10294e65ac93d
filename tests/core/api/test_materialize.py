"""Models built on the meta device: memory, values, and the refusal to start with garbage."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardkit.core import Blocks, CPUOffloadPolicy, Owned, fully_shard
from shardkit.core.materialize import materialize
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed


class Everything(nn.Module):
    """Initialisers of `torch.nn.init` and of `torch`, a padded embedding, and writes into a child's parameters.

    Also attention, whose initialiser starts with an underscore, and a table that is in no state dict.
    """

    def __init__(self):
        super().__init__()
        self.padded = nn.Embedding(7, 6, padding_idx=5)
        self.attention, self.rotary = nn.MultiheadAttention(8, 2), Rotary(4)
        self.named = nn.ParameterDict({name: nn.Parameter(torch.ones(6, 5)) for name in INITIALISERS})
        self.rows = nn.Parameter(torch.ones(7, 3))
        self.last = nn.Linear(5, 6)
        self.rows.mark = "kept"

    def reset_parameters(self):
        for name, initialise in INITIALISERS.items():
            initialise(self.named[name])
        with torch.no_grad():
            self.rows.copy_(torch.normal(0.0, torch.ones(7, 3)))
            self.rows[3:5] = 0.5
            self.last.weight[2] = 0.0
        nn.init.normal_(self.last.bias)
        self.last.bias.seen = True


INITIALISERS = {
    "rejecting": lambda t: nn.init.trunc_normal_(t, std=4.0, a=-0.5, b=0.5),
    "uniform": nn.init.uniform_,
    "orthogonal": nn.init.orthogonal_,
    "xavier": nn.init.xavier_normal_,
    "kaiming": nn.init.kaiming_uniform_,
    "eye": nn.init.eye_,
    "sparse": lambda t: nn.init.sparse_(t, 0.4),
    "like": lambda t: t.data.copy_(torch.randn_like(t) + torch.rand_like(t)),
    "drop": lambda t: t.data.bernoulli_(0.3),
}


class Rotary(nn.Module):
    """A table that is in no state dict."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("angles", torch.arange(dim) * 0.5, persistent=False)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def reset_parameters(self):
        self.angles = torch.arange(len(self.angles), device=self.angles.device) * 0.5
        self.steps.fill_(7)


def placements_of_cases(rank, world_size):
    """By case: the model on the meta device, sharded in one way."""
    mesh = rank_mesh((world_size,), ("shard",))
    rows = {"mesh": mesh, "shard_placement_fn": lambda p: Owned(0) if p.ndim == 2 else None}
    cases = {
        "rows": {"mesh": mesh},
        "columns": {"mesh": mesh, "shard_placement_fn": lambda p: Shard(p.ndim - 1)},
        "owned": rows,
        "blocks": {"mesh": mesh, "shard_placement_fn": lambda p: Blocks(elements=2) if p.ndim == 2 else None},
        "offload": {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }
    if world_size == 4:
        cases["replicas"] = {"mesh": rank_mesh((2, 2), ("replicate", "shard"))}
    for case, options in cases.items():
        with torch.device("meta"):
            model = Everything()
        if case == "rows" and world_size == 4:  # on top of tensor parallelism
            both = rank_mesh((2, 2), ("shard", "tp"))
            parallelize_module(model.last, both["tp"], ColwiseParallel())
            options = {"mesh": both["shard"]}
        fully_shard(model.last, **options)
        yield case, fully_shard(model, **options)


@on_ranks(1, 3, 4)
def test_every_initialiser_gives_the_values_of_one_process(rank, world_size):
    torch.manual_seed(3)
    expected = Everything()
    torch.manual_seed(4)
    expected.padded.reset_parameters()
    expected.attention.out_proj.reset_parameters()
    expected.attention._reset_parameters()
    expected.last.reset_parameters()
    expected.reset_parameters()
    expected.rotary.reset_parameters()
    state = torch.get_rng_state()
    for case, model in placements_of_cases(rank, world_size):
        torch.manual_seed(4)
        materialize(model)
        assert torch.equal(torch.get_rng_state(), state), case
        for name, tensor in expected.state_dict().items():
            seen = model.state_dict()[name]
            assert torch.equal(seen.full_tensor() if isinstance(seen, DTensor) else seen, tensor), (case, name)
        assert torch.equal(model.rotary.angles, expected.rotary.angles)
        assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
        assert model.last.bias.seen and model.rows.mark == "kept"
        before = model.rows.to_local().clone()
        materialize(model)  # nothing is left to do
        assert torch.equal(model.rows.to_local(), before)


class Written(Composed):
    """Initialised by `run(module)`."""

    def reset_parameters(self):
        self.run(self)


@on_ranks(2)
def test_initialisers_that_cannot_be_right_are_refused(rank, world_size):
    for write, message in (
        (  # to a parameter in a list, where nothing can show it whole
            lambda module: nn.init.normal_(module.kept[0]),
            r"weight: parameter of shape \(6, 4\); reset_parameters\(\) of FSDPWritten did not write all of it",
        ),
        (
            lambda module: setattr(module, "weight", nn.Parameter(torch.ones(2, 2))),
            r"'weight' of FSDPWritten \(2, 2\); expected \(6, 4\)",
        ),
    ):
        with torch.device("meta"):
            model = Written(write, weight=nn.Parameter(torch.ones(6, 4)))
            fully_shard(model, mesh=rank_mesh((world_size,), ("shard",)))
        sharded = model.weight
        model.kept = [sharded]
        with pytest.raises(RuntimeError, match=message):
            materialize(model)
        assert model._parameters == {"weight": model.weight} and model.weight.is_meta is False
        assert isinstance(model.weight, DTensor)


def no_reset():
    return Composed(None, scale=nn.Parameter(torch.ones(4)), table=nn.Buffer(torch.ones(3), persistent=False))


def scaled():
    """Its weight is multiplied, not written."""
    run = lambda module: (module.weight.data.mul_(0.0), module.bias.data.zero_())  # noqa: E731
    return Written(run, weight=nn.Parameter(torch.ones(6, 4)), bias=nn.Parameter(torch.ones(6)))


def materialize_on_meta(build, world_size, **options):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), build())
        fully_shard(model, mesh=rank_mesh((world_size,), ("shard",)))
    materialize(model, **options)
    return model


@on_ranks(1, 3)
def test_refuses_uninitialised_tensors_by_name(rank, world_size):
    with pytest.raises(RuntimeError) as caught:
        materialize_on_meta(no_reset, world_size)
    assert "(2 of them)" in str(caught.value)
    assert re.search(r"1\.scale: parameter of shape \(4,\); Composed has no reset_parameters", str(caught.value))
    assert re.search(r"1\.table: buffer of shape \(3,\); Composed has no", str(caught.value))
    assert "0.weight" not in str(caught.value)
    with pytest.raises(RuntimeError, match=r"1 of them(.|\n)*1.weight: parameter.*did not write all of it"):
        materialize_on_meta(scaled, world_size)
    with pytest.raises(RuntimeError, match=r"1.scale.*init\(Composed\)"):
        materialize_on_meta(no_reset, world_size, init=lambda module: None)


@on_ranks(1, 3)
def test_init_callable(rank, world_size):
    called = []

    def init(module):
        called.append(type(module).__name__)
        for parameter in module.parameters(recurse=False):
            assert type(parameter) is nn.Parameter  # whole, as before sharding
            parameter.data.fill_(3.0)
        if isinstance(module, Composed):
            torch.arange(3, out=module.table)

    model = materialize_on_meta(no_reset, world_size, init=init)
    assert called == ["Linear", "Composed"]
    assert torch.equal(model[1].scale.full_tensor(), torch.full((4,), 3.0))
    assert torch.equal(model[1].table, torch.arange(3.0))


@on_ranks(2)
def test_leaves_real_tensors_and_keeps_plain_ties(rank, world_size):
    real = nn.Linear(4, 4)
    expected = real.weight.detach().clone()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied = nn.Linear(4, 4)
    other = nn.Linear(4, 4, device="meta")
    other.weight = tied.weight
    fully_shard(model, mesh=rank_mesh((world_size,), ("shard",)))
    outer = nn.ModuleDict({"sharded": model, "real": real, "tied": tied, "other": other})
    materialize(outer)
    assert torch.equal(real.weight, expected)
    assert tied.weight is other.weight
    assert not tied.weight.is_meta
    assert isinstance(tied.weight, nn.Parameter)


def test_plain_model_without_process_group():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    materialize(model, device="cpu")
    assert torch.equal(model[1].running_var, torch.ones(3))


def replace_values(device):
    def write(module):
        module.values = torch.empty(0)  # the memory of the first one goes away
        module.values = torch.ones(4, 3, device=device)

    return write


@pytest.mark.parametrize(
    ("dtype", "write", "complete"),
    [
        (torch.float32, lambda m: m.values.data.zero_(), True),
        (torch.bfloat16, lambda m: m.values.t().copy_(torch.ones(3, 4)), True),
        (torch.float32, lambda m: torch.ones(4, 3, out=m.values), True),
        (torch.float32, lambda m: m.values.view(torch.uint8).fill_(0), True),
        (torch.complex64, lambda m: [m.values[row].zero_() for row in range(4)], True),
        (torch.float32, lambda m: m.values.fill_(-float("inf")), True),
        (torch.int64, lambda m: m.values.fill_(torch.iinfo(torch.int64).max), True),
        (torch.bool, lambda m: m.values.fill_(True), True),
        (torch.float32, replace_values("cpu"), True),
        (torch.float32, replace_values("meta"), False),
        (torch.complex64, lambda m: [m.values[row].zero_() for row in range(3)], False),
        (torch.int16, lambda m: m.values[:, 1:].fill_(1), False),
        (torch.int64, lambda m: m.values.clamp_(min=0), False),
        (torch.float32, lambda m: m.values.mul_(0), False),
        (torch.float32, lambda m: m.values.clone().zero_(), False),
    ],
)
def test_what_counts_as_initialised(dtype, write, complete):
    with torch.device("meta"):
        model = Written(write, values=nn.Buffer(torch.empty(4, 3, dtype=dtype)))
    if complete:
        materialize(model, device="cpu")
    else:
        with pytest.raises(
            RuntimeError, match=r"values: buffer of shape \(4, 3\); reset_parameters\(\) of Written did not"
        ):
            materialize(model, device="cpu")


def test_bytes_without_an_initialiser_are_refused():
    with torch.device("meta"):
        model = nn.Module()
        model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    with pytest.raises(RuntimeError, match=r"mask: buffer of shape \(3,\); Module has no reset_parameters\(\)"):
        materialize(model, device="cpu")
    with torch.device("meta"):
        run = lambda m: (m.values.zero_(), outer.inner.mask.fill_(True))  # noqa: E731
        outer = Written(run, values=nn.Buffer(torch.empty(4, 3)))
        outer.inner = nn.Module()
        outer.inner.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
    materialize(outer, device="cpu")  # the module around it has written it
    assert outer.inner.mask.all()


def transformers_models():
    """Small ones of five families, on the meta device."""
    import transformers as hf

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 37}
    feed = {"intermediate_size": 24}
    experts = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    few = {"num_key_value_heads": 1}
    makes = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**small, **feed, **few, tie_word_embeddings=True)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**small, **feed)),
        "qwen": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**small, **feed, **few, **experts)),
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**feed, **small, image_size=8, patch_size=4)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=37)
        ),
    }
    with torch.device("meta"):
        return {name: make() for name, make in makes.items()}


@on_ranks(2, timeout=120)
def test_models_of_transformers_get_the_values_of_one_process(rank, world_size):
    pytest.importorskip("transformers")
    mesh = rank_mesh((world_size,), ("shard",))
    models = transformers_models()
    for name, plain in transformers_models().items():
        model = models[name]
        torch.manual_seed(5)
        materialize(plain, device="cpu", init=plain._init_weights)
        state = torch.get_rng_state()
        for module in [*model.modules()][::-1]:
            if type(module).__name__.endswith(("Layer", "Block")):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.manual_seed(5)
        materialize(model, init=model._init_weights)
        assert torch.equal(torch.get_rng_state(), state), name
        for fqn, tensor in plain.state_dict().items():
            held = model.state_dict()[fqn]
            assert torch.equal(held.full_tensor() if isinstance(held, DTensor) else held, tensor), (name, fqn)
        for fqn, buffer in plain.named_buffers():
            assert torch.equal(model.get_buffer(fqn), buffer), (name, fqn)
