"""All readings of a model, and the questions that the schedule, the judge and the forward check ask of them."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from steradian.discovery import invariance, thresholds
from steradian.discovery.graph import Graph, Path, Proposals, follow, propose
from steradian.discovery.invariance import Cut, Evidence, Key, Table, Trial, is_matrix
from steradian.discovery.joint import WHOLE, Alignment
from steradian.discovery.probe import Prober, Reading, output_change
from steradian.groups import Group, Layout

Names = tuple[str, ...]


class Measurements:
    """All readings of a model."""

    def __init__(self, prober: Prober, own: Reading) -> None:
        self.prober, self.own, self.shapes = prober, own, prober.shapes
        self.random: list[Reading] = []  # at random points
        self.first: Reading | None = None  # the first of them, with a graph
        self.grown: list[Reading] = []  # at a random point with the candidates grown, by the smaller factor first
        self.further: Reading | None = None  # the same with the larger factor, at a point that reaches other parts
        self.late: set[str] = set()  # parameters that only this one reaches
        self.graphs: list[Graph] = []  # of the first random point, and of passes that reach further parameters
        self.graph, self.proposals = Graph(), Proposals()  # the first of them, and what it says about sets
        self.growing: dict[str, float | Tensor] = {}  # what grows: 1, or 1 on some blocks and 0 elsewhere
        self.suspects_grown: Reading | None = None  # the first random point, with parameters of next to no effect grown
        self.alignments: dict[Names, Alignment] = {}  # of joint sets that have several rows
        self._may_be_invariant: dict[str, bool] = {}
        self._paths: dict[Names, Path] = {}

    # Effects

    def names_with_effect(self) -> list[str]:
        """Real trainable parameters with an effect that is not rounding."""
        parameters = self.prober.parameters
        return [n for n in self.prober.trainable if not parameters[n].is_complex() and self.has_effect(n)]

    def has_effect(self, name: str) -> bool:
        """Whether a parameter has an effect in some probe, beside its neighbors: rounding is proportional to theirs."""
        return self.local_share(name) > self.own.noise

    def local_share(self, name: str) -> float:
        """The largest effect of a parameter relative to its neighbors, in an exact reading if any reaches it.

        Chance or the data may skip a part of the model, and then a reading cannot judge that part.
        """
        readings = (self.own, *self.random)
        exact = [r for r in readings if r.noise == self.own.noise and r.slope[name]] or readings
        return max(reading.share(name, self._neighbors(name)) for reading in exact)

    def is_suspect(self, name: str) -> bool:
        """Whether a gain or a bias has so little effect that it may act through a normalization's ε alone."""
        return not is_matrix(self.shapes[name]) and self.local_share(name) < thresholds.LITTLE_EFFECT

    def _neighbors(self, name: str) -> Sequence[str]:
        """Parameters that are used shortly before and after one in the forward pass, and itself."""
        # In a deep model effects may grow by a constant factor per layer: there is no common scale.
        order = self.graph.order_of_use
        if name not in order:
            return self.prober.trainable
        return list(order)[max(0, order[name] - thresholds.NEIGHBORS) : order[name] + thresholds.NEIGHBORS + 1]

    def floor(self, reading: Reading, names: Sequence[str]) -> float:
        """The effect below which a row of these parameters is rounding."""
        return max(reading.noise * max(reading.effect[name], thresholds.FLOOR_OF_PEAK * reading.peak) for name in names)

    # Balance

    def imbalance(self, reading: Reading, name: str) -> float:
        """Of the whole parameter in one probe."""
        return float(invariance.imbalance(reading.tables[name][()], self.floor(reading, (name,))))

    def balanced(self, name: str, share: float = 1.0) -> bool:
        """Whether the whole parameter is balanced at random points, up to a share of the tolerance."""
        return all(self.imbalance(reading, name) <= share * self.prober.precision.loose for reading in self.random)

    def mostly_balanced(self, name: str) -> bool:
        """Whether it is balanced at most random points, and the graph shows that no nonlinearity can be the reason.

        In a narrow model one sample may leave a normalization hardly any variance, and there ε dominates.
        """
        loose = self.prober.precision.loose
        balanced = [self.imbalance(reading, name) <= loose for reading in self.random if reading.slope[name]]
        return 2 * sum(balanced) > len(balanced) and self.path((name,)).known

    def slices_balanced(self, name: str) -> bool:
        """Whether so many of its slices are balanced that it cannot be chance."""
        return is_matrix(self.shapes[name]) and invariance.slices_balanced(self.shapes[name], self.random_trial(name))

    def may_be_invariant(self, name: str) -> bool:
        """Whether a parameter may be invariant by itself, as a whole or slice by slice, by the random points."""
        if name not in self._may_be_invariant:
            reached = any(reading.slope[name] for reading in self.random)
            self._may_be_invariant[name] = reached and (self.balanced(name) or self.slices_balanced(name))
        return self._may_be_invariant[name]

    def random_trial(self, name: str) -> Trial:
        """The evidence of the random points about a parameter."""
        precision = self.prober.precision
        return Trial(precision, [self._evidence(reading, (name,), precision.loose) for reading in self.random])

    def trial(self, names: Names, alignment: Alignment = WHOLE) -> Trial:
        """All evidence about a parameter, or about several as one, slice beside slice as the alignment says."""
        precision = self.prober.precision
        # What the smaller growth leaves of a row of hardly any variance, the larger one removes.
        tolerances = [precision.loose, precision.strict][-len(self.grown) :]
        readings = zip(self.grown, tolerances, strict=True)
        return Trial(
            precision,
            random=[self._evidence(reading, names, precision.loose, alignment) for reading in self.random],
            grown=[self._evidence(reading, names, tolerance, alignment) for reading, tolerance in readings],
            constant=precision.flat if self._growth_undone else precision.flat / 10,
            known_path=self.path(names).known,
        )

    @cached_property
    def _growth_undone(self) -> bool:
        """Whether the outputs stay the same from one growth to the other.

        They do if another normalization undoes the growth of a row. A logarithm of its length also leaves a defect
        that stays, but it moves the outputs.
        """
        change = output_change(self.grown[0].outputs, self.grown[-1].outputs)
        return len(self.grown) > 1 and change <= 10 * self.prober.precision.same

    def _evidence(self, reading: Reading, names: Names, tolerance: float, alignment: Alignment = WHOLE) -> Evidence:
        return Evidence(self._tables(reading, names, alignment), self.floor(reading, names), tolerance)

    def _tables(self, reading: Reading, names: Names, alignment: Alignment) -> dict[Key, Table]:
        """Tables of one parameter, or of several as if they were one tensor of slices."""
        tables = [reading.tables[name] for name in names]
        return tables[0] if len(names) == 1 else alignment.join(tables, [self.shapes[name] for name in names])

    def is_fully_grown(self, reading: Reading) -> bool:
        """Whether the candidates have their full growth there, so that ε no longer shows."""
        return reading is self.grown[-1] or reading is self.further

    # Rows of a group

    def row_sums(self, reading: Reading, group: Group) -> tuple[Tensor, float]:
        """The sums of `Table` per row of a group in one probe, and the effect below which they are rounding."""
        tables, cut = self._tables(reading, group.names, self._alignment(group)), self._cut(group)
        if sum(blocks > 1 for blocks in cut) > 1:
            # The table of a pair of dimensions is made at grown points only; here one of them has to do.
            widest = max(range(len(cut)), key=lambda i: cut[i])
            cut = tuple(blocks if i == widest else 1 for i, blocks in enumerate(cut))
        return invariance.block_sums(tables, cut).reshape(4, -1), self.floor(reading, group.names)

    def worst_rows(self, group: Group) -> tuple[float, float]:
        """The largest imbalance of a row at random points, and the largest that growth has left."""
        trial, cut = self.trial(group.names, self._alignment(group)), self._cut(group)
        return invariance.typical_and_worst(cut, trial)[1], float(trial.grown[-1].beside_others(cut).max())

    def _alignment(self, group: Group) -> Alignment:
        return self.alignments.get(group.names, WHOLE)

    def _cut(self, group: Group) -> Cut:
        one = len(group.names) == 1
        return Layout(group.spec).blocks(self.shapes[group.names[0]]) if one else (group.n_rows,)

    # Graphs

    def add_graph(self, graph: Graph) -> None:
        """Keep a graph, which may have parameters that the others lack."""
        if not self.graphs:
            self.graph, self.proposals = graph, propose(graph)
        self.graphs.append(graph)
        self._paths.clear()

    def graph_of(self, names: Names) -> Graph:
        """The first graph that has all of these parameters, or else the first of all."""
        return next((graph for graph in self.graphs if graph.leaf_nodes.keys() >= set(names)), self.graph)

    def path(self, names: Names) -> Path:
        """Where the factor goes by which a set grows."""
        if names not in self._paths:
            self._paths[names] = follow(self.graph_of(names), names)
        return self._paths[names]

    def nonlinear(self, names: Names) -> bool:
        """Whether a set has a defect and meets a nonlinearity: then ε need not be the reason."""
        return self.path(names).nonlinear and self._has_defect(names)

    def _has_defect(self, names: Names) -> bool:
        """Whether more than rounding is left of a set's sum, at the first random point or another that reaches it."""
        reaching = [r for r in self.random if any(r.slope[name] for name in names)]
        if not reaching:
            return False
        reading = self.first if self.first in reaching else reaching[0]
        exact = reading is self.first  # other readings may be in the model's own float32
        tolerance = self.prober.precision.resolution if exact else thresholds.ROUNDING_MULTIPLE * reading.noise
        sums = torch.stack([reading.tables[name][()] for name in names]).sum(0)
        return float(invariance.imbalance(sums, self.floor(reading, names))) > tolerance
