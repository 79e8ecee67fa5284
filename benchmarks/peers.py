"""The attention functions to compare with, each as `attend(q, k, v, causal)` on (batch, seqlen, heads, head_dim)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import one_line
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


def _first(result):
    return result[0] if isinstance(result, tuple) else result


def _load_ours() -> Attend:
    from flashattn import flash_attn_func

    return lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal)


def sdpa(q, k, v, causal: bool):
    """PyTorch's attention, its own choice of backend."""
    gqa = q.shape[2] != k.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa).transpose(1, 2)


def _load_sdpa(backend: SDPBackend | None = None) -> Attend:
    if backend is None:
        return sdpa
    if not torch.cuda.is_available():
        raise ImportError("this backend of PyTorch needs a GPU")

    def attend(q, k, v, causal):
        with sdpa_kernel(backend):
            return sdpa(q, k, v, causal)

    return attend


def _load_fa3() -> Attend:
    from fa3_fwd_interface import flash_attn_func

    return lambda q, k, v, causal: _first(flash_attn_func(q, k, v, causal=causal))


def _load_fa4() -> Attend:
    from flash_attn.cute import flash_attn_func

    return lambda q, k, v, causal: _first(flash_attn_func(q, k, v, causal=causal))


def _load_flex() -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not torch.cuda.is_available():
        raise ImportError("measured on a GPU only")
    compiled = torch.compile(flex_attention, dynamic=False)

    @functools.lru_cache(maxsize=4)
    def causal_mask(rows: int, columns: int):
        def visible(batch, head, row, column):
            return row + columns - rows >= column

        return create_block_mask(visible, None, None, rows, columns, device="cuda")

    def attend(q, k, v, causal):
        mask, gqa = causal_mask(q.shape[1], k.shape[1]) if causal else None, q.shape[2] != k.shape[2]
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=gqa).transpose(1, 2)

    return attend


@dataclass(frozen=True)
class Peer:
    """`load` imports it and returns its function, or raises where it is not installed; `origin` is how to get it."""

    load: Callable[[], Attend]
    origin: str
    has_backward: bool = True


PEERS = {
    "ours": Peer(_load_ours, "this repository: pip install ."),
    "sdpa": Peer(_load_sdpa, "torch, default choice of backend"),
    "fa2": Peer(functools.partial(_load_sdpa, SDPBackend.FLASH_ATTENTION), "torch, FlashAttention-2 backend"),
    "cudnn": Peer(functools.partial(_load_sdpa, SDPBackend.CUDNN_ATTENTION), "torch, cuDNN backend"),
    "efficient": Peer(functools.partial(_load_sdpa, SDPBackend.EFFICIENT_ATTENTION), "torch, memory-efficient backend"),
    "fa3": Peer(_load_fa3, "FlashAttention-3: pip install fa3-fwd", has_backward=False),
    "fa4": Peer(_load_fa4, "FlashAttention-4: pip install --pre flash-attn-4"),
    "flex": Peer(_load_flex, "torch, compiled FlexAttention"),
}
DEFAULT = ("ours", "fa2", "cudnn", "fa3", "fa4")


def load(names: Iterable[str], *, backward: bool = False, peers=PEERS) -> tuple[dict[str, Attend], dict[str, str]]:
    """The functions called `names`, and why those that are not here are missing.

    Raises ValueError for a name that no peer has.
    """
    names = list(names)
    unknown = [name for name in names if name not in peers]
    if unknown:
        raise ValueError(f"contenders {unknown} are unknown; there are {', '.join(peers)}")
    found, missing = {}, {}
    for name in names:
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
