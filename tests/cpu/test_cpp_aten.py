"""ATen calls from the C++ wrapper: which way each takes, and that eager's numbers and errors come out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import reflib
from reflib.c_shims import Shim, parse
from reflib.errors import OptionError
from reflib.options import Options
from reflib.wrap import host  # noqa: F401 - asked when a test begins
from reflib.wrap.aten import in_python, number, quoted
from tests import c_library

pytestmark = pytest.mark.skipif("host.why_not()", reason="no C++ wrapper here")


def ways(f: Callable[..., Any], *args: Any, **options: Any) -> dict[str, str]:
    """How each call is made, by op."""
    text = reflib.explain(f, *args, wrapper="cpp", **options).wrapper.partition("/* Called from above")[0]
    out = {}
    for part in text.split('run.step("')[1:]:
        op, _, body = part.partition('"')
        if not op.startswith("empty "):
            body = body.partition("\n  out[0]")[0]
            way = "dispatcher" if "dispatch(run" in body else "C" if "call(run" in body else "Python"
            out[op.removesuffix(".default")] = way
    return out


def same(f: Callable[..., Any], *args: Any, **options: Any) -> None:
    """As eager, twice: AOTAutograd watches the first call through a mode."""
    g = reflib.compile(f, wrapper="cpp", **options)
    for _ in range(2):
        torch.manual_seed(0)
        want = f(*args)
        torch.manual_seed(0)
        torch.testing.assert_close(g(*args), want)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.int64)


def complex_(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex64)


X = torch.arange(128.0).reshape(8, 16) % 7
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple, dict[str, str]]] = {
    "mm": (lambda a, b: a @ b, (rand(8, 16), rand(16, 4)), {"aten.mm": "C"}),
    "mm of views": (
        lambda a, b: a[::2, 1:] @ b.t(), (rand(8, 17), rand(4, 16)), {"aten.mm": "C"},
    ),
    "mm of nothing": (lambda a, b: a @ b, (rand(0, 16), rand(16, 4)), {"aten.mm": "C"}),
    "mm over nothing": (lambda a, b: a @ b, (rand(3, 0), rand(0, 4)), {"aten.mm": "C"}),
    "mm of ints": (lambda a, b: a @ b, (ones(3, 4), ones(4, 2)), {"aten.mm": "C"}),
    "mm of conjugates": (lambda a, b: a @ b.conj().t(), (complex_(3, 4), complex_(5, 4)), {"aten.mm": "C"}),
    "bmm": (lambda a, b: torch.bmm(a.transpose(1, 2), b), (rand(2, 16, 8), rand(2, 16, 4)), {"aten.bmm": "C"}),
    "addmm": (
        lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5), (rand(4), rand(8, 16), rand(16, 4)),
        {"aten.addmm": "C"},
    ),
    # exact ints are no doubles
    "addmm of ints": (torch.addmm, (ones(4), ones(3, 5), ones(5, 4)), {"aten.addmm": "Python"}),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c.expand(2, 8, 4), a, b), (rand(4), rand(2, 8, 16), rand(2, 16, 4)),
        {"aten.baddbmm": "C"},
    ),
}  # fmt: skip
OTHERS: dict[str, tuple[Callable[..., Any], tuple, dict[str, str]]] = {
    "no rule": (lambda a: (torch.erfinv(a), torch.special.i1(a.t())), (X / 9,),
                {"aten.erfinv": "dispatcher", "aten.special_i1": "dispatcher"}),
    "sorts": (lambda a: (torch.sort(a, dim=-1, stable=True), a.topk(3), a.median(0), a.kthvalue(2, 0)), (X,),
              {"aten.sort.stable": "dispatcher", "aten.topk": "dispatcher", "aten.median.dim": "dispatcher",
               "aten.kthvalue": "dispatcher"}),
    "convolution": (lambda a, w, b: F.conv2d(a, w, b, padding=1), (rand(2, 3, 8, 8), rand(4, 3, 3, 3), rand(4)),
                    {"aten.convolution": "dispatcher"}),
    "attention": (lambda a: F.scaled_dot_product_attention(a, a, a, is_causal=True, scale=0.3), (rand(2, 3, 8, 8),),
                  {"aten._scaled_dot_product_flash_attention_for_cpu": "dispatcher"}),
    "a text": (lambda a, i, s: a.scatter_reduce(0, i, s, "prod", include_self=False),
               (rand(6), torch.tensor([0, 0, 1]), rand(3)), {"aten.scatter_reduce.two": "dispatcher"}),
    "an optional text": (lambda a, b: torch.searchsorted(a, b, side="right", sorter=a.long()),
                         (torch.arange(5.0), rand(3)),
                         {"aten.searchsorted.Tensor": "dispatcher"}),
    "optional tensors in a list": (lambda a, i, s: torch.ops.aten.index_put(a, [None, i], s, True),
                                   (rand(3, 6), torch.tensor([0, 0, 1]), rand(3, 3)),
                                   {"aten.index_put": "dispatcher"}),
    "an optional list": (lambda a: torch.fft.fft2(a.to(torch.complex64), norm="ortho"), (X,),
                         {"aten._fft_c2c": "dispatcher"}),
    "pairs of real numbers": (lambda a: torch.fft.irfft(torch.fft.rfft(a) * 0.5, X.shape[-1]), (X,),
                              {"reflib.fft_r2c": "dispatcher", "reflib.fft_c2r": "dispatcher"}),
    "random numbers": (lambda a: (torch.native_dropout(a, 0.5, True), torch.bernoulli(a * 0 + 0.5), torch.rand(4)),
                       (X,), {"aten.native_dropout": "dispatcher", "aten.bernoulli": "dispatcher",
                              "aten.rand": "dispatcher"}),
    "several results": (torch.linalg.svd, (torch.eye(4) * 2 + X[:4, :4] / 9,), {"aten._linalg_svd": "dispatcher"}),
    "a result nobody uses": (lambda a: a.topk(2)[0].sin(), (X,), {"aten.topk": "dispatcher"}),
    "results that are views": (lambda a, z: ((a * 2).view(torch.int16), torch.view_as_real(z.sqrt()), z.sqrt().imag),
                               (X, complex_(3)), {"aten.view.dtype": "dispatcher", "aten.view_as_real": "dispatcher"}),
    "a Scalar": (lambda a: torch.histc(a, 4), (X,), {"aten.histc": "Python"}),
    "a list of results": (lambda a: torch._foreach_exp([a, a]), (X,), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*PRODUCTS, *OTHERS])
@pytest.mark.sample(3)
def test_way_and_numbers(name: str) -> None:
    f, args, expected = (PRODUCTS | OTHERS)[name]
    found = ways(f, *args)
    assert {op: found.get(op) for op in expected} == expected, found
    same(f, *args)


@pytest.mark.parametrize(
    "f, args",
    [
        (torch.linalg.solve, (torch.zeros(3, 3), torch.ones(3, 1))),
        (torch.linalg.cholesky, (-torch.eye(3),)),
        (lambda a: torch.multinomial(a, 2), (-torch.ones(4),)),
        (lambda a, i: a.index_put((i,), torch.ones(2), accumulate=True), (torch.zeros(3), torch.tensor([0, 7]))),
    ],
    ids=["solve", "cholesky", "multinomial", "index_put"],
)
def test_errors_are_eagers(f: Callable[..., Any], args: tuple) -> None:
    def outcome(g: Callable[..., Any]) -> tuple[Any, str]:
        try:
            g(*args)
        except Exception as e:
            return type(e), str(e)
        return None, ""

    want = outcome(f)
    if torch.__version__ < "2.12" and f in (torch.linalg.solve, torch.linalg.cholesky):
        want = outcome(reflib.compile(f))  # there AOTAutograd drops the op that checks, in both wrappers
    g = reflib.compile(f, wrapper="cpp")
    for _ in range(2):  # under AOTAutograd's mode the exception comes from Python, then from C++
        assert outcome(g) == want


def test_text_in_cpp() -> None:
    assert [number(v) for v in (1.0, 1e-5, float("-inf"), float("nan"))] == [
        "1.0", "1e-05", "-__builtin_inf()", '__builtin_nan("")'
    ]  # fmt: skip
    assert quoted('a "b" \\') == '"a \\"b\\" \\\\"'
    assert not in_python(torch.ops.aten.mm.default)


# -- ops and functions of a C library ------------------------------------------------------------------
LIBRARY = r"""
extern "C" {
int32_t calls = 0;

// x * by + the sum of `more`, plus other[0] if there is one; x is a vector
int32_t rtest_scale_shim(AtenTensorHandle x, double by, const int64_t* more, int64_t n, AtenTensorHandle* other,
                         int64_t* at, int32_t twice, AtenTensorHandle* out) {
  int64_t *sizes, *strides, one = 1;
  float *from, *to, *plus = nullptr;
  if (by == 13) return 1;
  ++calls;
  aoti_torch_get_sizes(x, &sizes), aoti_torch_get_strides(x, &strides);
  aoti_torch_empty_strided(1, sizes, &one, 6, 0, -1, out);
  aoti_torch_get_data_ptr(x, (void**)&from), aoti_torch_get_data_ptr(*out, (void**)&to);
  if (other) aoti_torch_get_data_ptr(*other, (void**)&plus);
  for (int64_t i = 0; i < sizes[0]; ++i) {
    to[i] = from[i * strides[0]] * by;
    for (int64_t k = 0; k < n; ++k) to[i] += more[k];
    if (plus) to[i] += plus[at ? *at : 0];
    if (twice) to[i] *= 2;
  }
  return 0;
}

int32_t rtest_new_shim(AtenTensorHandle x, AtenTensorHandle* out) { return 1; }
uint64_t rtest_new_shim_version(void) { return 99ull << 56; }
}

// zeros by columns, whatever was promised
static void by_columns(uint64_t* stack, uint64_t, uint64_t) {
  int64_t sizes[2] = {3, 4}, strides[2] = {1, 3};
  AtenTensorHandle out;
  float* p;
  aoti_torch_empty_strided(2, sizes, strides, 6, 0, -1, &out);
  aoti_torch_get_data_ptr(out, (void**)&p);
  for (int i = 0; i < 12; ++i) p[i] = i;
  aoti_torch_delete_tensor_object((AtenTensorHandle)stack[0]);
  stack[0] = (uint64_t)out;
}
"""
OP = "rtest_aten::scale"
PROTOTYPE = (
    "int32_t rtest_scale_shim(AtenTensorHandle x, double by, const int64_t* more, int64_t more_len, "
    "AtenTensorHandle* other, int64_t *at, int32_t twice, AtenTensorHandle* out)"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, loaded; ``rtest_aten::scale`` is an op in Python, and its function in C is in the library."""
    folder = tmp_path_factory.mktemp("library")
    ops = {"rtest_aten::by_columns": "by_columns(Tensor x) -> Tensor"}
    made = c_library.build(folder / "rtest.so", LIBRARY, ops)
    torch.ops.load_library(str(made))

    @torch.library.custom_op(OP, mutates_args=())
    def scale(
        x: Tensor, by: float, more: list[int], other: Tensor | None = None, at: int | None = None, twice: bool = False
    ) -> Tensor:
        if by == 13:
            raise ValueError("no luck")
        out = x * by + sum(more) + (other[at or 0] if other is not None else 0)
        return out * 2 if twice else out

    @scale.register_fake
    def _(x: Tensor, *_: Any) -> Tensor:
        return x.new_empty(x.shape)

    @torch.library.register_fake("rtest_aten::by_columns")
    def _(x: Tensor) -> Tensor:
        return x.new_empty(3, 4)

    return made


def calls(library: Path) -> int:
    import ctypes

    return ctypes.c_int32.in_dll(ctypes.CDLL(str(library)), "calls").value


def test_another_layout_than_promised(library: Path) -> None:
    f = torch.ops.rtest_aten.by_columns
    assert ways(lambda x: f(x), X) == {"rtest_aten.by_columns": "dispatcher"}
    same(lambda x: f(x) + 1, X)
    for wrapper in ("python", "cpp"):  # what no kernel reads is returned as eager does
        assert reflib.compile(lambda x: f(x), wrapper=wrapper)(X).stride() == f(X).stride() == (1, 3)
        assert reflib.compile(lambda x: f(x)[1:], wrapper=wrapper)(X).stride() == (4, 1)


def test_an_op_in_python_stays_there(library: Path) -> None:
    assert in_python(torch.ops.rtest_aten.scale.default)
    f = lambda x: torch.ops.rtest_aten.scale(x, 2.0, [1])  # noqa: E731
    assert ways(f, rand(4)) == {"rtest_aten.scale": "Python"}
    same(f, rand(4))


def test_declared_function(library: Path) -> None:
    op = torch.ops.rtest_aten.scale

    def f(x: Tensor, y: Tensor) -> Any:
        return (
            op(x, 2.5, []), op(x, 0.5, [1, x.shape[0]], y[2:], 1), op(x.exp()[::2], 1.0, [3], None, None, True),
        )  # fmt: skip

    shims = {OP: PROTOTYPE}
    assert ways(f, rand(6), rand(6), c_shims=shims) == {"rtest_aten.scale": "C"}
    before = calls(library)
    same(f, rand(6), rand(6), c_shims={op.default: PROTOTYPE})
    assert calls(library) == before + 6
    same(f, rand(6), rand(6), c_shims=shims, dynamic=True)
    with pytest.raises(ValueError, match="no luck"):  # the op's own
        reflib.compile(lambda x: op(x, 13.0, []), wrapper="cpp", c_shims=shims)(rand(3))
    before = calls(library)
    torch._dynamo.reset()
    reflib.compile(f, wrapper="python", c_shims=shims)(rand(6), rand(6))
    assert calls(library) == before


@pytest.mark.parametrize(
    "declared, message",
    [
        (PROTOTYPE.replace("double by", "int64_t by"),
         r"argument 1 \(by\) is float, so parameter 1 of rtest_scale_shim must be double; it is 'int64_t by'"),
        (PROTOTYPE.replace("AtenTensorHandle* other", "AtenTensorHandle other"),
         r"argument 3 \(other\) is Optional\[Tensor\], so parameter 4 .* must be AtenTensorHandle\*"),
        (PROTOTYPE.replace(", AtenTensorHandle* out", ""), "result 0 is a Tensor, so parameter 7 .* there is none"),
        (PROTOTYPE.replace("out)", "out, double more)"), "has more parameters than .*: 'double more'"),
        (PROTOTYPE.replace("int32_t r", "void r"), "must return int32_t"),
        ("rtest_scale_shim", "no prototype"),
        (PROTOTYPE.replace("double by", "std::string by"), "'std::string by' is no known parameter"),
        (3, "must be a C prototype"),
    ],
)  # fmt: skip
def test_wrong_declarations(library: Path, declared: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options(c_shims={OP: declared})


def test_functions_that_are_not_there(library: Path) -> None:
    def compile_with(shims: Any) -> Any:
        torch._dynamo.reset()
        f = lambda x: torch.ops.rtest_aten.scale(x, 2.0, [])  # noqa: E731
        return reflib.explain(f, rand(3), wrapper="cpp", c_shims=shims)

    # Dynamo wraps what a backend raises
    with pytest.raises(BackendCompilerFailed, match=r"no function rtest_absent .*torch\.ops\.load_library"):
        compile_with({OP: PROTOTYPE.replace("rtest_scale_shim", "rtest_absent")})
    new = "int32_t rtest_new_shim(AtenTensorHandle x, AtenTensorHandle* out)"
    with pytest.raises(BackendCompilerFailed, match=r"rtest_new_shim was built for torch 99\.0, and this is torch 2\."):
        compile_with({"rtest_aten::by_columns": new})
    with pytest.raises(BackendCompilerFailed, match="there is no op 'rtest_aten::absent'"):
        compile_with({"rtest_aten::absent": new})
    for bad in ({"scale": new}, {7: new}, 7):
        with pytest.raises(OptionError, match="c_shims"):
            Options(c_shims=bad)


def test_option_is_plain_data(library: Path) -> None:
    o = Options(c_shims={OP: PROTOTYPE})
    assert o.c_shims == ((OP, PROTOTYPE),)
    assert hash(o) == hash(o.but(verify=True).but(verify=False)) and Options(c_shims=[list(p) for p in o.c_shims]) == o
    assert Options(c_shims=None) == Options(c_shims={}) == Options()
    assert parse("AOTITorchError f(void)") == Shim("f", ())
