"""The Hopper forward's own source on an emulator, against float64: copies and products come late, as they may."""

from __future__ import annotations

import math

import gluon_emulator
import pytest
import torch
from gluon_emulator import Descriptor, EmulationError, Emulator, Pointer, Registers, quiet_threads

from flashattn import hopper_boxes
from flashattn.jit.spec import KernelSpec
from flashattn.kernels.hopper_fwd import hopper_attn_fwd
from flashattn.specs import specs_of
from flashattn.variants import FwdVariant

DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]
LIMIT = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def spec_of(head_dim: int, head_dim_v: int, causal: bool, dtype: str = "bf16") -> KernelSpec:
    facts = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "mask": "causal" if causal else "full"}
    (spec,) = specs_of(FwdVariant(**facts, is_aligned=True, allow_tf32=False, has_tables=False), "sm_90")
    return spec


def tensors(shape, head_dim, head_dim_v, dtype=torch.bfloat16, spread=1.0):
    batch, seqlen_q, seqlen_k, heads_q, heads_k = shape
    torch.manual_seed(0)
    q = (spread * torch.randn(batch, seqlen_q, heads_q, head_dim)).to(dtype)
    k = torch.randn(batch, seqlen_k, heads_k, head_dim)
    # Later keys weigh more or less, so that maxima move in either direction.
    k = (k * torch.linspace(2.0, 0.5, seqlen_k)[:, None, None]).to(dtype)
    return q, k, torch.randn(batch, seqlen_k, heads_k, head_dim_v).to(dtype)


def emulated(
    q, k, v, causal=False, diagonal=None, scale=None, grid=2, seed=0, section=2, write_lse=1, replace=None, **tile
):
    """(out, lse, what is left in the counter)."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_k, head_dim_v = v.shape
    constants = {**dict(spec_of(head_dim, head_dim_v, causal).constants), **tile}
    out = torch.full((batch, seqlen_q, heads_q, head_dim_v), math.nan, dtype=q.dtype)
    lse = torch.full((batch, heads_q, seqlen_q), math.nan)
    left = torch.zeros(1, dtype=torch.int32)
    kinds = hopper_boxes.tiles_of(head_dim, head_dim_v, constants["BLOCK_N"], constants["O_WIDTH"])
    named = {"q": q, "k": k, "v": v, "out": out}
    maps = [tuple(Descriptor(named[name], [1, rows, 1, columns]) for rows, columns in kinds[name]) for name in named]
    diagonal = seqlen_k - seqlen_q if diagonal is None else diagonal
    sizes = [
        Registers(torch.tensor(x, dtype=torch.int32)) for x in (batch, heads_q, heads_k, seqlen_q, seqlen_k, diagonal)
    ]
    scale = Registers(torch.tensor(head_dim**-0.5 if scale is None else scale, dtype=torch.float32))
    Emulator(seed, timeout_s=5.0, replace=replace).launch(
        hopper_attn_fwd, grid, *maps, Pointer(lse), Pointer(left), *sizes, scale,
        Registers(torch.tensor(write_lse)), Registers(torch.tensor(section, dtype=torch.int32)), **constants,
    )  # fmt: skip
    return out, lse, left.item()


def expected(q, k, v, causal=False, diagonal=None, scale=None):
    """(out, lse) in float64."""
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        diagonal = seqlen_k - seqlen_q if diagonal is None else diagonal
        s = s.masked_fill(~torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(diagonal), -math.inf)
    lse = torch.logsumexp(s, -1)
    return (torch.exp(s - lse[..., None]).nan_to_num(0.0) @ v).transpose(1, 2), lse


def check(q, k, v, **options) -> None:
    out, lse, left = emulated(q, k, v, **options)
    options = {name: value for name, value in options.items() if name in ("causal", "diagonal", "scale")}
    want, want_lse = expected(q, k, v, **options)
    assert (out.double() - want).abs().max() <= LIMIT[q.dtype] * max(1.0, want.abs().max())
    assert torch.equal(lse.isinf(), want_lse.isinf())
    seen = ~want_lse.isinf()
    torch.testing.assert_close(lse[seen].double(), want_lse[seen], rtol=1e-5, atol=1e-5)
    assert left == 0


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_head_dim_is_right_at_ragged_lengths(dims, causal):
    check(*tensors((1, 200, 300, 2, 1), *dims), causal=causal)
    check(*tensors((2, 300, 150, 2, 2), *dims, spread=4.0), causal=causal, grid=3, seed=1)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (1, 1, 500, 2, 2), (1, 129, 63, 2, 1), (3, 65, 191, 4, 2)])
@pytest.mark.parametrize("grid", [1, 4])
def test_short_lengths_and_few_programs(shape, grid):
    check(*tensors(shape, 128, 128), causal=True, grid=grid, section=1)


@pytest.mark.parametrize("diagonal", [-250, -70, -1, 0, 33, 1000])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_a_diagonal_may_lie_anywhere(dims, diagonal):
    check(*tensors((1, 200, 300, 2, 1), *dims), causal=True, diagonal=diagonal)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.7])
@pytest.mark.parametrize("q_regs", [0, 64])
def test_scales_of_zero_and_below_and_peaked_weights(scale, q_regs):
    check(*tensors((1, 200, 300, 2, 1), 128, 128), causal=True, scale=scale, Q_REGS=q_regs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_dtypes(dtype):
    check(*tensors((1, 200, 300, 2, 1), 64, 64, dtype, spread=4.0), causal=True)


@pytest.mark.parametrize(("dtype", "value"), [(torch.bfloat16, 133120.0), (torch.float16, 60000.0)], ids=str)
def test_huge_scores_do_not_overflow(dtype, value):
    q = torch.full((1, 100, 1, 64), value, dtype=dtype)
    out, lse, _ = emulated(q, q, q, causal=True)
    assert (out == out.new_tensor(value)).all() and torch.isfinite(lse).all()


def test_lse_is_not_written_unless_asked_for():
    q, k, v = tensors((1, 100, 130, 1, 1), 64, 64)
    out, lse, _ = emulated(q, k, v, write_lse=0)
    assert lse.isnan().all()
    assert torch.equal(out, emulated(q, k, v)[0])


# ---- Planted faults


def wrong(name: str = "", function=None) -> bool:
    """Whether a helper in place of the kernel's `name` makes it fail or give something else, for one of some seeds."""
    replace = {name: function} if name else {}
    q, k, v = tensors((1, 200, 700, 2, 1), 128, 128)
    want, _ = expected(q, k, v, causal=True)
    for seed in range(6):
        try:
            with quiet_threads():
                out, _, _ = emulated(q, k, v, causal=True, seed=seed, replace=replace)
        except EmulationError:
            return True
        if not (out.double() - want).abs().max() <= 2e-2:
            return True
    return False


def test_a_planted_fault_is_seen():
    def off_by_one(s, row, start_n, work, IS_CAUSAL):
        columns = start_n + torch.arange(s.value.shape[1])
        rows = row.value + torch.arange(64)[:, None]
        seen = (columns <= rows + work.diagonal.value + 1) & (columns < work.seqlen_k.value)
        return Registers(torch.where(seen, s.value, -math.inf))

    def wrong_phase(count, SLOTS):
        at, phase = count % SLOTS, (count // SLOTS) & 1
        return at, phase ^ 1

    assert not wrong()
    assert wrong("hide", off_by_one)
    assert wrong("slot_of", wrong_phase)
    assert wrong("rescale", lambda acc, alpha: acc)


def test_a_missing_wait_and_a_missing_arrival_are_seen(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(gluon_emulator.Barrier, "wait", lambda self, phase, deadline: None)
        assert wrong()
    with monkeypatch.context() as patch:
        patch.setattr(gluon_emulator.Barrier, "landed", lambda self, nbytes: None)
        assert wrong()
    assert not wrong()
