"""TransformerEngine's layouts of q, k and v, each built in one buffer and viewed as our functions take them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from varlen_oracle import NAN, Rows, padded, strided

# The names of NVTE_QKV_Layout, without those of paged keys. 3 or 2: as many tensors lie side by side there.
LAYOUTS = (
    *("sb3hd", "sbh3d", "sbhd_sb2hd", "sbhd_sbh2d", "sbhd_sbhd_sbhd"),
    *("bs3hd", "bsh3d", "bshd_bs2hd", "bshd_bsh2d", "bshd_bshd_bshd"),
    *("t3hd", "th3d", "thd_t2hd", "thd_th2d", "thd_thd_thd"),
    *("sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_bshd_bshd", "thd_sbhd_sbhd", "bhsd_bhsd_bhsd"),
)
# What it has no name for: heads first on one side alone.
HEADS_FIRST = ("bhsd_bshd_bshd", "bhsd_sbhd_sbhd", "bshd_bhsd_bhsd", "sbhd_bhsd_bhsd", "thd_bhsd_bhsd")


@dataclass
class Built:
    """q, k, v: views of `buffer`, (batch, seqlen, heads, head_dim) or (total, heads, head_dim)."""

    buffer: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows_q: Rows
    rows_k: Rows


def build(layout: str, dtype=torch.float32, head_dim: int = 16, seed: int = 0, device="cpu") -> Built:
    """Random values in the rows of four sequences; NaN in padding, gaps and slack."""
    names = layout.split("_")
    lengths_q = [5, 9, 0, 20]
    lengths_k = lengths_q if len(names) == 1 else [7, 3, 6, 30]
    rows_q, rows_k = _rows(names[0], lengths_q), _rows(names[-1], lengths_k)
    heads_q = 4
    heads_k = heads_q if len(names) == 1 else 2
    shapes = []
    for name in names:
        rows, heads = (rows_q, heads_q) if name is names[0] else (rows_k, heads_k)
        sizes = {"h": heads, "d": head_dim, "2": 2, "3": 3, "t": rows.shape[-1], "s": rows.shape[-1], "b": 4}
        shapes.append([sizes[letter] for letter in name])
    buffer = torch.full((sum(map(prod, shapes)),), NAN, dtype=dtype, device=device)
    found = []
    for name, part, shape in zip(names, buffer.split([prod(shape) for shape in shapes]), shapes, strict=True):
        found += _views(name, part.view(shape))
    generator = torch.Generator().manual_seed(seed)
    for tensor, rows in zip(found, (rows_q, rows_k, rows_k), strict=True):
        for at in rows.index:
            tensor[at] = torch.randn(tensor[at].shape, generator=generator).to(device, dtype)
    return Built(buffer, *found, rows_q, rows_k)


def views(layout: str, buffer, like: Built) -> list:
    """The three views of another buffer of the same layout."""
    return [buffer.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (like.q, like.k, like.v)]


def _rows(name: str, lengths) -> Rows:
    if "t" in name:
        return strided(lengths, [length + 1 + i % 2 for i, length in enumerate(lengths)], slack=3)
    return padded(lengths)


def _views(name: str, tensor) -> list:
    """The tensors that lie side by side in this one, their dimensions in our order."""
    digit = next((letter for letter in name if letter.isdigit()), None)
    parts = [tensor] if digit is None else tensor.unbind(name.index(digit))
    letters = name if digit is None else name.replace(digit, "")
    order = [letters.index(letter) for letter in ("thd" if "t" in letters else "bshd")]
    return [part.permute(order) for part in parts]
