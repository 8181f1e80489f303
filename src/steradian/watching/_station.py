"""The numbers of observed steps on one device, until they are reduced there and sent to the host in one transfer."""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian.balance import Balance, balance_of
from steradian.watching._followed import Followed
from steradian.watching._reduce import Reduction
from steradian.watching._source import Source, decoupled, dtype_of, nominal
from steradian.watching._sources import source_of

__all__ = ["Station"]

_NUMBERS = 2**24
_STEPS = 256
_EVEN = 4
_FORGET = 0.99
_BALANCING = ("weight_decay", "betas", "momentum")
"""What schedules change of the settings that an equilibrium depends on."""
_SETTINGS = ("lr", "wd_ratio", "decoupled_weight_decay", *_BALANCING)
"""What `nominal`, `decoupled` and equilibria look at."""

Balancing = tuple[dict[str, Any], ...]


class Station:
    """Observed steps of the rows on one device.

    Args:
        optimizer: the optimizer.
        followed: its rows on this device.
        phenomena: as for `watch`.
        each: every step is observed.

    Attributes:
        steps: how many observations it holds before it must be emptied.
    """

    def __init__(
        self, optimizer: Optimizer, followed: Sequence[Followed], *, phenomena: bool | None, each: bool = False
    ) -> None:
        self.optimizer = optimizer
        self.source: Source = source_of(optimizer, followed, phenomena=phenomena)
        self.followed = sorted(followed, key=lambda entry: entry.start)
        self.device = followed[0].device
        dtype = self.source.dtype or dtype_of(followed)
        self.rows = sum(entry.rows for entry in followed)
        width = len(self.source.columns)
        # All ranks must hand over at the same steps, however many of the rows each of them has.
        rows = sum(entry.layout.size(entry.params[0].shape)[0] for entry in followed)
        self.steps = max(1, min(_STEPS, _NUMBERS // max(1, rows * width)))
        # An observation begins at a multiple of 16 bytes, as a kernel that writes to it may expect.
        room, numbers = -(-self.rows * width // _EVEN) * _EVEN, self.rows * width
        whole = torch.zeros(self.steps, room, dtype=dtype, device=self.device)
        self.values = whole[:, :numbers].unflatten(1, (self.rows, width))
        self._slots = self.values.unbind(0)
        self._next = (*self._slots[1:], self._slots[0]) if each else ()
        self.scratch = torch.zeros(self.rows if self.source.each_step else 0, width, dtype=dtype, device=self.device)
        self.options = list({id(entry.options): entry.options for entry in followed}.values())
        self.rates = torch.zeros(self.steps, len(self.options), dtype=dtype, device=self.device)
        # On the host: rates that are numbers, and decoupled decays.
        self._setting: list[tuple[float, float]] = [(0.0, 0.0)] * len(self.options)
        self.settings = [self._setting] * self.steps
        self._known: list[object] = []
        self._balancing = self._present()
        self._balancings = [self._balancing] * self.steps
        self.skips = torch.zeros(self.steps, 2, device=self.device)
        self.skipped = torch.zeros((), device=self.device)
        self.counts = counts = torch.tensor([entry.rows for entry in self.followed], device="cpu")
        self._places = [self._option(entry) for entry in self.followed]
        self.column = torch.repeat_interleave(torch.tensor(self._places, device="cpu"), counts).to(self.device)
        self.group = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts).to(self.device)
        self.balances = self._balances(self._balancing)
        self._balance: tuple[list[Balance | str], Balance | None] | None = None
        self.slopes = torch.zeros(2, self.rows, dtype=dtype_of(followed), device=self.device)
        self._fading: tuple[Tensor, Tensor] | None = None
        self.reduced = Reduction([entry.span for entry in self.followed], device=self.device)
        self.reduced(self.values[0, :, 0][None])  # what is compiled for it is compiled now
        self.may_skip = False

    def _present(self) -> Balancing:
        return tuple({name: options[name] for name in _BALANCING if name in options} for options in self.options)

    def _balances(self, balancing: Balancing) -> list[Balance | str]:
        """The equilibrium of each group under these settings."""
        known: dict[tuple[int, int], Balance | str] = {}
        for place, entry in zip(self._places, self.followed, strict=True):
            if (place, entry.size) not in known:
                options = {**entry.options, **balancing[place]}
                known[place, entry.size] = balance_of(self.optimizer, options, entry.size)
        return [known[place, entry.size] for place, entry in zip(self._places, self.followed, strict=True)]

    def _balanced(self, count: int) -> Balance | None:
        """The equilibria of all rows, under the settings of each observation; None where there are none."""
        distinct = {id(balancing): balancing for balancing in self._balancings[:count]}
        balances = [self._balances(balancing) for balancing in distinct.values()]
        self.balances = balances[-1]
        dtype = dtype_of(self.followed)
        if len(distinct) > 1:
            order = {key: k for k, key in enumerate(distinct)}
            steps = torch.tensor([order[id(balancing)] for balancing in self._balancings[:count]], device="cpu")
            return _balance_of_rows(balances, self.group, steps, send=self._sent, dtype=dtype)
        if self._balance is None or self._balance[0] != self.balances:
            steps = torch.zeros(1, dtype=torch.long, device="cpu")
            self._balance = (
                self.balances,
                _balance_of_rows(balances, self.group, steps, send=self._sent, dtype=dtype),
            )
        return self._balance[1]

    def _option(self, entry: Followed) -> int:
        return next(k for k, options in enumerate(self.options) if options is entry.options)

    @property
    def quantities(self) -> tuple[str, ...]:
        """The names of what it gives, in order."""
        return self._quantities

    _quantities: tuple[str, ...] = ()

    def note_skip(self) -> None:
        """Count a step that a gradient scaler may have skipped, on the device; without autograd."""
        found = getattr(self.optimizer, "found_inf", None)
        if found is not None:
            self.may_skip = True
            self.skipped += (found.reshape(()).to(self.skipped) != 0).to(self.skipped)

    def observe(self, slot: int) -> None:
        """Take in the step that was just made."""
        self.source.after(self._slots[slot])
        if self._next:
            self.source.expect(self._next[slot])
        now = [setting for options in self.options for setting in map(options.get, _SETTINGS)]
        # In every step, and most often they are what they were; a tensor may hold another number.
        if len(now) != len(self._known) or not all(map(is_, now, self._known)):
            self._read_settings(slot)
            self._known = [] if any(isinstance(setting, Tensor) for setting in now) else now
        self.settings[slot], self._balancings[slot] = self._setting, self._balancing
        if self.may_skip:
            found = getattr(self.optimizer, "found_inf", None)
            verdict = self.skipped * 0 if found is None else found.reshape(()).to(self.skipped)
            self.skips[slot] = torch.stack([verdict, self.skipped])

    @torch.no_grad()
    def _read_settings(self, slot: int) -> None:
        self._setting = []
        for k, options in enumerate(self.options):
            rate = nominal(options)
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                self.rates[slot, k].copy_(rate.reshape(()), non_blocking=True)
                rate = 0.0
            self._setting.append((float(rate), decoupled(options)))
        present = self._present()
        if not all(map(_same, present, self._balancing)):
            self._balancing = present

    @torch.no_grad()
    def reduce(self, count: int, active: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics (steps, quantities, groups, 6) of the first observations, and all rows of them.

        Args:
            count: how many observations there are.
            active: (steps, groups), on the host.
        """
        values = self.values[:count]
        settings = self._sent(torch.tensor(self.settings[:count], dtype=self.rates.dtype, device="cpu"))
        rates = self.rates[:count] + settings[..., 0]
        self.rates.zero_()  # a rate may be a tensor now and a number later
        found = self.source.quantities(values, rates[:, self.column], settings[..., 1][:, self.column])
        there = self._sent(active)[:, self.group] if not bool(active.all()) else None
        if self.may_skip:
            went = (self.skips[:count, 0] == 0)[:, None].expand(count, self.rows)
            there = went if there is None else there & went
        found |= self._equilibria(found, there)
        self._quantities = tuple(found)
        rows = torch.stack(list(found.values()), dim=1)
        return self.reduced(rows), rows

    def _sent(self, values: Tensor) -> Tensor:
        """On the device, without the host waiting for what is in the queue there."""
        if self.device.type != "cuda":
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)

    def _equilibria(self, found: dict[str, Tensor], there: Tensor | None) -> dict[str, Tensor]:
        """Where growth and decay balance, from the mean of ‖∇L(u)‖² over about the last hundred observations."""
        balance = self._balanced(len(found["radius"]))
        if balance is None:
            return {}
        slope = (found["radius"] * found["gradient_norm"]) ** 2
        use = slope.isfinite() if there is None else slope.isfinite() & there
        weights, fading = self._faded(slope)
        total = weights @ torch.where(use, slope, 0) + fading * self.slopes[0]
        weight = weights @ use.to(slope.dtype) + fading * self.slopes[1]
        self.slopes = torch.stack([total[-1], weight[-1]])
        mean = (total / weight).sqrt()  # NaN where no gradient was finite so far
        radius, angle = balance(found["lr"], mean)
        return {"equilibrium_radius": radius, "equilibrium_angle": angle}

    def _faded(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the observations at hand for each of them, and of all before them; kept for the next time."""
        if self._fading is None or len(self._fading[0]) != len(like):
            lag = torch.arange(len(like), device=self.device)
            weights = torch.tril(_FORGET ** (lag[:, None] - lag[None, :]).clamp(min=0).to(like.dtype))
            self._fading = weights, _FORGET ** (lag + 1).to(like.dtype)[:, None]
        return self._fading

    def missing(self) -> dict[str, Any]:
        """What is not recorded, and why."""
        why = {balance for balance in self.balances if isinstance(balance, str)}
        if len(why) and all(isinstance(balance, str) for balance in self.balances):
            reason = "; ".join(sorted(why))
            return {**self.source.missing, "equilibrium_radius": reason, "equilibrium_angle": reason}
        return dict(self.source.missing)


def _same(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether settings are the same; a tensor that is the same one is read where numbers are reduced, not here."""
    return some.keys() == others.keys() and all(
        value is others[name]
        or (not (isinstance(value, Tensor) or isinstance(others[name], Tensor)) and value == others[name])
        for name, value in some.items()
    )


def _balance_of_rows(
    balances: Sequence[Sequence[Balance | str]],
    rows: Tensor,
    steps: Tensor,
    *,
    send: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> Balance | None:
    """One balance for all rows of several groups in several steps, (steps, rows); None where no group has one.

    Args:
        balances: of each group, under each of some settings; NaN stands where there is none.
        rows: the group of each row, on the device.
        steps: the settings of each step, by their place in `balances`, on the host.
        send: brings a tensor to the device.
        dtype: of the numbers there.
    """
    known = [[balance if isinstance(balance, Balance) else None for balance in under] for under in balances]
    if not any(any(under) for under in known):
        return None

    def column(name: str) -> Tensor:
        missing = False if name == "free" else math.nan
        values = torch.tensor(
            [[missing if balance is None else getattr(balance, name) for balance in under] for under in known],
            dtype=torch.bool if name == "free" else dtype,
            device="cpu",
        )
        return send(values[steps])[:, rows]

    return Balance(*(column(name) for name in ("gain", "power", "root", "pace", "free")))
