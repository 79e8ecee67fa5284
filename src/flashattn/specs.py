"""(variant, tile, target) -> KernelSpec: the only module that knows both the kernels and the compiler's side."""

from __future__ import annotations

from dataclasses import asdict

from . import declared, hopper_boxes, settings
from .jit.spec import KernelSpec
from .tiles import Tile, tile_for
from .variants import MASKS, BwdVariant, FwdVariant, _Variant

_STRIDES = ("i64", "i64", "i64")
_ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}
_FORWARD = "flashattn.kernels.flash_fwd"
_BACKWARD = "flashattn.kernels.flash_bwd"

_PRODUCTS = (
    *("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "kind_q", "kind_k", "softmax_scale"),
    *("window_left", "window_right", "top_left"),
)
# Where sequences start and how long they are; of these no alignment is promised.
_TABLES = ("starts_q", "lengths_q", "starts_k", "lengths_k")

# kernel: (module, tensors, scalars, are products fused with sums). The tensors of `_FP32` and the tables are contiguous
# and have no strides; the others have three each, in the same order.
_KERNELS = {
    # The scores' maximum and the exponents must round alike, or huge scores overflow: no fused multiply-add.
    "attn_fwd": (_FORWARD, ("q", "k", "v", "out", "lse", *_TABLES), (*_PRODUCTS, "write_lse"), False),
    "bwd_preprocess": (_BACKWARD, ("out", "dout", "dlse", "delta"), ("heads_q", "seqlen_q", "add_dlse"), True),
    "bwd_dkdv": (_BACKWARD, ("q", "k", "v", "dout", "lse", "delta", "dk", "dv", *_TABLES), _PRODUCTS, True),
    "bwd_dq": (_BACKWARD, ("q", "k", "v", "dout", "lse", "delta", "dq", *_TABLES), _PRODUCTS, True),
}
_FP32 = ("lse", "dlse", "delta")

_HOPPER = "flashattn.kernels.hopper_fwd"
_HOPPER_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
_HOPPER_SCALARS = (
    *("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "diagonal", "softmax_scale", "write_lse", "section"),
)


def portable_because(variant: FwdVariant, target: str) -> str | None:
    """Why `attn_fwd` serves a forward; None where `hopper_attn_fwd` does."""
    dims = ", ".join(str(d) if d == dv else f"{d}/{dv}" for d, dv in _HOPPER_DIMS)
    rules = (
        (target == "sm_90", "the Hopper kernel is for sm_90"),
        (variant.dtype != "fp32", "the Hopper kernel takes bf16 and fp16"),
        ((variant.head_dim, variant.head_dim_v) in _HOPPER_DIMS, f"the Hopper kernel takes head_dim {dims}"),
        (variant.mask != "window", "the Hopper kernel has no bound on how far a query sees back"),
        (variant.is_aligned, "the Hopper kernel's copies need pointers and strides that are multiples of 16 bytes"),
        (not variant.has_tables, "the Hopper kernel takes no packed or padded sequences"),
    )
    return next((reason for holds, reason in rules if not holds), None)


def kernels_of(variant: _Variant, target: str) -> tuple[str, ...]:
    """The kernels that a call of this variant launches, in order."""
    if isinstance(variant, FwdVariant):
        return ("attn_fwd",) if portable_because(variant, target) else ("hopper_attn_fwd",)
    if isinstance(variant, BwdVariant):
        return ("bwd_preprocess", "bwd_dkdv", "bwd_dq")
    raise TypeError(f"no kernel serves {type(variant).__name__}")


def constants_of(kernel: str, variant: _Variant, tile: Tile) -> dict[str, bool | int]:
    """The constexprs of `kernel`."""
    if kernel == "bwd_preprocess":
        return {"HEAD_DIM_V": variant.head_dim_v, "BLOCK_M": tile.block_m, "BLOCK_DV": variant.block_dv}
    return {
        "HEAD_DIM": variant.head_dim,
        "HEAD_DIM_V": variant.head_dim_v,
        "MASK": MASKS.index(variant.mask),
        "ALLOW_TF32": variant.allow_tf32,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": variant.block_d,
        "BLOCK_DV": variant.block_dv,
    }


def hopper_spec(variant: FwdVariant, target: str) -> KernelSpec:
    """The spec of the Hopper forward: its tensors are tuples of tensor maps."""
    tile = tile_for("hopper_attn_fwd", variant, target, settings.get().tiles)
    constants = {
        "HEAD_DIM": variant.head_dim,
        "HEAD_DIM_V": variant.head_dim_v,
        "IS_CAUSAL": variant.mask == "causal",
        **{name.upper(): value for name, value in asdict(tile).items()},
    }
    tiles = hopper_boxes.tiles_of(variant.head_dim, variant.head_dim_v, tile.block_n, tile.o_width)
    signature = [
        (f"{name}_descs", tuple(hopper_boxes.descriptor_type(variant.dtype, *kind) for kind in kinds))
        for name, kinds in tiles.items()
    ]
    signature += [("lse_ptr", "*fp32"), ("counter_ptr", "*i32")]
    signature += [(name, "fp32" if name == "softmax_scale" else "i32") for name in _HOPPER_SCALARS]
    signature += [(name, "constexpr") for name in constants]
    return KernelSpec(
        module=_HOPPER,
        kernel="hopper_attn_fwd",
        signature=tuple(signature),
        constants=tuple(constants.items()),
        alignment=(("lse_ptr", 16), ("counter_ptr", 16)),
        # The kernel says itself where products and sums are fused.
        options=(("enable_fp_fusion", False), ("num_warps", 4)),
        target=target,
    )


def spec_of(kernel: str, variant: _Variant, target: str) -> KernelSpec:
    """The spec of one kernel of `variant`."""
    if kernel == "hopper_attn_fwd":
        return hopper_spec(variant, target)
    module, tensors, scalars, fused = _KERNELS[kernel]
    strided = [name for name in tensors if name not in (*_FP32, *_TABLES)]
    kinds = {**dict.fromkeys(_FP32, "*fp32"), **dict.fromkeys(_TABLES, "*i32")}
    tile = tile_for(kernel, variant, target, settings.get().tiles)
    constants = constants_of(kernel, variant, tile)
    signature = [(f"{name}_ptr", kinds.get(name, f"*{variant.dtype}")) for name in tensors]
    signature += [(f"{name}_strides", _STRIDES) for name in strided]
    signature += [(name, "fp32" if name == "softmax_scale" else "i32") for name in scalars]
    signature += [(name, "constexpr") for name in constants]
    alignment = []
    if variant.is_aligned:
        # Every one of these pointers is looked at before a call is called aligned.
        alignment = [(f"{name}_ptr", 16) for name in tensors if name not in _TABLES]
        step = 16 // _ITEMSIZE[variant.dtype]
        alignment += [(f"{name}_strides.{i}", step) for name in strided for i in range(3)]
    options = {"enable_fp_fusion": fused, "num_stages": tile.num_stages, "num_warps": tile.num_warps}
    if tile.max_registers:
        options["maxnreg"] = tile.max_registers
    return KernelSpec(
        module=module,
        kernel=kernel,
        signature=tuple(signature),
        constants=tuple(constants.items()),
        alignment=tuple(alignment),
        options=tuple(options.items()),
        target=target,
    )


def specs_of(variant: _Variant, target: str) -> tuple[KernelSpec, ...]:
    """The spec of each kernel of `variant`, in the order of launch."""
    return tuple(spec_of(kernel, variant, target) for kernel in kernels_of(variant, target))


def declared_specs(profile: str, target: str) -> dict[str, KernelSpec]:
    """Spec key -> spec of all that `profile` declares for `target`, in the order of declaration."""
    found = (spec for variant in declared.declared(profile, target) for spec in specs_of(variant, target))
    return {spec.key: spec for spec in found}
