"""Models that raise in some passes, unusual tensors, and parameters without effect."""

import pytest
import torch
from torch import Tensor, nn

from steradian.discovery import find_groups


class RaisesSometimes(nn.Module):
    """Raises in some of its calls, which it counts with an iterator that is not restored."""

    def __init__(self, calls: range) -> None:
        super().__init__()
        self.calls, self.clock = calls, iter(range(100))
        self.fc, self.bn, self.head = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        if next(self.clock) in self.calls:
            raise RuntimeError("not now\nbut later")
        return self.head(self.bn(self.fc(x)).tanh())


class TestPassesThatFail:
    @pytest.mark.parametrize("call", range(2, 7))
    def test_one_pass(self, call: int):
        """Later passes have no noise on the inputs, and are not compared with those that had."""
        groups = find_groups(RaisesSometimes(range(call, call + 1)), torch.randn(16, 6))
        assert groups.layouts == {"fc.weight": "filter"}
        assert groups.notes == []

    def test_all_random_points(self):
        """The grown points alone prove the rows; without a graph there is no reason."""
        torch.manual_seed(0)
        groups = find_groups(RaisesSometimes(range(2, 5)), torch.randn(16, 6))
        assert groups.layouts == {"fc.weight": "filter"}
        assert groups.groups[0].reason == "unknown"

    def test_the_forward_check(self):
        groups = find_groups(RaisesSometimes(range(7, 100)), torch.randn(16, 6))
        assert groups.layouts == {}
        assert groups.notes[0] == "the model raised RuntimeError (not now) in one of the passes"
        assert "balanced but not proved" in groups.notes[1]

    def test_all_passes_but_the_first_two(self):
        groups = find_groups(RaisesSometimes(range(2, 100)), torch.randn(16, 6))
        assert groups.layouts == {}
        assert groups.notes == [
            "the model raised RuntimeError (not now) with grown parameters, so nothing is proved",
        ]

    def test_inputs_of_a_wider_dtype(self):
        """Only the passes in float64 are possible."""
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Tanh())
        assert find_groups(model, torch.randn(9, 6, dtype=torch.float64)).layouts == {"0.weight": "tensor"}


def test_weights_whose_squares_are_beyond_float32():
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())
    with torch.no_grad():
        model[0].weight.mul_(1e20)
    assert find_groups(model, torch.randn(16, 6)).layouts == {"0.weight": "filter"}


class Narrow(nn.Module):
    """A layer whose bias belongs to its weight, in half precision, with kernels for some dtypes only."""

    def __init__(self, *types: torch.dtype) -> None:
        super().__init__()
        self.types, self.conv, self.norm = types, nn.Conv2d(3, 6, 3), nn.GroupNorm(1, 6)
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype not in self.types:
            raise TypeError("no kernel")
        return self.norm(self.conv(x)).tanh()


class TestHalfPrecision:
    @pytest.mark.parametrize("seed", range(3))
    def test_float32_is_tried_next(self, seed: int):
        torch.manual_seed(seed)
        groups = find_groups(Narrow(torch.bfloat16, torch.float32), torch.randn(6, 3, 8, 8).bfloat16())
        assert groups.joint == [("conv.weight", "conv.bias")]
        assert groups.layouts == {"conv.weight": "tensor", "conv.bias": "tensor"}
        assert groups.notes == ["the model does not run in float64, so it was probed in float32 with wider tolerances"]
        assert groups.passes[0] <= 13

    def test_a_note_on_half_precision(self):
        groups = find_groups(Narrow(torch.bfloat16), torch.randn(6, 3, 8, 8).bfloat16())
        assert "probed in its own types" in groups.notes[0]
        assert "nearly invariant rows count as rows here" in groups.notes[1]


@pytest.mark.parametrize("name", ["dropped", "of the input"])
def test_nothing_has_an_effect(name: str):
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(1.0))
    x = torch.randn(4, 6)
    if name == "of the input":
        model.forward = lambda x: 2 * x
        x.requires_grad_()
    groups = find_groups(model, x)
    assert (groups.layouts, groups.no_effect) == ({}, ["0.weight", "0.bias"])


class TestOddTensors:
    def test_nested(self):
        class Ragged(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.norm = nn.Linear(6, 8, bias=False), nn.LayerNorm(8)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(self.fc(x)).values().tanh()

        parts = [torch.randn(3, 6), torch.randn(5, 6)]
        groups = find_groups(Ragged(), torch.nested.nested_tensor(parts, layout=torch.jagged))
        assert groups.layouts == {"fc.weight": "tensor"}

    def test_sparse(self):
        class Graph(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)

            def forward(self, x: Tensor, neighbors: Tensor) -> Tensor:
                return self.norm(torch.sparse.mm(neighbors, self.fc(x))).tanh()

        neighbors = (torch.rand(12, 12) < 0.4).float() + torch.eye(12)
        groups = find_groups(Graph(), torch.randn(12, 6), neighbors.to_sparse())
        assert groups.layouts == {"fc.weight": "filter"}

    def test_frozen_sparse_parameters(self):
        class Fixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Parameter(torch.randn(12, 12).to_sparse(), requires_grad=False)
                self.fc, self.norm = nn.Linear(6, 8, bias=False), nn.LayerNorm(8)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(torch.sparse.mm(self.mix, self.fc(x))).tanh()

        groups = find_groups(Fixed(), torch.randn(12, 6))
        assert (groups.layouts, groups.frozen) == ({"fc.weight": "tensor"}, ["mix"])

    def test_casts_to_complex_go_to_the_dtype_of_the_probe(self):
        class Cast(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(6, 8, bias=False)
                self.phases = nn.Buffer(torch.exp(1j * torch.randn(8)))

            def forward(self, x: Tensor) -> Tensor:
                y = self.phases @ torch.diag_embed(self.fc(x).to(torch.complex64).cfloat())
                return (y / y.abs().square().mean(-1, keepdim=True).sqrt()).real.tanh()

        groups = find_groups(Cast(), torch.randn(12, 6))
        assert (groups.layouts, groups.notes) == ({"fc.weight": "tensor"}, [])

    def test_complex_parameters_are_left_to_the_rest(self):
        class Waves(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(8, 6, dtype=torch.complex64))
                self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex64))

            def forward(self, x: Tensor) -> Tensor:
                y = x.to(self.w.dtype) @ self.w.T
                return y / y.abs().square().mean(0).sqrt()

        groups = find_groups(Waves(), torch.randn(12, 6))
        assert (groups.layouts, groups.rest, groups.no_effect) == ({}, ["w", "unused"], ["unused"])
        assert "complex parameters are left to the rest" in str(groups)
        assert "rows are real vectors" in groups.explain("w")


class ClassToken(nn.Module):
    """The class token is normalized and goes through GELU, beside tokens that do not."""

    def __init__(self, *, attended: bool) -> None:
        super().__init__()
        self.attended = attended
        self.embed, self.token = nn.Linear(6, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.first, self.last, self.norm = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens, own = self.embed(x), self.token.expand(len(x), 1, 8)
        if self.attended:
            own = own + tokens.mean(1, keepdim=True)
        both = torch.cat([self.first(own), tokens], dim=1)
        own = both[:, :1] + self.mlp(both[:, :1])
        both = torch.cat([own, both[:, 1:]], dim=1)
        return self.head(self.last(both[:, 0]) + self.norm(both[:, 1:]).mean(1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("attended", [False, True])
def test_tokens_beside_a_nonlinearity_do_not_meet_it(seed: int, attended: bool):
    torch.manual_seed(seed)
    groups = find_groups(ClassToken(attended=attended), torch.randn(6, 4, 6))
    together = {"embed.weight", "embed.bias"} | ({"token"} if attended else set())
    assert [(set(group.names), group.spec) for group in groups.groups] == [(together, "tensor")]


class TestTransformers:
    @staticmethod
    def qwen3(**settings) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}
        torch.manual_seed(0)
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **settings))

    @pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # before transformers 6
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradient_checkpointing_changes_nothing(self, reentrant: bool):
        tokens = torch.randint(50, (4, 12))
        expected = find_groups(self.qwen3(), tokens)
        model = self.qwen3()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        groups = find_groups(model.train(), tokens)
        assert (groups.groups, groups.facts, groups.pairs) == (expected.groups, expected.facts, expected.pairs)
        assert groups.notes == []
        assert model.is_gradient_checkpointing

    def test_a_missing_batch_names_the_data_collator(self):
        with pytest.raises(RuntimeError, match=r"pass a batch of your data collator, with labels: .*\*\*batch"):
            find_groups(self.qwen3())
