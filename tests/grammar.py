"""Random programs around random custom Functions, for hypothesis: each is source text that prints, compiles and runs.

A statement is drawn as text and executed at once on example tensors; one that PyTorch refuses is left out. So every
program is valid but for what PyTorch's autograd refuses later.
"""

from __future__ import annotations

import itertools
import linecache
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st

__all__ = ["Call", "Program", "programs"]

# What is asked of a program.
DERIVATIVES = ["first"] * 4 + ["second"] * 4 + ["torch.func.grad", "torch.vmap"]

SHAPES = [(3,), (3,), (2, 3), (3, 3), (1, 3), (), (1,), (0,), (0, 3), (2, 1, 3)]
DTYPES = [torch.float64] * 4 + [torch.float32, torch.int64, torch.bool]

# What keeps shape and dtype; smooth, so that thunder's own gradients of it are eager's.
SMOOTH = ["{a}.sin()", "torch.cos({a})", "{a} * 2", "-{a}", "1 + {a}", "torch.tanh({a})", "{a}.sigmoid()", "{a} / 3"]
SHAPED = [
    "{a}.sum()",
    "{a}.sum(-1)",
    "{a}.mean(0, keepdim=True)",
    "{a}.reshape(-1)",
    "{a}.unsqueeze(0)",
    "{a}.expand(2, *{a}.shape)",
    "{a}.clone()",
    "{a}.contiguous()",
    "{a}.double()",
    "{a}.float()",
    "{a}.to({a}.dtype)",
    "torch.cat([{a}, {a}])",
    "torch.stack([{a}, {a} * 2])",
    "{a}.flatten()",
    "{a} * k",
    "{a}.softmax(-1)",
    "{a}.detach()",
    "{a}.square()",
]
VIEWS = ["{a}.view(-1)", "{a}.t()", "{a}.transpose(0, -1)", "{a}[0]", "{a}[..., :1]", "{a}[1:]", "{a}.squeeze()"]
ROUGH = [
    "torch.relu({a})",
    "{a}.abs()",
    "torch.where({a} > 0, {a}, 0.5 * {a})",
    "{a}.clamp(-1, 1)",
    "torch.zeros_like({a})",
    "{a}.new_ones(2)",
    "{a} > 0",
    "{a}.argmax()",
    "{a}.cumsum(0)",
    "{a}.norm()",
    "{a}.view_as({a})",
    "torch.ones(2)",
]
BINARY = [
    "{a} * {b}",
    "{a} + {b}",
    "{a} - 2 * {b}",
    "torch.sub({a}, {b}, alpha=3)",
    "{a} / (1 + {b} * {b})",
    "{a} @ {b}",
    "torch.cat([{a}, {b}])",
    "torch.stack([{a}, {b}])",
    "{a}.expand_as({b})",
]
IN_PLACE = [
    "{a}.mul_(2)",
    "{a} += 1",
    "{a} *= {b}",
    "{a}.add_({b})",
    "{a}.copy_({b})",
    "{a}[0] = 0",
    "{a}[..., 0] = {b}[..., 0]",
    "{a}.zero_()",
    "{a}.sin_()",
    "{a}.view(-1).mul_(3)",
    "{a}[0].add_(1)",
    "{a}.fill_(0.5)",
]
STATIC = ["k > 2", "isinstance(k, int)", "{a}.ndim > 1", "{a}.numel() == 3", "{a}.dtype == torch.float64"]
MODES = ["torch.is_grad_enabled()", "{a}.requires_grad"]
VALUES = ["{a}.sum() > 0", "({a} > 0).any()", "{a}.sum().item() > 0", "bool(({a} < 0.5).all())"]
# Transforms of a function f of one tensor, which may use others, too.
TRANSFORMS = [
    "torch.func.grad(lambda r: {f}(r).sum())({a})",
    "torch.func.grad(torch.func.grad(lambda r: {f}(r).sum()))({a})",
    "torch.func.vjp({f}, {a})[1]({f}({a}))[0]",
    "torch.func.jvp({f}, ({a},), ({a} * 2,))[1]",
    "torch.func.jacrev({f})({a})",
    "torch.func.jacfwd({f})({a})",
    "torch.vmap({f})({a})",
    "torch.vmap(torch.func.grad(lambda r: {f}(r).sum()))({a})",
    "torch.autograd.functional.vjp({f}, {a}, {f}({a}).detach(), create_graph=True)[1]",
    "torch.autograd.functional.jacobian({f}, {a}, create_graph=True)",
    "torch.autograd.grad({f}({a}).sum(), {a}, create_graph=True)[0] if {a}.requires_grad else {a}",
    "torch.autograd.grad({f}({a}), {a}, {a} * 2)[0] if {a}.requires_grad else {a}",
]
CONSTANTS = ["2", "0.5", "None", "'sum'", "(1, 2)", "True", "{'n': 2}", "torch.float64", "torch.sin"]


@dataclass
class Scope:
    """The lines of a block of code, and what its names stand for after them, on example tensors."""

    draw: Any
    names: dict[str, Any]
    serials: Any
    lines: list[str] = field(default_factory=list)

    def new(self, prefix: str) -> str:
        return f"{prefix}{next(self.serials)}"

    def add(self, *lines: str) -> bool:
        """Add a statement, unless PyTorch refuses it."""
        code = "\n".join(lines)
        before = dict(self.names)
        try:
            exec(code, self.names)
        except Exception:
            self.names.clear()
            self.names.update(before)
            return False
        self.lines.extend(lines)
        return True

    def tensors(self, kind: Any = lambda t: True) -> list[str]:
        return [n for n, v in self.names.items() if isinstance(v, torch.Tensor) and n != "w" and kind(v)]

    def pick(self, values: list[str]) -> str:
        return self.draw(st.sampled_from(values))

    def chance(self, one_in: int) -> bool:
        return self.draw(st.integers(1, one_in)) == one_in

    def fill(self, template: str, first: list[str] | None = None) -> str:
        tensors = self.tensors()
        a = self.pick(first or tensors)
        return template.replace("{a}", a).replace("{b}", self.pick(tensors))

    def subset(self, values: list[str], most: int) -> list[str]:
        return self.draw(st.lists(st.sampled_from(values), max_size=most)) if values else []


def statement(scope: Scope, kinds: list[str], templates: list[str], temporaries: set[str]) -> None:
    """Add one statement of a function's body."""
    kind, new = scope.pick(kinds), scope.new("v")
    if kind == "expression":
        scope.add(f"{new} = {scope.fill(scope.pick(templates))}")
    elif kind == "in place":
        outside = [v for n, v in scope.names.items() if isinstance(v, torch.Tensor) and n not in temporaries]
        mine = [t for t in scope.tensors() if t in temporaries and not shares(scope.names[t], outside)]
        if mine:
            scope.add(scope.fill(scope.pick(IN_PLACE), mine))
        return
    elif kind in ("static", "mode", "value"):
        conditions = {"static": STATIC, "mode": MODES, "value": VALUES}[kind]
        if "ctx" in scope.names and kind == "mode":
            conditions = [*conditions, "ctx.needs_input_grad[0]"]
        a = scope.pick(scope.tensors())
        condition = scope.fill(scope.pick(conditions))
        yes, no = (scope.pick(SMOOTH).replace("{a}", a) for _ in range(2))
        scope.add(f"if {condition}:", f"    {new} = {yes}", "else:", f"    {new} = {no}")
    elif kind == "loop":
        a, step = scope.pick(scope.tensors()), scope.pick(SMOOTH)
        scope.add(f"{new} = {a}", "for i in range(2):", f"    {new} = {step.replace('{a}', new)} + i")
    elif kind == "grad mode":
        mode = scope.pick(["torch.no_grad()", "torch.enable_grad()", "torch.set_grad_enabled(False)"])
        # PyTorch lets a view that is made without grad mode require grad, and leads no gradient through it.
        scope.add(f"with {mode}:", f"    {new} = {scope.fill(scope.pick([*SMOOTH, '{a} * {b}']))}")
    elif kind == "item":
        a = scope.pick(scope.tensors())
        scope.add(f"{new} = {a} * {scope.fill(scope.pick(['float({a}.sum())', '{a}.sum().item()']))}")
    elif kind == "numpy":
        scope.add(f"{new} = torch.as_tensor(np.sin({scope.fill('{a}')}.detach().numpy()))")
    elif kind == "container":
        scope.add(f"kept = [{scope.fill('{a}')}, {scope.fill('{a}')}]", f"{new} = kept[0] * 2 + kept.pop()")
    elif kind == "transform":
        transform(scope, new)
    elif kind == "call":
        apply(scope, new)
        temporaries.update(n for n in scope.names if n.startswith(f"{new}_"))
    if new in scope.names:
        temporaries.add(new)


def transform(scope: Scope, new: str) -> None:
    """Transform a function of one tensor, which may apply a Function, and call it."""
    functions = [v for v in scope.names.values() if isinstance(v, Defined)]
    inner = scope.fill(scope.pick([*SMOOTH, *BINARY, "{a}.sum() * {b}"]), ["r"])
    if functions and scope.chance(2):
        function = scope.draw(st.sampled_from(functions))
        given = [scope.pick(["r", *scope.tensors()]) if p.tensor else p.text(scope) for p in function.parameters]
        inner = scope.pick(["{r} * r", "{r}", "{r}.sin()"]).replace("{r}", f"{function.name}.apply({', '.join(given)})")
    text = scope.pick(TRANSFORMS).replace("{a}", scope.pick(scope.tensors())).replace("{f}", f"{new}_of")
    scope.add(f"{new}_of = lambda r: {inner}", f"{new} = {text}")


def shares(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Whether a tensor shares memory with one of others."""
    return any(torch._C._is_alias_of(tensor, other) for other in others)


def apply(scope: Scope, new: str, function: Defined | None = None) -> None:
    """Apply a Function that is defined earlier."""
    functions = [v for v in scope.names.values() if isinstance(v, Defined)]
    if not functions:
        return
    function = function or scope.draw(st.sampled_from(functions))
    given = [scope.pick(scope.tensors()) if p.tensor else p.text(scope) for p in function.parameters]
    call = f"{function.name}.apply({', '.join(given)})"
    if not scope.add(f"{new} = {call}"):
        return
    value = scope.names[new]
    if isinstance(value, tuple | list) and value:
        items = [f"{new}_{i}" for i in range(len(value))]
        scope.add(f"{', '.join(items)}{',' if len(items) == 1 else ''} = {new}")
        for item, part in zip(items, value, strict=True):
            if isinstance(part, list) and part:
                scope.add(f"{item}_0 = {item}[0]")
    elif isinstance(value, dict):
        scope.add(f"{new}_a = {new}['a']")
    elif isinstance(value, torch.Tensor) and scope.chance(4):
        scope.add("for i in range(2):", f"    {new} = {call.replace(given[0], new, 1)}")


@dataclass
class Parameter:
    """A parameter of a Function."""

    name: str
    value: Any
    tensor: bool
    constant: str = ""

    def text(self, scope: Scope) -> str:
        """An argument that is no tensor."""
        if self.constant == "[]":
            tensors = scope.tensors()
            return f"[{scope.pick(tensors)}, {scope.pick(tensors)}]"
        return self.constant


@dataclass
class Defined:
    """A Function, and what its name stands for while programs are drawn."""

    name: str
    parameters: list[Parameter]
    apply: Any


def example(draw: Any, shape: Any = None, dtype: Any = None) -> torch.Tensor:
    shape = draw(st.sampled_from(SHAPES)) if shape is None else shape
    dtype = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    return values_of(shape, dtype, 0)


def values_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values between -1 and 1, none of them where a gradient jumps."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(shape, generator=generator, dtype=torch.float64) * 1.9 - 0.95
    return values > 0 if dtype is torch.bool else (values * 4 if dtype is torch.int64 else values).to(dtype)


FORWARD_KINDS = ["expression"] * 8 + ["in place"] * 3 + ["static", "mode", "loop", "grad mode", "container", "call"]
OPAQUE_KINDS = ["value", "item", "numpy"]


def define(draw: Any, name: str, world: dict[str, Any], serials: Any, transformable: bool) -> list[str]:
    """The source of a Function, which it defines in ``world``; for transforms if it is to be ``transformable``."""
    parameters = [Parameter("x0", example(draw, dtype=torch.float64), True)]
    for i in range(1, draw(st.integers(1, 3))):
        parameters.append(Parameter(f"x{i}", example(draw), True))
    parameters.append(Parameter("k", 2, False, "k" if draw(st.booleans()) else "3"))
    if draw(st.integers(1, 4)) == 4:
        constant = draw(st.sampled_from(CONSTANTS))
        parameters.append(Parameter("c", eval(constant), False, constant))
    if draw(st.integers(1, 6)) == 6:
        parameters.append(Parameter("xs", [example(draw), example(draw)], False, "[]"))
    parameters = draw(st.permutations(parameters))
    names = [p.name for p in parameters]
    separate = transformable or draw(st.integers(1, 4)) == 4
    ctx = types.SimpleNamespace(needs_input_grad=(True,) * len(parameters))
    known = dict(world, **{p.name: clone(p.value) for p in parameters})
    scope = Scope(draw, dict(known) if separate else dict(known, ctx=ctx), serials)
    if "xs" in names:
        scope.add("x8, x9 = xs")
    kinds = FORWARD_KINDS + (OPAQUE_KINDS if scope.chance(5) else [])
    temporaries: set[str] = set()
    with torch.no_grad():
        dirty = []
        if scope.chance(8):
            dirty = [scope.pick([p.name for p in parameters if p.tensor])]
            if not scope.add(scope.fill(scope.pick(IN_PLACE), dirty)):
                dirty = []
        for _ in range(draw(st.integers(0, 4))):
            statement(scope, kinds, [*SMOOTH, *SHAPED, *VIEWS, *ROUGH, *BINARY], temporaries)
        inputs = [p.name for p in parameters if p.tensor]
        output, items = returned(scope, inputs, dirty)
        head = [f"class {name}(torch.autograd.Function):", "    @staticmethod"]
        if separate:
            after = Scope(draw, dict(known, ctx=ctx), serials)
            after.names.update({n: scope.names[n] for n in names})
            after.add(f"{', '.join(names)}, = inputs") or after.lines.append(f"{', '.join(names)}, = inputs")
            outs = [f"o{i}" for i in range(len(items))]
            if outs:
                tupled = output.startswith("(")
                after.lines.append(f"{', '.join(outs)}{',' if tupled else ''} = output")
                after.names.update({o: eval(i, scope.names) for o, i in zip(outs, items, strict=True)})
        else:
            after, outs = scope, items
        if dirty:
            after.lines.append(f"ctx.mark_dirty({dirty[0]})")
        saved = keep(after)
        # PyTorch lets a view of what is marked so, if that is itself a view of an argument, require grad.
        given = [scope.names[n] for n in (*inputs, "x8", "x9") if n in scope.names]
        candidates = [o for o in outs if isinstance(after.names.get(o), torch.Tensor)]
        candidates = [o for o in candidates if o in inputs or not shares(after.names[o], given)]
        if candidates and not dirty and scope.chance(6):
            after.lines.append(f"ctx.mark_non_differentiable({scope.pick(candidates)})")
        materialize = not scope.chance(6)
        if not materialize:
            after.lines.append("ctx.set_materialize_grads(False)")
        backward = differentiate(draw, after, parameters, outs, saved, materialize, world)
    if separate:
        head.insert(1, f"    generate_vmap_rule = {transformable}")
        text = [f"    def forward({', '.join(names)}):", *indented(scope.lines), f"        return {output}", ""]
        text += ["    @staticmethod", "    def setup_context(ctx, inputs, output):", *indented(after.lines)]
    else:
        text = [f"    def forward(ctx, {', '.join(names)}):", *indented(scope.lines), f"        return {output}"]
    lines = [*head, *text, "", "    @staticmethod", *backward, "", ""]
    namespace = dict(world)
    exec("\n".join(lines), namespace)
    world[name] = Defined(name, parameters, namespace[name].apply)
    return lines


def clone(value: Any) -> Any:
    if isinstance(value, list):
        return [clone(v) for v in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def indented(lines: list[str], by: int = 8) -> list[str]:
    return [" " * by + line for line in lines]


def returned(scope: Scope, inputs: list[str], dirty: list[str]) -> tuple[str, list[str]]:
    """What a forward returns, and the expressions in the places of its outputs."""
    # PyTorch gives a tensor from outside that is no argument, and is returned, another grad_fn: x8 and x9 are such.
    made = [t for t in scope.tensors() if t not in (*inputs, "x8", "x9")]
    if not made:
        made = [scope.new("v")]
        scope.add(f"{made[0]} = {scope.fill('{a} * 2')}")

    def output() -> str:
        if scope.chance(8):
            return scope.pick(inputs)
        if scope.chance(8):
            return scope.fill(scope.pick(["{a}.view_as({a})", "{a}.t()", "{a}[0]"]), inputs)
        return scope.pick(made)

    first = dirty[0] if dirty else named(scope, output(), made)
    second = named(scope, output(), made)
    forms = [[first]] * 6
    forms += [[first, second]] * 3
    forms += [[first, "None"], [first, "3"], [second, first, first], ["None", first]]
    listed = second if not shares(scope.names[second], [scope.names[i] for i in inputs]) else first
    forms += [[first, f"[{listed}]"]]
    items = scope.draw(st.sampled_from(forms))
    if len(items) > 1:
        return f"({', '.join(items)})", items
    if scope.chance(6):
        return f"({first},)", items
    if not dirty and scope.chance(12):
        free = [n for n in made if not shares(scope.names[n], [scope.names[i] for i in inputs])] or ["None"]
        a, b = scope.pick(free), scope.pick(free)
        other = scope.draw(st.sampled_from([f"[{a}, {b}]", f"{{'a': {a}}}", "None", "4"]))
        return other, [other]
    return first, items


def named(scope: Scope, expression: str, made: list[str]) -> str:
    """The name of a tensor; of one of ``made``, where PyTorch refuses the expression."""
    if expression in scope.names:
        return expression
    name = scope.new("v")
    return name if scope.add(f"{name} = {expression}") else scope.pick(made)


def keep(scope: Scope) -> dict[str, str]:
    """Keep something for the backward; returns how it is read there, by the name in forward."""
    tensors = scope.tensors()
    saved: dict[str, str] = {}
    chosen = scope.subset(tensors, 3)
    if chosen:
        extra = ["None"] if scope.chance(6) else []
        scope.lines.append(f"ctx.save_for_backward({', '.join([*chosen, *extra])})")
        saved.update({name: f"ctx.saved_tensors[{i}]" for i, name in enumerate(chosen)})
    forms = [
        ("ctx.t = {n}", "ctx.t"),
        ("ctx.l = [{n}, {n}]", "ctx.l[1]"),
        ("ctx.d = {'a': {n}}", "ctx.d['a']"),
        ("ctx.f = lambda: {n} * 3", "ctx.f()"),
    ]
    if tensors and scope.chance(3):
        line, read = scope.draw(st.sampled_from(forms))
        name = scope.pick(tensors)
        scope.lines.append(line.replace("{n}", name))
        saved[name] = read
    return saved


BACKWARD_KINDS = ["expression"] * 4 + ["in place"] * 2 + ["static", "mode", "loop", "grad mode", "container", "call"]


def differentiate(
    draw: Any,
    forward: Scope,
    parameters: list[Parameter],
    outs: list[str],
    saved: dict[str, str],
    materialize: bool,
    world: dict[str, Any],
) -> list[str]:
    """The source of a backward."""
    names = {**world, "ctx": types.SimpleNamespace(needs_input_grad=(True,) * len(parameters)), "k": 2}
    scope = Scope(draw, names, forward.serials)
    grads = [f"g{i}" for i in range(len(outs))]
    scope.lines.append("k = ctx.k")
    forward.lines.append("ctx.k = k")
    for name, read in saved.items():
        scope.names[f"s_{name}"] = clone(forward.names[name])
        scope.lines.append(f"s_{name} = {read}")
    for i, (grad, out) in enumerate(zip(grads, outs, strict=True)):
        value = eval(out, forward.names)
        if isinstance(value, torch.Tensor):
            if not materialize:
                forward.lines.append(f"ctx.o{i} = {out}.shape")
                scope.lines += [f"if {grad} is None:", f"    {grad} = torch.full(ctx.o{i}, 7.0)"]
            scope.names[grad] = values_of(tuple(value.shape), value.dtype, i + 5)
    kinds = BACKWARD_KINDS + (OPAQUE_KINDS if scope.chance(8) else [])
    temporaries: set[str] = set()
    if not scope.tensors():
        scope.add("v = torch.ones(3)")
    for _ in range(draw(st.integers(0, 2))):
        statement(scope, kinds, [*SMOOTH, *SHAPED, *VIEWS, *BINARY], temporaries)
    results = []
    for i, parameter in enumerate(parameters):
        results.append("None")
        if not parameter.tensor or scope.chance(6):
            continue
        if not parameter.value.is_floating_point():
            continue
        factor = draw(st.integers(2, 9))
        a = scope.pick(scope.tensors())
        result, shape = f"{factor} * {a}", tuple(parameter.value.shape)
        if tuple(scope.names[a].shape) != shape:
            forward.lines.append(f"ctx.shape{i} = {parameter.name}.shape")
            result = f"({factor} * {a}.sum()).expand(ctx.shape{i})"
        elif scope.chance(5):
            result = a
        elif scope.chance(8):
            result = f"({result}).expand(2, *{a}.shape)"
        if scope.chance(4):
            result = f"{result} if ctx.needs_input_grad[{i}] else None"
        results[-1] = result
    scope.lines.append(f"return {', '.join(results)}")
    decorator = ["    @torch.autograd.function.once_differentiable", "    "][draw(st.integers(0, 9)) != 0]
    head = [decorator] if decorator.strip() else []
    return [*head, f"    def backward({', '.join(['ctx', *grads])}):", *indented(scope.lines)]


@dataclass
class Call:
    """The arguments of one call of a program: seeds of values, which require grad, and its number ``k``."""

    seed: int
    requires_grad: list[bool]
    k: Any


@dataclass
class Program:
    """A program as source text, and how it is called.

    Attributes:
        source: defines the Functions and ``program``.
        functions: the names of the Functions.
        inputs: shape and dtype of each tensor that is given.
        aliases: for each input the earlier one that is the same tensor, or itself.
        calls: the calls, in order.
        used: of which outputs the gradient is taken, in turn.
        derivative: what is asked of it: gradients, gradients of gradients, or what a transform makes of it.
    """

    source: str
    functions: list[str]
    inputs: list[tuple[tuple[int, ...], torch.dtype]]
    aliases: list[int]
    calls: list[Call]
    used: list[bool]
    derivative: str = "first"

    def __repr__(self) -> str:
        calls = "\n".join(f"# {c}" for c in self.calls)
        given = f"# inputs: {self.inputs}, aliases {self.aliases}, gradients of {self.used}, {self.derivative}"
        return f"{self.source}\n{given}\n{calls}\n"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints it."""
        printer.text(repr(self))

    def load(self) -> dict[str, Any]:
        """Execute the source; tracebacks show its lines."""
        file = f"<program {next(_loaded)}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        namespace: dict[str, Any] = {"__name__": "drawn"}
        exec(compile(self.source, file, "exec"), namespace)
        return namespace

    def arguments(self, call: Call) -> list[Any]:
        tensors: list[torch.Tensor] = []
        for i, (shape, dtype) in enumerate(self.inputs):
            if self.aliases[i] != i:
                tensors.append(tensors[self.aliases[i]])
                continue
            tensor = values_of(shape, dtype, call.seed + i)
            tensors.append(tensor.requires_grad_(call.requires_grad[i] and tensor.is_floating_point()))
        return [*tensors, call.k]


_loaded = itertools.count()
PROGRAM_KINDS = ["call"] * 3 + ["expression"] * 5 + ["in place", "loop", "static", "mode", "grad mode", "container"]
PROGRAM_KINDS += ["transform"] * 5


@st.composite
def programs(draw: Any) -> Program:
    """A program with one to three Functions, and its calls."""
    world: dict[str, Any] = {"torch": torch, "np": np, "k": 2}
    serials = itertools.count()
    lines = ["import numpy as np", "import torch", "", ""]
    derivative = draw(st.sampled_from(DERIVATIVES))
    transformable = derivative.startswith("torch") or draw(st.integers(1, 4)) == 4
    functions = [f"F{i}" for i in range(draw(st.sampled_from([1, 1, 2, 2, 3])))]
    for name in functions:
        lines += define(draw, name, world, serials, transformable)
    count = draw(st.integers(1, 3))
    inputs = [
        (tuple(e.shape), e.dtype)
        for e in [example(draw, None, torch.float64), *(example(draw) for _ in range(count - 1))]
    ]
    aliases = list(range(count))
    for i in range(1, count):
        if draw(st.integers(1, 6)) == 6 and inputs[0] == inputs[i]:
            aliases[i] = 0
    names = dict(world)
    for i, (shape, dtype) in enumerate(inputs):
        value = values_of(shape, dtype, i)
        names[f"a{i}"] = value.requires_grad_() if dtype.is_floating_point else value
    module = draw(st.integers(1, 4)) == 4
    if module:
        names["self"] = types.SimpleNamespace(w=torch.nn.Parameter(torch.linspace(-0.5, 0.7, 3, dtype=torch.float64)))
    scope = Scope(draw, names, serials)
    if module:
        scope.add("w0 = self.w")
    temporaries: set[str] = set()
    for name in functions:
        apply(scope, scope.new("h"), world[name])
    assume(any(".apply(" in line for line in scope.lines))
    for _ in range(draw(st.integers(0, 4))):
        statement(scope, PROGRAM_KINDS, [*SMOOTH, *SHAPED, *VIEWS, *BINARY], temporaries)
    results = scope.subset(list(n for n in scope.tensors() if n not in ("w0",)), 3) or [scope.pick(scope.tensors())]
    last = [t for t in scope.tensors() if t not in results][-1:]
    form = draw(st.sampled_from(["({r},)", "[{r}]", "({r}, 3)", "{'a': {f}, 'b': [{r}]}"]))
    results += last
    result = results[0] if len(results) == 1 else form.replace("{r}", ", ".join(results)).replace("{f}", results[0])
    given = ", ".join([*(f"a{i}" for i in range(count)), "k"])
    body = [*scope.lines, f"return {result}"]
    if module:
        lines += ["class Program(torch.nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += ["        self.w = torch.nn.Parameter(torch.linspace(-0.5, 0.7, 3, dtype=torch.float64))", ""]
        lines += [f"    def forward(self, {given}):", *indented(body), "", "", "program = Program()"]
    else:
        lines += [f"def program({given}):", *indented(body, 4)]
    grads = st.lists(st.integers(1, 5).map(lambda n: n < 5), min_size=count, max_size=count)
    calls = [Call(0, [True] * count, 2), Call(10, draw(grads), 2)]
    if draw(st.integers(1, 4)) == 4:
        calls.append(Call(20, draw(grads), draw(st.sampled_from([2, 3, 2.5]))))
    used = draw(st.lists(st.integers(1, 4).map(lambda n: n < 4), min_size=1, max_size=3))
    return Program("\n".join(lines) + "\n", functions, inputs, aliases, calls, used, derivative)
