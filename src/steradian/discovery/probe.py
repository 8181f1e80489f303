"""The numerical proof: inner products ⟨∇L, x⟩ of every slice of every parameter, in one backward pass.

Lemma 1 of the paper: if f(ρx) = f(x) for all ρ > 0, then ⟨∇L(x), x⟩ = 0 for every loss L of f. One pass with
random cotangents on all outputs (a random linear loss) tests that for every slice at once. A pass is made in
float64 where the model allows it, so that an exact invariance reads 1e-12 and not 1e-5.
"""

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from .align import pairs_to_align
from .graph import graph_nodes
from .points import Noise, Point
from .sandbox import Leaves, as_dtype, make_leaves, quiet, swapped, unwrap
from .tables import Key, Table, tabulate, to_host
from .values import floating, map_inputs, name_inputs, perturb, tensors_in

__all__ = ["BUDGET", "Precision", "Prober", "Reading", "Recorder"]

BUDGET = 12
"""Most passes through the model, with or without a backward one."""


@dataclass(frozen=True)
class Precision:
    """What counts as zero, by the arithmetic of the probes.

    Attributes:
        dtype: the probes' type; None leaves each tensor its own.
        noise: below this share of the largest effect in the model, an effect is rounding.
        loose: imbalance of a candidate at ordinary scale, where a normalization's ε still shows.
        strict: imbalance of a proved row after its radius grew 1024-fold, where ε has no weight left.
        settled: imbalance after that growth which needs no explanation; a larger one must have fallen as ε's does.
        flat: imbalance that may stay, where another normalization undoes the growth.
        linear: imbalance at ordinary scale that may fall with the growth and not with its square.
        same: relative change of outputs that counts as none.
        resolution: largest rounding error of an imbalance.
    """

    dtype: torch.dtype | None
    noise: float
    loose: float
    strict: float
    settled: float
    flat: float
    linear: float
    same: float
    resolution: float


def precision_of(dtype: torch.dtype | None, parameters: Sequence[Tensor]) -> Precision:
    """The thresholds for a probe in dtype (None: the parameters' own types)."""
    eps = max(torch.finfo(dtype or p.dtype).eps for p in parameters)
    if eps < 1e-12:
        return Precision(
            dtype,
            noise=1e-10,
            loose=0.05,
            strict=1e-4,
            settled=1e-6,
            flat=1e-2,
            linear=5e-4,
            same=1e-5,
            resolution=1e-9,
        )
    if eps < 1e-6:
        return Precision(
            dtype,
            noise=1e-5,
            loose=0.05,
            strict=1e-2,
            settled=3e-4,
            flat=1e-2,
            linear=5e-4,
            same=1e-2,
            resolution=1e-3,
        )
    return Precision(
        dtype, noise=1e-2, loose=0.2, strict=0.1, settled=0.1, flat=0.1, linear=0.0, same=0.1, resolution=0.1
    )


class Recorder(Protocol):
    """Something that looks on while the model runs."""

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """Hooks on the model's modules, for the duration of one forward pass."""

    def finish(self, outputs: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> None:
        """Called between forward and backward, while the autograd graph is whole."""


@dataclass
class Reading:
    """What one probe measured.

    Attributes:
        tables: per trainable parameter and key, the sums described at `Table`.
        outputs: the floating-point outputs.
        peak: the largest effect ‖g ⊙ x‖ of any parameter.
        steepest: the largest slope ‖g‖ of any parameter.
        noise: as in the `Precision` of its arithmetic.
    """

    outputs: list[Tensor]
    noise: float
    tables: dict[str, dict[Key, Table]] = field(default_factory=dict)
    peak: float = 0.0
    steepest: float = 0.0
    _wholes: dict[str, tuple[Table, tuple[float, ...]]] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """Whether everything that was measured is a number."""
        totals = [tables[()].sum() for tables in self.tables.values()]
        return not any(bool(t.isnan().any()) for t in self.outputs) and all(bool(t.isfinite()) for t in totals)

    def radial(self, name: str) -> float:
        """⟨∇L, x⟩ of the whole parameter."""
        return self._whole(name)[0]

    def effect(self, name: str) -> float:
        """‖g ⊙ x‖ of the whole parameter: what ⟨∇L, x⟩ would be of, were its terms of random sign."""
        return self._whole(name)[1]

    def slope(self, name: str) -> float:
        """‖∇L‖ of the whole parameter."""
        return self._whole(name)[2]

    def _whole(self, name: str) -> tuple[float, ...]:
        """⟨∇L, x⟩, ‖g ⊙ x‖ and ‖g‖ as numbers: they are asked for again and again, in large models a million times."""
        table = self.tables[name][()]
        known = self._wholes.get(name)
        if known is None or known[0] is not table:
            radial, effect, slope, _ = table.tolist()
            known = self._wholes[name] = (table, (radial, math.sqrt(effect), math.sqrt(slope)))
        return known[1]

    def share(self, name: str, beside: Sequence[str] | None = None) -> float:
        """How much outputs depend on a parameter, beside the one that they depend on most, or the most of some.

        Measured by ‖g ⊙ x‖ and by ‖g‖, because a parameter that is zero has an effect too.
        """
        peak = self.peak if beside is None else max(map(self.effect, beside))
        steepest = self.steepest if beside is None else max(map(self.slope, beside))
        return max(self.effect(name) / (peak or 1.0), self.slope(name) / (steepest or 1.0))


class Prober:
    """Runs a model at points of its parameter space and reads inner products off.

    Attributes:
        own: the model's own point.
        shapes: of all parameters.
        forwards, backwards: passes made so far.
        remarks: what the first pass has to say to a person.
        raised: what the model raised in a later pass, if it did.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.trainable = [name for name, p in self.parameters.items() if p.requires_grad]
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self._aligning = pairs_to_align({name: self.shapes[name] for name in self.trainable})
        self.training = training
        self.forwards = self.backwards = 0
        self.remarks: list[str] = []
        self.raised: Exception | None = None
        self._args, self._kwargs = args, kwargs
        self._noisy = True
        self._noise_of_seed: dict[int, bool] = {}
        self._made: tuple[torch.dtype | None, Leaves] | None = None
        self.use(torch.float64)

    def use(self, dtype: torch.dtype | None) -> None:
        """Choose the arithmetic."""
        self.precision = self._quick = self._arithmetic(dtype)
        # On a GPU, float32 may mean TF32, whose ten bits are too few to tell an effect from rounding.
        plain = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in self.parameters.values())
        if dtype is not None and plain:
            self._quick = self._arithmetic(None)
        self.own = Point(self.parameters)

    def _arithmetic(self, dtype: torch.dtype | None) -> Precision:
        return precision_of(dtype, [p for p in self.parameters.values() if floating(p)])

    def _leaves(self, dtype: torch.dtype | None) -> Leaves:
        """Leaves of a type. Those of the last one are gone then: a large model has no room for both."""
        if self._made is None or self._made[0] != dtype:
            self._made = None
            self._made = (dtype, make_leaves(self.model, dtype))
        return self._made[1]

    @property
    def left(self) -> int:
        """Passes left in the budget."""
        return BUDGET - self.forwards

    def calm(self) -> None:
        """Stop adding noise to the inputs: the model does not bear it."""
        self._noisy = False

    def read(
        self,
        point: Point,
        *,
        seed: int,
        pairs: Mapping[str, Sequence[Key]] | None = None,
        recorder: Recorder | None = None,
        backward: bool = True,
        quick: bool = False,
        draw: int | None = None,
    ) -> Reading:
        """One pass at a point.

        Args:
            point: where the parameters stand.
            seed: 0 takes the inputs as given; any other adds its noise to them.
            pairs: pairs of dimensions to tabulate, by parameter.
            recorder: looks on.
            backward: whether to take derivatives.
            quick: in the model's own float32, if it is on the CPU, which convolves in it several times faster.
            draw: seed of what the model draws by itself, if not the same.
        """
        precision = self._quick if quick else self.precision
        leaves, noise = self._leaves(precision.dtype), Noise(seed)
        with torch.inference_mode(False):
            point.write(leaves)
        for leaf in leaves.values():
            leaf.grad = None
        with quiet(precision.dtype), swapped(self.model, leaves, dtype=precision.dtype, training=self.training):
            _seed_generators(seed if draw is None else draw)
            noisy = self._noise_of_seed.get(seed, self._noisy and seed != 0)
            args, kwargs = self._inputs(noise, precision.dtype, noisy=noisy)
            self.forwards += 1
            with recorder.watching(self.model) if recorder else nullcontext():
                result = unwrap(self.model)(*args, **kwargs)
            outputs = [t for t in tensors_in(result) if floating(t)]
            if recorder:
                recorder.finish(outputs, leaves)
            reading = Reading([t.detach().clone() for t in outputs], precision.noise)
            if backward:
                take = partial(self._tabulate, reading, leaves, pairs or {})
                self._backward([t for t in outputs if t.requires_grad], leaves, noise, take)
        if backward:
            self._complete(reading, take)
        if reading.finite:
            # What is read with this seed later is compared with this reading, and must see the same inputs.
            self._noise_of_seed.setdefault(seed, noisy)
        return reading

    def _inputs(
        self, noise: Noise, dtype: torch.dtype | None, *, noisy: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def change(tensor: Tensor, name: str) -> Tensor:
            fresh = as_dtype(tensor, dtype)
            fresh = perturb(fresh, name, noise) if noisy else fresh
            return fresh.requires_grad_(tensor.requires_grad)

        names = name_inputs(unwrap(self.model), self._args)
        args = tuple(map_inputs(value, change, name) for value, name in zip(self._args, names, strict=True))
        return args, {name: map_inputs(value, change, name) for name, value in self._kwargs.items()}

    def _backward(self, outputs: list[Tensor], leaves: Leaves, noise: Noise, take: Callable[[str], None]) -> None:
        """Derivatives of a random loss. Each gradient is taken as soon as it is complete, where that can be known."""
        if not outputs:
            return
        self.backwards += 1
        cotangents = [
            torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=noise(t.device)).masked_fill(
                ~torch.isfinite(t.detach()), 0
            )
            for t in outputs
        ]
        nodes = graph_nodes(outputs)
        if any("CheckpointFunction" in node.name() for node in nodes):
            # Reentrant checkpointing refuses `inputs`; the leaves are private, so nothing else is touched.
            torch.autograd.backward(outputs, cotangents)
            return
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        # A function written in Python may go backward inside: then a gradient comes in parts.
        whole = {} if any(isinstance(node, BackwardCFunction) for node in nodes) else wanted
        handles = [
            leaf.register_post_accumulate_grad_hook(lambda _, name=name: take(name)) for name, leaf in whole.items()
        ]
        try:
            torch.autograd.backward(outputs, cotangents, inputs=list(wanted.values()))
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _tabulate(self, reading: Reading, leaves: Leaves, pairs: Mapping[str, Sequence[Key]], name: str) -> None:
        """Keep of a gradient what a reading needs, and let it go: a large model has no room for all of them."""
        leaf = leaves[name]
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        grad = grad.to_dense() if grad.is_sparse else grad
        keys = dict.fromkeys([*self._aligning.get(name, ()), *pairs.get(name, ())])
        reading.tables[name] = tabulate(grad, leaf.detach(), list(keys))
        leaf.grad = None

    def _complete(self, reading: Reading, take: Callable[[str], None]) -> None:
        for name in self.trainable:
            if name not in reading.tables:
                take(name)
        reading.tables = to_host({name: reading.tables[name] for name in self.trainable})
        reading.peak = max((reading.effect(name) for name in self.trainable), default=0.0)
        reading.steepest = max((reading.slope(name) for name in self.trainable), default=0.0)


def _seed_generators(seed: int) -> None:
    """The global generators of Python, numpy and torch.

    As `torch.manual_seed`, but what that leaves for a GPU that is not in use yet, nothing would take back.
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    others = torch.accelerator.is_available() and not torch.cuda.is_available()
    if others or torch.cuda.is_initialized():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
