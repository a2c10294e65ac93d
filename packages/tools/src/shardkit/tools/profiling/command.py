"""`shardkit profile`: runs a training command with every rank recorded, and writes the report."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

from shardkit.autoinstall.run import run as run_installed
from shardkit.tools.files import InputError, check_targets
from shardkit.tools.profiling.session import ACTIVATIONS, STEPS, TARGET, WARMUP
from shardkit.tools.report.command import print_report, say_written, write_outputs
from shardkit.tools.report.files import is_record, read_records
from shardkit.tools.report.merge import merge
from shardkit.tools.terminal import print_error
from shardkit.tools.watch import WATCH


def run(options: SimpleNamespace) -> int:
    """Runs the command; returns its exit status, or 2 if nothing is recorded. Raises `InputError` and `ReportError`."""
    outputs = (options.out, options.html, options.trace)
    check_targets(*outputs)
    with tempfile.TemporaryDirectory(prefix="shardkit-profile-") as directory:
        records: Path = options.records or Path(directory)
        _clear(records)
        settings = {
            TARGET: str(records.resolve()),
            WARMUP: str(options.warmup),
            STEPS: str(options.steps),
            ACTIVATIONS: str(int(not options.no_activations)),
        }
        if options.watch:
            settings[WATCH] = "1"
        status = run_installed(
            options.command, fsdp1=options.fsdp1, strict=options.strict, name="profile", variables=settings
        )
        recorded = any(records.glob("rank-*.json"))
        if status:
            told = "reporting what was recorded" if recorded else "nothing was recorded"
            print_error(f"the command ended with status {status}; {told}")
        elif not recorded:
            print_error("nothing was recorded")
        if not recorded:
            return status or 2
        report = merge(read_records(records), list(options.command))
    write_outputs(report, *outputs)
    print_report(report)
    say_written(*outputs)
    return status


def _clear(records: Path) -> None:
    """Makes the directory, and deletes the records of an earlier run, nothing else. Raises `InputError`."""
    try:
        records.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--records {records} cannot be made: {error.strerror}; choose another directory") from error
    old = list(records.glob("rank-*.json"))
    foreign = next((path for path in old if not is_record(path)), None)
    if foreign is not None:
        raise InputError(f"{foreign} is not a record of a rank, so it is not deleted; choose another directory")
    for path in old:
        path.unlink()
