"""Variants: what a call decides at compile time, as plain values. One class a kernel family."""

from __future__ import annotations

from dataclasses import dataclass, fields

DTYPES = ("fp16", "bf16", "fp32")
MASKS = ("full", "causal", "window")
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """mask: the bounds that a call may set: none, how far a query sees ahead, or how far it sees back too."""

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    is_aligned: bool
    allow_tf32: bool

    def __post_init__(self):
        kinds = {"str": str, "int": int, "bool": bool}
        for field in fields(self):
            value = getattr(self, field.name)
            # A tensor or a numpy scalar here would make every call a miss.
            if type(value) is not kinds[field.type]:
                raise TypeError(f"{field.name} must be {field.type}, got {type(value).__name__}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.mask not in MASKS:
            raise ValueError(f"mask must be one of {', '.join(MASKS)}, got {self.mask!r}")
        for name in ("head_dim", "head_dim_v"):
            if not 1 <= getattr(self, name) <= MAX_HEAD_DIM:
                raise ValueError(f"{name} must be 1 to {MAX_HEAD_DIM}, got {getattr(self, name)}")
        if self.allow_tf32 and self.dtype != "fp32":
            raise ValueError(f"allow_tf32 is for fp32 alone, got {self.dtype}")

    @property
    def block_d(self) -> int:
        return padded(self.head_dim)

    @property
    def block_dv(self) -> int:
        return padded(self.head_dim_v)

    def _name(self, family: str) -> str:
        dims = f"d{self.head_dim}" + (f" dv{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        words = [family, self.dtype, dims, self.mask, "aligned" if self.is_aligned else "generic"]
        return " ".join(words + ["tf32"] * self.allow_tf32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FwdVariant(_Variant):
    """Compile-time facts of the forward kernel.

    has_tables: sequences are packed, padded or gapped; not all kernels take those.
    """

    has_tables: bool

    def __str__(self) -> str:
        return self._name("fwd") + " with tables" * self.has_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class BwdVariant(_Variant):
    """Compile-time facts of the backward kernels: what their forward had."""

    def __str__(self) -> str:
        return self._name("bwd")


def padded(head_dim: int) -> int:
    """The power of two that a tile holds, at least the 16 that a matrix instruction takes."""
    return max(16, 1 << (head_dim - 1).bit_length())
