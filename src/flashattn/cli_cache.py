"""The commands `cache path`, `list`, `verify`, `clear` and `gc`: the kernels compiled on this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from .cli_output import Report, Usage, age_text, counted, size_text, table
from .cli_sources import KERNELS, ReadOnlyStore, cache_root, checked_settings
from .jit import place
from .jit.artifact import Artifact, ArtifactError
from .jit.compile import toolchain
from .jit.spec import source_digest
from .jit.store import LAYOUT, StoredEntry, UserStore


def open_cache(kind: type[UserStore] = ReadOnlyStore) -> tuple[UserStore, str | None]:
    """The cache that a call would use, and what is wrong with the wanted one."""
    root, complaint = cache_root(checked_settings())
    if root is not None:
        complaint = complaint or place.distrust(root / LAYOUT)
    return kind(root), complaint


def read(store: UserStore, entry: StoredEntry) -> Artifact | ArtifactError | None:
    """The entry, or what is wrong with it. None if it is gone meanwhile."""
    try:
        return store.load(entry.key)
    except ArtifactError as error:
        return error


def damage(store: UserStore) -> tuple[int, list[str]]:
    """The number of entries, and a sentence for each that is damaged."""
    found = [(entry, read(store, entry)) for entry in sorted(store.entries(), key=lambda entry: entry.key)]
    bad = [(entry, problem) for entry, problem in found if isinstance(problem, ArtifactError)]
    texts = [f"{entry.folder}: {problem.reason}: {problem.text}" for entry, problem in bad]
    return sum(problem is not None for _, problem in found), texts


def path(args) -> Report:
    """The folder."""
    store, complaint = open_cache()
    entries = list(store.entries())
    data = {
        "path": str(store.root) if store.root else None,
        "exists": bool(store.root and Path(store.root).is_dir()),
        "entries": len(entries),
        "bytes": sum(entry.bytes for entry in entries),
    }
    # Alone on stdout, so that it can be used in a command line.
    if complaint and not args.json:
        print(f"problem: {complaint}", file=sys.stderr)
    return Report(text=data["path"] or "", data=data, problems=(complaint,) if complaint else ())


def list_entries(args) -> Report:
    """What is in it, the last used first."""
    store, complaint = open_cache()
    digest, tools, now = source_digest(KERNELS), toolchain(), time.time()
    rows, data = [], []
    for entry in sorted(store.entries(), key=lambda entry: entry.used, reverse=True):
        found = read(store, entry)
        if found is None:
            continue
        whole = isinstance(found, Artifact)
        state = _state(found, digest, tools) if whole else found.reason
        label = found.label if whole else found.text
        target = found.meta["target"] if whole else ""
        age = age_text(now - entry.used)
        rows.append((entry.key[:12], target, size_text(entry.bytes), age, state, _short(label) if whole else label))
        facts = {"artifact_key": entry.key, "target": target, "bytes": entry.bytes, "used": entry.used}
        data.append({**facts, "state": state, "label": label, "folder": str(entry.folder)})
    headers = ("entry", "target", "size", "unused for", "state", "kernel")
    total = sum(each["bytes"] for each in data)
    lines = [table(headers, rows)] if rows else []
    lines.append(f"{counted(len(data), 'entry')}, {size_text(total)}, in {store.root or 'no folder'}")
    problems = _with(
        complaint, [f"{each['folder']}: {each['state']}: {each['label']}" for each in data if not each["target"]]
    )
    lines += [f"problem: {problem}" for problem in problems]
    return Report(text="\n".join(lines), data={"path": _text(store.root), "entries": data}, problems=problems)


def _state(artifact: Artifact, digest: str | None, tools: dict) -> str:
    """Whether a call of this installation would use it."""
    made = artifact.meta["toolchain"]
    if artifact.meta["source_digest"] != digest:
        return "other sources"
    if made.get("triton") != tools["triton"]:
        return f"by Triton {made.get('triton')}"
    return "usable" if made == tools else "other environment"


def _short(label: str) -> str:
    """A label without its target, which has a column of its own."""
    head, bracket, rest = label.partition("[")
    return f"{head}[{rest.partition(' ')[2]}" if bracket else label


def verify(args) -> Report:
    """Whether every entry is sound."""
    store, complaint = open_cache()
    count, problems = damage(store)
    problems = _with(complaint, problems)
    lines = [f"problem: {problem}" for problem in problems]
    if problems:
        lines.append("A damaged entry is never loaded: the next call that needs it puts it aside and compiles anew.")
    lines.append(f"{counted(count, 'entry')} looked at, {counted(len(problems), 'problem')}, in {store.root}")
    return Report(text="\n".join(lines), data={"path": _text(store.root), "entries": count}, problems=problems)


def clear(args) -> Report:
    """Remove every entry, and what was put aside."""
    store, complaint = open_cache(UserStore)
    removed = store.clear()
    left = len(list(store.entries()))
    problems = _with(complaint, [f"{counted(left, 'entry')} could not be removed"] if left else [])
    lines = [f"{counted(removed, 'entry')} removed from {store.root}", *(f"problem: {problem}" for problem in problems)]
    data = {"path": _text(store.root), "removed": removed, "left": left}
    return Report(text="\n".join(lines), data=data, problems=problems)


def gc(args) -> Report:
    """Remove what was not used for long, then the longest unused until the rest is small enough."""
    if args.max_age is None and args.max_size is None:
        raise Usage("cache gc: say what may stay, with --max-age 30d, --max-size 500MB, or both")
    store, complaint = open_cache(UserStore)
    removed = store.gc(max_age=args.max_age, max_bytes=args.max_size)
    freed, kept = sum(entry.bytes for entry in removed), list(store.entries())
    stays = f"{counted(len(kept), 'entry')}, {size_text(sum(entry.bytes for entry in kept))}, stay in {store.root}"
    problems = _with(complaint, [])
    lines = [f"{counted(len(removed), 'entry')}, {size_text(freed)}, removed; {stays}"]
    lines += [f"problem: {problem}" for problem in problems]
    data = {"path": _text(store.root), "removed": [entry.key for entry in removed], "freed": freed, "left": len(kept)}
    return Report(text="\n".join(lines), data=data, problems=problems)


def _with(complaint: str | None, problems: list[str]) -> tuple[str, ...]:
    return (*([f"the cache is not as wanted: {complaint}"] if complaint else []), *problems)


def _text(root: Path | None) -> str | None:
    return str(root) if root else None
