"""Allocate outputs, choose the grid, pack the arguments, launch."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from . import checks, declared, settings, specs
from ._version import __version__
from .jit.resolve import Resolver
from .jit.targets import target_of
from .variants import BwdVariant, FwdVariant

_FOLDER = Path(__file__).parent
_plans: dict[tuple, dict] = {}
_targets: dict[int, str] = {}
_resolver: Resolver | None = None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def resolver() -> Resolver:
    """The one of this process."""
    global _resolver
    if _resolver is None:
        current = settings.get()
        _resolver = Resolver(
            settings=current,
            kernels_dir=_FOLDER / "kernels",
            version=__version__,
            aot_dir=current.aot_dir or _FOLDER / "_aot",
            declared=_declared_keys,
        )
    return _resolver


def _declared_keys(target: str) -> frozenset[str]:
    return frozenset(
        spec.key for variant in declared.declared("core", target) for spec in specs.specs_of(variant, target)
    )


def reset() -> None:
    """Forget plans and the resolver: the next call reads the settings anew."""
    global _resolver
    _plans.clear()
    _resolver = None


def target_name(index: int) -> str:
    """The target of a GPU of torch's. Raises ValueError if no kernel runs on it."""
    if index not in _targets:
        properties = torch.cuda.get_device_properties(index)
        cuda = f"sm_{properties.major}{properties.minor}"
        name = properties.gcnArchName.split(":")[0] if torch.version.hip else cuda
        _targets[index] = target_of(name).name
    return _targets[index]


class _Compiled:
    """One kernel of a plan, resolved and loaded on one GPU."""

    def __init__(self, spec, index: int):
        from .jit import driver

        self.kernel = driver.load(resolver().resolve(spec), index)
        constants = dict(spec.constants)
        self.block_m, self.block_n = constants["BLOCK_M"], constants.get("BLOCK_N", 0)
        self._index = index

    def __call__(self, grid: int, tensors, strided, scalars) -> None:
        args = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        for tensor in strided:
            args += tensor.stride()[:3]
        args += scalars
        self.kernel.launch(grid, torch._C._cuda_getCurrentRawStream(self._index), tuple(args))


class _Interpreted:
    """One kernel of a plan in Triton's interpreter."""

    def __init__(self, spec):
        import importlib

        from .jit import interpreter

        interpreter.repair()
        self.kernel = getattr(importlib.import_module(spec.module), spec.kernel)
        self.constants = dict(spec.constants)
        self.block_m, self.block_n = self.constants["BLOCK_M"], self.constants.get("BLOCK_N", 0)

    def __call__(self, grid: int, tensors, strided, scalars) -> None:
        if grid == 0:
            return
        null = torch.empty(0)
        pointers = [null if tensor is None else tensor for tensor in tensors]
        strides = [tuple(tensor.stride()[:3]) for tensor in strided]
        self.kernel[(grid,)](*pointers, *strides, *scalars, **self.constants)


def plan(facts: tuple, target: str) -> tuple:
    """The specs of a call: (variant, specs). `facts` are (family, dtype, head_dim, head_dim_v, causal, aligned)."""
    family, dtype, head_dim, head_dim_v, causal, aligned = facts
    variant = (FwdVariant if family == "fwd" else BwdVariant)(
        dtype=checks.DTYPE_NAMES[dtype],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        is_causal=causal,
        is_aligned=aligned,
        allow_tf32=dtype == torch.float32 and settings.get().allow_tf32,
    )
    return variant, specs.specs_of(variant, target)


def _kernels(facts: tuple, device: torch.device) -> dict:
    key = (*facts, device.index)
    found = _plans.get(key)
    if found is None:
        if device.type == "cpu":
            _, wanted = plan(facts, "sm_90")
            found = {spec.kernel: _Interpreted(spec) for spec in wanted}
        else:
            _, wanted = plan(facts, target_name(device.index))
            found = {spec.kernel: _Compiled(spec, device.index) for spec in wanted}
        _plans[key] = found
    return found


def aligned(*tensors) -> bool:
    """Whether every pointer, and every stride of a tensor of four dimensions, is a multiple of 16 bytes."""
    for tensor in tensors:
        if tensor.data_ptr() & 15:
            return False
        if tensor.dim() == 4:
            a, b, c, _ = tensor.stride()
            if (a | b | c) * tensor.element_size() & 15:
                return False
    return True


def _rows_contiguous(tensor):
    """The tensor itself, or a copy if its last dimension is strided."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _scale(q, softmax_scale) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)


def on_its_device(function):
    """The function, run with the device of its first tensor current."""

    def run(first, *args):
        if first.device.type == "cpu" or first.device.index == torch.cuda.current_device():
            return function(first, *args)
        with torch.cuda.device(first.device):
            return function(first, *args)

    return run


@on_its_device
def forward(q, k, v, softmax_scale, causal: bool, want_lse: bool):
    """(out, lse); lse is empty unless wanted. The arguments have been checked."""
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_k, head_dim_v = v.shape
    out = torch.empty((batch, seqlen_q, heads_q, head_dim_v), dtype=q.dtype, device=q.device)
    shape = (batch, heads_q, seqlen_q) if want_lse else (0,)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    facts = ("fwd", q.dtype, head_dim, head_dim_v, causal, aligned(q, k, v, out))
    kernel = _kernels(facts, q.device)["attn_fwd"]
    kernel(
        -(-seqlen_q // kernel.block_m) * heads_q * batch,
        (q, k, v, out, lse if want_lse else None),
        (q, k, v, out),
        (heads_q, heads_k, seqlen_q, seqlen_k, _scale(q, softmax_scale), int(want_lse)),
    )
    return out, lse


@on_its_device
def backward(dout, q, k, v, out, lse, dlse, softmax_scale, causal: bool, want_dq: bool, want_dkdv: bool):
    """(dq, dk, dv); one that is not wanted is empty. The arguments have been checked."""
    dout, q, k, v, out = (_rows_contiguous(tensor) for tensor in (dout, q, k, v, out))
    lse = lse.contiguous()
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_k, head_dim_v = v.shape
    dq = torch.empty(q.shape if want_dq else (0,), dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape if want_dkdv else (0,), dtype=q.dtype, device=q.device)
    dv = torch.empty(v.shape if want_dkdv else (0,), dtype=q.dtype, device=q.device)
    if 0 in (batch, seqlen_q, seqlen_k):
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    written = [tensor for tensor, wanted in ((dq, want_dq), (dk, want_dkdv), (dv, want_dkdv)) if wanted]
    is_aligned = aligned(dout, q, k, v, out, lse, delta, *written)
    kernels = _kernels(("bwd", q.dtype, head_dim, head_dim_v, causal, is_aligned), q.device)
    kernel = kernels["bwd_preprocess"]
    kernel(
        -(-seqlen_q // kernel.block_m) * heads_q * batch,
        (out, dout, None if dlse is None else dlse.contiguous(), delta),
        (out, dout),
        (heads_q, seqlen_q, int(dlse is not None)),
    )
    scalars = (heads_q, heads_k, seqlen_q, seqlen_k, _scale(q, softmax_scale))
    if want_dkdv:
        kernel = kernels["bwd_dkdv"]
        grid = -(-seqlen_k // kernel.block_n) * heads_k * batch
        kernel(grid, (q, k, v, dout, lse, delta, dk, dv), (q, k, v, dout, dk, dv), scalars)
    if want_dq:
        kernel = kernels["bwd_dq"]
        grid = -(-seqlen_q // kernel.block_m) * heads_q * batch
        kernel(grid, (q, k, v, dout, lse, delta, dq), (q, k, v, dout, dq), scalars)
    return dq, dk, dv


def explain(q, k, v, causal: bool = False, target: str | None = None) -> str:
    """How each kernel of a call with these tensors is, or would be, found: one line a kernel."""
    checks.dense(q, k, v)
    name = target or (target_name(q.device.index) if q.is_cuda else "sm_90")
    lines = []
    for family in ("fwd", "bwd"):
        facts = (family, q.dtype, q.shape[3], v.shape[3], causal, aligned(q, k, v))
        variant, wanted = plan(facts, name)
        lines.append(f"{variant} on {name}")
        for spec in wanted:
            decision = resolver().decision(spec.key)
            lines.append(f"  {spec.label()}: {decision.describe() if decision else 'not asked for yet'}")
    return "\n".join(lines)
