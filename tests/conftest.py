"""Which tests run here, and which are skipped and why."""

from __future__ import annotations

import os

import pytest

# Triton reads TRITON_INTERPRET when a kernel is decorated, so interpreted and compiled kernels need a process each.
if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
    collect_ignore = ["interpreted"]


def _no_gpu() -> str | None:
    """Why GPU tests cannot run here; None if they can."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} finds no GPU here (torch.cuda.is_available() is False)"


def pytest_collection_modifyitems(items):
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu() if on_gpu else None
    if reason:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
