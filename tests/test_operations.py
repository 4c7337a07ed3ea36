"""Operations of torch that thunder lacks: PyTorch runs them, and the program is still right, and still compiled."""

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.dynamo import thunderfx
from torch._inductor.exc import InductorError
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import hookkit
from hookkit.testing import assert_same

CONSTANT = torch.arange(1.0, 5.0, dtype=torch.float64)
MASK = torch.eye(4, dtype=torch.bool)


def matrix(*shape):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*(shape or (4, 4)), generator=generator, dtype=torch.float64).requires_grad_()


def definite(x):
    return x @ x.mT + 4 * torch.eye(4, dtype=x.dtype)


def change(method, *args):
    """A program that changes a temporary in place."""

    def program(x):
        y = x.clone()
        getattr(y, method)(*args)
        return y * x

    return program


def assigned(x):
    y = x * 2
    y[MASK] = 0.0
    return y


def assigned_tensor(x):
    y = x * 2
    y[MASK] = CONSTANT
    return y


def filled_by_mask(x):
    y = x * 2
    y[y > 0] = y.sum()
    return y


PROGRAMS = {
    "linspace": lambda x: x * torch.linspace(0, 1, 4, dtype=x.dtype),
    "eye": lambda x: x @ torch.eye(4, dtype=x.dtype),
    "as_tensor": lambda x: x + torch.as_tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype),
    "tensor": lambda x: x + torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=x.dtype),
    "a tensor of the module": lambda x: x + CONSTANT,
    "zeros_like(requires_grad=True)": lambda x: x + torch.zeros_like(x, requires_grad=True),
    "full_like(requires_grad=True)": lambda x: x * torch.full_like(x, 3.0, requires_grad=True),
    "_softmax_backward_data": lambda x: torch._softmax_backward_data(x, x.softmax(-1), -1, x.dtype),
    "mH": lambda x: x.mH * 2,
    "H": lambda x: x.H * 2,
    "real": lambda x: x.real * 2,
    "sigmoid_": change("sigmoid_"),
    "tanh_": change("tanh_"),
    "exp_": change("exp_"),
    "erfinv_": lambda x: x.tanh().clone().erfinv_() * x,
    "clamp_": change("clamp_", -0.5, 0.5),
    "lerp_": change("lerp_", CONSTANT, 0.25),
    "masked_fill_": change("masked_fill_", MASK, 2.0),
    "addcmul_": change("addcmul_", CONSTANT, CONSTANT),
    "fmod_": change("fmod_", 0.75),
    "xlogy_": lambda x: x.exp().clone().xlogy_(CONSTANT),
    "max().values": lambda x: x.max(1).values * 2,
    "max().indices": lambda x: x * x.max(1).indices,
    "sort().values": lambda x: x.sort(descending=True).values * 2,
    "sort, as it is": lambda x: x.sort(0),
    "topk().values": lambda x: x.topk(2).values * 2,
    "median, as it is": lambda x: x.median(1),
    "data": lambda x: x.data * x,
    "requires_grad_": lambda x: (x * 2).requires_grad_() * 3,
    "x[mask] = number": assigned,
    "x[mask] = tensor": assigned_tensor,
    "x[x > 0] = tensor": filled_by_mask,
    "where(mask)": lambda x: torch.where(MASK, x, -x),
    "linalg.inv": lambda x: torch.linalg.inv(definite(x)),
    "linalg.solve": lambda x: torch.linalg.solve(definite(x), x),
    "linalg.cholesky": lambda x: torch.linalg.cholesky(definite(x)),
    "linalg.det": lambda x: torch.linalg.det(x),
    "linalg.slogdet": lambda x: torch.linalg.slogdet(x),
    "linalg.eigvalsh": lambda x: torch.linalg.eigvalsh(x + x.mT),
    "linalg.svdvals": lambda x: torch.linalg.svdvals(x),
    "linalg.qr": lambda x: torch.linalg.qr(x),
    "linalg.matrix_exp": lambda x: torch.linalg.matrix_exp(x),
    "linalg.pinv": lambda x: torch.linalg.pinv(x),
    "linalg.vector_norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "linalg.lstsq": lambda x: torch.linalg.lstsq(x[:, :3], x)[0],
    "fft.fft": lambda x: torch.fft.fft(x).abs(),
    "fft.rfft": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "fft.irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    "fft.fft2": lambda x: torch.fft.fft2(x).imag,
    "real of complex": lambda x: torch.fft.fft2(x).real,
    "fft.fftshift": lambda x: torch.fft.fftshift(x),
    "special.bessel_j0": lambda x: torch.special.bessel_j0(x.detach()) * x,
    "special.erfcx": lambda x: torch.special.erfcx(x),
    "special.gammaln": lambda x: torch.special.gammaln(x.exp()),
    "special.logit": lambda x: torch.special.logit(x.sigmoid()),
    "special.i0e": lambda x: torch.special.i0e(x),
    "special.entr": lambda x: torch.special.entr(x.exp()),
    "special.xlog1py": lambda x: torch.special.xlog1py(x, CONSTANT),
    "cov": lambda x: torch.cov(x),
    "combinations": lambda x: torch.combinations(x[0], 3),
    "cdist": lambda x: torch.cdist(x, CONSTANT.expand(4, 4)),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "interpolate(bicubic)": lambda x: torch.nn.functional.interpolate(x[None, None], scale_factor=2, mode="bicubic"),
    "pad(reflect)": lambda x: torch.nn.functional.pad(x[None], (1, 2), "reflect"),
    "dropout(inplace=True)": lambda x: torch.nn.functional.dropout(x * 2, 0.0, inplace=True) * x,
    "an operator of torch.ops": lambda x: torch.ops.aten.logcumsumexp.default(x, 1),
}
# The assignment changes what shares memory with a view, which makes a Function opaque.
TRACED = sorted(PROGRAMS.keys() - {"x[x > 0] = tensor"})


def first_tensor(value):
    return value if isinstance(value, torch.Tensor) else value[0]


def as_function(program):
    """A custom Function that runs a program in its forward and in its backward; its gradient is wrong on purpose."""

    class Inside(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return first_tensor(program(x)).clone()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 100 * x * (gradient * first_tensor(program(x))).sum()

    return Inside.apply


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_operation_in_a_program_is_right(name):
    assert_same(PROGRAMS[name], matrix())


@pytest.mark.parametrize("name", TRACED)
def test_a_function_with_the_operation_in_forward_and_backward_stays_traced_and_is_right(name):
    jitted = assert_same(as_function(PROGRAMS[name]), matrix())
    assert "traced" in str(hookkit.report(jitted))


@pytest.mark.parametrize("name", sorted(PROGRAMS)[::6])
def test_an_operation_under_thunderfx_is_right(name):
    torch._dynamo.reset()
    assert_same(PROGRAMS[name], matrix(), jit=thunderfx)


SCRIPT_MODULE = torch.jit.script(torch.nn.ReLU())

REFUSED = {
    "nonzero": lambda x: torch.nonzero(x),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: torch.unique(x, dim=0),
    "allclose": lambda x: torch.allclose(x, x),
    "resize_": lambda x: x.clone().resize_(2),
    "detach_": lambda x: (x * 2).detach_() * x,
    "ScriptMethod": lambda x: SCRIPT_MODULE.forward(x),
    "grad": lambda x: x * 2 if x.grad is None else x,
    "retain_grad": lambda x: (x * 2).retain_grad() or x,
    "register_hook": lambda x: (x * 2).register_hook(abs) or x,
    "saved_tensors_hooks": lambda x: with_hooks(torch.autograd.graph.saved_tensors_hooks(abs, abs), x),
    "unsqueeze_": lambda x: x.clone().unsqueeze_(0),
}


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


@pytest.mark.parametrize("program", [scripted, torch.jit.trace(lambda x: x.sin() * 2, torch.ones(2))])
def test_a_function_of_torch_jit_is_one_operator(program):
    assert_same(lambda x: program(x) * 3, matrix())


def with_hooks(hooks, x):
    with hooks:
        return x * x


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_before_the_program_runs_is_refused_with_the_line_and_a_way_out(name):
    with pytest.raises(hookkit.HookError, match=rf"test_operations\.py:\d+|{name}") as refused:
        thunder.jit(REFUSED[name])(matrix())
    assert any(way in str(refused.value) for way in ("outside", "new tensor", "x.detach()", "Return the tensor"))


def test_the_error_of_an_operation_that_refuses_its_arguments_is_pytorchs():
    def program(x):
        return torch.linalg.solve(x[:3], x)

    with pytest.raises(RuntimeError) as eager:
        program(matrix())
    with pytest.raises(type(eager.value), match="must be batches of square matrices"):
        thunder.jit(program)(matrix())


COMPLEX = {
    "x * 1j": lambda x: x * 1j,
    "to": lambda x: x.to(torch.complex128) * (1 + 2j),
    "complex": lambda x: torch.complex(x, x * 2) ** 2,
    "matmul": lambda x: (x * (1 - 2j)) @ (x * 1j),
    "exp, abs and angle": lambda x: (x * 1j).exp().abs() * (x + 1j).angle(),
    "1 / z": lambda x: 1 / (x + 1j),
    "real and imag": lambda x: (x * (2 - 1j)).real * (x * (2 - 1j)).imag,
    "fft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 + 1j)),
    "in place": lambda x: (x * 1j).mul_(x + 1j).add_(1),
    "cat and sum": lambda x: torch.cat([x * 1j, x + 1j]).sum(0),
    "linear": lambda x: F.linear(x * 1j, x + 1j),
    "checkpoint": lambda x: checkpoint(lambda z: z * z, x * 1j, use_reentrant=False),
    "recompute": lambda x: hookkit.recompute(lambda z: z * z, x * 1j),
    "no gradient": lambda x: x.detach() * 1j,
}


def inductor_takes_complex_numbers():
    """Whether it compiles a backward that multiplies by one: torch 2.7's does not, and gets it from thunderfx."""
    torch._dynamo.reset()
    try:
        torch.compile(lambda x: x * 1j)(matrix()).sum().abs().backward()
    except InductorError:
        return False
    return True


@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("jit", [thunder.jit, thunderfx], ids=["jit", "thunderfx"])
def test_gradients_of_complex_numbers_are_conjugated(name, jit):
    torch._dynamo.reset()
    try:
        assert_same(COMPLEX[name], matrix(), jit=jit)
    except InductorError:
        assert not inductor_takes_complex_numbers()


def test_a_function_of_complex_numbers_beside_operations_on_them():
    class Product(Function):
        @staticmethod
        def forward(ctx, z, w):
            ctx.save_for_backward(z, w)
            return z * w

        @staticmethod
        def backward(ctx, gradient):
            z, w = ctx.saved_tensors
            return 10 * gradient * w.conj(), 100 * gradient * z.conj()

    assert_same(lambda x: Product.apply(x * 1j, x + 2j) * (x - 1j), matrix())


def test_an_input_with_a_history_of_its_own_keeps_it():
    """The backward of an opaque call ends at the program's inputs; PyTorch goes on from there, once."""
    gradients = []
    for program in (torch.linalg.det, thunder.jit(torch.linalg.det)):
        x = matrix()
        program(x * x).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
