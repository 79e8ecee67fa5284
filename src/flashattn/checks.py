"""Arguments -> facts, or one clear error; the only place that raises for users' mistakes."""

from __future__ import annotations

import operator

import torch

from .variants import MAX_HEAD_DIM

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_ACCEPTED = "float16, bfloat16 or float32 (float64 on the CPU)"
# What is multiplied by log2(e) in float32.
MAX_SCALE = 2.0**127
_LAYOUT = "(batch, seqlen, heads, head_dim)"
_PACKED = "(total, heads, head_dim)"
# Where sequences are, as the ops take it.
TABLES = (
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"),
    *("cu_seqlens_q_padded", "cu_seqlens_k_padded"),
)
# Of those, one side's: (name before the side, what follows it).
_PARTS = (("cu_seqlens", ""), ("cu_seqlens", "_padded"), ("seqused", ""))


def inputs(
    q, k, v, softmax_scale=None, causal=False, window_left=-1, window_right=-1, top_left=False, *tables
) -> None:  # fmt: skip
    """Raise unless these are what attention takes; reads no data, so traced tensors may be given.

    tables: none, or one tensor or None for each name in TABLES.
    """
    dtype, device = q.dtype, q.device
    if q.dim() == k.dim() == v.dim() == 4 and dtype in DTYPE_NAMES and dtype == k.dtype == v.dtype and not tables:
        batch, _, heads_q, head_dim = q.shape
        batch_k, seqlen_k, heads_k, head_dim_k = k.shape
        batch_v, seqlen_v, heads_v, head_dim_v = v.shape
        if (
            batch == batch_k == batch_v
            and seqlen_k == seqlen_v
            and 0 < heads_k == heads_v
            and heads_q > 0 == heads_q % heads_k
            and 0 < head_dim == head_dim_k <= MAX_HEAD_DIM
            and 0 < head_dim_v <= MAX_HEAD_DIM
            and device == k.device == v.device
            and (softmax_scale is None or -MAX_SCALE < softmax_scale < MAX_SCALE)
            and window_left >= -1 <= window_right
        ):
            return
    _explain(q, k, v, softmax_scale, window_left, window_right, tables or (None,) * len(TABLES))


def _explain(q, k, v, softmax_scale, window_left, window_right, tables) -> None:
    """Raise for the first thing that is wrong; float64 on the CPU is right, and so are packed tensors."""
    packed_q, packed_k = (cu is not None for cu in tables[:2])
    for name, tensor, packed in (("q", q, packed_q), ("k", k, packed_k), ("v", v, packed_k)):
        expected = _PACKED if packed else _LAYOUT
        if tensor.dim() != 4 - packed:
            cu = f"cu_seqlens_{'q' if name == 'q' else 'k'}"
            hint = f"with {cu}" if packed else f"without {cu}"
            raise ValueError(
                f"attention: {name} has {tensor.dim()} dimensions, expected {4 - packed} {hint}, {expected}"
            )
        if tensor.dtype != q.dtype:
            raise TypeError(f"attention: {name} is {tensor.dtype} but q is {q.dtype}; all three must have one dtype")
        if tensor.device != q.device:
            raise ValueError(
                f"attention: {name} is on {tensor.device} but q is on {q.device}; all must be on one device"
            )
    if q.dtype not in DTYPE_NAMES and not (q.dtype == torch.float64 and q.device.type in ("cpu", "meta")):
        raise TypeError(f"attention: q is {q.dtype}, expected {_ACCEPTED}")
    _explain_shapes(q, k, v)
    _explain_tables(q, k, tables)
    if softmax_scale is not None and not -MAX_SCALE < softmax_scale < MAX_SCALE:
        raise ValueError(f"attention: softmax_scale is {softmax_scale}, expected None or a number within {MAX_SCALE:g}")
    for name, bound in (("window_left", window_left), ("window_right", window_right)):
        if bound < -1:
            raise ValueError(f"attention: {name} is {bound}, expected -1 (no bound) or at least 0")


def _explain_shapes(q, k, v) -> None:
    heads_q, head_dim = q.shape[-2:]
    batches = [tensor.shape[0] for tensor in (q, k, v) if tensor.dim() == 4]
    if any(batch != batches[0] for batch in batches):
        found = " and ".join(f"{t.shape[0]} in {name}" for name, t in (("q", q), ("k", k), ("v", v)) if t.dim() == 4)
        raise ValueError(f"attention: batch is {found}; it must be one")
    if k.shape[-3] != v.shape[-3]:
        what = "seqlen" if k.dim() == 4 else "total"
        raise ValueError(f"attention: k has {what} {k.shape[-3]} but v has {v.shape[-3]}; they must be equal")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"attention: k has {k.shape[-2]} heads but v has {v.shape[-2]}; they must be equal")
    if k.shape[-2] == 0 or heads_q == 0 or heads_q % k.shape[-2] != 0:
        raise ValueError(f"attention: q has {heads_q} heads and k has {k.shape[-2]}; q's must be a multiple of k's")
    if k.shape[-1] != head_dim:
        raise ValueError(f"attention: head_dim is {head_dim} in q but {k.shape[-1]} in k; they must be equal")
    for name, size in (("q", head_dim), ("v", v.shape[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"attention: head_dim of {name} is {size}, expected 1 to {MAX_HEAD_DIM}")


def _explain_tables(q, k, tables) -> None:
    """Raise for a table of another kind, length or device, or one without the other that it belongs to."""
    named = dict(zip(TABLES, tables, strict=True))
    for name, table in named.items():
        if table is None:
            continue
        if table.dim() != 1 or table.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"attention: {name} is {table.dtype} of shape {tuple(table.shape)}, expected int32 of one dimension"
            )
        if table.device != q.device:
            raise ValueError(
                f"attention: {name} is on {table.device} but q is on {q.device}; all must be on one device"
            )
    batches = {}
    for side, tensor in (("q", q), ("k", k)):
        cu, padded, used = (named[f"{name}_{side}{end}"] for name, end in _PARTS)
        if cu is None and padded is not None:
            raise ValueError(f"attention: cu_seqlens_{side}_padded needs cu_seqlens_{side}, which gives the lengths")
        if cu is not None and cu.shape[0] == 0:
            raise ValueError(f"attention: cu_seqlens_{side} is empty, expected (batch + 1,) offsets from 0 on")
        batches[side] = tensor.shape[0] if cu is None else cu.shape[0] - 1
        for name, table, size in (("seqused", used, batches[side]), ("padded", padded, batches[side] + 1)):
            if table is not None and table.shape[0] != size:
                label = f"seqused_{side}" if name == "seqused" else f"cu_seqlens_{side}_padded"
                raise ValueError(f"attention: {label} has {table.shape[0]} entries, expected {size}")
    if batches["q"] != batches["k"]:
        raise ValueError(
            f"attention: q has {batches['q']} sequences but k has {batches['k']}; they must be equal "
            "(cu_seqlens have one entry more than there are sequences)"
        )


def tables(function: str, given: tuple) -> None:
    """Raise for what is no tensor, which an op would refuse without saying what it is for."""
    for name, table in zip(TABLES, given, strict=False):
        if table is not None and not isinstance(table, torch.Tensor):
            raise TypeError(f"{function}: {name} is {type(table).__name__}, expected an int32 tensor or None")


def lengths_hold(q, k, tables, max_seqlens: tuple = (None, None)) -> None:
    """Raise for lengths that cannot be: reads the tables, so it waits for a GPU.

    cu_seqlens start at 0, never fall, and end within the tensor; sequences fit the room that padding gives them, and
    are not longer than max_seqlens.
    """
    named = dict(zip(TABLES, tables, strict=True))
    for side, tensor, most in (("q", q, max_seqlens[0]), ("k", k, max_seqlens[1])):
        cu, padded, used = (named[f"{name}_{side}{end}"] for name, end in _PARTS)
        room = None if cu is not None else torch.tensor(tensor.shape[1])
        for name, starts_of in ((f"cu_seqlens_{side}", cu), (f"cu_seqlens_{side}_padded", padded)):
            if starts_of is None:
                continue
            starts = starts_of.cpu().long()
            lengths = starts.diff()
            if starts[0] != 0 or (lengths < 0).any():
                raise ValueError(
                    f"attention: {name} is {_listed(starts)}, expected 0 first and no entry below the one before"
                )
            # Where there are both, the padded ones are where rows are in memory.
            if (padded is None or starts_of is padded) and starts[-1] > tensor.shape[-3]:
                raise ValueError(
                    f"attention: {name} ends at {int(starts[-1])} but there are {tensor.shape[-3]} rows in all"
                )
            room = lengths
        lengths = cu.cpu().long().diff() if cu is not None else None
        lengths = lengths if used is None else used.cpu().long()
        if lengths is None:
            continue
        what = f"seqused_{side}" if used is not None else f"cu_seqlens_{side}"
        if (lengths < 0).any() or (lengths > room).any():
            raise ValueError(
                f"attention: {what} gives the lengths {_listed(lengths)}, but there is room for {_listed(room)}"
            )
        if most is not None and lengths.numel() and lengths.max() > most:
            raise ValueError(f"attention: max_seqlen_{side} is {most}, but a sequence has {int(lengths.max())} rows")


def _listed(numbers) -> str:
    numbers = numbers.reshape(-1).tolist()
    return str(numbers if len(numbers) <= 8 else [*numbers[:8], "..."]).replace("'", "")


def window(window_size, function: str = "flash_attn_func") -> tuple[int, int]:
    """(left, right) with -1 for no bound. Raises ValueError for negative bounds other than -1."""
    try:
        left, right = window_size
        bounds = tuple(-1 if bound is None else operator.index(bound) for bound in (left, right))
    except (TypeError, ValueError):
        bounds = (-2, -2)
    if min(bounds) < -1:
        raise ValueError(
            f"{function}: window_size is {window_size!r}, expected (left, right), each -1, None or at least 0"
        )
    return bounds


def is_top_left(causal_alignment, function: str = "flash_attn_func") -> bool:
    """Raises ValueError unless it is one of the two corners at which masks can be aligned."""
    if causal_alignment not in ("bottom_right", "top_left"):
        raise ValueError(f"{function}: causal_alignment is {causal_alignment!r}, expected 'bottom_right' or 'top_left'")
    return causal_alignment == "top_left"


def scalars(causal, softmax_scale) -> tuple:
    """(causal, softmax_scale) as a bool and a float or None. Raises TypeError for what is neither."""
    if type(causal) is not bool and causal not in (0, 1):
        raise TypeError(f"flash_attn_func: causal is {causal!r}, expected True or False")
    if isinstance(softmax_scale, torch.Tensor):
        raise TypeError(
            "flash_attn_func: softmax_scale is a tensor, expected a number or None; a scale that needs a gradient, "
            "or that only the GPU knows, is multiplied into q"
        )
    if softmax_scale is not None and not isinstance(softmax_scale, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"flash_attn_func: softmax_scale is {softmax_scale!r}, expected a number or None")
    return bool(causal), softmax_scale if softmax_scale is None else float(softmax_scale)


def refuse_transforms() -> None:
    raise NotImplementedError(
        "flash_attn_func: torch.func transforms (grad, vmap, jvp) and forward-mode derivatives are not supported; "
        "call it outside of them, with the batch in dimension 0, and use torch.autograd for gradients"
    )


def lse_dtype(q) -> torch.dtype:
    """That of the log-sum-exp of scores of q."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def lse_shape(q) -> tuple:
    """(batch, heads, seqlen), or (heads, total) for packed rows."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


def gradient_inputs(dout, q, v, out, lse, dlse=None) -> None:
    """Raise unless the tensors that a forward handed to its backward have the shapes it made them with."""
    expected = (*q.shape[:-1], v.shape[-1])
    for name, tensor in (("dout", dout), ("out", out)):
        if tuple(tensor.shape) != tuple(expected):
            raise ValueError(f"attn_bwd: {name} has shape {tuple(tensor.shape)}, expected {tuple(expected)}")
        if tensor.device != q.device:
            raise ValueError(f"attn_bwd: {name} is on {tensor.device} but q is on {q.device}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"attn_bwd: {name} is {tensor.dtype} but q is {q.dtype}")
    rows = lse_shape(q)
    wanted = lse_dtype(q)
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != rows or tensor.device != q.device:
            found = f"{name} has shape {tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"attn_bwd: {found}, expected {rows} on {q.device}")
        if tensor.dtype != wanted:
            raise TypeError(f"attn_bwd: {name} is {tensor.dtype}, expected {wanted}")


def not_built(function: str, **features) -> None:
    """Raise for the first feature that was asked for and does not exist yet. Each is (given, is it off)."""
    for name, (value, off) in features.items():
        if not off:
            raise NotImplementedError(
                f"{function}: {name}={_shown(value)} asks for a feature that is not built yet; supported are "
                "softmax_scale, causal, causal_alignment, window_size, seqused_q, seqused_k, cu_seqlens and their "
                "padded forms, deterministic, return_lse and return_attn_probs"
            )


def _shown(value) -> str:
    return f"<tensor of shape {tuple(value.shape)}>" if isinstance(value, torch.Tensor) else repr(value)


def packed(function: str, name: str, tensor, parts: int, varlen: bool = False):
    """The `parts` tensors of a packed one (batch, seqlen, parts, heads, head_dim), or (total, ...), as views."""
    at = 1 if varlen else 2
    if tensor.dim() != at + 3 or tensor.shape[at] != parts:
        rows = "total" if varlen else "batch, seqlen"
        raise ValueError(
            f"{function}: {name} has shape {tuple(tensor.shape)}, expected ({rows}, {parts}, heads, head_dim)"
        )
    return tensor.unbind(at)
