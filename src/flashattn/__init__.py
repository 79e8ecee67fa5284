"""Exact attention for PyTorch: kernels in Triton, compiled on first call or ahead of time by the same code."""

from ._version import __version__
from .interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    supported_features,
)
from .launch import explain


def freeze() -> None:
    """From now on a call whose kernel would have to be compiled raises KernelMissing: for serving, after warm-up."""
    from .launch import resolver

    resolver().freeze()


__all__ = [
    "__version__",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "freeze",
    "supported_features",
]
