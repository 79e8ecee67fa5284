"""The tensor maps of Hopper's forward kernel: what one descriptor moves, and how a head_dim is cut. Needs no Triton.

Each of q, k, v, out is described as [batch, seqlen, heads, head_dim]: a copy never leaves its sequence and head, and
rows past the end read as zeros and are not written. A tile is a power of two wide, so a head_dim of 96 or 192 is two
parts, with a map each. Copies are swizzled, and the copy engine moves at most SWIZZLED columns at a time.
"""

from __future__ import annotations

SWIZZLED = 64  # columns of 2 bytes in the widest swizzle, 128 bytes
ROWS_Q = 64  # what one warpgroup owns


def parts_of(head_dim: int) -> tuple[int, ...]:
    """The widths that a head_dim is cut into."""
    first = 1 << (head_dim.bit_length() - 1)
    return (first,) if first == head_dim else (first, head_dim - first)


def tiles_of(head_dim: int, head_dim_v: int, block_n: int, o_width: int) -> dict[str, tuple]:
    """Tensor -> the (rows, columns) of the tile that each of its descriptors stands for."""
    q, v = parts_of(head_dim), parts_of(head_dim_v)
    return {
        "q": tuple((ROWS_Q, columns) for columns in q),
        "k": tuple((block_n, columns) for columns in q),
        "v": tuple((block_n, columns) for columns in v),
        "out": ((ROWS_Q, o_width),) if o_width else tuple((ROWS_Q, columns) for columns in v),
    }


def swizzle_bytes(columns: int) -> int:
    return min(2 * columns, 2 * SWIZZLED)


def descriptor_type(dtype: str, rows: int, columns: int) -> str:
    """The parameter type of a descriptor in a kernel's signature."""
    layout = f"NVMMASharedLayout(swizzle_byte_width={swizzle_bytes(columns)}, element_bitwidth=16, rank=4)"
    return f"tensordesc<{dtype}[1, {rows}, 1, {columns}],{layout}>"


def box_of(rows: int, columns: int) -> tuple[tuple[int, int, int, int], int]:
    """(box, swizzle) as `jit.tensormap.encode` takes them, for a tensor [batch, seqlen, heads, head_dim]."""
    return (1, rows, 1, min(columns, SWIZZLED)), {128: 3, 64: 2, 32: 1}[swizzle_bytes(columns)]
