"""The torch ops: torch.ops.flashattn.attention (differentiable), attn_fwd, attn_fwd.inference and attn_bwd (raw)."""

from __future__ import annotations

import torch

from . import checks, launch, reference

_library = torch.library.Library("flashattn", "DEF")
_library.define(
    "attn_fwd(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=False) -> (Tensor out, Tensor lse)"
)
# Without LSE: an output less to allocate, which a small call feels.
_library.define(
    "attn_fwd.inference(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=False) -> Tensor out"
)
_library.define(
    "attn_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse=None,"
    " float? softmax_scale=None, bool causal=False, bool want_dq=True, bool want_dkdv=True)"
    " -> (Tensor dq, Tensor dk, Tensor dv)"
)
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=False) -> (Tensor out, Tensor lse)"
)


def _forward(q, k, v, softmax_scale=None, causal=False):
    checks.dense(q, k, v, softmax_scale)
    return launch.forward(q, k, v, softmax_scale, causal, True)


def _inference(q, k, v, softmax_scale=None, causal=False):
    checks.dense(q, k, v, softmax_scale)
    return launch.forward(q, k, v, softmax_scale, causal, False)[0]


def _forward_cpu(q, k, v, softmax_scale=None, causal=False):
    if _interprets(q):
        return _forward(q, k, v, softmax_scale, causal)
    checks.dense(q, k, v, softmax_scale)
    return reference.attention(q, k, v, softmax_scale, causal)


def _inference_cpu(q, k, v, softmax_scale=None, causal=False):
    if _interprets(q):
        return _inference(q, k, v, softmax_scale, causal)
    checks.dense(q, k, v, softmax_scale)
    return reference.attention(q, k, v, softmax_scale, causal)[0]


def _interprets(q) -> bool:
    """Whether kernels run on these CPU tensors, in Triton's interpreter; they do not compute in float64."""
    return launch.interpreting() and q.dtype != torch.float64


def _forward_meta(q, k, v, softmax_scale=None, causal=False):
    out = _inference_meta(q, k, v, softmax_scale, causal)
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=checks.lse_dtype(q))


def _inference_meta(q, k, v, softmax_scale=None, causal=False):
    checks.dense(q, k, v, softmax_scale)
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _backward(
    dout, q, k, v, out, lse, dlse=None, softmax_scale=None, causal=False, want_dq=True, want_dkdv=True
):  # fmt: skip
    checks.dense(q, k, v, softmax_scale)
    checks.gradient_inputs(dout, q, v, out, lse, dlse)
    return launch.backward(dout, q, k, v, out, lse, dlse, softmax_scale, causal, want_dq, want_dkdv)


def _backward_cpu(
    dout, q, k, v, out, lse, dlse=None, softmax_scale=None, causal=False, want_dq=True, want_dkdv=True
):  # fmt: skip
    if _interprets(q):
        return _backward(dout, q, k, v, out, lse, dlse, softmax_scale, causal, want_dq, want_dkdv)
    checks.dense(q, k, v, softmax_scale)
    checks.gradient_inputs(dout, q, v, out, lse, dlse)
    dq, dk, dv = reference.attention_backward(dout, q, k, v, out, lse, dlse, softmax_scale, causal)
    return dq if want_dq else q.new_empty(0), *((dk, dv) if want_dkdv else (q.new_empty(0), q.new_empty(0)))


def _backward_meta(
    dout, q, k, v, out, lse, dlse=None, softmax_scale=None, causal=False, want_dq=True, want_dkdv=True
):  # fmt: skip
    checks.gradient_inputs(dout, q, v, out, lse, dlse)
    dq = q.new_empty(q.shape if want_dq else (0,))
    return dq, *(q.new_empty(x.shape if want_dkdv else (0,)) for x in (k, v))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal):
        # With nothing listening in between, the kernel is called without a second way through the dispatcher.
        if q.is_cuda and _plain(q, k, v):
            out, lse = _forward(q, k, v, softmax_scale, causal)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = attn_fwd(q, k, v, softmax_scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.softmax_scale, ctx.causal = softmax_scale, causal
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        want_q, want_k, want_v = ctx.needs_input_grad[:3]
        if dout is None and dlse is None:
            return None, None, None, None, None
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        dq, dk, dv = attn_bwd(dout, q, k, v, out, lse, dlse, ctx.softmax_scale, ctx.causal, want_q, want_k or want_v)
        if torch.is_grad_enabled():
            dq, dk, dv = _NoSecondDerivative.apply(dq, dk, dv, q, k, v)
        return dq if want_q else None, dk if want_k else None, dv if want_v else None, None, None


class _NoSecondDerivative(torch.autograd.Function):
    """Passes gradients on, tied to what they were computed from, so that differentiating them again raises."""

    @staticmethod
    def forward(ctx, dq, dk, dv, *inputs):
        return dq, dk, dv

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("attention: its gradients cannot be differentiated again (no second derivative)")


def _plain(q, k, v) -> bool:
    """Whether nothing but autograd listens to what is done with these tensors: no subclass, no tracing."""
    return type(q) is type(k) is type(v) is torch.Tensor and not torch._C._len_torch_dispatch_stack()


def _attention_autograd(q, k, v, softmax_scale=None, causal=False):
    return _Attention.apply(q, k, v, softmax_scale, causal)


def _attention(q, k, v, softmax_scale=None, causal=False):
    return attn_fwd(q, k, v, softmax_scale, causal)


_library.impl("attention", _attention_autograd, "Autograd")
for _key in ("CUDA", "CPU", "Meta"):
    _library.impl("attention", _attention, _key)
_library.impl("attn_fwd", _forward, "CUDA")
_library.impl("attn_fwd", _forward_cpu, "CPU")
_library.impl("attn_fwd", _forward_meta, "Meta")
_library.impl("attn_fwd.inference", _inference, "CUDA")
_library.impl("attn_fwd.inference", _inference_cpu, "CPU")
_library.impl("attn_fwd.inference", _inference_meta, "Meta")
_library.impl("attn_bwd", _backward, "CUDA")
_library.impl("attn_bwd", _backward_cpu, "CPU")
_library.impl("attn_bwd", _backward_meta, "Meta")

attention = torch.ops.flashattn.attention.default
attn_fwd = torch.ops.flashattn.attn_fwd.default
inference = torch.ops.flashattn.attn_fwd.inference
attn_bwd = torch.ops.flashattn.attn_bwd.default


def differentiable(q, k, v, softmax_scale, causal):
    """`attention`; in an eager call the same without a way through the dispatcher."""
    if not torch.compiler.is_compiling() and _plain(q, k, v):
        return _Attention.apply(q, k, v, softmax_scale, causal)
    return attention(q, k, v, softmax_scale, causal)
