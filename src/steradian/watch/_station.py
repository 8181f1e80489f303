"""The numbers of observed steps on one device, until they are reduced there and sent to the host in one transfer."""

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steradian.watch._followed import Followed
from steradian.watch._reduce import Reduction
from steradian.watch._source import Source, decoupled, dtype_of, nominal
from steradian.watch._sources import source_of
from steradian.watch.equilibrium import Balance, balance_of

__all__ = ["Station"]

_NUMBERS = 2**24
_STEPS = 256
_EVEN = 4
_FORGET = 0.99
_SETTINGS = ("lr", "weight_decay", "wd_ratio", "decoupled_weight_decay")
"""What `nominal` and `decoupled` look at."""


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
        self.skips = torch.zeros(self.steps, 2, device=self.device)
        self.skipped = torch.zeros((), device=self.device)
        self.counts = counts = torch.tensor([entry.rows for entry in self.followed], device="cpu")
        places = [self._option(entry) for entry in self.followed]
        self.column = torch.repeat_interleave(torch.tensor(places, device="cpu"), counts).to(self.device)
        self.group = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts).to(self.device)
        self._find_balances()
        self.slopes = torch.zeros(2, self.rows, dtype=dtype_of(followed), device=self.device)
        self._fading: tuple[Tensor, Tensor] | None = None
        self.reduced = Reduction([entry.span for entry in self.followed], device=self.device)
        self.reduced(self.values[0, :, 0][None])  # what is compiled for it is compiled now
        self.may_skip = False

    def _find_balances(self) -> None:
        """The equilibria under the present settings; schedules of weight decay and β change them."""
        self.balances = [balance_of(self.optimizer, entry.options, entry.size) for entry in self.followed]
        dtype = dtype_of(self.followed)
        self.balance = Balance.of_rows(self.balances, self.counts, device=self.device, dtype=dtype)

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
        self.settings[slot] = self._setting
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
        now = [balance_of(self.optimizer, entry.options, entry.size) for entry in self.followed]
        if now != self.balances:
            self._find_balances()
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
        if self.balance is None:
            return {}
        slope = (found["radius"] * found["gradient_norm"]) ** 2
        use = slope.isfinite() if there is None else slope.isfinite() & there
        weights, fading = self._faded(slope)
        total = weights @ torch.where(use, slope, 0) + fading * self.slopes[0]
        weight = weights @ use.to(slope.dtype) + fading * self.slopes[1]
        self.slopes = torch.stack([total[-1], weight[-1]])
        mean = (total / weight).sqrt()  # NaN where no gradient was finite so far
        radius, angle = self.balance(found["lr"], mean)
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
