"""Which share of the weights is invariant, and how many pairs there are, by architecture.

    python benchmarks/coverage.py

Runs find_groups on a small model of each architecture, from transformers where it has one, and writes
results/coverage.json and docs/coverage.md. Widths and vocabularies are small, so that shares are those of the blocks
more than those of the embeddings.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from steradian.discovery import find_groups
from steradian.groups import Groups
from steradian.lab.models import vgg16

import harness
from models import Attention, resnet18, vit

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coverage.md"
WIDTH, TOKENS = 64, 256


# Architectures that no package here has


class DiTBlock(Attention):
    """A transformer block whose normalizations are shifted, scaled and gated by a condition, from a gate of zero on."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.condition = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.condition.weight)
        nn.init.zeros_(self.condition.bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Two residual steps."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(functional.silu(c))[:, None].chunk(6, dim=2)
        x = x + gate1 * self.attend(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer on latents of 16 × 16: patches, time and class as the condition."""

    def __init__(self, width: int = WIDTH, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(4, width, 2, 2), nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.norm, self.shift_scale = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, 2 * 2 * 4)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        """The noise in each patch."""
        waves = time[:, None] * torch.exp(-math.log(1e4) * torch.arange(16, dtype=time.dtype) / 16)
        c = self.time(torch.cat([waves.sin(), waves.cos()], 1)) + self.classes(label)
        x = self.patches(x).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.shift_scale(functional.silu(c))[:, None].chunk(2, dim=2)
        return self.out(self.norm(x) * (1 + scale) + shift)


def double(channels: int, out: int) -> nn.Sequential:
    """Two convolutions, each with group normalization and ReLU."""
    sizes = [(channels, out), (out, out)]
    parts = [(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU()) for a, b in sizes]
    return nn.Sequential(*(layer for part in parts for layer in part))


class UNet(nn.Module):
    """Three resolutions, with the features of each beside what comes back from the next."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([double(3, width), double(width, 2 * width), double(2 * width, 4 * width)])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * k * width, k * width, 2, 2) for k in (2, 1))
        self.up = nn.ModuleList(double(2 * k * width, k * width) for k in (2, 1))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """An image of the same size."""
        kept = []
        for k, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if k else x)
            kept.append(x)
        for grow, up, beside in zip(self.grow, self.up, kept[-2::-1], strict=True):
            x = up(torch.cat([grow(x), beside], 1))
        return self.out(x)


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last dimension."""
    return functional.normalize(x, dim=-1)


class NGPTBlock(nn.Module):
    """Attention and SwiGLU between points of the sphere: queries, keys and the output of each are normalized."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, nn.Parameter(torch.ones(heads, 1, width // heads))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)
        self.steps = nn.Parameter(torch.full((2, width), 0.05))

    def forward(self, x: Tensor) -> Tensor:
        """Two steps on the sphere, towards what attention and the MLP propose."""
        q, k, v = (part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self.scale * unit(q), self.scale * unit(k)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=math.sqrt(q.shape[3]))
        x = unit(x + self.steps[0] * (unit(self.o(a.transpose(1, 2).flatten(2))) - x))
        return unit(x + self.steps[1] * (unit(self.down(functional.silu(self.gate(x)) * self.up(x))) - x))


class NGPT(nn.Module):
    """A normalized GPT. That it normalizes its matrices after each step is no part of the function."""

    def __init__(self, width: int = WIDTH, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(TOKENS, width), nn.Linear(width, TOKENS, bias=False)
        self.blocks = nn.Sequential(*(NGPTBlock(width, heads) for _ in range(depth)))
        self.scale = nn.Parameter(torch.ones(TOKENS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        return self.scale * self.head(self.blocks(unit(self.tokens(tokens))))


# The table


def language(kind: str, **settings: Any) -> tuple[nn.Module, Tensor]:
    """A language model of transformers and a batch of tokens."""
    sizes = {"vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 3}
    grouped = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": WIDTH // 4}
    sizes |= {"GPT2": {}, "Falcon": {"num_attention_heads": 4, "num_kv_heads": 2}}.get(kind, grouped)
    sizes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{'Gemma3Text' if kind == 'Gemma3' else kind}Config")(**sizes | settings)
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    return model, torch.randint(TOKENS, (8, 64))


def images(model: nn.Module, size: int = 32) -> tuple[nn.Module, Tensor]:
    return model, torch.randn(8, 3, size, size)


def vision(kind: str, **settings: Any) -> tuple[nn.Module, Tensor]:
    """A classifier of transformers and a batch of images."""
    config = getattr(transformers, f"{kind}Config")(num_labels=10, **settings)
    return images(getattr(transformers, f"{kind}ForImageClassification")(config), 64)


def mamba() -> tuple[nn.Module, Tensor]:
    config = transformers.MambaConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.MambaForCausalLM(config), torch.randint(TOKENS, (8, 24))


def dit() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    return DiT(), torch.randn(8, 4, 16, 16), torch.rand(8), torch.randint(10, (8,))


ARCHITECTURES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "ResNet": lambda: images(resnet18(width=16)),
    "VGG": lambda: images(vgg16(width=16)),
    "ConvNeXt": partial(vision, "ConvNext", hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 2, 1]),
    "ViT": lambda: images(vit(WIDTH, 3, 4, classes=10), 224),
    "SwinV2": partial(
        vision,
        "Swinv2",
        image_size=64,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
    ),
    "GPT-2": partial(language, "GPT2", n_head=4, n_positions=64),
    "GPT-NeoX": partial(language, "GPTNeoX"),
    "Bloom": partial(language, "Bloom", n_head=4),
    "Falcon": partial(language, "Falcon", new_decoder_architecture=True),
    "Llama": partial(language, "Llama"),
    "Qwen3": partial(language, "Qwen3"),
    "Gemma 3": partial(language, "Gemma3"),
    "OLMo2": partial(language, "Olmo2"),
    "Mixtral": partial(language, "Mixtral", num_local_experts=4),
    "Mamba": mamba,
    "DiT": dit,
    "UNet with GN": lambda: images(UNet()),
    "nGPT": lambda: (NGPT(), torch.randint(TOKENS, (8, 64))),
}


def share(groups: Groups, names: set[str]) -> float:
    """Per cent of a model's numbers that are in these parameters."""
    total = sum(param.numel() for param in groups.params.values())
    return 100 * sum(groups.params[name].numel() for name in names) / total


def reasons(groups: Groups) -> str:
    """The kinds of layers that make most numbers invariant."""
    sizes: Counter[str] = Counter()
    for group in groups.groups:
        kind = "unknown" if group.reason.startswith("unknown") else group.reason.rpartition(" (")[2].rstrip(")")
        sizes[kind] += group.n_rows * group.size
    return ", ".join(kind for kind, _ in sizes.most_common(3))


def main() -> None:
    columns = ("architecture", "weights", "invariant", "rows", "with facts", "because of", "pairs", "in pairs", "notes")
    table = harness.Table(*columns)
    for name, build in ARCHITECTURES.items():
        torch.manual_seed(0)
        model, *inputs = build()
        groups = find_groups(model, *inputs)
        found, facts = set(groups.layouts), {n for fact in groups.facts for n in fact.names}
        paired = {n for pair in groups.pairs for n in (*pair.a, *pair.b)}
        table.add(
            name,
            sum(param.numel() for param in groups.params.values()),
            share(groups, found),
            sum(group.n_rows for group in groups.groups),
            share(groups, found | facts),
            reasons(groups),
            sum(pair.n for pair in groups.pairs),
            share(groups, paired),
            groups.notes,
        )
        print(f"{name}\n{groups}\n")
    harness.write("coverage", table)
    lines = [
        f"| {row['architecture']} | {row['weights']:,} | {row['invariant']:.1f} % | {row['rows']:,} | "
        f"{row['because of'] or '–'} | {row['with facts']:.1f} % | {row['pairs']:,} | {row['in pairs']:.1f} % |"
        for row in table.rows
    ]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n" + FOOT + surveyed(), encoding="utf-8")


def surveyed() -> str:
    """The section on `transformers_survey.py`, from its results."""
    survey = json.loads((harness.RESULTS / "transformers.json").read_text())
    lines = []
    for task in dict.fromkeys(record["task"] for record in survey["types"]):
        of_task = [record for record in survey["types"] if record["task"] == task]
        done = [record for record in of_task if "seconds" in record]
        found = [record["invariant"] for record in done if record["rows"]]
        lines.append(
            f"| {task.lower().replace('_', ' ')} | {len(of_task)} | {len(done)} | {len(found)} | "
            f"{statistics.median(found):.1f} % | {sum(record['pairs'] > 0 for record in done)} | "
            f"{statistics.median(record['seconds'] for record in done):.1f} s |"
        )
    return SURVEYED.format(survey["transformers"]) + "\n".join(lines) + "\n"


HEAD = """# Which architectures have invariant weights

`python benchmarks/coverage.py` runs `find_groups` on a small model of each architecture and writes this page and
`results/coverage.json`. Models are those of transformers where it has one, otherwise they are in `benchmarks/` and the
lab. Widths and vocabularies are small, so that shares are those of the blocks more than those of embeddings and heads.

- **invariant**: the share of all numbers that are in proved rows, the number of rows, and the layers that make them so.
  "unknown" is a normalization that is a function and not a layer.
- **with facts**: the share if invariant sets count too that are not given to optimizers, such as everything that writes
  to a residual stream in front of a final normalization.
- **pairs**: how many pairs $(a, b)$ have $f(\\alpha a, b/\\alpha) = f(a, b)$, and the share of numbers that
  are in some pair.

| architecture | weights | invariant | rows | because of | with facts | pairs | in pairs |
|---|---:|---:|---:|---|---:|---:|---:|
"""

FOOT = """
What is missing from the table, by hand:

- **Mamba.** The rows of `in_proj` that feed the convolution pair with its filters, the rows of `x_proj` for the time
  step with the columns of `dt_proj`, and those for B with those for C. The activations behind the convolution and on
  the gate end every other pair of single channels: neither the gate's rows of `in_proj` nor D have one with the columns
  of `out_proj`. One more is exact but not listed: all rows for C and all of D together, against all of `out_proj`.
- **DiT.** What writes to the residual stream is jointly invariant because of the last normalization. The rows of the
  condition that make a gate pair with the rows of the layer that it multiplies; these are exact but not listed. Shifts
  and scales ($1 + s$) have no pairs.
- **Bloom, Falcon, Mamba and GPT-2** give the embedding to the head too, so that the last gain has no pair with it.
"""

SURVEYED = """
## All types of transformers

`python benchmarks/transformers_survey.py` runs `find_groups` on a small random model of every type that transformers
{} has for five tasks (`results/transformers.json`). Types that no generic small config or batch suits are not
inspected. The share is the median over types with invariant rows.

| task | types | inspected | with invariant rows | share | with pairs | median time |
|---|---:|---:|---:|---:|---:|---:|
"""


if __name__ == "__main__":
    main()
