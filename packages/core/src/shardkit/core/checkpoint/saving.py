"""One save of this rank, from staged memory to a visible checkpoint, in a thread beside the training.

The thread hashes, writes and syncs large ranges of memory, all of which leave the interpreter to the training thread.
It is no daemon: a script that ends with a save on its way ends when that is on disk.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from shardkit.core.checkpoint.commit import (
    Header,
    Image,
    await_parts,
    build_index,
    remove_notes,
    write_index,
    write_part,
)
from shardkit.core.checkpoint.directory import CheckpointDirectory, OtherRuns, writing_in
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.plan import Plan

__all__ = ["Progress", "Save"]

_LOG = logging.getLogger(__name__)

_GRACE_SECONDS = 60.0
"""How long the committing rank waits for the others once its own training has ended."""


@dataclass(frozen=True)
class Progress:
    """How far a save has come on this rank; `phase` is "writing", "committing", "done" or "failed"."""

    step: int
    phase: str
    written_bytes: int
    total_bytes: int


class Save:
    """A save on its way. Nothing here is collective."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        token: str,
        header: Header,
        rank: int,
        plan: Plan,
        image: Image,
        keep: int | None,
        timeout: float,
        others: OtherRuns | None = None,
    ) -> None:
        self._directory, self._token, self._header, self._rank = directory, token, header, rank
        self._plan, self._image, self._keep, self._timeout, self._others = plan, image, keep, timeout, others
        self._temporary = directory.hidden(header.step, token, "incomplete")
        self._total = image.memory.numel() + sum(len(data) for _, data in plan.objects)
        self._written = 0
        self._phase = "writing"
        self._began = time.monotonic()
        self._ended: float | None = None
        self._abandoned: str | None = None
        self._part_done = threading.Event()
        self._part_error: Exception | None = None
        self._commit_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{header.step}")

    def start(self) -> None:
        """Stages and begins to write. What fails here fails the save: all ranks hear of it when they wait."""
        try:
            self._image.fill(self._plan.values)
            self._plan.values.clear()  # which may be tensors that nobody else holds
            self._thread.start()
        except Exception as error:  # noqa: BLE001 (the other ranks have begun, this one must not raise alone)
            self._fail(error)

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self._header.step

    @property
    def progress(self) -> Progress:
        """How far it has come."""
        return Progress(self.step, self._phase, self._written, self._total)

    def await_part(self) -> Exception | None:
        """Waits until this rank's part is on disk; gives the error if it is not. The image may be changed from then."""
        self._part_done.wait()
        return self._part_error

    def await_commit(self) -> Exception | None:
        """Waits until the checkpoint is visible, on the rank that commits; elsewhere as `await_part`."""
        self._join()
        return self._part_error or self._commit_error

    def abandon(self, reason: str) -> None:
        """Has a commit that waits for other ranks give up, and removes what is there, now that no rank writes to it."""
        self._abandoned = reason
        self._join()
        self._remove()

    def _join(self) -> None:
        if self._thread.ident is not None:  # else it was never started
            self._thread.join()

    def _run(self) -> None:
        try:
            with writing_in(self._temporary):
                write_part(self._temporary, self._rank, self._image.bytes(), self._plan, self._count)
                self._part_done.set()
                if self._rank == 0:
                    self._phase = "committing"
                    self._commit(self._temporary)
            self._phase = "done"
        except BaseException as error:  # noqa: BLE001 (the training thread raises it, whatever ended this one)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        _LOG.error("saving step %d to %s failed: %s", self.step, self._directory.path, error)
        if not isinstance(error, Exception):
            error = CheckpointError(f"the thread that writes was ended by {error!r}")
        self._phase = "failed"
        if self._part_done.is_set():
            self._commit_error = error
            self._remove()
        else:
            self._part_error = error  # `abandon` removes what is there: other ranks may be writing now
            self._part_done.set()

    def _remove(self) -> None:
        if self._rank == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _count(self, nbytes: int) -> None:
        self._written += nbytes

    def _commit(self, temporary: Path) -> None:
        parts = await_parts(temporary, self._header.world_size, self._gone)
        write_index(temporary, build_index(self._header, self._plan.layouts, parts))
        remove_notes(temporary, self._header.world_size)
        if self._others is not None:
            self._others.make_way(temporary)
        self._directory.publish(temporary, self.step, self._token)
        if self._keep is not None:
            self._directory.retire(self._keep, self.step, self._token)

    def _gone(self) -> str | None:
        """Why a commit waits no longer for the other ranks."""
        now = time.monotonic()
        if self._abandoned is not None:
            return self._abandoned
        if now - self._began > self._timeout:
            return f"they had {self._timeout:g} s"
        if not threading.main_thread().is_alive():
            self._ended = self._ended or now
            if now - self._ended > _GRACE_SECONDS:
                return f"the training ended {_GRACE_SECONDS:g} s ago on this rank"
        return None
