"""Output of commands: tables, progress and errors. Text from files cannot control the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

# Control characters of ASCII and Latin-1, except the end of a line.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if code != ord("\n")}
_CONTROLS |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


class _WithoutControls(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(segment.text.translate(_CONTROLS), segment.style)


# The width of a pipe or a file, which programs read line by line.
_ENDLESS = 1_000_000


def terminal(*, stderr: bool = False) -> Console:
    """Standard output, or standard error; control characters in the text are printed as escapes.

    If it is not a terminal, nothing is wrapped: each line, and each row of a table, is one line at its full width.
    """
    console = _WithoutControls(stderr=stderr, markup=False, highlight=False, soft_wrap=stderr)
    if not console.is_terminal:
        console.width = _ENDLESS
    return console


def print_error(text: str) -> None:
    terminal(stderr=True).print(f"error: {' '.join(text.split())}")


class _Grid(Table):
    """A table with its title on a separate line; a title of rich is as narrow as its table."""

    def __init__(self, head: str) -> None:
        super().__init__(box=None, pad_edge=False)
        self._head = head

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._head:
            yield Text(self._head, style="bold")
        yield from super().__rich_console__(console, options)


def grid(*heads: str, title: str = "", left: int = 1) -> Table:
    """A table without lines: the first `left` columns are text, the others numbers."""
    table = _Grid(title)
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < left else "right", overflow="fold")
    return table


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Shows progress on a terminal; gives a function to call with (done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = terminal(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
