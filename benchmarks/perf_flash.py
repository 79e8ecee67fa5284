"""Measures tile sizes, and prints the best as lines for tiles.py.

    python benchmarks/perf_flash.py --kernels attn_fwd --head-dims 64 128 --masks causal --work perf_work
    python benchmarks/perf_flash.py --compile-only --target sm_90        # needs no GPU; the next run finds the kernels

Every candidate is compiled first, in a pool of processes, into a cache folder of its own; then the package launches it
as it launches any kernel, with the candidate in FLASHATTN_TILES. Results are checked, measured interleaved at the first
sequence length, and the best few and the table's own tile again at all of them. The kernels of the backward are
measured as parts of a whole backward, those of windows with one of 1024 keys that ends at the query. What is done is
kept in the work folder, and a run goes on where one stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path

from tile_candidates import KERNELS, Group, Tile, best_first, candidates, parse_tile, tile_argument, tile_of, with_tile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
WINDOW = (1024, 0)
FINALISTS = 4


# ---- Compiling


def compile_one(spec_json: dict, digest: str, work: str, timeout: float) -> str | None:
    """Compile into the cache below `work`, in a process of its own. Returns what went wrong, or None."""
    from flashattn.jit.artifact import artifact_key
    from flashattn.jit.batch import compile_all
    from flashattn.jit.compile import toolchain
    from flashattn.jit.spec import KernelSpec
    from flashattn.jit.store import UserStore

    store, spec = UserStore(Path(work, "cache")), KernelSpec.from_json(spec_json)
    if store.load(artifact_key(spec.key, digest, toolchain())) is not None:
        return None
    outcome = compile_all([spec], digest, store.publish, Path(work, "logs"), timeout)[spec.key]
    return " ".join(outcome["error"].split()) if "error" in outcome else None


def compile_candidates(specs: Iterable, digest: str, work: Path, jobs: int, timeout: float = 300.0) -> dict[str, str]:
    """Compile all specs; one that takes longer than `timeout` seconds fails. Returns spec key -> error of those."""
    specs, failed, began = list({spec.key: spec for spec in specs}.values()), {}, time.monotonic()
    (work / "cache").mkdir(mode=0o700, parents=True, exist_ok=True)
    # Spawned: a fork of a process that holds a GPU context cannot be trusted with it.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(compile_one, spec.to_json(), digest, str(work), timeout): spec for spec in specs}
        for done, future in enumerate(as_completed(waiting), 1):
            error = future.result()
            if error:
                failed[waiting[future].key] = error
            left = (time.monotonic() - began) / done * (len(specs) - done)
            if sys.stderr.isatty() or 10 * done // len(specs) > 10 * (done - 1) // len(specs):
                text = f"compiled {done}/{len(specs)}, {len(failed)} of them failed, {left:.0f} s left"
                print(f"\r{text} \x1b[K" if sys.stderr.isatty() else f"{text}\n", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return failed


# ---- Launching


class Contender:
    """A call of the package with one tile in place of the table's."""

    _active: Contender | None = None

    def __init__(self, kernel: str, tile: Tile | None, call, folder: Path):
        self._call, self._path = call, None
        if tile:
            self._path = folder / f"{kernel}-{str(tile).replace(' ', '-')}.json"
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({kernel: tile._asdict()}))

    def __call__(self):
        if Contender._active is not self:
            use_tiles(self._path)
            Contender._active = self
        return self._call()


def use_tiles(path: Path | None) -> None:
    """Make the package launch with the tiles of a FLASHATTN_TILES file from now on; None: with its own table's."""
    from flashattn import launch, settings

    os.environ["FLASHATTN_TILES"] = str(path or "")
    settings.reset()
    launch.reset()


def switching_timer():
    """A harness timer that calls once before a burst, so that changing the tile is not part of it."""
    from harness import CudaTimer

    class SwitchingTimer(CudaTimer):
        def burst(self, call, launches):
            call()
            return super().burst(call, launches)

    return SwitchingTimer()


def case(group: Group, seqlen: int, tiles: Iterable[Tile | None], folder: Path) -> dict:
    """What `Run.compare` needs to compare the tiles (None: the table's) in one problem."""
    import torch
    from bench_backward import backward_case
    from bench_forward import forward_case
    from problems import DEVICE, problems

    from flashattn import flash_attn_func

    (problem,) = problems([group.head_dim], [seqlen], [group.mask != "full"], DTYPES[group.dtype])
    if group.mask == "window":
        problem = replace(problem, window=WINDOW)

    def prepare(problem):
        options = {"causal": problem.causal, "window_size": problem.window or (-1, -1)}
        if group.kernel == "attn_fwd":
            # Told the lengths, every GPU takes the portable kernel.
            lengths = [problem.seqlen] * problem.batch
            options["seqused_q"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        # With the log-sum-exp, so that the kernel is the one that training and the wheel use.
        return lambda q, k, v: flash_attn_func(q, k, v, **options, return_lse=True)[0]

    make = forward_case if group.kernel == "attn_fwd" else backward_case
    torch.cuda.empty_cache()
    found = make(problem, {"one": prepare})
    (call,) = found.pop("contenders").values()
    found["contenders"] = {str(tile or "table"): Contender(group.kernel, tile, call, folder) for tile in tiles}
    return {"label": f"{group}, seqlen {seqlen}", **found, "case": problem.as_dict(), "baseline": "table", "ours": ""}


# ---- Choosing


def measured(rows) -> dict[str, float]:
    return {row.name: row.ms for row in rows if row.ms}


def tune(run, group: Group, seqlens: list[int], tiles: list[Tile], work: Path) -> dict:
    """Screen all tiles at the first length, then measure the best few and the table's at all. Returns the record."""
    by_name = {str(tile): tile for tile in tiles} | {"table": None}
    plan = run.plan
    run.plan = replace(plan, rounds=1)
    screened = measured(run.compare(**case(group, seqlens[0], by_name.values(), work / "tiles")))
    run.plan = plan
    order = sorted(screened, key=screened.get)
    finalists = dict.fromkeys([*order[:FINALISTS], "table"])
    times = {}
    for seqlen in seqlens:
        chosen = [by_name[name] for name in finalists]
        times[seqlen] = measured(run.compare(**case(group, seqlen, chosen, work / "tiles")))
    ranking = best_first(times)
    return {"screened": screened, "final": times, "ranking": ranking}


def winner_line(group: Group, record: dict, table: Tile, target: str) -> str:
    """The best tile as Python, with what it gains over the table's."""
    ranking = dict(record["ranking"])
    name = record["ranking"][0][0]
    tile = table if name == "table" else parse_tile(name)
    values = ", ".join(map(str, tile if tile.max_registers else tile[:-1]))
    gain = (
        f"{ranking['table'] / ranking[name]:.3f} of the table's speed" if "table" in ranking else "the table's failed"
    )
    key = f'("{target}", "{group.kernel}", "{group.dtype}", {group.head_dim}, "{group.mask}")'
    return f"{key}: Tile({values}),  # {gain}"


# ---- The command


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    add("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    add("--masks", nargs="+", choices=["full", "causal", "window"], default=["full", "causal"])
    add("--dtype", choices=list(DTYPES), default="bf16")
    add("--seqlens", type=int, nargs="+", default=[4096, 1024, 16384], help="all are screened at the first one")
    add("--tiles", nargs="+", metavar="128x64w4s3", type=tile_argument, help="candidates in place of the own list")
    add("--target", help="with --compile-only: default sm_90; else the GPU's")
    add("--compile-only", action="store_true", help="needs no GPU")
    add("--rounds", type=int, default=4)
    add("--jobs", type=int, default=os.cpu_count(), help="compiling processes")
    add("--work", type=Path, default=Path("perf_work"), help="folder for kernels and results")
    add("--again", action="store_true", help="measure what is already measured, too")
    return parser.parse_args(argv)


def groups_of(chosen: argparse.Namespace) -> list[Group]:
    return [
        Group(kernel=kernel, dtype=chosen.dtype, head_dim=head_dim, mask=mask)
        for kernel in chosen.kernels
        for head_dim in chosen.head_dims
        for mask in chosen.masks
    ]


def mask_number(spec) -> int | None:
    """Which of the masks a kernel has; None if it serves all."""
    constants = dict(spec.constants)
    return constants.get("MASK", constants.get("IS_CAUSAL"))


def plan_compiles(groups: list[Group], target: str, tiles: list[Tile] | None):
    """Group -> (the table's tile, tile -> its specs), and every spec that measuring needs."""
    import build_aot
    from flashattn.jit.targets import target_of
    from flashattn.variants import MASKS

    limit, wanted, every = target_of(target).shared_limit, {}, []
    for group in groups:
        mask = MASKS.index(group.mask)
        same = build_aot.declared_specs("core", target, f"{group.dtype} d{group.head_dim}").values()
        same = [spec for spec in same if mask_number(spec) in (None, mask)]
        tuned = [spec for spec in same if spec.kernel == group.kernel]
        if not tuned:
            raise SystemExit(f"perf_flash.py: nothing is declared for {group} on {target}")
        tried = tiles or candidates(group.kernel, group.head_dim, limit)
        wanted[group] = tile_of(tuned[0]), {tile: [with_tile(spec, tile) for spec in tuned] for tile in tried}
        # The backward needs the other kernels of the variant too, with the table's tiles.
        every += same + [spec for specs in wanted[group][1].values() for spec in specs]
    return wanted, every


def main(argv=None) -> int:
    chosen = parse_arguments(argv)
    target = chosen.target or "sm_90"
    if not chosen.compile_only:
        from harness import require_gpu

        require_gpu("perf_flash.py")
        # Before build_aot, which puts an empty package in its place where it is not imported yet.
        import flashattn  # noqa: F401

        target = gpu_target()
    import build_aot

    digest, work = build_aot.source_digest(build_aot.KERNELS), chosen.work.resolve()
    wanted, every = plan_compiles(groups_of(chosen), target, chosen.tiles)
    failed = compile_candidates(every, digest, work, chosen.jobs)
    usable = {}
    for group, (table, tried) in wanted.items():
        usable[group] = [tile for tile, specs in tried.items() if not any(spec.key in failed for spec in specs)]
        print(f"{group}: table {table}; {len(usable[group])} of {len(tried)} candidates compile")
    for error in list(failed.values())[:5]:
        print(f"  not: {error[:200]}")
    if chosen.compile_only:
        return 0
    os.environ["FLASHATTN_CACHE_DIR"] = str(work / "cache")
    return measure_groups(chosen, target, digest, {group: table for group, (table, _) in wanted.items()}, usable)


def gpu_target() -> str:
    """The current GPU as a target's name."""
    import torch

    if torch.version.hip:
        return torch.cuda.get_device_properties(None).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def measure_groups(chosen, target: str, digest: str, tables: dict[Group, Tile], usable: dict[Group, list[Tile]]) -> int:
    """Tune every group that is not in the results yet, keeping results after each, and print the winners."""
    from harness import Plan, Run, write_json

    path = chosen.work / f"results-{target}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    # Results of other sources say nothing about these.
    results = kept.get("groups", {}) if kept.get("source_digest") == digest else {}
    todo = [group for group in usable if chosen.again or str(group) not in results]
    if todo:
        with Run(f"Tiles for {target}", plan=Plan(rounds=chosen.rounds), timer=switching_timer()) as run:
            for group in todo:
                record = tune(run, group, chosen.seqlens, usable[group], chosen.work)
                results[str(group)] = {**record, "group": asdict(group), "table": tables[group]}
                write_json(path, {"source_digest": digest, "target": target, "groups": results})
        use_tiles(None)
    print(f"\nbest, of {path}")
    for group in usable:
        record = results[str(group)]
        print(
            winner_line(group, record, Tile(*record["table"]), target)
            if record["ranking"]
            else f"# {group}: all failed"
        )
    return int(any(not results[str(group)]["ranking"] for group in usable))


if __name__ == "__main__":
    raise SystemExit(main())
