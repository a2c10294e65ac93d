"""Targets by rules: a fused, cut and padded module is filled from the tensors of a checkpoint."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from shardkit.core.parameters.region import MergedRegion
from shardkit.weights.targets import Cut, Experts, Part, Stack, Target, targets_for, targets_of
from tests.support.models import Composed


def fill(targets, checkpoint):
    """Writes what the targets want, as a receiver does."""
    for target in targets:
        for want, view in target.parts():
            assert want.shape in (None, checkpoint[want.name].shape)
            view.copy_(checkpoint[want.name][tuple(slice(*run) for run in want.box)])


def flat(start, stop):
    return MergedRegion((((0, 3),), ((0, 4),)), 2, start, stop)


def made():
    """The layouts of an inference engine, on one of two ranks: 12 rows of vocabulary are padded to 16."""
    experts = Composed(None, w13=nn.Parameter(torch.zeros(2, 6, 4)), w2=nn.Parameter(torch.zeros(2, 4, 3)))
    layer = Composed(None, qkv_proj=nn.Linear(4, 4 + 2 + 2), o_proj=nn.Linear(4, 4), experts=experts)
    return Composed(None, embed=nn.Embedding(8, 4), layers=nn.ModuleList([layer]), norm=nn.LayerNorm(4))


RULES = {
    "embed.weight": Cut(0, size=12),
    "*.qkv_proj.*": Stack(Part("q_proj", 8), Part("k_proj", 2, copies=2), Part("v_proj", 2, copies=2)),
    "*.o_proj.*": Cut(1),
    "*.w13": Experts(
        Stack(
            Part("{parent}.experts.{expert}.gate.weight", 6),
            Part("{parent}.experts.{expert}.up.weight", 6),
        ),
        first=4,
    ),
    "*.w2": Experts(Cut(1), "{parent}.experts.{expert}.down.weight", first=4),
}


@pytest.mark.parametrize("rank", [0, 1])
def test_rules_fill_a_fused_cut_and_padded_module(rank):
    shapes = {
        "embed.weight": (12, 4),
        **{f"layers.0.{one}_proj.weight": (rows, 4) for one, rows in {"q": 8, "k": 2, "v": 2}.items()},
        **{f"layers.0.{one}_proj.bias": (rows,) for one, rows in {"q": 8, "k": 2, "v": 2}.items()},
        "layers.0.o_proj.weight": (4, 8),
        "layers.0.o_proj.bias": (4,),
        **{f"layers.0.experts.{expert}.{one}.weight": (6, 4) for expert in (4, 5) for one in ("gate", "up")},
        **{f"layers.0.experts.{expert}.down.weight": (4, 6) for expert in (4, 5)},
        "norm.weight": (4,),
        "norm.bias": (4,),
    }
    full = {name: torch.randn(shape) for name, shape in shapes.items()}
    engine = made()
    nn.init.zeros_(engine.embed.weight)
    targets = targets_for(engine, RULES, tp_rank=rank, tp_size=2)
    assert {one.name for one in targets} == set(shapes)
    with torch.no_grad():
        fill(targets, full)
    rows = slice(rank * 8, min(rank * 8 + 8, 12))
    assert torch.equal(engine.embed.weight[: rows.stop - rows.start], full["embed.weight"][rows])
    assert not engine.embed.weight[rows.stop - rows.start :].any()
    half, cut = slice(rank * 4, rank * 4 + 4), slice(rank * 3, rank * 3 + 3)
    layer = engine.layers[0]
    for leaf in ("weight", "bias"):
        parts = [full[f"layers.0.{one}_proj.{leaf}"] for one in "qkv"]
        assert torch.equal(getattr(layer.qkv_proj, leaf), torch.cat([parts[0][half], *parts[1:]]))
    assert torch.equal(layer.o_proj.weight, full["layers.0.o_proj.weight"][:, half])
    assert torch.equal(layer.o_proj.bias, full["layers.0.o_proj.bias"])
    for local, expert in enumerate((4, 5)):
        gate, up, down = (full[f"layers.0.experts.{expert}.{one}.weight"] for one in ("gate", "up", "down"))
        assert torch.equal(layer.experts.w13[local], torch.cat([gate[cut], up[cut]]))
        assert torch.equal(layer.experts.w2[local], down[:, cut])
    assert torch.equal(engine.norm.weight, full["norm.weight"])


def test_regions_are_of_tensors_of_known_shapes():
    """Senders refuse those of others: a last rank with fewer rows, sizes or numbers of ranks that are not the real."""
    last = nn.Module()
    last.cut, last.fused = nn.Linear(4, 1), nn.Linear(4, 3, bias=False)
    rules = {"cut.*": Cut(0), "fused.weight": Stack(Part("q", 8), Part("k", 4))}
    targets = targets_for(last, rules, tp_rank=3, tp_size=4, names=lambda name: f"model.{name}")
    wants = [want for target in targets for want, _ in target.parts()]
    assert [(want.name, want.shape) for want in wants] == [
        ("model.cut.weight", (4, 4)),
        ("model.cut.bias", (4,)),
        ("model.q.weight", (8, 4)),
        ("model.k.weight", (4, 4)),
    ]


def test_names_are_renamed_or_left_out():
    module = nn.Sequential(nn.Linear(2, 2))

    def names(name):
        return None if name.endswith("bias") else f"model.{name}"

    assert [one.name for one in targets_for(module, {}, names=names)] == ["model.0.weight"]
    assert [one.name for one in targets_of(module.state_dict(), names)] == ["model.0.weight"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda one: Target("w", (slice(0, 3), slice(None)), one), r"the region has shape \(3, 4\), expected \(2, 4\)"),
        (lambda one: Target("w", (slice(0, 2),), one), "expected 2 slices without a step"),
        (lambda one: Target("w", (slice(-2, None), slice(None)), one), "from the beginning of each dim"),
        (lambda one: Target("w", None, one.to("meta")), "w: its tensor is on the meta device"),
        (lambda one: Target("w", flat(0, 6), one), r"w: the region has shape \(6,\)"),
        (lambda _: targets_for(made(), {"*.qkv.weight": Cut(0)}), "match no parameter of Composed"),
        (lambda _: targets_for(made(), {"embed.*": Cut(0, size=20)}, tp_size=2), "8 of 20 rows .* do not cover"),
        (lambda _: targets_for(made(), {"norm.weight": Stack(Part("a", 3))}), "have 3 rows on this rank, expected 4"),
        (lambda _: targets_for(made(), {"norm.weight": Stack(Part("a", 3))}, tp_size=2), "does not divide among 2"),
        (lambda _: targets_for(made(), {"norm.*": Stack(Part("a", 4, copies=2))}, tp_size=3), "2 copies .* among 3"),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make(torch.zeros(2, 4))


def test_a_tensor_that_wraps_others_is_refused():
    """As quantised ones do: senders would wait for a receiver that cannot write what has come."""
    wrapped = TwoTensor(torch.zeros(2), torch.zeros(2))
    for make in (lambda: Target("w", None, wrapped), lambda: targets_of({"w": wrapped})):
        with pytest.raises(TypeError, match="w: its tensor is a TwoTensor, expected a plain tensor"):
            make()


def test_a_region_of_elements_is_written_in_place():
    full, piece = torch.arange(12.0).view(3, 4), torch.zeros(6)
    fill([Target("w", flat(3, 9), piece)], {"w": full})
    assert piece.tolist() == [3, 4, 5, 6, 7, 8]
