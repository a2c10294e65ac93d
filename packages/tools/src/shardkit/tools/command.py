"""The `shardkit` command: hands its arguments to a sub-command, or lists those that are installed.

A sub-command is an entry point of the group `shardkit.commands`, of any distribution: a function
`main(arguments: Sequence[str] | None) -> int` whose module's docstring begins with one line about it. It is imported
when it is asked for.
"""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from rich.console import Console
from rich.table import Table


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a command and returns its exit status: 128 + the signal if one ended it, 127 if it cannot be started.

    Ctrl-C reaches the command too, which then ends its ranks; it is waited for. SIGTERM is handed on.
    """
    try:
        process = subprocess.Popen(command, env=dict(environment))
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be run: {error.strerror}\n")
        return 127
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        status = _outcome(process)
    finally:
        signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else 128 - status


def _outcome(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


_GROUP = "shardkit.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns its exit status; without one, lists what is installed and returns 0."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands = installed_commands()
    if not arguments or arguments[0] in ("-h", "--help"):
        _list(commands)
        return 0
    name, *rest = arguments
    if name not in commands:
        known = ", ".join(commands) or "none"
        Console(stderr=True).print(f"error: there is no command '{name}'; installed are: {known}", markup=False)
        return 2
    run: Callable[[Sequence[str]], int] = commands[name].load()
    return run(rest)


def installed_commands() -> dict[str, EntryPoint]:
    """The sub-commands of all installed distributions, by name; of two that share a name, the first found."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=_GROUP), key=lambda one: one.name):
        found.setdefault(entry.name, entry)
    return found


def _list(commands: dict[str, EntryPoint]) -> None:
    table = Table("command", "does", "from", box=None, pad_edge=False)
    for name, entry in commands.items():
        table.add_row(name, _summary(entry), entry.dist.name if entry.dist is not None else "?")
    console = Console()
    console.print("usage: shardkit COMMAND ...; shardkit COMMAND --help says more\n", markup=False)
    console.print(table)


def _summary(entry: EntryPoint) -> str:
    """The first line of the docstring of a command's module; an installation that is broken is told, not hidden."""
    try:
        function = entry.load()
    except (ImportError, AttributeError) as error:
        return f"cannot be loaded: {error}"
    documented = inspect.getdoc(inspect.getmodule(function)) or ""
    return documented.partition("\n")[0].partition(": ")[2] or documented.partition("\n")[0]
