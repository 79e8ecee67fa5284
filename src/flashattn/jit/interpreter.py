"""Repairs Triton's interpreter (TRITON_INTERPRET=1) for bf16, which it computes wrongly, and for numpy 2.4."""

from __future__ import annotations

import functools


def _widen(handle):
    """The fp32 values of a bf16 handle, whose data are bit patterns."""
    import numpy as np

    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _narrow(values):
    """fp32 values as bf16 bit patterns, rounded to nearest even."""
    import numpy as np

    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


@functools.cache
def repair() -> None:
    """Patch the interpreter of this process, once."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    bitwise = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
    compares = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
    dot, binary, unary, cast = builder.create_dot, builder.binary_op, builder.unary_op, builder.cast_impl

    def is_bf16(x):
        return x.dtype.scalar == tl.bfloat16

    def create_dot(self, a, b, *rest):
        a, b = (handle(_widen(x), tl.float32) if is_bf16(x) else x for x in (a, b))
        return dot(self, a, b, *rest)

    def binary_op(self, lhs, rhs, op):
        if not (is_bf16(lhs) and is_bf16(rhs)) or op in bitwise:
            return binary(self, lhs, rhs, op)
        result = op(_widen(lhs), _widen(rhs))
        return handle(result, tl.int1) if op in compares else handle(_narrow(result), tl.bfloat16)

    def unary_op(self, arg, op):
        return handle(_narrow(op(_widen(arg))), tl.bfloat16) if is_bf16(arg) else unary(self, arg, op)

    def cast_impl(self, source, kind):
        wanted = kind.scalar
        if is_bf16(source) and wanted == tl.bfloat16:
            return source
        if is_bf16(source):
            values = _widen(source)
            return handle(values if wanted == tl.float32 else values.astype(interpreter._get_np_dtype(kind)), wanted)
        if wanted == tl.bfloat16:
            return handle(_narrow(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, source, kind)

    builder.create_dot, builder.binary_op, builder.unary_op, builder.cast_impl = (
        create_dot,
        binary_op,
        unary_op,
        cast_impl,
    )
    builder.get_bf16 = lambda self, value: handle(_narrow(np.array([float(value)])), tl.bfloat16)
    if hasattr(interpreter, "_patch_lang_tensor"):
        _accept_one_element_arrays(interpreter)


def _accept_one_element_arrays(interpreter) -> None:
    """From numpy 2.4 on int() refuses an array of one element, which Triton 3.6 makes of every scalar."""
    import numpy as np

    patch = interpreter._patch_lang_tensor

    def index(self):
        return int(np.asarray(self.handle.data).reshape(-1)[0])

    def patched(tensor, *scope):
        patch(tensor, *scope)
        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    interpreter._patch_lang_tensor = patched
