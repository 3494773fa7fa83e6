"""What autotune/measure measures with: its data."""

import pytest
import torch

from reflib.autotune import inputs
from reflib.autotune.inputs import InputSpec, make_inputs, rotate, storage_of, weight_copies
from reflib.errors import MeasureError


# -- data to measure with ---------------------------------------------------------------------------
def spec(shape, strides, dtype="float32", role="activation", maker=None):
    return InputSpec("x", role, 0, shape, strides, dtype, "cpu", maker)


def test_inputs_are_laid_out_as_asked():
    specs = [
        spec((4, 6), (6, 1)), spec((4, 6), (1, 4), "bfloat16"), spec((4, 6), (0, 1)), spec((5, 3), (2, 1)),
        spec((0, 3), (3, 1)), spec((), ()), spec((40,), (2,), "bool"), spec((3,), (1,), "int32"),
        spec((8,), (1,), "float8_e4m3fn"), spec((8,), (1,), "complex64"),
        InputSpec("s0", "size", 7), InputSpec("", "unused"),
    ]  # fmt: skip
    state = torch.get_rng_state()
    made, again = make_inputs(specs, 1, {}), make_inputs(specs, 1, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert made[-2:] == [7, None]
    for s, t, u in zip(specs, made[:-2], again):
        assert (t.shape, t.stride(), str(t.dtype)) == (s.shape, s.strides, f"torch.{s.dtype}")
        assert t.untyped_storage().nbytes() == s.nbytes and t.storage_offset() == 0
        assert torch.equal(t.float() if t.dtype.itemsize == 1 else t, u.float() if u.dtype.itemsize == 1 else u)
    assert not torch.equal(made[0], make_inputs(specs, 2, {})[0])
    assert 0 < int(made[6].sum()) < 40 and int(made[7].abs().sum()) == 0


def test_sums_of_products_stay_moderate():
    a, b = make_inputs([spec((64, 32768), (32768, 1), "float16"), spec((32768, 64), (64, 1), "float16")], 0, {})
    y = a.float() @ b.float()
    assert 0.5 < float(y.std()) < 2


def test_makers():
    specs = [spec((4, 6), (1, 4), maker="ones"), spec((4, 6), (0, 1), maker="ones")]
    a, b = make_inputs(specs, 0, {"ones": torch.ones_like})
    assert torch.equal(a, torch.ones(4, 6)) and a.stride() == (1, 4) and b.stride() == (0, 1) and b.sum() == 24
    for maker, message in (
        (lambda t: t[0], r"made torch.float32 \(6,\), not a tensor torch.float32 \(4, 6\)"),
        (lambda t: 3, "made int, not"),
        (lambda t: t.nope, "raised AttributeError"),
    ):
        with pytest.raises(MeasureError, match=f"input maker 'ones' {message}"):
            make_inputs(specs, 0, {"ones": maker})
    with pytest.raises(MeasureError, match="no input maker 'ones' here"):
        make_inputs(specs, 0, {})


def test_weights_take_turns():
    specs = [spec((4, 6), (1, 4)), spec((4, 6), (1, 4), role="weight"), InputSpec("s0", "size", 3)]
    args = make_inputs(specs, 0, {})
    first, second, third = rotate(specs, args, 3, set())
    assert first[0] is second[0] is third[0] and second[2] == 3
    assert len({s[1].data_ptr() for s in (first, second, third)}) == 3
    assert torch.equal(second[1], args[1]) and second[1].stride() == (1, 4)
    assert all(s[1] is args[1] for s in rotate(specs, args, 3, {1}))
    mib = 2**20
    assert weight_copies(0, 1000 * mib, 50 * mib) == 1
    assert weight_copies(mib, 1000 * mib, 50 * mib) == 100
    assert weight_copies(200 * mib, 1000 * mib, 50 * mib) == 1
    assert weight_copies(30 * mib, 45 * mib, 50 * mib) == 2
    assert weight_copies(16, 1000 * mib, 50 * mib) == inputs.MAX_COPIES
    assert storage_of(torch.zeros(3, 4).t()).shape == (12,)
