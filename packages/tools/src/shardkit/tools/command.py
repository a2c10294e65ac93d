"""The `shardkit` command: one tree of commands, from this package and other installed ones.

Nothing here imports torch, so that help appears at once. The code of each command is in `<tool>/command.py`, imported
when it runs. Other distributions add commands through the entry point group `shardkit.commands`: functions
`main(arguments: Sequence[str] | None) -> int`. If a distribution also has a module `shardkit.commands.<name>`, its
`parse(arguments)` runs first, so that help and option errors do not import the command's code.

Exit status of every command: 0 success, 1 a checked condition does not hold, 2 bad input or usage, 3 a fault of
shardkit. `profile`, `watch` and `run` return the training command's status.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from shardkit.autoinstall import NEEDS_FSDP1
from shardkit.tools.quantities import dtype_name

_GROUP = "shardkit.commands"
# Summaries of commands in `shardkit --help`: 60 characters at most, so that they fit beside the names in a terminal.
_SUMMARIES = {
    "checkpoint": "Inspects, verifies, compares and converts checkpoints.",
    "migrate": "Converts checkpoints of FSDP1.",
}
_NO_MIGRATE = "Not installed: needs shardkit-legacy-fsdp-compat."
DTYPES = ("float32", "bfloat16", "float16")
_PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status. Every error is printed as one line on standard error."""
    from shardkit.tools.files import InputError
    from shardkit.tools.terminal import print_error

    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        status = tree.main(words or ["--help"], "shardkit", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "shardkit"
        print_error(f"{error.format_message()} ({where} --help says more)")
        return 2
    except (InputError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print_error(str(error))
        return 2
    except (KeyboardInterrupt, click.Abort):
        return 130
    except Exception as error:
        if os.environ.get("SHARDKIT_TRACEBACK"):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        print_error(
            f"this is a fault of shardkit, please report it: {type(error).__name__}: {error} (line {place.lineno} of "
            f"{place.filename}; SHARDKIT_TRACEBACK=1 shows all of it)"
        )
        return 3
    return status if isinstance(status, int) else 0


class _Tree(click.Group):
    """The commands of this package, and those that entry points name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group=_GROUP).names, "migrate"})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        foreign = entry_points(group=_GROUP, name=cmd_name) if own is None else ()
        if cmd_name == "migrate" and not foreign:
            return _forwarding("migrate", _without_migrate, _NO_MIGRATE)
        return _command_of(tuple(foreign)[-1]) if foreign else own


def _command_of(entry: EntryPoint) -> click.Command:
    """A command of another distribution, which parses its own arguments."""

    def run(arguments: tuple[str, ...]) -> int:
        parser = f"{_GROUP}.{entry.name}"
        if find_spec(_GROUP) is not None and find_spec(parser) is not None:
            parse = getattr(import_module(parser), "parse", None)
            if parse is not None:
                parse(list(arguments))
        status: int = entry.load()(list(arguments))
        return status

    origin = f"Of {entry.dist.name}." if entry.dist is not None else ""
    return _forwarding(entry.name, run, _SUMMARIES.get(entry.name, origin))


def _forwarding(name: str, run: Callable[[tuple[str, ...]], int], summary: str) -> click.Command:
    arguments = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    return click.Command(
        name,
        context_settings=_PASSED_ON,
        add_help_option=False,
        params=[arguments],
        callback=run,
        short_help=summary,
    )


def _without_migrate(arguments: tuple[str, ...]) -> int:
    raise click.UsageError(f"'migrate' {NEEDS_FSDP1}")


@click.command(
    cls=_Tree,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 fine, 1 a check failed, 2 bad input, 3 a fault of shardkit.",
)
@click.version_option(package_name="shardkit-tools", message=f"%(package)s %(version)s, torch {version('torch')}")
def tree() -> None:
    """Tools for training with shardkit: before a run, during it and after it."""


# -- parameter types of options ----------------------------------------------------------------------------------------


class _Bytes(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic from 8.5 on
    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from shardkit.tools.quantities import parse_quantity

        if isinstance(value, int):
            return value
        try:
            nbytes = int(parse_quantity(value, "bytes"))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if value.strip()[-1].isdecimal():
            self.fail(f"'{value}' has no unit; did you mean {value.strip()}GiB?", param, ctx)
        if nbytes < 1:
            self.fail(f"'{value}' is nothing; expected an amount such as 80GiB", param, ctx)
        return nbytes


class _Dtype(click.Choice):  # type: ignore[type-arg, unused-ignore]  # generic from 8.2 on
    """A dtype by its name or its short one, in any case."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(dtype_name(value), param, ctx)


_COUNT = click.IntRange(min=1)
_FILE = click.Path(path_type=Path)
_BYTES = _Bytes()


_JOB_OPTIONS = [
    click.Argument(["model"], required=False),
    click.Option(["--hf-config"], type=_FILE, help="a Hugging Face config.json in place of a model (extra: hf)"),
    click.Option(["--inputs"], metavar="NAME", help="pkg.module:name of a function that makes a micro-batch"),
    click.Option(["--vocabulary"], type=_COUNT, help="micro-batches are token ids below this"),
    click.Option(["--batch"], type=_COUNT, help="sequences of a micro-batch of token ids (default 1)"),
    click.Option(["--sequence"], type=_COUNT, help="tokens of a sequence (default 2048)"),
    click.Option(
        ["--optimizer"], default="adamw", help="adamw, fused-adamw, adam, sgd, momentum, muon or pkg.module:name"
    ),
    click.Option(["--machine"], default="h100", help="a preset (default h100), a file.json, or this (measures it)"),
    click.Option(["--expandable-segments"], is_flag=True, help="as PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    click.Option(["--wrap"], help="FQNs or class names to shard by themselves (default: repeated blocks)"),
    click.Option(
        ["--placements"], metavar="NAME", help="auto, or pkg.module:name of a function: model -> shard_placement_fn"
    ),
    click.Option(
        ["--dtype"],
        type=_Dtype(("own", *DTYPES)),
        help="dtype of computation (default: own, the model's; the config's for --hf-config)",
    ),
    click.Option(
        ["--param-dtype"],
        type=_Dtype(("own", *DTYPES)),
        help="dtype of parameters (default: own, the model's; float32 for --hf-config)",
    ),
    click.Option(
        ["--optimizer-dtype"], type=_Dtype(DTYPES), help="dtype of optimizer state (default: the parameters')"
    ),
    click.Option(["--master-weights"], is_flag=True, help="the optimizer steps copies of the parameters in float32"),
    click.Option(["--reduce-dtype"], type=_Dtype(("own", *DTYPES)), help="dtype of gradient reduction"),
    click.Option(["--prefetch"], type=click.IntRange(min=0), help="groups gathered ahead (default 1)"),
    click.Option(["--tp-plan"], metavar="NAME", help="pkg.module:name of a function that cuts a model over a mesh"),
    click.Option(["--checkpoint"], is_flag=True, default=None, help="recompute activations of wrapped modules"),
    click.Option(["--selective"], is_flag=True, help="recompute all but matrix products and attention"),
    click.Option(["--offload"], is_flag=True, default=None, help="keep shards and optimizer state in host memory"),
    click.Option(
        ["--overlap-step"], is_flag=True, default=None, help="the step on the host runs under the next forward"
    ),
    click.Option(["--resident"], type=_BYTES, help="optimizer state in files, with at most this of it in host memory"),
    click.Option(["--offload-activations"], is_flag=True, default=None, help="keep activations in host memory"),
    click.Option(["--host-memory"], type=_BYTES, help="memory of a host, such as 1TB (default: the machine's)"),
    click.Option(["--storage"], type=_BYTES, help="disks of a host (default: the machine's)"),
    click.Option(["--storage-bandwidth"], type=_BYTES, help="bytes that a rank reads or writes a second, such as 2GB"),
    click.Option(["--accumulate"], type=_COUNT, help="micro-batches of an iteration (default 1)"),
]

# For these settings a plan finds the values.
_CHOSEN_OPTIONS = [
    click.Option(
        ["--world-size", "--mesh", "mesh"],
        default="8",
        help="ranks, or axis=size,... of dp_replicate, dp_shard, cp, tp (default 8)",
    ),
    click.Option(["--reshard"], help="after forward: true, false, default or a number of ranks"),
    click.Option(["--prefetch-budget"], type=_BYTES, help="bytes unsharded at a time, such as 2GiB"),
]

# Of each pair only one may be given.
_EXCLUSIVE = (
    ("model", "hf_config"),
    ("vocabulary", "hf_config"),
    ("inputs", "hf_config"),
    ("inputs", "vocabulary"),
    ("inputs", "batch"),
    ("inputs", "sequence"),
    ("prefetch", "prefetch_budget"),
    ("accumulate", "global_batch"),
)


def _checked(options: dict[str, Any]) -> SimpleNamespace:
    for first, second in _EXCLUSIVE:
        if options.get(first) is not None and options.get(second) is not None:
            names = [name if name == "model" else f"--{name.replace('_', '-')}" for name in (first, second)]
            raise click.UsageError(f"{names[0]} and {names[1]} exclude each other; give one of them")
    return SimpleNamespace(**options)


# -- the commands ------------------------------------------------------------------------------------------------------


@tree.command(
    params=[*_JOB_OPTIONS, *_CHOSEN_OPTIONS], short_help="Predicts memory, communication and time of a training job."
)
@click.option("--rank", type=click.IntRange(min=0), default=0, help="the rank to estimate (default 0)")
@click.option("--json", type=_FILE, help="writes the estimate to this file")
@click.option("--show-machine", metavar="NAME", help="prints a machine's description and ends")
def estimate(**options: Any) -> int:
    """Memory, communication and time of a training job, without running it.

    Runs one iteration with tensors that have no data, as one rank of a world that does not exist. Nothing is downloaded
    and no device is needed.
    """
    from shardkit.tools.estimating.command import run

    return run(_checked(options))


@tree.command(params=[*_JOB_OPTIONS], short_help="Proposes ways to shard a model that fit a memory limit.")
@click.option("--world-size", type=_COUNT, default=8, help="ranks (default 8)")
@click.option("--memory", type=_BYTES, help="limit for each rank, such as 80GiB (default: the machine's memory)")
@click.option("--micro-batch", type=_COUNT, help="samples of the smallest micro-batch (default: the job's own)")
@click.option("--most-micro-batch", type=_COUNT, help="samples of the largest one (default: 8 times the smallest)")
@click.option("--global-batch", type=_COUNT, help="samples of all ranks in an iteration (default: a micro-batch each)")
@click.option("--margin", type=click.FloatRange(0, 100, max_open=True), default=6.0,
              help="per cent of the limit to keep free, because estimates err (default 6)")  # fmt: skip
@click.option("--count", type=_COUNT, default=5, help="how many proposals (default 5)")
@click.option("--format", type=click.Choice(["code", "accelerate", "torchtitan"]), default="code",
              help="the first proposal as Python, a file of accelerate, or options of torchtitan")  # fmt: skip
@click.option("--write", type=_FILE, help="writes the first proposal in this format to this file")
@click.option("--json", type=_FILE, help="writes all proposals to this file")
def plan(**options: Any) -> int:
    """Ways to shard a model that fit a memory limit, fastest first; the first as code or as a configuration.

    Tries meshes, reshard policies, recomputation, micro-batches, prefetching and tensor parallelism;
    estimates each; and proposes those that stay below the limit and differ by more than an estimate may err.
    """
    from shardkit.tools.planning.command import run

    return run(_checked(options))


_INSTALL_OPTIONS = [
    click.Option(["--fsdp1"], is_flag=True, help="replace FullyShardedDataParallel and its names as well"),
    click.Option(["--strict"], is_flag=True, help="exit with 1 if no sharded model ran on shardkit's engine"),
    click.Argument(["command"], nargs=-1, required=True, type=click.UNPROCESSED),
]


@tree.command(
    params=[*_INSTALL_OPTIONS],
    context_settings=_PASSED_ON,
    short_help="Runs a training command and records steps of every rank.",
)
@click.option("--out", type=_FILE, default=Path("report.json"), help="the report (default: report.json)")
@click.option("--html", type=_FILE, help="also write it as one HTML page")
@click.option("--trace", type=_FILE, help="also write a trace for ui.perfetto.dev")
@click.option("--warmup", type=click.IntRange(min=0), default=1, help="steps to leave out (default 1)")
@click.option("--steps", type=_COUNT, default=10, help="steps to record (default 10)")
@click.option("--no-activations", is_flag=True, help="do not count what autograd saves; costs less")
@click.option("--records", type=_FILE, help="keep the records of the ranks in this directory, which all hosts share")
@click.option("--watch", is_flag=True, help="also say who is missing when a collective waits too long")
def profile(**options: Any) -> int:
    """Runs a training COMMAND as `shardkit run` does, records some steps of every rank, and writes a report.

    Example: shardkit profile --html run.html torchrun --nproc-per-node 2 train.py
    """
    from shardkit.tools.profiling.command import run

    return run(_checked(options))


@tree.command(short_help="Shows a report of a profile, compares two, checks limits.")
@click.argument("reports", metavar="REPORT [REPORT]", nargs=-1, required=True, type=_FILE)
@click.option("--html", type=_FILE, help="write the (last) report as one HTML page")
@click.option("--trace", type=_FILE, help="write the (last) report as a trace for ui.perfetto.dev")
@click.option("--estimate", type=_FILE, help="a result of `shardkit estimate --json` to stand beside it")
@click.option("--json", type=_FILE, help="write the report again as JSON, with the estimate in it")
@click.option("--fail-on", multiple=True, metavar="LIMIT", help="exit with 1 if it is broken, such as peak_memory>+5%, "
              "step_time>2s")  # fmt: skip
def report(**options: Any) -> int:
    """Shows a report of `shardkit profile`, compares two, and fails when a limit is broken."""
    from shardkit.tools.report.command import run

    if len(options["reports"]) > 2:
        raise click.UsageError(f"{len(options['reports'])} reports were given; expected one, or two to compare")
    return run(_checked(options))


@tree.command(short_help="Finds what costs a run time and memory.")
@click.argument("report", type=_FILE)
@click.option("--json", type=_FILE, help="also write the findings as JSON")
def doctor(**options: Any) -> int:
    """Finds what costs a run time and memory, and says what to change."""
    from shardkit.tools.doctor import run

    return run(_checked(options))


@tree.command(
    params=[*_INSTALL_OPTIONS],
    context_settings=_PASSED_ON,
    short_help="Runs a training command and names the rank it hangs on.",
)
@click.option(
    "--seconds", type=click.FloatRange(0, 1e6, min_open=True), default=60.0, help="limit of a wait (default 60)"
)
def watch(seconds: float, command: tuple[str, ...], **options: bool) -> int:
    """Runs a training COMMAND as `shardkit run` does, and says who is missing when a collective waits too long.

    Every rank that can be reached reports where it is, and one of them writes who is missing to its stderr.
    """
    from shardkit.autoinstall.run import run
    from shardkit.tools.watch import WATCH, WATCH_SECONDS

    return run(command, name="watch", variables={WATCH: "1", WATCH_SECONDS: str(seconds)}, **options)


@tree.command(
    params=[*_INSTALL_OPTIONS],
    context_settings=_PASSED_ON,
    short_help="Runs a training command with shardkit in place of FSDP.",
)
@click.option("--profile", "profiled", is_flag=True, help="also record some steps, as `shardkit profile` does")
@click.option("--watch", "watched", is_flag=True, help="also say who is missing, as `shardkit watch` does")
@click.pass_context
def run(ctx: click.Context, /, profiled: bool, watched: bool, **options: Any) -> int:
    """Runs a training COMMAND with shardkit in place of torch's own FSDP.

    COMMAND is script.py with its arguments, or a launcher. No script is changed. Example: shardkit run torchrun
    --nproc-per-node 2 train.py
    """
    from shardkit.autoinstall.run import run as run_installed

    if profiled:
        status: int = ctx.invoke(profile, watch=watched, **options)
    else:
        status = ctx.invoke(watch, **options) if watched else run_installed(**options)
    return status
