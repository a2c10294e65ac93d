"""`CheckpointManager`: saves that hardly delay training, and that are either complete or absent."""

from __future__ import annotations

import json
import operator
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from shardkit.core.checkpoint.agreement import (
    Fingerprints,
    Peers,
    check_same,
    digest_of,
    fingerprints,
    gather_everywhere,
    highest,
    raise_together,
    replicas_agree,
)
from shardkit.core.checkpoint.directory import OtherRuns, StoredCheckpoint, directory_of, open_index
from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.index import Index
from shardkit.core.checkpoint.leaves import Captured
from shardkit.core.checkpoint.location import Location, location_of
from shardkit.core.checkpoint.plan import Plan, holding_of, layouts_digest, make_plan, part_of
from shardkit.core.checkpoint.saving import Header, Image, LiveImage, Progress, Save
from shardkit.core.checkpoint.training_state import TrainingState, restore_state, unexpected_names
from shardkit.core.runtime.mapped import file_of


@dataclass(frozen=True)
class Restored:
    """The result of `CheckpointManager.restore`.

    Attributes:
        step: the number of the saved step; None for a directory written by stock.
        path: the directory of the checkpoint.
        info: the `info` passed to `save`.
        world_size: number of ranks that saved it, None if unknown.
        damaged: newer checkpoints that were skipped, and why.
    """

    step: int | None
    path: Location
    info: Mapping[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    damaged: tuple[str, ...] = ()


def _whole(number: object) -> int:
    """An int, or one of NumPy's; -1 for anything else."""
    try:
        return -1 if isinstance(number, bool) else operator.index(number)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return -1


def _step_number(step: object) -> int:
    whole = _whole(step)
    if not 0 <= whole < 2**63:
        raise CheckpointError(f"step={step!r}, expected a whole number from 0 on; pass the number of steps taken")
    return whole


class CheckpointManager:
    """The checkpoints of one run in one directory, which all ranks must see.

    The constructor, `save`, `wait` and `restore` are collective over the default process group; without one, this
    process works alone. Files that an earlier run left unfinished are removed.

    Args:
        directory: created if it does not exist; or the URL of a place in an object store, such as
            "s3://bucket/run", for which fsspec needs the store's package (s3fs, gcsfs, adlfs) and settings.
        keep: number of complete checkpoints to keep, counted back from the one just saved; None keeps all.
        every: `due(step)` is true for every multiple of this number; None for never.
        timeout: seconds that the committing rank waits for the other ranks to write their parts.

    Raises:
        CheckpointError: on all ranks, if the directory is not writable, or differs between ranks.
        ValueError: for a `keep` or `every` that is not a whole number from 1 on.
    """

    def __init__(
        self, directory: str | Location, *, keep: int | None = None, every: int | None = None, timeout: float = 1800.0
    ) -> None:
        for name, value, without in (("keep", keep, "keeps all checkpoints"), ("every", every, "makes none due")):
            if value is not None and _whole(value) < 1:
                raise ValueError(f"{name}={value!r}, expected a whole number from 1 on; pass None if it {without}")
        self._directory = directory_of(location_of(directory).absolute())
        self._keep, self._every, self._timeout = keep, every, timeout
        self._peers = Peers.of(None)
        self._token, theirs = self._peers.from_rank0((secrets.token_hex(4), str(self._directory.path)))
        self._image: Image | LiveImage | None = None
        self._save: Save | None = None
        self._begun, self._alike = 0, True
        self._others: OtherRuns | None = None
        with self._together("preparing the directory"):
            if theirs != str(self._directory.path):
                raise CheckpointError(
                    f"directory {self._directory.path}, but rank 0 has {theirs}: give all ranks the same"
                )
            if self._peers.rank == 0:
                self._directory.clean()
                self._others = OtherRuns(self._directory)

    # -- saving -------------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether the state after `step` steps is due to be saved."""
        return self._every is not None and step % self._every == 0

    def save(
        self, step: int, state: TrainingState, *, info: Mapping[str, Any] | None = None, blocking: bool = False
    ) -> None:
        """Saves the current state under a step number. Collective.

        Waits for an earlier save that is still running, then copies this rank's part of the state to staging memory of
        the same size, which later saves reuse. A thread then writes it to disk. State in files (`FileTier`) is not
        copied: then the call returns when this rank's part is on disk.

        Args:
            step: number of steps taken; an existing checkpoint of this number is replaced.
            state: the state to save.
            info: JSON values that can be read without reading the state.
            blocking: whether to return only when the checkpoint is complete.

        Raises:
            CheckpointError: on all ranks, if the previous save failed on any rank (then this one does not start), if
                the state cannot be stored, if the ranks pass different steps or a negative one, or if ranks hold
                different values under one name.
        """
        self.wait()
        plan, number, digest, values, error = None, 0, 0, 0, None
        captured: Captured | None = None
        try:
            number = _step_number(step)
            info = json.loads(json.dumps(dict(info or {})))  # as it is now: the thread writes it later
            captured = state.capture(self._peers.rank)
            digest = layouts_digest(captured.shared.values)
            values = digest_of(fingerprints(captured, alike=True))
            plan = self._planned(captured, by_layout=True) if self._alike else None
        except Exception as caught:  # noqa: BLE001 (raised on all ranks below)
            error = caught
        # One exchange tells each rank whether any has failed, and the range of the steps and of the digests.
        failed, most, least, high, low, most_values, least_values = highest(
            self._peers, [int(error is not None), number, -number, digest, -digest, values, -values]
        )
        if failed:
            raise_together(self._peers, error, f"saving step {step}")
        if most != -least:
            raise CheckpointError(
                f"ranks save different steps, {-least} to {most}, this one {step}; "
                "call save with the same step on all ranks"
            )
        assert captured is not None
        self._alike = high == -low
        if not self._alike or most_values != -least_values:
            self._check_values(captured, f"saving step {step}", alike=self._alike)
        elif not replicas_agree(captured, self._peers):
            self._check_values(captured, f"saving step {step}", alike=False)
        if plan is None or not self._alike:
            holdings = gather_everywhere(self._peers, holding_of(captured.shared))
            with self._together(f"saving step {step}"):
                if not self._alike:
                    captured = replace(captured, shared=part_of(captured.shared, holdings, self._peers.rank))
                plan = self._planned(captured, by_layout=self._alike)
        assert plan is not None
        assert self._image is not None
        self._start(number, dict(info or {}), plan, self._image)
        if blocking:
            self.wait()

    def _check_values(self, captured: Captured, what: str, *, alike: bool) -> None:
        """Raises CheckpointError on all ranks if any two hold different values under one name. Collective."""
        found: Fingerprints = {}
        with self._together(what):
            found = fingerprints(captured, alike=alike)
        try:
            check_same(gather_everywhere(self._peers, found))
        except CheckpointError as error:
            raise CheckpointError(f"{what} failed: {error}") from None

    def _planned(self, captured: Captured, *, by_layout: bool) -> Plan:
        plan = make_plan(captured, self._peers.rank, by_layout=by_layout)
        pieces = (*plan.described, *plan.told)
        if any(file_of(value) is not None for value in plan.values):
            self._image = LiveImage(pieces)
            return plan
        pinned = any(value.device.type == "cuda" for value in plan.values)
        if self._image is None or self._image.pieces != pieces or self._image.pinned != pinned:
            self._image = None  # frees its memory first
            self._image = Image(pieces, pinned=pinned)
        return plan

    def _start(self, step: int, info: dict[str, Any], plan: Plan, image: Image | LiveImage) -> None:
        header = Header(step, self._peers.size, info)
        self._begun += 1
        token = f"{self._token}{self._begun:04x}"  # a failed save of this step may have left notes of its ranks
        self._save = Save(
            self._directory, token, header, self._peers.rank, plan, image, self._keep, self._timeout, self._others
        )
        self._save.start()

    def wait(self) -> None:
        """Returns when the last save is complete and its checkpoint is on disk. Collective.

        Raises:
            CheckpointError: on all ranks, if the save failed on any. Its files are removed, and earlier checkpoints are
                untouched.
        """
        save, self._save = self._save, None
        if save is None:
            return
        what = f"saving step {save.step} to {self._directory.path}"
        try:
            raise_together(self._peers, save.await_part(), what)
            raise_together(self._peers, save.await_commit(), what)
        except CheckpointError:
            save.abandon("writing failed on a rank")
            raise

    @property
    def progress(self) -> Progress | None:
        """The progress of the running save on this rank; None if no save is running. Not collective."""
        return None if self._save is None else self._save.progress

    # -- restoring ----------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[StoredCheckpoint]:
        """The complete checkpoints, oldest first. Not collective."""
        return self._directory.complete()

    def restore(
        self,
        state: TrainingState,
        *,
        step: int | None = None,
        source: str | Location | None = None,
        fallback: bool = False,
    ) -> Restored | None:
        """Fills the state from the newest complete checkpoint, whatever ranks and meshes saved it. Collective.

        The checksum of every byte is verified before the byte is used.

        Args:
            state: its tensors are filled in place; for the other parts, `load_state_dict` is called.
            step: restores this step, not the newest checkpoint. Newer ones stay, and the next restore takes the newest:
                remove them if the run is to continue from this step.
            source: restores this directory or URL: a checkpoint of another run, or one by torch.distributed.checkpoint
                (its tensors have no checksums) with the names that `TrainingState` uses.
            fallback: if a checkpoint is damaged, take the one before it; the damaged one is renamed to
                `step-*.damaged` and kept, and rank 0 logs a warning.

        Returns:
            The checkpoint that was restored; None if there is none, and then nothing has changed.

        Raises:
            DamagedCheckpointError: on all ranks, with the file. Tensors may be partly filled: do not train on.
            CheckpointError: on all ranks, if checkpoint and state do not match, or the requested checkpoint does not
                exist.
        """
        self.wait()
        damaged: dict[Location, str] = {}
        candidates = self._candidates(step, source)
        for number, path in enumerate(candidates):
            try:
                index = self._restore_one(path, state, any_writer=source is not None)
            except DamagedCheckpointError as seen:
                if not fallback or number == len(candidates) - 1:
                    older = not fallback and len(candidates) > 1
                    remedy = "pass fallback=True to take the checkpoint before it, or " if older else ""
                    raise DamagedCheckpointError(
                        f"{seen}; {remedy}copy its files again from where they are intact"
                    ) from seen
                damaged[path] = str(seen)
                continue
            with self._together("setting damaged checkpoints aside"):
                for one, reason in damaged.items() if self._peers.rank == 0 else ():
                    self._directory.set_aside(one, reason, path)
            return Restored(index.step, path, index.info, index.world_size, tuple(damaged.values()))
        return None

    def _restore_one(self, path: Location, state: TrainingState, *, any_writer: bool) -> Index:
        what = f"restoring {path}"
        index: Index | None = None
        unexpected: set[str] = set()
        with self._together(what):
            step = None if any_writer else int(path.name.split(".")[0].removeprefix("step-"))
            index = open_index(path) if step is None else StoredCheckpoint(path, step).read()
            unexpected = unexpected_names(index, state)
        assert index is not None
        if highest(self._peers, [len(unexpected)]) != [0]:  # another rank may have them: it holds other modules
            nobody = sorted(set.intersection(*gather_everywhere(self._peers, unexpected)))
            if nobody:
                raise CheckpointError(
                    f"{what} failed: the checkpoint does not fit the model: it has beside it {', '.join(nobody[:5])}"
                    f"{' ...' if len(nobody) > 5 else ''}; "
                    "build the model that was saved, or add the state that it lacks"
                )
        with self._together(what):
            restore_state(path, index, state, self._peers.rank, self._peers.size)
        return index

    def _candidates(self, step: int | None, source: str | Location | None) -> Sequence[Location]:
        """The checkpoints to try, newest first, as seen by rank 0."""
        found: list[Location] | None = None
        with self._together("looking for checkpoints"):
            if self._peers.rank == 0 and source is not None:
                found = [location_of(source).absolute()]
            elif self._peers.rank == 0:
                there = self.checkpoints()
                have = [one.step for one in there]
                found = [one.path for one in reversed(there) if step is None or one.step <= step]
                if step is not None and step not in have:
                    raise CheckpointError(
                        f"{self._directory.path} has no checkpoint of step {step}, only of {have}; choose one of them"
                    )
        return self._peers.from_rank0(found)

    # -- ends ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """An error raised in the block on any rank is raised on all ranks at its end. Collective."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 (raised on all ranks)
            error = caught
        raise_together(self._peers, error, what)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the last save, unless an exception is being raised: other ranks may not wait then."""
        if kind is None:
            self.wait()
