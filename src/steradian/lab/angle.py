"""Does the angle explain the table? Three studies of what is left of the differences between optimizers.

- crossed: filters by SGD-M or Adam w/o (ab), the rest by SGD-M or Adam.
- matched: directions at the angle that SGD-M, or Adam w/o (ab), had in each step and layer (`AtAngle`).
- tuned: all methods tuned over six points each, which are the same six angles in equilibrium.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from steradian import optim
from steradian.geometry import collapsed, dot, norm
from steradian.groups import Groups, Layout
from steradian.lab.config import Config, match_names
from steradian.lab.experiments import RECORDED, Tracked
from steradian.lab.registry import optimizer_of, register_method, split_rows
from steradian.lab.results import Result
from steradian.lab.rivals import Hyperball, Rotational
from steradian.lab.study import Study
from steradian.lab.tables import Cell, Rows, holm, signed, winners
from steradian.optim.rows import RowSet
from steradian.watching.records import COLUMNS

__all__ = ["ANGLES", "CROSSED", "MATCHED", "PARTS", "TUNED", "AtAngle", "angle_rows", "angle_study"]

_REST_DECAY = 2.5e-4  # λ of parameters without rows where it is not the method's own


def _turned(x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    """`AtAngle` on the rows x of a layer, which another optimizer has moved to y; a row that did not turn stays."""
    r, moved = norm(x), y - x
    r = r.masked_fill(gone := collapsed(r), 1)
    across = moved - dot(moved, x) / r.square() * x
    length = norm(across)
    # The tangent part of a radial step is rounding.
    still = gone | (length <= 16 * torch.finfo(x.dtype).eps * norm(moved))
    shares = (length / r).masked_fill(still, 0)
    mean = shares.square().mean().sqrt()
    angle = shares * (theta / mean.masked_fill(mean == 0, 1))
    landed = angle.cos() * x + angle.sin() * r / length.masked_fill(still, 1) * across
    return torch.where(still, x, landed)


class AtAngle(Optimizer):
    """Another optimizer's directions on rows, at given angles: every layer turns by θ in the root mean square.

    With the step Δ of the other optimizer on a row x = r u, and a = ‖Δ^⊥‖/r: x' = r Exp_u(α Δ^⊥/r), where α is one
    factor for all rows of a layer, θ/√(mean a²). The radial part of Δ is dropped and the radius stays. Parameters of
    the other optimizer that are not among `rows` are left to it.

    Args:
        inner: the other optimizer.
        rows: param groups with "rows": its parameters that are turned. A parameter, or a joint set, is a layer.
        angles: θ of each step and layer, (steps, layers); after the last step it stays.
    """

    update = staticmethod(_turned)

    def __init__(self, inner: Optimizer, rows: Sequence[Mapping[str, Any]], angles: Tensor) -> None:
        sets: list[tuple[Layout, list[Tensor]]] = []
        for group in rows:
            layers = [list(group["params"])] if group.get("joint") else [[p] for p in group["params"]]
            sets += [(Layout(group["rows"]), layer) for layer in layers]
        device = sets[0][1][0].device
        if angles.ndim != 2 or angles.shape[1] != len(sets) or not len(angles):
            raise ValueError(f"angles must have the shape (steps, {len(sets)}), got {tuple(angles.shape)}")
        self.inner, self._sets, self._angles = inner, sets, angles.to(device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        super().__init__(inner.param_groups, {})
        self.param_groups, self.state = inner.param_groups, inner.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step."""
        sets = [RowSet(layout, params, [{} for _ in params]) for layout, params in self._sets]
        before = [rows.read("param", rows.whole).clone() for rows in sets]
        self.inner.step()
        theta = self._angles.index_select(0, self._at.clamp(max=len(self._angles) - 1))
        for k, (rows, x) in enumerate(zip(sets, before, strict=True)):
            landed = self.update(x, rows.read("param", rows.whole), theta[0, k].to(x.dtype))
            for piece, (y,) in rows.pieces("param"):
                y.copy_(landed[piece])
        self._at += 1

    def state_dict(self) -> dict[str, Any]:
        """The other optimizer's state, and the number of the next step."""
        inner = self.inner.state_dict()
        return {"state": {"inner": inner["state"], "at": self._at}, "param_groups": inner["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returns."""
        state = state_dict["state"]
        self.inner.load_state_dict({"state": state["inner"], "param_groups": state_dict["param_groups"]})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._at.copy_(state["at"])


def _tensors(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same parameters with one row each."""
    return [{"params": group["params"], "rows": "tensor"} for group in rows]


def _optimizer(name: str, params: list[dict[str, Any]], config: Config, lr: float, decay: float) -> Optimizer:
    """An optimizer of these parameters alone."""
    if name == "Muon":  # Hyperball's step differs from Muon's by a factor and a radial part for each tensor
        return Hyperball(_tensors(params), 0.01, 0.95)
    if name.startswith("Adam w/o"):
        return optim.Adam(params, lr, config.betas, weight_decay=decay, without=name.partition("(")[2].strip(")"))
    how: dict[str, Any] = {"weight_decay": decay, "fused": params[0]["params"][0].is_cuda}
    if name == "SGD-M":
        return torch.optim.SGD(params, lr, config.momentum, **how)
    return torch.optim.Adam(params, lr, config.betas, **how)


def _rest(name: str, rest: list[dict[str, Any]], config: Config) -> Optimizer:
    """SGD-M or Adam on the parameters without rows."""
    return _optimizer(name, rest, config, config.rest_lr or {"SGD-M": 0.1, "Adam": 1e-3}[name], _REST_DECAY)


def _crossed(filters: str, others: str, groups: Groups, config: Config) -> list[Optimizer]:
    rows, rest = split_rows(groups)
    return [_optimizer(filters, rows, config, config.lr, config.weight_decay), _rest(others, rest, config)]


_VARIANT = "Adam w/o (ab)"
CROSSED = {"{}, rest {}".format(*pair): pair for pair in product(("SGD-M", _VARIANT), ("SGD-M", "Adam"))}
"""By name: what steps the filters, and what the rest."""
for _name, _pair in CROSSED.items():
    register_method(_name, partial(_crossed, *_pair))

_CONTROL = f"{_VARIANT}, last layer SGD-M"  # where a few dying filters of the record turn far
_curves: dict[tuple[str, str], dict[str, NDArray[np.float64]]] = {}
"""By column, method and layer, the angle that the method had in each step."""


def _matched(name: str, angles_of: str, groups: Groups, config: Config) -> list[Optimizer]:
    """A direction without L2, which only changes radii, at the angle of a method; SGD-M on the rest."""
    if (config.column, angles_of) not in _curves:
        raise ValueError(f"no record of {angles_of}'s angles on {config.column}: steradian angle matched makes it")
    curves = _curves[config.column, angles_of]
    (rows, rest), names = split_rows(groups), {id(param): name for name, param in groups.params.items()}
    firsts = [p for group in rows for p in (group["params"][:1] if group.get("joint") else group["params"])]
    angles = np.stack([curves[names[id(param)]] for param in firsts], axis=1)
    if angles_of == _CONTROL:
        angles[:, -1] = _curves[config.column, "SGD-M"][names[id(firsts[-1])]]
    turned = AtAngle(_optimizer(name, rows, config, config.lr, 0.0), rows, torch.from_numpy(angles).float())
    return [turned, _rest("SGD-M", rest, config)]


_DIRECTIONS = ("SGD-M", "Adam", "Adam w/o (a)", _VARIANT, "Adam w/o (abc)", "Muon")
MATCHED = {f"{name} at SGD-M's angle": (name, "SGD-M") for name in _DIRECTIONS}
MATCHED |= {f"SGD-M at {_VARIANT}'s angle": ("SGD-M", _VARIANT), f"{_VARIANT} at its own angle": (_VARIANT, _VARIANT)}
MATCHED |= {f"SGD-M at {_VARIANT}'s angle but for the last layer": ("SGD-M", _CONTROL)}
"""By name: whose direction and whose angle."""
for _name, _pair in MATCHED.items():
    register_method(_name, partial(_matched, *_pair))


def _adamw(groups: Groups, config: Config) -> Optimizer:
    """Decay on the rows alone."""
    made = groups.param_groups(weight_decay=config.weight_decay, rest={"weight_decay": 0.0})
    return torch.optim.AdamW(made, config.lr, config.betas)


def _on_spheres(groups: Groups, config: Config, make: Callable[..., Optimizer], **more: Any) -> Optimizer:
    """Angles of config.lr on the rows, and SGD-M with L2 on the rest."""
    rows, rest = split_rows(groups)
    more |= {"weight_decay": config.weight_decay, "rest_lr": config.rest_lr or 0.1}
    return make([*(_tensors(rows) if make is Hyperball else rows), *rest], config.lr, **more)


register_method("SGD-M, Nesterov", optimizer_of(torch.optim.SGD, "momentum", nesterov=True))
register_method("SGD-M, corrected decay", optimizer_of(optim.SGD, "momentum", corrected_decay=True))
register_method("AdamW, decay on rows", _adamw)
for _kind in ("gradient", "adam", "muon"):
    register_method(f"Angular, {_kind}", partial(_on_spheres, make=optim.Angular, direction=_kind))
register_method("Angular, muon, Nesterov", partial(_on_spheres, make=optim.Angular, direction="muon", nesterov=True))
register_method("Rotational SGD (REQ)", partial(_on_spheres, make=Rotational))
register_method("Hyperball, Muon", partial(_on_spheres, make=Hyperball))

_DECAYS = tuple(1e-4 * 2**k for k in range(6))
ANGLES = tuple(float(f"{math.sqrt(2 * 0.1 * decay / 1.9):.3g}") for decay in _DECAYS)
"""Of SGD-M's points in equilibrium, and of all others but those of Adam w/o (ab); Nesterov's momentum adds 16 %."""

_SGD = [(0.1, decay) for decay in _DECAYS]
_TURNS = [(angle, 5e-4) for angle in ANGLES]
TUNED = {
    **dict.fromkeys(("SGD-M", "SGD-M, Nesterov", "SGD-M, corrected decay"), _SGD),
    "AdamW, decay on rows": [(1e-3, 1e3 * decay) for decay in _DECAYS],  # the same angles, √(2ηλ(1−β1)/(1+β1))
    "Adam w/o (ab)": [(1e-3, 1e-3 / 2**k) for k in range(5, -1, -1)],  # the paper's grid
    **dict.fromkeys((f"Angular, {kind}" for kind in ("gradient", "adam", "muon", "muon, Nesterov")), _TURNS),
    "Rotational SGD (REQ)": _SGD,
    "Hyperball, Muon": _TURNS,
}
"""By method, its six points: rate and λ."""

_FIXED = {"SGD-M": (0.1, 2.5e-4), "Adam w/o (ab)": (1e-3, 1.25e-4)}  # the paper's
PARTS: dict[str, tuple[dict[str, list[tuple[float, float]]], int]] = {
    "crossed": ({name: [_FIXED[filters]] for name, (filters, _) in CROSSED.items()}, 135),
    "matched": ({name: [(0.1 if of == "SGD-M" else 1e-3, 0.0)] for name, (of, _) in MATCHED.items()}, 135),
    "tuned": (TUNED, 60),
}
"""By name of a study: the points of each method, and the epochs."""


class _Recorded(Tracked):
    """A training whose table has the root mean square of every layer's angle at the recorded steps."""

    def table(self) -> pd.DataFrame:
        angles = np.arctan(np.stack(self._values)[:, RECORDED.index("velocity")].astype(np.float64))
        parts = []
        for group, span in self.spans():
            value = np.sqrt(np.nanmean(angles[:, span] ** 2, axis=1))
            parts.append(pd.DataFrame({"step": self._recorded, "group": group.names[0], "value": value}))
        return pd.concat(parts).assign(run=self.config.key, quantity="angle", statistic="rms")[list(COLUMNS)]


def _angles(study: Study, config: Config) -> dict[str, NDArray[np.float64]]:
    """By layer, the angle of every step; between recorded steps it is interpolated."""
    table = study.tracks.table()
    table = table[(table["run"] == config.key) & (table["statistic"] == "rms")]
    steps = np.arange(table["step"].max() + 1)
    layers = table.groupby("group", observed=True)
    return {str(name): np.interp(steps, layer["step"], layer["value"]) for name, layer in layers}


def angle_study(
    part: str,
    study: Study,
    *,
    data: str = "cifar10",
    network: str = "ResNet20",
    methods: Sequence[str] | None = None,
    epochs: int | None = None,
    seeds: int = 5,
    points: int = 600,
    settings: Mapping[str, Any] | None = None,
) -> bool:
    """Run one of `PARTS` with a network on a data set, from where it was stopped; returns whether all is finished.

    The epochs, by default those of `PARTS`, have a cosine. The tuning has seed 0, its winners have the seeds 1, 2, ….
    For "matched", about `points` steps of SGD-M and of Adam w/o (ab), whose angles the others get, are recorded.
    `settings` are other fields of `Config`.
    """
    [part] = match_names("part", [part], PARTS)
    grid, usual = PARTS[part]
    common: dict[str, Any] = {"model": network, "data": data, "epochs": epochs or usual, "milestones": ()}
    common |= {"schedule": "cosine", **(settings or {})}
    taken = match_names("methods", methods, grid)
    configs = [Config(method=m, lr=lr, weight_decay=decay, **common) for m in taken for lr, decay in grid[m]]
    if part == "matched":
        reference = Config(method="SGD-M", lr=0.1, weight_decay=_REST_DECAY, **common)
        (lr, decay), method = _FIXED[_VARIANT], f"{_VARIANT}, rest SGD-M"
        variant = Config(method=method, lr=lr, weight_decay=decay, **common)
        make = partial(_Recorded, points=points, tracks=study.tracks)
        recording, known = replace(study, name=f"{study.name}-reference"), study.tracks.about()
        if not recording.run([config for config in (reference, variant) if config.key not in known], make=make):
            return False
        _curves[reference.column, "SGD-M"] = _angles(study, reference)
        _curves[reference.column, _VARIANT] = _curves[reference.column, _CONTROL] = _angles(study, variant)
    if part == "tuned":
        return study.tuning.run(configs) and study.run(winners(configs, study.tuning.store.results(), seeds))
    return study.run([replace(config, seed=seed) for seed in range(seeds) for config in configs])


def angle_rows(results: Iterable[Result]) -> Rows:
    """A table of trainings that differ in the angle alone, in its spread alone, or by `AtAngle`.

    SGD-M and Adam w/o (ab) step a filter along its momentum alike: at one angle of the layer they differ in how much
    further some filters turn than others.
    """
    found: dict[str, list[float]] = {}
    for result in results:
        found.setdefault(result.config.method, []).append(math.nan if result.diverged else result.accuracy)
    names, both = {pair: name for name, pair in MATCHED.items()}, ("SGD-M", _VARIANT)
    changes = [("angle", names[of, "SGD-M"], names[of, _VARIANT]) for of in both]
    changes += [("spread in a layer", names["SGD-M", angles_of], names[_VARIANT, angles_of]) for angles_of in both]
    changes += [("recorded angle, fixed radii, no L2", f"{of}, rest SGD-M", names[of, of]) for of in both]
    known = [change for change in changes if found.keys() >= set(change[1:])]
    differences = [Cell.of(found[after]).minus(Cell.of(found[before])) for _, before, after in known]
    lines = []
    for change, each, p in zip(known, differences, holm([each.p for each in differences]), strict=True):
        lines.append([*change, signed(each.mean), f"{signed(each.low)} to {signed(each.high)}", f"{p:.2g}"])
    return ["changed", "from", "to", "difference", "95 % interval", "p (Holm)"], lines
