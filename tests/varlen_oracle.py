"""Attention of sequences that lie anywhere in memory, by the formula and one at a time: what tests compare with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

import flashattn

NAN = float("nan")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """For a module that imports it: its tensors are so small that threads cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where the sequences of queries, or of keys, are: `index[i]` picks the used rows of sequence i.

    shape: (batch, seqlen) or (total,); the tables are lists of integers, or None, as the public functions take them.
    """

    shape: tuple
    index: tuple
    cu_seqlens: tuple | None = None
    padded: tuple | None = None
    seqused: tuple | None = None

    def tables(self, side: str, device="cpu", dtype=torch.int32) -> dict:
        named = {
            f"cu_seqlens_{side}": self.cu_seqlens,
            f"cu_seqlens_{side}_padded": self.padded,
            f"seqused_{side}": self.seqused,
        }
        return {
            name: torch.tensor(table, dtype=dtype, device=device) for name, table in named.items() if table is not None
        }


def dense(batch: int, seqlen: int) -> Rows:
    return Rows(shape=(batch, seqlen), index=tuple((i, slice(0, seqlen)) for i in range(batch)))


def padded(lengths, seqlen: int | None = None) -> Rows:
    """Behind each sequence, padding up to `seqlen`, three more than the longest."""
    seqlen = max(lengths, default=0) + 3 if seqlen is None else seqlen
    index = tuple((i, slice(0, length)) for i, length in enumerate(lengths))
    return Rows(shape=(len(lengths), seqlen), index=index, seqused=tuple(lengths))


def compact(lengths, slack: int = 0) -> Rows:
    """One sequence behind the other, and `slack` rows behind the last."""
    ends = tuple(accumulate(lengths, initial=0))
    index = tuple(slice(end - length, end) for end, length in zip(ends[1:], lengths, strict=True))
    return Rows(shape=(ends[-1] + slack,), index=index, cu_seqlens=ends)


def strided(lengths, rooms, slack: int = 0) -> Rows:
    """Sequence i has room for rooms[i] rows and uses the first lengths[i] of them."""
    starts = tuple(accumulate(rooms, initial=0))
    index = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=False))
    ends = tuple(accumulate(lengths, initial=0))
    return Rows(shape=(starts[-1] + slack,), index=index, cu_seqlens=ends, padded=starts)


def partly_used(lengths, rooms, slack: int = 0) -> Rows:
    """The same places, said in other words: cu_seqlens of what there is room for, and lengths beside it."""
    same = strided(lengths, rooms, slack)
    return Rows(shape=same.shape, index=same.index, cu_seqlens=same.padded, seqused=tuple(lengths))


def rows_of_kind(kind: str, lengths, seed: int = 0) -> Rows:
    """Sequences of these lengths as `kind` stores them; `dense` makes all as long as the second longest."""
    lengths = list(lengths)
    rooms = [length + (3 * i + seed) % 5 for i, length in enumerate(lengths)]
    if kind == "dense":
        return dense(len(lengths), sorted(lengths)[-2:][0] if lengths else 4)
    if kind == "padded":
        return padded(lengths)
    if kind == "compact":
        return compact(lengths, slack=seed % 3)
    if kind == "strided":
        return strided(lengths, rooms, slack=seed % 4)
    return partly_used(lengths, rooms, slack=seed % 4)


KINDS = ("dense", "padded", "compact", "strided", "partly used")


def visible(seqlen_q, seqlen_k, causal=False, window_size=(-1, -1), causal_alignment="bottom_right", device="cpu"):
    """[seqlen_q, seqlen_k]: is key j at most `right` ahead of query i and at most `left` behind it?"""
    left, right = (None if bound in (None, -1) else bound for bound in window_size)
    if causal:
        right = 0
    i = torch.arange(seqlen_q, device=device)
    if causal_alignment == "bottom_right":
        i = i + (seqlen_k - seqlen_q)
    ahead = torch.arange(seqlen_k, device=device).view(1, -1) - i.view(-1, 1)
    keep = torch.ones_like(ahead, dtype=torch.bool)
    if right is not None:
        keep = keep & (ahead <= right)
    if left is not None:
        keep = keep & (-ahead <= left)
    return keep


def one_sequence(q, k, v, keep, scale):
    """out [M, heads_q, DV] and lse [heads_q, M] in the dtype of q [M, heads_q, D], k and v [N, heads_k, ...].

    Only called with rows that see a key.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    s = (torch.einsum("mhd,nhd->hmn", q, k) * scale).to(wide).masked_fill(~keep, float("-inf"))
    p = torch.softmax(s, -1)
    return torch.einsum("hmn,nhd->mhd", p.to(q.dtype), v), torch.logsumexp(s, -1)


@dataclass
class Results:
    """What attention gives, forward and backward; `sees` [rows of q] and `seen` [rows of k] tell what is not blank."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    sees: torch.Tensor | None = None
    seen: torch.Tensor | None = None


def lse_view(lse):
    """[heads, total] or [batch, heads, seqlen] with the heads last, so that rows are picked as in q."""
    return lse.transpose(-1, -2)


def expected(q, k, v, dout, dlse, rows_q: Rows, rows_k: Rows, dtype, softmax_scale=None, **masks) -> Results:
    """By the formula in `dtype`, with autograd; dout or dlse may be None."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    wide, device = torch.promote_types(dtype, torch.float32), q.device
    lse = torch.full((*rows_q.shape[:-1], q.shape[-2], rows_q.shape[-1]), float("-inf"), dtype=wide, device=device)
    found = Results(
        torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=device),
        lse,
        *(torch.zeros(x.shape, dtype=dtype, device=device) for x in (q, k, v)),
        *(torch.zeros(rows.shape, dtype=torch.bool, device=device) for rows in (rows_q, rows_k)),
    )
    for at_q, at_k in zip(rows_q.index, rows_k.index, strict=True):
        keep = visible(q[at_q].shape[0], k[at_k].shape[0], device=device, **masks)
        sees = keep.any(1)
        found.sees[at_q], found.seen[at_k] = sees, keep.any(0)
        if not sees.any():
            continue
        leaves = [x[at].detach().to(dtype).requires_grad_() for x, at in ((q, at_q), (k, at_k), (v, at_k))]
        out, its_lse = one_sequence(leaves[0][sees], *leaves[1:], keep[sees], scale)
        found.out[at_q][sees] = out.detach()
        lse_view(lse)[at_q][sees] = its_lse.detach().T
        loss = 0.0 * out.sum()
        if dout is not None:
            loss = loss + (out.to(wide) * dout[at_q][sees].to(wide)).sum()
        if dlse is not None:
            loss = loss + (its_lse.T * lse_view(dlse)[at_q][sees].to(wide)).sum()
        found.dq[at_q], found.dk[at_k], found.dv[at_k] = torch.autograd.grad(loss, leaves)
    return found


def attend(q, k, v, rows_q: Rows, rows_k: Rows, table_dtype=torch.int32, **options):
    """(out, lse) of the public function that takes such rows."""
    tables = {**rows_q.tables("q", q.device, table_dtype), **rows_k.tables("k", q.device, table_dtype)}
    if rows_q.cu_seqlens is rows_k.cu_seqlens is None:
        return flashattn.flash_attn_func(q, k, v, return_lse=True, **tables, **options)
    cu = (tables.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    return flashattn.flash_attn_varlen_func(q, k, v, *cu, return_lse=True, **tables, **options)


def ours(q, k, v, dout, dlse, rows_q: Rows, rows_k: Rows, **options) -> Results:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    results = attend(q, k, v, rows_q, rows_k, **options)
    pairs = [(result, grad) for result, grad in zip(results, (dout, dlse), strict=True) if grad is not None]
    grads = torch.autograd.grad([result for result, _ in pairs], (q, k, v), [grad for _, grad in pairs])
    return Results(*(x.detach() for x in results), *grads)


LAYOUTS = ("contiguous", "heads first", "rows first", "among other heads", "every second row", "strided", "shifted")


def stored(x, layout: str):
    """The values of x [..., rows, heads, dim] in memory that is laid out otherwise, with NaN around them."""
    *batch, rows, heads, dim = x.shape
    if layout == "heads first":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "rows first":
        return x.transpose(0, -3).contiguous().transpose(0, -3)
    if layout == "among other heads":
        buffer = x.new_full((*batch, rows, heads + 3, dim), NAN)
        view = buffer[..., 1 : 1 + heads, :]
    elif layout == "every second row":
        view = x.new_full((*batch, 2 * rows, heads, dim), NAN)[..., ::2, :, :]
    elif layout == "strided":
        view = x.new_full((*x.shape[:-1], 2 * dim), NAN)[..., ::2]
    elif layout == "shifted":
        view = x.new_full((x.numel() + 1,), NAN)[1:].view(x.shape)
    else:
        return x.contiguous()
    view.copy_(x)
    return view


def draw(rows_q: Rows, rows_k: Rows, dtype, heads, dims, device="cpu", seed=0, spread=1.0) -> tuple:
    """q, k, v, dout and dlse with NaN wherever no sequence has a row."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: Rows, *rest):
        x = torch.randn(*rows.shape, *rest, generator=generator).to(dtype)
        unused = torch.ones(rows.shape, dtype=torch.bool)
        for at in rows.index:
            unused[at] = False
        x[unused] = NAN
        return x.to(device)

    (heads_q, heads_k), (dim, dim_v) = heads, dims
    q, k, v = random(rows_q, heads_q, dim) * spread, random(rows_k, heads_k, dim), random(rows_k, heads_k, dim_v)
    dlse = random(rows_q, heads_q).to(torch.promote_types(dtype, torch.float32))
    return q, k, v, random(rows_q, heads_q, dim_v), dlse.transpose(-1, -2).contiguous()


def check(
    rows_q: Rows, rows_k: Rows, *, dtype=None, heads=(2, 1), dims=None, device="cpu", seed=0, spread=1.0, slack=None,
    layouts=("contiguous",) * 4, table_dtype=torch.int32, with_dlse=True, with_dout=True, **options,
) -> Results:  # fmt: skip
    """Attention of random values in such rows is that of float64, as far as `dtype` can be; else AssertionError.

    The yardstick is the error of the formula in that dtype. slack: how many of its roundings may come on top; needed
    where sizes are so small that the formula may happen to make no error. Without a GPU, where the same values give the
    same bits everywhere, none are.
    """
    dtype = dtype or {"cpu": torch.float32, "cuda": torch.float16}[device]
    dims = dims or {"cpu": (16, 16), "cuda": (64, 64)}[device]
    slack = {"cpu": 0.0, "cuda": 2.0}[device] if slack is None else slack
    *tensors, dlse = draw(rows_q, rows_k, dtype, heads, dims, device, seed, spread)
    q, k, v, dout = (stored(x, layout) for x, layout in zip(tensors, layouts, strict=True))
    given = (q, k, v, dout if with_dout else None, dlse if with_dlse else None)
    before = [x.clone() for x in given if x is not None]
    got = ours(*given, rows_q, rows_k, table_dtype=table_dtype, **options)
    for now, then in zip((x for x in given if x is not None), before, strict=True):
        assert torch.equal(now.nan_to_num(NAN_MARK), then.nan_to_num(NAN_MARK)), "an input was changed"
    want = expected(*given, rows_q, rows_k, torch.float64, **options)
    low = expected(*given, rows_q, rows_k, dtype, **options)
    compare(got, want, low, slack)
    return got


NAN_MARK = 12345.0


def compare(got: Results, want: Results, low: Results, slack: float = 0.0) -> None:
    """`got` is `want`, within some times the error of `low`; exactly zero, or -inf, where nothing is seen."""
    for name, factor in (("out", 2), ("dq", 3), ("dk", 3), ("dv", 3)):
        a, b, c = (getattr(results, name) for results in (got, want, low))
        assert a.shape == b.shape and a.dtype == c.dtype, name
        if b.numel():
            floor = 1e-10 if a.dtype == torch.float64 else 1e-5
            rounding = slack * torch.finfo(a.dtype).eps * max(1.0, float(b.abs().max()))
            limit = factor * float((c.double() - b).abs().max()) + floor + rounding
            error = (a.double() - b).abs()
            assert bool((error <= limit).all()), f"{name} is off by {float(error.max())}, more than {limit}"
    assert got.lse.shape == want.lse.shape and got.lse.dtype == low.lse.dtype
    assert torch.equal(got.lse == float("-inf"), want.lse == float("-inf"))
    finite = want.lse != float("-inf")
    assert bool(((got.lse.double() - want.lse)[finite].abs() <= 1e-5 * want.lse[finite].abs().clamp(min=1)).all())
    for name, used in (("out", want.sees), ("dq", want.sees), ("dk", want.seen), ("dv", want.seen)):
        assert bool((getattr(got, name)[~used] == 0).all()), f"{name} is not 0 where nothing is seen"


def same_bits(a: Results, b: Results, names=("out", "lse", "dq", "dk", "dv")) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)
