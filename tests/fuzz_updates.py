"""Steps of the random programs that update in place (``tests.cpu.test_fuzz``): what is updated, how, and what follows.

"{p}": a part of a value, "{q}": another part of it, "{a}": all of it, "{b}": another value, {d}, {e}: dimensions, {k},
{m}: a position, and a size from there on. ``U`` is this module.
"""

from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import scan, while_loop

PART = (
    "{a}", "{a}", "{a}.narrow({d}, {k}, {m})", "{a}.narrow({d}, {k}, {m})", "{a}.select({d}, {k})",
    "{a}.transpose({d}, {e})", "{a}[..., ::2]", "{a}[1:]", "{a}[:-1]", "{a}.diagonal(0, {d}, {e})", "{a}.reshape(-1)",
    "{a}.unsqueeze({d})", "{a}.chunk(2, {d})[-1]", "{a}.narrow({d}, {k}, {m})[..., 1:]",
    "torch.as_strided({a}, ({m},), (1,))", "torch.as_strided({a}, ({m},), (1,), {k})",
)  # fmt: skip
UPDATE = (
    "{p}.add_({b})", "{p}.mul_(2)", "{p}.copy_({b})", "{p}.copy_({q} * 2)", "{p}.add_({q}.clone())", "{p}.fill_(1)",
    "{p}.zero_()", "{p}.clamp_(-1, 1)", "{p}.masked_fill_({p} > 0, 2)", "{p}.sub_({b}.sum())", "{p}.neg_()",
    "{p}.index_copy_({d}, torch.arange({p}.shape[{d}], device={p}.device).flip(0), {p}.clone())",
    "{p}.copy_({p}.flip({d}))",
    "{p}.index_add_({d}, torch.zeros({p}.shape[{d}], dtype=torch.int64, device={p}.device), {p} * 2)",
    "{p}.scatter_({d}, torch.zeros_like({p}, dtype=torch.int64), 3)",
    "{p}.index_fill_({d}, torch.tensor([0], device={p}.device), 4)",
    "{p}.index_put_((torch.arange({p}.shape[0], device={p}.device) // 2,), {p}[:1] + 1, accumulate=True)",
    "{p}.relu_()",
    "{p}.copy_({p}.cumsum({d}))", "{p}.copy_(torch.cat([{p}, {p}], {d}).narrow({d}, 1, {p}.shape[{d}]))",
    "{p}.masked_scatter_({p} > 0, {p}.flip({d}).contiguous())", "{p}.addcmul_({b}, {b})", "{p}.lerp_({b}, 0.5)",
    "{p}.transpose_({d}, {e})", "{p}.copy_({b}.to({p}.dtype) @ {b}.to({p}.dtype).mT)", "{p}.swapaxes({d}, {e}).mul_(3)",
    "{p}.copy_(torch.slice_scatter({p}, {p}[:1] + 1, 0, 0, 1))", "torch.mul({p}, 2, out={p})",
    "{p}.copy_(torch.select_scatter({p}, {p}.select({d}, 0) * 2, {d}, 0))", "torch.add({p}, {b}, out={p})",
    "torch.cumsum({p}.clone(), {d}, out={p})", "{p}.copy_({p}.sort(dim={d}, stable=True)[0])",
    "torch.sort({p}.clone(), stable=True, dim={d}, out=({p}, torch.zeros_like({p}, dtype=torch.int64)))[0]",
    "{p}.index_put_(({p} > 0,), torch.ones((), dtype={p}.dtype, device={p}.device))", "{p}.cumsum_({d})",
    "torch._foreach_mul_([{p}], 2) or {p}", "{p}.put_(torch.tensor([0], device={p}.device), {p}.reshape(-1)[:1] + 1)",
    "{p}.scatter_add_({d}, torch.zeros_like({p}, dtype=torch.int64), {p} * 2)", "{p}.tril_()", "{p}.addmm_(-{p}, -{p})",
    "{p}.scatter_reduce_({d}, torch.zeros_like({p}, dtype=torch.int64), {p}.clone(), 'amax')", "{p}.squeeze_()",
    "{p}.sub_({p}.sum({d}, keepdim=True))", "{p}.mul_({p}.select({d}, 0).unsqueeze({d}))", "{p}.add_({p}.flip({d}))",
    "{p}.unflatten({d}, (-1, 1)).add_(1)", "{p}.movedim({d}, 0).copy_({b})", "torch.maximum({p}, {b}, out={p})",
    "F.silu({p}, inplace=True)", "F.threshold({p}, 0, 1, inplace=True)", "{p}.copy_({q}.clone())", "{p}.add_({q})",
    "torch.stack([{p}[0], {p}[0] * 2], out={p}[:2])", "torch.cat([{p}.clone()[1:], {p}[:1] * 3], out={p})",
    "torch.cat([{p}.clone()[1:], {p}[:1] * 3], out={q})", "torch.sum({p}.clone(), {d}, out={p}.select({d}, 0))",
    "torch._foreach_add_([{p}, {q}], 1) or {p}", "torch._foreach_copy_([{p}, {q}], [{b}, {p}.clone()]) or {q}",
)  # fmt: skip
JOINED = (  # parts of one tensor that calls and kernels make
    "torch.cat([{p} * 2, {p}.cumsum({d})], {d})", "F.pad({p}, (0, 3))",
    "F.pad({p}.sort(dim={d}, stable=True)[0], (1, 2))",
    "torch.stack([{p}.sort(dim={d}, stable=True)[0], {p}], {d})", "torch.cat({p}.split(2, {d})[::-1], {d})",
    "torch.cat([{p}.double() @ {p}.double().mT, {p}.double()], -1)", "torch.cat([{p}.topk(1, {d})[0], {p}], {d})",
    "torch.cat([{p}.double().softmax({d}), {p}.double()], {d})", "torch.cat([{p}, {q}], {d})", "{p}.unbind({d})[-1]",
    "torch.stack({p}.sort(dim={d}, stable=True)[::-1], {d})",
    "torch.zeros_like({a}).copy_({a}.sort(dim={d}, stable=True)[0])",
)  # fmt: skip
HOW: tuple[dict[str, Any], ...] = ({}, {}, {"arena": True}, {"wrapper": "cpp"}, {"wrapper": "cpp", "arena": True})
SEEN = (  # an input that is a view of another
    "{a}", "{a}.narrow({d}, {k}, {m})", "{a}[1:]", "{a}[:-1]", "{a}[..., ::2]", "{a}[..., 1::2]",
    "{a}.transpose({d}, {e})", "{a}.select({d}, {k})", "{a}.view(-1)", "{a}.detach()", "{a}.view(torch.int32)",
    "torch.as_strided({a}, ({m},), (1,))", "{a}.diagonal(0, {d}, {e})", "torch.as_strided({a}, ({m},), (1,), {k})",
)  # fmt: skip
BLOCKS = (  # branches and loops around updates
    "U.branch({p}, {k}, {d})", "{p}.copy_(U.branch({p}, {k}, {d}))", "{p}.copy_(U.either({p}, {b}))",
    "U.either({p}, {q})", "U.loop({p}, {d})", "{p}.copy_(U.loop({p}, {d}))", "{p}.copy_(U.scanned({p})[0])",
    "U.scanned({p})[1]", "U.both({p}, {q})[0]", "{p}.copy_(U.both({p}, {q})[1])", "U.nested({p}, {d})",
    "torch.cat([U.branch({p}, {k}, {d}), {q}], {d})", "U.branch({a}, {k}, {d}).narrow({d}, {k}, {m}).add_(1)",
)  # fmt: skip
LISTS = (  # lists of tensors, neighbouring slices put together again, slices over each other, copies that calls read
    "torch.cat(U.parts({p}, 2), {d})", "torch.stack(U.parts({p}, 3), {d})[1:]", "U.parts({p}, 2)[1].add_({b})",
    "{p}.copy_(U.parts({p}, 2)[1])", "torch.cat([*U.parts({p}.clone(), 2), {q}], {d})", "U.mixed({p})[1]",
    "torch.cat([U.mixed({p})[1], U.mixed({p})[0][1]], {d})", "torch.stack(torch.unbind_copy({p}, {d}), {e})",
    "torch.cat(torch.split_copy({p}, 2, {d}), {d})", "torch.stack(torch._foreach_norm([{p}.double(), {a}.double()]))",
    "U.rejoined({p}, {k}, {d})", "U.rejoined({p}, {k}, {d}).cumsum({d})", "U.rejoined({p}, {k}, {d}).add_({q})",
    "U.rejoined({p}, {k}, {d}).double() @ {p}.double().mT",
    "torch.cat({p}.chunk(3, {d}), {d}).sort(dim={d}, stable=True)[0]",
    "{p}.copy_(U.rejoined({p}, {k}, {d}).cumsum({d}))", "torch.stack({p}.unbind({d}), {d}).cumsum({d})",
    "{p}.clone().cumsum({d})", "{p}.clone() @ {p}.mT.contiguous()", "{p}.contiguous().sort(dim={d}, stable=True)[0]",
    "F.pad({p}, (0, 0)).topk(1, {d})[0]", "torch.cat([{p}.narrow({d}, 0, 1), {p}], {d}).cumsum({d})",
    "U.overlapping({p}, {d})", "U.overlapping({p}, {d}).cumsum({d})", "U.in_two({p}, {q}, {d})",
    "U.into_list({p}, {d})", "torch.cat([{p}.cumsum({d}), {p}, {p}.cumsum({d})], {d})",
)  # fmt: skip

LIB = torch.library.Library("fuzz_updates", "FRAGMENT")


def _define(name: str, fn: Any, functional: str, out: str) -> None:
    def into(x: Tensor, *args: Any, **outs: Any) -> Any:
        made = [t for v in outs.values() for t in (v if isinstance(v, list) else [v])]
        for to, value in zip(made, torch.utils._pytree.tree_leaves(fn(x, *args)), strict=True):
            to.copy_(value)
        return tuple(outs.values()) if len(outs) > 1 else None

    for key, schema, kernel in ((name, functional, fn), (f"{name}.out", out, into)):
        LIB.define(f"{key}({schema}")
        LIB.impl(key, kernel, "CompositeExplicitAutograd")


_define(
    "parts", lambda x, n: [x * (i + 1) for i in range(n)],
    "Tensor x, int n) -> Tensor[]", "Tensor x, int n, *, Tensor(a!)[] out) -> ()",
)  # fmt: skip
_define(
    "mixed", lambda x: ([x + 1, x * 2], x.clone()),
    "Tensor x) -> (Tensor[], Tensor)", "Tensor x, *, Tensor(a!)[] out, Tensor(b!) y) -> (Tensor(a!)[], Tensor(b!))",
)  # fmt: skip


def parts(x: Tensor, n: int) -> list[Tensor]:
    return torch.ops.fuzz_updates.parts(x.detach(), n)


def mixed(x: Tensor) -> Any:
    return torch.ops.fuzz_updates.mixed(x.detach())


def into_list(x: Tensor, d: int) -> Tensor:
    like = [torch.zeros_like(t) for t in x.split(2, d)]
    torch.split_copy(x.detach(), 2, d, out=like)
    return torch.cat(like, d)


def rejoined(x: Tensor, k: int, d: int) -> Tensor:
    return torch.cat([x.narrow(d, 0, k), x.narrow(d, k, x.shape[d] - k)], d)


def overlapping(x: Tensor, d: int) -> Tensor:
    """Slices that lie over each other, of which the second reads what the first one wrote."""
    y, n = x.clone(), x.shape[d] - 1
    y.narrow(d, 0, n).copy_(x.narrow(d, 1, n) * 2)
    y.narrow(d, 1, n).add_(y.narrow(d, 0, n).clone())
    y.select(d, 0).zero_()
    return y


def in_two(x: Tensor, y: Tensor, d: int) -> Tensor:
    a = x.cumsum(d)
    first, second = torch.cat([a, y], d), torch.cat([y, a], d)
    return first - second


def _row(x: Tensor, k: int, d: int) -> Tensor:
    y = x.clone()
    y.select(d, k).copy_(y.select(d, 0) * 2 + 1)
    return y


def _same(x: Tensor, *_: Any) -> Tensor:
    return x.clone()


def branch(x: Tensor, k: int, d: int) -> Tensor:
    if k >= x.shape[d]:  # torch 2.11 runs that as long as the branch is not taken
        return x.clone()
    return torch.cond(x.sum() > 0, lambda x: _row(x, k, d), _same, (x,))


def either(x: Tensor, y: Tensor) -> Tensor:
    def first(x: Tensor, y: Tensor) -> Tensor:
        z = x.clone()
        z[:1] = y[:1]
        return z

    def second(x: Tensor, y: Tensor) -> Tensor:
        z = x.clone()
        z[-1:].add_(y[:1])
        return z * 2

    return torch.cond(x.sum() > y.sum(), first, second, (x, y))


def both(x: Tensor, y: Tensor) -> Any:
    def first(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return _row(x, 0, 0), x.slice_scatter(y[:1] + 1, 0, 0, 1)

    return torch.cond(x.sum() > 0, first, lambda x, y: (x.clone(), _row(x, 0, 0)), (x, y))


def loop(x: Tensor, d: int) -> Tensor:
    def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = y.clone()
        z.select(d, -1).copy_(z.select(d, 0) + i.to(z.dtype))
        return i + 1, z

    return while_loop(lambda i, y: i < 3, body, (torch.zeros((), dtype=torch.int64, device=x.device), x))[1]


def nested(x: Tensor, d: int) -> Tensor:
    def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.cond(i > 1, lambda y: _row(y, 0, d), _same, (y,))

    return while_loop(lambda i, y: i < 3, body, (torch.zeros((), dtype=torch.int64, device=x.device), x))[1]


def scanned(x: Tensor) -> Any:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return carry.slice_scatter(carry[:1] + row[None], 0, 0, 1), row + carry[-1]

    return scan(step, x.clone(), x)
