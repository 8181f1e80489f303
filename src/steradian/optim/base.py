"""RowOptimizer: what every optimizer of the package has in common, from a gradient to a new weight."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, ClassVar

import torch
from torch import Tensor

# `torch.compiler.disable` that imports the compiler when it is first called: that takes as long as importing torch.
from torch._compile import _disable_dynamo as untraced
from torch.optim.optimizer import Optimizer

from steradian.geometry import is_plain
from steradian.groups import Groups, Layout, is_sharded
from steradian.optim import torch_updates, transport
from steradian.optim.checks import Options, check_gradients, check_rate, check_rows, check_settings, logger, warn_once
from steradian.optim.fused import decide
from steradian.optim.rows import RowSet, State, arithmetic, check_shape, sharding, together
from steradian.optim.telemetry import Telemetry

__all__ = ["RowOptimizer"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Classic = list[tuple[Options, list[Tensor], list[State]]]
"""Param groups for the classic update, each with its parameters that have a gradient, and their states."""
Work = list[tuple[Options, list[RowSet]]]
"""Param groups with rows, each with its row sets that have a gradient."""


class RowOptimizer(Optimizer, ABC):
    """A torch optimizer whose param groups may say, under "rows", how their parameters are cut into rows.

    | key | meaning |
    |---|---|
    | "rows" | a spec (`groups.Layout`): how the parameters are cut. None or no key: they get the classic update |
    | "joint" | True: the parameters of the group are cut into rows together |

    A parameter without a gradient is not changed; the rows of a joint set are then those of its other parameters.
    Half-precision rows are computed in float32. Numbers per row are float32, or float64 for float64 parameters. A step
    never waits for an accelerator.

    A subclass names its row update (`update`), says whether there is a fused one (`_has_fused`), which settings
    identify a saved state as its own (`_marks`), whether rows are put on the unit sphere (`_fixes_radius`) and whether
    the classic update takes sparse gradients (`_takes_sparse`). State and classic update are Adam's unless it has its
    own `_entries` and `_step_rest`. A class whose update writes telemetry (`transport.emit`) is declared with
    `emits=True`; a watch observes others from two points. A setting `rest_lr` is the rate of param groups without rows
    that give none.
    """

    telemetry: Telemetry | None = None  #: after `emit()`, seven numbers about every row of the last step
    #: entries of the state that have one number per row, in param groups where the row update does so
    row_state: ClassVar[frozenset[str]] = frozenset()

    _emits: ClassVar[bool] = False
    _has_fused: ClassVar[bool] = False
    _marks: ClassVar[frozenset[str]] = frozenset()
    _fixes_radius: ClassVar[bool] = False
    _takes_sparse: ClassVar[bool] = False
    _fused_step: decide.FusedStep | None = None

    def __init_subclass__(cls, *, emits: bool = False) -> None:
        super().__init_subclass__()
        cls._emits = emits or (cls._emits and "update" not in vars(cls))

    def __init__(self, params: Params, defaults: Options) -> None:
        if isinstance(params, Groups):
            raise TypeError("params must be parameters or param groups, got Groups: pass groups.param_groups()")
        if "rest_lr" in defaults:
            check_rate(defaults)  # param groups without rows have `rest_lr` in its place
        super().__init__(params, defaults)
        if defaults.get("without") != "" and all(group.get("rows") is None for group in self.param_groups):
            rate = " at the rate rest_lr, not lr" if "rest_lr" in defaults else ""
            why = "pass st.find_groups(model, batch).param_groups()"
            if any("rows" in group for group in self.param_groups):
                why = "find_groups found no invariant weights in this model"
            says = "%s: no param group has rows, so that every parameter gets the classic update%s: %s"
            warn_once(says, type(self).__name__, rate, why)

    # What a subclass implements

    @staticmethod
    @abstractmethod
    def update(rows: RowSet, group: Mapping[str, Any]) -> None:
        """The update of one row set, a function of `reference`; an instance may replace it by a compiled one."""

    def _check(self, group: Options) -> None:
        """Raise a ValueError that names the argument for settings that make no sense."""
        check_settings(group, self.defaults)

    def _entries(self, group: Options) -> tuple[str, ...]:
        """The entries of a parameter's state before its first step."""
        return ("step", "exp_avg", "exp_avg_sq")

    def _step_rest(self, params: list[Tensor], states: list[State], group: Options) -> None:
        """The classic update."""
        torch_updates.adam(params, states, group, *self._scaler)

    @staticmethod
    def _rest_pace(rows: RowSet, group: Mapping[str, Any]) -> tuple[Tensor, float | Tensor]:
        """What `transport.emit` needs of rows that got the classic update, where `_updates_rows` gives them to it."""
        raise NotImplementedError

    def _updates_rows(self, group: Options) -> bool:
        """Whether a group gets the row update with its settings, not the classic one."""
        return group.get("rows") is not None

    def _per_row(self, group: Options) -> frozenset[str]:
        """Entries of the state that have one number per row in this group."""
        return self.row_state if self._updates_rows(group) else frozenset()

    def _together(self, sets: list[RowSet], group: Options) -> Iterable[RowSet]:
        """Row sets of a group that are updated together."""
        return together(sets)

    # The step

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step; `closure` recomputes the loss and its gradients, and returns the loss, as this does then."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_capture()
        again = self._repeat_untraced if torch.compiler.is_compiling() else self._repeat_step
        if not again():
            with torch.no_grad():
                classic, work = self._collect()
                if not self._take_fused_step(classic, work):
                    self._step_plain(classic, work)
        return loss

    def _repeat_step(self) -> bool:
        """Take the fused step that is kept, if nothing that it was made from has changed."""
        if self._fused_step is None or not self._fused_step.fits(self):
            return False
        self._fused_step.run(self)
        return True

    _repeat_untraced = untraced(_repeat_step)

    def _step_plain(self, classic: Classic, work: Work) -> None:
        for group, params, states in classic:
            emits = self.telemetry is not None and group.get("rows") is not None
            (self._step_and_emit if emits else self._step_rest)(params, states, group)
        # An update that replaces the class's own, such as a compiled one, takes row sets one by one.
        alone, scaler = self.update is not type(self).update, self._scaler
        for group, sets in work:
            for rows in sets if alone else self._together(sets, group):
                with rows.scaled(*scaler):
                    self.update(rows, group)
                rows.finish()

    @property
    def _scaler(self) -> tuple[Tensor | None, Tensor | None]:
        """A gradient scaler's scale and found_inf, which it sets for a step; they are read on the device."""
        return getattr(self, "grad_scale", None), getattr(self, "found_inf", None)

    @untraced
    def _collect(self) -> tuple[Classic, Work]:
        """What has a gradient: parameters for the classic update, and row sets."""
        for group in self.param_groups:
            check_gradients(group, type(self).__name__, sparse=self._takes_sparse)
        if self.telemetry is not None:
            self.telemetry.left = None
        self._cover_rows()
        classic: Classic = []
        work: Work = []
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params and self._updates_rows(group):
                work.append((group, self._row_sets(params, group)))
            elif params:
                classic.append((group, params, [self._state_of(param, group, classic=True) for param in params]))
        return classic, work

    @untraced
    def _step_and_emit(self, params: list[Tensor], states: list[State], group: Options) -> None:
        """The classic update of parameters with rows, and its telemetry."""
        sets = self._row_sets(params, group, classic=True)
        before = [(rows, rows.read("param", rows.whole).clone()) for rows in sets if rows.n and rows.d]
        self._step_rest(params, states, group)
        for rows, x in before:
            with rows.scaled(*self._scaler):
                pace, start = self._rest_pace(rows, group)
                y, gradient = rows.read("param", rows.whole), rows.read("grad", rows.whole)
                transport.emit(rows, rows.whole, x, y, gradient, pace=pace, start=start)

    @untraced
    def _take_fused_step(self, classic: Classic, work: Work) -> bool:
        """If at least one group is fused, take the step that way, and keep it for the next ones."""
        self._fused_step = None
        if not any(self._is_fused(group) for group, _ in work):
            return False
        step = decide.FusedStep(self, classic, work)
        step.run(self)
        self._fused_step = step  # only if it ran
        return True

    def _is_fused(self, group: Options) -> bool:
        """Whether a group gets the fused step: by its setting, or by default on devices where it works."""
        wanted = group.get("fused")
        if wanted is False or not self._has_fused:
            return False
        if wanted:
            return decide.available(group["params"])
        return all(map(decide.runs_kernels, {param.device for param in group["params"]}))

    def _row_sets(self, params: list[Tensor], group: Options, *, classic: bool = False) -> list[RowSet]:
        """The rows of parameters that have a gradient, with their states and the place of their telemetry."""
        sets, layout = [], Layout(group["rows"])
        for members in _sets(params, group):
            newcomers = [param for param in members if not self.state.get(param)]
            states = [self._state_of(param, group, classic=classic) for param in members]
            whole = group["params"] if group.get("joint") else members
            absent = self._absent(members, newcomers, group) if group.get("joint") and not classic else []
            make = sharding().ShardedRowSet if any(map(is_sharded, members)) else RowSet
            rows = make(layout, members, states, absent, fresh=len(newcomers) == len(members))
            rows.dtype = arithmetic(whole)
            if self.telemetry is not None:
                rows.telemetry = self.telemetry[whole[0]]
            sets.append(rows)
        return sets

    def _absent(self, params: list[Tensor], newcomers: list[Tensor], group: Options) -> list[State]:
        """The states of a joint set's parameters without a gradient; newcomers take over what belongs to the set."""
        present, new = set(map(id, params)), set(map(id, newcomers))
        known = [param for param in group["params"] if self.state.get(param) and id(param) not in new]
        for param in newcomers if known else ():
            for name in self.state[param].keys() & (self._per_row(group) | {"step"}):
                self.state[param][name].copy_(self.state[known[0]][name])
        return [self.state[param] for param in known if id(param) not in present]

    def _state_of(self, param: Tensor, group: Options, *, classic: bool) -> State:
        state: State = self.state.get(param, {})
        if not state:
            state |= self._new_state(param, group)
            if state or group.get("momentum"):  # as torch, which makes SGD's momentum in the first step
                self.state[param] = state
        else:
            self._check_has(set(self._entries(group)), state)
        for name in self.row_state.intersection(state) if classic else ():
            check_shape(name, state[name], param.shape)
        return state

    def _new_state(self, param: Tensor, group: Options) -> State:
        """The state of a parameter before its first step: zeros."""
        state, per_row = {}, self._per_row(group)
        for name in self._entries(group):
            if name in per_row:
                state[name] = _zeros_per_row(param, group)
            elif name != "step":
                state[name] = torch.zeros_like(param)
            elif group.get("capturable") or self._is_fused(group):
                state[name] = torch.zeros((), dtype=torch.float32, device=param.device)
            else:  # from a number, as torch does: then a fake tensor has a known value
                state[name] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        return state

    def _check_capture(self) -> None:
        if torch.compiler.is_compiling() or all(group.get("capturable", True) for group in self.param_groups):
            return
        on_cuda = torch.cuda.is_available() if self._fused_step is None else self._fused_step.on_cuda
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"to capture {type(self).__name__}.step() in a graph, construct it with capturable=True")

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's with fused=True: gradients that are set to zero take one launch for all, not one each."""
        # Sharded and plain tensors cannot be zeroed in one call.
        sharded = {is_sharded(param) for group in self.param_groups for param in group["params"]}
        defaults, self.defaults = self.defaults, {**self.defaults, "foreach": len(sharded) == 1}
        try:
            super().zero_grad(set_to_none)
        finally:
            self.defaults = defaults

    # Telemetry

    def emit(self, on: bool = True) -> None:
        """Start, or stop, writing the numbers of `TELEMETRY` to `telemetry`; a copy of the optimizer starts without."""
        if on and not self._emits:
            remedy = "call transport.emit in its update, and declare it with emits=True"
            raise TypeError(f"{type(self).__name__} has no telemetry: {remedy}")
        if on != (self.telemetry is not None):
            self._fused_step, self.telemetry = None, Telemetry() if on else None
            self._cover_rows()

    def _cover_rows(self) -> None:
        if self.telemetry is not None:
            with_rows = [group for group in self.param_groups if group.get("rows") is not None]
            sets = [(params, Layout(group["rows"])) for group in with_rows for params in _sets(group["params"], group)]
            counts = [(params[0], _count_rows(params, layout), arithmetic(params)) for params, layout in sets]
            self.telemetry.cover(counts)

    # Groups and state

    def add_param_group(self, param_group: Options) -> None:
        """Add a param group, after checking its settings and that its layout cuts its parameters."""
        self._fused_step = None
        if isinstance(param_group, dict):  # if not, torch says so
            # A copy: one list of param groups may be given to several optimizers, each with its own settings.
            param_group = dict(param_group)
            if "rest_lr" in self.defaults and param_group.get("rows") is None:
                param_group.setdefault("lr", param_group.get("rest_lr", self.defaults["rest_lr"]))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            if group.get("fused") and not (self._has_fused and decide.available(group["params"])):
                why = "needs Triton and parameters on a GPU" if self._has_fused else "does not exist"
                raise ValueError(f"fused must be None or False here, got True: a fused {type(self).__name__} {why}")
            check_rows(group, fixed_radius=self._fixes_radius)
        except Exception:
            self.param_groups.pop()
            raise
        self._cover_rows()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, but with a state of every parameter or of none, as `torch.distributed.checkpoint` needs it."""
        packed = super().state_dict()
        if packed["state"]:
            packed["state"] = {key: {} for group in packed["param_groups"] for key in group["params"]} | packed["state"]
        return packed

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, on the parameters' device and in their memory format, without sharing memory with it.

        Settings that the saved groups lack, such as "rows" in a state of torch's Adam, stay as they are. A state that
        was made by another optimizer, for other parameters or under other settings raises a ValueError and changes
        nothing. Entries that are not ours are kept.
        """
        self._fused_step = None
        state, groups = self.state, self.param_groups
        loaded: list[dict[str, Any]] = []

        def take(_: Optimizer) -> None:
            for number, saved in enumerate(loaded[-1]["param_groups"]):
                group = self.param_groups[number]
                self._take_settings(number, saved, groups[number])
                for key, param in zip(saved["params"], group["params"], strict=True):
                    if param in self.state:
                        self._take_state(param, group, loaded[-1]["state"][key])

        # The user's own hooks may replace the state, and change what was loaded.
        before = self.register_load_state_dict_pre_hook(lambda _, last: loaded.append(last))
        after = self.register_load_state_dict_post_hook(take, prepend=True)
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.state, self.param_groups = state, groups
            raise
        finally:
            before.remove()
            after.remove()

    def _take_settings(self, number: int, saved: Options, old: Options) -> None:
        """Complete a param group that torch loaded with the settings that only the one before it had."""
        group = self.param_groups[number]
        if saved.get("rows") is not None:
            self._check_has(self._marks, saved)
        group |= {**old, **group}
        self._check(group)
        check_rows(group)
        for name in ("rows", "joint", "without"):
            here, now = old.get(name), group.get(name)
            if name == "rows" and (here is None) != (now is None):
                raise ValueError(f"rows of param group {number} must be {here!r} as in this optimizer, got {now!r}")
            if (here or None) != (now or None):
                says = "load_state_dict: param group %d has %s=%r from the checkpoint now, instead of %r"
                logger.warning(says, number, name, now, here)

    def _take_state(self, param: Tensor, group: Options, saved: Mapping[str, Any]) -> None:
        """Copy a saved state into a new one, which has the right dtypes, devices and memory formats."""
        saved = {name: value for name, value in saved.items() if value is not None}  # torch had momentum of 0 saved so
        if not saved:
            del self.state[param]
            return
        state = self._new_state(param, group)
        self._check_has(state.keys(), saved)
        for name, value in saved.items():
            if name not in state and name not in ("step", "momentum_buffer"):  # not ours
                state[name] = copy.deepcopy(self.state[param][name] if isinstance(value, Tensor) else value)
                continue
            if name == "step":
                # Before torch 1.12 it was a plain number.
                value = value if isinstance(value, Tensor) else torch.tensor(float(value), device="cpu")
                value = value.squeeze()
            if not isinstance(value, Tensor):
                raise ValueError(f"the state {name!r} must be a tensor, got {value!r}")
            if name not in state:
                state[name] = torch.zeros_like(param)  # torch makes SGD's momentum in the first step
            fill(state[name], check_shape(name, value, state[name].shape))
        self.state[param] = state

    def _check_has(self, needed: Set[str], saved: Mapping[str, Any]) -> None:
        """Raise a ValueError unless what was saved has these names."""
        if not needed <= saved.keys():
            expected, found = (", ".join(map(repr, sorted(names))) for names in (needed, saved))
            raise ValueError(
                f"a state of {type(self).__name__} must have {expected} here, got {found}: "
                "it was made by another optimizer or under other settings"
            )


def settings(arguments: Options) -> Options:
    """The settings among the arguments of a constructor, which are its `locals()`."""
    return {name: value for name, value in arguments.items() if name not in ("self", "params", "__class__")}


def _sets(params: list[Tensor], group: Options) -> list[list[Tensor]]:
    """The parameters that are cut into rows together."""
    return [params] if group.get("joint") and params else [[param] for param in params]


def _count_rows(params: list[Tensor], layout: Layout) -> int:
    if any(map(is_sharded, params)):
        return int(sharding().count_rows(params, layout))
    return layout.size(params[0].shape)[0]


def _zeros_per_row(param: Tensor, group: Options) -> Tensor:
    dtype, layout = arithmetic(group["params"] if group.get("joint") else [param]), Layout(group["rows"])
    if is_sharded(param):
        zeros: Tensor = sharding().per_row(param, layout, dtype)
        return zeros
    # Of the class of the momentum: plain tensors may not mix with it, and the parameter's class may encode its numbers.
    alike = param if is_plain(param) else torch.zeros_like(param)
    return alike.new_zeros(layout.size(param.shape)[0], dtype=dtype)


def fill(entry: Tensor, numbers: Tensor) -> None:
    """Copy numbers into an entry of the state; if it is sharded they may be those of the whole parameter."""
    if is_sharded(entry) and not is_sharded(numbers):
        sharding().keep(entry, numbers.to(entry.device).contiguous())
    else:
        entry.copy_(numbers)
