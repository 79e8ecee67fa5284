"""What a call's tensors are to a kernel: addresses, strides, masks, and where sequences start and end."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import NamedTuple

import torch


class _Null:
    """The pointer of a feature that is off."""

    @staticmethod
    def data_ptr() -> int:
        return 0


NULL = _Null()


def rows(tensor):
    """(tensor, its strides (batch, seqlen, head)); a tensor whose last dimension is strided is copied."""
    strides = tensor.stride()
    if strides[-1] != 1 and tensor.shape[-1] != 1:
        tensor = tensor.contiguous()
        strides = tensor.stride()
    # Packed rows have no batch dimension.
    return tensor, strides[:3] if len(strides) == 4 else (0, *strides[:2])


def whole(shape) -> tuple:
    """The strides (batch, seqlen, head) of a contiguous tensor."""
    seqlen, heads, dim = shape[-3:]
    return seqlen * heads * dim, heads * dim, dim


def addresses(tensors: tuple) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def is_aligned(itemsize: int, strides: tuple, tensors: tuple = ()) -> bool:
    """Whether all strides and addresses are multiples of 16 bytes."""
    return not (reduce(or_, strides) * itemsize | reduce(or_, addresses(tensors), 0)) & 15


def follows(values: tuple):
    """Addresses -> arguments: the addresses and then these."""
    return lambda *given: (*given, *values)


OPEN = 2**30 - 1
_FULL, _CAUSAL = ("full", OPEN, OPEN), ("causal", OPEN, 0)


def mask_of(causal: bool, window_left: int = -1, window_right: int = -1) -> tuple[str, int, int]:
    """(kind of mask, keys seen before the diagonal, keys seen behind it)."""
    if window_left < 0:
        if causal or window_right < 0:
            return _CAUSAL if causal else _FULL
        return "causal", OPEN, min(window_right, OPEN)
    right = 0 if causal else window_right if window_right >= 0 else OPEN
    return "window", min(window_left, OPEN), min(right, OPEN)


class _Sequences(NamedTuple):
    """Where the sequences of q, or of k and v, are: what flash_common.py calls a kind, and its tables."""

    batch: int
    seqlen: int
    kind: int = 0
    starts: object = NULL
    lengths: object = NULL

    def tiles(self, block: int) -> int:
        """How many a head has, at most."""
        if self.kind & 1:
            return self.seqlen // block + self.batch + 1
        return -(-self.seqlen // block) * self.batch


def _table(tensor):
    return tensor.to(torch.int32).contiguous()


def _sequences(tensor, cu_seqlens, seqused, padded) -> _Sequences:
    batch, seqlen = tensor.shape[0], tensor.shape[-3]
    kind, starts, lengths = 0, NULL, NULL
    if cu_seqlens is not None:
        batch, kind, starts = cu_seqlens.shape[0] - 1, 1, _table(cu_seqlens if padded is None else padded)
    if seqused is not None:
        kind, lengths = kind | 2, _table(seqused)
    elif padded is not None:
        kind, lengths = kind | 6, _table(cu_seqlens)
    return _Sequences(batch, seqlen, kind, starts, lengths)


def located(q, k, tables: tuple) -> tuple:
    """(sequences of q, sequences of k, their tables as kernels take them)."""
    if not tables:
        in_q, in_k = _Sequences(q.shape[0], q.shape[1]), _Sequences(k.shape[0], k.shape[1])
        return in_q, in_k, (NULL,) * 4
    cu_q, cu_k, used_q, used_k, padded_q, padded_k = tables
    in_q, in_k = _sequences(q, cu_q, used_q, padded_q), _sequences(k, cu_k, used_k, padded_k)
    return in_q, in_k, (in_q.starts, in_q.lengths, in_k.starts, in_k.lengths)
