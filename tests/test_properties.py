"""Any combination of what attention takes, drawn at random: values and gradients are those of float64.

Hypothesis keeps what failed in .hypothesis and tries it first the next time.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from varlen_oracle import KINDS, LAYOUTS, Rows, check, compact, dense, one_thread, padded, partly_used, strided

__all__ = ["one_thread"]
HEADS = ((1, 1), (2, 1), (4, 2), (6, 2), (3, 3))
DIMS = ((16, 16), (1, 1), (8, 24), (20, 7), (40, 40), (64, 64), (72, 16))
LENGTHS = (0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 65, 100)


@dataclass(frozen=True)
class Case:
    """One call. `lengths` are (queries, keys) of each sequence."""

    kind_q: str
    kind_k: str
    lengths: tuple
    gaps: tuple
    slack: tuple
    causal: bool
    window: tuple
    alignment: str
    heads: tuple
    dims: tuple
    dtype: torch.dtype
    layouts: tuple
    scale: float | None
    spread: float
    with_dout: bool
    with_dlse: bool
    long_tables: bool
    seed: int


@st.composite
def cases(draw, dtypes=(torch.float32, torch.float16, torch.bfloat16), dims=DIMS, lengths=LENGTHS, sequences=4):
    """A Case. The first choices are the simplest, which is what Hypothesis makes a failure smaller with."""
    count = draw(st.integers(0, sequences))
    bound = st.one_of(st.sampled_from((-1, 0, 1, 5)), st.integers(0, 80))
    wanted = draw(st.sampled_from(((True, True), (True, False), (False, True))))
    return Case(
        kind_q=draw(st.sampled_from(KINDS)),
        kind_k=draw(st.sampled_from(KINDS)),
        lengths=tuple((draw(st.sampled_from(lengths)), draw(st.sampled_from(lengths))) for _ in range(count)),
        gaps=tuple((draw(st.integers(0, 20)), draw(st.integers(0, 20))) for _ in range(count)),
        slack=(draw(st.integers(0, 40)), draw(st.integers(0, 40))),
        causal=draw(st.booleans()),
        window=(draw(bound), draw(bound)),
        alignment=draw(st.sampled_from(("bottom_right", "top_left"))),
        heads=draw(st.sampled_from(HEADS)),
        dims=draw(st.sampled_from(dims)),
        dtype=draw(st.sampled_from(dtypes)),
        layouts=tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(4)),
        scale=draw(st.sampled_from((None, 0.0, -0.125, 0.3))),
        spread=draw(st.sampled_from((1.0, 4.0))),
        with_dout=wanted[0],
        with_dlse=wanted[1],
        long_tables=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def rows_of(case: Case, side: int) -> Rows:
    kind, slack = (case.kind_q, case.kind_k)[side], case.slack[side]
    lengths = [pair[side] for pair in case.lengths]
    rooms = [length + pair[side] for length, pair in zip(lengths, case.gaps, strict=True)]
    if kind == "dense":
        return dense(len(lengths), lengths[0] if lengths else slack)
    if kind == "padded":
        return padded(lengths, max(lengths, default=0) + slack)
    if kind == "compact":
        return compact(lengths, slack)
    return (strided if kind == "strided" else partly_used)(lengths, rooms, slack)


def holds(case: Case, device: str = "cpu") -> None:
    """Attention of the case is that of float64; else AssertionError."""
    check(
        rows_of(case, 0), rows_of(case, 1), dtype=case.dtype, heads=case.heads, dims=case.dims, device=device,
        seed=case.seed, spread=case.spread, slack=16.0, layouts=case.layouts,
        table_dtype=torch.int64 if case.long_tables else torch.int32, with_dout=case.with_dout,
        with_dlse=case.with_dlse, causal=case.causal, window_size=case.window, causal_alignment=case.alignment,
        softmax_scale=case.scale,
    )  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=False, print_blob=True)
@given(cases(dtypes=(torch.float64, torch.float32, torch.float16, torch.bfloat16)))
def test_any_combination_is_what_float64_gives(case):
    holds(case)


# Two head dims and one dtype: each further one is a dozen kernels to compile.
@pytest.mark.gpu
@settings(max_examples=400, deadline=None, derandomize=False, print_blob=True, suppress_health_check=list(HealthCheck))
@given(
    cases(
        dtypes=(torch.float16,),
        dims=((64, 64), (40, 24)),
        lengths=(*LENGTHS, 127, 128, 129, 256, 300, 517),
        sequences=9,
    )
)
def test_any_combination_on_a_gpu_is_what_float64_gives(case):
    holds(case, "cuda")
