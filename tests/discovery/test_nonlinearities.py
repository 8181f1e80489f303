"""What the graph finds on the way of a factor: nonlinearities, which give no rows, and normalizations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from steradian.discovery import find_groups
from steradian.discovery.graph import Graph, follow, read_graph


def graph(function: Callable[[Tensor, Tensor], Tensor]) -> Graph:
    """The graph of a function of two matrices, called a and b."""
    a, b = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    return read_graph([function(a, b)], {"a": a, "b": b})


def layer_norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, (4,))


def written_out(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g


@pytest.mark.parametrize(
    ("function", "nonlinear", "clear"),
    [
        pytest.param(lambda a, b: (a @ b).relu().abs(), [False, False], [True, True], id="pieces of lines"),
        pytest.param(lambda a, b: functional.gelu(a @ b), [True, True], [False, False], id="gelu"),
        pytest.param(lambda a, b: a * torch.sigmoid(1.7 * b), [False, True], [True, False], id="gate"),
        pytest.param(lambda a, b: layer_norm(a @ b).tanh(), [False, False], [True, True], id="behind a norm"),
        pytest.param(
            lambda a, b: functional.layer_norm(a, (4,), b[0]).tanh(), [False, True], [True, False], id="a gain"
        ),
        pytest.param(
            lambda a, b: functional.layer_norm(a, (4,), b[0], b[1]).relu(), [False, False], [True, True], id="its bias"
        ),
        pytest.param(lambda a, b: written_out(a @ b).exp(), [False, False], [True, True], id="behind its formula"),
        pytest.param(lambda a, b: (a @ b) + (a @ b) ** 3, [True, True], [False, False], id="a polynomial"),
        pytest.param(
            lambda a, b: a.square().mean() - a.mean() ** 2 + b, [False, False], [False, True], id="a variance"
        ),
        pytest.param(
            lambda a, b: a * (a**2).mean() ** -0.5 + b.tanh(), [False, True], [False, False], id="no power left"
        ),
        pytest.param(lambda a, b: functional.threshold(a, 0.1, 0) + b, [True, False], [False, True], id="a jump"),
        pytest.param(
            lambda a, b: functional.threshold(a, 0, 0) + b, [False, False], [True, True], id="the jump of ReLU"
        ),
        pytest.param(lambda a, b: a.clamp(min=-1) * b, [False, False], [False, True], id="a threshold"),
        pytest.param(lambda a, b: (a / b.norm()).tanh(), [True, False], [False, True], id="divided by another"),
        pytest.param(
            lambda a, b: Own.apply(a).tanh() + b, [False, False], [False, True], id="behind a user's own function"
        ),
    ],
)
def test_what_meets_a_nonlinearity(
    function: Callable[[Tensor, Tensor], Tensor], nonlinear: list[bool], clear: list[bool]
):
    made = graph(function)
    assert [follow(made, name).nonlinear for name in "ab"] == nonlinear
    assert [follow(made, name).known for name in "ab"] == clear


def test_a_ratio_has_no_scale():
    """Each alone moves it, both together do not."""
    made = graph(lambda a, b: (a / b.norm()).tanh())
    assert [follow(made, names).nonlinear for names in ("a", "ab")] == [True, False]


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        pytest.param(lambda a, b: layer_norm(a @ b).tanh(), ["nativelayernorm"], id="a normalization"),
        pytest.param(lambda a, b: written_out(a @ b).exp(), ["mul"], id="its formula"),
        pytest.param(lambda a, b: a / a.norm() + layer_norm(a @ b), ["div", "nativelayernorm"], id="two of them"),
        pytest.param(lambda a, b: a * (a**2).mean() ** -0.5 + b, ["mul"], id="powers"),
        pytest.param(lambda a, b: (a - a.mean()) / torch.var_mean(a)[0].sqrt() + b, ["div"], id="var_mean"),
        pytest.param(lambda a, b: functional.normalize(a.relu() @ b, dim=1), ["div"], id="unit rows"),
        pytest.param(lambda a, b: layer_norm(a.relu() @ b) + a, None, id="a way past it"),
        pytest.param(lambda a, b: layer_norm(Own.apply(a) @ b), None, id="behind a user's own function"),
        pytest.param(lambda a, b: layer_norm(a.tanh() @ b), None, id="behind a nonlinearity"),
    ],
)
def test_where_the_factor_disappears(function: Callable[[Tensor, Tensor], Tensor], operations: list[str] | None):
    made = graph(function)
    path = follow(made, "a")
    assert path.traced == (operations is not None)
    if operations is not None:
        assert sorted(made.nodes[end].operation for end in path.ends) == operations


def inverted_residual(channels: int, epsilon: float) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for groups in (1, channels):
        conv = nn.Conv2d(channels, channels, 3 if groups > 1 else 1, padding=int(groups > 1), groups=groups, bias=False)
        layers += [conv, nn.BatchNorm2d(channels, eps=epsilon), nn.Hardswish()]
    return layers


@pytest.mark.parametrize("epsilon", [1e-8, 1e-5, 1e-3])
def test_reasons_do_not_depend_on_epsilon(epsilon: float):
    torch.manual_seed(0)
    blocks = [layer for _ in range(3) for layer in inverted_residual(8, epsilon)]
    groups = find_groups(nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 36, 3)), torch.randn(8, 8, 6, 6))
    reasons = {group.names[0]: group.reason for group in groups.groups}
    assert reasons == {f"{i}.weight": f"{i + 1} (BatchNorm2d)" for i in range(0, 18, 3)}


def test_a_row_without_a_defect_needs_no_graph():
    """A power written with exp and log meets nonlinearities, but is balanced to the last digit."""
    model = nn.Module()
    model.w = nn.Parameter(torch.rand(4, 6) + 0.5)
    model.forward = lambda x: functional.linear(
        x, (model.w / model.w.square().sum(1, keepdim=True).log().mul(0.5).exp())
    )
    assert find_groups(model, torch.randn(8, 6)).layouts == {"w": "filter"}


@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(1, 16), lambda: nn.GroupNorm(4, 16), lambda: nn.BatchNorm2d(16)])
@pytest.mark.parametrize("activation", [nn.Mish, nn.GELU, nn.Softplus, nn.ELU])
def test_large_weights_in_front_of_a_nonlinearity(activation: Callable[[], nn.Module], norm: Callable[[], nn.Module]):
    """With inputs of 10 to 100 a smooth activation is homogeneous up to the size of an ε."""
    for seed, size in enumerate((3.0, 10.0, 30.0)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 16, 3), activation(), norm(), nn.Tanh(), nn.Conv2d(16, 2, 1))
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.mul_(size)
        groups = find_groups(model, torch.randn(6, 3, 8, 8))
        assert groups.layouts == {}
