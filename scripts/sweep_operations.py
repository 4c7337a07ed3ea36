"""Compares programs of one operation each with eager PyTorch, for every operator of torch's own operator database.

The database is ``op_db`` in torch/testing/_internal/common_methods_invocations.py, which needs the package expecttest.
An operator is called as a function, as a method and in place, where it has these forms, on a few of its samples.
Outputs, structure, dtypes, ``requires_grad`` and gradients are compared, once with thunder alone and once with hookkit.

``python scripts/sweep_operations.py --jobs 2 docs/operations.json`` makes the file from which the reference's page on
operations is made. Other kinds of inputs are chosen with ``--inputs``, some operators alone with ``--only``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db

import hookkit  # isort: split

import thunder  # after hookkit, without which it cannot be imported on torch 2.13

from hookkit.comparison import difference_between, observe, structure_of

# Random operators of the database set a seed before they run, in Python code that is not the operator's.
common_methods_invocations.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)

# From bad to good. An operator is as good as its worst sample.
STATES = ("wrong", "error", "refused", "right")
SAMPLES = {"function": 3, "method": 1, "in place": 1}
NO_VALUES = ("empty", "fractional")  # not initialised; random with few outcomes
TIMEOUT = 15  # seconds of processor time for an operator

Variants = dict[str, Callable[..., Any]]


@dataclass(frozen=True)
class Program:
    """A program of one operation.

    Attributes:
        function: takes the tensors.
        tensors: its arguments.
        source: its text.
    """

    function: Callable[..., Any]
    tensors: list[torch.Tensor]
    source: str


def name_of(operator: Any) -> str:
    """The name of an entry of the database; some operators have several."""
    return operator.name + (f".{operator.variant_test_name}" if operator.variant_test_name else "")


def dtype_of(operator: Any) -> torch.dtype | None:
    """The dtype in which an operator is tried out."""
    known = operator.supported_dtypes("cpu")
    wanted = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex64, torch.int8, torch.bfloat16)
    return next((d for d in wanted if d in known), None)


def samples_of(operator: Any, dtype: torch.dtype, count: int = SAMPLES["function"]) -> list[Any]:
    """Samples of an operator's arguments: some, from all over the first forty."""
    differentiable = (dtype.is_floating_point or dtype.is_complex) and operator.supports_autograd
    torch.manual_seed(0)
    found = list(itertools.islice(operator.sample_inputs("cpu", dtype, requires_grad=differentiable), 40))
    step = max(1, math.ceil(len(found) / count))
    return found[::step]


def variants_of(operator: Any) -> Variants:
    """The forms in which a program calls an operator."""
    found: Variants = {"function": operator.op}
    if operator.method_variant is not None:
        found["method"] = operator.method_variant
    if operator.inplace_variant is not None:
        found["in place"] = operator.inplace_variant
    return found


def program_of(form: str, callee: Callable[..., Any], sample: Any) -> Program:
    """The program that makes one call: tensors are its arguments, everything else stands in it."""
    tensors: list[torch.Tensor] = []
    scope: dict[str, Any] = {"callee": callee, "torch": torch}

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return f"t{len(tensors) - 1}"
        if type(value) in (list, tuple):
            inner = ", ".join(map(text, value))
            return f"[{inner}]" if type(value) is list else f"({inner}{',' if value else ''})"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        scope[f"c{len(scope)}"] = value
        return f"c{len(scope) - 1}"

    first, arguments = text(sample.input), [text(a) for a in sample.args]
    arguments += [f"{k}={text(v)}" for k, v in sample.kwargs.items()]
    name = getattr(callee, "__name__", "")
    body = []
    if form == "in place":
        body.append(f"    x = {first}.clone()")
        first = "x"
    if form != "function" and getattr(torch.Tensor, name, None) is callee:
        call = f"{first}.{name}({', '.join(arguments)})"
    else:
        call = f"callee({', '.join([first, *arguments])})"
    body += [f"    {call}", "    return x"] if form == "in place" else [f"    return {call}"]
    source = "\n".join([f"def program({', '.join(f't{i}' for i in range(len(tensors)))}):", *body])
    exec(compile(source, "<operation>", "exec"), scope)
    return Program(scope["program"], tensors, source)


def judge(program: Program, *, values: bool = True) -> tuple[str, str] | None:
    """What becomes of a program under ``thunder.jit``, and why; None if eager PyTorch does not run it either.

    Args:
        program: the program.
        values: whether its values are compared; those of random programs are not.
    """
    try:
        eager, again = (observe(program.function, program.tensors) for _ in range(2))
    except Exception:
        return None
    try:
        found = observe(thunder.jit(program.function), program.tensors)
    except hookkit.HookError as error:
        return "refused", _words(error)
    except Exception as error:
        return "error", _words(error)
    if not values or difference_between(eager, again) is not None:
        wanted, got = structure_of(eager.output), structure_of(found.output)
        return ("right", "") if wanted == got else ("wrong", f"output: eager gives {wanted}, compiled {got}")
    difference = difference_between(eager, found)
    return ("right", "") if difference is None else ("wrong", difference)


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: " + re.sub(r"\S*/site-packages/| at 0x[0-9a-f]+", "", lines[0])[:300]


class TooLong(BaseException):
    """An operator took longer than it may."""


def _stop(*_: Any) -> None:
    raise TooLong


def judge_operator(
    operator: Any, samples: Callable[[Any], Iterator[Any]], forms: Collection[str] = tuple(SAMPLES)
) -> dict[str, list[str]]:
    """For each form of an operator the worst that became of its samples, the reason, and the program.

    Args:
        operator: an entry of the database.
        samples: gives its samples.
        forms: the forms that are tried.
    """
    found: dict[str, list[str]] = {}
    form = "function"
    signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, TIMEOUT)
    try:
        given = list(samples(operator))
        for form, callee in variants_of(operator).items():
            if form not in forms:
                continue
            judged = 0
            for sample in given:
                program = program_of(form, callee, sample)
                found_now = judge(program, values=not any(word in operator.name for word in NO_VALUES))
                if found_now is None:
                    continue
                if form not in found or STATES.index(found_now[0]) < STATES.index(found[form][0]):
                    found[form] = [*found_now, program.source if found_now[0] != "right" else ""]
                judged += 1
                if judged == SAMPLES[form]:
                    break
    except TooLong:
        found[form] = ["error", f"TimeoutError: took longer than {TIMEOUT} s", ""]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return found


# ------------------------------------------------------------------------------------------------------- the inputs


def plain(operator: Any) -> Iterator[Any]:
    """The samples of the database."""
    dtype = dtype_of(operator)
    return iter(samples_of(operator, dtype) if dtype is not None else ())


def _of_dtype(dtype: torch.dtype) -> Callable[[Any], Iterator[Any]]:
    def samples(operator: Any) -> Iterator[Any]:
        return iter(samples_of(operator, dtype) if dtype in operator.supported_dtypes("cpu") else ())

    return samples


def _changed(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[Any], Iterator[Any]]:
    """The samples of the database with every floating-point tensor changed."""

    def samples(operator: Any) -> Iterator[Any]:
        for sample in plain(operator):
            count = itertools.count()

            def changed(tensor: torch.Tensor, count: Iterator[int] = count) -> torch.Tensor:
                if not tensor.is_floating_point() or tensor.layout is not torch.strided:
                    return tensor
                return change(tensor.detach(), next(count)).requires_grad_(tensor.requires_grad)

            yield sample.transform(lambda v, changed=changed: changed(v) if isinstance(v, torch.Tensor) else v)

    return samples


def _cycled(*values: float) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Tensors of a few values, which begin elsewhere in each argument."""

    def change(tensor: torch.Tensor, place: int) -> torch.Tensor:
        steps = torch.arange(tensor.numel()) + 3 * place
        return torch.tensor(values, dtype=tensor.dtype)[steps % len(values)].reshape(tensor.shape)

    return change


def _transposed(tensor: torch.Tensor, place: int) -> torch.Tensor:
    return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor


def _empty(tensor: torch.Tensor, place: int) -> torch.Tensor:
    return tensor[:0].contiguous() if tensor.ndim else tensor


def _other_dtype(tensor: torch.Tensor, place: int) -> torch.Tensor:
    return tensor.float() if place % 2 == 0 else tensor


INPUTS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "plain": plain,
    "ties": _changed(_cycled(1.0, 0.0, 1.0, -1.0, 0.0)),
    "zeros": _changed(_cycled(0.0)),
    "ones": _changed(_cycled(1.0)),
    "bounds": _changed(_cycled(0.5, -0.5, 2.0, 3.0, -3.0, 6.0, -1.0, 20.0, -0.0)),
    "nonfinite": _changed(_cycled(0.5, math.inf, -math.inf, math.nan, 0.0, -2.0, 1e300)),
    "empty": _changed(_empty),
    "transposed": _changed(_transposed),
    "promotion": _changed(_other_dtype),
    "int64": _of_dtype(torch.int64),
    "uint8": _of_dtype(torch.uint8),
    "bool": _of_dtype(torch.bool),
    "bfloat16": _of_dtype(torch.bfloat16),
    "float32": _of_dtype(torch.float32),
    "complex128": _of_dtype(torch.complex128),
}


# --------------------------------------------------------------------------------------------------------- the sweep


def work(arguments: argparse.Namespace) -> None:
    """Judge the operators whose numbers come on the standard input; print one line of JSON for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    {"thunder": hookkit.disable, "hookkit": hookkit.enable}[arguments.worker]()
    for line in sys.stdin:
        forms = SAMPLES if arguments.inputs == "plain" else ["function"]
        found = judge_operator(op_db[int(line)], INPUTS[arguments.inputs], forms)
        print("\n" + json.dumps(found), flush=True)


def sweep(arguments: argparse.Namespace, column: str, places: list[int]) -> Iterator[tuple[int, dict[str, list[str]]]]:
    """Judge operators in a process of its own, and in another one after a crash."""
    places = list(places)
    while places:
        command = [sys.executable, __file__, "--worker", column, "--inputs", arguments.inputs, arguments.out]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            while places:
                process.stdin.write(f"{places[0]}\n")
                process.stdin.flush()
                late = threading.Timer(20 * TIMEOUT, process.kill)
                late.start()
                line = next((n for n in process.stdout if n.startswith("{")), "")
                late.cancel()
                failed = {"function": ["error", "the process crashed", ""]}
                found = json.loads(line) if line else failed
                print(column, name_of(op_db[places[0]]), {k: v[0] for k, v in found.items()}, file=sys.stderr)
                for form, (state, reason, source) in found.items():
                    if state != "right":
                        print(f"    {form}: {reason}\n    {source}", file=sys.stderr)
                yield places.pop(0), found
                if not line:
                    break
            process.kill()


def main() -> None:
    """Sweep, print the counts and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--only", nargs="*", help="names of operators")
    parser.add_argument("--inputs", choices=INPUTS, default="plain")
    parser.add_argument("--columns", nargs="*", default=["thunder", "hookkit"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("out")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    places = [i for i, o in enumerate(op_db) if not arguments.only or o.name in arguments.only]
    result: dict[str, dict[str, Any]] = {name_of(op_db[place]): {} for place in places}
    for column in arguments.columns:
        shards = [places[i :: arguments.jobs] for i in range(arguments.jobs)]
        sweeps = [sweep(arguments, column, shard) for shard in shards]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            found = dict(itertools.chain.from_iterable(pool.map(list, sweeps)))
        for place in places:
            judged = {f: s if s == "right" else [s, why] for f, (s, why, _) in found[place].items()}
            result[name_of(op_db[place])][column] = judged
        worst = [min((s for s, *_ in f.values()), key=STATES.index) for f in found.values() if f]
        print(column, dict(Counter(worst)), f"and {sum(not f for f in found.values())} without samples")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(judged)}" for name, judged in result.items())
    head = f'"torch": {json.dumps(torch.__version__)}, "inputs": {json.dumps(arguments.inputs)}'
    Path(arguments.out).write_text(f'{{{head}, "operators": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
