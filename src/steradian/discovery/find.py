"""find_groups: from a model and a batch to its rows, in at most twelve passes.

1. One pass at the model's own point: it finds errors out and measures the defect at the model's own ε.
2. Three passes at random points: what is balanced there, up to what ε may do, is a candidate. Where parts of the
   model are silent in all of them, up to two more; one more where a gain or a bias has next to no effect.
3. Two passes with the candidates 32 and 1024 times larger. The defect that a normalization's ε leaves a row is
   divided by the square of that factor, any other is not: this is the line between "invariant up to ε" and "not
   invariant". Two more for candidates that these do not reach, since chance or the data led past them.
4. Two forward passes with random factors on all rows found: f(ρx) = f(x).
"""

from typing import Any

import torch
from torch import nn

from ..groups import Groups
from .checks import check_model, first_pass
from .judge import judge
from .probe import Prober
from .report import assemble
from .surveyor import Surveyor
from .verify import verify

__all__ = ["find_groups"]


def find_groups(model: nn.Module, /, *inputs: Any, **named_inputs: Any) -> Groups:
    """The radially invariant rows of a model, proved on the model itself (Lemma 1).

    A slice x of a parameter is a row if ⟨∇L(x), x⟩ = 0 for random inputs, losses and scales of the parameters,
    and then f(ρx) = f(x). Any architecture will do: no layer is recognized by its name. The model is left as
    it was: parameters, buffers, gradients, generators, flags and hooks.

    Args:
        model: an eager module, possibly compiled or data-parallel. One handed over in eval mode is probed in
            training mode, because that is where its rows are used; batch normalization is not invariant in
            eval mode. A model in training mode is probed as it is, with the submodules that it keeps in eval.
        *inputs: an example batch, as the model's forward takes it; at least three samples for batch normalization.
        **named_inputs: the same by keyword.

    Returns:
        The rows, the rest and the reasons; see `Groups`.

    Raises:
        TypeError: model is not an eager `nn.Module`.
        ValueError: no parameters, inputs on the wrong device, NaN outputs, no differentiable output.
        RuntimeError: the model raises on these inputs.
        torch.OutOfMemoryError: a pass in float64 does not fit into the device's memory.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    >>> groups = find_groups(model, torch.randn(4, 3, 8, 8))
    >>> groups.layouts, groups.no_effect
    ({'0.weight': 'filter'}, ['0.bias'])
    """
    check_model(model)
    if not any(p.requires_grad for p in model.parameters()):
        groups = Groups(dict(model.named_parameters()))
        groups.frozen = list(groups.params)
        return groups
    with torch.inference_mode(False):
        prober = Prober(model, inputs, named_inputs, training=True)
        surveyor = Surveyor(prober, first_pass(prober, (inputs, named_inputs)))
        surveyor.look_near()
        surveyor.look_far()
        survey = surveyor.survey
        return assemble(survey, verify(prober, survey, judge(survey)))
