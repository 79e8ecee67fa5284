"""The commands `list`, `verify` and `explain`: what is declared, whether it is sound, where it would come from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from . import cli_cache, declared, specs
from .checks import DTYPE_NAMES
from .cli_output import Report, Usage, counted, pairs, size_text, table
from .cli_sources import (
    KERNELS,
    Probe,
    aot_dir,
    checked_settings,
    targets_here,
    wanted_targets,
)
from .jit.decision import CACHE, COMPILED, MISSING, WHEEL, Decision
from .jit.spec import KernelSpec, source_digest
from .jit.targets import SUPPORTED
from .jit.wheel import Miss, Wheel, verify_folder
from .launch import plan
from .specs import declared_specs, portable_because
from .variants import MAX_HEAD_DIM

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SHOWN = 20


def _would_be(probe: Probe, decision: Decision) -> str:
    """ "wheel", "user cache", "compiled", or "missing" where a call would raise."""
    return COMPILED if decision.source == MISSING and probe.obstacle() is None else decision.source


# ---- list


def list_declared(args) -> Report:
    """What is declared, and how much of it is compiled already."""
    probe = Probe(checked_settings())
    targets = args.target or tuple(dict.fromkeys((*SUPPORTED, *targets_here())))
    rows, data = [], {}
    for target in targets:
        found = {key: _would_be(probe, probe.find(spec)) for key, spec in declared_specs(args.profile, target).items()}
        count = Counter(found.values())
        held = probe.wheel(target).manifest()
        size = 0 if isinstance(held, Miss) else sum(entry["code_bytes"] for entry in held["entries"].values())
        sources = (count[WHEEL], count[CACHE], count[COMPILED], count[MISSING])
        variants = declared.declared(args.profile, target)
        rows.append((target, len(variants), len(found), *sources, size_text(size)))
        data[target] = {
            "kernels": [
                {"spec_key": key, "label": spec.label(), "source": found[key]}
                for key, spec in declared_specs(args.profile, target).items()
            ],
            "wheel_bytes": size,
            "variants": len(variants),
        }
    headers = ("target", "variants", "kernels", "in wheel", "in cache", "to compile", "not available", "wheel holds")
    lines = [f"profile {args.profile}", table(headers, rows)]
    if args.target:
        lines += [_variants(probe, args.profile, target) for target in targets]
    else:
        lines.append("`list --target sm_90` shows the variants of one target, `explain` how a kernel is found.")
    return Report(text="\n".join(lines), data={"profile": args.profile, "targets": data})


def _variants(probe: Probe, profile: str, target: str) -> str:
    rows = []
    for variant in declared.declared(profile, target):
        wanted = specs.specs_of(variant, target)
        sources = Counter(_would_be(probe, probe.find(spec)) for spec in wanted)
        shown = (
            next(iter(sources)) if len(sources) == 1 else ", ".join(f"{n} {source}" for source, n in sources.items())
        )
        rows.append((str(variant), ", ".join(spec.kernel for spec in wanted), shown))
    return f"\n{target}\n" + table(("variant", "kernels", "from"), rows, "  ")


# ---- verify


def verify(args) -> Report:
    """Whether every kernel of the wheel, and of the user's cache, is sound."""
    current = checked_settings()
    folder, rows, problems = aot_dir(current), [], []
    for path in _folders(folder):
        found = _folder_problems(path, current.tiles is None)
        held = Wheel(folder, path.name, "").manifest()
        count = 0 if isinstance(held, Miss) else len(held["entries"])
        rows.append(("wheel", path.name, count, len(found), str(path)))
        problems += [f"{path}: {problem}" for problem in found]
    if current.aot_dir is not None and not folder.is_dir():
        problems.append(f"FLASHATTN_AOT_DIR={folder} is not a folder")
    store, complaint = cli_cache.open_cache()
    count, damaged = cli_cache.damage(store)
    rows.append(("cache", "", count, len(damaged), str(store.root) if store.root else f"none: {complaint}"))
    problems += damaged
    lines = [table(("place", "target", "kernels", "problems", "folder"), rows)]
    if len(rows) == 1:
        lines.append(f"{folder} holds no compiled kernels: all are compiled on first call.")
    lines += [f"problem: {problem}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"... and {len(problems) - _SHOWN} more; --json shows all")
    if problems:
        lines.append(
            "What is damaged is never loaded. Install the wheel again; `flashattn cache clear` empties the cache."
        )
    else:
        lines.append("Every kernel is as it was compiled.")
    places = [dict(zip(("place", "target", "kernels", "problems", "folder"), row, strict=True)) for row in rows]
    return Report(text="\n".join(lines), data={"places": places}, problems=tuple(problems))


def _folders(folder: Path) -> list[Path]:
    """What a wheel's folder holds; whatever is no sound folder of a target is a problem."""
    try:
        return sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise Usage(f"{folder} cannot be read ({error.strerror})") from None


def _folder_problems(path: Path, built_in_tiles: bool) -> list[str]:
    """What is wrong with one target's folder, as it is and beside the package that would use it."""
    if not path.is_dir():
        return ["no folder of a target, and no manifest names it"]
    try:
        problems = verify_folder(path)
    except OSError as error:
        return [f"unreadable: it cannot be read ({error.strerror})"]
    wheel = Wheel(path.parent, path.name, "")
    held = wheel.manifest()
    if isinstance(held, Miss):
        return problems
    digest = source_digest(KERNELS)
    other = wheel.source_digest(digest) if digest else None
    if isinstance(other, Miss):
        return [*problems, f"source: {other.text}: none of it is used"]
    # With tiles of the user's own, other kernels are asked for than were declared when the wheel was built.
    if built_in_tiles and held["profile"] in declared.PROFILES and path.name in SUPPORTED:
        wanted = declared_specs(held["profile"], path.name)
        lost = [spec.label() for key, spec in wanted.items() if key not in held["entries"]]
        problems += [f"{label}: not built: profile {held['profile']} declares it" for label in lost]
    return problems


# ---- explain


def explain(args) -> Report:
    """Where each kernel of a call would come from, and why not from elsewhere. Nothing is compiled."""
    current = checked_settings()
    head_dim_v = args.head_dim_v or args.head_dim
    if not (1 <= args.head_dim <= MAX_HEAD_DIM and 1 <= head_dim_v <= MAX_HEAD_DIM):
        raise Usage(f"head_dim must be 1 to {MAX_HEAD_DIM}, got {args.head_dim} and {head_dim_v}")
    probe = Probe(current)
    mask = "window" if args.window else "causal" if args.causal else "full"
    texts, data, problems = [], [], []
    for target in wanted_targets(args.target):
        for family in ("fwd", "bwd"):
            facts = (family, TORCH_DTYPES[args.dtype], args.head_dim, head_dim_v, mask, not args.generic)
            variant, wanted = plan((*facts, args.tables) if family == "fwd" else facts, target)
            why = portable_because(variant, target) if family == "fwd" and target == "sm_90" else None
            kernels = [_explained(probe, spec) for spec in wanted]
            texts += [f"{variant} on {target}" + (f" (portable: {why})" if why else "")]
            texts += [_kernel_text(kernel) for kernel in kernels]
            data.append({"variant": str(variant), "target": target, "portable_because": why, "kernels": kernels})
            problems += [f"{each['label']}: {each['how']}" for each in kernels if each["source"] == MISSING]
    return Report(text="\n".join(texts), data={"variants": data}, problems=tuple(problems))


def _explained(probe: Probe, spec: KernelSpec) -> dict:
    decision = probe.find(spec)
    source = _would_be(probe, decision)
    how = {
        WHEEL: "from the wheel",
        CACHE: "from the user's cache",
        COMPILED: "would be compiled on first call, then kept in the user's cache",
        MISSING: f"not found, and not compiled since {probe.obstacle()}: a call raises KernelMissing",
    }[source]
    constants, options = dict(spec.constants), dict(spec.options)
    tile = {name: constants[name] for name in ("BLOCK_M", "BLOCK_N") if name in constants}
    tile |= {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    rejected = [each._asdict() for each in decision.rejected if each.source != "compile"]
    return {
        "kernel": spec.kernel,
        "label": spec.label(),
        "spec_key": spec.key,
        "tile": tile,
        "source": source,
        "how": how,
        "artifact_key": decision.artifact_key,
        "rejected": rejected,
        "note": decision.note,
    }


def _kernel_text(kernel: dict) -> str:
    tile = kernel["tile"]
    sides = " x ".join(str(tile[name]) for name in ("BLOCK_M", "BLOCK_N") if name in tile)
    sizes = ", ".join(
        [sides, *(counted(tile[name], name[4:-1]) for name in ("num_warps", "num_stages") if name in tile)]
    )
    facts = {"spec": kernel["label"], "key": kernel["spec_key"][:12], "tile": sizes}
    if kernel["artifact_key"]:
        facts["artifact"] = kernel["artifact_key"][:12]
    lines = [f"  {kernel['kernel']}: {kernel['how']}", pairs(facts, "    ")]
    lines += [f"    not from the {each['source']}: {each['reason']}: {each['text']}" for each in kernel["rejected"]]
    lines += [f"    note: {kernel['note']}"] if kernel["note"] else []
    return "\n".join(lines)
