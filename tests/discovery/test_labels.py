"""The hand labels of `cases`, proved in float64 by brute force: scale and see whether the output moves."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case

SEEDS = (0, 1)
SAME = 1e-6
"""Relative change of the output up to which it counts as unchanged; a real change is far above `MOVED`."""
MOVED = 1e-5
NEARLY = 0.02
"""Sets whose slopes cancel up to this are scaled and tested; the others cannot be invariant."""
LARGEST_SET = 4

Counts = tuple[int, ...]


class Oracle:
    """A case's model at a generic point: float64, tiny ε, training mode, every trainable entry moved."""

    def __init__(self, case: Case, seed: int) -> None:
        torch.manual_seed(seed)
        model = case.build()
        args, kwargs = case.inputs()
        self.model = getattr(model, "_orig_mod", model).double().train()
        self.args, self.kwargs = _double(args), _double(kwargs)
        for module in self.model.modules():
            if hasattr(module, "eps"):
                module.eps = 1e-12
        self.parameters = dict(self.model.named_parameters())
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        with torch.no_grad():
            for p in self.trainable.values():
                p.mul_(1 + 0.2 * torch.randn_like(p)).add_(0.1 * torch.randn_like(p))
        self.state = {name: t.detach().clone() for name, t in self._tensors()}
        self.generator = torch.Generator().manual_seed(seed)
        self.start = self.output()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def _restore(self) -> None:
        with torch.no_grad():
            for name, t in self._tensors():
                t.copy_(self.state[name])

    def _forward(self) -> list[Tensor]:
        torch.default_generator.manual_seed(7)  # torch.manual_seed takes as long as a small model
        return [t for t in _flat(self.model(*self.args, **self.kwargs)) if t.requires_grad]

    def output(self, factors: dict[str, Tensor] | None = None) -> list[Tensor]:
        """The outputs when parameters are multiplied by these factors."""
        with torch.no_grad():
            for name, factor in (factors or {}).items():
                self.parameters[name].mul_(factor)
        try:
            return [t.detach().clone() for t in self._forward()]
        finally:
            self._restore()

    def change(self, factors: dict[str, Tensor]) -> float:
        """Largest relative change of an output under these factors."""
        pairs = zip(self.output(factors), self.start, strict=True)
        return max(float((new - old).norm() / old.norm()) for new, old in pairs)

    def factors(self, names: Iterable[str], counts: Counts) -> dict[str, Tensor]:
        """One random positive factor per row; the same in all the tensors; some rows are left alone."""
        factor = torch.exp(torch.randn(counts, generator=self.generator, dtype=torch.float64) * 0.5)
        if factor.numel() > 2:
            alone = torch.rand(counts, generator=self.generator) < 0.25
            factor[alone] = 1.0
        return {name: _spread(_beside(factor, p), p.shape) for name in names for p in [self.parameters[name]]}

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of a random combination of the outputs."""
        loss = sum((t * torch.randn(t.shape, generator=self.generator, dtype=t.dtype)).sum() for t in self._forward())
        found = torch.autograd.grad(loss, list(self.trainable.values()), allow_unused=True)
        self._restore()
        return {
            n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(self.trainable.items(), found, strict=True)
        }

    def tangent(self, names: Sequence[str], counts: Counts) -> bool:
        """Whether the gradient of every row is orthogonal to the row."""
        gradients = self.gradients()
        radial, size = 0.0, 0.0
        for name in names:
            x, g = self.parameters[name].detach(), gradients[name]
            cut = counts if x.ndim > 1 else (math.prod(counts),)
            radial = radial + _rows(g * x, cut).sum(1)
            size = size + _rows(g, cut).norm(dim=1) * _rows(x, cut).norm(dim=1)
        return bool((radial.abs() <= SAME * size + 1e-12 * size.amax()).all())

    def invariant(self, names: Sequence[str], counts: Counts) -> bool:
        """Whether the rows of this cut can be scaled freely; an undecided case is an error in its label."""
        for _ in range(2):
            change = self.change(self.factors(names, counts))
            if change > MOVED:
                return False
            assert change < SAME, f"{names} {counts}: a change of {change:.1e} decides nothing"
        return self.tangent(names, counts)

    def keeps_output(self, names: Iterable[str]) -> bool:
        """Whether the whole tensors can be scaled by one common factor."""
        names = list(names)
        return max(self.change(dict.fromkeys(names, torch.tensor(rho))) for rho in (0.6, 1.7)) < SAME

    def slopes(self, names: Iterable[str]) -> dict[str, Tensor]:
        """How the outputs start to move when one whole tensor is scaled, by differences."""
        up, down = torch.tensor(1 + 1e-5, dtype=torch.float64), torch.tensor(1 - 1e-5, dtype=torch.float64)
        ends = {n: [torch.cat([t.flatten() for t in self.output({n: f})]) for f in (up, down)] for n in names}
        return {n: (high - low) / 2e-5 for n, (high, low) in ends.items()}

    def candidates(self, names: Sequence[str]) -> list[Counts]:
        """Every way to cut these tensors into equal blocks of the dimensions that they share.

        A vector beside larger tensors is cut into as many blocks as they are, whichever dimensions those cut.
        """
        shapes = [tuple(self.parameters[name].shape) for name in names]
        larger = [shape for shape in shapes if len(shape) > 1] or shapes
        shared = min(map(len, larger))
        cuts = itertools.product(*(_divisors(math.gcd(*(s[i] for s in larger))) for i in range(shared)))
        vectors = [shape[0] for shape in shapes if len(shape) == 1 and shape not in larger]
        return [cut for cut in cuts if all(size % math.prod(cut) == 0 for size in vectors)]

    def finest(self, names: Sequence[str]) -> tuple[int, list[Counts]]:
        """The largest number of rows that holds, and the ways to cut that have it."""
        holding: dict[int, list[Counts]] = {}
        candidates = sorted(self.candidates(names), key=math.prod, reverse=True)
        # Rows that can be scaled freely can be scaled by one factor: where that fails, no cut holds.
        for counts in candidates if self.invariant(names, candidates[-1]) else []:
            if math.prod(counts) < max(holding, default=0):
                break
            if self.invariant(names, counts):
                holding.setdefault(math.prod(counts), []).append(counts)
        n = max(holding, default=0)
        return n, holding.get(n, [])


def _double(value):
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: _double(v) for k, v in value.items()}
    return type(value)(_double(v) for v in value) if isinstance(value, list | tuple) else value


def _flat(output) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif is_dataclass(output):
        for f in fields(output):
            yield from _flat(getattr(output, f.name))
    elif isinstance(output, dict):
        for value in output.values():
            yield from _flat(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _flat(value)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _counts(spec, shape: Sequence[int]) -> Counts:
    """Blocks along each dimension, from the definition of the specs."""
    counts = [1] * len(shape)
    if len(shape) == 1 and isinstance(spec, tuple):
        blocks = [g for g in spec[1:] if g != -1]
        return (shape[0] if spec[0] == "axis" or -1 in spec else math.prod(blocks),)
    match spec:
        case "filter":
            counts[0] = shape[0]
        case "tensor":
            pass
        case int():
            counts[0] = spec
        case ("axis", k):
            counts[k] = shape[k]
        case ("grid", *blocks):
            counts[: len(blocks)] = [shape[i] if g == -1 else g for i, g in enumerate(blocks)]
    return tuple(counts)


def _beside(factor: Tensor, tensor: Tensor) -> Tensor:
    """The factors of all rows, in order, for a vector; the grid of them for a larger tensor."""
    return factor.flatten() if tensor.ndim == 1 else factor


def _spread(factor: Tensor, shape: Sequence[int]) -> Tensor:
    """One factor per block as one factor per entry of a tensor of this shape."""
    factor = factor.reshape(*factor.shape, *[1] * (len(shape) - factor.ndim))
    for i, size in enumerate(shape):
        factor = factor.repeat_interleave(size // factor.shape[i], dim=i)
    return factor


def _rows(tensor: Tensor, counts: Counts) -> Tensor:
    """(n, d): the blocks of a tensor one by one."""
    blocks = [tensor]
    for i, g in enumerate(counts):
        blocks = [piece for block in blocks for piece in block.chunk(g, dim=i)]
    return torch.stack([block.reshape(-1) for block in blocks])


def _label_counts(oracle: Oracle, names: Sequence[str], spec) -> Counts:
    """The label's blocks on the shared dimensions; the label must say the same for every tensor of the set."""
    shapes = [oracle.parameters[name].shape for name in names]
    larger = [shape for shape in shapes if len(shape) > 1] or shapes
    shared = min(map(len, larger))
    cuts = {_counts(spec, shape)[:shared] for shape in larger}
    assert len(cuts) == 1, f"{spec!r} cuts {names} differently"
    assert len({math.prod(_counts(spec, shape)) for shape in shapes}) == 1, f"{spec!r} cuts {names} differently"
    return cuts.pop()


def over(cases: Iterable[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("case", "seed"),
        [pytest.param(c, s, id=f"{c.name}-{s}", marks=[pytest.mark.slow] if s else []) for c in cases for s in SEEDS],
    )


parametrized = over(CASES)


def test_names_are_unique_and_there_are_enough():
    assert len({case.name for case in CASES}) == len(CASES) >= 45


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_labels_name_each_parameter_once(case: Case):
    oracle = Oracle(case, 0)
    labelled = [*case.rows, *itertools.chain(*case.joint_rows), *case.no_effect]
    assert len(labelled) == len(set(labelled))
    assert set(labelled) <= set(oracle.trainable)
    assert set().union(*case.facts) <= set(oracle.trainable)
    assert case.frozen == set(oracle.parameters) - set(oracle.trainable)
    assert all(oracle.parameters[name].ndim >= 2 for name in case.rows)
    assert all(any(oracle.parameters[name].ndim >= 2 for name in names) for names in case.joint)


@parametrized
def test_rows_are_true_and_finest(case: Case, seed: int):
    oracle = Oracle(case, seed)
    for name, p in oracle.trainable.items():
        if name in case.no_effect or p.ndim == 0:
            continue
        n, best = oracle.finest([name])
        if name in case.rows:
            counts = _label_counts(oracle, [name], case.rows[name])
            assert counts in best, f"{name}: labelled {counts}, but {best} hold"
            if _counts("filter", p.shape) in best:
                assert case.rows[name] == "filter", f"{name}: filter comes first among layouts of {n} rows"
        elif frozenset([name]) not in case.facts:
            assert not best, f"{name}: labelled rest, but {best} hold"


@over(case for case in CASES if case.joint_rows)
def test_joint_sets_are_true_and_finest(case: Case, seed: int):
    oracle = Oracle(case, seed)
    for names, spec in case.joint_rows.items():
        counts = _label_counts(oracle, sorted(names), spec)
        _, best = oracle.finest(sorted(names))
        assert counts in best, f"{sorted(names)}: labelled {counts}, but {best} hold"


@parametrized
def test_no_other_set_is_invariant(case: Case, seed: int):
    """Every minimal set of at most four tensors that keeps the output when scaled by one factor is labelled."""
    oracle = Oracle(case, seed)
    names = [name for name in oracle.trainable if name not in case.no_effect]
    slopes = oracle.slopes(names)
    found: set[frozenset[str]] = set()
    for size in range(1, LARGEST_SET + 1):
        for chosen in map(frozenset, itertools.combinations(names, size)):
            if any(smaller <= chosen for smaller in found):
                continue
            if sum(slopes[n] for n in chosen).norm() <= NEARLY * sum(slopes[n].norm() for n in chosen) + 1e-6:
                found |= {chosen} if oracle.keeps_output(chosen) else set()
    small_facts = {fact for fact in case.facts if len(fact) <= LARGEST_SET}
    assert found == {frozenset([name]) for name in case.rows} | case.joint | small_facts
    assert all(oracle.keeps_output(fact) for fact in case.facts)


@parametrized
def test_no_effect_is_true_and_complete(case: Case, seed: int):
    oracle = Oracle(case, seed)
    for name, p in oracle.trainable.items():
        noise = 1 + 0.3 * (2 * torch.rand(p.shape, generator=oracle.generator, dtype=p.dtype) - 1)
        assert (oracle.change({name: noise}) < SAME) == (name in case.no_effect), name


def test_a_wrong_label_is_noticed():
    """The brute force itself: a plain linear layer has no rows, and a normalized one has its filters."""
    plain = Case("plain", lambda: nn.Linear(3, 4), lambda: ((torch.randn(5, 3),), {}))
    assert Oracle(plain, 0).finest(["weight"]) == (0, [])
    model = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))  # noqa: E731
    normalized = Case("normalized", model, plain.inputs)
    assert Oracle(normalized, 0).finest(["0.weight"]) == (4, [(4, 1)])
    assert Oracle(normalized, 0).finest(["1.weight"]) == (0, [])
