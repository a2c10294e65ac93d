"""Weights into vLLM: engines for its weight-transfer factories, which vLLM finds by an entry point of this package.

A loader of vLLM cuts and fuses the tensors of a checkpoint. Its copies are recorded once, with tensors that have no
memory. A module whose parameters are all filled by plain copies is then written in place: each worker receives
the parts that it needs, wherever they lie. Tensors of other modules, and of quantised models, are received as a whole
and given to the loader.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import nn
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo

from shardkit.core.tensors import tensors_in
from shardkit.core.torch_compat import TorchDispatchMode
from shardkit.weights.boxes import dtype_named, name_of
from shardkit.weights.packing import describe
from shardkit.weights.receiver import WeightReceiver
from shardkit.weights.sender import Report, WeightSender
from shardkit.weights.targets import Target

__all__ = ["Source", "TrainerEngine", "TrainerInit", "WorkerEngine", "register"]

_log = logging.getLogger(__name__)

Looks = Mapping[str, tuple[str, Sequence[int]]]
"""Dtype and shape of each tensor that the trainer sends, by its name in the checkpoint."""

_PLAIN = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Methods with which vLLM computes with the parameters as they were loaded."""


def register() -> None:
    """Makes the backend "shardkit" known to vLLM, which calls this in each of its processes."""
    if "shardkit" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("shardkit", __name__, "WorkerEngine")
        WeightTransferTrainerFactory.register_engine("shardkit", __name__, "TrainerEngine")


class Source(WeightSource):
    """The model of a trainer, each rank of which sends its own part.

    Args:
        model: as for `WeightSender`.
        options: of `WeightSender`: `names`, which gives names of the Hugging Face checkpoint, `dtype` and
            `merge_adapters`.
    """

    def __init__(self, model: nn.Module | Mapping[str, torch.Tensor], **options: Any) -> None:
        self.model, self.options = model, options

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and whole shape of each tensor. Collective with `merge_adapters`."""
        names, dtype = self.options.get("names", str), self.options.get("dtype")
        held, _ = describe(self.model, names, dtype, merge=self.options.get("merge_adapters", False))
        return [ParamMeta(one.name, one.dtype, one.shape) for one in held]


@dataclass
class TrainerInit(TrainerInitInfo):
    """The choices of a trainer rank: `WeightTransferTrainerFactory.trainer_init(TrainerInit(...), client=, source=)`.

    Args:
        address: "tcp://host:port", a free port of the host of rank 0 that the workers of vLLM reach.
        receivers: how many workers vLLM has, over all its engines.
        world_size: the number of trainer ranks.
        delta: as for `WeightSender`.
        timeout: seconds to wait for a peer.
    """

    backend: ClassVar[str] = "shardkit"

    address: str
    receivers: int
    world_size: int
    delta: bool = False
    timeout: float = 300.0


class TrainerEngine(TrainerWeightTransferEngine[TrainerInit]):
    """On every trainer rank: sends its parts, and on rank 0 drives vLLM through the client."""

    init_info_cls = TrainerInit

    def __init__(self, init: TrainerInit, client: VLLMWeightSyncClient, source: Source) -> None:
        super().__init__(client=client, source=source, is_sender=init.is_sender, rank=init.rank)
        self._version = 0
        self._sender = WeightSender(
            source.model,
            init.address,
            **source.options,
            receivers=init.receivers,
            delta=init.delta,
            timeout=init.timeout,
            rank=init.rank,
            world_size=init.world_size,
        )

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Ready to send. Raises TypeError if the source is not a `Source`; and as `WeightSender`."""
        if not isinstance(source, Source):
            raise TypeError(
                f"a source of type {type(source).__name__}, expected shardkit.weights.vllm.Source, of which each rank "
                "sends its own part; pass source=Source(model)"
            )
        engine = cls(init_info, client, source)
        looks = {one.name: (name_of(one.dtype), list(one.shape)) for one in source.metadata}
        if init_info.is_sender:
            client.init_weight_transfer_engine(asdict(_WorkerInit(init_info.address, looks, init_info.timeout)))
        return engine

    def send_weights(self) -> None:
        """Sends the model as it is now to all workers, which load it. Collective over the trainer's ranks.

        Raises RuntimeError if a worker does not have it; and as `WeightSender.send`.
        """
        self._version += 1
        if not self.is_sender:
            self._sender.send(self._version)
            return
        self.client.start_weight_update()
        threads = ThreadPoolExecutor(1, "shardkit vllm")
        try:
            update = threads.submit(self.client.update_weights, asdict(_Update(self._version)))
            report = self._sender.send(self._version)
            update.result()
        finally:
            threads.shutdown(wait=False)  # after an error, workers may wait for the version until their timeout
        assert isinstance(report, Report)
        self.client.finish_weight_update()
        if report.failed:
            raise RuntimeError(
                f"workers of vLLM do not have version {self._version}: {dict(report.failed)}; restart "
                "them, then send again"
            )

    def shutdown(self) -> None:
        """Leaves the workers."""
        self._sender.close()


@dataclass
class _WorkerInit(WeightTransferInitInfo):
    """Where a worker finds the trainer, and what that sends."""

    address: str
    looks: dict[str, tuple[str, list[int]]]
    timeout: float = 300.0


@dataclass
class _Update(WeightTransferUpdateInfo):
    version: int


class WorkerEngine(WeightTransferEngine[_WorkerInit, _Update]):
    """In every worker of vLLM: receives what its part of the model needs."""

    init_info_cls = _WorkerInit
    update_info_cls = _Update
    supports_draft_weight_update = False

    whole: Mapping[str, torch.Tensor] = MappingProxyType({})
    """Memory for the tensors that the model's loader must have as a whole, by name."""
    _receiver: WeightReceiver | None = None

    def init_transfer_engine(self, init_info: _WorkerInit) -> None:
        """Finds out where each tensor goes, and joins the trainer as soon as that listens."""
        self.shutdown()
        # Of latent attention, vLLM computes with matrices that it derives from the parameters.
        direct = self.vllm_config.quant_config is None and not self.model_config.use_mla
        targets, self.whole = targets_in(self.model, init_info.looks, direct=direct)
        if self.whole:
            _log.warning(
                "%d of %d tensors are received as a whole, because their modules are not filled by plain copies: %s",
                len(self.whole),
                len(init_info.looks),
                ", ".join(list(self.whole)[:5]),
            )
        targets += [Target(name, None, tensor) for name, tensor in self.whole.items()]
        self._receiver = WeightReceiver(init_info.address, targets, in_place=True, timeout=init_info.timeout)

    def start_weight_update(self) -> None:
        """Prepares the modules that are loaded anew."""
        if self.whole:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: _Update) -> None:
        """Receives a version. Raises as `WeightReceiver.receive`."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        if self._receiver is None:
            raise RuntimeError("no transfer has been set up; call init_weight_transfer_engine first")
        while self._receiver.receive() < update_info.version:
            pass  # one that others have missed
        if self.whole:
            with disable_mtp_completeness_check():
                self.model.load_weights((name, one.to(self.device)) for name, one in self.whole.items())

    def finish_weight_update(self) -> None:
        """Finishes the modules that were loaded anew."""
        if self.whole:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leaves the trainer."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver, self.whole = None, {}


class _Copies(TorchDispatchMode):
    """Notes copies from tensors without memory, in place of making them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._named = {one.untyped_storage(): (name, one) for name, one in tensors.items()}
        self._parameters = {_memory(one) for one in model.parameters()}
        # Where each tensor is copied to; None if anything else is computed from it.
        self.targets: dict[str, list[Target] | None] = {name: [] for name in tensors}
        # The memory of parameters from which, or into which, something else is computed; that is not written.
        self.used: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_in((args, kwargs))
        named = [self._named[key] for one in given if one.is_meta and (key := one.untyped_storage()) in self._named]
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            for name, whole in named:
                region, found = _region(whole, args[1], args[0]), self.targets[name]
                one = None if region is None else Target(name, region, args[0])
                self.targets[name] = None if one is None or found is None else [*found, one]
            return args[0]
        if not func.is_view:
            self.targets |= dict.fromkeys(name for name, _ in named)
            used = {_memory(one) for one in given if not one.is_meta and one.numel()} & self._parameters
            self.used |= used
            if used and func._schema.is_mutable:
                return args[0]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def targets_in(model: nn.Module, looks: Looks, *, direct: bool = True) -> tuple[list[Target], dict[str, torch.Tensor]]:
    """Targets in the memory of a model of vLLM, and new tensors for those that its loader must have as a whole: all, if
    not `direct`. Tensors that the loader ignores are in neither.
    """
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    found: dict[str, list[Target] | None] = dict.fromkeys(looks)
    if direct:
        with disable_mtp_completeness_check():
            found = _recorded(model, looks)
    owners: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for one in module.parameters(recurse=False):
            owners.setdefault(_memory(one), set()).add(module)
    incomplete = {one for one in model.modules() if type(getattr(one, "quant_method", None)).__name__ not in _PLAIN}
    while True:
        filled: Counter[int] = Counter()
        for target in (target for targets in found.values() for target in targets or ()):
            filled[_memory(target.tensor)] += target.tensor.numel()
        for parameter in model.parameters():
            if filled[_memory(parameter)] != parameter.numel():
                incomplete.update(owners[_memory(parameter)])
        # A module is written in place or loaded anew as a whole, and so is a tensor of several modules.
        left = {
            name
            for name, targets in found.items()
            if any(incomplete & owners.get(_memory(one.tensor), set()) for one in targets or ())
        }
        if not left:
            break
        found |= dict.fromkeys(left)
    missing = {name: look for name, look in looks.items() if found[name] is None}
    whole = {name: torch.empty(shape, dtype=dtype_named(dtype)) for name, (dtype, shape) in missing.items()}
    return [target for targets in found.values() for target in targets or ()], whole


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _recorded(model: Any, looks: Looks) -> dict[str, list[Target] | None]:
    """Where the loader copies parts of each tensor; None if it does anything else with it."""
    tensors = {
        name: torch.empty(shape, dtype=dtype_named(dtype), device="meta") for name, (dtype, shape) in looks.items()
    }
    parameters: list[tuple[Any, torch.Tensor]] = [(one, one.data) for one in model.parameters()]
    copies = _Copies(tensors, model)
    try:
        with copies:
            model.load_weights(iter(tensors.items()))
    except Exception:  # noqa: BLE001 - the loader needs values of one of them
        if len(looks) == 1:
            return dict.fromkeys(looks)
        return {name: _recorded(model, {name: one})[name] for name, one in looks.items()}
    finally:
        for parameter, data in parameters:
            if parameter.is_meta:  # replaced by what was loaded
                parameter.data = data
    return {
        name: None if targets and any(_memory(one.tensor) in copies.used for one in targets) else targets
        for name, targets in copies.targets.items()
    }


def _region(whole: torch.Tensor, part: torch.Tensor, into: torch.Tensor) -> list[slice] | None:
    """Where a part lies in a whole tensor; None if it is not cut along dims, or fills another shape."""
    if part.stride() != whole.stride() or part.shape != into.shape:
        return None
    offset, region = int(part.storage_offset()), []
    for stride, size in zip(whole.stride(), part.shape, strict=True):
        start, offset = divmod(offset, stride)
        region.append(slice(start, start + size))
    return region
