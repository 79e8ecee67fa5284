"""Draws the JSON of bench_forward.py or bench_backward.py: TFLOP/s over sequence length, a panel a head_dim and mask.

python benchmarks/plot.py out.json --out out.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def series(cases: list[dict]) -> dict[tuple[int, bool], dict[str, list[tuple[int, float]]]]:
    """(head_dim, causal) -> contender -> [(seqlen, TFLOP/s)], sorted by seqlen; rows without a time are left out."""
    found = {}
    for case in cases:
        panel = found.setdefault((case["head_dim"], case["causal"]), {})
        for row in case["rows"]:
            if row["tflops"] is not None:
                panel.setdefault(row["name"], []).append((case["seqlen"], row["tflops"]))
    return {key: {name: sorted(points) for name, points in found[key].items()} for key in sorted(found)}


def figure(report: dict):
    """A matplotlib figure of one report."""
    from matplotlib.figure import Figure

    panels = series(report["cases"])
    head_dims, masks = sorted({key[0] for key in panels}), sorted({key[1] for key in panels})
    made = Figure(figsize=(1.5 + 4 * len(head_dims), 1 + 3 * len(masks)), layout="constrained")
    axes = made.subplots(len(masks), len(head_dims), squeeze=False, sharey=True)
    names = sorted({name for panel in panels.values() for name in panel}, key=lambda name: (name != "ours", name))
    for (head_dim, causal), panel in panels.items():
        axis = axes[masks.index(causal)][head_dims.index(head_dim)]
        for name in names:
            if name in panel:
                x, y = zip(*panel[name], strict=True)
                width = 2.5 if name == "ours" else 1.2
                axis.plot(x, y, marker="o", linewidth=width, color=f"C{names.index(name)}", label=name)
        axis.set(title=f"head_dim {head_dim}, {'causal' if causal else 'full'}")
        axis.set_xscale("log", base=2)
        axis.set(xlabel="sequence length", ylabel="TFLOP/s")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    # Shared by all panels, and last: a limit that is set stops the axis from growing with what is drawn later.
    axes[0][0].set_ylim(bottom=0)
    machine = report["machine"]
    made.suptitle(f"{report['title']}, {machine.get('gpu', '')}, torch {machine.get('torch', '')}", fontsize="medium")
    return made


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", help="the JSON file")
    parser.add_argument("--out", metavar="FILE", help="the picture; default beside the JSON")
    chosen = parser.parse_args(argv)
    try:
        report = json.loads(Path(chosen.report).read_text())
        made = figure(report)
    except ImportError:
        print("plot.py needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(
            f"plot.py: {chosen.report} is not a report of bench_forward.py or bench_backward.py: {error!r}",
            file=sys.stderr,
        )
        return 2
    out = Path(chosen.out) if chosen.out else Path(chosen.report).with_suffix(".png")
    made.savefig(out, dpi=150)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
