"""Kernels whose parameter lists are unlike: test_packer.py compares what we pack with what their machine code reads."""

import triton
import triton.language as tl


@triton.jit
def every_kind(x_ptr, small, strides, scale, flag, length, half, wide, brain, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs * strides[0] + strides[1], mask=offs < length).to(tl.float32)
    x = x * scale + half + brain + small + wide.to(tl.float32)
    tl.store(y_ptr + offs * strides[2], tl.where(flag, x, 0.0))


@triton.jit
def described(desc, length, y_ptr, BLOCK: tl.constexpr):
    x = desc.load([length, 0])
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs[:, None] * BLOCK + offs[None, :], x)
