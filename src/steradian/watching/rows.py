"""Which rows are watched: every parameter that an optimizer steps, cut into rows, with its name, label and settings."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steradian.groups import Group, Groups, Layout, is_flattened, is_sharded, parameters_of
from steradian.optim.rows import sharding
from steradian.watching.records import listed

__all__ = ["INVARIANT", "Membership", "Piece", "WatchedGroup", "dtype_of", "nominal_rate", "place", "watched_groups"]

Settings = dict[str, Any]  # a param group of an optimizer
Model = nn.Module | Sequence[nn.Module] | Groups | None
"""Where names come from: a model, its parts, what `find_groups` found, or the optimizer's own names (None)."""

INVARIANT, NOT_INVARIANT, UNTESTED = "invariant", "not invariant", "untested"
_PIECE = 2**16  # numbers that are computed with at once, so that temporaries stay small
_SIZE = attrgetter("nbytes")
_FORM = attrgetter("shape", "dtype", "device")


class WatchedGroup:
    """A group of rows that an optimizer steps; `settings` is the param group of its first parameter."""

    def __init__(
        self, group: Group, params: Sequence[Tensor], optimizer: Optimizer, settings: Settings, label: str
    ) -> None:
        self.group, self.params, self.optimizer, self.settings, self.label = group, params, optimizer, settings, label
        self.name = " + ".join(group.names)
        self.layout, self.size = Layout(group.spec), group.size
        self.device, self.dtype = params[0].device, params[0].dtype
        self.sharded = any(map(is_sharded, params))
        self.total_rows = self.layout.size(params[0].shape)[0]
        self.n_rows = self.layout.size(self.local(params[0]).shape)[0]  # on this rank
        self.gathered = self.sharded and self.n_rows == self.total_rows  # rows span ranks, and each rank gathers them
        self.start, self.span = 0, slice(0, self.n_rows)  # its place among the rows of its source, set by `place`
        self.gone = False  # the optimizer no longer steps it, or not as it did when the watch began
        self.held: list[Tensor] | None = None  # gradients before the step, if someone may take them away

    def active(self) -> bool:
        """Whether all of its parameters have a gradient, so that the step moves it."""
        return not self.gone and (self.held is not None or all(param.grad is not None for param in self.params))

    def describe(self) -> dict[str, Any]:
        """Its entry in run.json."""
        return {
            "name": self.name,
            "names": list(self.group.names),
            "label": self.label,
            "layout": self.layout.spec,
            "shapes": [list(param.shape) for param in self.params],
            "dtype": str(self.params[0].dtype).removeprefix("torch."),
            "rows": self.total_rows,
            "size": self.size,
            "reason": self.group.reason,
            "defect": self.group.defect if math.isfinite(self.group.defect) else None,
        }

    def locals(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parts on this rank of tensors like a parameter; whole ones if its rows span several ranks: one gather."""
        found = [tensor.detach() for tensor in tensors]
        found = [each if each.layout == torch.strided else each.to_dense() for each in found]
        if not self.sharded:
            return found
        if all(map(is_sharded, found)):
            return list(sharding().parts(found, self.layout))
        return [sharding().part(each, self.layout) if is_sharded(each) else each for each in found]

    def local(self, tensor: Tensor) -> Tensor:
        """`locals` of one tensor."""
        return self.locals([tensor])[0]

    def parts(self, points: Sequence[Tensor] | None, gradients: Sequence[Tensor]) -> list["Piece"]:
        """Its whole parameters, those of this rank; `points` are the parameters before the step, if copied."""
        found = []
        for k, (param, gradient) in enumerate(zip(self.params, gradients, strict=True)):
            state = self.optimizer.state.get(param)
            state = state if isinstance(state, Mapping) else {}  # some optimizers keep a tensor by itself
            alike = {name: v for name, v in state.items() if isinstance(v, Tensor) and v.shape == param.shape}
            now, here, *entries = self.locals([param, gradient, *alike.values()])
            state = {**state, **dict(zip(alike, entries, strict=True))}
            found.append(Piece(slice(0, self.n_rows), None if points is None else points[k], now, here, state))
        return found

    def pieces(self, parts: Sequence["Piece"], at_once: int = _PIECE) -> Iterator["Piece"]:
        """The rows of its `parts` in pieces of at most so many numbers."""
        _, before, now, gradients, states = zip(*parts, strict=True)
        per_row = getattr(self.optimizer, "row_state", ())
        alike: dict[str, list[Tensor]] = {}  # entries of the state in the shape of the parameter
        numbers: dict[str, Tensor] = {}  # one number for each row, or one for all
        for name, value in states[0].items():
            of_all = [state.get(name) for state in states]  # matrices may be stepped in another way than biases
            if isinstance(value, Real):
                numbers[name] = torch.tensor(float(value), device="cpu")
            elif all(isinstance(v, Tensor) and v.shape == part.shape for v, part in zip(of_all, now, strict=True)):
                alike[name] = of_all
            elif isinstance(value, Tensor) and name in per_row:
                numbers[name] = self.local(value)
            elif isinstance(value, Tensor) and value.numel() == 1:
                numbers[name] = value.reshape(())
        rows, columns = max(1, at_once // self.size), min(at_once, self.size)
        for row in range(0, self.n_rows, rows):
            for column in range(0, self.size, columns):
                at = slice(row, min(row + rows, self.n_rows)), slice(column, column + columns)
                state = {name: value[at[0]] if value.ndim else value for name, value in numbers.items()}
                state |= {name: self.cut(values, at) for name, values in alike.items()}
                point = None if before[0] is None else self.cut(before, at)
                yield Piece(at[0], point, self.cut(now, at), self.cut(gradients, at), state)

    def cut(self, parts: Sequence[Tensor], at: tuple[slice, slice]) -> Tensor:
        """Some rows and columns of tensors in the shapes of the parameters, those of this rank."""
        rows, columns = at
        if len(parts) == 1 and self.layout.spec in ("filter", "tensor"):  # without copying the other rows
            part = parts[0][rows] if self.layout.spec == "filter" and parts[0].ndim else parts[0]
            return part.reshape(rows.stop - rows.start, self.size)[:, columns]
        return self.layout.join(parts)[rows, columns]

    def row(self, number: int) -> Tensor:
        """One row; where it lies in one parameter, a view in the shape of that part."""
        here = list(map(self.local, self.params))
        if len(here) == 1 and self.layout.spec in ("filter", "tensor"):
            return here[0][number] if self.layout.spec == "filter" and here[0].ndim else here[0]
        return self.cut(here, (slice(number, number + 1), slice(0, self.size)))[0]

    def gradients(self) -> list[Tensor]:
        """The gradients of its parameters, dense; only for an active group."""
        found = [param.grad for param in self.params if param.grad is not None]
        found = found if len(found) == len(self.params) else self.held or []
        return [grad.to_dense() if grad.layout != torch.strided else grad for grad in found]


class Piece(NamedTuple):
    """Some rows of a group: which, before the step (if they were copied) and after it, their gradient, their state."""

    rows: slice
    before: Tensor | None
    now: Tensor
    gradient: Tensor
    state: dict[str, Any]


def watched_groups(
    optimizers: Sequence[Optimizer], model: Model = None, only: Sequence[str] | None = None
) -> tuple[list[WatchedGroup], list[str]]:
    """Every parameter that the optimizers step, as groups of rows, and sentences about what is left out.

    Rows are those that `find_groups` proved or that a param group declares; else the slices of dimension 0 of a matrix
    or filter, and everything smaller, also slices of one number, as a whole. `only` are glob patterns of names.
    """
    found: list[WatchedGroup] = []
    notes: list[str] = []
    every = _names(optimizers, model)
    known = [name for names in every for name in names.values()]
    if unmatched := [pattern for pattern in only or () if not any(fnmatchcase(name, pattern) for name in known)]:
        raise ValueError(f"only: no name matches {unmatched}; the parameters are {listed(known, 6)}")
    for optimizer, names in zip(optimizers, every, strict=True):
        owner = {id(param): settings for settings in optimizer.param_groups for param in settings["params"]}
        taken: set[int] = set()
        for group, params, label in _proposed(optimizer, model, names):
            ids = [id(param) for param in params]
            if any(key in taken or key not in owner for key in ids):
                continue
            if only is not None and not any(fnmatchcase(name, each) for name in group.names for each in only):
                continue
            if len({param.device for param in params}) > 1:
                notes.append(f"not watched: {' + '.join(group.names)}, rows only together, are on several devices")
                continue
            taken.update(ids)
            if not all(param.is_floating_point() for param in params):
                notes.append(f"not watched: {group.names[0]} holds {params[0].dtype}, and rows are real vectors")
            elif any(map(is_flattened, params)):
                flat = "was flattened by FullyShardedDataParallel and has no rows any more"
                notes.append(f"not watched: {group.names[0]} {flat}")
            elif group.size and group.n_rows and all(param.requires_grad for param in params):
                found.append(WatchedGroup(group, params, optimizer, owner[ids[0]], label))
    place_of = {key: k for k, key in enumerate(_of_model(model))}
    found.sort(key=lambda group: place_of.get(id(group.params[0]), len(place_of)))
    if place_of and found and all(place_of.keys().isdisjoint(names) for names in every):
        right = "use groups.of(model)" if isinstance(model, Groups) else "pass the model that the optimizer trains"
        notes.append(f"the weights have no names, because the optimizer steps none of those given: {right}")
    return found, notes


def _proposed(optimizer: Optimizer, model: Model, names: dict[int, str]) -> Iterator[tuple[Group, list[Tensor], str]]:
    """Groups of rows in the order of their precedence: proved, declared, then every parameter by itself."""
    rest: set[int] = set()
    if isinstance(model, Groups):
        facts = [fact for fact in model.facts if len(fact.names) == 1]
        for group in (*model.groups, *facts):
            yield group, [model.params[name] for name in group.names], INVARIANT
        rest = {id(model.params[name]) for name in model.rest if name not in model.no_effect}
    for settings in optimizer.param_groups:
        if settings.get("rows") is not None:
            layout, params = Layout(settings["rows"]), settings["params"]
            for members in [params] if settings.get("joint") and params else [[param] for param in params]:
                sizes = [layout.size(param.shape) for param in members]
                together = tuple(names[id(param)] for param in members)
                declared = Group(together, layout.spec, sizes[0][0], sum(d for _, d in sizes), "", math.nan)
                refuted = any(id(param) in rest for param in members)
                yield declared, members, NOT_INVARIANT if refuted else INVARIANT
    for settings in optimizer.param_groups:
        for param in settings["params"]:
            # A slice of one number, as of the gains of weight_norm, has only a sign.
            layout = Layout("filter" if param.ndim > 1 and param.shape[1:].numel() > 1 else "tensor")
            group = Group((names[id(param)],), layout.spec, *layout.size(param.shape), "", math.nan)
            yield group, [param], NOT_INVARIANT if id(param) in rest else UNTESTED


def _names(optimizers: Sequence[Optimizer], model: Model) -> list[dict[int, str]]:
    """For each optimizer the names of its parameters, all different: the model's, the optimizer's, or numbers."""
    known = _of_model(model)
    every: list[dict[int, str]] = []
    taken: set[str] = set()
    for number, optimizer in enumerate(optimizers):
        every.append({})
        of = f"optimizer {number}, " if len(optimizers) > 1 else ""
        for k, settings in enumerate(optimizer.param_groups):
            params = settings["params"]
            own = settings.get("param_names") or [f"{of}group {k}, parameter {i}" for i in range(len(params))]
            for param, other in zip(params, own, strict=False):
                name = known.get(id(param), other)
                # Two models, such as actor and critic, may have parameters of the same name.
                while name in taken:
                    name += f" ({of}group {k})"
                every[-1][id(param)] = name
                taken.add(name)
    return every


def _of_model(model: Model) -> dict[int, str]:
    """Names of a model's parameters by their id, in the model's order."""
    if isinstance(model, Groups):
        return {id(param): name for name, param in model.params.items()}
    parts = [model] if isinstance(model, nn.Module) else list(model or ())
    return {id(param): name for part in parts for name, param in parameters_of(part).items()}


def place(watched: Iterable[WatchedGroup], *, key: Callable[[WatchedGroup], Any]) -> list[WatchedGroup]:
    """The groups in the order in which a source writes their rows, each with its `start` set."""
    ordered, start = sorted(watched, key=key), 0
    for group in ordered:
        group.start, group.span = start, slice(start, start + group.n_rows)
        start += group.n_rows
    return ordered


def dtype_of(watched: Iterable[WatchedGroup]) -> torch.dtype:
    """The dtype of numbers per row: float64 if a parameter has it, else float32."""
    wide = any(param.dtype == torch.float64 for group in watched for param in group.params)
    return torch.float64 if wide else torch.float32


def nominal_rate(settings: Mapping[str, Any]) -> float | Tensor:
    """The rate in a param group; NaN if it has none, or if the optimizer computes its own (lr=None)."""
    rate: float | Tensor | None = settings.get("lr")
    return math.nan if rate is None else rate


class Membership:
    """Keeps up with param groups, which `load_state_dict` replaces, and with parameters that leave or change."""

    def __init__(self, watched: Sequence[WatchedGroup]) -> None:
        self.watched = watched
        self._optimizers = list({id(group.optimizer): group.optimizer for group in watched}.values())
        self._params = [param for group in watched for param in group.params]
        self._forms = list(map(_FORM, self._params))  # when the watch began
        self._sharded = any(group.sharded for group in watched)
        self._known, self._places = self._members(), list[Any]()

    def _members(self) -> list[tuple[int, ...]]:
        return [(id(group), *map(id, group["params"])) for each in self._optimizers for group in each.param_groups]

    def moved(self) -> bool:
        """Whether something may have changed since the last call, or a parameter lies elsewhere in memory.

        A parameter of another form is larger or smaller, or lies elsewhere; forms themselves take more time to read.
        """
        here = [] if self._sharded else [list(map(_SIZE, self._params)), list(map(Tensor.data_ptr, self._params))]
        if here and here == self._places and self._known == self._members():
            return False
        self._places = here
        return True

    def update(self) -> list[str]:
        """Adopt the present param groups; names of groups that are gone: a parameter left or has another form."""
        before, self._known = self._known, self._members()
        changed = {id(p) for p, form in zip(self._params, self._forms, strict=True) if _FORM(p) != form}
        if before == self._known and not changed:
            return []
        present = [settings for optimizer in self._optimizers for settings in optimizer.param_groups]
        owner = {id(param): settings for settings in present for param in settings["params"]}
        # The settings that stand for those of before: the same, or those that now have the first of their parameters.
        now = {id(settings): settings for settings in present}
        for group in self.watched:
            if id(group.params[0]) in owner:
                now.setdefault(id(group.settings), owner[id(group.params[0])])
        lost = []
        for group in self.watched:
            group.settings = now.get(id(group.settings), group.settings)
            # A joint set has the settings of its first parameter; the others may be in other param groups.
            first, *others = (owner.get(id(param)) for param in group.params)
            left = first is not group.settings or any(other is None for other in others)
            if not group.gone and (left or any(id(param) in changed for param in group.params)):
                group.gone = True
                lost.append(group.name)
        return lost
