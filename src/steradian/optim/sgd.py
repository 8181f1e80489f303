"""SGD whose momentum moves with radially invariant rows (Section 4, App. D.2 applied to SGD with momentum)."""

from torch import Tensor

from steradian.optim import reference, torch_updates
from steradian.optim.base import Params, RowOptimizer, settings
from steradian.optim.checks import Options, check
from steradian.optim.rows import peak_rate

__all__ = ["SGD"]


class SGD(RowOptimizer, emits=True):
    """SGD, and with a momentum that is transported and rescaled on param groups that have rows.

    g = ∇L(x) + λx;  m ← μ m + (1−τ) g (m ← g in the first step);  x' = x − η m, with Nesterov x − η (g + μ m).
    Then "b": m is transported from u to u', with Nesterov by the general isometry, and "c": m ← (r/r') m. "a" changes
    nothing. `without=""`, no momentum, and parameters whose group has no rows get `torch.optim.SGD`'s update, bit for
    bit. A row that has no direction before or after a step keeps its momentum as it is.

    Args:
        params: parameters, or param groups with the keys "rows" and "joint" (`Groups.param_groups()`).
        lr: rate η, a number or a tensor.
        momentum: μ.
        dampening: τ.
        weight_decay: λ, coupled.
        nesterov: Nesterov's momentum.
        without: letters out of "abc", in any order; a param group may have its own.
        corrected_decay: on rows, λη/η_max in the place of λ, so that a falling rate is not undone by shrinking radii
            (SGDC: Defazio, 2025). η_max is the group's "max_lr", or else "initial_lr", which torch's schedulers set, or
            else the rate that it was made with.
        maximize: ascend.
        fused: None or False; there is no fused SGD.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(8, 3))
    >>> optimizer = SGD([{"params": [weight], "rows": "filter"}], lr=0.1, momentum=0.9, without="bc")
    """

    update = staticmethod(reference.sgd)
    _rest_pace = staticmethod(reference.sgd_pace)
    _step_rest = staticmethod(torch_updates.sgd)
    _marks = frozenset({"momentum", "without"})
    _takes_sparse = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        without: str = "",
        corrected_decay: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()))

    def _check(self, group: Options) -> None:
        super()._check(group)
        fine = not group["nesterov"] or (group["momentum"] > 0 and group["dampening"] == 0)
        check(fine, "nesterov", group["nesterov"], "False without momentum or with dampening")

    def _updates_rows(self, group: Options) -> bool:
        moves = bool(group["momentum"]) and ("b" in group["without"] or "c" in group["without"])
        return group.get("rows") is not None and (moves or peak_rate(group) is not None)

    def _entries(self, group: Options) -> tuple[str, ...]:
        return ("momentum_buffer",) if self._updates_rows(group) else ()  # torch makes its own in the first step
