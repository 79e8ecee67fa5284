"""The softmax of the Hopper forward: masks, weights, when sums are rescaled, and scores too large to be told apart."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
NEG_INF: gl.constexpr = gl.constexpr(float("-inf"))
# The maximum of a row that has seen no key. Finite, for -inf - -inf is NaN.
NO_KEY: gl.constexpr = gl.constexpr(-3.0e38)
# 2^27: scores from here on, in base 2, are so far apart that a row's weights are all but 1 and 0 (see `Scale`).
HUGE: gl.constexpr = gl.constexpr(134217728.0)
# A little less, so that no scaled maximum below the limit is rounded up to HUGE.
LIMIT: gl.constexpr = gl.constexpr(134217472.0)
# A row's pivot follows its maximum only when that has grown by a factor of more than 2^8: weights of up to 2^8 do no
# harm, and most blocks after the first few leave O as it is.
LAZY: gl.constexpr = gl.constexpr(8.0)
SMALLEST: gl.constexpr = gl.constexpr(1.1754943508222875e-38)


class Scale(NamedTuple):
    """The factor from Q K^T to base-2 scores, positive (a negative one is moved into Q).

    s * by - m is one fused operation. Its rounding error is that of m, harmless unless 2^error overflows: where a
    score reaches HUGE, `power` takes the place of `by`, the power of two above it, with which products are exact.
    There two different scores differ by 8 or more, so weights are nearly 1 and 0 with either factor. Below it, a weight
    is at most 2^(LAZY + 4), which float16 holds. `limit` is HUGE / by, and a little less.
    """

    by: gl.tensor
    power: gl.tensor
    limit: gl.tensor


@gluon.jit
def hide(s, row, start_n, work, IS_CAUSAL: gl.constexpr):
    """Scores s [64, N] of queries row... and keys start_n..., -inf where a query does not see a key.

    Column 8 a + 2 b + c is held by a thread whose number gives b, so that its columns are compared as constants.
    """
    split = s.reshape([64, s.shape[1] // 8, 4, 2])
    OVER_C: gl.constexpr = gl.SliceLayout(3, split.type.layout)  # [64, N / 8, 4]
    OVER_A: gl.constexpr = gl.SliceLayout(1, OVER_C)  # [64, 4]
    first = gl.arange(0, s.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, OVER_C))) * 8
    second = gl.arange(0, 4, gl.SliceLayout(0, OVER_A)) * 2
    third = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, split.type.layout))))
    seen = work.seqlen_k - start_n  # how many of the columns a row sees
    if IS_CAUSAL:
        offs_m = row + gl.arange(0, 64, gl.SliceLayout(1, OVER_A))
        seen = gl.minimum(offs_m + (work.diagonal + 1), work.seqlen_k) - start_n
        seen = seen[:, None]
    seen = seen - second[None, :]
    columns = first[None, :, None, None] + third[None, None, None, :]
    split = gl.where(columns < seen[:, None, :, None], split, NEG_INF)
    return gl.convert_layout(split.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def weights(s, m, scale):
    """Scores s [64, N] and the pivot m [64] (base 2, scaled) -> p = 2^(s * scale - m') and the new pivot m'."""
    top = gl.max(s, 1)
    factor = gl.where(gl.abs(top) < scale.limit, scale.by, scale.power)
    m = gl.where(top * factor > m + LAZY, top * factor, m)
    p = gl.exp2(gl.fma(s, factor[:, None], -m[:, None]))
    return p, m


@gluon.constexpr_function
def times_unless_one(values):
    """PTX: `values` registers times a factor for each, in place, unless all of a warp's are 1. A thread has 2 rows."""
    factor = 2 * values
    lines = ["{ .reg .pred one, any;"]
    lines += [f"setp.neu.f32 one, ${factor}, 0f3F800000;", f"setp.neu.or.f32 one, ${factor + 2}, 0f3F800000, one;"]
    lines += ["vote.sync.any.pred any, one, 0xffffffff;", "@!any bra KEEP;"]
    lines += [f"mul.f32 ${i}, ${i}, ${factor + i};" for i in range(values)]
    return " ".join(lines) + " KEEP: }"


@gluon.constexpr_function
def in_place(values):
    """The constraints of `times_unless_one`: outputs, the same registers as inputs, factors."""
    return ",".join(["=f"] * values + [str(i) for i in range(values)] + ["f"] * values)


@gluon.jit
def rescale_part(acc, alpha):
    """acc [64, D] times alpha [64]; in most blocks all of a warp's alphas are 1, and nothing is done."""
    VALUES: gl.constexpr = min(acc.shape[1] // 2, 64)
    TEXT: gl.constexpr = times_unless_one(VALUES)
    PLACES: gl.constexpr = in_place(VALUES)
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.inline_asm_elementwise(TEXT, PLACES, [acc, factor], dtype=gl.float32, is_pure=False, pack=VALUES)


@gluon.jit
def rescale(acc, alpha):
    """Every part of acc [64, D] times alpha [64]."""
    out = ()
    for i in gl.static_range(len(acc)):
        out = out + (rescale_part(acc[i], alpha),)
    return out


@gluon.jit
def scale_of(softmax_scale):
    """The `Scale` of a launch. Not below the smallest normal number: masked scores, -inf, must not meet a 0."""
    by = gl.maximum(gl.abs(softmax_scale) * LOG2_E, SMALLEST)
    power = ((by.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    return Scale(by, power, LIMIT / by)


@gluon.jit
def store_lse(m, l, off_bh, row, work, scale):
    """LSE of 64 rows, the natural logarithm; -inf for a row without a key."""
    offs_m = row + gl.arange(0, 64, m.type.layout)
    m = gl.where(gl.abs(m) < HUGE, m, m * (scale.by / scale.power))
    lse = gl.where(l == 0.0, NEG_INF, (m + gl.log2(gl.where(l == 0.0, 1.0, l))) * LN_2)
    gl.store(work.lse_ptr + off_bh.to(gl.int64) * work.seqlen_q + offs_m, lse, mask=offs_m < work.seqlen_q)
