"""Every optimizer against its float64 twin: streams of random gradients, every layout, and real networks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import adamp
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from optim import twins
from optim.twins import NETWORKS, SUBSETS, Implementation, network
from steradian import optim

REFERENCE = Implementation("reference", torch.float64, 1e-10, steps=100, options={"fused": False})
LONGER = Implementation("reference, more steps", torch.float64, 1e-10, steps=200, options={"fused": False})
IMPLEMENTATIONS = [REFERENCE, pytest.param(LONGER, marks=pytest.mark.slow)]

# name: shapes of the parameters of one param group, and its keys
LAYOUTS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "filter": ([(3, 2, 2, 2), (2, 7)], {"rows": "filter"}),
    "tensor": ([(3, 5)], {"rows": "tensor"}),
    "blocks": ([(6, 4)], {"rows": 3}),
    "axis": ([(3, 4, 2, 2)], {"rows": ("axis", 1)}),
    "grid": ([(4, 3, 2)], {"rows": ("grid", 2, -1)}),
    "joint blocks": ([(6, 4), (6,)], {"rows": 3, "joint": True}),
    "joint tensor": ([(5, 3), (5,)], {"rows": "tensor", "joint": True}),
    "rest": ([(2, 3)], {}),
}
HYPER = [(1.0, (0.9, 0.999)), (0.5, (0.8, 0.99)), (2.0, (0.0, 0.9)), (1.0, (0.95, 0.9999))]


def parameters(implementation: Implementation) -> dict[str, list[nn.Parameter]]:
    """Seeded parameters of every layout."""
    rng = np.random.default_rng(1)
    made = {}
    for name, (shapes, _) in LAYOUTS.items():
        tensors = [torch.from_numpy(rng.normal(size=shape)) for shape in shapes]
        made[name] = [nn.Parameter(t.to(implementation.device, implementation.dtype)) for t in tensors]
    return made


def gradients(made: dict[str, list[nn.Parameter]], steps: int, seed: int = 2) -> Iterator[None]:
    """Set random gradients of very different scales, step after step."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        for tensors in made.values():
            for t in tensors:
                scale = 10.0 ** rng.uniform(-2, 1)
                t.grad = torch.from_numpy(np.asarray(scale * rng.normal(size=t.shape))).to(t)
        yield


def rates(steps: int) -> list[float]:
    """A rate that changes in every step; every 17th step turns rows by a large angle."""
    return [0.2 if k % 17 == 16 else 0.02 * (1 + np.cos(k / 20)) + 1e-3 for k in range(steps)]


def assert_close(actual: Sequence[Any], expected: Sequence[Any], tolerance: float, what: str) -> None:
    """Row by row, the distance relative to the length of the expected row."""
    assert len(actual) == len(expected), what
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        a, e = np.atleast_1d(a), np.atleast_1d(e)
        error, size = np.linalg.norm(a - e), np.linalg.norm(e)
        assert error <= tolerance * size, f"{what}, row {i}: off by {error / size if size else error:.1e}"


def state_rows(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor], twin: twins.Rows, key: str) -> list[Any]:
    """A state entry as rows: shaped as the parameters, or one number per row."""
    entries = [optimizer.state[t][key] for t in tensors if key in optimizer.state[t]]
    if len(entries) == len(tensors) and all(s.shape == t.shape for s, t in zip(entries, tensors, strict=True)):
        return twin.cut(entries)
    found = [twins.numbers(s) for s in entries]
    return list(found[0] if twin.joint else np.concatenate(found))


def follow(
    implementation: Implementation,
    optimizer: torch.optim.Optimizer,
    followed: dict[str, tuple[Sequence[Tensor], twins.Rows, dict[str, Any]]],
    stream: Iterator[Any],
    state: dict[str, str],
    schedule: bool = True,
) -> None:
    """Step optimizer and twins on the same gradients; compare parameters and states every ten steps."""
    groups = {id(group["params"][0]): group for group in optimizer.param_groups}
    for k, (rate, _) in enumerate(zip(rates(implementation.steps), stream, strict=True)):
        for tensors, twin, options in followed.values():
            lr = rate * options["lr"] if schedule else options["lr"]
            groups[id(tensors[0])]["lr"] = lr
            twin.step([t.grad for t in tensors], **{**options, "lr": lr})
        optimizer.step()
        if k % 10 and k != implementation.steps - 1:
            continue
        for name, (tensors, twin, _) in followed.items():
            what = f"{name}, step {k}"
            assert_close(twin.cut(tensors), twin.get("x"), implementation.tolerance, f"x of {what}")
            for key, attribute in state.items():
                actual = state_rows(optimizer, tensors, twin, key)
                assert_close(actual, twin.get(attribute), implementation.tolerance, f"{key} of {what}")


def random_case(
    implementation: Implementation,
    make_twin: Callable[[bool, np.ndarray], Any],
    options: Callable[[int, bool], dict[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]], Iterator[None]]:
    """Parameters of every layout with their twins, their param groups, and a stream of gradients."""
    made = parameters(implementation)
    followed, groups = {}, []
    for i, (name, tensors) in enumerate(made.items()):
        keys = LAYOUTS[name][1]
        chosen = options(i, bool(keys))
        twin = twins.Rows(
            lambda x, radial=bool(keys): make_twin(radial, x), tensors, keys.get("rows"), keys.get("joint", False)
        )
        followed[name] = (tensors, twin, chosen)
        groups.append({"params": tensors, **keys, **chosen})
    return followed, groups, gradients(made, implementation.steps)


# The twins alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["filter", "tensor", 3, ("axis", 1), ("axis", -1), ("grid", 2, -1)])
def test_members_are_a_partition_and_match_slicing(spec: Any) -> None:
    x = torch.randn(6, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = [twins.numbers(x)[row].tolist() for row in twins.members(spec, x.shape)]
    expected = {
        "filter": [x[i] for i in range(6)],
        "tensor": [x],
        3: [x[2 * i : 2 * i + 2] for i in range(3)],
        ("axis", 1): [x[:, j] for j in range(4)],
        ("axis", -1): [x[..., j] for j in range(5)],
        ("grid", 2, -1): [x[3 * i : 3 * i + 3, j] for i in range(2) for j in range(4)],
    }[spec]
    assert rows == [part.flatten().tolist() for part in expected]


@pytest.mark.parametrize("theta", [1e-9, 1e-3, 0.3, 1.5, 3.0])
def test_transport_solves_the_equation_of_parallel_transport(theta: float) -> None:
    """The twin's rotation against Runge–Kutta on da/dt = −⟨a,γ'⟩γ along the geodesic γ."""
    rng = np.random.default_rng(3)
    u, e = np.linalg.qr(rng.normal(size=(6, 2)))[0].T
    a = rng.normal(size=6)
    a -= (a @ u) * u

    def slope(t: float, a: np.ndarray) -> np.ndarray:
        return -(a @ (np.cos(t) * e - np.sin(t) * u)) * (np.cos(t) * u + np.sin(t) * e)

    moved, h = a, theta / 400
    for t in np.arange(400) * h:
        k1 = slope(t, moved)
        k2 = slope(t + h / 2, moved + h / 2 * k1)
        k3 = slope(t + h / 2, moved + h / 2 * k2)
        moved = moved + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(t + h, moved + h * k3))
    p = np.cos(theta) * u + np.sin(theta) * e
    ours = twins.transport(a + 7 * u, u, p)
    np.testing.assert_allclose(ours, moved, atol=1e-10)
    assert abs(ours @ p) < 1e-14 * np.linalg.norm(a)
    assert abs(np.linalg.norm(ours) - np.linalg.norm(a)) < 1e-13


def test_transport_and_rescale_are_the_corrected_line_of_algorithm_1_in_the_plane() -> None:
    """Where the step is along the momentum: m ← (⟨x',x⟩m − ⟨m,x'⟩x)/⟨x',x'⟩."""
    rng = np.random.default_rng(4)
    for s in (1e-6, 0.1, 3.0):
        x, m = rng.normal(size=(2, 8))
        x_next = x - s * m
        line = ((x_next @ x) * m - (m @ x_next) * x) / (x_next @ x_next)
        np.testing.assert_allclose(twins.carried(m, x, x_next, "abc")[0], line, rtol=1e-11, atol=1e-13)


def test_adagradg_twin_follows_sgd_to_second_order() -> None:
    """Theorem 4: halving the rate divides the distance between the directions by about four or more."""

    def distance(lr: float) -> float:
        rng = np.random.default_rng(5)
        x, target = 2 * rng.normal(size=(2, 6))
        radius = float(np.linalg.norm(x))
        constants = twins.adagradg_from_sgd(lr, 0.05, radius)
        sgd, ours = twins.SGD(x), twins.AdaGradG(x / radius, constants["v0"])
        for _ in range(50):
            for row in (sgd, ours):
                r = np.linalg.norm(row.x)
                tangent = target - (target @ row.x) * row.x / r**2
                options = {"weight_decay": 0.05, "lr": lr} if row is sgd else {k: constants[k] for k in ("lr", "beta")}
                row.step(-tangent / r, **options)
        return float(np.linalg.norm(sgd.x / np.linalg.norm(sgd.x) - ours.x))

    assert distance(0.1) < 1e-3
    assert distance(0.05) < distance(0.1) / 3.5


def run_twin_of_torch(make: Callable[[Any], Any], their: Any, options: dict[str, Any], **theirs: Any) -> None:
    made = {"rest": [nn.Parameter(torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3))]}
    row, optimizer = make(twins.numbers(made["rest"][0])), their(made["rest"], **options, **theirs)
    for _ in gradients(made, 200):
        row.step(twins.numbers(made["rest"][0].grad), **options)
        optimizer.step()
        np.testing.assert_allclose(row.x, twins.numbers(made["rest"][0]), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("maximize", [False, True])
def test_adam_twin_is_torch_adam(weight_decay: float, maximize: bool) -> None:
    options = {
        "lr": 0.02,
        "weight_decay": weight_decay,
        "betas": (0.8, 0.99),
        "eps": 1e-3,
        "maximize": maximize,
    }
    run_twin_of_torch(twins.Adam, torch.optim.Adam, options)
    run_twin_of_torch(twins.Adam, torch.optim.Adam, {**options, "decoupled_weight_decay": True})


@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), [(0, 0, False), (0.9, 0.3, False), (0.8, 0, True)])
def test_sgd_twin_is_torch_sgd(momentum: float, dampening: float, nesterov: bool) -> None:
    options = {
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
    }
    run_twin_of_torch(twins.SGD, torch.optim.SGD, options)


@pytest.mark.parametrize("nesterov", [False, True])
def test_adamp_twin_is_adamp(nesterov: bool) -> None:
    """With a threshold that every gradient passes the package always projects, with 0 never."""
    options = {"lr": 0.02, "weight_decay": 0.3, "betas": (0.8, 0.99), "nesterov": nesterov}
    for delta, projected in ((1e9, True), (0.0, False)):
        p = nn.Parameter(torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3))
        rows = twins.Rows(lambda x, projected=projected: twins.AdamP(x, projected), [p], "filter")
        optimizer = adamp.AdamP([p], delta=delta, **options)
        for _ in gradients({"p": [p]}, 200):
            rows.step([p.grad], **options)
            optimizer.step()
        assert_close(rows.cut([p]), rows.get("x"), 1e-11, f"delta {delta}")


@pytest.mark.parametrize("retraction", [False, True])
def test_adamg_twin_stays_on_the_sphere_with_a_tangent_momentum(retraction: bool) -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(size=7)
    row = twins.AdamG(x / np.linalg.norm(x))
    for _ in range(200):
        start, m = row.x, row.m
        row.step(rng.normal(size=7), lr=0.05, clip=None if retraction else 0.1, retraction=retraction)
        assert abs(np.linalg.norm(row.x) - 1) < 1e-12
        assert abs(row.m @ row.x) < 1e-12 * np.linalg.norm(row.m)
        np.testing.assert_allclose(row.m, twins.transport(row.m, row.x, row.x), atol=1e-13)
        assert np.linalg.matrix_rank(np.stack([start, row.x, row.m]), tol=1e-10) == 2, "not in the plane of the motion"
    assert m is not row.m


# Streams of random gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("without", SUBSETS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_adam(implementation: Implementation, without: str, decoupled: bool) -> None:
    def options(i: int, radial: bool) -> dict[str, Any]:
        lr, betas = HYPER[i % len(HYPER)]
        wd = i * (0.2 if decoupled else 0.05)
        return {"lr": lr, "betas": betas, "eps": 10.0 ** -(4 + i), "weight_decay": wd}

    followed, groups, stream = random_case(
        implementation, lambda radial, x: twins.Adam(x, without if radial else ""), options
    )
    for _, _, chosen in followed.values():
        chosen["decoupled_weight_decay"] = decoupled
    optimizer = optim.Adam(groups, without=without, decoupled_weight_decay=decoupled, **implementation.options)
    follow(implementation, optimizer, followed, stream, {"exp_avg": "m", "exp_avg_sq": "v"})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_adam_with_options_of_param_groups(implementation: Implementation) -> None:
    """Each param group with its own letters and its own decay; the others get L2: AdamW† is of this kind."""
    followed, groups, stream = random_case(
        implementation,
        lambda radial, x: twins.Adam(x),
        lambda i, radial: {"lr": 1.0, "weight_decay": 0.4, "decoupled_weight_decay": radial, "maximize": True},
    )
    for i, (group, (_, twin, _)) in enumerate(zip(groups, followed.values(), strict=True)):
        if "rows" in group:
            group["without"] = SUBSETS[i]
            twin.rows = [twins.Adam(row.x, SUBSETS[i]) for row in twin.rows]
    optimizer = optim.Adam(groups, without="abc", **implementation.options)
    follow(implementation, optimizer, followed, stream, {"exp_avg": "m", "exp_avg_sq": "v"})


@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), [(0, 0, False), (0.9, 0.2, False), (0.8, 0, True)])
@pytest.mark.parametrize("without", ["", "b", "c", "bc"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_sgd(implementation: Implementation, without: str, momentum: float, dampening: float, nesterov: bool) -> None:
    followed, groups, stream = random_case(
        implementation,
        lambda radial, x: twins.SGD(x, without if radial else ""),
        lambda i, radial: {
            "lr": 0.1 * (i + 1),
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": 0.1 * i,
            "nesterov": nesterov,
            "maximize": nesterov,
        },
    )
    optimizer = optim.SGD(groups, lr=0.1, without=without, **implementation.options)
    follow(implementation, optimizer, followed, stream, {"momentum_buffer": "m"} if momentum else {})


@pytest.mark.parametrize(("nesterov", "maximize"), [(False, False), (True, True)])
def test_adamp(nesterov: bool, maximize: bool) -> None:
    followed, groups, stream = random_case(
        REFERENCE,
        lambda radial, x: twins.AdamP(x, projected=radial),
        lambda i, radial: {"lr": 1.0, "weight_decay": 0.1 * i, "wd_ratio": 0.3, "nesterov": nesterov},
    )
    for _, _, chosen in followed.values():
        chosen["maximize"] = maximize
    optimizer = optim.AdamP(groups, maximize=maximize)
    follow(REFERENCE, optimizer, followed, stream, {"exp_avg": "m", "exp_avg_sq": "v"})


@pytest.mark.parametrize(("retraction", "maximize"), [(False, False), (True, True)])
def test_adamg(retraction: bool, maximize: bool) -> None:
    followed, groups, stream = random_case(
        REFERENCE,
        lambda radial, x: twins.AdamG(x) if radial else twins.Adam(x),
        lambda i, radial: {"lr": 1.0, "betas": HYPER[i % len(HYPER)][1]},
    )
    for name, (_, _, chosen) in followed.items():
        chosen["maximize"] = maximize
        if LAYOUTS[name][1]:
            chosen.update(retraction=retraction, clip=None if retraction else 0.1)
    optimizer = optim.AdamG(groups, lr=0.01, retraction=retraction, maximize=maximize)
    follow(REFERENCE, optimizer, followed, stream, {"exp_avg": "m", "exp_avg_sq": "v"})


@pytest.mark.parametrize("maximize", [False, True])
def test_adagradg(maximize: bool) -> None:
    """One v_0 for each param group, at any radius."""
    followed, groups, stream = random_case(
        REFERENCE,
        lambda radial, x: twins.AdaGradG(x, 50.0) if radial else twins.SGD(x),
        lambda i, radial: {"lr": 1.0, **({"beta": 1 - 0.01 * i} if radial else {})},
    )
    for _, _, chosen in followed.values():
        chosen["maximize"] = maximize
    optimizer = optim.AdaGradG(groups, v0=50.0, maximize=maximize)
    rest = followed.pop("rest")
    follow(REFERENCE, optimizer, {**followed, "rest": rest}, stream, {})
    for name, (tensors, twin, _) in followed.items():
        assert_close(state_rows(optimizer, tensors, twin, "sum"), twin.get("v"), 1e-10, f"sum of {name}")


def test_adagradg_from_sgd() -> None:
    """The constants of Theorem 4, v_0 from the radius of each row; the rest goes on with SGD's rate and L2."""

    def twin_of(x: np.ndarray) -> Any:
        return twins.AdaGradG(x, twins.adagradg_from_sgd(0.1, 0.05, float(np.linalg.norm(x)))["v0"])

    constants = twins.adagradg_from_sgd(0.1, 0.05, 1.0)
    followed, groups, stream = random_case(
        REFERENCE,
        lambda radial, x: twin_of(x) if radial else twins.SGD(x),
        lambda i, radial: (
            {"lr": constants["lr"], "beta": constants["beta"]} if radial else {"lr": 0.1, "weight_decay": 0.05}
        ),
    )
    groups = [{key: group[key] for key in ("params", "rows", "joint") if key in group} for group in groups]
    optimizer = optim.AdaGradG.from_sgd(groups, lr=0.1, weight_decay=0.05)
    follow(REFERENCE, optimizer, followed, stream, {}, schedule=False)


# Real networks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("without", SUBSETS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_adam_on_a_network(implementation: Implementation, without: str, name: str) -> None:
    """The twin sees the gradients of the network that the optimizer trains."""
    _, cut, stream = network(name, implementation)
    options = {"lr": 0.3, "weight_decay": 1e-2}
    followed = {
        f"{name} {i}": (tensors, adam_rows(tensors, keys, without), options) for i, (tensors, keys) in enumerate(cut)
    }
    groups = [{"params": tensors, **keys} for tensors, keys in cut]
    optimizer = optim.Adam(groups, **options, without=without, **implementation.options)
    follow(implementation, optimizer, followed, stream, {"exp_avg": "m", "exp_avg_sq": "v"})


def adam_rows(tensors: Sequence[Tensor], keys: dict[str, Any], without: str) -> twins.Rows:
    chosen = without if keys else ""
    return twins.Rows(lambda x: twins.Adam(x, chosen), tensors, keys.get("rows"), keys.get("joint", False))


# Where they must equal another library ----------------------------------------------------------------------


def assert_same_as(
    ours: Callable[..., Any], theirs: Callable[..., Any], dtype: torch.dtype, keys: bool, state: Sequence[str]
) -> None:
    """Bit for bit over 200 steps; `keys` passes the layouts to ours, which must change nothing."""
    case = Implementation("equal", dtype, 0.0)
    made, copies = parameters(case), parameters(case)
    one = ours([{"params": tensors, **(LAYOUTS[name][1] if keys else {})} for name, tensors in made.items()])
    other = theirs([{"params": tensors} for tensors in copies.values()])
    for rate, _, _ in zip(rates(200), gradients(made, 200), gradients(copies, 200), strict=True):
        for group in (*one.param_groups, *other.param_groups):
            group["lr"] = rate
        one.step()
        other.step()
    for name, tensors in made.items():
        for p, q in zip(tensors, copies[name], strict=True):
            assert torch.equal(p, q), f"{name}: {(p - q).abs().max():.1e}"
            for key in state:
                assert torch.equal(one.state[p][key], other.state[q][key]), f"{key} of {name}"


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "maximize": True}, {"betas": (0.0, 0.9), "eps": 1e-3}])
def test_adam_without_nothing_is_torch_adam(options: dict[str, Any], dtype: torch.dtype, keys: bool) -> None:
    ours = {"fused": False, **options}
    state = ("exp_avg", "exp_avg_sq")
    assert_same_as(lambda p: optim.Adam(p, **ours), lambda p: torch.optim.Adam(p, **options), dtype, keys, state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_decoupled_adam_without_nothing_is_torch_adamw(dtype: torch.dtype) -> None:
    assert_same_as(
        lambda p: optim.Adam(p, weight_decay=0.3, decoupled_weight_decay=True, fused=False),
        lambda p: torch.optim.AdamW(p, weight_decay=0.3),
        dtype,
        True,
        ("exp_avg", "exp_avg_sq"),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, {"momentum": 0.8, "nesterov": True}],
)
def test_sgd_without_nothing_is_torch_sgd(options: dict[str, Any], dtype: torch.dtype) -> None:
    state = ("momentum_buffer",) if "momentum" in options else ()
    assert_same_as(
        lambda p: optim.SGD(p, lr=0.1, **options),
        lambda p: torch.optim.SGD(p, lr=0.1, **options),
        dtype,
        True,
        state,
    )


@pytest.mark.parametrize(("preset", "without"), [("AdamS", "a"), ("AdamSRT", "abc")])
def test_presets(preset: str, without: str) -> None:
    case = Implementation("equal", torch.float64, 0.0)
    made, copies = parameters(case), parameters(case)
    one = getattr(optim, preset)([{"params": made[n], **LAYOUTS[n][1]} for n in made], lr=0.01, weight_decay=0.1)
    other = optim.Adam(
        [{"params": copies[n], **LAYOUTS[n][1]} for n in copies], lr=0.01, weight_decay=0.1, without=without
    )
    for _ in zip(gradients(made, 50), gradients(copies, 50), strict=True):
        one.step()
        other.step()
    assert all(torch.equal(p, q) for n in made for p, q in zip(made[n], copies[n], strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
def test_adamp_on_filters_is_adamp_where_it_projects(nesterov: bool) -> None:
    """A threshold that every gradient passes: the package projects the filters of every tensor, in every step."""
    options = {"lr": 0.02, "weight_decay": 0.3, "nesterov": nesterov}
    pairs = [[nn.Parameter(p.detach().clone()) for p in parameters(REFERENCE)["filter"]] for _ in range(2)]
    ours = optim.AdamP([{"params": pairs[0], "rows": "filter"}], **options)
    assert_same_as_adamp(ours, adamp.AdamP(pairs[1], delta=1e9, **options), pairs, lambda p, draw: draw)


def test_adamp_on_a_tensor_is_adamp_where_it_projects() -> None:
    """Gradients along each filter that cancel over the tensor: the package's second test finds the tensor."""

    def tangent_over_the_tensor(p: Tensor, draw: Tensor) -> Tensor:
        g = p.detach() * torch.linspace(-1, 1, len(p), dtype=p.dtype).view(-1, 1) + 0.01 * draw
        return g - (g * p.detach()).sum() / p.detach().square().sum() * p.detach()

    pairs = [[nn.Parameter(torch.linspace(-1, 2, 20, dtype=torch.float64).reshape(4, 5))] for _ in range(2)]
    ours = optim.AdamP([{"params": pairs[0], "rows": "tensor"}], lr=0.01, weight_decay=0.3)
    theirs = adamp.AdamP(pairs[1], lr=0.01, weight_decay=0.3)
    assert_same_as_adamp(ours, theirs, pairs, tangent_over_the_tensor)


def assert_same_as_adamp(ours: Any, theirs: Any, pairs: Any, gradient: Callable[[Tensor, Tensor], Tensor]) -> None:
    draws = torch.Generator().manual_seed(11)
    for k in range(200):
        for p, q in zip(*pairs, strict=True):
            draw = torch.randn(p.shape, generator=draws, dtype=p.dtype)
            p.grad, q.grad = gradient(p, draw), gradient(q, draw)
        ours.step()
        theirs.step()
        for p, q in zip(*pairs, strict=True):
            assert (p - q).norm() <= 1e-11 * q.norm(), f"step {k}"
