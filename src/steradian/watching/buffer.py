"""Observed steps of the rows of one source: their numbers, until a flush reduces them on their device."""

import math
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from steradian.balance import Balance, balance_of
from steradian.groups import Layout
from steradian.optim import RowOptimizer
from steradian.optim.fused.decide import runs_kernels
from steradian.watching.rows import INVARIANT, WatchedGroup, dtype_of, nominal_rate
from steradian.watching.sources import Quantities, Source
from steradian.watching.sources.observed import ObservedSource, tells_step
from steradian.watching.sources.phenomena import PhenomenaSource
from steradian.watching.sources.telemetry import TelemetrySource
from steradian.watching.statistics import Statistics

__all__ = ["ON_INVARIANT", "Buffer", "decoupled_decay", "evenly", "sources_of"]

_SHARE, _NUMBERS = 16, 2**16  # a buffer has one number for this many of the watched weights, or as many as these
_STEPS = 256  # the most steps in a buffer
# Of a flush per row and step, with and without invariant rows; together at most the largest parameter, or so many.
_BYTES, _LEAST = {True: 160, False: 112}, 2**22
_ALIGNED = 4  # an observation begins at a multiple of 4 numbers: 16 bytes, as a kernel that writes to it may expect
_FADING = 0.99  # by which the mean of ‖∇L(u)‖² forgets, per observation
_SINGLE = 64  # single rows of a group that are recorded now and then
_BALANCING = ("weight_decay", "betas", "momentum")  # settings that an equilibrium depends on and schedules change
_SETTINGS = ("lr", "wd_ratio", "decoupled_weight_decay", *_BALANCING)  # that are read at every observed step
_IMAGE = ("radius", "angle", "effective_lr", "velocity", "taylor", "radial", "direction_norm", "nu")
"""Quantities of the image of a step that are recorded."""
_OF_ALL = {"radius", "angle", "update", "radial_share", "effective_lr", "defect", "gradient_norm", "collapsed", "lr"}
"""Quantities that mean something on every row; the others are recorded on invariant rows alone."""
ON_INVARIANT = ("velocity", "taylor", "radial", "direction_norm", "nu", "equilibrium_radius", "equilibrium_angle")

Settings = list[dict[str, Any]]  # of each param group of a buffer


def evenly(n_rows: int) -> NDArray[np.int64]:
    """Numbers of the rows of a group that are recorded now and then, evenly spaced."""
    return np.linspace(0, n_rows - 1, min(n_rows, _SINGLE)).round().astype(np.int64)


def sources_of(optimizer: Optimizer, watched: Sequence[WatchedGroup], *, phenomena: bool) -> list[Source]:
    """The cheapest sources that know the steps of these groups on one device.

    Telemetry if the optimizer has it; else one launch over all rows where kernels run, or sums by torch. Groups whose
    steps the state tells and others have sources of their own, since only the others are copied before a step.
    """
    if phenomena:
        return [PhenomenaSource(optimizer, watched)]
    found: list[Source] = []
    left = list(watched)
    if isinstance(optimizer, RowOptimizer) and optimizer._emits:
        told = [group for group in watched if _has_telemetry(group)]
        left = [group for group in watched if group not in told]
        found += [TelemetrySource(optimizer, told)] if told else []
    kernels = bool(left) and runs_kernels(left[0].device)
    if kernels:
        from steradian.watching.sources.triton import TritonSource, supports
    kinds: dict[tuple[bool, Any, bool], list[WatchedGroup]] = {}
    for group in left:
        kinds.setdefault((kernels and supports(group), group.dtype, tells_step(group)), []).append(group)
    for (by_kernel, _, _), groups in kinds.items():
        found.append(TritonSource(optimizer, groups) if by_kernel else ObservedSource(optimizer, groups))
    return found


def _has_telemetry(watched: WatchedGroup) -> bool:
    """Whether the optimizer cuts the parameters into these rows."""
    declared, params = watched.settings.get("rows"), watched.settings["params"]
    together = len(params) if watched.settings.get("joint") else 1
    return declared is not None and Layout(declared) == watched.layout and len(watched.params) == together


class Buffer:
    """The numbers of some observed steps of the groups of a source, and the settings that these steps used."""

    def __init__(self, source: Source, optimizer: Optimizer, *, every_step: bool = False) -> None:
        self.source, self.optimizer = source, optimizer
        self.watched = watched = source.watched
        self.device = watched[0].device
        self.n_rows = sum(group.n_rows for group in watched)
        dtype, width = source.dtype, len(source.columns)
        # All ranks must flush at the same steps, whatever number of rows each of them has.
        total = sum(group.total_rows for group in watched)
        most = max(_NUMBERS, sum(group.total_rows * group.size for group in watched) // _SHARE)
        largest = max(group.total_rows * group.size * group.dtype.itemsize for group in watched)
        invariant = any(group.label == INVARIANT for group in watched)
        room = max(_LEAST, largest) // max(1, total * _BYTES[invariant])
        self.steps = max(1, min(_STEPS, most // max(1, total * width), room))
        numbers = self.n_rows * width
        aligned = torch.zeros(self.steps, -(-numbers // _ALIGNED) * _ALIGNED, dtype=dtype, device=self.device)
        self.values = aligned[:, :numbers].unflatten(1, (self.n_rows, width))
        self._slots = self.values.unbind(0)
        expects = every_step and type(source).expect is not Source.expect
        self._next = (*self._slots[1:], self._slots[0]) if expects else ()
        # Where a source writes at a step that is not recorded.
        self.scratch = torch.zeros(self.n_rows if source.each_step else 0, width, dtype=dtype, device=self.device)
        self.param_groups = list({id(group.settings): group.settings for group in watched}.values())
        index = {id(settings): k for k, settings in enumerate(self.param_groups)}
        self.places = [index[id(group.settings)] for group in watched]
        # The rate of each param group at each observed step, where it is a tensor on the device.
        count = len(self.param_groups)
        self.rates = torch.zeros(self.steps, count, dtype=dtype, device=self.device)
        # At each observed step, rate and decay as numbers, and what an equilibrium depends on.
        self._setting: tuple[list[tuple[float, float]], Settings] = [(0.0, 0.0)] * count, [{}] * count
        self._settings = [self._setting] * self.steps
        self._known: list[object] = []
        counts = [group.n_rows for group in watched]
        self._column = torch.from_numpy(np.repeat(self.places, counts)).to(self.device)  # param group of each row
        self.group = torch.from_numpy(np.repeat(np.arange(len(watched)), counts)).to(self.device)  # of each row
        self._equilibria = Equilibria(self) if invariant else None
        self.may_skip = False  # whether there is a gradient scaler that can skip steps
        self.skips = torch.zeros(self.steps, 2, device=self.device)
        self.skipped = torch.zeros((), device=self.device)  # steps that were skipped so far
        self.statistics = Statistics([group.span for group in watched], device=self.device)
        self.statistics(self.values[0, :, 0][None].to(dtype_of(watched)))  # compiles its kernels
        # The rows of each group that are recorded by themselves now and then, and their places among all.
        self.single_rows = [evenly(group.n_rows) for group in watched]
        places = [group.start + rows for group, rows in zip(watched, self.single_rows, strict=True)]
        self.single = torch.from_numpy(np.concatenate(places)).to(self.device)

    def nbytes(self) -> int:
        """Memory on the device for observed steps."""
        return self.values.nbytes + self.scratch.nbytes + self.source.nbytes()

    def recorded(self, quantities: Sequence[str]) -> NDArray[np.bool_]:
        """(quantities, groups): whether a quantity is recorded of a group."""
        invariant = np.array([group.label == INVARIANT for group in self.watched])
        return invariant | np.array([[name in _OF_ALL] for name in quantities])

    def update_settings(self) -> None:
        """Take over the param groups of the watched groups, which `Membership.update` changed."""
        for place, group in zip(self.places, self.watched, strict=True):
            self.param_groups[place] = group.settings

    def missing(self) -> dict[str, str]:
        """Quantities that are not recorded, with the reason."""
        return {**self.source.missing, **(self._equilibria.missing() if self._equilibria is not None else {})}

    # At every step

    def count_skip(self) -> None:
        """Count a step that a gradient scaler may have skipped, on the device."""
        found = getattr(self.optimizer, "found_inf", None)
        self.may_skip |= found is not None
        if self.may_skip:
            self._skip = self.skipped * 0 if found is None else (found.reshape(()) != 0).to(self.skipped)
            self.skipped += self._skip

    def observe(self, slot: int) -> None:
        """Write the numbers and settings of the step that was just taken to a slot."""
        self.source.after(self._slots[slot])
        if self._next:
            self.source.expect(self._next[slot])
        now = [setting for group in self.param_groups for setting in map(group.get, _SETTINGS)]
        # Settings rarely change; a tensor may have changed in place.
        if len(now) != len(self._known) or not all(map(is_, now, self._known)):
            self._read_settings(slot)
            self._known = [] if any(isinstance(setting, Tensor) for setting in now) else now
        self._settings[slot] = self._setting
        if self.may_skip:
            self.skips[slot] = torch.stack([self._skip, self.skipped])

    @torch.no_grad()
    def _read_settings(self, slot: int) -> None:
        numbers = []
        for k, group in enumerate(self.param_groups):
            rate = nominal_rate(group)
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                self.rates[slot, k].copy_(rate.reshape(()), non_blocking=True)
                rate = 0.0
            numbers.append((float(rate), decoupled_decay(group)))
        balancing = [{name: group[name] for name in _BALANCING if name in group} for group in self.param_groups]
        # The same object as long as only the rate changes: equilibria are derived once for each.
        self._setting = numbers, self._setting[1] if balancing == self._setting[1] else balancing

    # At a flush

    @torch.no_grad()
    def reduce(self, count: int, active: Tensor) -> tuple[tuple[str, ...], Tensor, Tensor]:
        """Of filled slots: names of the quantities, statistics (steps, quantities, groups, 6), and all rows."""
        numbers = [numbers for numbers, _ in self._settings[:count]]
        settings = _send(torch.tensor(numbers, dtype=self.rates.dtype, device="cpu"), self.device)
        rates = self.rates[:count] + settings[..., 0]
        self.rates.zero_()  # a rate may be a tensor now and a number later
        of_rows = self._column if len(self.param_groups) > 1 else slice(None)
        image, found = self.source.numbers(self.values[:count], rates[:, of_rows], settings[..., 1][:, of_rows])
        wanted = _IMAGE if self._equilibria is not None else [name for name in _IMAGE if name in _OF_ALL]
        of_image: Quantities = {name: value for name in wanted if (value := getattr(image, name)) is not None}
        found = {**of_image, "collapsed": image.collapsed.to(image.radius), **found}
        if self._equilibria is not None:
            there = _send(active, self.device)[:, self.group] & (self.skips[:count, :1] == 0)
            found |= self._equilibria(found, there, [balancing for _, balancing in self._settings[:count]])
        else:
            found = {name: value for name, value in found.items() if name in _OF_ALL}
        del image, of_image
        names, rows = tuple(found), settings.new_empty(count, len(found), self.n_rows, dtype=found["radius"].dtype)
        for k, name in enumerate(names):
            rows[:, k] = found.pop(name)
        return names, self.statistics(rows), rows


class Equilibria:
    """Radius and angle of all rows of a buffer in equilibrium, under the settings of each observed step."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self._dtype = buffer, dtype_of(buffer.watched)
        self._balances = self._balances_under(buffer.param_groups)
        # Sums of ‖∇L(u)‖² and of weights over past observations, for each row.
        self._slopes = torch.zeros(2, buffer.n_rows, dtype=self._dtype, device=buffer.device)

    def __call__(self, found: Quantities, there: Tensor, settings: Sequence[Settings]) -> Quantities:
        """The equilibria, with γ² the mean of ‖∇L(u)‖² over about 100 observations where a row was stepped, `there`."""
        balance = self._balance(settings)
        if balance is None:
            return {}
        unknown = torch.full_like(found["radius"], math.nan)  # where a step overwrites the gradient
        slope = (found["radius"] * found.get("gradient_norm", unknown)) ** 2
        use = slope.isfinite() & there
        # The weight of each observation in the mean at each of them, and the weight of all earlier ones.
        lag = torch.arange(len(slope), device=slope.device)
        weights = torch.tril(_FADING ** (lag[:, None] - lag[None, :]).clamp(min=0).to(slope.dtype))
        faded = _FADING ** (lag + 1).to(slope.dtype)[:, None]
        total = weights @ torch.where(use, slope, 0) + faded * self._slopes[0]
        weight = weights @ use.to(slope.dtype) + faded * self._slopes[1]
        self._slopes = torch.stack([total[-1], weight[-1]])
        mean = (total / weight).sqrt()  # NaN if no gradient was finite so far
        radius, angle = balance(found["lr"], mean)
        return {"equilibrium_radius": radius, "equilibrium_angle": angle}

    def missing(self) -> dict[str, str]:
        """The equilibria with the reasons why there are none, if no group has one."""
        if any(isinstance(balance, Balance) for balance in self._balances):
            return {}
        reason = "; ".join(sorted({balance for balance in self._balances if isinstance(balance, str)}))
        return {"equilibrium_radius": reason, "equilibrium_angle": reason}

    def _balances_under(self, settings: Settings) -> list[Balance | str]:
        """The equilibrium of each group under these settings, or the reason why there is none."""
        keys = [(place, group.size) for place, group in zip(self.buffer.places, self.buffer.watched, strict=True)]
        groups = [{**group, **changed} for group, changed in zip(self.buffer.param_groups, settings, strict=True)]
        known = {(place, size): balance_of(self.buffer.optimizer, groups[place], size) for place, size in set(keys)}
        return [known[key] for key in keys]

    def _balance(self, settings: Sequence[Settings]) -> Balance | None:
        """One balance for all rows and steps, with NaN for a group that has none; None if no group has one."""
        distinct = {id(setting): setting for setting in settings}
        balances = {key: self._balances_under(setting) for key, setting in distinct.items()}
        self._balances = balances[id(settings[-1])]
        if not any(isinstance(balance, Balance) for under in balances.values() for balance in under):
            return None
        # One line for all steps if the settings are the same at all of them.
        lines = [balances[id(setting)] for setting in settings[: len(settings) if len(distinct) > 1 else 1]]

        def column(name: str) -> Tensor:
            missing, dtype = (False, torch.bool) if name == "free" else (math.nan, self._dtype)
            # A reason has no such attribute.
            values = [[getattr(balance, name, missing) for balance in line] for line in lines]
            return _send(torch.tensor(values, dtype=dtype, device="cpu"), self.buffer.device)[:, self.buffer.group]

        return Balance(*(column(name) for name in ("gain", "power", "root", "pace", "free")))


def decoupled_decay(settings: Mapping[str, Any]) -> float:
    """The decoupled decay δ of a param group's rows, as in AdamW and in our optimizers."""
    share = settings.get("wd_ratio", settings.get("decoupled_weight_decay"))
    return float(settings.get("weight_decay") or 0.0) * float(share or 0.0)


def _send(values: Tensor, device: torch.device) -> Tensor:
    """Copy to a device; the host does not wait for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
