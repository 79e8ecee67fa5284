"""The torch ops: torch.ops.flashattn.attention (differentiable), attn_fwd, attn_fwd.inference and attn_bwd (raw).

All take, behind their tensors, what `checks.inputs` takes: scale, masks, and where sequences are.
"""

from __future__ import annotations

import torch

from . import checks, launch, reference

_MASKS = "int window_left=-1, int window_right=-1, bool top_left=False"
_TABLES = ", ".join(f"Tensor? {name}=None" for name in checks.TABLES)
_CALL = f"Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=False, {_MASKS}, {_TABLES}"
_library = torch.library.Library("flashattn", "DEF")
_library.define(f"attn_fwd({_CALL}) -> (Tensor out, Tensor lse)")
# Without LSE: an output less to allocate, which a small call feels.
_library.define(f"attn_fwd.inference({_CALL}) -> Tensor out")
_library.define(
    "attn_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse=None,"
    " float? softmax_scale=None, bool causal=False, bool want_dq=True, bool want_dkdv=True,"
    f" {_MASKS}, {_TABLES}) -> (Tensor dq, Tensor dk, Tensor dv)"
)
_library.define(f"attention({_CALL}) -> (Tensor out, Tensor lse)")


def _checked(q, k, v, *rest) -> tuple:
    """The call, checked but for data: (scale, causal, window_left, window_right, top_left, tables), or what was given.

    Without a table there are none: every dense call then takes the quick way.
    """
    tables = rest[5:]
    if tables:
        tables = (*tables, *(None,) * (len(checks.TABLES) - len(tables)))
        if all(table is None for table in tables):
            tables = ()
        rest = (*rest[:5], *tables)
    checks.inputs(q, k, v, *rest)
    return rest


def _read(q, k, v, *rest) -> tuple:
    """`_checked`, and the tables' contents too where reading them does not wait, or is asked for."""
    call = _checked(q, k, v, *rest)
    if call[5:] and (not q.is_cuda or launch.debugging()):
        checks.lengths_hold(q, k, call[5:])
    return call


def _forward(q, k, v, *rest):
    return launch.again(q, k, v, True, *rest) or launch.forward(q, k, v, True, *_read(q, k, v, *rest))


def _inference(q, k, v, *rest):
    return (launch.again(q, k, v, False, *rest) or launch.forward(q, k, v, False, *_read(q, k, v, *rest)))[0]


def _forward_cpu(q, k, v, *rest):
    if _interprets(q):
        return _forward(q, k, v, *rest)
    return reference.attention(q, k, v, *_read(q, k, v, *rest))


def _inference_cpu(q, k, v, *rest):
    if _interprets(q):
        return _inference(q, k, v, *rest)
    return reference.attention(q, k, v, *_read(q, k, v, *rest))[0]


def _interprets(q) -> bool:
    """Whether kernels run on these CPU tensors, in Triton's interpreter; they do not compute in float64."""
    return launch.interpreting() and q.dtype != torch.float64


def _forward_meta(q, k, v, *rest):
    return _inference_meta(q, k, v, *rest), q.new_empty(checks.lse_shape(q), dtype=checks.lse_dtype(q))


def _inference_meta(q, k, v, *rest):
    _checked(q, k, v, *rest)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _backward(
    dout, q, k, v, out, lse, dlse=None, softmax_scale=None, causal=False, want_dq=True, want_dkdv=True, *rest
):  # fmt: skip
    call = _read(q, k, v, softmax_scale, causal, *rest)
    checks.gradient_inputs(dout, q, v, out, lse, dlse)
    return launch.backward(dout, q, k, v, out, lse, dlse, want_dq, want_dkdv, *call)


def _backward_cpu(
    dout, q, k, v, out, lse, dlse=None, softmax_scale=None, causal=False, want_dq=True, want_dkdv=True, *rest
):  # fmt: skip
    if _interprets(q):
        return _backward(dout, q, k, v, out, lse, dlse, softmax_scale, causal, want_dq, want_dkdv, *rest)
    call = _read(q, k, v, softmax_scale, causal, *rest)
    checks.gradient_inputs(dout, q, v, out, lse, dlse)
    dq, dk, dv = reference.attention_backward(dout, q, k, v, out, lse, dlse, *call)
    return dq if want_dq else q.new_empty(0), *((dk, dv) if want_dkdv else (q.new_empty(0), q.new_empty(0)))


def _backward_meta(
    dout, q, k, v, out, lse, dlse=None, softmax_scale=None, causal=False, want_dq=True, want_dkdv=True, *rest
):  # fmt: skip
    checks.gradient_inputs(dout, q, v, out, lse, dlse)
    dq = q.new_empty(q.shape if want_dq else (0,))
    return dq, *(q.new_empty(x.shape if want_dkdv else (0,)) for x in (k, v))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, direct, q, k, v, *call):
        # With nothing listening in between, the kernel is called without a second way through the dispatcher.
        if direct:
            out, lse = _forward(q, k, v, *call)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = attn_fwd(q, k, v, *call)
        ctx.save_for_backward(q, k, v, out, lse, *call[5:])
        ctx.scalars = call[:5]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, *tables = ctx.saved_tensors
        want_q, want_k, want_v = ctx.needs_input_grad[1:4]
        rest = (None,) * (len(ctx.scalars) + len(tables))
        if dout is None and dlse is None:
            return None, None, None, None, *rest
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        scale, causal, *masks = ctx.scalars
        dq, dk, dv = attn_bwd(
            dout, q, k, v, out, lse, dlse, scale, causal, want_q, want_k or want_v, *masks, *tables
        )  # fmt: skip
        if torch.is_grad_enabled():
            dq, dk, dv = _NoSecondDerivative.apply(dq, dk, dv, q, k, v)
        return None, dq if want_q else None, dk if want_k else None, dv if want_v else None, *rest


# What `_Attention.apply` comes to outside of torch.func transforms, which the public functions refuse.
_apply = super(torch.autograd.Function, _Attention).apply


class _NoSecondDerivative(torch.autograd.Function):
    """Passes gradients on, tied to what they were computed from, so that differentiating them again raises."""

    @staticmethod
    def forward(ctx, dq, dk, dv, *inputs):
        return dq, dk, dv

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("attention: its gradients cannot be differentiated again (no second derivative)")


def _plain(q, k, v) -> bool:
    """Whether nothing but autograd listens to what is done with these tensors: no subclass, mode, trace or profile."""
    return (
        type(q) is type(k) is type(v) is torch.Tensor
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._autograd._profiler_enabled()
    )


def _attention_autograd(q, k, v, softmax_scale=None, causal=False, *rest):
    # Not `_apply`: inside of a torch.func transform this says so.
    return _Attention.apply(q.is_cuda and _plain(q, k, v), q, k, v, softmax_scale, causal, *rest)


def _attention(q, k, v, *rest):
    return attn_fwd(q, k, v, *rest)


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
attn_inference = torch.ops.flashattn.attn_fwd.inference
attn_bwd = torch.ops.flashattn.attn_bwd.default


def differentiable(q, k, v, *call):
    """`attention`; in an eager call the same without a way through the dispatcher."""
    if not torch.compiler.is_compiling() and _plain(q, k, v):
        return _apply(q.is_cuda, q, k, v, *call)
    return attention(q, k, v, *call)


def inference(q, k, v, *call):
    """`attn_fwd.inference`; in an eager call on a GPU the same without a way through the dispatcher."""
    if not torch.compiler.is_compiling() and q.is_cuda and _plain(q, k, v):
        return _inference(q, k, v, *call)
    return attn_inference(q, k, v, *call)


def check_max_seqlens(q, k, tables: tuple, max_seqlen_q, max_seqlen_k) -> None:
    """Raise where FLASHATTN_DEBUG asks for it and a sequence is longer than the caller says."""
    if launch.debugging() and _plain(q, k, k):
        checks.inputs(q, k, k, None, False, -1, -1, False, *tables)
        checks.lengths_hold(q, k, tables, (max_seqlen_q, max_seqlen_k))
