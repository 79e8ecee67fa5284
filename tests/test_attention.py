"""The public functions and ops: on the CPU the reference, and on a GPU the kernels, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.library import opcheck

import flashattn
from flashattn import reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOW = [torch.float16, torch.bfloat16, torch.float32]


def make(dtype, batch, heads_q, heads_k, seqlen_q, seqlen_k, dim, dim_v=None, device="cpu", grad=True, spread=1.0):
    torch.manual_seed(seqlen_q * 1000 + seqlen_k)
    shapes = (
        (batch, seqlen_q, heads_q, dim),
        (batch, seqlen_k, heads_k, dim),
        (batch, seqlen_k, heads_k, dim_v or dim),
    )
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    q = q * spread
    return tuple(x.detach().requires_grad_(grad) for x in (q, k, v))


def poison(device):
    """Leave NaN in what the allocator hands out next."""
    if device == "cuda":
        # The allocator keeps small and large blocks apart.
        blocks = [torch.full((n,), float("nan"), device=device) for n in (1 << 24, *[1 << 16] * 32, *[1 << 8] * 64)]
        del blocks


def everything(function, q, k, v, dout, dlse, **options):
    out, lse = function(q, k, v, **options)
    loss = (out.double() * dout.double()).sum() + (torch.where(lse.isinf(), 0, lse).double() * dlse.double()).sum()
    return out, lse, *torch.autograd.grad(loss, (q, k, v))


def compare(q, k, v, softmax_scale=None, causal=False):
    """Ours against float64, with the error of the same mathematics in the tested dtype as the yardstick."""
    dout = torch.randn(*q.shape[:3], v.shape[3], device=q.device).to(q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    options = {"softmax_scale": softmax_scale, "causal": causal}

    def ours(*args, **kwargs):
        return flashattn.flash_attn_func(*args, return_lse=True, **kwargs)

    poison(q.device.type)
    got = everything(ours, q, k, v, dout, dlse, **options)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = everything(reference.attention, *exact, dout, dlse, **options)
    low = everything(plain, q, k, v, dout, dlse, **options)
    for name, factor, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), (2, 0, 3, 3, 3), got, want, low, strict=True):
        assert a.shape == b.shape, name
        if name == "lse":
            assert torch.equal(a.isinf(), b.isinf())
            finite = ~b.isinf()
            assert ((a.double() - b)[finite].abs() <= 1e-5 * b[finite].abs().clamp(min=1)).all()
        else:
            limit = factor * (c.double() - b).abs().max() + 1e-5 if b.numel() else 0
            assert not b.numel() or (a.double() - b).abs().max() <= limit, name
    return got


def plain(q, k, v, softmax_scale=None, causal=False):
    """Attention in the dtype of its inputs."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    qh, kh, vh = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    rows = torch.arange(q.shape[1], device=q.device)[:, None]
    columns = torch.arange(k.shape[1], device=q.device)[None]
    keep = (columns <= rows + k.shape[1] - q.shape[1]) | (not causal)
    s = ((qh @ kh.transpose(-1, -2)) * scale).float().masked_fill(~keep, float("-inf"))
    empty = ~keep.any(-1)
    p = torch.softmax(s.masked_fill(empty[:, None], 0), -1).masked_fill(~keep, 0)
    lse = torch.logsumexp(s.masked_fill(empty[:, None], 0), -1).masked_fill(empty, float("-inf"))
    return (p.to(q.dtype) @ vh).transpose(1, 2), lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_output_lse_and_gradients_are_those_of_float64(dtype, spread, device):
    compare(*make(dtype, 2, 4, 4, 257, 257, 64, device=device, spread=spread))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 16, 17, 64, 127, 1000])
@pytest.mark.parametrize("seqlen_k", [1, 15, 64, 65, 129, 1000])
def test_any_lengths(seqlen_q, seqlen_k, causal, device):
    compare(*make(torch.float16, 1, 2, 1, seqlen_q, seqlen_k, 64, device=device), causal=causal)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [1, 8, 16, 20, 23, 24, 32, 40, 48, 64, 72, 80, 96, 104, 128, 160, 192, 224, 256])
def test_any_head_dim(dim, device):
    for dtype in LOW:
        compare(*make(dtype, 1, 2, 1, 77, 129, dim, device=device), causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dim", "dim_v"), [(24, 152), (120, 8), (192, 128), (64, 128)])
def test_head_dim_of_v_may_differ(dim, dim_v, device):
    out = compare(*make(torch.bfloat16, 1, 2, 2, 70, 90, dim, dim_v, device=device))[0]
    assert out.shape[-1] == dim_v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads_q", "heads_k"), [(8, 8), (16, 8), (10, 2), (8, 1), (6, 2), (14, 2), (7, 7)])
def test_query_heads_share_key_heads(heads_q, heads_k, device):
    compare(*make(torch.float16, 2, heads_q, heads_k, 77, 77, 64, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(40, 40), (33, 17), (17, 33), (1, 50), (50, 1), (5, 130), (130, 131)]
)
def test_causal_is_aligned_bottom_right_forward_and_backward(seqlen_q, seqlen_k, device):
    compare(*make(torch.float16, 1, 4, 2, seqlen_q, seqlen_k, 64, device=device), causal=True)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_key_give_zero(device):
    q, k, v = make(torch.float16, 1, 2, 2, 50, 8, 32, device=device)
    out, lse, dq, _, _ = compare(q, k, v, causal=True)
    assert (out[:, :42] == 0).all() and (dq[:, :42] == 0).all() and (lse[..., :42] == float("-inf")).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0.0, -0.125])
@pytest.mark.parametrize("causal", [False, True])
def test_scale_may_be_zero_or_negative(scale, causal, device):
    compare(*make(torch.float32, 2, 2, 2, 70, 70, 64, device=device), softmax_scale=scale, causal=causal)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_lse_of_the_identity(dtype, device):
    eye = torch.eye(16, dtype=dtype, device=device)[None, :, None]
    lse = flashattn.flash_attn_func(eye, eye, eye, softmax_scale=0.25, return_lse=True)[1]
    torch.testing.assert_close(lse, torch.full_like(lse, 2.7901845), rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seqlen", [1, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_huge_scores_do_not_overflow(seqlen, causal, device):
    q = torch.full((1, seqlen, 1, 64), 133120.0, dtype=torch.bfloat16, device=device, requires_grad=True)
    out, lse = flashattn.flash_attn_func(q, q, q, causal=causal, return_lse=True)
    assert (out == 133120).all() and torch.isfinite(lse).all()
    assert torch.isfinite(torch.autograd.grad(out.sum(), q)[0]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_fp16_scores_and_sums_pass_65504(device):
    q = torch.full((1, 2925, 1, 128), 60.0, dtype=torch.float16, device=device)
    q = (q * (torch.rand_like(q) < 0.5).mul(2).sub(1)).requires_grad_()
    v = torch.full_like(q, 6e4).detach().requires_grad_()
    out = flashattn.flash_attn_func(q, q, v)
    assert torch.isfinite(out).all() and (out == 6e4).all()
    grads = torch.autograd.grad(out, (q, v), torch.full_like(out, 1e-3))
    assert all(torch.isfinite(grad).all() for grad in grads)


def layouts(x):
    """The same values in other places: transposed, in a fused tensor, every second row, strided last."""
    batch, seqlen, heads, dim = x.shape
    fused = x.new_full((seqlen, batch, heads + 3, dim), float("nan"))
    fused[:, :, 1 : 1 + heads] = x.transpose(0, 1)
    doubled = x.new_full((batch, 2 * seqlen, heads, dim), float("nan"))
    doubled[:, ::2] = x
    last = x.new_full((batch, seqlen, heads, 2 * dim), float("nan"))
    last[..., ::2] = x
    shifted = x.new_full((x.numel() + 1,), float("nan"))
    shifted[1:] = x.reshape(-1)
    return {
        "contiguous": x,
        "bhsd": x.transpose(1, 2).contiguous().transpose(1, 2),
        "fused sbhd": fused[:, :, 1 : 1 + heads].transpose(0, 1),
        "every second row": doubled[:, ::2],
        "last dimension strided": last[..., ::2],
        "shifted by an element": shifted[1:].view(x.shape),
    }


@pytest.mark.parametrize("device", DEVICES)
def test_strides_and_alignment_do_not_change_the_result(device):
    with torch.no_grad():
        q, k, v = make(torch.float16, 2, 4, 2, 33, 47, 64, device=device, grad=False)
        dout = torch.randn(2, 33, 4, 64, device=device).half()
        out, lse = flashattn.flash_attn_func(q, k, v, causal=True, return_lse=True)
        grads = torch.ops.flashattn.attn_bwd(dout, q, k, v, out, lse, causal=True)
        for a, b, c in itertools.product(*(layouts(x).values() for x in (q, k, v))):
            got = flashattn.flash_attn_func(a, b, c, causal=True)
            # Where addresses are no multiples of 16 bytes, a Hopper GPU has another kernel.
            if any(x.data_ptr() % 16 for x in (a, b, c)):
                torch.testing.assert_close(got, out, rtol=2e-3, atol=2e-3)
            else:
                assert torch.equal(got, out)
        for other in layouts(dout).values():
            got = torch.ops.flashattn.attn_bwd(other, q, k, v, out, lse, causal=True)
            assert all(torch.equal(x, y) for x, y in zip(got, grads, strict=True))
        for a, b, c in zip(*(layouts(x).values() for x in (q, k, v)), strict=True):
            strided_lse = torch.stack([lse, lse], -1)[..., 0]
            got = torch.ops.flashattn.attn_bwd(dout, a, b, c, out, strided_lse, causal=True)
            assert all(torch.equal(x, y) for x, y in zip(got, grads, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_expanded_and_packed_inputs(device):
    q, k, v = make(torch.float32, 2, 4, 1, 33, 33, 64, device=device, grad=False)
    want = flashattn.flash_attn_func(q, k.repeat(1, 1, 4, 1), v.repeat(1, 1, 4, 1))
    torch.testing.assert_close(flashattn.flash_attn_func(q, k.expand(2, 33, 4, 64), v.expand(2, 33, 4, 64)), want)
    kv = torch.stack([k, v], 2)
    torch.testing.assert_close(flashattn.flash_attn_kvpacked_func(q, kv), want)
    qkv = torch.stack([q, q + 1, q - 1], 2).requires_grad_()
    packed = flashattn.flash_attn_qkvpacked_func(qkv, causal=True)
    torch.testing.assert_close(packed, flashattn.flash_attn_func(q, q + 1, q - 1, causal=True))
    assert torch.autograd.grad(packed.sum(), qkv)[0].shape == qkv.shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
def test_empty_batches_and_sequences(shape, device):
    batch, seqlen_q, seqlen_k = shape
    out, lse, dq, dk, dv = compare(*make(torch.float32, batch, 2, 2, seqlen_q, seqlen_k, 16, device=device))
    assert out.shape[1] == seqlen_q and (out == 0).all() and (lse == float("-inf")).all()
    assert all((grad == 0).all() for grad in (dq, dk, dv))


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_are_not_changed_and_inference_gives_the_same_bits(device):
    tensors = make(torch.bfloat16, 1, 2, 1, 65, 65, 72, device=device)
    before = [x.detach().clone() for x in tensors]
    out = flashattn.flash_attn_func(*tensors, causal=True)
    out.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    with torch.no_grad():
        assert torch.equal(flashattn.flash_attn_func(*tensors, causal=True), out)


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_asked_gradients_are_computed(device):
    full = make(torch.float32, 1, 2, 2, 20, 30, 16, device=device)
    want = torch.autograd.grad(flashattn.flash_attn_func(*full).sum(), full)
    for needed in itertools.product([False, True], repeat=3):
        if not any(needed):
            continue
        given = [x.detach().requires_grad_(need) for x, need in zip(full, needed, strict=True)]
        flashattn.flash_attn_func(*given).sum().backward()
        for x, grad, need in zip(given, want, needed, strict=True):
            assert x.grad is None if not need else torch.equal(x.grad, grad)


def test_double_backward_raises():
    q, k, v = make(torch.float32, 1, 1, 1, 4, 4, 8)
    out = flashattn.flash_attn_func(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        (grad.square().sum() + out.square().sum()).backward()


@pytest.mark.parametrize(("causal", "seqlen_q", "seqlen_k"), [(False, 7, 9), (True, 9, 9), (True, 5, 9), (True, 9, 5)])
def test_reference_is_torch_s_attention_with_an_explicit_mask(causal, seqlen_q, seqlen_k):
    q, k, v = make(torch.float64, 2, 4, 2, seqlen_q, seqlen_k, 8, grad=False)
    mask = torch.tensor(
        [[not causal or j <= i + seqlen_k - seqlen_q for j in range(seqlen_k)] for i in range(seqlen_q)]
    )
    got = reference.attention(q, k, v, 0.3, causal)[0]
    wide = (x.transpose(1, 2).repeat_interleave(2, 1) for x in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), *wide, attn_mask=mask, scale=0.3)
    seen = mask.any(1)
    torch.testing.assert_close(got[:, seen], want.transpose(1, 2)[:, seen])
    assert (got[:, ~seen] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_does_not_change_the_reference(dtype):
    q, k, v = make(dtype, 1, 2, 2, 20, 30, 16)
    want, want_lse = flashattn.flash_attn_func(q, k, v, return_lse=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = flashattn.flash_attn_func(q, k, v, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.autograd.grad(want.sum(), q)[0])


def test_transforms_are_refused_not_answered_wrongly():
    q, k, v = make(torch.float32, 1, 1, 1, 4, 4, 8, grad=False)

    def attend(x):
        return flashattn.flash_attn_func(x, k, v)

    for transformed in (
        lambda: torch.func.jvp(attend, (q,), (torch.ones_like(q),)),
        lambda: torch.func.grad(lambda x: attend(x).sum())(q),
        lambda: torch.vmap(attend)(torch.stack([q, q])),
    ):
        with pytest.raises(NotImplementedError, match=r"torch\.func transforms"):
            transformed()


def test_the_op_itself_says_that_it_has_no_transforms():
    q, k, v = make(torch.float32, 1, 1, 1, 4, 4, 8, grad=False)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: torch.ops.flashattn.attention(x, k, v)[0].sum())(q)


WRONG_SCALARS = {
    "a tensor as scale": ({"softmax_scale": torch.tensor(0.1)}, TypeError, "softmax_scale is a tensor"),
    "text as scale": ({"softmax_scale": "x"}, TypeError, "softmax_scale is 'x'"),
    "a scale float32 cannot hold": ({"softmax_scale": 1e39}, ValueError, "softmax_scale is 1e.39"),
    "causal": ({"causal": None}, TypeError, "causal is None, expected True or False"),
    "no window": ({"window_size": None}, ValueError, "window_size is None"),
    "half a window": ({"window_size": (-1,)}, ValueError, "window_size is"),
    "a broken window": ({"window_size": (-1.9, -1)}, ValueError, "window_size is"),
}


@pytest.mark.parametrize("case", WRONG_SCALARS)
def test_a_wrong_option_names_the_argument(case):
    options, error, text = WRONG_SCALARS[case]
    with pytest.raises(error, match=text):
        flashattn.flash_attn_func(*make(torch.float32, 1, 1, 1, 4, 4, 8), **options)


def test_causal_may_be_an_integer_and_the_scale_too():
    q, k, v = make(torch.float32, 1, 1, 1, 4, 4, 8)
    want = flashattn.flash_attn_func(q, k, v, softmax_scale=1.0, causal=True)
    assert torch.equal(flashattn.flash_attn_func(q, k, v, softmax_scale=1, causal=1), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_ops_pass_opcheck(device, causal):
    q, k, v = make(torch.float32, 2, 4, 2, 33, 47, 24, device=device)
    opcheck(torch.ops.flashattn.attention.default, (q, k, v, None, causal))
    plain_inputs = tuple(x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    opcheck(torch.ops.flashattn.attn_fwd.default, (*plain_inputs, None, causal))
    opcheck(torch.ops.flashattn.attn_fwd.inference, (*plain_inputs, None, causal))
    out, lse = torch.ops.flashattn.attn_fwd(*plain_inputs, None, causal)
    opcheck(torch.ops.flashattn.attn_bwd.default, (out, *plain_inputs, out, lse, None, None, causal))


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_as_one_graph_with_dynamic_lengths(device):
    torch._dynamo.reset()
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    compiled = torch.compile(
        lambda q, k, v: flashattn.flash_attn_func(q, k, v, causal=True), fullgraph=True, dynamic=True, backend=backend
    )
    for seqlen in (33, 47, 64, 100):
        q, k, v = make(torch.float32, 2, 4, 2, seqlen, seqlen, 24, device=device)
        want = flashattn.flash_attn_func(q, k, v, causal=True)
        got = compiled(q, k, v)
        assert torch.equal(got, want)
        for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (got, want)), strict=True):
            assert torch.equal(a, b)
    assert len(seen) == 1


WRONG = {
    "int64": (lambda q, k, v: (q.long(), k.long(), v.long()), TypeError, "int64.*expected float16"),
    "mixed dtypes": (lambda q, k, v: (q, k.half(), v), TypeError, "k is torch.float16 but q is torch.float32"),
    "rank": (lambda q, k, v: (q[0], k, v), ValueError, "q has 3 dimensions, expected 4"),
    "device": (lambda q, k, v: (q, k.to("meta"), v), ValueError, "k is on meta but q is on cpu"),
    "batch": (lambda q, k, v: (q, k[:1], v), ValueError, "batch is 2 in q and 1 in k"),
    "seqlen": (lambda q, k, v: (q, k, v[:, :1]), ValueError, "k has seqlen 6 but v has 1"),
    "heads": (lambda q, k, v: (q[:, :, :3], k, v), ValueError, "q has 3 heads and k has 2"),
    "no heads": (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), ValueError, "q has 4 heads and k has 0"),
    "kv heads": (lambda q, k, v: (q, k, v[:, :, :1]), ValueError, "k has 2 heads but v has 1"),
    "head_dim": (lambda q, k, v: (q, k[..., :4], v), ValueError, "head_dim is 8 in q but 4 in k"),
    "head_dim over 256": (
        lambda q, k, v: (q, k, v.repeat(1, 1, 1, 33)),
        ValueError,
        "head_dim of v is 264, expected 1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_names_the_argument_and_what_is_accepted(case):
    change, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        flashattn.flash_attn_func(*change(*make(torch.float32, 2, 4, 2, 5, 6, 8, grad=False)))


WRONG_GRADIENTS = {
    "dout": (lambda x: x.double(), TypeError, "dout is torch.float64 but q is torch.float32"),
    "out": (lambda x: x[:, 1:], ValueError, r"out has shape \(2, 4, 4, 8\), expected \(2, 5, 4, 8\)"),
    "lse": (lambda x: x.transpose(1, 2), ValueError, r"lse has shape \(2, 5, 4\).*expected \(2, 4, 5\)"),
    "dlse": (lambda x: x.half(), TypeError, "dlse is torch.float16, expected torch.float32"),
}


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_a_wrong_backward_call_names_the_argument(name):
    q, k, v = make(torch.float32, 2, 4, 2, 5, 6, 8, grad=False)
    out, lse = torch.ops.flashattn.attn_fwd(q, k, v)
    given = {"dout": out, "out": out, "lse": lse, "dlse": lse}
    change, error, text = WRONG_GRADIENTS[name]
    given[name] = change(given[name])
    with pytest.raises(error, match=text):
        torch.ops.flashattn.attn_bwd(given["dout"], q, k, v, given["out"], given["lse"], given["dlse"])


def test_a_scale_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="softmax_scale is nan"):
        flashattn.flash_attn_func(*make(torch.float32, 1, 1, 1, 4, 4, 8), softmax_scale=float("nan"))


UNBUILT = {
    "dropout_p": 0.1,
    "softcap": 30.0,
    "alibi_slopes": torch.ones(1),
    "bias": torch.zeros(4, 4),
    "sink": torch.zeros(1),
    "out": torch.zeros(1, 4, 1, 8),
}


@pytest.mark.parametrize("name", UNBUILT)
def test_a_feature_that_is_not_built_is_named(name):
    with pytest.raises(NotImplementedError, match=name):
        flashattn.flash_attn_func(*make(torch.float32, 1, 1, 1, 4, 4, 8), **{name: UNBUILT[name]})


def test_negative_windows_are_refused():
    with pytest.raises(ValueError, match="window_size"):
        flashattn.flash_attn_func(*make(torch.float32, 1, 1, 1, 4, 4, 8), window_size=(-2, 0))


@pytest.mark.gpu
def test_graph_replay_equals_eager():
    q, k, v = make(torch.bfloat16, 2, 4, 2, 200, 200, 64, device="cuda", grad=False)

    def step():
        out, lse = torch.ops.flashattn.attn_fwd(q, k, v, None, True)
        return out, *torch.ops.flashattn.attn_bwd(out, q, k, v, out, lse, causal=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensor in (q, k, v):
        tensor.normal_()
    for tensor in captured:
        tensor.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_offsets_beyond_int32():
    """k is stored sequence-major, 92,160 elements from a row to the next; so its last rows lie past 2^31 elements."""
    storage = torch.randn(24000, 720, 128, device="cuda", dtype=torch.float16)
    k = storage.transpose(0, 1)[:, :, None]
    q = torch.randn(720, 8, 1, 128, device="cuda", dtype=torch.float16)
    out = flashattn.flash_attn_func(q, k, k)
    for batch in (0, 719):
        one = k[batch : batch + 1].contiguous()
        assert torch.equal(out[batch : batch + 1], flashattn.flash_attn_func(q[batch : batch + 1], one, one))


@pytest.mark.gpu
def test_nine_shapes_compile_each_kernel_once(tmp_path, monkeypatch):
    from flashattn import launch, settings

    monkeypatch.setenv("FLASHATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHATTN_AOT_DIR", str(tmp_path / "none"))
    settings.reset()
    launch.reset()
    try:
        for seqlen, heads, batch in itertools.product((1, 100, 4096), (1, 7, 8), (1, 2)):
            q, k, v = make(torch.bfloat16, batch, heads, heads, seqlen, seqlen, 64, device="cuda")
            flashattn.flash_attn_func(q, k, v).sum().backward()
        assert launch.resolver().compiles == 4
    finally:
        monkeypatch.undo()
        settings.reset()
        launch.reset()
