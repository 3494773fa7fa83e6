"""Weights in a package: the safetensors format, tensors over mapped memory, shared where they were shared."""

import json
import random
import struct

import pytest
import safetensors
import safetensors.torch
import torch

from reflib.errors import PackageError
from reflib.package import archive, weights

Described = tuple[tuple[weights.Weight, ...], tuple[weights.Span, ...]]
# which safetensors' format names, but its torch loader (0.8.0) does not make
ONLY_NAMED = {torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}


def pack(tensors) -> tuple[archive.Chunks, Described]:
    chunks, *described = weights.pack(tensors, dict.fromkeys(tensors, "parameter"))
    return chunks, tuple(described)


def packed(tensors) -> tuple[bytes, Described]:
    """(the member, (weights, spans))."""
    chunks, described = pack(tensors)
    data = b"".join(bytes(c) for c in chunks)
    assert len(data) == chunks.size
    return data, described


def again(tensors) -> dict[str, torch.Tensor]:
    data, described = packed(tensors)
    return weights.mapped(memoryview(bytearray(data)), *described)


def header(data: bytes) -> dict:
    return json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])


def bits(t: torch.Tensor) -> torch.Tensor:
    """NaNs are equal if their bits are."""
    words = weights._WORDS[t.dtype.itemsize]
    return torch.empty(0, dtype=words).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == sorted(wanted)
    for name, want in wanted.items():
        t = found[name]
        assert (t.dtype, t.shape, t.stride()) == (want.dtype, want.shape, want.stride()), name
        assert torch.equal(bits(t), bits(want.detach())), name
        assert not t.requires_grad and type(t) is torch.Tensor


def any_bits(dtype: torch.dtype, n: int = 24) -> torch.Tensor:
    """All kinds of bits, also NaN's."""
    if dtype == torch.bool:
        return torch.arange(n) % 3 == 0
    rng = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=rng)
    raw[: dtype.itemsize] = 0xFF
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (n,), (1,))


@pytest.fixture
def base() -> torch.Tensor:
    return torch.arange(48.0)


# -- the format -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", weights.DTYPES, ids=str)
def test_dtypes_and_the_safetensors_library(dtype, tmp_path):
    t = any_bits(dtype)
    grid = torch.empty(0, dtype=dtype).set_(t.untyped_storage(), 0, (4, 6), (6, 1)).clone()
    tensors = {"flat": t, "grid": grid, "odd": any_bits(dtype, 3), "one": any_bits(dtype, 1).reshape(())}
    data, _ = packed(tensors)
    assert_same(again(tensors), tensors)
    (tmp_path / "w").write_bytes(data)
    raw = {name: bytes(row["data"]) for name, row in safetensors.deserialize(data)}
    assert raw == {n: bytes(t.reshape(-1).view(torch.uint8).numpy()) for n, t in tensors.items()}
    if dtype in ONLY_NAMED:
        assert {v["dtype"] for v in header(data).values()} == {weights.DTYPES[dtype]}
        return
    assert_same(dict(sorted(safetensors.torch.load(data).items())), tensors)
    with safetensors.safe_open(tmp_path / "w", "pt") as f:
        assert_same({n: f.get_tensor(n) for n in sorted(f.keys())}, tensors)


def test_names_are_safetensors_own():
    for dtype, name in weights.DTYPES.items():
        t = any_bits(dtype, 2)
        saved = safetensors.torch.save({"t": t})
        assert header(saved) == header(packed({"t": t})[0]) and header(saved)["t"]["dtype"] == name


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.qint8, torch.bits8], ids=str)
def test_dtypes_without_a_name(dtype):
    with pytest.raises(PackageError, match=r"the weight 'layer\.w' is torch\..*convert it"):
        pack({"layer.w": torch.empty(2, dtype=dtype)})


def test_what_has_no_memory_of_its_own():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for t in (fake, nested, torch.ones(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(PackageError, match=r"the weight 'w'.*plain, dense"):
            pack({"w": t})


def test_no_holes_and_aligned_where_possible(base):
    tensors = {f"{c}{n}": torch.ones(n, dtype=torch.uint8) for n in (1, 3, 64, 640, 8, 32, 100) for c in "ba"}
    tensors |= {"half": torch.ones(3, dtype=torch.float16), "f": torch.ones(3), "d": torch.ones(5, dtype=torch.float64)}
    data, _ = packed(tensors)
    n = struct.unpack_from("<Q", data)[0]
    assert (8 + n) % 64 == 0 and data[8 : 8 + n].rstrip(b" ").endswith(b"}")
    at, seen = 0, []
    for name, row in header(data).items():
        assert row["data_offsets"][0] == at
        at = row["data_offsets"][1]
        seen.append((name, row["data_offsets"][0]))
        assert row["data_offsets"][0] % tensors[name].itemsize == 0
    assert 8 + n + at == len(data)
    assert [s[0] for s in seen[:4]] == ["a64", "a640", "b64", "b640"]
    assert all(start % 64 == 0 for _, start in seen[:5])


def test_order_and_bytes_follow_from_the_values(base):
    tensors = {"a": base[::2], "b": base.clone(), "c": torch.ones(3), "d": base[7:9]}
    other = torch.full((100,), float("nan"))[16:64]
    other[::2] = base[::2]
    other[7:9] = base[7:9]
    turned = {"d": other[7:9], "c": torch.ones(3), "b": base.clone(), "a": other[::2]}
    assert packed(tensors) == packed(turned)


def test_an_empty_one():
    data, described = packed({})
    assert described == ((), ()) and safetensors.torch.load(data) == {} and again({}) == {}


# -- tensors as they were ---------------------------------------------------------------------------
def test_awkward_tensors(base):
    tensors = {
        "transposed": base.view(6, 8).t(), "strided": base[1:40:3], "last": base.view(4, 12)[:, 5:7],
        "0-dim": base[3], "expanded": torch.ones(3, 1).expand(3, 4), "all expanded": torch.tensor(2).expand(2, 3),
        "none": torch.empty(0), "none of many": torch.empty(3, 0, 5),
        "none, strided": torch.empty_strided((0, 3), (7, 2)),
        "one": torch.ones(1, 1),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "windows": base.unfold(0, 4, 2), "size 1": torch.empty_strided((1, 3), (100, 1)).fill_(1),
        "parameter": torch.nn.Parameter(torch.rand(3)),
        "gaps": torch.empty_strided((3, 2), (10, 3), dtype=torch.float16).fill_(2),
        "": torch.ones(2), "ü": torch.ones(3),
        "conj": torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj(),
        "neg": torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj().imag,
    }  # fmt: skip
    wanted = {n: t.resolve_conj().resolve_neg() for n, t in tensors.items()}
    for name, t in wanted.items():
        assert_same(again({name: tensors[name]}), {name: t})
    assert_same(again(tensors), wanted)
    safetensors.torch.load(packed(tensors)[0])


def test_no_more_than_the_tensor_covers(base):
    data, ((w,), (span,)) = packed({"w": base[10:16].view(2, 3)})
    assert header(data)["w"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert w == weights.Weight("w", "parameter", "float32", (2, 3), (3, 1), 0, 0) and w.bytes == span.size == 24
    data, _ = packed({"w": base.view(6, 8)[:2].t()})
    assert header(data)["w"]["shape"] == [16]


def test_what_lies_between_is_not_stored():
    secret = torch.full((40,), 7.0)
    data, _ = packed({"w": secret[:32].view(8, 4)[:, 1], "v": secret[36:]})
    assert data.count(struct.pack("<f", 7.0)) == 8 + 4


def test_tied_weights_are_stored_once(base):
    w = torch.nn.Parameter(base.view(6, 8))
    data, (rows, spans) = packed({"out": w, "in": w, "in.t": w.t()})
    assert list(header(data)) == ["in"] and {r.span for r in rows} == {0} and len(spans) == 1
    assert len(data) < 2 * 192 + 64
    found = again({"out": w, "in": w, "in.t": w.t()})
    found["in"][2, 3] = -1
    assert found["out"][2, 3] == -1 and found["in.t"][3, 2] == -1


def test_views_are_views_of_one_storage(base):
    tensors = {
        "row": base.view(6, 8)[2], "column": base.view(6, 8)[:, 3], "int": base.view(torch.int32)[5:9],
        "wide": base.view(torch.int64)[8:20], "bytes": base.view(torch.uint8)[101:103],
    }  # fmt: skip
    found = again(tensors)
    assert_same(found, tensors)
    assert len({t.untyped_storage().data_ptr() for t in found.values()}) == 1
    assert len({t.untyped_storage()._cdata for t in found.values()}) == 1
    places = {n: t.data_ptr() - found["row"].data_ptr() for n, t in found.items()}
    assert places == {n: t.data_ptr() - tensors["row"].data_ptr() for n, t in tensors.items()}
    assert all((found[n].data_ptr() - t.data_ptr()) % 64 == base.data_ptr() % 64 for n, t in tensors.items())


def test_parts_that_fill_their_storage_keep_it(base):
    q, k, v = base.view(6, 8).chunk(3)
    found = again({"q": q, "k": k, "v": v})
    assert_same(found, {"q": q, "k": k, "v": v})
    assert found["k"].data_ptr() - found["q"].data_ptr() == 64
    data, _ = packed({"q": q, "k": k, "v": v})
    assert list(header(data).values()) == [{"dtype": "F32", "shape": [48], "data_offsets": [0, 192]}]


def test_equal_tensors_that_are_not_shared_stay_apart():
    found = again({"a": torch.ones(3), "b": torch.ones(3)})
    found["a"][0] = 5
    assert found["b"][0] == 1


def test_random_views_of_one_storage():
    rng = random.Random(1)
    for _ in range(200):
        storage = torch.arange(600, dtype=torch.int16).untyped_storage()
        tensors = {}
        for name in "abc"[: rng.randint(1, 3)]:
            dtype = rng.choice([torch.int16, torch.float32, torch.uint8, torch.int64])
            shape = [rng.randint(1, 3) for _ in range(rng.randint(0, 3))]
            strides = [rng.randint(0, 6) for _ in shape]
            offset = rng.randint(0, 8)
            tensors[name] = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
        assert_same(again(tensors), tensors)
        safetensors.deserialize(packed(tensors)[0])


# -- memory -----------------------------------------------------------------------------------------
def test_chunks_are_small_and_come_anew(monkeypatch):
    monkeypatch.setattr(weights, "PIECE", 1000)
    t = torch.arange(5000, dtype=torch.int32)
    chunks, described = pack({"a": t, "b": t[:7].clone()})
    first = [bytes(c) for c in chunks]
    assert max(map(len, first[1:])) == 1000 and [bytes(c) for c in chunks] == first
    assert_same(weights.mapped(memoryview(bytearray(b"".join(first))), *described), {"a": t, "b": t[:7]})


def test_a_cpu_tensors_pieces_are_its_memory():
    t = torch.ones(5 << 20)
    pieces = list(pack({"a": t})[0])[1:]
    assert [len(p) for p in pieces] == [weights.PIECE] * 5
    t[0] = 2
    assert struct.unpack_from("<f", pieces[0])[0] == 2


def test_over_a_mapping_without_copying(tmp_path):
    tensors = {"a": torch.arange(16.0), "b": torch.arange(32.0), "odd": torch.ones(3), "odder": torch.ones(5)}
    chunks, described = pack(tensors)
    path = archive.write(tmp_path / "m", {}, {"weights.safetensors": chunks})
    before = path.read_bytes()
    a = archive.open(path)
    view = a.view("weights.safetensors")
    found = weights.mapped(view, *described)
    start = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    inside = {n for n, t in found.items() if start <= t.data_ptr() < start + len(view)}
    assert inside >= {"a", "b"} and "odd" not in inside or "odder" not in inside
    assert all(t.data_ptr() % 64 == 0 for t in found.values())
    other = weights.mapped(archive.open(path).view("weights.safetensors"), *described)
    found["a"][1] = -5
    found["odd"][0] = -5
    assert found["a"].sum() == 120 - 6 and weights.mapped(view, *described)["a"][1] == -5
    assert_same(other, tensors)  # another mapping: its own copy
    assert path.read_bytes() == before
    a.close()
    del a, view
    path.unlink()
    assert found["b"].sum() == 496


def test_a_view_at_any_address():
    tensors = {"a": torch.arange(16.0), "b": torch.ones(3)}
    data, described = packed(tensors)
    for shift in range(0, 66, 3):
        buffer = bytearray(bytes(shift) + data)
        found = weights.mapped(memoryview(buffer)[shift:], *described)
        assert_same(found, tensors)
        assert all(t.data_ptr() % 64 == 0 for t in found.values())
