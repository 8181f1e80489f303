"""A byte-level language model, and the study of which of its weights may be kept on spheres.

Optimizers that keep matrices on spheres choose them by their shape. `find_groups` knows which are invariant: in a
pre-norm transformer with QK-norm only those of queries and keys, head by head. The study compares both, under the same
tuning. An *epoch* is 100 steps here; a step takes `batch_size` pieces of `Shape.length` bytes at random places.
"""

import hashlib
import json
import lzma
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from steradian import optim
from steradian.discovery import find_groups
from steradian.groups import Groups
from steradian.lab.config import Config, match_names
from steradian.lab.intervals import compare
from steradian.lab.results import Result, Store, environment
from steradian.lab.rivals import Hyperball
from steradian.lab.study import Study, pick_device
from steradian.lab.tables import Rows, duration
from steradian.lab.training import compiled
from steradian.watching.watch import watch

__all__ = ["METHODS", "RATES", "Corpus", "LanguageModel", "Shape", "bits_rows", "build_corpus", "language_study"]

STEPS = 100
"""Steps of an epoch."""
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
"""The points of the tuning, the same for every method; see `_optimizers`."""
_WARM_UP = 0.05  # share of the steps in which the rate rises
_SOME = 8  # batches of the validation text after each epoch; after the last one all of it is evaluated


# The network


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a language model; those of the study by default, 29 million parameters.

    Attributes:
        blocks: number of blocks.
        width: of the residual stream.
        heads: of the attention.
        hidden: width of the gated layer.
        length: bytes that it sees.
        post_norms: normalize what a layer adds to the residual stream, too, as Gemma 3 does.
    """

    blocks: int = 8
    width: int = 512
    heads: int = 8
    hidden: int = 1664
    length: int = 512
    post_norms: bool = False

    @property
    def name(self) -> str:
        """The sizes as the name of a network."""
        return "bytes " + "x".join(str(size) for name, size in asdict(self).items() if name != "post_norms")

    @property
    def norm(self) -> str:
        """Where it normalizes, as `Config.norm`."""
        return "post-norms" if self.post_norms else "pre-norms"

    @property
    def spread(self) -> float:
        """Standard deviation of the entries of a matrix at the start."""
        return 0.5 / math.sqrt(self.width)


class _Block(nn.Module):
    """Causal attention with RoPE and QK-norm, then SwiGLU, each after an RMSNorm and, if asked for, before another."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, width, bias=False)
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(width // shape.heads, eps=1e-6) for _ in range(2))
        self.post1, self.post2 = (nn.RMSNorm(width, eps=1e-6) if shape.post_norms else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        split = (*x.shape[:2], self.heads, -1)
        y = self.norm1(x)
        q, k, v = (layer(y).view(split).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = _turned(self.q_norm(q), turns), _turned(self.k_norm(k), turns)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.post1(self.o(y.transpose(1, 2).reshape(x.shape)))
        y = self.norm2(x)
        return x + self.post2(self.down(functional.silu(self.gate(y)) * self.up(y)))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """RoPE: pairs of entries, half a head apart, turned by angles that grow with the place."""
    (cos, sin), (a, b) = turns[:, : x.shape[-2]].to(x.dtype), x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class LanguageModel(nn.Module):
    """Bytes to logits of the next byte.

    >>> shape = Shape(blocks=1, width=16, heads=2, hidden=24, length=8)
    >>> LanguageModel(shape)(torch.zeros(2, 8, dtype=torch.long)).shape
    torch.Size([2, 8, 256])
    """

    turns: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.readout = nn.Linear(shape.width, 256, bias=False)
        size = shape.width // shape.heads
        angles = torch.arange(shape.length)[:, None] * 10_000 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=shape.spread)

    def forward(self, codes: Tensor) -> Tensor:
        """Logits of the byte after each, (batch, length, 256)."""
        x = self.embedding(codes)
        for block in self.blocks:
            x = block(x, self.turns)
        return self.readout(self.norm(x))


# The text


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and to validate on, uint8."""

    name: str
    train: Tensor
    val: Tensor
    fingerprint: str

    @classmethod
    def read(cls, folder: Path) -> "Corpus":
        """Read a folder that `build_corpus` wrote, and check its checksums."""
        about, parts = json.loads((folder / "meta.json").read_text()), {}
        for part in ("train", "val"):
            text = lzma.decompress((folder / f"{part}.bin.xz").read_bytes())
            if hashlib.sha256(text).hexdigest() != about["sha256"][part]:
                raise ValueError(f"{folder / part}.bin.xz is damaged: its SHA-256 is not that of meta.json")
            parts[part] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return cls(about["name"], parts["train"], parts["val"], about["sha256"]["train"][:12])


def build_corpus(out: Path, source: Path | None = None, *, name: str = "python-source", most: int = 64_000_000) -> None:
    """Write the Python files of an environment as one text.

    All *.py of 501 to 199,999 bytes, one of each content, in the order of the SHA-1 of their relative path, joined by a
    zero byte. The first 1 % of the files are for validation; of the others the first `most` bytes are for training.

    Args:
        out: folder to write.
        source: folder of the files; None: the packages of this environment.
        name: of the corpus.
        most: bytes to train on.
    """
    source, files = source or Path(sysconfig.get_paths()["purelib"]), dict[bytes, bytes]()
    paths = {path.relative_to(source).as_posix(): path for path in source.rglob("*.py") if path.is_file()}
    for relative in sorted(paths, key=lambda each: hashlib.sha1(each.encode()).digest()):
        if 500 < paths[relative].stat().st_size < 200_000:
            files.setdefault(hashlib.sha256(text := paths[relative].read_bytes()).digest(), text)
    texts, count = list(files.values()), max(1, len(files) // 100)
    if len(texts) < 2:
        raise ValueError(f"source must have at least two Python files of 501 to 199,999 bytes, got {source}")
    parts = {"train": b"\0".join(texts[count:])[:most], "val": b"\0".join(texts[:count])}
    out.mkdir(parents=True, exist_ok=True)
    for part, text in parts.items():
        (out / f"{part}.bin.xz").write_bytes(lzma.compress(text))
    sums = {part: hashlib.sha256(text).hexdigest() for part, text in parts.items()}
    sizes = {part: len(text) for part, text in parts.items()}
    (out / "meta.json").write_text(json.dumps({"name": name, "bytes": sizes, "sha256": sums}, indent=1))


# The methods: what steps the matrices of the blocks; AdamW steps embedding, readout and gains in all of them


def _optimizers(config: Config, groups: Groups, shape: Shape) -> list[Optimizer]:
    """The optimizers of a method.

    The rate is AdamW's, whose step has a root mean square of about 0.2 lr per entry; Muon's is scaled to the same
    (torch's "match_rms_adamw"), and what is on spheres turns by the angle of such a step at the start, 0.2 lr/σ.
    """
    matrices = {name: p for name, p in groups.params.items() if name.startswith("blocks.") and p.ndim == 2}
    fused = next(iter(matrices.values())).is_cuda
    adamw = partial(torch.optim.AdamW, betas=config.betas, fused=fused)
    muon = partial(torch.optim.Muon, momentum=config.momentum, adjust_lr_fn="match_rms_adamw")
    angle, momentum = 0.2 * config.lr / shape.spread, config.momentum
    angular = partial(optim.Angular, lr=angle, momentum=momentum, nesterov=True, direction="muon")
    if config.method == "AdamW, proved rows Angular":
        angular = partial(optim.Angular, lr=angle, momentum=config.betas[0], beta2=config.betas[1], direction="adam")
    on_spheres, others = METHODS[config.method]
    made: list[Optimizer] = []
    if on_spheres == "proved rows":
        made.append(angular([group for group in groups.param_groups() if group.get("rows") is not None]))
        matrices = {name: p for name, p in matrices.items() if name not in groups.layouts}
    elif on_spheres == "all rows":
        made.append(angular([{"params": list(matrices.values()), "rows": "filter"}]))
    elif on_spheres == "all tensors":
        made.append(Hyperball([{"params": list(matrices.values()), "rows": "tensor"}], lr=angle, momentum=momentum))
    if others:
        make: Callable[..., Optimizer] = adamw if others == "AdamW" else muon
        made.append(make(list(matrices.values()), lr=config.lr, weight_decay=config.weight_decay))
    stepped = {id(p) for optimizer in made for group in optimizer.param_groups for p in group["params"]}
    rest = [p for p in groups.params.values() if id(p) not in stepped]
    return [*made, adamw(rest, lr=config.rest_lr or config.lr, weight_decay=0.0)]


METHODS = {
    "AdamW": ("", "AdamW"),
    "Muon": ("", "Muon"),
    "Muon, proved rows Angular": ("proved rows", "Muon"),
    "AdamW, proved rows Angular": ("proved rows", "AdamW"),
    "Angular on all rows": ("all rows", ""),
    "Hyperball on all tensors": ("all tensors", ""),
}
"""By name: which matrices are on spheres, and what steps the others."""


# A training


def _loss(model: nn.Module, text: Tensor, starts: Tensor, length: int, half: bool) -> tuple[Tensor, Tensor]:
    """Mean loss in nats, and number of bytes that were guessed."""
    codes = text[starts[:, None] + torch.arange(length + 1, device=text.device)].long()
    with torch.autocast(text.device.type, torch.bfloat16, enabled=half):
        logits = model(codes[:, :-1])
    logits, wanted = logits.float().flatten(0, 1), codes[:, 1:].flatten()
    return functional.cross_entropy(logits, wanted), (logits.argmax(dim=1) == wanted).sum()


@dataclass
class _Trainer:
    """Trains networks of one shape, one after the other, with one compiled step."""

    shape: Shape
    corpus: Corpus
    device: torch.device
    model: LanguageModel = field(init=False)
    groups: Groups = field(init=False)

    def __post_init__(self) -> None:
        model = self._new(0)
        found = find_groups(model, torch.randint(256, (2, min(16, self.shape.length))))
        self.model = model.to(self.device)
        self.groups = found.of(self.model)
        self._text = {part: getattr(self.corpus, part).to(self.device) for part in ("train", "val")}
        self._loss = compiled(_loss) if self.device.type == "cuda" else _loss

    def _new(self, seed: int) -> LanguageModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LanguageModel(self.shape)

    def run(self, config: Config, record: Path | None = None) -> Result:
        """Train once, with its steps recorded in a folder if one is given."""
        began, length = time.monotonic(), self.shape.length
        fresh = dict(self._new(config.seed).named_parameters())
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(fresh[name])
                param.grad = None
        optimizers = _optimizers(config, self.groups, self.shape)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["initial_lr"] = group["lr"]
        places = np.random.Generator(np.random.Philox(key=config.seed))
        half, total = config.precision == "bf16", config.epochs * STEPS
        curves: dict[str, list[float]] = {f"{part}_{what}": [] for part, what in _CURVES}
        with nullcontext() if record is None else watch(optimizers, self.groups, to=record):
            for epoch in range(config.epochs):
                starts = places.integers(len(self.corpus.train) - length, size=(STEPS, config.batch_size))
                sums, pieces = torch.zeros(2, device=self.device), torch.from_numpy(starts).to(self.device)
                for step in range(epoch * STEPS, (epoch + 1) * STEPS):
                    warm = min(1.0, (step + 1) / (_WARM_UP * total))
                    factor = warm * (0.5 + 0.5 * math.cos(math.pi * step / total))
                    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                        group["lr"] = group["initial_lr"] * factor
                    loss, hits = self._loss(self.model, self._text["train"], pieces[step % STEPS], length, half)
                    loss.backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    sums += torch.stack([loss.detach() / STEPS, hits / (STEPS * config.batch_size * length)])
                last = epoch + 1 == config.epochs
                figures = [*sums.tolist(), *self._validate(config.batch_size, half, None if last else _SOME)]
                for (part, what), value in zip(_CURVES, [*figures, figures[-1]], strict=True):
                    curves[f"{part}_{what}"].append(100 * value if what == "accuracy" else value)
                if diverged := not all(map(math.isfinite, figures)):
                    break
        seconds = time.monotonic() - began
        where = {**environment(self.device), "data": self.corpus.fingerprint}
        return Result(config, curves, diverged, 0, seconds, where)

    @torch.no_grad()
    def _validate(self, batch: int, half: bool, batches: int | None) -> list[float]:
        """Mean loss and share of guessed bytes, over all of the validation text or some batches."""
        text, length = self._text["val"], self.shape.length
        starts = torch.arange(0, len(text) - length, length, device=self.device)
        parts = starts[: len(starts) // batch * batch].view(-1, batch)[:batches]
        figures = torch.zeros(2, device=self.device)
        for part in parts:
            loss, hits = self._loss(self.model, text, part, length, half)
            figures += torch.stack([loss, hits / (batch * length)])
        return (figures / len(parts)).tolist()


_CURVES = (
    ("train", "loss"), ("train", "accuracy"), ("validation", "loss"), ("validation", "accuracy"), ("test", "accuracy"),
)  # fmt: skip


# The study


def bits(result: Result) -> float:
    """Bits per byte of the validation text at the end; NaN if it diverged."""
    return math.nan if result.diverged else result.curves["validation_loss"][-1] / math.log(2)


def language_study(
    shape: Shape,
    root: Path,
    *,
    methods: Sequence[str] | None = None,
    rates: Sequence[float] = RATES,
    seeds: int = 5,
    device: str | None = None,
    seconds: float | None = None,
    study: Study | None = None,
    record: bool = True,
    say: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> bool:
    """Tune every method over the same rates, by its last validation loss, then train it with new seeds.

    Finished trainings are stored at once and never repeated.

    Args:
        shape: the network.
        root: folder of the corpus.
        methods: names in `METHODS`; None: all.
        rates: the points of the tuning.
        seeds: trainings of each winner, with the seeds 1, 2, …; the tuning has seed 0.
        device: where.
        seconds: start no training that would not end in this time.
        study: where the files go.
        record: watch the first training of each winner; the run goes to `Study.work`.
        say: is told what is finished.
        **settings: fields of `Config`: epochs, batch_size, precision, …

    Returns:
        Whether everything is finished.
    """
    began, where, study = time.monotonic(), pick_device(device), study or Study("language")
    corpus, grid = Corpus.read(root), Store(study.results / f"{study.name}-grid.json")
    common: dict[str, Any] = {"model": shape.name, "norm": shape.norm, "data": corpus.name, "schedule": "cosine"}
    common |= {"betas": (0.9, 0.95), "momentum": 0.95, "weight_decay": 0.1, "rest_lr": 3e-3}
    common |= {"epochs": 8, "milestones": (), "batch_size": 64} | settings
    taken = match_names("methods", methods, METHODS)
    trainer: list[_Trainer] = []

    def train(configs: Sequence[Config], store: Store) -> bool:
        for config in configs:
            known = {result.config.key: result for result in store.results()}
            if config.key in known:
                continue
            took = [
                r.seconds for r in known.values() if r.config.model == config.model and r.config.norm == config.norm
            ]
            left = math.inf if seconds is None else seconds - (time.monotonic() - began)
            if left < 1.3 * (median(took) if took else 0):
                return False
            if not trainer:
                trainer.append(_Trainer(shape, corpus, where))
            folder = study.work / config.key if record and config.seed == 1 else None
            store.add([result := trainer[0].run(config, folder)])
            say(
                f"{config.method}, lr {config.lr:g}, seed {config.seed}: {bits(result):.4f}, {duration(result.seconds)}"
            )
        return True

    points = [Config(method=method, lr=lr, **common) for lr in rates for method in taken]
    if not train(points, grid):
        return False
    tried = {result.config.key: result for result in grid.results()}
    best = []
    for method in taken:
        of_method = [tried[point.key] for point in points if point.method == method]
        if alive := [result for result in of_method if not result.diverged]:
            best.append(min(alive, key=bits).config)
    return train([replace(config, seed=seed) for seed in range(1, seeds + 1) for config in best], study.store)


def bits_rows(results: Sequence[Result], *, baseline: str = "Muon") -> Rows:
    """Bits per byte of each method, with 95 % intervals, and its difference to one of them."""
    heads = [
        "network",
        "method",
        "lr",
        "bits per byte",
        "seeds",
        f"− {baseline}",
        "95 % interval",
        "p (Holm)",
        "that is",
    ]
    lines = []
    for kind in sorted({(r.config.model, r.config.norm, r.config.epochs) for r in results}, reverse=True):
        chosen: dict[str, list[Result]] = {method: [] for method in METHODS}
        for result in results:
            if (result.config.model, result.config.norm, result.config.epochs) == kind:
                chosen[result.config.method].append(result)
        samples = {m: [bits(r) for r in runs if not r.diverged] for m, runs in chosen.items() if runs}
        compared = compare(samples, baseline, digits=4, better="smaller")
        for method, row in compared.items():
            rate = f"{chosen[method][0].config.lr:g}"
            lines.append([f"{kind[0]}, {kind[1]}", method, rate, *row])
    return heads, lines
