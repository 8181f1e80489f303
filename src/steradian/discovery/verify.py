"""f(ρx) = f(x): all rows found are scaled at once by random factors, and the outputs must not move."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .defects import imbalance
from .judge import Finding, Findings, row_sums
from .outputs import difference, spread_of
from .points import Factors, Noise
from .probe import Prober
from .structure import UNKNOWN, Absorbers, Trace
from .survey import Stand, Survey

__all__ = ["Verified", "row_factors", "verify"]

_LEAST_BY_EPSILON, _MOST_BY_EPSILON = 1e-3, 0.03
"""Between these, outputs may move at ordinary scale as far as the defect of the worst row explains it."""
_DOMINATED, _MOST_LEFT = 0.01, 0.25
"""Imbalance at ordinary scale above which a row is left alone there, and the share of rows that may be."""
_MOST_DOUBTED, _GRADUAL = 0.1, 0.02
"""Up to the first, outputs that moved further than allowed may move so by ε, if a little does so small a share."""
_MOST_PREDICTED = 0.3
"""Up to this, as far as the derivatives along all rows say together: in a deep model, what ε does adds up."""


class Verified:
    """Findings that passed, what was rejected, and the reasons."""

    def __init__(self, findings: Findings) -> None:
        self.rows, self.facts = list(findings.rows), list(findings.facts)
        self.no_effect, self.partial = findings.no_effect, findings.partial
        self.curved = findings.curved
        self.rejected: list[Finding] = []
        self.reasons: dict[str, str] = {}


def verify(prober: Prober, survey: Survey, findings: Findings) -> Verified:
    """Scale what was found and keep what leaves the outputs alone.

    Rows are scaled at a point of ordinary scale, where nothing is saturated, and then, together with the facts,
    at the grown one, where ε has no weight. In a deep model with wild gradients ε alone moves the outputs at
    ordinary scale as far as anything could; then a grown point must do.
    """
    verified = Verified(findings)
    if not survey.far:
        return verified
    checker = _Checker(prober, survey, verified)
    far = survey.far[-1]
    verified.rows = checker.passing(verified.rows, (), checker.calmest(verified.rows))
    late = [finding for finding in verified.rows if not set(survey.late).isdisjoint(finding.names)]
    if survey.further is not None and late and prober.left > bool(verified.facts):
        kept = checker.passing(late, (), survey.further)
        verified.rows = [finding for finding in verified.rows if finding not in late or finding in kept]
    if verified.facts:
        verified.facts = checker.passing(verified.facts, tuple(verified.rows), far)
    elif prober.left:
        verified.rows = checker.passing(verified.rows, (), far)
    return verified


class _Checker:
    def __init__(self, prober: Prober, survey: Survey, verified: Verified) -> None:
        self.prober, self.survey, self.verified = prober, survey, verified
        self._draw = 0
        self._absorbers = Absorbers()

    def calmest(self, tested: list[Finding]) -> Stand:
        """The first point, from ordinary scale on, where ε does not drown what scaling a row does."""
        stands = [*([self.survey.ground] if self.survey.ground else []), *self.survey.far]
        return next((stand for stand in stands if self._predicted(tested, stand) <= _MOST_PREDICTED), stands[-1])

    def passing(self, tested: list[Finding], known: tuple[Finding, ...], stand: Stand) -> list[Finding]:
        """The findings that hold; on a failure, halves are tried while the budget lasts."""
        if not tested:
            return []
        if self.prober.left and self._holds(tested, known, stand):
            return tested
        if len(tested) == 1 or not self.prober.left:
            self.verified.rejected += tested
            return []
        half = len(tested) // 2
        return self.passing(tested[:half], known, stand) + self.passing(tested[half:], known, stand)

    def _holds(self, tested: list[Finding], known: tuple[Finding, ...], stand: Stand) -> bool:
        grown = self.survey.is_grown(stand)
        moved = self._moved(tested, known, stand, "either way" if grown else "up")
        if moved <= self._tolerance([*known, *tested], stand):
            return True
        # Where rows have next to no variance, ε does more than their derivatives say. But it does it gradually: of what
        # a factor of 4 to 16 does, one of 1.02 does about a hundredth. What jumps at some size does more.
        clear = all(self.survey.transparent(finding.names) for finding in tested)
        if grown or moved > _MOST_DOUBTED or not clear or not self.prober.left:
            return False
        return self._moved(tested, known, stand, "a little") <= _GRADUAL * moved

    def _moved(self, tested: list[Finding], known: tuple[Finding, ...], stand: Stand, how: str) -> float:
        """How far the outputs move when the rows are scaled, relative to their spread; keeps the reasons seen."""
        trace, scaled = Trace(), [*known, *tested]
        self._draw += 1
        factors = [
            row_factors(finding, self.prober.parameters, 1000 * self._draw + i, how, self._left_alone(finding, stand))
            for i, finding in enumerate(scaled)
        ]
        try:
            reading = self.prober.read(
                stand.point.scaled(*factors), seed=stand.seed, recorder=trace, backward=False, draw=stand.draw
            )
        except torch.OutOfMemoryError:  # says nothing about the rows
            raise
        except Exception as error:  # a point that the model does not bear proves nothing
            self.prober.raised = error
            return math.inf
        moved = difference(stand.reading.outputs, reading.outputs)
        if moved <= self._tolerance(scaled, stand):
            self._absorbers.compare(stand.trace, trace, same=10 * self.prober.precision.same)
            for name in (name for finding in tested for name in finding.names):
                if self.verified.reasons.get(name, UNKNOWN).startswith(UNKNOWN):
                    self.verified.reasons[name] = self._absorbers.explain(self.survey.map_of((name,)), name)
        return moved

    def _left_alone(self, finding: Finding, stand: Stand) -> Tensor | None:
        """Rows that ε dominates at ordinary scale, if they are few: they are scaled where they have grown."""
        sums, floor = row_sums(self.survey, stand.reading, finding)
        dominated = imbalance(sums, floor) > _DOMINATED
        few = finding.rows == len(dominated) and float(dominated.double().mean()) < _MOST_LEFT
        return dominated if stand is self.survey.ground and few else None

    def _tolerance(self, scaled: list[Finding], stand: Stand) -> float:
        """What ε does to a row, it does to the outputs when that row is scaled."""
        if self.survey.is_grown(stand):
            by_defect = max(10 * max(f.remaining for f in scaled), 3 * self._predicted(scaled, stand))
            return max(self.prober.precision.same, min(by_defect, _MOST_BY_EPSILON))
        least = max(
            self.prober.precision.same, _LEAST_BY_EPSILON, min(3 * self._predicted(scaled, stand), _MOST_PREDICTED)
        )
        if stand is not self.survey.ground:
            return least
        return max(least, min(10 * max(f.natural for f in scaled), _MOST_BY_EPSILON))

    def _predicted(self, scaled: list[Finding], stand: Stand) -> float:
        """How far ⟨∇L, x⟩ says that the outputs move when ε loses its weight, relative to their spread.

        dL/d log ρ falls from D = ⟨∇L, x⟩ with 1/ρ², so that growing changes L by D/2. L is the outputs' product with
        a normal vector, which changes about as much as they do. Rows may act together or each for itself, and the
        parameters of a deep model together.
        """
        moves = [0.0]
        for reading in self.survey.near if stand is self.survey.ground else [stand.reading]:
            radial = [row_sums(self.survey, reading, finding)[0][0] for finding in scaled]
            change = sum(max(abs(float(D.sum())), float(D.norm())) for D in radial) / 2
            spread = math.hypot(*(spread_of(t[torch.isfinite(t)]) for t in reading.outputs))
            moves.append(change / spread if spread else 0.0)
        return max(moves)


def row_factors(
    finding: Finding, parameters: Mapping[str, Tensor], seed: int, how: str, left_alone: Tensor | None = None
) -> Factors:
    """A random ρ per row, spread over the entries of its parameters; 1 for rows that are left alone.

    At a grown point it lies between 1/2 and 2 and not near 1 ("either way"). At one of ordinary scale it lies between
    4 and 16 ("up"): growing takes ε's weight away, which moves a true row less than shrinking would, and another row
    more. "A little" is between 1.01 and 1.02 either way.
    """
    host = torch.device("cpu")
    generator = Noise(seed)(host)
    exponent = 0.5 + 0.5 * torch.rand(finding.rows, generator=generator, dtype=torch.float64, device=host)
    sign = torch.where(torch.rand(finding.rows, generator=generator, device=host) < 0.5, -1.0, 1.0)
    rho = {"up": 4 * exponent, "either way": sign * exponent, "a little": 0.03 * sign * exponent}[how].exp2()
    if left_alone is not None:
        rho = rho.masked_fill(left_alone, 1.0)
    factors: dict[str, Tensor] = {}
    for name, cut in zip(finding.names, finding.cuts, strict=True):
        tensor, factor = parameters[name], rho.reshape(cut)
        for dim, blocks in enumerate(cut):
            if blocks > 1:
                factor = factor.repeat_interleave(tensor.shape[dim] // blocks, dim)
        factors[name] = factor.to(tensor.device)
    return factors
