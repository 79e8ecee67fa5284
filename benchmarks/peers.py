"""The attention functions to compare with, each as `prepare(problem)`, which returns `attend(q, k, v)`.

What tells a library where sequences are, or which blocks a mask leaves, is made by `prepare` and not timed: all layers
of a training step share it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import one_line
from problems import Packed, Problem
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Prepare = Callable[[Problem | Packed], Attend]


def _first(result):
    return result[0] if isinstance(result, tuple) else result


def _load_flash(module: str) -> Prepare:
    """A library that has FlashAttention's two functions and takes what follows q, k and v by name."""
    library = importlib.import_module(module)

    def prepare(problem):
        options = {"causal": problem.causal}
        if problem.kind == "window":
            options["window_size"] = problem.window
        if problem.kind == "packed":
            function = library.flash_attn_varlen_func
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), problem.cu_seqlens())
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(problem.lengths))
        else:
            function = library.flash_attn_func
        return lambda q, k, v: _first(function(q, k, v, **options))

    return prepare


def sdpa(q, k, v, causal: bool):
    """PyTorch's attention of (batch, seqlen, heads, head_dim), its own choice of backend."""
    gqa = q.shape[2] != k.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa).transpose(1, 2)


def _load_sdpa(backend: SDPBackend | None = None) -> Prepare:
    if backend is None:
        return lambda problem: lambda q, k, v: sdpa(q, k, v, problem.causal)
    if not torch.cuda.is_available():
        raise ImportError("this backend of PyTorch needs a GPU")

    def prepare(problem):
        def attend(q, k, v):
            with sdpa_kernel(backend):
                return sdpa(q, k, v, problem.causal)

        return attend

    return prepare


def _load_fa2() -> Prepare:
    """FlashAttention-2 as PyTorch has it: behind SDPA, behind `varlen_attn`, and, with a window, as a bare op."""
    dense = _load_sdpa(SDPBackend.FLASH_ATTENTION)

    def prepare(problem):
        makers = {"dense": dense, "packed": _varlen_attn, "window": _fa2_window}
        return makers[problem.kind](problem)

    return prepare


def _varlen_attn(problem: Packed) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, longest = problem.cu_seqlens(), max(problem.lengths)
    if "is_causal" in inspect.signature(varlen_attn).parameters:
        options = {"is_causal": problem.causal}
    else:
        options = {"window_size": (-1, 0 if problem.causal else -1)}
    return lambda q, k, v: varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)


def _fa2_window(problem: Problem) -> Attend:
    left, right = problem.window
    options = {"window_size_left": left, "window_size_right": right}
    sizes = (None, None, problem.seqlen, problem.seqlen, 0.0, False, False)
    return lambda q, k, v: torch.ops.aten._flash_attention_forward(q, k, v, *sizes, **options)[0]


def visible(problem: Problem | Packed) -> Callable | None:
    """FlexAttention's mask function for the problem; None where every query sees every key."""
    if problem.kind == "window":
        left, right = problem.window
        return lambda batch, head, row, column: (column >= row - left) & (column <= row + right)
    if problem.kind == "packed":
        document = problem.document()
        if problem.causal:
            return lambda batch, head, row, column: (document[row] == document[column]) & (row >= column)
        return lambda batch, head, row, column: document[row] == document[column]
    return (lambda batch, head, row, column: row >= column) if problem.causal else None


def _load_flex() -> Prepare:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not torch.cuda.is_available():
        raise ImportError("measured on a GPU only")
    # A sweep compiles more variants than the eight behind which Dynamo gives up.
    torch._dynamo.config.recompile_limit = 256
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def prepare(problem):
        mask, seqlen = visible(problem), problem.shape[-3]
        blocks = mask and create_block_mask(mask, None, None, seqlen, seqlen, device="cuda")

        def attend(q, k, v):
            if problem.kind == "packed":
                q, k, v = q[None], k[None], v[None]
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            out = compiled(q, k, v, block_mask=blocks).transpose(1, 2)
            return out[0] if problem.kind == "packed" else out

        return attend

    return prepare


@dataclass(frozen=True)
class Peer:
    """`load` imports it and returns its `prepare`, or raises where it is not installed; `origin` is how to get it.

    kinds: of problems that it takes.
    """

    load: Callable[[], Prepare]
    origin: str
    has_backward: bool = True
    kinds: tuple[str, ...] = ("dense",)


_ALL = ("dense", "window", "packed")
PEERS = {
    "ours": Peer(functools.partial(_load_flash, "flashattn"), "this repository: pip install .", kinds=_ALL),
    "sdpa": Peer(_load_sdpa, "torch, default choice of backend"),
    "fa2": Peer(_load_fa2, "torch, FlashAttention-2 backend", kinds=_ALL),
    "cudnn": Peer(functools.partial(_load_sdpa, SDPBackend.CUDNN_ATTENTION), "torch, cuDNN backend"),
    "efficient": Peer(functools.partial(_load_sdpa, SDPBackend.EFFICIENT_ATTENTION), "torch, memory-efficient backend"),
    "fa3": Peer(
        functools.partial(_load_flash, "fa3_fwd_interface"),
        "FlashAttention-3: pip install fa3-fwd",
        has_backward=False,
        kinds=_ALL,
    ),
    "fa4": Peer(
        functools.partial(_load_flash, "flash_attn.cute"),
        "FlashAttention-4: pip install --pre flash-attn-4",
        kinds=_ALL,
    ),
    "flex": Peer(_load_flex, "torch, compiled FlexAttention", kinds=_ALL),
}
DEFAULT = ("ours", "fa2", "cudnn", "fa3", "fa4")
MASKED = ("ours", "fa2", "flex", "fa3", "fa4")
"""Those that know windows and packed sequences."""
_UNFIT = {"window": "has no sliding window", "packed": "takes no packed sequences"}


def load(
    names: Iterable[str], *, backward: bool = False, kind: str = "dense", peers=PEERS
) -> tuple[dict[str, Prepare], dict[str, str]]:
    """`prepare` of those called `names`, for problems of `kind`, and why the others are missing.

    Raises ValueError for a name that no peer has.
    """
    names = list(names)
    unknown = [name for name in names if name not in peers]
    if unknown:
        raise ValueError(f"contenders {unknown} are unknown; there are {', '.join(peers)}")
    found, missing = {}, {}
    for name in names:
        if kind not in peers[name].kinds:
            missing[name] = f"{_UNFIT[kind]} ({peers[name].origin})"
            continue
        if backward and not peers[name].has_backward:
            missing[name] = f"has no backward ({peers[name].origin})"
            continue
        try:
            found[name] = peers[name].load()
        except ImportError as error:
            missing[name] = f"not installed ({peers[name].origin}): {one_line(error)}"
        except Exception as error:
            missing[name] = f"does not load ({peers[name].origin}): {one_line(error)}"
    return found, missing
