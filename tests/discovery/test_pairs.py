"""Pairs f(αa, b/α) = f(a, b): those of the hand-labelled models, each proved by a forward pass of our own."""

import itertools
import json
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

from steradian.discovery import find_groups
from steradian.groups import Pair

from cases import CASES
from cases.pairs import CASES as PAIR_CASES
from cases.pairs import PairCase

SEEDS = range(3)


def _sets(spec, shape) -> list[Tensor]:
    """A mask of each set, from the definition of the specs."""
    whole = torch.zeros(shape, dtype=torch.bool)

    def slices(dim: int, indices: list[list[int]]) -> list[Tensor]:
        masks = []
        for chosen in indices:
            mask = whole.clone()
            mask.index_fill_(dim, torch.tensor(chosen), True)
            masks.append(mask)
        return masks

    match spec:
        case "tensor":
            return [torch.ones_like(whole)]
        case "filter":
            return slices(0, [[i] for i in range(shape[0])])
        case int():
            return slices(0, [c.tolist() for c in torch.arange(shape[0]).chunk(spec)])
        case ("axis", k):
            return slices(k, [[i] for i in range(shape[k])])
        case ("grid", *blocks):
            (k,) = [i for i, g in enumerate(blocks) if g != 1]
            return slices(k, [c.tolist() for c in torch.arange(shape[k]).chunk(blocks[k])])
        case ("fold", k, start, g0, d0, g1, d1):
            place = lambda i, j, m, n: start + ((i * d0 + j) * g1 + m) * d1 + n  # noqa: E731
            return slices(
                k,
                [[place(i, j, m, n) for j in range(d0) for n in range(d1)] for i in range(g0) for m in range(g1)],
            )
    raise AssertionError(f"an unknown spec: {spec!r}")


def _outputs(model: nn.Module, args, kwargs) -> Tensor:
    torch.manual_seed(7)
    result = model(*args, **kwargs)
    return torch.cat([t.detach().flatten() for t in (result if isinstance(result, tuple) else (result,))])


def change(model: nn.Module, args, kwargs, pair: Pair, *, seed: int, one_side: bool = False) -> float:
    """Relative change of the outputs when every set of a is multiplied by a random α, and its partner divided by it."""
    parameters = dict(model.named_parameters())
    state = {name: p.detach().clone() for name, p in parameters.items()}
    alpha = torch.randn(pair.n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).mul(2).exp()
    before = _outputs(model, args, kwargs)
    with torch.no_grad():
        for names, specs, sign in ((pair.a, pair.a_specs, 1), (pair.b, pair.b_specs, 0 if one_side else -1)):
            for name, spec in zip(names, specs, strict=True):
                masks = _sets(spec, parameters[name].shape)
                assert len(masks) == pair.n
                assert not any((x & y).any() for x, y in itertools.combinations(masks, 2))
                for mask, factor in zip(masks, alpha**sign, strict=True):
                    parameters[name][mask] *= factor
        after = _outputs(model, args, kwargs)
        for name, p in parameters.items():
            p.copy_(state[name])
    return float((after - before).norm() / before.norm())


def _made(case, seed: int):
    torch.manual_seed(seed)
    model = case.build()
    args, kwargs = case.inputs()
    return model, args, kwargs


def _double(value):
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _check_forward(model: nn.Module, args, kwargs, pairs: list[Pair], seed: int) -> None:
    """In float64, near the model's own weights: no pair moves the outputs, and neither side is free by itself."""
    model = model.double().train()
    args, kwargs = tuple(map(_double, args)), {key: _double(value) for key, value in kwargs.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    for pair in pairs:
        assert change(model, args, kwargs, pair, seed=seed) < 1e-9, str(pair)
        assert change(model, args, kwargs, pair, seed=seed, one_side=True) > 1e-4, str(pair)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.slow] if s else []) for s in SEEDS])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in PAIR_CASES])
def test_labelled_pairs(case: PairCase, seed: int):
    model, args, kwargs = _made(case, seed)
    pairs = find_groups(model, *args, **kwargs).pairs
    found = {frozenset([frozenset(pair.a), frozenset(pair.b)]): pair.n for pair in pairs}
    assert found == {frozenset(sides): n for sides, n in case.pairs.items()}
    assert len(pairs) == len(found)
    _check_forward(model, args, kwargs, pairs, seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_no_pair_of_another_labelled_model_is_refuted(case):
    model, args, kwargs = _made(case, 0)
    pairs = find_groups(model, *args, **kwargs).pairs
    if pairs and all(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
        for module in model.modules():
            if hasattr(module, "eps"):
                module.eps = 1e-12
        _check_forward(model, args, kwargs, pairs, 0)


def test_pairs_of_matrices_beside_gains_that_choose():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.key = nn.RMSNorm(8), nn.Linear(8, 1)
            self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            chosen = torch.zeros_like(h).scatter(1, self.key(h).topk(4, dim=1).indices.expand(-1, -1, 8), 1)
            return x + chosen * self.down(self.up(h).relu())

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)), nn.Linear(8, 3))
    groups = find_groups(model, torch.randn(6, 8, 8))
    found = {(pair.a, pair.b, pair.n) for pair in groups.pairs}
    assert found == {((f"{i}.up.weight",), (f"{i}.down.weight",), 12) for i in range(6)}
    assert {f"{i}.key.weight" for i in range(6)} <= set(groups.no_effect)


def test_a_pair_is_plain_data_and_prints_full_names():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    (pair,) = find_groups(model, torch.randn(6, 4)).pairs
    assert pair == Pair(("0.weight", "0.bias"), ("2.weight",), ("filter", "filter"), (("axis", 1),), 5, pair.reason)
    assert json.loads(json.dumps(asdict(pair)))["b_specs"] == [["axis", 1]]
    assert all(name in str(pair) for name in ("0.weight", "0.bias", "2.weight"))


def test_a_part_of_a_tensor_prints_as_a_slice():
    torch.manual_seed(0)
    pairs = find_groups(nn.MultiheadAttention(8, 2), *[torch.randn(5, 3, 8)] * 3).pairs
    text = "\n".join(map(str, pairs))
    assert "in_proj_weight[16:24] + in_proj_bias[16:24] against out_proj.weight ('axis', 1)" in text
    assert "in_proj_weight[0:8]" in text
