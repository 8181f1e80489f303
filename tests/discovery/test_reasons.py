"""The reason of rows: the nearest normalization that every path passes, whatever its ε is."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from steradian.discovery import find_groups
from steradian.groups import Groups

from cases import CASES, Case
from cases._case import Custom, net

EPSILONS = (1e-8, 1e-6, 1e-4, 1e-3, 1e-2)
WITH_EPSILON = [case for case in CASES if any(hasattr(module, "eps") for module in case.build().modules())]


def _found(case: Case, epsilon: float | None) -> Groups:
    torch.manual_seed(0)
    model = case.build()
    args, kwargs = case.inputs()
    for module in model.modules():
        if epsilon is not None and hasattr(module, "eps"):
            module.eps = epsilon
    return find_groups(model, *args, **kwargs)


@cache
def _own_reasons(case_name: str) -> dict[tuple[str, ...], str]:
    (case,) = [case for case in CASES if case.name == case_name]
    return _reasons(_found(case, None))


def _reasons(groups: Groups) -> dict[tuple[str, ...], str]:
    return {tuple(sorted(group.names)): group.reason for group in (*groups.groups, *groups.facts)}


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in WITH_EPSILON])
@pytest.mark.parametrize("epsilon", [pytest.param(e, marks=[] if e == 1e-2 else [pytest.mark.slow]) for e in EPSILONS])
def test_epsilon_moves_no_row_and_no_reason(case: Case, epsilon: float):
    """How large ε is shows in the defect; what is invariant, and why, does not depend on it."""
    assert _reasons(_found(case, epsilon)) == _own_reasons(case.name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("two_layers_bn", {"conv1.weight": "bn1", "conv2.weight": "bn2", "bn1.bias bn1.weight": "bn2"}),
        ("residual_block", {"conv1.weight": "bn1", "conv2.weight": "bn2", "shortcut.weight": "bn3"}),
        ("inverted_bottleneck", {"expand.weight": "bn1", "depthwise.weight": "bn2", "project.weight": "bn3"}),
        ("squeeze_excite", {"conv1.weight": "bn1", "conv2.weight": "bn2"}),
        ("dense_block", {"conv1.weight": "bn1", "conv2.weight": "bn2"}),
        ("norm_after_norm", {"conv.weight": "norm1"}),
        (
            "convnext_block",  # of what writes to the stream, every path passes the last norm alone
            {
                "stem.bias stem.weight": "stem_norm",
                "depthwise.bias depthwise.weight": "norm",
                "depthwise.bias scale stem_norm.bias stem_norm.weight": "head_norm",
            },
        ),
        ("linear_two_norms", {"fc.weight": "a (LayerNorm) and b (RMSNorm)"}),
        ("conv_used_twice_bn", {"conv.weight": "bn2"}),
        ("unit_filters", {"w": "unknown"}),
        ("own_backward_pass", {"fc.bias fc.weight": "unknown"}),
    ],
)
def test_labelled_reasons(name: str, expected: dict[str, str]):
    found = _own_reasons(name)
    for names, module in expected.items():
        reason = found[tuple(sorted(names.split()))]
        assert reason == module or reason.startswith(f"{module} ("), (names, reason)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.expand = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.expand(self.squeeze(x.mean((2, 3), keepdim=True)).relu())
        return x * functional.hardsigmoid(gate)


def _convolution(channels: int, epsilon: float, *, depthwise: bool) -> list[nn.Module]:
    groups, size = (channels, 3) if depthwise else (1, 1)
    conv = nn.Conv2d(channels, channels, size, padding=size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(channels, eps=epsilon), nn.Hardswish()]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("epsilon", [1e-8, 1e-5, 1e-3, 1e-2])
def test_inverted_residuals_with_squeeze_and_excitation(epsilon: float, seed: int):
    """Gates further on are no normalization, and a row whose radius is small beside ε is found nevertheless."""
    torch.manual_seed(seed)
    layers = [
        layer
        for _ in range(3)
        for layer in (
            *_convolution(8, epsilon, depthwise=False),
            *_convolution(8, epsilon, depthwise=True),
            SqueezeExcite(8),
        )
    ]
    groups = find_groups(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 3)), torch.randn(8, 8, 6, 6))
    expected = {f"{i + j}.weight": f"{i + j + 1} (BatchNorm2d)" for i in (0, 7, 14) for j in (0, 3)}
    assert {group.names[0]: group.reason for group in groups.groups} == expected


@pytest.mark.parametrize("epsilon", [1e-8, 1e-5, 1e-3])
def test_mobile_network(epsilon: float):
    """The blocks of MobileNetV3: expansion, depthwise convolution, gate, projection, sometimes with a shortcut."""

    def block(m: nn.Module, x: Tensor) -> Tensor:
        y = functional.hardswish(m.bn1(m.expand(x)))
        y = m.bn3(m.project(m.gate(functional.hardswish(m.bn2(m.depthwise(y))))))
        return y + x if y.shape == x.shape else y

    def make(inputs: int, hidden: int, outputs: int, stride: int) -> nn.Module:
        return Custom(
            block,
            expand=nn.Conv2d(inputs, hidden, 1, bias=False),
            bn1=nn.BatchNorm2d(hidden, eps=epsilon),
            depthwise=nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            bn2=nn.BatchNorm2d(hidden, eps=epsilon),
            gate=SqueezeExcite(hidden),
            project=nn.Conv2d(hidden, outputs, 1, bias=False),
            bn3=nn.BatchNorm2d(outputs, eps=epsilon),
        )

    torch.manual_seed(0)
    shapes = [(8, 16, 8, 1), (8, 16, 12, 2), (12, 24, 12, 1), (12, 24, 12, 1)]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8, eps=epsilon),
        nn.Hardswish(),
        *(make(*shape) for shape in shapes),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    )
    groups = find_groups(model, torch.randn(8, 3, 24, 24))
    expected = {"0.weight": "1 (BatchNorm2d)"} | {
        f"{i}.{layer}.weight": f"{i}.{norm} (BatchNorm2d)"
        for i in range(3, 7)
        for layer, norm in (("expand", "bn1"), ("depthwise", "bn2"), ("project", "bn3"))
    }
    assert {group.names[0]: group.reason for group in groups.groups} == expected


@pytest.mark.parametrize("epsilon", [1e-8, 1e-5])
def test_attention_of_normalized_linear_layers(epsilon: float):
    """LeViT: each linear layer has its own batch normalization over tokens, in front of a residual stream."""

    def normalized(inputs: int, outputs: int) -> nn.Module:
        return Custom(
            lambda m, x: m.bn(m.linear(x).flatten(0, 1)).unflatten(0, x.shape[:2]),
            linear=nn.Linear(inputs, outputs, bias=False),
            bn=nn.BatchNorm1d(outputs, eps=epsilon),
        )

    def block(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        x = x + m.proj(functional.hardswish(functional.scaled_dot_product_attention(q, k, v)))
        return x + m.ln2(functional.hardswish(m.ln1(x)))

    def make() -> nn.Module:
        return Custom(block, qkv=normalized(8, 24), proj=normalized(8, 8), ln1=normalized(8, 16), ln2=normalized(16, 8))

    torch.manual_seed(0)
    model = net(stem=normalized(6, 8), a=make(), b=make(), head=nn.Linear(8, 3))
    groups = find_groups(model, torch.randn(4, 7, 6))
    layers = ["stem", *(f"{block}.{layer}" for block in "ab" for layer in ("qkv", "proj", "ln1", "ln2"))]
    expected = {f"{layer}.linear.weight": f"{layer}.bn (BatchNorm1d)" for layer in layers}
    assert {group.names[0]: group.reason for group in groups.groups} == expected


@pytest.mark.parametrize("epsilon", [1e-8, 1e-5, 1e-3, 1e-2])
def test_olmo2(epsilon: float):
    """Norms on queries, keys and on what each branch writes."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Olmo2Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=epsilon, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.Olmo2ForCausalLM(config)
    groups = find_groups(model, input_ids=torch.randint(50, (4, 12)))
    norms = {
        "self_attn.q_proj": "self_attn.q_norm",
        "self_attn.k_proj": "self_attn.k_norm",
        "self_attn.v_proj": "post_attention_layernorm",
        "self_attn.o_proj": "post_attention_layernorm",
        "mlp.up_proj": "post_feedforward_layernorm",
        "mlp.down_proj": "post_feedforward_layernorm",
    }
    expected = {
        f"model.layers.{i}.{layer}.weight": f"model.layers.{i}.{norm} (Olmo2RMSNorm)"
        for i in range(2)
        for layer, norm in norms.items()
    }
    assert {group.names[0]: group.reason for group in groups.groups} == expected


@pytest.mark.parametrize("mixed", ["rotated", "transformed"])
def test_the_reason_lies_behind_complex_numbers(mixed: str):
    """Rotary positions as complex factors, as in Llama 4, and a Fourier transform, as in FNet."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        q = m.q(x)
        if mixed == "rotated":
            turn = torch.polar(torch.ones(5, 1, dtype=q.dtype), torch.arange(5, dtype=q.dtype)[:, None])
            q = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (4, 2))) * turn).flatten(-2)
        else:
            q = torch.fft.fft2(q).real
        return m.head(m.norm(q).tanh())

    torch.manual_seed(0)
    model = Custom(forward, q=nn.Linear(6, 8, bias=False), norm=nn.RMSNorm(8), head=nn.Linear(8, 3))
    groups = find_groups(model, torch.randn(4, 5, 6))
    assert [(group.names, group.reason) for group in groups.groups] == [(("q.weight",), "norm (RMSNorm)")]
