"""The demo: its exit status, its comparison and what it lists."""

import io
import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import demo
import train_char_gpt
from progress import Progress

TINY = ["--device", "cpu", "--layers", "1", "--width", "32", "--heads", "2", "--context", "24"]
TINY += ["--batch", "4", "--steps", "20", "--sample", "20"]


def acausal(q, k, v):
    """Attention that sees the future."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def test_a_tiny_demo_exits_0_and_leaves_curves_and_a_sample(tmp_path, capsys):
    assert demo.main([*TINY, "--parts", "train", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "the curves agree" in shown
    assert "written by the model trained with flashattn:\nThe " in shown
    report = json.loads((tmp_path / "losses.json").read_text())
    assert list(report["curves"]) == ["flashattn", "torch"]
    assert report["largest_difference"] <= report["limit"] == 1e-3


def test_a_planted_difference_of_the_losses_exits_1(tmp_path, capsys):
    planted = {"flashattn": acausal, "torch": train_char_gpt.torch_attention}
    assert demo.main([*TINY, "--parts", "train", "--out", str(tmp_path)], planted) == 1
    shown = capsys.readouterr().out
    assert "the curves DIFFER" in shown
    assert "failed: train" in shown


def test_a_loss_that_is_nan_exits_1(tmp_path, capsys):
    planted = {"flashattn": lambda q, k, v: v * float("nan"), "torch": train_char_gpt.torch_attention}
    assert train_char_gpt.main([*TINY, "--sample", "0", "--out", str(tmp_path)], planted) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_the_curves_are_drawn_with_labelled_axes(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed, so the demo draws no plot")
    path = tmp_path / "losses.png"
    said = train_char_gpt.plot_curves({"a": [3.0, 2.0], "b": [3.0, 2.1]}, train_char_gpt.CPU, path)
    assert said == f"plot: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")


def fake_build(tmp_path, body: str) -> Path:
    script = tmp_path / "build_fake.py"
    script.write_text(textwrap.dedent(body))
    return script


def test_the_build_part_lists_what_was_compiled_with_sizes(tmp_path, capfd):
    script = fake_build(
        tmp_path,
        """
        import json, pathlib, sys
        folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "sm_90")
        folder.mkdir(parents=True)
        entries = {"k": {"label": "attn_fwd[sm_90 bf16]", "code_bytes": 31234}}
        (folder / "MANIFEST.json").write_text(json.dumps({"entries": entries}))
        """,
    )
    assert demo.build(tmp_path / "out", script)
    shown = capfd.readouterr().out
    assert "31,234  attn_fwd[sm_90 bf16]" in shown
    assert "1 kernels in " in shown


def test_a_build_that_fails_fails_the_demo(tmp_path, monkeypatch, capfd):
    script = fake_build(tmp_path, "raise SystemExit(3)")
    monkeypatch.setattr(demo.build, "__defaults__", (script,))
    assert demo.main(["--parts", "build", "--out", str(tmp_path / "out")]) == 1
    assert "exit status 3" in capfd.readouterr().err


def test_progress_draws_a_bar_on_a_terminal_and_lines_elsewhere():
    terminal, log = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    for stream in (terminal, log):
        with Progress(50, "work", stream) as progress:
            for _ in range(50):
                progress.step("loss 1")
    assert "\r[" in terminal.getvalue()
    assert "#" * 28 + "] work 50/50" in terminal.getvalue()
    assert "\r" not in log.getvalue()
    assert len(log.getvalue().splitlines()) == 11
    assert log.getvalue().splitlines()[-1].startswith("work 50/50")
