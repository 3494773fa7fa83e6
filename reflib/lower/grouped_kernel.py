"""The kernel of grouped products (``grouped_matmul``), as one would write it by hand; it needs Triton to be imported.

For each group g: c_g [M, N] = a_g [M, K] @ b_g [K, N]. ``RAGGED`` names the dimension (m, n or k) of which the groups
have ``ends[g] - ends[g - 1]`` each; where there is none, there is a third dimension, and its step is ``*_g``. A program
takes every ``num_programs``-th tile of all groups, counted as they come: sizes are read on the device, so no host waits
for them, and one launch serves any. Neighbouring programs have tiles of one column of b, which is the weights'.
"""

import triton
import triton.language as tl


@triton.jit
def grouped_mm(
    a, b, ends, c, groups, M, N, K, a_g, a_m, a_k, b_g, b_k, b_n, c_g, c_m, c_n,
    RAGGED: tl.constexpr, MBLOCK: tl.constexpr, NBLOCK: tl.constexpr, KBLOCK: tl.constexpr,
):  # fmt: skip
    done = 0  # tiles of the groups before
    start = 0
    end = 0
    for g in range(groups):
        rows, columns, depth = M, N, K
        if RAGGED != "":
            start = end
            end = tl.load(ends + g).to(tl.int32)
        if RAGGED == "m":
            rows = end - start
        if RAGGED == "n":
            columns = end - start
        if RAGGED == "k":
            depth = end - start
        group = tl.cast(g, tl.int64)
        first = tl.cast(start, tl.int64)
        a_at = a + (first * a_m if RAGGED == "m" else first * a_k if RAGGED == "k" else group * a_g)
        b_at = b + (first * b_n if RAGGED == "n" else first * b_k if RAGGED == "k" else group * b_g)
        c_at = c + (first * c_m if RAGGED == "m" else first * c_n if RAGGED == "n" else group * c_g)
        high = tl.cdiv(rows, MBLOCK)
        tiles = high * tl.cdiv(columns, NBLOCK)
        programs = tl.num_programs(0)
        # the first of this program's tiles, done + i * programs + (program - done) % programs, in this group
        offset = (tl.program_id(0) + programs - done % programs) % programs
        for tile in range(offset, tiles, programs):
            m0 = tile % high * MBLOCK
            n0 = tile // high * NBLOCK
            m_far = tl.cast(0, tl.int64)  # of the ragged dimension: 2**31 elements and more may lie before a tile
            n_far = tl.cast(0, tl.int64)
            if RAGGED == "m":
                m_far, m0 = tl.cast(m0, tl.int64), 0
            if RAGGED == "n":
                n_far, n0 = tl.cast(n0, tl.int64), 0
            m = m0 + tl.arange(0, MBLOCK)
            n = n0 + tl.arange(0, NBLOCK)
            k = tl.arange(0, KBLOCK)
            a_tile = a_at + m_far * a_m + (m[:, None] * a_m + k[None, :] * a_k)
            b_tile = b_at + n_far * b_n + (k[:, None] * b_k + n[None, :] * b_n)
            m_inside = m[:, None] < rows - m_far
            n_inside = n[None, :] < columns - n_far
            acc = tl.zeros([MBLOCK, NBLOCK], tl.float32)
            for k0 in tl.range(0, depth, KBLOCK):
                x = tl.load(a_tile, mask=m_inside & (k[None, :] < depth - k0), other=0.0)
                y = tl.load(b_tile, mask=n_inside & (k[:, None] < depth - k0), other=0.0)
                acc = tl.dot(x, y, acc)
                a_tile += KBLOCK * a_k
                b_tile += KBLOCK * b_k
            place = c_at + m_far * c_m + n_far * c_n + (m[:, None] * c_m + n[None, :] * c_n)
            tl.store(place, acc.to(c.dtype.element_ty), mask=m_inside & n_inside)
        done += tiles


@triton.jit
def grouped_rows_described(
    a, b, ends, c, groups, M, N, K, a_m, b_g, b_k, b_n, c_m, c_n,
    B_ROWS: tl.constexpr, GROUPS: tl.constexpr, MBLOCK: tl.constexpr, NBLOCK: tl.constexpr, KBLOCK: tl.constexpr,
):  # fmt: skip
    """The same for groups of rows, read through descriptors (TMA): no thread computes addresses or holds what is on its
    way. Each row of a lies in one piece, and each row of b's matrices or (``B_ROWS``: no) each column. What a block
    reads of the next group's rows is computed and not stored. ``GROUPS``: a power of 2, at least ``groups``.

    The loops over tiles and depth are one (``flatten``), so the next tile is read while this one is finished: a tile's
    group is looked up among the ``GROUPS`` sums of tiles, not counted up to."""
    a_blocks = tl.make_tensor_descriptor(a, [M, K], [a_m, 1], [MBLOCK, KBLOCK])
    if B_ROWS:
        b_blocks = tl.make_tensor_descriptor(b, [groups, K, N], [b_g, b_k, 1], [1, KBLOCK, NBLOCK])
    else:
        b_blocks = tl.make_tensor_descriptor(b, [groups, N, K], [b_g, b_n, 1], [1, NBLOCK, KBLOCK])
    i = tl.arange(0, GROUPS)
    stop = tl.load(ends + i, mask=i < groups, other=0).to(tl.int32)
    begin = tl.load(ends + i - 1, mask=(i > 0) & (i < groups), other=0).to(tl.int32)
    high = tl.where(i < groups, tl.cdiv(stop - begin, MBLOCK), 0)  # tiles of a group, one above another
    count = high * tl.cast(tl.cdiv(N, NBLOCK), tl.int32)
    upto = tl.cumsum(count, 0)
    for tile in tl.range(tl.program_id(0), tl.sum(count, 0), tl.num_programs(0), flatten=True):
        g = tl.sum((upto <= tile).to(tl.int32), 0)
        start = tl.sum(tl.where(i == g, begin, 0), 0)
        end = tl.sum(tl.where(i == g, stop, 0), 0)
        rows = tl.sum(tl.where(i == g, high, 0), 0)
        in_group = tile - tl.sum(tl.where(i == g, upto - count, 0), 0)
        m0 = start + in_group % rows * MBLOCK
        n0 = in_group // rows * NBLOCK
        acc = tl.zeros([MBLOCK, NBLOCK], tl.float32)
        for k_at in tl.range(0, K, KBLOCK):
            k0 = tl.cast(k_at, tl.int32)  # (places in a descriptor have 32 bits)
            x = a_blocks.load([m0, k0])
            if B_ROWS:
                y = b_blocks.load([g, k0, n0]).reshape(KBLOCK, NBLOCK)
            else:
                y = b_blocks.load([g, n0, k0]).reshape(NBLOCK, KBLOCK).T
            acc = tl.dot(x, y, acc)
        m = m0 + tl.arange(0, MBLOCK)
        n = n0 + tl.arange(0, NBLOCK)
        place = c + (tl.cast(m, tl.int64)[:, None] * c_m + n[None, :] * c_n)
        tl.store(place, acc.to(c.dtype.element_ty), mask=(m[:, None] < end) & (n[None, :] < N))
