"""Allocate outputs, choose the grid, pack the arguments, launch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import checks, layout, settings, specs
from ._version import __version__
from .jit.targets import SUPPORTED, target_of
from .variants import BwdVariant, FwdVariant

if TYPE_CHECKING:
    from .jit.resolve import Resolver

_FOLDER = Path(__file__).parent
_plans: dict[tuple, dict] = {}
# What `again` repeats. Callers with ever new lengths start it afresh now and then.
_calls: dict[tuple, tuple] = {}
_MOST_CALLS = 4096
# (shape, strides, dtype) -> memory on the current device, past the dispatcher: what Inductor's code allocates with.
_allocate = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_DEFAULTS = (None, False, -1, -1, False)
_targets: dict[int, str] = {}
_resolver: Resolver | None = None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def debugging() -> bool:
    """Whether checks may wait for the GPU."""
    return settings.get().debug


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
    _calls.clear()
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

    def __init__(self, spec, artifact, index: int):
        from .jit import driver

        self.launch = driver.load(artifact, index).launch
        self.spec, self.constants = spec, dict(spec.constants)
        self.block_m, self.block_n = self.constants["BLOCK_M"], self.constants.get("BLOCK_N", 0)
        self.index = index
        self.waits = settings.get().debug

    def __call__(self, grid: int, tensors: tuple, strides: tuple, scalars: tuple) -> None:
        self.start(grid, (*layout.addresses(tensors), *strides, *scalars))

    def start(self, grid: int, arguments: tuple) -> None:
        self.launch(grid, torch._C._cuda_getCurrentRawStream(self.index), arguments)
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
        given = [null if tensor is layout.NULL else tensor for tensor in tensors]
        grouped = [strides[i : i + 3] for i in range(0, len(strides), 3)]
        self.kernel[(grid,)](*given, *grouped, *scalars, **self.constants)


def plan(facts: tuple, target: str) -> tuple:
    """The specs of a call: (variant, specs).

    facts: (family, dtype, head_dim, head_dim_v, mask, aligned), and of a forward whether it has tables.
    """
    family, dtype, head_dim, head_dim_v, mask, aligned, *more = facts
    variant = (FwdVariant if family == "fwd" else BwdVariant)(
        dtype=checks.DTYPE_NAMES[dtype],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask=mask,
        is_aligned=aligned,
        allow_tf32=dtype == torch.float32 and settings.get().allow_tf32,
        **({"has_tables": more[0]} if family == "fwd" else {}),
    )
    return variant, specs.specs_of(variant, target)


def _kernels(facts: tuple, device: torch.device) -> dict:
    key = (facts, device)
    found = _plans.get(key)
    if found is None:
        if device.type == "cpu":
            _, wanted = plan(facts, "sm_80")
            found = {spec.kernel: _Interpreted(spec) for spec in wanted}
        else:
            _, wanted = plan(facts, target_name(device.index))
            made = zip(wanted, resolver().resolve_all(wanted), strict=True)
            found = {spec.kernel: _Compiled(spec, artifact, device.index) for spec, artifact in made}
        _plans[key] = found
    return found


def on_its_device(function):
    """The function, run with the device of its first tensor current."""

    def run(first, *args):
        index = first.get_device()
        if index < 0 or index == torch._C._cuda_getDevice():
            return function(first, *args)
        with torch.cuda.device(index):
            return function(first, *args)

    return run


def _key(q, k, v, want_lse, scalars: tuple) -> tuple:
    """All that a dense forward depends on, but for addresses."""
    return (
        *(q.shape, q.stride(), q.dtype, q.device),
        *(k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device),
        *(want_lse, *scalars),
    )


def again(q, k, v, want_lse, *scalars):
    """What `forward` returns, if it has had the same call with other data; else None. Saves half of the host's time.

    Such arguments have passed the checks, and differ in their addresses at most, which is looked at.
    """
    found = None if len(scalars) > 5 else _calls.get(_key(q, k, v, want_lse, scalars))
    if found is None:
        return None
    launch, waits, index, grid, bits, shape, strides, lse_shape, lse_strides, arguments = found
    if index < 0 or _allocate is None:
        out = q.new_empty(shape)
    elif index == torch._C._cuda_getDevice():
        out = _allocate(shape, strides, q.dtype)
    else:
        return None
    q_ptr, k_ptr, v_ptr, out_ptr = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    if (q_ptr | k_ptr | v_ptr | out_ptr) & bits:
        return None
    lse, lse_ptr = None, 0
    if want_lse:
        if index < 0 or _allocate is None:
            lse = q.new_empty(lse_shape, dtype=torch.float32)
        else:
            lse = _allocate(lse_shape, lse_strides, torch.float32)
        lse_ptr = lse.data_ptr()
    stream = torch._C._cuda_getCurrentRawStream(index)
    launch(grid, stream, arguments(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr))
    if waits:
        torch.cuda.synchronize(index)
    return out, lse


def _remember(call: tuple, kernel, grid: int, out, lse, arguments, is_aligned: bool, strides: tuple) -> None:
    """Let `again` repeat a launch, unless it was of a kernel that other addresses would not get."""
    q, k, v, want_lse, *scalars = call
    if is_aligned == layout.is_aligned(q.element_size(), strides):
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        about = (kernel.launch, kernel.waits, q.get_device(), grid, 15 if is_aligned else 0)
        about_lse = (tuple(lse.shape), lse.stride()) if want_lse else (None, None)
        key = _key(q, k, v, want_lse, tuple(scalars))
        _calls[key] = (*about, tuple(out.shape), out.stride(), *about_lse, arguments)


@on_its_device
def forward(q, k, v, want_lse, *call):
    """(out, lse); lse is None unless wanted. The arguments have been checked.

    call: softmax_scale, causal, window_left, window_right, top_left, and either no tables or cu_seqlens_q,
    cu_seqlens_k, seqused_q, seqused_k, cu_seqlens_q_padded, cu_seqlens_k_padded.
    """
    softmax_scale, causal, window_left, window_right, top_left = (*call, *_DEFAULTS[len(call) :])[:5]
    given, tables = (q, k, v, want_lse, *call), call[5:]
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    (q, q_strides), (k, k_strides), (v, v_strides) = layout.rows(q), layout.rows(k), layout.rows(v)
    shape = (*q.shape[:-1], head_dim_v)
    out = q.new_empty(shape)
    lse = q.new_empty(checks.lse_shape(q), dtype=torch.float32) if want_lse else None
    if 0 in shape[:-2]:
        return out, lse
    if 0 in k.shape[:-2]:
        return out.zero_(), lse if lse is None else lse.fill_(float("-inf"))
    in_q, in_k, located = layout.located(q, k, tables)
    strides = q_strides + k_strides + v_strides + layout.whole(shape)
    tensors = (q, k, v, out, lse if want_lse else layout.NULL)
    is_aligned = layout.is_aligned(q.element_size(), strides, tensors)
    mask, left, right = layout.mask_of(causal, window_left, window_right)
    facts = ("fwd", q.dtype, head_dim, head_dim_v, mask, is_aligned, bool(tables))
    (kernel,) = _kernels(facts, q.device).values()
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    sizes = (in_q.batch, heads_q, heads_k, in_q.seqlen, in_k.seqlen, in_q.kind, in_k.kind)
    scalars = (*sizes, scale, left, right, int(top_left), int(want_lse))
    grid = in_q.tiles(kernel.block_m) * heads_q
    if isinstance(kernel, _Interpreted):
        kernel(grid, tensors + located, strides, scalars)
        return out, lse
    if kernel.spec.kernel == "hopper_attn_fwd":
        # It brings the driver, which importing the package does not.
        from . import hopper

        diagonal = right + (0 if top_left else in_k.seqlen - in_q.seqlen)
        about = (checks.DTYPE_NAMES[q.dtype], diagonal, scale, want_lse)
        grid, arguments = hopper.prepare(kernel.constants, kernel.index, tensors[:4], *about)
    else:
        arguments = layout.follows((*layout.addresses(located), *strides, *scalars))
    kernel.start(grid, arguments(*layout.addresses(tensors)))
    if not tables and q is given[0] and k is given[1] and v is given[2]:
        _remember(given, kernel, grid, out, lse, arguments, is_aligned, strides)
    return out, lse


@on_its_device
def backward(
    dout, q, k, v, out, lse, dlse, want_dq, want_dkdv,
    softmax_scale=None, causal=False, window_left=-1, window_right=-1, top_left=False, *tables,
):  # fmt: skip
    """(dq, dk, dv); one that is not wanted is empty. The arguments have been checked."""
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    dq = q.new_empty(q.shape if want_dq else 0)
    dk = q.new_empty(k.shape if want_dkdv else 0)
    dv = q.new_empty(v.shape if want_dkdv else 0)
    if 0 in (*q.shape[:-2], *k.shape[:-2]):
        return dq.zero_(), dk.zero_(), dv.zero_()
    (q, q_strides), (k, k_strides), (v, v_strides) = layout.rows(q), layout.rows(k), layout.rows(v)
    (dout, dout_strides), (out, out_strides) = layout.rows(dout), layout.rows(out)
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    dlse = layout.NULL if dlse is None else dlse.contiguous()
    inputs = q_strides + k_strides + v_strides + dout_strides
    dq_strides, dkdv_strides = layout.whole(q.shape), layout.whole(k.shape) + layout.whole(v.shape)
    strides = inputs + out_strides + dq_strides + dkdv_strides
    is_aligned = layout.is_aligned(q.element_size(), strides, (q, k, v, dout, out, lse, delta, dlse, dq, dk, dv))
    mask, left, right = layout.mask_of(causal, window_left, window_right)
    kernels = _kernels(("bwd", q.dtype, head_dim, head_dim_v, mask, is_aligned), q.device)

    # Every row has a delta, whichever sequence it is of: packed rows are one batch element here.
    seqlen, total = q.shape[-3], q.shape[:-1].numel()
    kernel = kernels["bwd_preprocess"]
    kernel(
        -(-seqlen // kernel.block_m) * (total // seqlen),
        (out, dout, dlse, delta),
        out_strides + dout_strides,
        (heads_q, seqlen, int(dlse is not layout.NULL)),
    )
    in_q, in_k, located = layout.located(q, k, tables)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    sizes = (in_q.batch, heads_q, heads_k, in_q.seqlen, in_k.seqlen, in_q.kind, in_k.kind)
    scalars = (*sizes, scale, left, right, int(top_left))
    tensors = (q, k, v, dout, lse, delta)
    if want_dkdv:
        kernel = kernels["bwd_dkdv"]
        grid = in_k.tiles(kernel.block_n) * heads_k
        kernel(grid, (*tensors, dk, dv, *located), inputs + dkdv_strides, scalars)
    if want_dq:
        kernel = kernels["bwd_dq"]
        grid = in_q.tiles(kernel.block_m) * heads_q
        kernel(grid, (*tensors, dq, *located), inputs + dq_strides, scalars)
    return dq, dk, dv


def explain(q, k, v, causal: bool = False, target: str | None = None, window_size: tuple = (-1, -1)) -> str:
    """How each kernel of a call with these tensors is, or would be, found: one line a kernel."""
    left, right = checks.window(window_size)
    checks.inputs(q, k, v, None, bool(causal), left, right)
    if q.dtype not in checks.DTYPE_NAMES:
        raise TypeError(f"explain: q is {q.dtype}, for which the CPU's reference is the only implementation")
    if not (target or q.is_cuda):
        raise ValueError("explain: q is on the CPU, where no kernel is looked for; name a target, such as 'sm_90'")
    name = target or target_name(q.device.index)
    (q, q_strides), (k, k_strides), (v, v_strides) = layout.rows(q), layout.rows(k), layout.rows(v)
    strides = q_strides + k_strides + v_strides + layout.whole((*q.shape[:-1], v.shape[-1]))
    is_aligned = layout.is_aligned(q.element_size(), strides, (q, k, v))
    mask, _, _ = layout.mask_of(bool(causal), left, right)
    lines = []
    for family in ("fwd", "bwd"):
        facts = (family, q.dtype, q.shape[-1], v.shape[-1], mask, is_aligned)
        variant, wanted = plan((*facts, False) if family == "fwd" else facts, name)
        why = specs.portable_because(variant, name) if family == "fwd" and name == "sm_90" else None
        lines.append(f"{variant} on {name}" + (f" (portable: {why})" if why else ""))
        for spec in wanted:
            decision = resolver().decision(spec.key)
            lines.append(f"  {decision.describe() if decision else spec.label() + ': not asked for yet'}")
    return "\n".join(lines)
