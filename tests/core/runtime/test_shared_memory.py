"""Shared memory between ranks of one host: who may write when, files left behind, and the errors of missing peers."""

import contextlib
import ctypes
import fcntl
import itertools
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from shardkit.core import events, fully_shard
from shardkit.core.runtime.choice import Communication, transport_for
from shardkit.core.runtime.collective import C10dTransport
from shardkit.core.runtime.lanes import make_lane
from shardkit.core.runtime.shared import segment
from shardkit.core.runtime.shared.connection import Connection
from shardkit.core.runtime.shared.meeting import neighbours_of
from shardkit.core.runtime.shared.neighbours import Neighbours, Table
from shardkit.core.runtime.shared.transport import SharedTransport
from tests.core.runtime.cases import CASES, CPU, flats_for, gather_plan, transport
from tests.support import RankFailure, on_ranks, rank_mesh, run_ranks
from tests.support.meshes import impatient_mesh
from tests.support.models import Composed
from tests.support.sharding import shard_children, shard_each
from tests.support.waiting import await_file


def _sharded(world_size: int, *widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    return shard_children(model, mesh=rank_mesh((world_size,)))


def _step(model: nn.Module, width: int) -> float:
    loss = model(torch.ones(2, width)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss.item()


# -- where things lie --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_shards_lie_in_shared_memory_from_the_start(rank: int, world_size: int) -> None:
    model = _sharded(world_size, 5, 7, 3)
    assert all(segment.locate(p.to_local()) is not None for p in model.parameters() if p.to_local().numel())
    _step(model, 5)


@on_ranks(2, isolated=True)
def test_loads_of_many_modules_in_a_group(rank: int, world_size: int) -> None:
    whole = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
    model = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(100))), mesh=rank_mesh((world_size,)))
    full, mine = whole.state_dict(), model.state_dict()
    values = {name: distribute_tensor(one, mine[name].device_mesh, mine[name].placements) for name, one in full.items()}
    model.load_state_dict(values, assign=True)
    places = [segment.locate(parameter.to_local()) for parameter in model.parameters()]
    assert None not in places and len({id(place[0]) for place in places}) == 1, "the shards of a load lie side by side"
    taken = [parameter.to_local().data_ptr() for parameter in model.parameters()]
    torch.testing.assert_close(model(torch.ones(2, 4)), whole(torch.ones(2, 4)))
    model.reshard()
    assert taken == [parameter.to_local().data_ptr() for parameter in model.parameters()], "tensors over them are lost"


def _pages(rank: int, world_size: int, deleted: Path) -> list[int]:
    """Bytes of all ranks' memory files together: while a model trains, and after it is gone and another one trains."""
    seen = []
    model = _sharded(world_size, 1024, 1024, 1024)
    _step(model, 1024)
    for ended in (False, True):
        if ended:
            if rank == 1:
                await_file(deleted, "rank 0 deletes its model")
            del model
            if rank == 0:
                deleted.touch()
            _step(_sharded(world_size, 4, 4), 4)
        dist.barrier()
        seen.append(_resident())
        dist.barrier()
    return seen


def _resident() -> int:
    """Bytes of memory files in this process, pages that peers map too by halves."""
    nbytes, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Pss:"):
            nbytes += 1024 * int(line.split()[1]) * ours
        elif "-" in line.split(" ")[0]:
            ours = "memfd:shardkit" in line
    return nbytes


def test_a_deleted_models_pages_are_given_back_though_peers_map_them(tmp_path: Path) -> None:
    seen = run_ranks(2, _pages, tmp_path / "deleted", isolated=True)
    training, gone = (sum(ranks) for ranks in zip(*seen, strict=True))
    assert training > 8 * 2**20  # shards of two matrices, and gradients in the outbox
    assert gone < 2**16


@on_ranks(2, isolated=True)
def test_a_forked_child_gives_nothing_back(rank: int, world_size: int) -> None:
    model = _sharded(world_size, 64, 64)  # no peer has read anything of it yet
    before = model[0].weight.to_local().detach().clone()
    child = os.fork()
    if not child:
        del model
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(model[0].weight.to_local(), before)


# -- who may write when ------------------------------------------------------------------------------------------------


# Rank 1 reads a shard of rank 0 as late as possible: when rank 0 waits for it, or has written to the shard.


@contextlib.contextmanager
def _tells_that_it_waits(rank: int, waits: Path) -> Iterator[None]:
    """Rank 0 makes the file when it starts to wait until its shards are read, at the latest at the end of the block."""

    def tell(event: events.Event) -> None:
        if isinstance(event, events.WaitStarted) and event.operation == "release":
            waits.touch()

    if rank != 0:
        yield
        return
    with events.subscribe(tell):
        yield
    waits.touch()


def _come_late(rank: int, waits: Path) -> None:
    if rank == 1:
        await_file(waits, "rank 0 waits for rank 1, or writes")


def _late_model(world_size: int) -> nn.Sequential:
    """Rank 1 is delayed before the last layer, once there is a file to wait for."""

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        if module.waits is not None:
            _come_late(dist.get_rank(), module.waits)
        return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Composed(run, waits=None), nn.Linear(64, 64, bias=False))
    return shard_each(model[0], model[2], model, mesh=rank_mesh((world_size,)))


@torch.no_grad()
def _writes_after_forward(rank: int, world_size: int, waits: Path) -> tuple[torch.Tensor, torch.Tensor]:
    model = _late_model(world_size)
    first = model(torch.ones(2, 64))  # teaches the order: from now on layers are gathered ahead
    model[1].waits = waits
    with _tells_that_it_waits(rank, waits):
        again = model(torch.ones(2, 64))
        for parameter in model.parameters():
            parameter.to_local().zero_()
    return first, again


@torch.no_grad()
def _writes_after_unshard(rank: int, world_size: int, waits: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The unsharded weight on this rank. Rank 0 writes to its shard as soon as the layer is sharded again."""
    layer = _late_model(world_size)[2]
    expected = layer.weight.full_tensor()
    handle = layer.unshard(async_op=True)
    with _tells_that_it_waits(rank, waits):
        _come_late(rank, waits)
        handle.wait()
        seen = layer.weight.clone()
        layer.reshard()
        layer.weight.to_local().zero_()
    dist.barrier()
    return expected, seen


@pytest.mark.parametrize("body", [_writes_after_forward, _writes_after_unshard])
@on_ranks(2)
def test_a_shard_may_be_written_to_as_soon_as_control_returns(
    rank: int, world_size: int, body: Callable[..., tuple[torch.Tensor, torch.Tensor]], tmp_path: Path
) -> None:
    assert torch.equal(*body(rank, world_size, tmp_path / "waits"))


@on_ranks(2)
def test_a_shard_whose_memory_has_moved_is_read_where_it_is(rank: int, world_size: int) -> None:
    model = _sharded(world_size, 8, 8)
    model(torch.ones(2, 8))
    for parameter in model.parameters():
        local = parameter.to_local().detach()
        parameter._local_tensor.set_(torch.full_like(local, 7.0))  # as pickling for another process does
    seen = model(torch.ones(2, 8)).detach()
    assert torch.equal(seen, nn.functional.linear(torch.ones(2, 8), torch.full((8, 8), 7.0), torch.full((8,), 7.0)))


@on_ranks(2)
def test_a_first_gather_in_inference_mode_leaves_shards_that_can_be_trained(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    fully_shard(model, mesh=rank_mesh((world_size,)))
    model.to_empty(device="cpu")
    model.reset_parameters()
    with torch.inference_mode():
        model(torch.ones(2, 8))
    with torch.no_grad():
        model.weight.to_local().mul_(0.5)
    _step(model, 8)


# -- launched far ahead ------------------------------------------------------------------------------------------------

_FAR = 600  # messages: many more than a pipe of one page holds unread
_PAGE = 4096


def _late_in_backward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """In backward, once it has a file to wait for, it delays rank 1 before the next layer and raises on rank 0."""

    def hook(gradient: torch.Tensor) -> None:
        if module.waits is not None:
            _come_late(dist.get_rank(), module.waits)
            if dist.get_rank() == 0:
                raise RuntimeError("backward is interrupted")

    x.register_hook(hook)
    return x.clone()


@on_ranks(2)
def test_a_shard_may_be_written_to_after_a_reset(rank: int, world_size: int, tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Composed(_late_in_backward, waits=None), nn.Linear(64, 64))
    shard_each(model[0], model[2], model, mesh=rank_mesh((world_size,)))
    model.set_requires_gradient_sync(False)
    inputs = [torch.ones(2, 64, requires_grad=True) for _ in range(2)]
    model(inputs[0]).sum().backward()
    model[1].waits = waits
    if rank == 0:
        with pytest.raises(RuntimeError, match="interrupted"):
            model(inputs[1]).sum().backward()
        with _tells_that_it_waits(rank, waits), torch.no_grad():
            model.reset_iter_state()
            for parameter in model.parameters():
                parameter.to_local().zero_()
    else:
        model(inputs[1]).sum().backward()  # reads the shards of rank 0, which failed afterwards
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    dist.barrier()


@pytest.mark.parametrize("order", ["as launched", "backwards"])
@on_ranks(2, 3)
def test_any_number_of_operations_may_be_launched_ahead(rank: int, world_size: int, order: str) -> None:
    neighbours = neighbours_of(dist.new_group())
    assert neighbours is not None
    for connection in neighbours._connections.values():
        fcntl.fcntl(connection.outgoing, fcntl.F_SETPIPE_SZ, _PAGE)
    (values,) = segment.shared_copies([torch.full((4,), float(rank))])
    table = Table("block", [values])
    if rank == 1:
        dist.barrier()  # the others are through before anything is read
    postings = [neighbours.post(table) for _ in range(_FAR)]
    if rank != 1:
        dist.barrier()
    seen = []
    if order == "backwards":
        postings.reverse()
    for number, posting in enumerate(postings):
        if number in (1, _FAR // 2):
            dist.barrier()  # with most of them still launched ahead
        posting.wait()
        seen.append(sum(tensors[0].sum().item() for tensors in posting.peers if tensors is not None))
        posting.release()
    for posting in postings:
        posting.wait_until_read()
    dist.barrier()
    assert seen == [4.0 * (sum(range(world_size)) - rank)] * _FAR


def _pair(timeout: float) -> tuple[Neighbours, Neighbours]:
    """Both ends of a connection, in one process, through pipes of one page."""
    (reads, writes), (other_reads, other_writes) = (os.pipe2(os.O_NONBLOCK) for _ in range(2))
    for pipe in (writes, other_writes):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PAGE)
    one = Connection(1, FileIO(reads, "r"), FileIO(other_writes, "w"))
    other = Connection(0, FileIO(other_reads, "r"), FileIO(writes, "w"))
    return Neighbours([None, one], timeout), Neighbours([other, None], timeout)


@on_ranks(1)
def test_no_wait_ends_before_the_peer_has_what_it_needs(rank: int, world_size: int) -> None:
    sender, receiver = _pair(60.0)
    tables = [Table("block", segment.shared_copies([torch.ones(4)])) for _ in range(2)]
    sent, received = [], []
    for _ in range(_FAR):
        sent.append(sender.post(tables[0]))
        received.append(receiver.post(tables[1]))
        sent[0].is_read()  # hears the receiver
    sent[0].wait()
    received[0].wait()
    received[0].release()
    sent[0].release()
    # The sender has every message that it needs. The receiver waits for one that is not sent yet.
    sender._timeout = 0.1
    for wait in (lambda: sender.collect(sent[-1]), lambda: sender.wait_until_read(sent[0])):
        with pytest.raises(TimeoutError, match="rank 1 of the group has not come within"):
            wait()
    sender._timeout = 60.0
    reader = threading.Thread(target=received[0].wait_until_read)
    reader.start()
    sent[0].wait_until_read()
    sent[-1].wait()
    reader.join()
    sender.close(), receiver.close()


@on_ranks(1)
def test_a_table_of_any_size_arrives(rank: int, world_size: int) -> None:
    """Its message is longer than the buffer of a pipe; it goes in pieces while the receiver reads."""
    sender, receiver = _pair(5.0)
    values = segment.shared_copies([torch.full((1,), float(i)) for i in range(2_000)])
    sent, expected = sender.post(Table("block", values)), receiver.post(Table("block", values[:1]))
    reader = threading.Thread(target=lambda: (expected.wait(), expected.release()))
    reader.start()
    sent.wait_until_read()
    reader.join()
    sender.close(), receiver.close()


# -- when it is not available ------------------------------------------------------------------------------------------


@on_ranks(3, isolated=True)
def test_one_rank_that_declines_makes_all_use_collectives(rank: int, world_size: int) -> None:
    if rank == 1:
        os.environ["SHARDKIT_SHARED_MEMORY"] = "0"
    group = dist.new_group()
    assert isinstance(transport_for(group, CPU), C10dTransport)
    assert _step(fully_shard(nn.Linear(6, 6), mesh=DeviceMesh.from_group(group, "cpu")), 6) > 0


_CLONE_NEWNS = 0x00020000  # linux/sched.h


@on_ranks(2, isolated=True)
def test_ranks_in_containers_of_their_own_use_collectives(rank: int, world_size: int) -> None:
    group = dist.new_group()
    # Another mount namespace, as in a container of its own: the numbers in its /proc may be those of other processes.
    if rank == 0 and ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        pytest.skip(f"may not make a mount namespace: {os.strerror(ctypes.get_errno())}")
    assert isinstance(transport_for(group, CPU), C10dTransport)


@on_ranks(2, isolated=True)
def test_a_limit_on_files_for_shards_is_named(rank: int, world_size: int) -> None:
    layers = [nn.Linear(8, 8) for _ in range(20)]  # a file for each, two before Python 3.13
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max([os.dup(0) for _ in range(20)]) + 10, hard))
    try:
        with pytest.raises(RuntimeError, match=r"no more memory files.*ulimit -n.*SHARDKIT_SHARED_MEMORY=0"):
            shard_each(*layers, mesh=rank_mesh((world_size,)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _meets_nobody(rank: int, world_size: int, directory: str) -> None:
    groups = [dist.new_group() for _ in range(2)]
    model = fully_shard(nn.Linear(2, 2), mesh=DeviceMesh.from_group(groups[1], "cpu"))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as meeting:
        Communication().transports(groups[0], CPU, "blocks.0")
    with pytest.raises(RuntimeError) as comparing:
        model(torch.ones(1, 2))
    Path(directory, "said").write_text(f"{meeting.value}\n{comparing.value}")


def _said_by_rank_0(body: Callable[..., None], directory: Path) -> str:
    """While rank 1 is killed."""
    with pytest.raises(RankFailure):
        run_ranks(2, body, str(directory), isolated=True)
    return (directory / "said").read_text()


def test_a_rank_that_does_not_come_to_the_set_up_is_an_error_with_a_name(tmp_path: Path) -> None:
    meeting, comparing = _said_by_rank_0(_meets_nobody, tmp_path).splitlines()
    assert meeting.startswith("blocks.0: set-up failed (meeting the other ranks of its group)")
    assert comparing.startswith("FSDPLinear: set-up failed (comparing models with the other ranks)")
    assert comparing.endswith("under `shardkit watch` the job names the rank that is missing and what it does instead")


# -- when a peer is not there ------------------------------------------------------------------------------------------


def _dies(rank: int, world_size: int, directory: str) -> None:
    model = _sharded(world_size, 8, 8, 8)
    _step(model, 8)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as error:
        _step(model, 8)
    Path(directory, "said").write_text(str(error.value))


def test_a_killed_peer_is_named_at_once(tmp_path: Path) -> None:
    said = _said_by_rank_0(_dies, tmp_path)
    assert "within" not in said, "found by a timeout, which is half an hour here"
    assert "all-gather (waiting for its peers" in said or "launching all-gather failed" in said
    assert "the process of rank 1 of the group has ended" in said


@on_ranks(2, isolated=True)
def test_ranks_at_different_groups_are_told_so(rank: int, world_size: int) -> None:
    plan = gather_plan(CASES["small"], transport("shared"), f"blocks.{rank}")
    sources = [torch.ones(item.layout.local_shape(rank)) for item in plan.items]
    other = 1 - rank
    told = f"rank {other} of the group is at the gather of 'blocks.{other}' where this rank is at the gather of 'blocks"
    with pytest.raises(RuntimeError, match=told):
        make_lane(CPU, "all-gather").start(plan.transport.gather(plan, sources, flats_for(plan)), plan.label).wait()


@on_ranks(2, isolated=True)
def test_a_gather_is_not_taken_for_a_reduction_without_gradients(rank: int, world_size: int) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=impatient_mesh())
    if rank == 1:  # whose next gather meets the reduction of the other
        with torch.no_grad():
            model(torch.ones(1, 4))
    places = ["the reduction", "the gather"]
    told = f"at {places[1 - rank]} of 'FSDPLinear' where this rank is at {places[rank]} of 'FSDPLinear'; all ranks must"
    with pytest.raises(RuntimeError, match=told):
        model(torch.ones(1, 4)).sum().backward()


@on_ranks(2, isolated=True)
def test_a_shard_of_another_size_is_refused(rank: int, world_size: int) -> None:
    over = transport("lent")
    assert isinstance(over, SharedTransport)
    case = CASES["large_even"] if rank == 0 else CASES["large_uneven"]
    plan = gather_plan(case, over)
    sources = segment.shared_copies([torch.ones(item.layout.local_shape(rank)) for item in plan.items])
    with pytest.raises(RuntimeError) as error:
        make_lane(CPU, "all-gather").start(plan.transport.gather(plan, sources, flats_for(plan)), plan.label).wait()
    if rank == 0:
        assert "rank 1 of the group shares 30000 elements of 'blocks.0.w0', expected 24000" in str(error.value)


@on_ranks(1)
def test_a_limit_on_open_files_is_named(rank: int, world_size: int) -> None:
    sender, receiver = _pair(5.0)
    tables = [Table("block", segment.shared_copies([torch.ones(4)])) for _ in range(2)]
    sender.post(tables[0])
    expected = receiver.post(tables[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        with pytest.raises(OSError, match=r"(?s)Too many open files.*ulimit -n"):
            expected.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sender.close(), receiver.close()
