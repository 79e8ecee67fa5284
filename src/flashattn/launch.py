"""Allocate outputs, choose the grid, pack the arguments, launch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import checks, settings, specs
from ._version import __version__
from .jit.targets import SUPPORTED, target_of
from .variants import BwdVariant, FwdVariant

if TYPE_CHECKING:
    from .jit.resolve import Resolver

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
        # A third of what importing the package would cost.
        from .jit.resolve import Resolver

        _resolver = Resolver(
            settings=settings.get(),
            kernels_dir=_FOLDER / "kernels",
            version=__version__,
            aot_dir=_FOLDER / "_aot",
            declared=declared_keys,
        )
    return _resolver


def declared_keys(target: str) -> frozenset[str]:
    """What a wheel should hold for `target`: nothing for one that is compiled on first call only."""
    return frozenset(specs.declared_specs("core", target) if target in SUPPORTED else ())


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


class _Null:
    """The pointer of a feature that is off."""

    @staticmethod
    def data_ptr() -> int:
        return 0


_NULL = _Null()


class _Compiled:
    """One kernel of a plan, resolved and loaded on one GPU."""

    def __init__(self, spec, index: int):
        from .jit import driver

        self.launch = driver.load(resolver().resolve(spec), index).launch
        constants = dict(spec.constants)
        self.block_m, self.block_n = constants["BLOCK_M"], constants.get("BLOCK_N", 0)
        self.index = index
        self.waits = settings.get().debug

    def __call__(self, grid: int, tensors: tuple, strides: tuple, scalars: tuple) -> None:
        args = (*[tensor.data_ptr() for tensor in tensors], *strides, *scalars)
        self.launch(grid, torch._C._cuda_getCurrentRawStream(self.index), args)
        if self.waits:
            torch.cuda.synchronize(self.index)


class _Interpreted:
    """One kernel of a plan in Triton's interpreter."""

    def __init__(self, spec):
        import importlib

        from .jit import interpreter

        interpreter.repair()
        self.kernel = getattr(importlib.import_module(spec.module), spec.kernel)
        self.constants = dict(spec.constants)
        self.block_m, self.block_n = self.constants["BLOCK_M"], self.constants.get("BLOCK_N", 0)

    def __call__(self, grid: int, tensors: tuple, strides: tuple, scalars: tuple) -> None:
        null = torch.empty(0)
        pointers = [null if tensor is _NULL else tensor for tensor in tensors]
        grouped = [strides[i : i + 3] for i in range(0, len(strides), 3)]
        self.kernel[(grid,)](*pointers, *grouped, *scalars, **self.constants)


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


def _rows(tensor):
    """(tensor, its three outer strides); a tensor whose last dimension is strided is copied."""
    strides = tensor.stride()
    if strides[3] != 1 and tensor.shape[3] != 1:
        tensor = tensor.contiguous()
        strides = tensor.stride()
    return tensor, strides[:3]


def _whole(shape) -> tuple:
    """The three outer strides of a contiguous tensor."""
    _, seqlen, heads, dim = shape
    return seqlen * heads * dim, heads * dim, dim


def _is_aligned(itemsize: int, strides: tuple, *tensors) -> bool:
    """Whether every stride and every pointer is a multiple of 16 bytes."""
    bits = 0
    for stride in strides:
        bits |= stride
    bits *= itemsize
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return not bits & 15


def on_its_device(function):
    """The function, run with the device of its first tensor current."""

    def run(first, *args):
        index = first.get_device()
        if index < 0 or index == torch._C._cuda_getDevice():
            return function(first, *args)
        with torch.cuda.device(index):
            return function(first, *args)

    return run


@on_its_device
def forward(q, k, v, softmax_scale, causal: bool, want_lse: bool):
    """(out, lse); lse is None unless wanted. The arguments have been checked."""
    dtype, device = q.dtype, q.device
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_k, head_dim_v = v.shape
    (q, q_strides), (k, k_strides), (v, v_strides) = _rows(q), _rows(k), _rows(v)
    shape = (batch, seqlen_q, heads_q, head_dim_v)
    # empty_like is the quicker of the two by a microsecond.
    out = torch.empty_like(q) if head_dim == head_dim_v and q.is_contiguous() else q.new_empty(shape)
    lse = q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float32) if want_lse else None
    if batch == 0 or seqlen_q == 0:
        return out, lse
    strides = q_strides + k_strides + v_strides + _whole(shape)
    is_aligned = _is_aligned(q.element_size(), strides, q, k, v, out)
    kernel = _kernels(("fwd", dtype, head_dim, head_dim_v, causal, is_aligned), device)["attn_fwd"]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    kernel(
        -(-seqlen_q // kernel.block_m) * heads_q * batch,
        (q, k, v, out, lse if want_lse else _NULL),
        strides,
        (heads_q, heads_k, seqlen_q, seqlen_k, scale, int(want_lse)),
    )
    return out, lse


@on_its_device
def backward(dout, q, k, v, out, lse, dlse, softmax_scale, causal: bool, want_dq: bool, want_dkdv: bool):
    """(dq, dk, dv); one that is not wanted is empty. The arguments have been checked."""
    dtype, device = q.dtype, q.device
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_k, head_dim_v = v.shape
    dq = torch.empty(q.shape if want_dq else 0, dtype=dtype, device=device)
    dk = torch.empty(k.shape if want_dkdv else 0, dtype=dtype, device=device)
    dv = torch.empty(v.shape if want_dkdv else 0, dtype=dtype, device=device)
    if 0 in (batch, seqlen_q, seqlen_k):
        return dq.zero_(), dk.zero_(), dv.zero_()
    (q, q_strides), (k, k_strides), (v, v_strides) = _rows(q), _rows(k), _rows(v)
    (dout, dout_strides), (out, out_strides) = _rows(dout), _rows(out)
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    inputs = q_strides + k_strides + v_strides + dout_strides
    dq_strides, dkdv_strides = _whole(q.shape), _whole(k.shape) + _whole(v.shape)
    strides = inputs + out_strides + dq_strides + dkdv_strides
    extra = () if dlse is None else (dlse.contiguous(),)
    is_aligned = _is_aligned(q.element_size(), strides, q, k, v, dout, out, lse, delta, dq, dk, dv, *extra)
    kernels = _kernels(("bwd", dtype, head_dim, head_dim_v, causal, is_aligned), device)
    rows = heads_q * batch
    kernel = kernels["bwd_preprocess"]
    kernel(
        -(-seqlen_q // kernel.block_m) * rows,
        (out, dout, *(extra or (_NULL,)), delta),
        out_strides + dout_strides,
        (heads_q, seqlen_q, int(dlse is not None)),
    )
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    scalars = (heads_q, heads_k, seqlen_q, seqlen_k, scale)
    tensors = (q, k, v, dout, lse, delta)
    if want_dkdv:
        kernel = kernels["bwd_dkdv"]
        grid = -(-seqlen_k // kernel.block_n) * heads_k * batch
        kernel(grid, (*tensors, dk, dv), inputs + dkdv_strides, scalars)
    if want_dq:
        kernel = kernels["bwd_dq"]
        kernel(-(-seqlen_q // kernel.block_m) * rows, (*tensors, dq), inputs + dq_strides, scalars)
    return dq, dk, dv


def explain(q, k, v, causal: bool = False, target: str | None = None) -> str:
    """How each kernel of a call with these tensors is, or would be, found: one line a kernel."""
    checks.dense(q, k, v)
    if q.dtype not in checks.DTYPE_NAMES:
        raise TypeError(f"explain: q is {q.dtype}, for which the CPU's reference is the only implementation")
    if not (target or q.is_cuda):
        raise ValueError("explain: q is on the CPU, where no kernel is looked for; name a target, such as 'sm_90'")
    name = target or target_name(q.device.index)
    (q, q_strides), (k, k_strides), (v, v_strides) = _rows(q), _rows(k), _rows(v)
    strides = q_strides + k_strides + v_strides + _whole((*q.shape[:3], v.shape[3]))
    is_aligned = _is_aligned(q.element_size(), strides, q, k, v)
    lines = []
    for family in ("fwd", "bwd"):
        facts = (family, q.dtype, q.shape[3], v.shape[3], bool(causal), is_aligned)
        variant, wanted = plan(facts, name)
        lines.append(f"{variant} on {name}")
        for spec in wanted:
            decision = resolver().decision(spec.key)
            lines.append(f"  {decision.describe() if decision else spec.label() + ': not asked for yet'}")
    return "\n".join(lines)
