"""Many programs by hand: counts of outcomes by kind, and the shortest counterexamples of each kind."""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict

from tests.core.random_programs.program import Program
from tests.core.random_programs.ranks import Outcome, run_programs
from tests.core.random_programs.strategies import drawn_program
from tests.support import close_pools

_SHOWN = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0, help="number of the first program of this seed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds: Counter[str] = Counter()
    found: dict[str, list[tuple[Program, Outcome]]] = defaultdict(list)
    began = time.monotonic()
    numbers = range(options.start, options.start + options.count)
    for program, outcome in run_programs([drawn_program(f"{options.seed}/{number}") for number in numbers]):
        kinds[outcome.kind] += 1
        found[outcome.signature].append((program, outcome))
        if not outcome.good:
            print(f"{outcome.signature}\n{program!r}", flush=True)
        if kinds.total() % 25 == 0:
            print(f"{kinds.total()} programs, {time.monotonic() - began:.0f} s: {dict(kinds)}", flush=True)
    close_pools()
    for signature, examples in sorted(found.items(), key=lambda one: -len(one[1])):
        print(f"{len(examples):6d}  {signature}")
        if not examples[0][1].good:
            for program, outcome in sorted(examples, key=lambda one: len(repr(one[0])))[:_SHOWN]:
                print(f"{program!r}\n{outcome.message}\n")


if __name__ == "__main__":
    main()
