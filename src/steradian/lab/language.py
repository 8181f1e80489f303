"""A byte-level language model, its text, and the study of which of its weights may be kept on spheres.

Optimizers that keep matrices on spheres choose them by their shape. `find_groups` knows which are invariant: in a
pre-norm transformer with QK-norm only those of queries and keys, head by head. The study compares both, under the same
tuning. An *epoch* is 100 steps here; a step takes `batch_size` pieces of `Shape.length` bytes at random places.
"""

import hashlib
import json
import lzma
import math
import shutil
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from steradian import optim
from steradian.discovery import find_groups
from steradian.groups import Groups
from steradian.lab.config import Config, match_names
from steradian.lab.fleet import POLL
from steradian.lab.results import Result, Store, claim, environment
from steradian.lab.rivals import Hyperball
from steradian.lab.study import Study, pick_device
from steradian.lab.tables import Rows, interval_rows, winners
from steradian.lab.training import compiled
from steradian.watching.watch import watch

__all__ = ["METHODS", "RATES", "Corpus", "LanguageModel", "Shape", "bits_rows", "build_corpus", "language_study"]
__all__ += ["is_text", "rate_rows"]

STEPS = 100
"""Steps of an epoch."""
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
"""The points of the tuning, the same for every method; see `_optimizers`."""
_MODEL = "bytes"  # followed by its sizes in the name of a model
_WARM_UP = 0.05  # share of the steps in which the rate rises
_SOME = 8  # batches of the validation text after each epoch; after the last one all of it is evaluated


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
        if not (folder / "meta.json").is_file():
            raise ValueError(f"root must be a folder that steradian data corpus --out wrote, got {str(folder)!r}")
        about, parts = json.loads((folder / "meta.json").read_text()), {}
        for part in ("train", "val"):
            text = lzma.decompress((folder / f"{part}.bin.xz").read_bytes())
            if hashlib.sha256(text).hexdigest() != about["sha256"][part]:
                raise ValueError(f"{folder / part}.bin.xz is damaged: its SHA-256 is not that of meta.json")
            parts[part] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return cls(about["name"], parts["train"], parts["val"], about["sha256"]["train"][:12])


def build_corpus(out: Path, source: Path | None = None) -> None:
    """Write the Python files of an environment as one text.

    All different `*.py` of 501 to 199,999 bytes in a folder, by default that of the installed packages, in the order of
    the SHA-1 of their paths, joined by a zero byte: 1 % of the files for validation, then 64 MB for training.
    """
    source, files = source or Path(sysconfig.get_paths()["purelib"]), dict[bytes, bytes]()
    paths = {path.relative_to(source).as_posix(): path for path in source.rglob("*.py") if path.is_file()}
    for relative in sorted(paths, key=lambda each: hashlib.sha1(each.encode()).digest()):
        if 500 < paths[relative].stat().st_size < 200_000:
            files.setdefault(hashlib.sha256(text := paths[relative].read_bytes()).digest(), text)
    texts, count = list(files.values()), max(1, len(files) // 100)
    if len(texts) < 2:
        raise ValueError(f"source must have at least two Python files of 501 to 199,999 bytes, got {source}")
    parts = {"train": b"\0".join(texts[count:])[:64_000_000], "val": b"\0".join(texts[:count])}
    out.mkdir(parents=True, exist_ok=True)
    for part, text in parts.items():
        (out / f"{part}.bin.xz").write_bytes(lzma.compress(text))
    about: dict[str, Any] = {"name": "python-source", "bytes": {part: len(text) for part, text in parts.items()}}
    about["sha256"] = {part: hashlib.sha256(text).hexdigest() for part, text in parts.items()}
    (out / "meta.json").write_text(json.dumps(about, indent=1))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a language model; those of the study by default, 29 million parameters."""

    blocks: int = 8  #: number of blocks
    width: int = 512  #: of the residual stream
    heads: int = 8  #: of the attention
    hidden: int = 1664  #: width of the gated layer
    length: int = 512  #: bytes that it sees
    post_norms: bool = False  #: normalize what a layer adds to the residual stream, too, as Gemma 3 does

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


def _optimizers(config: Config, groups: Groups, shape: Shape) -> list[Optimizer]:
    """The optimizers of a method.

    The rate is AdamW's, whose step has a root mean square of about 0.2 lr per entry; Muon's is scaled to the same
    (torch's "match_rms_adamw"), and what is on spheres turns by the angle of such a step at the start, 0.2 lr/σ.
    """
    matrices = {name: p for name, p in groups.params.items() if name.startswith("blocks.") and p.ndim == 2}
    fused = next(iter(matrices.values())).is_cuda
    adamw = partial(torch.optim.AdamW, betas=config.betas, fused=fused)
    muon = partial(torch.optim.Muon, momentum=config.momentum, adjust_lr_fn="match_rms_adamw")
    (on_spheres, others), made = METHODS[config.method], list[Optimizer]()
    turned: dict[str, Any] = {"lr": 0.2 * config.lr / shape.spread, "momentum": config.momentum}
    if on_spheres:
        rows = [{"params": list(matrices.values()), "rows": "tensor" if on_spheres == "all tensors" else "filter"}]
        if on_spheres == "proved rows":
            rows = [group for group in groups.param_groups() if group.get("rows") is not None]
            matrices = {name: p for name, p in matrices.items() if name not in groups.layouts}
        if "Hyperball" in config.method:
            made.append(Hyperball(rows, **turned))
        elif others == "AdamW":
            turned |= {"momentum": config.betas[0], "beta2": config.betas[1], "direction": "adam"}
            made.append(optim.Angular(rows, **turned))
        else:
            made.append(optim.Angular(rows, **turned, nesterov=True, direction="muon"))
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
    "Muon, proved rows Hyperball": ("proved rows", "Muon"),
    "AdamW, proved rows Angular": ("proved rows", "AdamW"),
    "Angular on all rows": ("all rows", ""),
    "Hyperball on all tensors": ("all tensors", ""),
}
"""By name: which matrices of the blocks are on spheres, and what steps the others. AdamW steps all other parameters.

Hyperball differs from Angular along Muon's direction in the momentum, which it does not transport.
"""

_CURVES = ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy", "test_accuracy")


def _loss(model: nn.Module, text: Tensor, starts: Tensor, length: int, precision: str) -> tuple[Tensor, Tensor]:
    """Mean loss in nats, and the share of bytes that are guessed."""
    codes = text[starts[:, None] + torch.arange(length + 1, device=text.device)].long()
    with torch.autocast(text.device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(codes[:, :-1])
    logits, wanted = logits.float().flatten(0, 1), codes[:, 1:].flatten()
    return functional.cross_entropy(logits, wanted), (logits.argmax(dim=1) == wanted).float().mean()


class _Trainer:
    """Trains networks of one shape, one after the other, with one compiled step."""

    def __init__(self, shape: Shape, corpus: Corpus, device: torch.device) -> None:
        self.shape, self.corpus, self.device = shape, corpus, device
        self.model = self._new(0)
        groups = find_groups(self.model, torch.randint(256, (2, min(16, shape.length))))
        self.groups = groups.of(self.model.to(device))
        self._train, self._val = corpus.train.to(device), corpus.val.to(device)
        self._loss = partial(compiled(_loss) if device.type == "cuda" else _loss, self.model)

    def _new(self, seed: int) -> LanguageModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LanguageModel(self.shape)

    def run(self, config: Config, record: Path | None = None) -> Result:
        """Train once, with its steps recorded in a folder if one is given."""
        began = time.monotonic()
        self.model.load_state_dict(self._new(config.seed).state_dict())
        self.model.zero_grad()
        optimizers, total = _optimizers(config, self.groups, self.shape), config.epochs * STEPS

        def factor(step: int) -> float:  # of the rate: a linear rise times a cosine
            return min(1.0, (step + 1) / (_WARM_UP * total)) * (0.5 + 0.5 * math.cos(math.pi * step / total))

        schedules = [LambdaLR(optimizer, factor) for optimizer in optimizers]
        places = np.random.Generator(np.random.Philox(key=config.seed))
        curves: dict[str, list[float]] = {name: [] for name in _CURVES}
        if record is not None:
            shutil.rmtree(record, ignore_errors=True)  # of a training that was killed
        watched = nullcontext() if record is None else watch(optimizers, self.groups, to=record, run=config.method)
        with watched, warnings.catch_warnings():
            # Of the norms of queries and keys under autocast, which have weights in float32.
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            for epoch in range(config.epochs):
                starts = places.integers(len(self._train) - self.shape.length, size=(STEPS, config.batch_size))
                sums = torch.zeros(2, device=self.device)
                for pieces in torch.from_numpy(starts).to(self.device):
                    loss, share = self._loss(self._train, pieces, self.shape.length, config.precision)
                    loss.backward()
                    for optimizer, schedule in zip(optimizers, schedules, strict=True):
                        optimizer.step()
                        optimizer.zero_grad()
                        schedule.step()
                    sums += torch.stack([loss.detach(), share]) / STEPS
                figures = [*sums.tolist(), *self._validate(config, None if epoch + 1 == config.epochs else _SOME)]
                for name, value in zip(_CURVES, [*figures, figures[-1]], strict=True):
                    curves[name].append(100 * value if name.endswith("accuracy") else value)
                if diverged := not all(map(math.isfinite, figures)):
                    break
        where = {**environment(self.device), "data": self.corpus.fingerprint}
        return Result(config, curves, diverged, 0, time.monotonic() - began, where)

    @torch.no_grad()
    def _validate(self, config: Config, batches: int | None) -> list[float]:
        """Mean loss and share of guessed bytes, over all of the validation text or some batches."""
        length = self.shape.length
        starts = torch.arange(0, len(self._val) - length, length, device=self.device)
        batch = min(config.batch_size, len(starts))
        parts = starts[: len(starts) // batch * batch].view(-1, batch)[:batches]
        figures = [torch.stack(self._loss(self._val, part, length, config.precision)) for part in parts]
        return torch.stack(figures).mean(dim=0).tolist()


def is_text(results: Iterable[Result]) -> bool:
    """Whether these are results of language models."""
    return all(result.config.model.startswith(f"{_MODEL} ") for result in results)


def bits(result: Result) -> float:
    """Bits per byte of the validation text at the end; NaN if it diverged."""
    return math.nan if result.diverged else result.curves["validation_loss"][-1] / math.log(2)


def language_study(
    shape: Shape,
    root: Path,
    study: Study,
    *,
    methods: Sequence[str] | None = None,
    rates: Sequence[float] = RATES,
    seeds: int = 5,
    say: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> bool:
    """Tune every method over the same rates, by its last validation loss, then train it with new seeds.

    Finished trainings are stored at once and never repeated, and several processes share the work. The tuning has seed
    0, and its winners have the seeds 1, 2, …; the first training of each winner is watched, and its run goes to
    `Study.work`. No training is started that would not end before the deadline; returns whether everything is finished.

    `root` is the folder of the corpus, `say` gets a line for each finished training, and `settings` are other fields of
    `Config`: epochs, batch_size, precision, …
    """
    corpus, grid = Corpus.read(root), study.tuning.store
    *sizes, post_norms = asdict(shape).values()
    model = f"{_MODEL} {'x'.join(map(str, sizes))}"
    common: dict[str, Any] = {"model": model, "data": corpus.name, "schedule": "cosine"}
    common |= {"norm": "post-norms" if post_norms else "pre-norms", "epochs": 8, "milestones": (), "batch_size": 64}
    common |= {"betas": (0.9, 0.95), "momentum": 0.95, "weight_decay": 0.1, "rest_lr": 3e-3} | settings
    trainer = cache(lambda: _Trainer(shape, corpus, pick_device(study.device)))  # made if something is left to train

    def left(configs: Sequence[Config], store: Store) -> list[Config]:
        done = store.keys()
        return [config for config in configs if config.key not in done]

    def train(configs: Sequence[Config], store: Store) -> bool:
        store.prepare()
        while waiting := left(configs, store):
            claimed = 0
            for config in waiting:
                if file := claim(study.runs / f"{study.name}-claims" / f"{config.key}.lock"):
                    with file:
                        claimed += 1
                        if left([config], store) and not train_one(config, store):
                            return False
            if not claimed:  # other processes run all that is left
                if time.monotonic() > study.deadline:
                    return False
                time.sleep(POLL)
        return True

    def train_one(config: Config, store: Store) -> bool:
        like = [r for each in (grid, study.store) for r in each.results() if r.config.column == config.column]
        expected = median(result.seconds for result in like) if like else 0.0
        if time.monotonic() + 1.3 * expected > study.deadline:
            return False
        try:
            result = trainer().run(config, study.work / config.key if config.seed == 1 else None)
        except ValueError as error:
            raise ValueError(f"{config.method} at the rate {config.lr:g}: {error}") from error
        store.add([result])
        took = f"{bits(result):.4f} bits per byte, {timedelta(seconds=round(result.seconds))}"
        say(f"{config.method}, lr {config.lr:g}, seed {config.seed}: {took}")
        return True

    taken = match_names("methods", methods, METHODS)
    points = [Config(method=method, lr=lr, **common) for lr in rates for method in taken]
    return train(points, grid) and train(winners(points, grid.results(), seeds, lambda run: -bits(run)), study.store)


bits_rows = partial(
    interval_rows, value=bits, what="bits per byte", baseline="Muon", digits=4, better="smaller", margin=None
)
"""The table of a study: bits per byte of each method, and its difference to Muon's."""


def rate_rows(results: Iterable[Result]) -> Rows:
    """The table of a tuning: bits per byte of each method at each rate."""
    found = {(result.config.method, result.config.lr): f"{bits(result):.4f}" for result in results}
    methods, rates = dict.fromkeys(method for method, _ in found), sorted({rate for _, rate in found})
    lines = [[method, *(found.get((method, rate), "") for rate in rates)] for method in methods]
    return ["bits per byte at the rate", *(f"{rate:g}" for rate in rates)], lines
