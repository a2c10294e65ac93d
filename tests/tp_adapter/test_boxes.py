"""Local tensors that know their boxes: plain tensors to every operator, several boxes to a checkpoint."""

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardkit.core.region import Region
from shardkit.tp_adapter.boxes import BoxedTensor, Boxes

WHOLE = torch.arange(24.0).view(8, 3)
REGION = Region((((0, 2), (4, 6)), ((0, 3),)))
BOXES = Boxes(WHOLE.shape, REGION)


def boxed() -> BoxedTensor:
    return BoxedTensor.of(REGION.take(WHOLE), BOXES)


def test_answers_where_its_boxes_lie():
    local = boxed()
    items = local.__create_write_items__("w", local)
    assert [(item.index.offset, item.tensor_data.chunk.sizes) for item in items] == [((0, 0), (2, 3)), ((4, 0), (2, 3))]
    assert {item.tensor_data.size for item in items} == {WHOLE.shape}
    assert [chunk.offsets for chunk in local.__create_chunk_list__()] == [(0, 0), (4, 0)]
    second = local.__get_tensor_shard__(MetadataIndex("w", torch.Size((4, 0))))
    assert type(second) is torch.Tensor
    assert torch.equal(second, WHOLE[4:6])
    second.zero_()
    assert not local[2:].any(), "a checkpoint that is loaded is written into the tensor itself"


def test_an_empty_part_has_no_boxes():
    empty = BoxedTensor.of(WHOLE[:0], Boxes(WHOLE.shape, Region(((), ((0, 3),)))))
    assert empty.__create_write_items__("w", empty) == []
    assert empty.__create_chunk_list__() == []


def test_what_keeps_elements_in_place_keeps_boxes():
    local = boxed()
    kept = [local.detach(), torch.zeros_like(local), local.clone(), local.to(torch.bfloat16), local.view(4, 3)]
    assert [type(one) for one in kept] == [BoxedTensor] * len(kept)
    assert all(one.boxes is BOXES for one in kept)
    others = [local + 1, local.t(), local[1:], local.view(-1), local.sum(), local.plain()]
    assert [type(one) for one in others] == [torch.Tensor] * len(others)


def test_memory_is_shared_and_optimizers_work():
    plain = REGION.take(WHOLE)
    local = BoxedTensor.of(plain, BOXES)
    local.add_(1)
    assert torch.equal(plain, REGION.take(WHOLE) + 1)
    grad = torch.ones_like(plain)
    for options in ({"foreach": True}, {"fused": True}, {}):
        expected = plain.clone()
        torch.optim.AdamW([p := torch.nn.Parameter(expected)], lr=0.1, **options).zero_grad()
        p.grad = grad.clone()
        torch.optim.AdamW([p], lr=0.1, **options).step()
        mine = BoxedTensor.of(plain, BOXES).requires_grad_()
        mine.grad = BoxedTensor.of(grad, BOXES)
        torch.optim.AdamW([mine], lr=0.1, **options).step()
        assert torch.equal(plain, p.detach()), options
