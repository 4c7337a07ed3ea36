"""What the benchmarks share: how time is taken, and how figures are written."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["begin", "fastest", "seconds", "table", "write"]


def begin(description: str | None, **defaults: str) -> argparse.Namespace:
    """The options of a benchmark, ``--json FILE`` among them; one thread, no warnings."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return parser.parse_args()


def seconds(work: Callable[[], object]) -> float:
    """How long something takes this thread on the processor, so that what else the machine does counts little."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def fastest(*works: Callable[[], object], rounds: int) -> list[float]:
    """How long each of several things takes when nothing disturbs it: the first decile of rounds that alternate."""
    times = [[seconds(work) for work in works] for _ in range(rounds)]
    return [sorted(column)[rounds // 10] for column in zip(*times, strict=True)]


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows of figures under their names."""
    print(f"\n{title}")
    widths = {name: max(len(name), *(len(_shown(r[name])) for r in rows)) for name in rows[0]}
    print("  ".join(name.rjust(width) for name, width in widths.items()))
    for row in rows:
        print("  ".join(_shown(row[name]).rjust(width) for name, width in widths.items()), flush=True)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write(file: Path | None, figures: dict[str, Any]) -> None:
    """Write figures as JSON, if a file is given."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"torch": torch.__version__, **figures}, indent=2) + "\n")
