"""The whole path in a few minutes: train with our attention, compile kernels for a GPU ahead of time, compare speed.

    python examples/demo.py --out demo_out

train: a character GPT with flashattn and with PyTorch's attention, the losses compared (train_char_gpt.py).
build: a handful of kernels for sm_90 by build_aot.py, which needs no GPU.
bench: only where a GPU is, TFLOP/s, host microseconds and first-call seconds against PyTorch's attention.
Exit status 1 if the losses differ or a part fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import train_char_gpt

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("train", "build", "bench")
TARGET, KERNELS = "sm_90", "bf16 d64 causal"


def run(script: Path, *options) -> bool:
    """Run a script of the repository with this Python; its output is ours. Says so if it fails."""
    done = subprocess.run([sys.executable, str(script), *map(str, options)], check=False)
    if done.returncode:
        print(f"{script.name} failed with exit status {done.returncode}", file=sys.stderr)
    return done.returncode == 0


def heading(text: str) -> None:
    print(f"\n== {text}\n", flush=True)


def build(out: Path, script: Path = ROOT / "build_aot.py") -> bool:
    """Compile KERNELS for TARGET into `out` and list them."""
    heading(f"Kernels for {TARGET}, ahead of time and without a GPU")
    # A work folder that is empty, so that they are compiled and not found.
    work = out / "work"
    shutil.rmtree(work, ignore_errors=True)
    began = time.monotonic()
    if not run(script, "--targets", TARGET, "--profile", "core", "--only", KERNELS, "--out", out, "--work", work):
        return False
    taken = time.monotonic() - began
    entries = json.loads((out / TARGET / "MANIFEST.json").read_text())["entries"].values()
    print(f"\n{'bytes':>9}  kernel")
    for entry in sorted(entries, key=lambda entry: entry["label"]):
        print(f"{entry['code_bytes']:9,d}  {entry['label']}")
    total = sum(entry["code_bytes"] for entry in entries)
    print(f"{total:9,d}  in all: {len(entries)} kernels in {taken:.1f} s, in {out / TARGET}")
    return bool(entries)


def bench(out: Path) -> bool:
    """Measure ours against PyTorch's attention and print one table."""
    if not torch.cuda.is_available():
        heading("Speed: left out, torch sees no GPU on this machine")
        return True
    heading("Speed against F.scaled_dot_product_attention")
    sizes = ["--head-dims", 64, 128, "--seqlens", 4096, "--masks", "causal", "--rounds", 3]
    names = ["--contenders", "ours", "sdpa", "--baseline", "sdpa"]
    fine = True
    for name, options in {
        "forward": [*sizes, *names],
        "backward": [*sizes, *names],
        "host": [],
        "cold_start": [],
    }.items():
        fine &= run(ROOT / "benchmarks" / f"bench_{name}.py", *options, "--json", out / f"{name}.json")
    if fine:
        reports = {
            name: json.loads((out / f"{name}.json").read_text())
            for name in ("forward", "backward", "host", "cold_start")
        }
        print_speeds(reports)
    return fine


def print_speeds(reports: Mapping[str, dict]) -> None:
    print(f"\n{'':44}  {'flashattn':>10}  {'torch':>10}")
    for direction in ("forward", "backward"):
        for case in reports[direction]["cases"]:
            rates = {row["name"]: row["tflops"] for row in case["rows"]}
            what = f"{direction} D{case['head_dim']} seqlen {case['seqlen']} causal, TFLOP/s"
            print(f"{what:44}  {rates['ours']:10.0f}  {rates['sdpa']:10.0f}")
    host = {(row["mode"], row["contender"]): row["best_us"] for row in reports["host"]["rows"]}
    for mode in dict.fromkeys(mode for mode, _ in host):
        print(f"{f'host time of a call, {mode}, us':44}  {host[mode, 'ours']:10.1f}  {host[mode, 'sdpa']:10.1f}")
    first = {row["scenario"]: row["first_call_s"] for row in reports["cold_start"]["rows"]}
    theirs = first.pop("torch")
    for scenario, seconds in first.items():
        print(f"{f'first call, {scenario}, s':44}  {seconds:10.3f}  {theirs:10.3f}")


def main(argv=None, attentions=train_char_gpt.ATTENTIONS) -> int:
    """Run the parts. Options that are not the demo's go to the training. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for what is written")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    chosen, training = parser.parse_known_args(argv)
    chosen.out.mkdir(parents=True, exist_ok=True)
    failed = []
    if "train" in chosen.parts:
        heading("A character GPT, trained with flashattn and with PyTorch's attention")
        if train_char_gpt.main([*training, "--out", str(chosen.out)], attentions):
            failed.append("train")
    if "build" in chosen.parts and not build(chosen.out / "aot"):
        failed.append("build")
    if "bench" in chosen.parts and not bench(chosen.out):
        failed.append("bench")
    print(
        f"\nfailed: {', '.join(failed)}" if failed else f"\nall well; plots and figures are in {chosen.out}", flush=True
    )
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
