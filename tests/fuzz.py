"""Random programs for as long as one likes: ``python tests/fuzz.py MINUTES``, as ``make fuzz`` does.

Prints every program that differs, made small, and at the end how many were tried and how that ended. Exits with 1 if
one differed.
"""

from __future__ import annotations

import hookkit  # before thunder, which cannot be imported alone on current PyTorch

# isort: split

import itertools
import random
import sys
import time
import traceback
import warnings
from collections import Counter

from grammar import Program, programs
from hypothesis import HealthCheck, Phase, given, seed, settings
from test_properties import WAYS, checked

BATCH = 10
SETTINGS = settings(
    max_examples=BATCH,
    deadline=None,
    database=None,
    print_blob=False,
    phases=[Phase.generate, Phase.shrink],  # to explain a failure takes longer than to find ten
    suppress_health_check=list(HealthCheck),
)


def batch(how: str, number: int, counts: Counter[str]) -> None:
    """Try some programs; raises what the smallest that differs raises."""

    @seed(number)
    @SETTINGS
    @given(programs())
    def run(program: Program) -> None:
        counts["programs"] += 1
        counts[f"{how}: {checked(program, how)}"] += 1

    run()


def main(minutes: float) -> int:
    """Try programs for some minutes; four in six batches traced or opaque."""
    warnings.simplefilter("ignore")
    end = time.monotonic() + 60 * minutes
    first, counts, failures = random.randrange(10**6), Counter[str](), 0
    print(f"hookkit {hookkit.__version__}, seeds from {first}", flush=True)
    for number, how in enumerate(itertools.cycle(WAYS)):
        if time.monotonic() > end:
            break
        try:
            batch(how, first + number, counts)
        except Exception:
            failures += 1
            print(f"\n== {how}, seed {first + number}\n{traceback.format_exc()}", flush=True)
    print(f"{counts.pop('programs')} programs in {minutes:g} minutes; {failures} batches with a difference")
    for ending, count in counts.most_common():
        print(f"{count:8}  {ending}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
