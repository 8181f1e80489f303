"""What the variants claim: tangent momenta, directions free of the radius history, half of the state."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from optim import twins
from optim.twins import NETWORKS, SUBSETS, Implementation, network
from steradian import optim

D = 10
EXACT = Implementation("exact", torch.float64, 1e-12, steps=100)


# Momenta stay tangent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("without", ["ab", "abc", "b", "bc"])
def test_momentum_is_tangent_where_the_row_has_arrived(without: str, name: str, decoupled: bool) -> None:
    """|⟨m,u⟩| ≤ 1e-12 ‖m‖ after every step, with the transport of the step behind it."""
    _, cut, stream = network(name, EXACT)
    groups = [{"params": tensors, **keys} for tensors, keys in cut]
    optimizer = optim.Adam(groups, lr=0.01, weight_decay=1e-2, without=without, decoupled_weight_decay=decoupled)
    assert_tangent(optimizer, cut, stream, "exp_avg")


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("without", "nesterov"), [("b", False), ("bc", False), ("bc", True)])
def test_momentum_of_sgd_is_tangent_where_the_row_has_arrived(without: str, nesterov: bool, name: str) -> None:
    _, cut, stream = network(name, EXACT)
    groups = [{"params": tensors, **keys} for tensors, keys in cut]
    optimizer = optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=nesterov, without=without)
    assert_tangent(optimizer, cut, stream, "momentum_buffer")


def assert_tangent(optimizer: torch.optim.Optimizer, cut: Any, stream: Any, key: str) -> None:
    groups = [
        (tensors, twins.Rows(lambda x: x, tensors, keys["rows"], keys.get("joint", False)))
        for tensors, keys in cut[:-1]
    ]
    for k, _ in enumerate(stream):
        optimizer.step()
        for tensors, rows in groups:
            for x, m in zip(rows.cut(tensors), rows.cut([optimizer.state[p][key] for p in tensors]), strict=True):
                assert np.linalg.norm(m) > 0
                assert abs(m @ x) <= 1e-12 * np.linalg.norm(m) * np.linalg.norm(x), f"step {k}"


@pytest.mark.parametrize("without", ["ab", "abc", "b", "bc"])
def test_momentum_is_tangent_where_it_was_almost_radial(without: str) -> None:
    """L2 terms a billion times longer than the gradients: what is left of m is still tangent to 1e-12 of itself."""
    rng = np.random.default_rng(12)
    x = nn.Parameter(torch.from_numpy(rng.normal(size=(4, 20))))
    optimizer = optim.Adam([{"params": [x], "rows": "filter"}], lr=1e-3, weight_decay=1.0, without=without)
    for _ in range(50):
        x.grad = torch.from_numpy(1e-9 * rng.normal(size=(4, 20)))
        optimizer.step()
        m, radius = optimizer.state[x]["exp_avg"], x.detach().norm(dim=1)
        assert ((m * x.detach()).sum(1).abs() <= 1e-12 * m.norm(dim=1) * radius).all()


def test_adam_momentum_is_not_tangent_without_transport() -> None:
    """The test above can fail: plain Adam's momentum leaves the tangent space."""
    _, cut, stream = network("bn", EXACT)
    optimizer = optim.Adam([{"params": t, **k} for t, k in cut], lr=0.01, weight_decay=1e-2, without="ac")
    with pytest.raises(AssertionError):
        assert_tangent(optimizer, cut, stream, "exp_avg")


# The direction depends on the trajectory on the sphere alone ------------------------------------------------


class Slope:
    """Gradients of the radially invariant losses L_k(x) = ⟨t_k,u⟩ + ½⟨u,Qu⟩: ∇L_k(x) = (t_k + Qu)^⊥ / r."""

    def __init__(self) -> None:
        rng = np.random.default_rng(8)
        self.q = rng.normal(size=(D, D))
        self.q = torch.from_numpy(self.q + self.q.T)
        self.t = torch.from_numpy(rng.normal(size=(200, D)))

    def __call__(self, x: Tensor, k: int) -> Tensor:
        r = torch.linalg.vector_norm(x)
        u = x / r
        h = self.t[k] + self.q @ u
        return (h - (h @ u) * u) / r


def start() -> Tensor:
    x = torch.from_numpy(np.random.default_rng(9).normal(size=D))
    return x / torch.linalg.vector_norm(x)


# Initial radius and weight decay of step k: three radius histories that no common factor relates.
HISTORIES = [
    (1.0, lambda k: 0.0),
    (3.0, lambda k: 0.5 + 0.5 * np.sin(k)),
    (0.4, lambda k: 2.0 if k % 7 == 0 else 0.1),
]


def second_moment(v: float | Tensor, g: Tensor, beta2: float) -> Tensor:
    return beta2 * torch.as_tensor(v) + (1 - beta2) * (g @ g) / D


def sphere_of_adam(without: str, history: Any, decoupled: bool, eps: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Directions, r·m and radii of 200 steps whose rate is chosen so that the angle does not know the radius.

    Decoupled: x' = (1 − ηλ)x − η m̂ ⊘ √v̂. Where m is r⁻¹ and v is r⁻² times something on the sphere, u' depends
    on r through η/(r(1 − ηλ)) alone (ε = 0), which is set to a given α_k.
    Coupled: x' = (1 − s(1 − β1)λ)x − s m^⊥ with s = η/((1 − β1^k)(√v̂ + ε)), where m holds no past radial
    terms. u' depends on r m^⊥ and on s/(r²(1 − s(1 − β1)λ)), which is set to α_k; v̂ is computed beforehand.
    """
    radius, decay = history
    beta1, beta2, slope = 0.9, 0.99, Slope()
    x = nn.Parameter(radius * start())
    optimizer = optim.Adam(
        [{"params": [x], "rows": "tensor"}],
        **{"lr": 1.0, "betas": (beta1, beta2), "eps": eps},
        **{"without": without, "decoupled_weight_decay": decoupled},
    )
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    for k in range(200):
        x.grad, wd = slope(x.detach(), k), float(decay(k))
        r = float(torch.linalg.vector_norm(x.detach()))
        alpha = 0.05 * (1 + 0.5 * np.cos(k / 9))
        if decoupled:
            lr = alpha * r / (1 + alpha * r * wd)
        else:
            s = alpha * r**2 / (1 + alpha * r**2 * (1 - beta1) * wd)
            before = optimizer.state[x]["exp_avg_sq"].squeeze() if k else 0.0
            v = second_moment(before, x.grad + wd * x.detach(), beta2) / (1 - beta2 ** (k + 1))
            lr = s * (1 - beta1 ** (k + 1)) * (float(torch.sqrt(v)) + eps)
        optimizer.param_groups[0].update(lr=lr, weight_decay=wd)
        optimizer.step()
        length = torch.linalg.vector_norm(x.detach())
        seen.append((x.detach() / length, length * optimizer.state[x]["exp_avg"], length))
    return tuple(torch.stack(column) for column in zip(*seen, strict=True))


def farthest(runs: list[tuple[Tensor, Tensor, Tensor]], column: int) -> float:
    """Largest distance between two runs over all steps."""
    return max(float((run[column] - runs[0][column]).norm(dim=-1).max()) for run in runs[1:])


@pytest.mark.parametrize("without", SUBSETS)
def test_directions_do_not_know_the_radius_history_without_c(without: str) -> None:
    """Decoupled decay: same directions for every radius history exactly where "c" is neutralized."""
    runs = [sphere_of_adam(without, history, decoupled=True) for history in HISTORIES]
    ratios = [run[2][1:] / run[2][:-1] for run in runs]
    assert all((ratio - ratios[0]).abs().max() > 1e-2 for ratio in ratios[1:]), "the histories must differ"
    if "c" in without:
        assert farthest(runs, 0) < 1e-11
        assert farthest(runs, 1) < 1e-11
    else:
        assert farthest(runs, 0) > 1e-3


@pytest.mark.parametrize("without", ["ab", "ac", "abc"])
def test_directions_do_not_know_the_radius_history_under_l2_for_abc_alone(without: str) -> None:
    """Coupled L2, the paper's setting: only "abc" frees c^⊥ from both r_k/r_i and the memory of L2."""
    runs = [sphere_of_adam(without, history, decoupled=False, eps=1e-8) for history in HISTORIES]
    if without == "abc":
        assert farthest(runs, 0) < 1e-11
        assert farthest(runs, 1) < 1e-11
    else:
        assert farthest(runs, 0) > 1e-3


@pytest.mark.parametrize("without", ["ab", "abc"])
def test_momentum_on_the_sphere_is_a_recursion_over_directions(without: str) -> None:
    """c^RT_k = β Γ(c^RT_{k−1}) + ∇L(u_k) (App. D.2), from the observed directions, under L2 and any rate."""
    slope, x = Slope(), nn.Parameter(2 * start())
    optimizer = optim.Adam([{"params": [x], "rows": "tensor"}], lr=1.0, weight_decay=0.5, without=without)
    c, worst = np.zeros(D), 0.0
    for k in range(200):
        u = twins.numbers(x / torch.linalg.vector_norm(x))
        x.grad = slope(x.detach(), k)
        optimizer.param_groups[0]["lr"] = 0.03 + 0.02 * np.sin(k)
        optimizer.step()
        r = float(torch.linalg.vector_norm(x.detach()))
        c = 0.9 * c + 0.1 * twins.numbers(slope(torch.from_numpy(u), k))
        c = twins.transport(c, u, twins.numbers(x) / r)
        worst = max(worst, float(np.linalg.norm(r * twins.numbers(optimizer.state[x]["exp_avg"]) - c)))
    assert worst < 1e-11 if without == "abc" else worst > 1e-3


@pytest.mark.parametrize("without", ["b", "c", "bc"])
def test_directions_of_sgd_do_not_know_the_radius_history_without_bc(without: str) -> None:
    """x' = (1 − ηλ)x − η m^⊥ for "bc" under L2: the directions follow from c^⊥ and η/(r²(1 − ηλ)) = α_k."""

    def run(radius: float, decay: Any) -> tuple[Tensor, Tensor, Tensor]:
        slope, x, seen = Slope(), nn.Parameter(radius * start()), []
        optimizer = optim.SGD([{"params": [x], "rows": "tensor"}], lr=1.0, momentum=0.9, without=without)
        for k in range(200):
            x.grad, wd = slope(x.detach(), k), float(decay(k))
            scale = 0.01 * float(x.detach() @ x.detach())
            optimizer.param_groups[0].update(lr=scale / (1 + scale * wd), weight_decay=wd)
            optimizer.step()
            r = torch.linalg.vector_norm(x.detach())
            seen.append((x.detach() / r, r * optimizer.state[x]["momentum_buffer"], r))
        return tuple(torch.stack(column) for column in zip(*seen, strict=True))

    runs = [run(*history) for history in HISTORIES]
    if without == "bc":
        assert farthest(runs, 0) < 1e-11
        assert farthest(runs, 1) < 1e-11
    else:
        assert farthest(runs, 0) > 1e-3


# One float per row ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["a", "ab", "ac", "abc"])
def test_second_moment_is_one_number_per_row_and_the_state_half_of_adams(without: str) -> None:
    """At most 4.1 bytes per radial float32 parameter for rows of 64 numbers and more; Adam has 8."""
    shapes = {
        "filter": ([(64, 64)], {"rows": "filter"}),
        "conv": ([(48, 16, 3, 3)], {"rows": "filter"}),
        "blocks": ([(64, 96)], {"rows": 8}),
        "axis": ([(32, 16, 4, 4)], {"rows": ("axis", 1)}),
        "joint": ([(64, 31), (64,)], {"rows": 4, "joint": True}),
    }
    made = {name: [nn.Parameter(torch.randn(s)) for s in sizes] for name, (sizes, _) in shapes.items()}
    optimizer = optim.Adam([{"params": made[n], **shapes[n][1]} for n in made], lr=1e-3, without=without)
    for tensors in made.values():
        for p in tensors:
            p.grad = torch.randn_like(p)
    for _ in range(3):
        optimizer.step()
    for name, tensors in made.items():
        rows = twins.Rows(lambda x: x, tensors, shapes[name][1]["rows"], name == "joint").rows
        held = [optimizer.state[p].get("exp_avg_sq") for p in tensors]
        assert {v.numel() for v in held if v is not None} == {len(rows)}, name
        total = sum(v.nbytes for p in tensors for v in optimizer.state[p].values() if isinstance(v, Tensor))
        assert total <= 4.1 * sum(p.numel() for p in tensors), f"{name}: {total} bytes"


@pytest.mark.parametrize("d", [2**20 + 3, 2**22])
@pytest.mark.parametrize("kind", [optim.AdamG, optim.AdaGradG])
def test_long_rows_stay_on_the_sphere_in_float32(kind: Any, d: int) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.rand(1, d))
    optimizer = kind([{"params": [p], "rows": "tensor"}], lr=0.01)
    optimizer.emit()
    for _ in range(2):
        p.grad = torch.rand(1, d)
        optimizer.step()
        assert abs(p.detach().double().norm().item() - 1) < 1e-6
    assert abs(optimizer.telemetry[p][0, 0].item() - 1) < 1e-6
