"""The commands and their options, read from the parsers that run them."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Callable, Iterator, Sequence

import click

from shardkit.core.checkpoint import command as checkpoint
from shardkit.legacy_fsdp_compat.migrate import command as migrate
from shardkit.tools.command import tree

_OWN_PARSERS: dict[str, tuple[Callable[[Sequence[str]], int], tuple[tuple[str, ...], ...]]] = {
    "checkpoint": (
        checkpoint.main,
        ((), ("inspect",), ("verify",), ("diff",), ("export",), ("import",), ("reshard",)),
    ),
    "migrate": (migrate.main, ((), ("script",))),
}
"""Commands of other packages: each parses its own arguments, also those of its subcommands."""


def page() -> str:
    """The page: each command's own `--help`."""
    lines = [
        "# Commands",
        "",
        "Generated from the parsers. [The tools](tools.md) describes the options of all commands. Without",
        "shardkit-tools, `python -m shardkit.core checkpoint`, `python -m shardkit.core run` and",
        "`python -m shardkit.legacy_fsdp_compat migrate` are the same commands.",
        "",
        *_section("shardkit", _help_of_click(tree, "shardkit")),
    ]
    for name in sorted({*tree.commands, *_OWN_PARSERS}):
        lines += _sections_of(name)
    return "\n".join(lines)


def _sections_of(name: str) -> Iterator[str]:
    if name not in _OWN_PARSERS:
        yield from _section(f"shardkit {name}", _help_of_click(tree.commands[name], f"shardkit {name}"))
        return
    main, subcommands = _OWN_PARSERS[name]
    for words in subcommands:
        yield from _section(" ".join(("shardkit", name, *words)), _help_of_argparse(main, words))


def _section(title: str, text: str) -> list[str]:
    return [f"## `{title}`", "", "```text", textwrap.dedent(text).strip("\n"), "```", ""]


def _help_of_click(command: click.Command, name: str) -> str:
    context = click.Context(command, info_name=name, terminal_width=100, max_content_width=100)
    return command.get_help(context)


def _help_of_argparse(main: Callable[[Sequence[str]], int], words: tuple[str, ...]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    if not printed.getvalue():
        raise ValueError(f"{' '.join(words)} --help printed nothing")
    return printed.getvalue()
