"""Trains a small character-level GPT twice, with flashattn and with PyTorch's attention, and compares the losses.

    python examples/train_char_gpt.py --out demo_out

The text is Python's own documentation, which every CPython carries (`pydoc_data.topics`). Both runs have the same seed.
On a CPU everything is float32; on a GPU matrix products and attention are bfloat16.
Exit status 1 if the loss curves differ by more than 1e-3 (float32) or 0.05 (bfloat16).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from progress import Progress
from torch import nn

LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""The largest difference of loss that rounding explains."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model and its training. A point of the loss curve is the mean over `average` steps."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    average: int
    learning_rate: float
    seed: int = 0


CPU = Sizes(layers=2, width=96, heads=3, context=96, batch=16, steps=600, average=30, learning_rate=4e-3)
GPU = Sizes(layers=4, width=256, heads=4, context=256, batch=32, steps=600, average=30, learning_rate=1e-3)


def flash_attention(q, k, v):
    """Causal attention of (batch, seqlen, heads, head_dim) tensors."""
    from flashattn import flash_attn_func

    return flash_attn_func(q, k, v, causal=True)


def torch_attention(q, k, v):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


ATTENTIONS = {"flashattn": flash_attention, "torch": torch_attention}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a skip connection."""

    def __init__(self, width: int, heads: int, attend: Callable):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):  # [batch, seqlen, width]
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.project(self.attend(q, k, v).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class CharGPT(nn.Module):
    """Logits of the next character at every place."""

    def __init__(self, characters: int, sizes: Sizes, attend: Callable):
        super().__init__()
        self.token, self.place = nn.Embedding(characters, sizes.width), nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes.width, sizes.heads, attend) for _ in range(sizes.layers)))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, characters)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids):  # [batch, seqlen]
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Corpus:
    """A text as character ids: nine tenths to train on, the rest held out."""

    def __init__(self, text: str, device: str):
        self.characters = sorted(set(text))
        index = {character: i for i, character in enumerate(self.characters)}
        ids = torch.tensor([index[character] for character in text], device=device)
        self.train, self.held_out = ids.split([len(ids) * 9 // 10, len(ids) - len(ids) * 9 // 10])

    def decode(self, ids) -> str:
        return "".join(self.characters[i] for i in ids)


def batch_of(ids, sizes: Sizes, generator):
    """Random windows of the text [batch, context], and the same shifted by one character."""
    starts = torch.randint(len(ids) - sizes.context, (sizes.batch, 1), generator=generator).to(ids.device)
    windows = ids[starts + torch.arange(sizes.context + 1, device=ids.device)]
    return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class Trained:
    model: CharGPT
    curve: list[float]
    held_out_loss: float


def train(name: str, attend: Callable, corpus: Corpus, sizes: Sizes, dtype: torch.dtype) -> Trained:
    """Train from the sizes' seed; the same seed gives the same weights and batches whatever `attend` is."""
    device = corpus.train.device.type
    torch.manual_seed(sizes.seed)
    model = CharGPT(len(corpus.characters), sizes, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.learning_rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(sizes.seed)

    def loss_of(ids):
        inputs, targets = batch_of(ids, sizes, generator)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    losses = []
    with Progress(sizes.steps, f"training with {name}") as progress:
        for step in range(sizes.steps):
            loss = loss_of(corpus.train)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = sizes.learning_rate * min(1, (step + 1) / 50)
            optimizer.step()
            losses.append(loss.detach())
            progress.step(f"loss {loss.item():.3f}" if (step + 1) % 10 == 0 or device == "cpu" else "")
    with torch.no_grad():
        held_out = torch.stack([loss_of(corpus.held_out) for _ in range(8)]).mean().item()
    points = torch.stack(losses).split(sizes.average)
    return Trained(model, [part.mean().item() for part in points], held_out)


@torch.no_grad()
def sample(
    trained: Trained, corpus: Corpus, sizes: Sizes, length: int, dtype: torch.dtype, prompt: str = "The "
) -> str:
    """`prompt` and `length` more characters, drawn from the model."""
    device = corpus.train.device.type
    generator = torch.Generator().manual_seed(sizes.seed)
    start = [corpus.characters.index(character) for character in prompt]
    ids = torch.tensor([start], device=device)
    for _ in range(length):
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            logits = trained.model(ids[:, -sizes.context :])[0, -1]
        chances = (logits.float() / 0.8).softmax(-1).cpu()
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator).view(1, 1).to(device)], 1)
    return corpus.decode(ids[0].tolist())


def print_curves(curves: Mapping[str, list[float]], sizes: Sizes) -> float:
    """Print the curves side by side; returns their largest difference."""
    names = list(curves)
    print("\nmean loss per character (nats) over the steps up to")
    print(f"{'step':>6}  " + "  ".join(f"{name:>10}" for name in names) + f"  {'difference':>10}")
    largest = 0.0
    for i, values in enumerate(zip(*curves.values(), strict=True)):
        # A NaN is a difference too, and max() would lose it.
        difference = max(values) - min(values) if all(value == value for value in values) else float("inf")
        largest = max(largest, difference)
        step = min(sizes.steps, (i + 1) * sizes.average)
        print(f"{step:6d}  " + "  ".join(f"{value:10.5f}" for value in values) + f"  {difference:10.1e}")
    return largest


def plot_curves(curves: Mapping[str, list[float]], sizes: Sizes, path: Path) -> str:
    """Draw the curves; returns a sentence that says where, or why not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for (name, curve), style in zip(curves.items(), ("-", "--"), strict=False):
        steps = [min(sizes.steps, (i + 1) * sizes.average) for i in range(len(curve))]
        axis.plot(steps, curve, style, label=name, linewidth=2)
    axis.set(xlabel="training step", ylabel="loss (nats per character)", title="Character GPT, same seed")
    axis.grid(alpha=0.3)
    axis.legend(title="attention")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return f"plot: {path}"


def parse_arguments(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for the plot and the losses")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    for name in ("layers", "width", "heads", "context", "batch", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int, help=f"default {getattr(CPU, name)}, on a GPU {getattr(GPU, name)}")
    parser.add_argument("--sample", type=int, default=400, metavar="CHARACTERS", help="length of the text at the end")
    return parser.parse_args(argv)


def chosen_sizes(chosen: argparse.Namespace, device: str) -> Sizes:
    defaults = vars(CPU) if device == "cpu" else vars(GPU)
    given = {name: getattr(chosen, name) for name in defaults if getattr(chosen, name, None) is not None}
    return Sizes(**{**defaults, **given})


def main(argv=None, attentions: Mapping[str, Callable] = ATTENTIONS) -> int:
    """Train with each of `attentions` and compare. Returns the exit status."""
    chosen = parse_arguments(argv)
    device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = chosen_sizes(chosen, device)
    corpus = Corpus("".join(topics.topics.values()), device)
    print(
        f"{len(corpus.train) + len(corpus.held_out):,} characters; {sizes.layers} layers of width {sizes.width}, ",
        end="",
    )
    print(f"context {sizes.context}, {sizes.steps} steps of {sizes.batch}; {dtype} on {device}", flush=True)
    trained = {name: train(name, attend, corpus, sizes, dtype) for name, attend in attentions.items()}
    curves = {name: result.curve for name, result in trained.items()}
    difference, limit = print_curves(curves, sizes), LIMITS[dtype]
    print("held-out loss: " + ", ".join(f"{name} {result.held_out_loss:.4f}" for name, result in trained.items()))
    chosen.out.mkdir(parents=True, exist_ok=True)
    report = {"sizes": vars(sizes), "curves": curves, "largest_difference": difference, "limit": limit}
    (chosen.out / "losses.json").write_text(json.dumps(report, indent=1) + "\n")
    print(plot_curves(curves, sizes, chosen.out / "losses.png"))
    first = next(iter(trained))
    print(
        f"\nwritten by the model trained with {first}:\n{sample(trained[first], corpus, sizes, chosen.sample, dtype)}\n"
    )
    if difference <= limit:
        print(f"largest difference {difference:.1e}, within {limit:g}: the curves agree")
        return 0
    print(f"largest difference {difference:.1e}, above {limit:g}: the curves DIFFER")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
