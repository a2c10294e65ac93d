"""Many programs by hand: counts of outcomes by kind, and every distinct counterexample, made small, in a file."""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.core.random_programs.program import Program
from tests.core.random_programs.ranks import Outcome, run_programs
from tests.core.random_programs.reduction import reduced
from tests.core.random_programs.strategies import WORLDS, FromSeed, drawn_program
from tests.support import close_pools

_BATCH = 25


class Campaign:
    """Runs programs in batches of one world size and remembers its findings."""

    def __init__(self, engine: str, output: Path | None, tries: int, keep: int) -> None:
        self.engine = engine
        self.output = output
        self.tries = tries
        self.keep = keep
        self.kinds: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.found: dict[str, list[tuple[Program, Outcome]]] = defaultdict(list)
        self.waiting: dict[int, list[Program]] = defaultdict(list)
        self.began = time.monotonic()

    def add(self, program: Program) -> None:
        """Run ``program`` once enough of its world size have come."""
        batch = self.waiting[program.policy.world]
        batch.append(program)
        if len(batch) >= _BATCH:
            self._run(program.policy.world)

    def finish(self) -> None:
        """Run the programs that still wait, then make every finding small."""
        for world in list(self.waiting):
            self._run(world)
        reported: set[str] = set()
        for signature, examples in sorted(self.found.items()):
            for program, outcome in sorted(examples, key=lambda example: len(repr(example[0])))[: self.keep]:
                small = reduced(program, lambda one, s=signature: self._outcome(one).signature == s, self.tries)
                if repr(small) not in reported:
                    reported.add(repr(small))
                    again = outcome if small == program else self._outcome(small)
                    self._report("made small", signature, small, again)
        close_pools()

    def _run(self, world: int) -> None:
        batch = self.waiting.pop(world, [])
        if not batch:
            return
        for program, outcome in zip(batch, run_programs(batch, self.engine), strict=True):
            self.kinds[outcome.kind] += 1
            if outcome.kind != "equal":
                self.messages[outcome.signature] += 1
            if not outcome.good:
                self.found[outcome.signature].append((program, outcome))
                if len(self.found[outcome.signature]) == 1:
                    self._report("as found", outcome.signature, program, outcome)
        total = sum(self.kinds.values())
        print(f"{total} programs, {time.monotonic() - self.began:.0f} s: {dict(self.kinds)}", flush=True)

    def _outcome(self, program: Program) -> Outcome:
        return run_programs([program], self.engine, timeout=40.0)[0]

    def _report(self, state: str, signature: str, program: Program, outcome: Outcome) -> None:
        text = f"# {state}: {signature} ({self.messages[signature]} times)\n{program!r}\n"
        text += "".join(f"#   {line}\n" for line in outcome.message.splitlines()[:30])
        print(text, flush=True)
        if self.output is not None:
            with self.output.open("a") as file:
                file.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0, help="number of the first program of this seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("ours", "stock"), default="ours")
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--keep", type=int, default=3, help="programs to make small for each kind of finding")
    parser.add_argument("--tries", type=int, default=300, help="programs to try while making a finding small")
    arguments = parser.parse_args()
    campaign = Campaign(arguments.engine, arguments.output, arguments.tries, arguments.keep)

    for number in range(arguments.start, arguments.start + arguments.count):
        campaign.add(drawn_program(FromSeed(f"{arguments.seed}/{number}"), tuple(arguments.worlds)))
    campaign.finish()
    print("by message:")
    for message, count in campaign.messages.most_common():
        print(f"{count:6d}  {message}")
