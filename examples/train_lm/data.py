"""Text as bytes: which files, which part is held out, and which bytes each step reads.

The batch of a step is a pure function of (seed, step, index of the sample in the global batch). Nothing is kept
between steps and nothing depends on the number of processes, so a run can stop at any step and go on anywhere.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from errors import UserError

HELD_OUT_EVERY = 20
"""One file in so many is held out; with fewer files, one byte in so many, at the end of the text."""

HELD_OUT_SAMPLES = 32
"""Sequences in a validation; they lie evenly spread over the held-out text."""

IGNORED = -100
"""The target that `cross_entropy` leaves out."""


@dataclass(frozen=True)
class Corpus:
    """The text of a run, as two arrays of bytes."""

    train: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]
    files: int
    fingerprint: str
    """Of all bytes in order: tells whether a resumed run reads the text that it started with."""


def load_corpus(paths: Sequence[Path], context: int) -> Corpus:
    """Read the files, and all `.py`, `.txt`, `.md` and `.rst` files below the directories, of `paths`, in sorted order.

    Without paths, the Python standard library's own sources. Raises `UserError` for a path that does not exist, a file
    that cannot be read, and a text too short for one sequence of `context` bytes in each part.
    """
    files = [file for path in paths for file in text_files(path)] if paths else standard_library()
    texts = [read(file) for file in files]
    if len(texts) >= HELD_OUT_EVERY:
        held_out = b"".join(texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        train = b"".join(text for i, text in enumerate(texts) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1)
    else:
        text = b"".join(texts)
        cut = len(text) - len(text) // HELD_OUT_EVERY
        train, held_out = text[:cut], text[cut:]
    if min(len(train), len(held_out)) <= context:
        where = ", ".join(map(str, paths)) or "the standard library"
        raise UserError(
            f"too little text in {where}: {len(train)} bytes to train on and {len(held_out)} held out from "
            f"{len(files)} files, but a sequence takes --context {context} + 1 of each; "
            "give more text or a smaller --context"
        )
    fingerprint = hashlib.sha256(train + b"|" + held_out).hexdigest()
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), len(files), fingerprint)


def text_files(path: Path) -> list[Path]:
    """`path` itself if it is a file, else the text files below it."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"--data {path}: no such file or directory")
    if not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"--data {path}: cannot be read: permission denied")
    files = sorted(file for file in path.rglob("*") if file.suffix in {".py", ".txt", ".md", ".rst"} and file.is_file())
    if not files:
        raise UserError(f"--data {path}: no .py, .txt, .md or .rst files below it; name the files themselves")
    return files


def standard_library() -> list[Path]:
    """The sources of the running Python, without its tests and without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    return sorted(file for file in root.rglob("*.py") if not left_out.intersection(file.relative_to(root).parts))


def read(file: Path) -> bytes:
    """All bytes of a file."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"--data {file}: cannot be read: {(error.strerror or str(error)).lower()}") from error


def train_batch(corpus: Corpus, seed: int, step: int, samples: range, context: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, int64 [len(samples), context], of these samples of the step's global batch."""
    last = len(corpus.train) - context
    starts = [int(np.random.default_rng((seed, step, sample)).integers(last)) for sample in samples]
    return sequences(corpus.train, starts, context)


def held_out_batches(corpus: Corpus, rank: int, world: int, size: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of the validation, at most `size` samples at a time, the same number of batches on every rank.

    Every rank has to make the same number of forwards, because each is a collective; where the samples do not divide,
    a rank repeats the first one with targets that do not count.
    """
    starts = np.linspace(0, len(corpus.held_out) - context - 1, HELD_OUT_SAMPLES).astype(int)
    share = -(-HELD_OUT_SAMPLES // world)
    mine = [rank + world * i for i in range(share)]
    for at in range(0, share, size):
        part = mine[at : at + size]
        numbers = [i if i < HELD_OUT_SAMPLES else 0 for i in part]
        tokens, targets = sequences(corpus.held_out, [int(starts[i]) for i in numbers], context)
        targets[[i >= HELD_OUT_SAMPLES for i in part]] = IGNORED
        yield tokens, targets


def sequences(text: npt.NDArray[np.uint8], starts: Sequence[int], context: int) -> tuple[Tensor, Tensor]:
    """Bytes `start ... start + context - 1` and the ones that follow each."""
    rows = torch.from_numpy(np.stack([text[start : start + context + 1] for start in starts]).astype(np.int64))
    # Copies: as views the two would overlap, and leaving out a target would change a token.
    return rows[:, :-1].clone(), rows[:, 1:].clone()
