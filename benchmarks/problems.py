"""The attention problems that benchmarks measure: sizes, random inputs, operation counts, and a float32 answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

TOKENS = 16384
HIDDEN = 2048
# Bytes of one float32 block of scores in the reference.
_SCORES_LIMIT = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Self-attention of tensors shaped (batch, seqlen, heads, head_dim)."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool
    dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"D{self.head_dim} seqlen {self.seqlen} {kind}, batch {self.batch}, {self.heads} heads, {self.dtype}"

    @property
    def forward_flops(self) -> float:
        """Of the two matrix products; a causal mask counts half."""
        return 4 * self.batch * self.heads * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)

    @property
    def backward_flops(self) -> float:
        """Five matrix products against the forward's two."""
        return 2.5 * self.forward_flops

    def as_dict(self) -> dict:
        return asdict(self)

    def tensors(self, count: int, *, seed: int = 0, requires_grad: bool = False, device: str = "cuda"):
        """`count` tensors of standard normal values."""
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (self.batch, self.seqlen, self.heads, self.head_dim)
        options = {"generator": generator, "device": device, "dtype": getattr(torch, self.dtype)}
        return tuple(torch.randn(shape, **options).requires_grad_(requires_grad) for _ in range(count))


def problems(head_dims, seqlens, causal=(False, True), dtype: str = "bfloat16") -> Iterator[Problem]:
    """Problems of TOKENS tokens a batch and a hidden size of HIDDEN, as far as they divide."""
    for head_dim in head_dims:
        for seqlen in seqlens:
            for is_causal in causal:
                batch, heads = max(1, TOKENS // seqlen), max(1, HIDDEN // head_dim)
                yield Problem(batch=batch, seqlen=seqlen, heads=heads, head_dim=head_dim, causal=is_causal, dtype=dtype)


def _weights(q, k, causal: bool):
    """Softmax weights [..., M, N] of float32 q, k [..., rows, head_dim]."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1)


def _groups(tensors):
    """Float32 slices [group, seqlen, head_dim] over the flattened (batch, heads), small enough for their scores."""
    flat = [tensor.detach().transpose(1, 2).flatten(0, 1) for tensor in tensors]
    total, seqlen, _ = flat[0].shape
    step = max(1, _SCORES_LIMIT // (4 * seqlen**2))
    for start in range(0, total, step):
        yield [tensor[start : start + step].float() for tensor in flat]


def _gather(parts, like):
    batch, _, heads, _ = like.shape
    return torch.cat(parts).unflatten(0, (batch, heads)).transpose(1, 2)


def reference_forward(q, k, v, causal: bool):
    """Float32 attention output of (batch, seqlen, heads, head_dim) tensors."""
    return _gather([_weights(q, k, causal) @ v for q, k, v in _groups((q, k, v))], q)


def reference_backward(q, k, v, grad, causal: bool):
    """Float32 gradients of q, k and v."""
    found = []
    for q_part, k_part, v_part, g_part in _groups((q, k, v, grad)):
        weights = _weights(q_part, k_part, causal)
        dv = weights.mT @ g_part
        dp = g_part @ v_part.mT
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) * q_part.shape[-1] ** -0.5
        found.append((ds @ k_part, ds.mT @ q_part, dv))
    return tuple(_gather(parts, q) for parts in zip(*found, strict=True))
