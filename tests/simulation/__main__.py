"""`python -m tests.simulation`: stock's and our times and memory, one row a scenario."""

import argparse

from tests.simulation.scenarios import COMPARISONS, Measured, measure
from tests.simulation.training import ENGINES


def _first_and_later(measured: Measured) -> str:
    def step(index: int) -> str:
        return f"{measured.forward[index]:.5g}+{measured.backward[index]:.5g}"

    return f"{step(0):>15} {step(-1):>15}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only scenarios whose name contains it")
    given = parser.parse_args()
    print(
        f"{'scenario':<50} {'stock: first':>15} {'later':>15} {'ours: first':>15} {'later':>15}  peak KiB: stock   ours"
    )
    for comparison in COMPARISONS.values():
        if given.only not in comparison.name:
            continue
        measured = {engine: measure(comparison, engine) for engine in ENGINES}
        peaks = "".join(f"{one.peak_bytes / 1024:10.1f}" for one in measured.values())
        times = " ".join(_first_and_later(one) for one in measured.values())
        print(f"{comparison.name:<50} {times}  {peaks}", flush=True)


if __name__ == "__main__":
    main()
