"""The attention problems that benchmarks measure: sizes, random inputs, operation counts, and a float32 answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby

import torch

TOKENS = 16384
HIDDEN = 2048
DEVICE = "cuda"
PATTERNS = ("constant", "uniform", "longtail", "bimodal", "tiny")
# Bytes of one float32 block of scores in the reference, and products of matrices in a batch.
_SCORES_LIMIT = 2 << 30
_BATCH_LIMIT = 1 << 15


class _Attention:
    """What both kinds of problem share. `kind` is "dense", "window" or "packed"."""

    __slots__ = ()

    @property
    def forward_flops(self) -> float:
        """Of the two matrix products, over the pairs of a query and a key that it sees."""
        return 4 * self.heads * self.head_dim * self.pairs

    @property
    def backward_flops(self) -> float:
        """Five matrix products against the forward's two."""
        return 2.5 * self.forward_flops

    def tensors(self, count: int, *, seed: int = 0, requires_grad: bool = False):
        """`count` tensors of standard normal values."""
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        options = {"generator": generator, "device": DEVICE, "dtype": getattr(torch, self.dtype)}
        return tuple(torch.randn(self.shape, **options).requires_grad_(requires_grad) for _ in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(_Attention):
    """Self-attention of tensors shaped (batch, seqlen, heads, head_dim).

    window: (left, right) keys, inclusive, that a query sees around its own; with causal, right is 0.
    """

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool
    window: tuple[int, int] | None = None
    dtype: str = "bfloat16"

    @property
    def kind(self) -> str:
        return "window" if self.window else "dense"

    @property
    def label(self) -> str:
        seen = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        return f"D{self.head_dim} seqlen {self.seqlen} {seen}, batch {self.batch}, {self.heads} heads, {self.dtype}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, self.seqlen, self.heads, self.head_dim

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, of one head; a causal mask without a window counts half of all."""
        if self.window is None:
            return self.batch * self.seqlen**2 / (2 if self.causal else 1)
        return self.batch * self.visible_blocks(1)

    def visible_blocks(self, block: int) -> int:
        """Squares of `block` queries and keys in which a query sees a key, of one head of one batch element."""
        left, right = self.window or (self.seqlen, 0 if self.causal else self.seqlen)
        last, found = self.seqlen - 1, 0
        for start in range(0, self.seqlen, block):
            end = min(start + block - 1, last)
            found += min(last, end + right) // block - max(0, start - left) // block + 1
        return found

    def as_dict(self) -> dict:
        return asdict(self)

    def reference_forward(self, q, k, v):
        """Float32 attention output."""
        return reference_forward(q, k, v, self.causal, self.window)

    def reference_backward(self, q, k, v, grad):
        """Float32 gradients of q, k and v."""
        return reference_backward(q, k, v, grad, self.causal, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(_Attention):
    """Self-attention of sequences behind each other in tensors shaped (tokens, heads, head_dim)."""

    pattern: str
    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    causal: bool
    dtype: str = "bfloat16"

    @property
    def kind(self) -> str:
        return "packed"

    @property
    def label(self) -> str:
        seen = "causal" if self.causal else "full"
        some = f"{len(self.lengths)} sequences of {min(self.lengths)} to {max(self.lengths)} tokens"
        return f"D{self.head_dim} {self.pattern} {seen}, {some}, {self.heads} heads, {self.dtype}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tokens, self.heads, self.head_dim

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key of its sequence, of one head; a causal mask counts half of all."""
        return sum(length**2 for length in self.lengths) / (2 if self.causal else 1)

    def cu_seqlens(self) -> torch.Tensor:
        """Where sequences start, int32 [sequences + 1]."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=DEVICE)

    def document(self) -> torch.Tensor:
        """The number of each token's sequence, int32 [tokens]."""
        numbers = torch.arange(len(self.lengths), dtype=torch.int32)
        return numbers.repeat_interleave(torch.tensor(self.lengths)).to(DEVICE)

    def dense(self) -> Problem | None:
        """The same attention in tensors of four dimensions, if all sequences have one length."""
        if len(set(self.lengths)) != 1:
            return None
        sizes = {"batch": len(self.lengths), "seqlen": self.lengths[0], "heads": self.heads}
        return Problem(**sizes, head_dim=self.head_dim, causal=self.causal, dtype=self.dtype)

    def as_dict(self) -> dict:
        """Its fields, with what the lengths come to in their place."""
        found = asdict(self)
        del found["lengths"]
        return {**found, "tokens": self.tokens, "sequences": len(self.lengths), "longest": max(self.lengths)}

    def reference_forward(self, q, k, v):
        """Float32 attention output, each sequence on its own."""
        return torch.cat([reference_forward(*parts, self.causal).flatten(0, 1) for parts in self._alike((q, k, v))])

    def reference_backward(self, q, k, v, grad):
        """Float32 gradients of q, k and v, each sequence on its own."""
        found = [reference_backward(*parts, self.causal) for parts in self._alike((q, k, v, grad))]
        return tuple(torch.cat([part.flatten(0, 1) for part in parts]) for parts in zip(*found, strict=True))

    def _alike(self, tensors) -> Iterator[list[torch.Tensor]]:
        """Views [count, length, heads, head_dim] of neighbours that are equally long."""
        start = 0
        for length, run in groupby(self.lengths):
            count = len(list(run))
            rows = slice(start, start + count * length)
            yield [tensor[rows].unflatten(0, (count, length)) for tensor in tensors]
            start = rows.stop


def problems(head_dims, seqlens, causal=(False, True), dtype: str = "bfloat16") -> Iterator[Problem]:
    """Problems of TOKENS tokens a batch and a hidden size of HIDDEN, as far as they divide."""
    for head_dim in head_dims:
        for seqlen in seqlens:
            for is_causal in causal:
                batch, heads = max(1, TOKENS // seqlen), max(1, HIDDEN // head_dim)
                yield Problem(batch=batch, seqlen=seqlen, heads=heads, head_dim=head_dim, causal=is_causal, dtype=dtype)


def lengths_of(pattern: str, tokens: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of sequences that come to `tokens`, the last one cut.

    constant: all are `longest`; uniform: from half of it on; longtail: one of eight is `longest`, the others are a
    sixteenth to an eighth of it; bimodal: `longest` or an eighth of it. tiny: 4096 of 16, whatever is asked for.
    """
    if pattern == "tiny":
        return (16,) * 4096
    drawn = random.Random(seed)
    choose = {
        "constant": lambda: longest,
        "uniform": lambda: drawn.randint(longest // 2, longest),
        "longtail": lambda: longest if drawn.random() < 1 / 8 else drawn.randint(longest // 16, longest // 8),
        "bimodal": lambda: drawn.choice((longest, longest // 8)),
    }[pattern]
    found, left = [], tokens
    while left:
        found.append(min(left, max(1, choose())))
        left -= found[-1]
    return tuple(found)


def _weights(q, k, causal: bool, window: tuple[int, int] | None = None):
    """Softmax weights [..., M, N] of float32 q, k [..., rows, head_dim]."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal or window:
        rows, columns = (torch.arange(n, device=q.device, dtype=torch.int32) for n in scores.shape[-2:])
        left, right = window or (len(columns), 0)
        ahead = columns - rows[:, None]
        scores.masked_fill_((ahead > (0 if causal else right)) | (ahead < -left), float("-inf"))
    return scores.softmax(-1)


def _groups(tensors):
    """Float32 slices [group, seqlen, head_dim] over the flattened (batch, heads), small enough for their scores."""
    flat = [tensor.detach().transpose(1, 2).flatten(0, 1) for tensor in tensors]
    total, seqlen, _ = flat[0].shape
    step = max(1, min(_BATCH_LIMIT, _SCORES_LIMIT // (4 * seqlen**2)))
    for start in range(0, total, step):
        yield [tensor[start : start + step].float() for tensor in flat]


def _gather(parts, like):
    batch, _, heads, _ = like.shape
    return torch.cat(parts).unflatten(0, (batch, heads)).transpose(1, 2)


def reference_forward(q, k, v, causal: bool, window: tuple[int, int] | None = None):
    """Float32 attention output of (batch, seqlen, heads, head_dim) tensors."""
    return _gather([_weights(q, k, causal, window) @ v for q, k, v in _groups((q, k, v))], q)


def reference_backward(q, k, v, grad, causal: bool, window: tuple[int, int] | None = None):
    """Float32 gradients of q, k and v."""
    found = []
    for q_part, k_part, v_part, g_part in _groups((q, k, v, grad)):
        weights = _weights(q_part, k_part, causal, window)
        dv = weights.mT @ g_part
        dp = g_part @ v_part.mT
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) * q_part.shape[-1] ** -0.5
        found.append((ds @ k_part, ds.mT @ q_part, dv))
    return tuple(_gather(parts, q) for parts in zip(*found, strict=True))
