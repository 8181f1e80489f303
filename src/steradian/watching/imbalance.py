"""The imbalance ‖a‖/‖b‖ of pairs: training may move scale from one side to the other, which no output shows."""

import logging
from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor

from steradian.groups import Groups, Pair, is_flattened, is_sharded, set_numbers
from steradian.watching.records import listed
from steradian.watching.statistics import Statistics

__all__ = ["Imbalance"]

logger = logging.getLogger("steradian")


class Imbalance:
    """√(Σ_a x² / Σ_b x²) for every set of every pair, reduced to statistics over the sets of each pair.

    Args:
        groups: whose pairs are measured, as far as each is on one device and not sharded.
        watched: the ids of the watched parameters; pairs without any of them are left out.
    """

    def __init__(self, groups: Groups, watched: Collection[int]) -> None:
        by_device: dict[torch.device, list[tuple[str, Pair]]] = {}
        left, count = [], Counter[str]()
        for pair in groups.pairs:
            params = [groups.params[name] for name in (*pair.a, *pair.b)]
            if not any(id(param) in watched for param in params):
                continue
            name = _name(pair)
            count[name] += 1
            name += f" ({count[name]})" if count[name] > 1 else ""
            if len({param.device for param in params}) > 1 or any(is_sharded(p) or is_flattened(p) for p in params):
                left.append(name)
            else:
                by_device.setdefault(params[0].device, []).append((name, pair))
        if left:
            logger.warning("no imbalance is recorded of sharded pairs, or on several devices: %s", listed(left))
        self.names = [name for pairs in by_device.values() for name, _ in pairs]
        self._parts = [_Part(groups, [pair for _, pair in pairs], device) for device, pairs in by_device.items()]

    @torch.no_grad()
    def measure(self) -> list[Tensor]:
        """The statistics of the present weights, (pairs, 6) for each device in the order of `names`; does not wait."""
        return [part.measure() for part in self._parts]


class _Part:
    """The pairs on one device. All sets are numbered one behind the other, and one more takes what is in no set."""

    def __init__(self, groups: Groups, pairs: list[Pair], device: torch.device) -> None:
        self._terms: list[tuple[int, Tensor, list[int], Tensor]] = []  # side, parameter, summed dimensions, sets
        self.total = sum(pair.n for pair in pairs)
        self.dtype, spans, start = torch.float32, [], 0
        for pair in pairs:
            for side, (names, specs) in enumerate(((pair.a, pair.a_specs), (pair.b, pair.b_specs))):
                for name, spec in zip(names, specs, strict=True):
                    param, numbers = groups.params[name], set_numbers(spec, groups.params[name].shape)
                    sets = torch.where(numbers < 0, self.total, start + numbers).flatten().to(device)
                    dims = [i for i, size in enumerate(numbers.shape) if size == 1]
                    self._terms.append((side, param, dims, sets))
                    self.dtype = torch.promote_types(self.dtype, param.dtype)
            spans.append(slice(start, start := start + pair.n))
        self.sums = torch.zeros(2, self.total + 1, dtype=self.dtype, device=device)
        self.statistics = Statistics(spans, device=device)

    def measure(self) -> Tensor:
        self.sums.zero_()
        for side, param, dims, sets in self._terms:
            norms = torch.linalg.vector_norm(param, dim=dims, dtype=self.dtype) if dims else param.to(self.dtype)
            self.sums[side].index_add_(0, sets, norms.square().flatten())
        a, b = self.sums[:, : self.total]
        return self.statistics((a / b).sqrt())


def _name(pair: Pair) -> str:
    """The first name of each side, the second without the modules that it shares with the first.

    >>> _name(Pair(("mlp.up.weight", "mlp.up.bias"), ("mlp.down.weight",), ("filter",) * 2, (("axis", 1),), 8, ""))
    'mlp.up.weight / down.weight'
    """
    a, b = pair.a[0].split("."), pair.b[0].split(".")
    shared = 0
    while shared < len(b) - 2 and a[: shared + 1] == b[: shared + 1]:
        shared += 1
    return f"{pair.a[0]} / {'.'.join(b[shared:])}"
