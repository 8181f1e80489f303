"""How parameters are cut into rows (`Layout`), the rows of one parameter or joint set (`Group`), and of a model."""

import io
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from steradian.files import write_atomically
from steradian.names import fold, plural

__all__ = ["Group", "Groups", "Layout", "Pair", "Spec"]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
_FORMAT = 1  # of saved groups; a number that changes with the fields of `Groups`

Spec = str | int | tuple[str | int, ...]
"""How a tensor is cut into rows, as plain data: "filter", "tensor", G, ("axis", k) or ("grid", g0, g1, …)."""


@dataclass(frozen=True)
class Layout:
    """How a tensor is cut into n rows of d numbers, each one radially invariant vector.

    Each dimension i is cut into g_i equal blocks; a row is what lies in one block of every dimension. A vector is
    cut along its only dimension into as many rows as there are blocks, so that a bias goes with any weight.

    | spec | rows | who has them |
    |---|---|---|
    | "filter" | slices of dimension 0 | BN, IN, WN |
    | "tensor" | the whole tensor | LN |
    | G | G equal blocks of dimension 0 | GN, attention heads under QK-norm |
    | ("axis", k) | slices of dimension k | transposed convolutions |
    | ("grid", g0, g1, …) | g_i blocks of dimension i, −1 for slices | grouped transposed convolutions |

    Args:
        spec: one of the above. A list, as JSON gives it back, is taken as a tuple.

    >>> Layout("filter").rows(torch.zeros(8, 3, 5, 5)).shape
    torch.Size([8, 75])
    >>> Layout(("axis", 1)).rows(torch.zeros(8, 3, 5, 5)).shape
    torch.Size([3, 200])
    """

    spec: Spec

    def __post_init__(self) -> None:
        spec = tuple(self.spec) if isinstance(self.spec, list) else self.spec
        if not _is_spec(spec):
            raise ValueError(
                f'rows must be "filter", "tensor", a number of blocks ≥ 1, ("axis", k) or ("grid", g0, g1, …), '
                f"got {self.spec!r}"
            )
        object.__setattr__(self, "spec", spec)

    def blocks(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Number of blocks along each dimension of a tensor of this shape; a ValueError if it cannot be cut so.

        >>> Layout(4).blocks((8, 3))
        (4, 1)
        >>> weight, bias = (4, 6, 3, 3), (6,)  # of a transposed convolution
        >>> Layout(("grid", 1, 2)).blocks(weight), Layout(("grid", 1, 2)).blocks(bias)
        ((1, 2, 1, 1), (2,))
        """
        spec, shape = self.spec, tuple(shape)
        cut: dict[int, int] = {}  # number of blocks by dimension, −1 for slices
        if isinstance(spec, tuple) and len(shape) == 1:
            # A vector beside a larger tensor, such as its bias, has an entry for each slice, in the order of the rows.
            cut[0] = -1 if spec[0] == "axis" or -1 in spec else math.prod(int(g) for g in spec[1:])
        elif isinstance(spec, tuple):
            cut = {int(spec[1]): -1} if spec[0] == "axis" else {k: int(g) for k, g in enumerate(spec[1:])}
        elif spec not in ("tensor", 1) and (shape or spec != "filter"):
            cut[0] = -1 if spec == "filter" else int(spec)
        counts = [1] * len(shape)
        for k, g in cut.items():
            if not -len(shape) <= k < len(shape):
                raise ValueError(f"rows {spec!r} need a dimension {k}, but the tensor has shape {shape}")
            counts[k] = shape[k] if g == -1 else g
            if counts[k] and shape[k] % counts[k]:
                raise ValueError(f"rows {spec!r} do not divide the shape {shape}: {shape[k]} entries in {g} blocks")
        return tuple(counts)

    def size(self, shape: Sequence[int]) -> tuple[int, int]:
        """(n, d) of a tensor of this shape.

        >>> Layout("tensor").size((8, 3))
        (1, 24)
        """
        split = self.split(shape)
        return math.prod(split[::2]), math.prod(split[1::2])

    def split(self, shape: Sequence[int]) -> list[int]:
        """The shape with each dimension split into its blocks and what lies within one.

        >>> Layout(4).split((8, 3))
        [4, 2, 1, 3]
        """
        return [k for size, g in zip(shape, self.blocks(shape), strict=True) for k in (g, size // g if g else 1)]

    def rows(self, tensor: Tensor) -> Tensor:
        """The tensor as (n, d) rows, entries in logical order: a view where memory allows, else a copy.

        >>> x = torch.arange(4.0)
        >>> Layout(2).rows(x).tolist(), Layout(2).rows(x).data_ptr() == x.data_ptr()
        ([[0.0, 1.0], [2.0, 3.0]], True)
        """
        split = self.split(tensor.shape)
        size, order = (math.prod(split[::2]), math.prod(split[1::2])), range(len(split))
        if all(g == 1 for g in split[2::2]):
            return tensor.reshape(size)
        return tensor.reshape(split).permute(*order[::2], *order[1::2]).reshape(size)

    def restore(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `rows`: (n, d) rows back to a tensor of this shape; a ValueError if that has other rows.

        >>> x, layout = torch.randn(4, 6, 3), Layout(("axis", 1))
        >>> torch.equal(layout.restore(layout.rows(x), x.shape), x)
        True
        """
        shape, size, split = tuple(shape), self.size(shape), self.split(shape)
        if tuple(rows.shape) != size:
            raise ValueError(f"rows of shape {size} make a tensor of shape {shape}, got {tuple(rows.shape)}")
        back = [k for i in range(len(shape)) for k in (i, len(shape) + i)]
        return rows.reshape([*split[::2], *split[1::2]]).permute(back).reshape(shape)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Rows that span several tensors, which have one number of rows: row i is row i of each, one behind the other.

        >>> weight, bias = torch.zeros(8, 3), torch.zeros(8)
        >>> Layout(4).join([weight, bias]).shape
        torch.Size([4, 8])
        """
        if not tensors:
            raise ValueError("joint rows need at least one tensor")
        parts = [self.rows(tensor) for tensor in tensors]
        if len({len(part) for part in parts}) > 1:
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise ValueError(f"rows {self.spec!r} cut the shapes {shapes} into different numbers of rows")
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _is_spec(spec: object) -> bool:
    match spec:
        case "filter" | "tensor":
            return True
        case ("axis", k):
            return type(k) is int  # not a bool
        case ("grid", *blocks):
            return bool(blocks) and all(type(g) is int and (g >= 1 or g == -1) for g in blocks)
    return type(spec) is int and spec >= 1


@dataclass(frozen=True)
class Group:
    """The rows of one parameter, or of several that are invariant only together."""

    names: tuple[str, ...]  #: the parameters, in the model's order; more than one is a joint set
    spec: Spec  #: how each of them is cut
    n_rows: int  #: the number n of rows
    size: int  #: the number d of entries in a row, over all parameters of the set
    reason: str  #: the module that makes the rows invariant, or "unknown"
    defect: float  #: largest abs(cos(x, ∇L)) over the rows, at the model's own weights and ε
    unseen: int = 0  #: rows that the inputs did not reach, such as the embeddings of absent tokens
    small: int = 0  #: rows whose radius is so small that a normalization's ε dominates


@dataclass(frozen=True)
class Pair:
    """Two sides with f(αa, b/α) = f(a, b) for all α > 0, such as the rows of `up` and the columns of `down`.

    Each side is cut into n sets of rows: set i is what the specs number i in all of its parameters, and set i of a
    goes with set i of b. Beside those of `Layout` there is the spec ("fold", k, start, g0, d0, g1, d1): the entries of
    dimension k from `start` on are a (g0, d0, g1, d1) array, and a set has one index of each g and all of each d. With
    one further number, so many blocks of dimension 0 are cut like that, each for itself. With two, n and a stride,
    the entries are n equal ranges at that distance, as the values of each head among its queries and keys.
    """

    a: tuple[str, ...]  #: the names of the parameters of one side
    b: tuple[str, ...]  #: those of the other
    a_specs: tuple[Spec, ...]  #: how each of a is cut
    b_specs: tuple[Spec, ...]  #: how each of b is cut
    n: int  #: the number of sets on each side
    reason: str  #: how the factors meet

    def __str__(self) -> str:
        a, b = (" + ".join(map(_cut_in_words, *side)) for side in ((self.a, self.a_specs), (self.b, self.b_specs)))
        return f"{a} against {b} ({plural(self.n, 'pair')}, {self.reason})"


def _cut_in_words(name: str, spec: Spec) -> str:
    """A parameter and its spec; of a fold, the ranges and, if entries are joined, the shape that joins them."""
    if not (isinstance(spec, tuple) and spec[0] == "fold"):
        return f"{name} {spec!r}"
    k, start, *fold = map(int, spec[1:7])
    count, stride = map(int, spec[7:]) if len(spec) == 9 else (1, 0)
    size, shape = math.prod(fold) // count, f" as {tuple(fold)}" if fold[1] * fold[3] > 1 else ""
    ranges = [f"{start + i * stride}:{start + i * stride + size}" for i in range(count)]
    shown = ranges if count <= 3 else [ranges[0], ranges[1], "…", ranges[-1]]
    return f"{name}[{':, ' * k}{', '.join(shown)}]{shape}"


def set_numbers(spec: Spec, shape: Sequence[int]) -> Tensor:
    """The set of a pair that each entry of a parameter belongs to, −1 for none, broadcasting against the parameter.

    >>> set_numbers(("fold", 1, 0, 2, 2, 1, 1), (3, 4)).tolist(), set_numbers(("fold", 0, 2, 1, 2, 1, 1), (4,)).tolist()
    ([[0, 0, 1, 1]], [-1, -1, 0, 0])
    """
    with torch.device("cpu"):  # whatever the default is
        if not (isinstance(spec, tuple) and spec[0] == "fold"):
            counts = Layout(spec).blocks(shape)
            numbers = torch.arange(math.prod(counts)).reshape(counts)
            for i, count in enumerate(counts):
                numbers = numbers.repeat_interleave(shape[i] // count, i) if count > 1 else numbers
            return numbers
        k, start, g0, d0, g1, d1, *more = map(int, spec[1:])
        count, stride = (*more, 0)[:2] if more else (1, 0)
        blocks = count if len(more) == 1 else 1  # of dimension 0
        g0 *= blocks
        inside = torch.arange(g0 * g1).reshape(g0, 1, g1, 1).expand(g0, d0, g1, d1).reshape(count, -1)
        which = torch.arange(count)[:, None]
        numbers = torch.full((blocks, shape[k]), -1)
        numbers[which % blocks, start + stride * which + torch.arange(inside.shape[1])] = inside
        numbers = numbers.repeat_interleave(shape[0] // blocks, 0) if blocks > 1 else numbers
        sizes = [1] * len(shape)
        sizes[0], sizes[k] = len(numbers), shape[k]
        return numbers.reshape(sizes)


@dataclass
class Groups:
    """The rows of a model, and the rest.

    Optimizers get weights only as rows: parameters with at least two dimensions, alone or with the biases that they
    need. Gains and biases of normalization layers are often invariant too (the next BN removes the scale that BN's
    affine part gives to a positively homogeneous block), and so is everything that writes to the residual stream of a
    pre-norm transformer. The paper does not study them on spheres: they are in `facts`, for optimizers on request.
    """

    params: dict[str, nn.Parameter]  #: the model's parameters by name
    groups: list[Group] = field(default_factory=list)  #: the rows that optimizers get
    facts: list[Group] = field(default_factory=list)  #: further sets that are invariant, each proved like the others
    #: sides that keep the outputs when one grows as the other shrinks; neither is invariant by itself
    pairs: list[Pair] = field(default_factory=list)
    #: trainable ones, in the rest, of which no output has a derivative; such a one may still choose, as by topk
    no_effect: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)  #: parameters without requires_grad; in no parameter group
    #: parameters some of whose equal blocks are invariant, with a description
    partial: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)  #: further names of tied parameters, by first name
    details: dict[str, str] = field(default_factory=dict)  #: what was measured, by parameter
    notes: list[str] = field(default_factory=list)  #: remarks about the model as a whole
    passes: tuple[int, int] = (0, 0)  #: forward and backward passes that discovery made

    @property
    def layouts(self) -> dict[str, Spec]:
        """Spec by parameter name, for all parameters with rows, in the model's order."""
        found = {name: group.spec for group in self.groups for name in group.names}
        return {name: found[name] for name in self.params if name in found}

    @property
    def joint(self) -> list[tuple[str, ...]]:
        """The sets of parameters that are invariant only together."""
        return [group.names for group in self.groups if len(group.names) > 1]

    @property
    def rest(self) -> list[str]:
        """Trainable parameters without rows, in the model's order."""
        layouts, frozen = self.layouts, set(self.frozen)
        return [name for name in self.params if name not in layouts and name not in frozen]

    def param_groups(
        self, *, rest: Mapping[str, Any] | None = None, facts: bool = False, **options: Any
    ) -> list[dict[str, Any]]:
        """Parameter groups for any torch optimizer, those with rows with their spec under "rows".

        Parameters of one spec share a group; each joint set is a group of its own with "joint": True; the
        rest comes last, without "rows" (with "rows": None if no parameter has any).

        Args:
            rest: options for the rest, over those for all.
            facts: include `facts`, as far as they do not overlap.
            **options: options for all groups, such as weight_decay=1e-4.

        >>> model = nn.Linear(2, 2)
        >>> groups = Groups(dict(model.named_parameters()), [Group(("weight",), "filter", 2, 2, "bn", 1e-6)])
        >>> [sorted(g) for g in groups.param_groups(lr=0.1, rest={"weight_decay": 0.0})]
        [['lr', 'params', 'rows'], ['lr', 'params', 'weight_decay']]
        """
        taken: set[str] = set()
        single: dict[Spec, list[nn.Parameter]] = {}
        joint: list[dict[str, Any]] = []
        for group in [*self.groups, *(self.facts if facts else ())]:
            if taken.isdisjoint(group.names):
                taken.update(group.names)
                params = [self.params[name] for name in group.names]
                if len(params) == 1:
                    single.setdefault(group.spec, []).extend(params)
                else:
                    joint.append({"params": params, "rows": group.spec, "joint": True, **options})
        made = [*({"params": params, "rows": spec, **options} for spec, params in single.items()), *joint]
        left = [self.params[name] for name in self.rest if name not in taken]
        if left:
            # Groups in which no rows were searched for have no such key.
            none = {} if made else {"rows": None}
            made.append({"params": left, **none, **options, **(rest or {})})
        return made

    def of(self, model: nn.Module) -> "Groups":
        """The same rows, of the parameters that a model has now.

        `fully_shard` (FSDP2) replaces the parameters, and a copy of the model has its own; what was found holds for
        them too. Prefixes that compilation, data parallelism and activation checkpointing add to names are ignored.
        The first parameter that the model lacks, or has in another shape, is named in a ValueError.

        >>> model = nn.Linear(2, 2)
        >>> groups = Groups(dict(model.named_parameters()), [Group(("weight",), "filter", 2, 2, "bn", 1e-6)])
        >>> copy = nn.Linear(2, 2)
        >>> groups.of(copy).param_groups()[0]["params"][0] is copy.weight
        True
        """
        return replace(self, params=_fitting({name: p.shape for name, p in self.params.items()}, self.frozen, model))

    def save(self, path: str | Path) -> None:
        """Write what was found to a JSON file such as "groups.json", for `load`."""
        content = {"format": _FORMAT, "shapes": {name: list(param.shape) for name, param in self.params.items()}}
        content |= {key: value for key, value in asdict(replace(self, params={})).items() if key != "params"}
        write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> "Groups":
        """What was saved, for the parameters of a model: one proof serves every run, on any device and sharded or not.

        Args:
            path: of a file that `save` wrote.
            model: one like that in which the rows were found, possibly compiled, data-parallel or sharded. If it has
                other parameters, a ValueError names the first difference.

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "groups.json")
        >>> Groups(dict(nn.Linear(2, 2).named_parameters())).save(path)
        >>> Groups.load(path, nn.Linear(2, 2)).rest
        ['weight', 'bias']
        """
        try:
            content = json.loads(Path(path).read_bytes())
            found = content.pop("format")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            got = repr(str(path)) if isinstance(path, str | Path) else type(path).__name__
            raise ValueError(f"path must be a file that Groups.save wrote, got {got}") from error
        if found != _FORMAT:
            raise ValueError(f"{path} has format {found!r}, and this version reads {_FORMAT}; save the groups again")
        content["params"] = _fitting(content.pop("shapes"), content["frozen"], model)
        content["passes"] = tuple(content["passes"])
        for key, kind in (("groups", Group), ("facts", Group), ("pairs", Pair)):
            content[key] = [kind(**{k: _tuples(value) for k, value in each.items()}) for each in content[key]]
        return cls(**content)

    def group_of(self, name: str) -> Group | None:
        """The group that a parameter's rows belong to, if it has any."""
        return next((group for group in self.groups if name in group.names), None)

    def explain(self, name: str) -> str:
        """What was found about one parameter, in words."""
        name, given = next((first for first, others in self.aliases.items() if name in others), name), name
        if name not in self.params:
            raise ValueError(f"no parameter is called {given!r}; the model has {', '.join(self.params)}")
        param, group = self.params[name], self.group_of(name)
        lines = [f"{name}  {' × '.join(map(str, param.shape)) if param.ndim else 'scalar'}"]
        if name in self.aliases:
            lines.append(f"tied: also called {', '.join(self.aliases[name])}")
        if group is not None:
            together = f", jointly with {', '.join(group.names)}" if len(group.names) > 1 else ""
            lines.append(f"rows: {group.spec!r}, {group.n_rows} × {group.size}{together}")
            lines.append(f"reason: {group.reason}")
            lines.append(f"defect: {group.defect:.1e}, the largest |cos(x, ∇L)| over the rows at the model's own ε")
            if group.unseen:
                lines.append(f"{group.unseen} of {group.n_rows} rows were not reached by these inputs")
            if group.small:
                lines.append(f"{group.small} of {group.n_rows} rows are so small that ε dominates")
        elif name in self.frozen:
            lines.append("frozen: it does not require a gradient, so it was not tested")
        elif name in self.no_effect:
            lines.append("no effect: the outputs had no derivative with respect to it in any pass")
        else:
            why = "complex, and rows are real vectors" if param.is_complex() else "not radially invariant"
            lines.append(f"rest: {self.partial.get(name, why)}")
        if name in self.details:
            lines.append(f"measured: {self.details[name]}")
        of_name = [fact for fact in self.facts if name in fact.names]
        lines += [f"also a fact: {_fact(_folded(fact.names), fact)}, because of {fact.reason}" for fact in of_name]
        lines += [f"pair: {pair}" for pair in self.pairs if name in (*pair.a, *pair.b)]
        return "\n  ".join(lines)

    def __str__(self) -> str:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        n_rows, layouts = sum(group.n_rows for group in self.groups), self.layouts
        inside, total = (sum(self.params[name].numel() for name in names) for names in (layouts, self.params))
        where = f"{plural(n_rows, 'row')} in {plural(len(layouts), 'parameter')}"
        lines = ["", f"{where}: {inside} of {plural(total, 'number')} ({100 * inside / max(total, 1):.1f} %)"]
        plain = [name for name in self.rest if name not in self.no_effect and name not in self.partial]
        for title, names in [("rest", plain), ("no effect", self.no_effect), ("frozen", self.frozen)]:
            if names:
                lines.append(f"{title}: {plural(len(names), 'parameter')}: {_folded(names)}")
        partial = list(self.partial.values())
        for text, members in fold(list(self.partial), partial):
            lines.append(f"partly invariant, left to the rest: {text}: {partial[members[0]]}")
        tied = [" = ".join((name, *others)) for name, others in self.aliases.items()]
        lines += [f"tied: {text}" for text, _ in fold(tied)]
        for text, reason, fact, n in _merged(self.facts):
            lines.append(f"fact: {_fact(text, fact, n)} ({fact.n_rows} × {fact.size}, {reason})")
        lines += [f"pair: {text}" for text in _folded_pairs(self.pairs)]
        small = [group for group in self.groups if group.small]
        if small:
            texts = fold([" + ".join(group.names) for group in small], [group.small for group in small])
            few = ", ".join(f"{small[members[0]].small} of {text}" for text, members in texts)
            lines.append(f"rows so small that ε dominates: {few}")
        lines += [f"note: {note}" for note in self.notes]
        if width is not None:
            options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
            lines = [textwrap.fill(line, width, subsequent_indent="  ", **options) for line in lines]
        return "\n".join([*_table(self.groups, width), *lines])

    def __repr__(self) -> str:
        n_rows = plural(sum(group.n_rows for group in self.groups), "row")
        found = f"{plural(len(self.layouts), 'parameter')} with {n_rows}, {plural(len(self.joint), 'joint set')}"
        return f"Groups({found}, {len(self.rest)} in the rest)"


def is_sharded(param: Tensor) -> bool:
    """Whether a parameter is a DTensor, without importing torch's module for them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(param, module.DTensor)


def is_flattened(param: Tensor) -> bool:
    """Whether `FullyShardedDataParallel` flattened a parameter into a piece of a larger tensor, which has no rows."""
    return bool(getattr(param, "_fsdp_flattened", False))


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside data-parallel and compiled ones, whose parameters have the names that its author gave them."""
    while True:
        parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        inner = dict(model.named_children()).get("module" if parallel else "_orig_mod")
        if inner is None:
            return model
        model = inner


def bare(name: str) -> str:
    """A name without the parts that `torch.compile` and activation checkpointing add, such as "_orig_mod"."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's parameters by name, without what compilation, data parallelism and checkpointing add to names."""
    return {bare(name): param for name, param in unwrap(model).named_parameters()}


def _fitting(shapes: Mapping[str, Sequence[int]], frozen: Sequence[str], model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model; raises unless it has those in which rows were found and no others."""
    there, start = parameters_of(model), "model must be the one in which the rows were found, or a copy of it: "
    for name, shape in shapes.items():
        has = f"one of shape {tuple(there[name].shape)}" if name in there else "no such parameter"
        if name not in there or tuple(there[name].shape) != tuple(shape):
            raise ValueError(f"{start}{name!r} has shape {tuple(shape)}, and the model has {has}")
    for name, param in there.items():
        if name not in shapes:
            raise ValueError(f"{start}the model also has {name!r}")
        if name in frozen and param.requires_grad:
            raise ValueError(f"{start}{name!r} was frozen and not tested, and in the model it requires a gradient")
    return {name: there[name] for name in shapes}


def _tuples(value: Any) -> Any:
    """Lists, which JSON gives back for tuples, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# Printing


def _folded(names: Sequence[str], between: str = ", ") -> str:
    return between.join(text for text, _ in fold(names))


def _merged(groups: Sequence[Group], between: str = ", ") -> list[tuple[str, str, Group, int]]:
    """Names and reason of groups, those of repeated layers as one: with the group of largest defect, and how many."""
    texts = [f"{between.join(group.names)}\t{group.reason}" for group in groups]
    merged = []
    for text, members in fold(texts, [(group.spec, group.n_rows, group.size) for group in groups]):
        names, _, reason = text.partition("\t")
        if len(members) == 1:
            names = _folded(groups[members[0]].names, between)
        merged.append((names, reason, max((groups[i] for i in members), key=lambda group: group.defect), len(members)))
    return merged


def _folded_pairs(pairs: Sequence[Pair]) -> list[str]:
    """Pairs as text, those of repeated layers as one, with the names of each side folded."""
    texts = ["\t".join((*pair.a, *pair.b, pair.reason)) for pair in pairs]
    lines = []
    for text, members in fold(texts, [(pair.a_specs, pair.b_specs, pair.n) for pair in pairs]):
        pair, (*names, reason) = pairs[members[0]], text.split("\t")
        sides = (names[: len(pair.a)], pair.a_specs), (names[len(pair.a) :], pair.b_specs)
        a, b = (" + ".join(_cut_in_words(n, specs[i]) for n, (i, *_) in fold(side, specs)) for side, specs in sides)
        lines.append(f"{a} against {b} ({plural(pair.n, 'pair')}, {reason})")
    return lines


def _fact(names: str, group: Group, several: int = 1) -> str:
    if len(group.names) == 1:
        return f"{names} {'is' if several == 1 else 'are'} invariant as {group.spec!r}"
    return f"{{{names}}} are jointly invariant as {group.spec!r}"


def _table(groups: Sequence[Group], width: int | None) -> list[str]:
    """The rows that were found as lines of a table, wrapped to a width if there is one."""
    if not groups:
        return ["no radially invariant rows"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for title in ("parameter", "spec", "rows × d", "reason", "defect"):
        table.add_column(title, overflow="fold", no_wrap=title not in ("parameter", "reason"))
    for names, reason, group, _ in _merged(groups, " + "):
        spec = group.spec if isinstance(group.spec, str) else repr(group.spec)
        table.add_row(names, spec, f"{group.n_rows} × {group.size}", reason, f"{group.defect:.1e}")
    text = io.StringIO()
    Console(file=text, width=width or 10_000, markup=False, highlight=False, emoji=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]
