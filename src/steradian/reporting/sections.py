"""The page's sections: what each figure shows, in words for a person who trains networks and has not read the paper."""

from dataclasses import dataclass, field

__all__ = ["SECTIONS", "Figure", "Section"]


@dataclass(frozen=True)
class Figure:
    """One figure of a section.

    Attributes:
        id: of its element.
        kind: the function in assets/ that draws it.
        needs: the quantities it draws; it is left out if no run has them. "rows", "paths", "pairs" and "whole" stand
            for single rows, trajectories, trajectories in several runs, and quantities of the whole run.
        title: its heading.
        caption: what the figure shows, HTML.
        controls: names of its own selectors.
        paper: the figure of the paper that it corresponds to, HTML.
        bound: a value that is drawn as a line, and its name.
    """

    id: str
    kind: str
    needs: tuple[str, ...]
    title: str
    caption: str
    controls: tuple[str, ...] = ()
    paper: str = ""
    bound: tuple[float, str] | None = None


@dataclass(frozen=True)
class Section:
    """A section: an id for links, a heading, where the paper treats it, an introduction and figures."""

    id: str
    title: str
    paper: str
    text: str
    figures: tuple[Figure, ...] = field(default=())


SECTIONS = (
    Section(
        "run",
        "Loss and other quantities of the run",
        "Figures 4 and 5",
        "What was logged for the run as a whole. The line is the average over a short stretch of steps, the band "
        "reaches from the smallest to the largest value in it.",
        (Figure("whole", "whole", ("whole",), "", "", paper="Training speed and accuracy: Figures 4 and 5"),),
    ),
    Section(
        "rates",
        "Effective rate and angle per step",
        "Section 2.4, Table 1",
        "A filter followed by a normalization layer can be rescaled without changing the network, so only its "
        "direction trains, on a unit sphere. The rate of that training is not the one in your settings: it also "
        "depends on the filter's radius and, for Adam, on its second moment. Layers whose effective rates are far "
        "apart do not learn at the same speed, whatever the settings say.",
        (
            Figure("schedule", "lines", ("lr",), "Nominal rate η", "The rate in the settings."),
            Figure(
                "effective-rate",
                "lines",
                ("effective_lr",),
                "Effective rate η<sup>e</sup>",
                "η<sup>e</sup> = A/(1 − A⟨c,u⟩) with A = η/(r²b̄): the step size on the sphere. Thin and dashed: the "
                "nominal rate η of the settings. Dotted verticals: jumps of the schedule.",
                ("statistic",),
                "Effective learning rate: Table 1",
            ),
            Figure(
                "angle",
                "lines",
                ("angle",),
                "Angle per step",
                "How far a row turns in one step, atan(η<sup>e</sup>‖c<sup>⊥</sup>‖), in radians: 0.01 is about half a "
                "degree. This is the motion that the network feels.",
                ("statistic",),
                "Image step on the sphere: Figure 1, Theorem 1",
            ),
            Figure(
                "update",
                "lines",
                ("update",),
                "Relative update ‖Δx‖/r",
                "The length of the step relative to the row's norm; equal to the angle if a small step only turns it.",
                ("statistic",),
            ),
            Figure(
                "radial-share",
                "lines",
                ("radial_share",),
                "Radial share |⟨Δx,u⟩|/‖Δx‖",
                "The share of the step along the row, which changes its norm and does not turn it: weight decay, and "
                "gradients that are not orthogonal to the row.",
                ("statistic",),
            ),
        ),
    ),
    Section(
        "heat",
        "All layers at once",
        "",
        "An even colour means that all layers move alike. Click a layer to see it alone in all figures.",
        (
            Figure(
                "blocks",
                "blocks",
                ("*",),
                "Block × role",
                "Each cell is a layer at the chosen step: blocks from left to right, roles in a block from top to "
                "bottom. In the other figures of all layers, a line is the median over the blocks.",
                ("quantity", "statistic", "block-step"),
            ),
            Figure(
                "heat-map",
                "heat",
                ("*",),
                "Layer × time",
                "Each line of the map is a layer, the first at the top, the last at the bottom; time runs to the "
                "right. Colours are logarithmic where the quantity is positive and shared by all runs.",
                ("quantity", "statistic"),
            ),
        ),
    ),
    Section(
        "equilibrium",
        "Radius and angle against their equilibrium",
        "Section 2.3, radius dynamic",
        "Every step makes the radius grow a little, weight decay makes it shrink. Where the two balance, radius and "
        "angle per step stay put: the equilibrium that theory predicts for this optimizer and weight decay. After a "
        "drop of the rate the balance has to be found anew, and until then the layer moves slower than it will.",
        (
            Figure(
                "equilibrium-radius",
                "equilibrium",
                ("radius", "equilibrium_radius"),
                "Radius r and its equilibrium r*",
                "For one layer: measured (line, band from the 10th to the 90th percentile of rows) and predicted "
                "(dashed). For all layers: measured over predicted; 1 is equilibrium.",
                paper="Radius dynamic: Theorem 1",
            ),
            Figure(
                "equilibrium-angle",
                "equilibrium",
                ("angle", "equilibrium_angle"),
                "Angle per step and its equilibrium θ*",
                "The same for the angle: above 1 a layer turns faster than it will in the long run.",
            ),
        ),
    ),
    Section(
        "rows",
        "Spread over the rows of a layer",
        "",
        "A layer's rows are spheres of their own. A second hump or a long tail here is what a median hides: filters "
        "that no longer move, or a few that move too fast.",
        (
            Figure(
                "histogram",
                "histogram",
                ("rows",),
                "Histogram over rows",
                "Share of the layer's rows in each bin at the chosen step; each run at its recorded step nearest to "
                "it.",
                ("row-quantity", "row-group", "row-step"),
            ),
        ),
    ),
    Section(
        "hypotheses",
        "Hypotheses of the theory: H1, H2 and the Taylor variable",
        "Appendices C.1.2 and C.1.5",
        "The map from a step to its image on the sphere is exact as long as H1 holds; reading that image as a walk "
        "along great circles needs H2; the equivalence of SGD and AdaGradG needs the Taylor variable to be small. As "
        "in the paper, each line is the maximum over all rows of a layer.",
        (
            Figure(
                "h1",
                "bound",
                ("radial",),
                "H1: A⟨c,u⟩ &lt; 1",
                "Maximum of |A<sub>k</sub>⟨c<sub>k</sub>,u<sub>k</sub>⟩|, the share of the radius that a step takes. "
                "At 1 the step would carry the row through the origin. Drawn is the absolute value, as in the paper, "
                "but only positive values can break H1: with negative ones the radius grows.",
                paper="“Tracking of A<sub>k</sub>⟨c<sub>k</sub>,u<sub>k</sub>⟩ for SGD-M and Adam”: App. C.1.2",
                bound=(1.0, "H1 fails above 1"),
            ),
            Figure(
                "h2",
                "bound",
                ("velocity",),
                "H2: η<sup>e</sup>‖c<sup>⊥</sup>‖ &lt; π",
                "Maximum of the velocity z = η<sup>e</sup>‖c<sup>⊥</sup>‖. Beyond π a walk along a great circle would "
                "pass the opposite pole.",
                paper="“Tracking of η<sup>e</sup><sub>k</sub>‖c<sub>k</sub><sup>⊥</sup>‖ for SGD-M and Adam”: "
                "App. C.1.2",
                bound=(3.141592653589793, "H2 fails above π"),
            ),
            Figure(
                "taylor",
                "bound",
                ("taylor",),
                "Taylor variable: small against 1",
                "Maximum of the variable that Theorem 4 takes to be small against 1; in the paper it was about "
                "10<sup>−2</sup>.",
                paper="“Validity of Taylor expansion”: App. C.1.5",
                bound=(1.0, "not small above 1"),
            ),
        ),
    ),
    Section(
        "phenomena",
        "Geometric phenomena: (a), (b1), (b2) and (c)",
        "Section 4.1, Figure 3",
        "Four things turn the step away from the direction that the trajectory on the sphere alone would give. Each is "
        "shown as the angle by which it turns the effective direction, in radians: 0 is no effect, π/2 is a "
        "direction that has nothing left in common with the undisturbed one.",
        (
            Figure(
                "phenomena-turns",
                "phenomena",
                ("deformation", "gradient_memory", "l2_memory", "radius_ratio"),
                "",
                "<b>(a)</b> the element-wise division deforms the gradient. <b>(b1)</b> past gradients are added "
                "without being transported to the present point. <b>(b2)</b> past weights come in through the L2 term. "
                "<b>(c)</b> past terms are weighted by ratios of radii.",
                paper="Phenomena (a), (b1), (b2), (c): Section 4.1, Figure 3",
            ),
        ),
    ),
    Section(
        "sphere",
        "One row on its sphere",
        "Figure 1",
        "The path of a single row, seen in the three directions that hold most of it. Drag to turn, or use the arrow "
        "keys; + and − zoom. A point on the surface lies wholly in these three directions, a point inside has also "
        "gone elsewhere. The ring marks the start, the dot the end.",
        (
            Figure(
                "trajectory",
                "sphere",
                ("paths",),
                "",
                "",
                ("sphere-row", "sphere-step"),
                paper="Illustration of the spherical perspective: Figure 1",
            ),
        ),
    ),
    Section(
        "trajectories",
        "The same row in different runs",
        "Section 3.3, Figure 2",
        "The cosine between the directions of the same row in two runs at the same step: 1 as long as both walk the "
        "same path, near 0 once they have nothing in common. Runs that start from the same weights begin at 1.",
        (
            Figure(
                "cosine",
                "cosine",
                ("pairs",),
                "Cosine of directions",
                "One line per recorded row, in the colour of the run that is compared with the reference.",
                ("reference",),
                paper="“Comparison of the trajectories of radially-invariant parameters”: Figure 2",
            ),
        ),
    ),
    Section(
        "health",
        "Are the rows really invariant, and alive?",
        "Lemma 1",
        "The gradient of an invariant row is orthogonal to the row. What is left, |cos(x, ∇L)|, is the work of the "
        "normalization's ε and of rounding; it grows as a radius shrinks. A collapsed row has lost its radius, and "
        "with it its direction.",
        (
            Figure(
                "defect",
                "lines",
                ("defect",),
                "Invariance defect |cos(x, ∇L)|",
                "0 for an exactly invariant row. From about 0.1 on, ε matters and the row is no longer on a sphere.",
                ("statistic",),
                paper="Gradient orthogonal to the row: Lemma 1",
            ),
            Figure(
                "collapsed", "share", ("collapsed",), "Collapsed rows", "Share of a layer's rows without a direction."
            ),
        ),
    ),
    Section(
        "pairs",
        "Balance of pairs",
        "",
        "In a pair, one side can be multiplied and the other divided by the same factor without changing the network. "
        "The shorter a side is in relation to the other, the further it turns in a step.",
        (
            Figure(
                "imbalance",
                "pairs",
                ("imbalance",),
                "Imbalance ‖a‖/‖b‖",
                "The median over the sets of a pair, such as the rows of one weight with the columns of the next. "
                "It is measured more rarely than the other quantities.",
            ),
        ),
    ),
    Section(
        "explore",
        "Any quantity",
        "",
        "Everything that was recorded for layers, to look at as you like.",
        (
            Figure(
                "any",
                "lines",
                ("*",),
                "",
                "",
                ("quantity", "statistic", "scale"),
                paper="Radius, ν, ‖c<sup>⊥</sup>‖ and all others: Section 2.4, App. C.1.3",
            ),
        ),
    ),
)
