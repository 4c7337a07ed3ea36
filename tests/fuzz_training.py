"""Random training programs for as long as one likes: ``python tests/fuzz_training.py MINUTES``.

``make fuzz-training`` does that. Prints every program that differs from eager PyTorch after three steps, made small,
and at the end how many were tried and how that ended. Exits with 1 if one differed. A second argument is the seed of
the first program.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections import Counter

from training import WAYS, Recipe, difference, drawn, smaller

import hookkit


def ending(recipe: Recipe, way: str) -> str:
    """In a few words how a program ends: ``same``, ``refused: ...``, ``differs: ...`` or ``error: ...``."""
    try:
        found = difference(recipe, way)
    except hookkit.HookError as error:
        return f"refused: {' '.join(str(error).split())}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"error: {type(error).__name__} at {where.filename}:{where.lineno}: {' '.join(str(error).split())}"
    return "same" if found is None else f"differs: {found}"


def smallest(recipe: Recipe, way: str) -> Recipe:
    """The smallest program that ends as badly."""
    kind = ending(recipe, way).split()[0]
    for candidate in smaller(recipe):
        if ending(candidate, way).split()[0] == kind:
            return smallest(candidate, way)
    return recipe


def main(minutes: float, first: int) -> int:
    """Try programs for some minutes, each in all ways."""
    end, counts, failures = time.monotonic() + 60 * minutes, Counter[str](), 0
    print(f"hookkit {hookkit.__version__}, seeds from {first}", flush=True)
    seed = first
    while time.monotonic() < end:
        recipe = drawn(seed)
        for way in WAYS:
            found = ending(recipe, way)
            counts[f"{way}: {found.split(':')[0]}"] += 1
            if found != "same":
                failures += not found.startswith("refused")
                small = smallest(recipe, way)
                print(f"\n== {way}, seed {seed}: {small}\n{ending(small, way)[:1000]}", flush=True)
        seed += 1
    print(f"{seed - first} programs, each in {len(WAYS)} ways, in {minutes:g} minutes; {failures} differences")
    for words, count in counts.most_common():
        print(f"{count:8}  {words}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6)))
