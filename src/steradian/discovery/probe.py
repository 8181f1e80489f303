"""One pass of the model at a point of its parameter space: inner products ⟨∇L, x⟩ of every slice of every parameter.

Lemma 1 of the paper: if f(ρx) = f(x) for all ρ > 0, then ⟨∇L(x), x⟩ = 0 for every loss L of f. One pass with
random cotangents on all outputs (a random linear loss) tests that for every slice at once. A pass is made in
float64 where the model allows it, so that an exact invariance reads 1e-12 and not 1e-5.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.conv import _ConvNd

from steradian.discovery import sandbox, thresholds
from steradian.discovery.graph import Call, Graph, graph_nodes, read_graph, record_calls
from steradian.discovery.invariance import Key, Table, is_matrix
from steradian.discovery.sandbox import Leaves, as_dtype, floating, tensors_in
from steradian.groups import bare, parameters_of

Factors = Mapping[str, float | Tensor]
Noise = Callable[[torch.device], torch.Generator]


def noise_of(seed: int) -> Noise:
    """One generator per device, all from one seed."""
    return cache(lambda device: torch.Generator(device=device).manual_seed(seed))


@dataclass(frozen=True)
class Point:
    """A point of parameter space, given by its recipe and computed one parameter at a time wherever it is needed.

    Radial invariance holds everywhere or not at all, so any point will do except special ones: a bias of zeros has
    ⟨∇L, b⟩ = 0 for no deeper reason, a gain of zeros hides the branch behind it.
    """

    parameters: Mapping[str, Tensor]  # the model's own
    blocks: Mapping[str, int]  # of dimension 0 of some, each a matrix or a filter bank of its own
    seed: int | None = None  # of the noise on trainable parameters; None leaves them as they are
    factors: tuple[Factors, ...] = ()  # what parameters are multiplied by afterwards, broadcasting against them

    def scaled(self, *factors: Factors) -> "Point":
        """The point with some parameters multiplied."""
        return replace(self, factors=(*self.factors, *factors))

    @torch.no_grad()
    def write(self, leaves: Mapping[str, Tensor]) -> None:
        """Set the leaves to this point."""
        noise = noise_of(self.seed) if self.seed is not None else None
        for name, parameter in self.parameters.items():
            leaf = leaves[name]
            leaf.copy_(parameter)
            if noise is not None and parameter.requires_grad and leaf.numel():
                stacked = leaf.ndim == 3 and self.blocks.get(name) == len(leaf)
                _move(torch.view_as_real(leaf) if leaf.is_complex() else leaf, noise(leaf.device), stacked=stacked)
            for factor in [factors[name] for factors in self.factors if name in factors]:
                leaf.mul_(factor)


def _move(tensor: Tensor, generator: torch.Generator, *, stacked: bool) -> None:
    """Move a tensor to a random place nearby, with entries of ordinary size and no exact zeros."""
    # No value is read here: on a GPU that would wait for it, once per parameter and point.
    size = torch.linalg.vector_norm(tensor) / math.sqrt(tensor.numel())
    if is_matrix(tensor.shape):
        inputs = tensor.numel() / tensor.shape[0]
        # Of stacked matrices, such as those of experts, either dimension may be that of the inputs.
        least = 1 / math.sqrt(math.sqrt(inputs) if stacked else inputs)
        lift = (least / size).clamp(min=1, max=1e30) * (size > 0) / math.sqrt(2)
        spread = size.clamp(min=least) / math.sqrt(2)
        for part in _chunks(tensor):
            part.mul_(lift).add_(_uniform(part, generator).mul_(spread))
        return
    noise = _uniform(tensor, generator)
    smallest = 0.5 - 0.4 * (size > 0)
    lifted = tensor * (smallest / size).clamp(min=1, max=1e30)
    # If it is positive everywhere, it may be under a root or a logarithm and stays positive. Otherwise it is a bias,
    # which must not keep a unit of ReLU dead at every point.
    positive = lifted * (1 + thresholds.SPREAD * torch.tanh(noise))
    tensor.copy_(torch.where((tensor > 0).all(), positive, lifted + size.clamp(min=smallest) * noise))


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers of variance 1, drawn in float32: any distribution will do, and every parameter needs them."""
    dtype = torch.float32 if like.dtype == torch.float64 else like.dtype
    noise = torch.empty(like.shape, dtype=dtype, device=like.device)
    return noise.uniform_(-math.sqrt(3), math.sqrt(3), generator=generator).to(like.dtype)


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensor in slices along dimension 0."""
    most = thresholds.CHUNK_GPU if tensor.is_cuda else thresholds.CHUNK_CPU
    if tensor.ndim == 0 or tensor.numel() <= most:
        return (tensor,)
    return tensor.split(max(1, most * tensor.shape[0] // tensor.numel()))


def _perturb(tensor: Tensor, name: str, noise_on: Noise) -> Tensor:
    """A random input like the given one: noise of half its size, clamped to its range."""
    # Integers are token ids or labels, two values or infinities are masks: those stay, and so do sparse and nested
    # tensors. A constant input, such as a dummy batch of zeros, becomes random; a small one is rescaled to the size 1.
    dense = floating(tensor) and tensor.layout == torch.strided and tensor.numel() > 0
    if not dense or "mask" in name or not bool(torch.isfinite(tensor).all()):
        return tensor
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    low, high = values.min(), values.max()
    noise = torch.randn(values.shape, dtype=values.dtype, device=values.device, generator=noise_on(values.device))
    if bool(low == high):
        noisy = values + noise * (high.abs() if bool(high != 0) else 1)
    elif bool(((values == low) | (values == high)).all()):
        return tensor
    else:
        size = values.square().mean().sqrt()
        noisy = (values + size / 2 * noise).clamp(low, high)
        noisy = noisy / size if bool(size < thresholds.SMALL_INPUT) else noisy
    return torch.view_as_complex(noisy) if tensor.is_complex() else noisy


@dataclass(eq=False)
class Reading:
    """What one probe measured, and how to repeat it."""

    point: Point
    seed: int
    draw: int | None
    graph: Graph | None
    outputs: list[Tensor]  # the floating-point outputs with a gradient, or all if none has one
    noise: float  # as in the `thresholds.Precision` of its arithmetic
    # Per trainable parameter and key, the sums described at `Table`.
    tables: dict[str, dict[Key, Table]] = field(default_factory=dict)
    # ‖g ⊙ x‖ per parameter: the size that ⟨∇L, x⟩ would have if its terms had random signs.
    effect: dict[str, float] = field(default_factory=dict)
    slope: dict[str, float] = field(default_factory=dict)  # ‖∇L‖ per parameter; 0 where the pass did not reach it
    peak: float = 0.0  # the largest effect of any parameter

    def put(self, name: str, tables: dict[Key, Table]) -> None:
        """Set what was measured of one parameter."""
        self.tables[name] = tables
        _, effect, slope, _ = tables[()].tolist()
        self.effect[name], self.slope[name] = math.sqrt(effect), math.sqrt(slope)

    @property
    def finite(self) -> bool:
        """Whether everything that was measured is finite."""
        totals = [tables[()].sum() for tables in self.tables.values()]
        return not any(bool(t.isnan().any()) for t in self.outputs) and all(bool(t.isfinite()) for t in totals)

    def share(self, name: str, beside: Sequence[str]) -> float:
        """How much outputs depend on a parameter, relative to the one among others that they depend on most."""
        # By ‖g ⊙ x‖ and by ‖g‖, because a parameter that is zero has an effect too.
        peak, steepest = max(self.effect[n] for n in beside), max(self.slope[n] for n in beside)
        return max(self.effect[name] / (peak or 1.0), self.slope[name] / (steepest or 1.0))


def _tabulate(g: Tensor, x: Tensor, pairs: Iterable[Key]) -> dict[Key, Table]:
    """The tables of a parameter x with gradient g: of the whole, along each dimension, and along these pairs."""
    if g.is_complex():
        g, x = torch.view_as_real(g), torch.view_as_real(x)
    g, x = g.double(), x.double()
    keys: list[Key] = [(), *((i,) for i in range(x.ndim) if x.shape[i] > 1), *pairs]
    split = _chunks(x)
    # One buffer for the terms of all chunks: allocating memory costs more than the arithmetic.
    terms = torch.empty(4, *split[0].shape, dtype=torch.float64, device=x.device)
    parts = [_chunk_tables(*chunk, terms, keys) for chunk in zip(_chunks(g), split, strict=True)]
    tables = {key: torch.stack([p[key] for p in parts]).sum(0) for key in keys if 0 not in key}
    return tables | {key: torch.cat([p[key] for p in parts], dim=1) for key in keys if 0 in key}


def _chunk_tables(g: Tensor, x: Tensor, buffer: Tensor, keys: Sequence[Key]) -> dict[Key, Table]:
    """The sums of a chunk. Passes over all of it are expensive: most come from sums over the first two dimensions."""
    terms = buffer[:, : x.shape[0]] if x.ndim else buffer
    torch.mul(g, x, out=terms[0])
    for term, factor in zip(terms[1:], (terms[0], g, x), strict=True):
        torch.mul(factor, factor, out=term)
    outer = terms.flatten(3).sum(3) if x.ndim > 2 else terms
    inner = terms.flatten(1, 2).sum(1) if x.ndim > 2 else None
    tables = {}
    for key in keys:
        source, first = terms, 0
        if all(i < 2 for i in key):
            source = outer
        elif inner is not None and all(i >= 2 for i in key):
            source, first = inner, 2
        others = [i + 1 for i in range(source.ndim - 1) if i + first not in key]
        tables[key] = source.sum(others) if others else source.clone()
    return tables


def _to_host(tables: dict[str, dict[Key, Table]]) -> dict[str, dict[Key, Table]]:
    """The same tables in host memory, copied at once per device: the host waits for a GPU once, not per table."""
    flat = {(name, key): table for name, of_name in tables.items() for key, table in of_name.items()}
    for device in {table.device for table in flat.values()}:
        here = {place: table for place, table in flat.items() if table.device == device}
        parts = torch.cat([t.flatten() for t in here.values()]).cpu().split([t.numel() for t in here.values()])
        flat |= {place: part.reshape(here[place].shape) for place, part in zip(here, parts, strict=True)}
    return {name: {key: flat[name, key] for key in of_name} for name, of_name in tables.items()}


def output_change(before: list[Tensor], after: list[Tensor]) -> float:
    """Largest ‖a − b‖ of two outputs over the spread of a; entries infinite in both, such as masked logits, count 0."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return math.inf
    changes = []
    for a, b in zip(before, after, strict=True):
        finite = torch.isfinite(a)
        if not torch.equal(finite, torch.isfinite(b)):
            return math.inf
        moved = float(torch.linalg.vector_norm(a[finite] - b[finite]))
        changes.append(moved / (output_spread(a) or 1.0))
    return max(changes, default=math.inf)


def output_spread(a: Tensor) -> float:
    """‖a − its mean‖ over the finite entries, or ‖a‖ where all are the same."""
    a = a[torch.isfinite(a)]
    if a.numel() == 0:
        return 0.0
    spread = float(torch.linalg.vector_norm(a - a.mean()))
    return spread if spread > 1e-9 * float(a.abs().max()) else float(torch.linalg.vector_norm(a))


class Prober:
    """Runs a model at points of its parameter space and reads inner products off."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], progress: Callable[[int, int], object]
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self._progress = progress  # called after each pass with the passes made and expected
        self.parameters = parameters_of(model)
        self.trainable = [name for name, p in self.parameters.items() if p.requires_grad]
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self.blocks = _blocks(model)
        self.own = Point(self.parameters, self.blocks)  # the model's own weights
        self.forwards = self.backwards = 0  # passes made so far
        self.noisy = True  # whether noise is added to the inputs, until the model fails
        self.remarks: list[str] = []  # notes of the first pass for the user
        self.raised: Exception | None = None  # by the model, in a later pass
        places = {name: p.data_ptr() for name, p in self.parameters.items() if p.layout == torch.strided and p.numel()}
        counts = Counter(places.values())
        # Parameters that forward also uses where the leaves cannot replace them: here those that share their memory.
        self.captured = {name for name, place in places.items() if counts[place] > 1}
        self.pairs: dict[str, set[Key]] = {name: {(0, 1), (0, 2)} for name in self.blocks}  # to tabulate together
        self._noise_of_seed: dict[int, bool] = {}
        self._made: dict[torch.dtype | None, Leaves] = {}
        self.use(torch.float64)

    @property
    def probed(self) -> list[str]:
        """Trainable parameters that a probe can change wherever forward uses them."""
        return [name for name in self.trainable if name not in self.captured]

    def use(self, dtype: torch.dtype | None) -> None:
        """Choose the arithmetic, and with it what counts as zero."""
        parameters = [p for p in self.parameters.values() if floating(p)]
        self.precision = self._quick = thresholds.precision_of(dtype, parameters)
        # On a GPU, float32 may mean TF32, whose ten bits are too few to separate an effect from rounding.
        if all(p.dtype == torch.float32 and p.device.type == "cpu" for p in self.parameters.values()):
            self._quick = thresholds.precision_of(None, parameters)

    @property
    def left(self) -> int:
        """Passes left in the budget."""
        return thresholds.MOST_PASSES - self.forwards

    def attempt(self, point: Point, **options: Any) -> Reading | None:
        """A reading with the options of `read`; None if the model raises there."""
        try:
            return self.read(point, **options)
        except torch.OutOfMemoryError:  # not a property of the point
            raise
        except Exception as error:
            self.raised = error
            return None

    def read(
        self,
        point: Point,
        *,
        seed: int,  # 0 takes the inputs as given; any other adds noise to them
        graph: bool = False,  # whether to keep the autograd graph
        backward: bool = True,  # whether to compute gradients
        quick: bool = False,  # in the model's own float32 if it is on the CPU, which is several times faster
        draw: int | None = None,  # seed of the global generators that the model draws from, if not `seed`
    ) -> Reading:
        """One pass at a point."""
        precision = self._quick if quick else self.precision
        leaves, noise = self._leaves(precision.dtype), noise_of(seed)
        point.write(leaves)
        for leaf in leaves.values():
            leaf.grad = None  # of a pass that failed
        swapped = sandbox.swapped(self.model, leaves, dtype=precision.dtype, generic=point.seed is not None)
        with sandbox.isolated(precision.dtype, seed if draw is None else draw), swapped:
            noisy = self._noise_of_seed.get(seed, self.noisy and seed != 0)
            args, kwargs = self._inputs(noise, precision.dtype, noisy=noisy)
            self.forwards += 1
            calls: list[Call] = []
            with record_calls(self.model, calls) if graph else nullcontext():
                result = self.model(*args, **kwargs)
            outputs = [t for t in tensors_in(result) if floating(t)]
            outputs = [t for t in outputs if t.requires_grad] or outputs  # what is logged does not train
            kept = read_graph(outputs, leaves, calls) if graph else None
            reading = Reading(point, seed, draw, kept, [t.detach().clone() for t in outputs], precision.noise)
            tables = self._backward(outputs, leaves, noise) if backward else {}
        for name, of_name in _to_host(tables).items():
            reading.put(name, of_name)
        reading.peak = max(reading.effect.values(), default=0.0)
        if reading.finite:
            # Later readings with this seed are compared with this one, and must get the same inputs.
            self._noise_of_seed.setdefault(seed, noisy)
        self._progress(self.forwards, max(thresholds.USUAL_PASSES, self.forwards + 1))
        return reading

    def _leaves(self, dtype: torch.dtype | None) -> Leaves:
        """Leaves of a dtype. Those of the last one are freed first: a large model has no room for both."""
        if dtype not in self._made:
            self._made.clear()
            made = {n: nn.Parameter(as_dtype(p, dtype), p.requires_grad) for n, p in self.parameters.items()}
            self._made[dtype] = made
        return self._made[dtype]

    def _inputs(self, noise: Noise, dtype: torch.dtype | None, *, noisy: bool) -> tuple[list[Any], dict[str, Any]]:
        def change(tensor: Tensor, name: str) -> Tensor:
            fresh = as_dtype(tensor, dtype)
            fresh = _perturb(fresh, name, noise) if noisy else fresh
            return fresh.requires_grad_(tensor.requires_grad)

        names = sandbox.name_inputs(self.model, self.args)
        args = [sandbox.map_inputs(arg, change, name) for arg, name in zip(self.args, names, strict=True)]
        return args, sandbox.map_inputs(self.kwargs, change)

    def _backward(self, outputs: list[Tensor], leaves: Leaves, noise: Noise) -> dict[str, dict[Key, Table]]:
        """The tables of each parameter and its derivatives of a random loss."""
        tables: dict[str, dict[Key, Table]] = {}

        @torch.no_grad()
        def take(name: str) -> None:
            """Keep the sums of a gradient and free it: a large model has no room for all gradients."""
            leaf = leaves[name]
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense()
            tables[name] = _tabulate(grad, leaf.detach(), self.pairs.get(name, ()))
            leaf.grad = None

        # Sums and not `grad_tensors`, for which torch imports a computer algebra system.
        losses = []
        for t in (t for t in outputs if t.requires_grad):
            cotangent = torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=noise(t.device))
            cotangent *= torch.isfinite(t.detach())
            losses.append(torch.vdot(cotangent.flatten(), t.flatten()).real)
        nodes, wanted = graph_nodes(outputs), {name: leaves[name] for name in self.trainable}
        originals = {id(p): name for name, p in self.parameters.items()}
        used = [id(getattr(node, "variable", None)) for node in nodes]
        self.captured.update(originals[place] for place in used if place in originals)
        # Each gradient is taken as soon as it is complete. A function written in Python may run backward inside: then
        # a gradient comes in parts.
        whole = {} if any(isinstance(node, BackwardCFunction) for node in nodes) else wanted
        # Reentrant checkpointing refuses `inputs`; the leaves are private, so nothing else is touched.
        reentrant = any("CheckpointFunction" in node.name() for node in nodes)
        with ExitStack() as stack:
            for name, leaf in whole.items():
                handle = leaf.register_post_accumulate_grad_hook(lambda _, name=name: take(name))
                stack.callback(handle.remove)
            if losses:
                self.backwards += 1
                torch.autograd.backward(losses, inputs=None if reentrant else list(wanted.values()))
        for name in [name for name in self.trainable if name not in tables]:
            take(name)
        return {name: tables[name] for name in self.trainable}


def _blocks(model: nn.Module) -> dict[str, int]:
    """Blocks of dimension 0 that act apart from each other: groups of convolutions, and stacked matrices of experts."""
    blocks = {}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False):
            number = module.groups if isinstance(module, _ConvNd) else len(p) if p.ndim == 3 else 1
            if number > 1 and p.ndim > 2 and p.shape[1] > 1:
                blocks[bare(name)] = number
    return blocks
