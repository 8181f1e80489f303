"""A few rows with gradients orthogonal to them, and optimizers of them, for tests of the watch."""

import torch
from torch import nn

import steradian as st
from steradian import geometry

OPTIMIZERS = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.05, weight_decay=0.01),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01),
    "ours": lambda groups: st.optim.Adam(groups, lr=0.05, weight_decay=0.01, without="abc"),
    "ours, classic": lambda groups: st.optim.Adam(groups, lr=0.05, weight_decay=0.01),
}


def rows(*shapes, seed=0, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype).to(device)) for shape in shapes]


def groups_of(params, names=("w", "v", "s", "t")):
    return [{"params": list(zip(names, params, strict=False)), "rows": "filter"}]


def pair(kind="Adam", seed=0, **options):
    """Two groups of rows, "w" and "v", and an optimizer of them."""
    params = rows((4, 5), (3, 5), seed=seed)
    make = OPTIMIZERS[kind] if isinstance(kind, str) else kind
    return make(groups_of(params), **options), params


def set_gradients(params, seed, scale=1.0):
    """Gradients orthogonal to the rows, as normalized networks have them."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param)
        r, u = geometry.split(param.detach().nan_to_num(1.0, 1.0, 1.0))
        param.grad = scale * geometry.tangent(noise, u) / r


def train(optimizer, params, steps, *, first=0):
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step()


def series(table, quantity, group="w", statistic="median"):
    """One curve of a table: {step: value}; a step that is recorded twice is an error."""
    chosen = table[(table["quantity"] == quantity) & (table["group"] == group) & (table["statistic"] == statistic)]
    assert not chosen["step"].duplicated().any()
    return dict(zip(chosen["step"].tolist(), chosen["value"].tolist(), strict=True))
