"""How a model is called and what it returns: inputs, outputs, modes, dtypes, control flow."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from cases._case import Custom, case, images, net, randn, vectors

_ROWS = {"conv.weight": "filter"}


def _body(forward, **more: nn.Module) -> Custom:
    return Custom(forward, conv=nn.Conv2d(3, 5, 3, bias=False), bn=nn.BatchNorm2d(5), **more)


def _features(m: nn.Module, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)).tanh()


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    loss: Tensor | None = None


def _loss(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(m.head(_features(m, x).mean((2, 3))), labels)


def _routed(m: nn.Module, x: Tensor) -> Tensor:
    """Each sample goes to one of two experts, depending on its values."""
    y = x.new_zeros(len(x), 8)
    for chosen, expert in ((x[:, 0] > 0, m.a), (x[:, 0] <= 0, m.b)):
        if chosen.any():
            y[chosen] = expert(x[chosen])
    return m.head(m.ln(y))


def _repeated(m: nn.Module, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    while y.abs().amax() > 1:
        y = y / 2
    return y


def _halves() -> tuple[tuple[Tensor, ...], dict]:
    x = torch.randn(10, 6)
    x[:, 0] = torch.rand(10) + 0.5
    x[::2, 0] *= -1
    return (x,), {}


def _mapped(m: nn.Module, x: Tensor) -> Tensor:
    """Sample by sample, through the functional interface."""
    weights = dict(m.body.named_parameters())
    return torch.func.vmap(lambda sample: torch.func.functional_call(m.body, weights, (sample,)))(x)


def _jacobian(m: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda sample: m.ln(m.fc(sample)).tanh()))(x)


CASES = [
    case(
        "two_inputs",
        lambda: Custom(
            lambda m, x, y: m.bn(m.a(x) * m.b(y)).tanh(),
            a=nn.Linear(6, 5, bias=False),
            b=nn.Linear(4, 5),
            bn=nn.BatchNorm1d(5),
        ),
        lambda: ((torch.randn(10, 6), torch.randn(10, 4)), {}),
        rows={"a.weight": "filter"},
        joint={"b.weight b.bias": "filter"},
    ),
    case(
        "keyword_inputs",
        lambda: _body(
            lambda m, *, pixels, scale=None, flip=False: _features(m, pixels.flip(-1) if flip else pixels) * scale
        ),
        lambda: ((), {"pixels": torch.randn(6, 3, 6, 6), "scale": torch.rand(5, 1, 1), "flip": True}),
        rows=_ROWS,
    ),
    case(
        "dict_input",
        lambda: _body(lambda m, batch: _features(m, batch["image"]) * batch["mask"][0]),
        lambda: (({"image": torch.randn(6, 3, 6, 6), "mask": [torch.ones(6, 1, 1, 1)]},), {}),
        rows=_ROWS,
    ),
    case(
        "dict_output",
        lambda: _body(lambda m, x: {"out": _features(m, x), "size": len(x), "extra": {"none": None, "x": x}}),
        images,
        rows=_ROWS,
    ),
    case(
        "dataclass_output",
        lambda: _body(
            lambda m, x: Output(logits=m.head(_features(m, x)), hidden=(m.bn(m.conv(x)),)),
            head=nn.Conv2d(5, 2, 1),
        ),
        images,
        rows=_ROWS,
    ),
    case(
        "tuple_output",
        lambda: _body(lambda m, x: (_features(m, x), None, [m.side(x)], x.argmax(1)), side=nn.Conv2d(3, 2, 1)),
        images,
        rows=_ROWS,
    ),
    case(
        "loss_output",
        lambda: _body(_loss, head=nn.Linear(5, 4)),
        lambda: ((torch.randn(6, 3, 6, 6), torch.randint(4, (6,))), {}),
        rows=_ROWS,
    ),
    case(
        "handed_over_in_eval_mode",
        lambda: net(
            conv=nn.Conv2d(3, 5, 3),
            bn=nn.BatchNorm2d(5),
            act=nn.GELU(),
            drop=nn.Dropout(0.2),
            head=nn.Conv2d(5, 2, 1),
        ).eval(),
        images,
        rows=_ROWS,
        no_effect="conv.bias",
    ),
    case("bfloat16", lambda: _body(_features).bfloat16(), randn(6, 3, 6, 6, dtype=torch.bfloat16), rows=_ROWS),
    case("float64", lambda: _body(_features).double(), randn(6, 3, 6, 6, dtype=torch.float64), rows=_ROWS),
    case(
        "float64_head",
        lambda: _body(
            lambda m, x: m.head(m.ln(m.fc(_features(m, x).mean((2, 3)).double()))),
            fc=nn.Linear(5, 6).double(),
            ln=nn.LayerNorm(6).double(),
            head=nn.Linear(6, 3).double(),
        ),
        images,
        rows=_ROWS,
        joint={"fc.weight fc.bias": "tensor"},
    ),
    case(
        "bfloat16_layer",
        lambda: _body(
            lambda m, x: m.head(m.ln(m.fc(_features(m, x).mean((2, 3)).to(m.fc.weight)).to(x))),
            fc=nn.Linear(5, 8, bias=False).bfloat16(),
            ln=nn.LayerNorm(8),
            head=nn.Linear(8, 3),
        ),
        images,
        rows={**_ROWS, "fc.weight": "tensor"},
    ),
    case(
        "routed_experts",  # each sample sees one expert only, so each expert is free alone
        lambda: Custom(
            _routed,
            a=nn.Linear(6, 8, bias=False),
            b=nn.Linear(6, 8),
            ln=nn.LayerNorm(8),
            head=nn.Linear(8, 3),
        ),
        _halves,
        rows={"a.weight": "tensor"},
        joint={"b.weight b.bias": "tensor"},
    ),
    case(
        "vmap_inside",
        lambda: Custom(_mapped, body=net(fc=nn.Linear(6, 8), ln=nn.LayerNorm(8), head=nn.Linear(8, 3))),
        vectors,
        joint={"body.fc.weight body.fc.bias": "tensor"},
    ),
    case(
        "jacobian_inside",
        lambda: Custom(_jacobian, fc=nn.Linear(6, 8, bias=False), ln=nn.LayerNorm(8)),
        vectors,
        rows={"fc.weight": "tensor"},
    ),
    case("loop_on_data", lambda: _body(_repeated), images, rows=_ROWS),
    case(
        "compiled",
        lambda: torch.compile(net(fc=nn.Linear(6, 8), bn=nn.BatchNorm1d(8), act=nn.Tanh()), backend="eager"),
        vectors,
        rows={"fc.weight": "filter"},
        no_effect="fc.bias",
    ),
    case(
        "dropout_everywhere",
        lambda: net(
            drop1=nn.Dropout(0.2),
            fc1=nn.Linear(6, 8),
            bn=nn.BatchNorm1d(8),
            act=nn.GELU(),
            drop2=nn.Dropout(0.5),
            fc2=nn.Linear(8, 8),
            ln=nn.LayerNorm(8),
            drop3=nn.AlphaDropout(0.1),
            head=nn.Linear(8, 3),
        ),
        vectors,
        rows={"fc1.weight": "filter"},
        joint={"fc2.weight fc2.bias": "tensor"},
        no_effect="fc1.bias",
    ),
]
