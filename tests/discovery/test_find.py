"""find_groups for a user: the model unchanged, clear errors, printed text, parameter groups, cost."""

import io
import re
import sys
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from discovery.unchanged import remember
from steradian.discovery import find_groups, thresholds
from steradian.groups import Groups, Layout


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(288, 4)
    )


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8)


class Raising(nn.Module):
    """Raises in its nth call, after it has changed its state."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.net, self.calls, self.seen, self.call = conv_net(), 0, [], call
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.count += 1
        torch.rand(3)
        y = self.net(x)
        if self.calls >= self.call:
            self.eval()
            raise KeyError("in the middle")
        return y


class TestUnchanged:
    def test_nothing_changes(self):
        model = conv_net()
        model[3].eval()
        model[5].bias.requires_grad_(False)
        calls = []
        model[0].register_forward_hook(lambda *_: calls.append(1))
        model[0].weight.register_hook(lambda g: calls.append("gradient"))
        model(images()).sum().backward()
        calls.clear()
        x = images()
        check_unchanged = remember(model, x)
        with torch.no_grad():
            find_groups(model, x)
        check_unchanged()
        assert "gradient" not in calls

    def test_nothing_changes_when_the_model_raises(self):
        model, x = Raising(1), images()
        check_unchanged = remember(model, x)
        with pytest.raises(RuntimeError, match="raised KeyError") as caught:
            find_groups(model, x)
        assert isinstance(caught.value.__cause__, KeyError)
        check_unchanged()
        assert (model.calls, model.seen) == (0, [])

    @pytest.mark.skipif(torch.cuda.is_initialized(), reason="the GPU is in use")
    def test_the_seed_of_a_gpu_that_is_not_in_use_yet(self, monkeypatch):
        seeds = []
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
        find_groups(conv_net(), images())
        assert seeds == []

    def test_counters_are_restored(self):
        model, x = Raising(2), images()
        check_unchanged = remember(model, x)
        assert find_groups(model, x).layouts == {"net.0.weight": "filter"}
        check_unchanged()
        assert (model.calls, model.seen) == (0, [])

    def test_inputs_that_the_model_changes_are_copies(self):
        class Adds(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = conv_net()

            def forward(self, x: Tensor) -> Tensor:
                return self.net(x.add_(1))

        x = images()
        given = x.clone()
        find_groups(Adds(), x)
        assert torch.equal(x, given)

    def test_a_tensor_kept_in_a_list_is_the_parameter(self):
        class Hidden(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.bn = nn.Linear(6, 5), nn.BatchNorm1d(5)
                self.kept = [self.fc.weight]

            def forward(self, x: Tensor) -> Tensor:
                return self.bn(functional.linear(x, self.kept[0])).tanh()

        model = Hidden()
        assert find_groups(model, torch.randn(8, 6)).layouts == {"fc.weight": "filter"}
        assert model.kept[0] is model.fc.weight

    def test_nested_attributes_of_a_module(self):
        class Tally:
            def __init__(self) -> None:
                self.calls = 0

        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.bn = nn.Linear(6, 5), nn.BatchNorm1d(5)
                self.nested = {"layer": {"calls": []}}
                self.queue, self.counter, self.tally = deque(maxlen=2), Counter(), Tally()
                self.means = [[torch.zeros(5)], (torch.zeros(5),)]
                self.counts = {"calls": np.zeros(3)}

            def forward(self, x: Tensor) -> Tensor:
                y = self.fc(x)
                self.nested["layer"]["calls"].append(1)
                self.queue.append(y)
                self.counter["calls"] += 1
                self.tally.calls += 1
                self.counts["calls"] += 1
                for (mean,) in self.means:
                    mean.mul_(0.9).add_(y.detach().mean(0))
                return self.bn(y).tanh()

        model = Holder()
        kept = model.means[0][0], model.means[1][0]
        assert find_groups(model, torch.randn(8, 6)).layouts == {"fc.weight": "filter"}
        assert model.nested == {"layer": {"calls": []}}
        assert (len(model.queue), model.counter, model.tally.calls) == (0, Counter(), 0)
        assert (model.means[0][0] is kept[0], model.means[1][0] is kept[1]) == (True, True)
        assert not kept[0].any()
        assert not kept[1].any()
        assert not model.counts["calls"].any()

    def test_under_inference_mode(self):
        model, x = conv_net(), images()
        with torch.inference_mode():
            assert find_groups(model, x).layouts == {"0.weight": "filter"}


class TestErrors:
    def test_no_module(self):
        with pytest.raises(TypeError, match=r"torch\.nn\.Module, got function"):
            find_groups(lambda x: x, images())

    def test_no_parameters(self):
        with pytest.raises(ValueError, match="no parameters"):
            find_groups(nn.ReLU(), images())

    def test_lazy(self):
        with pytest.raises(ValueError, match="run the lazy model once"):
            find_groups(nn.LazyLinear(3), images())

    def test_model_on_meta(self):
        with pytest.raises(ValueError, match="meta device"):
            find_groups(nn.Linear(3, 3, device="meta"), torch.randn(2, 3))

    def test_a_sparse_parameter(self):
        model = nn.Linear(3, 3)
        model.weight = nn.Parameter(torch.eye(3).to_sparse())
        with pytest.raises(ValueError, match="'weight' is sparse"):
            find_groups(model, torch.randn(2, 3))

    def test_inputs_on_another_device(self):
        with pytest.raises(ValueError, match="meta device"):
            find_groups(nn.Linear(3, 3), torch.randn(2, 3, device="meta"))

    def test_no_samples(self):
        for model in (nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))):
            with pytest.raises(ValueError, match="at least two samples"):
                find_groups(model, torch.randn(0, 3))

    def test_no_floating_output(self):
        model = nn.Sequential(nn.Linear(3, 3))
        model.forward = lambda x: model[0](x).argmax(1)
        with pytest.raises(ValueError, match="no floating-point tensor"):
            find_groups(model, torch.randn(2, 3))

    def test_detached_output(self):
        model = nn.Sequential(nn.Linear(3, 3))
        model.forward = lambda x: model[0](x).detach()
        with pytest.raises(ValueError, match="without detach"):
            find_groups(model, torch.randn(2, 3))

    def test_nan_output(self):
        with pytest.raises(ValueError, match="NaN"):
            find_groups(nn.Linear(3, 3), torch.full((2, 3), torch.nan))

    def test_out_of_memory_is_raised(self):
        """Neither the model's own dtypes nor another point is tried."""

        for calls in (0, 2, 6):
            model, left = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh()), [None] * calls

            def fail(*_: object, left: list[None] = left) -> None:
                if not left:
                    raise torch.OutOfMemoryError("too large")
                left.pop()

            model[2].register_forward_hook(fail)
            with pytest.raises(torch.OutOfMemoryError, match="too large"):
                find_groups(model, torch.randn(16, 6))

    def test_the_model_raises(self):
        with pytest.raises(RuntimeError, match=r"raised RuntimeError.*call the model") as caught:
            find_groups(nn.Linear(3, 3), torch.randn(2, 4))
        assert isinstance(caught.value.__cause__, RuntimeError)

    @pytest.mark.parametrize("key", ["input", "pixels"])
    def test_a_dict_whose_items_are_arguments(self, key: str):
        """By the signature of forward, or by what the model raises."""
        with pytest.raises(TypeError, match=r"a dict as its argument input.*find_groups\(model, \*\*batch\)") as caught:
            find_groups(nn.Linear(3, 3), {key: torch.randn(4, 3)})
        assert isinstance(caught.value.__cause__, TypeError)

    def test_a_dict_that_the_model_takes(self):
        class Takes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.norm = nn.Linear(6, 5, bias=False), nn.LayerNorm(5)

            def forward(self, batch: dict[str, Tensor]) -> Tensor:
                return self.norm(self.fc(batch["x"])).tanh()

        assert find_groups(Takes(), {"x": torch.randn(4, 6)}).layouts == {"fc.weight": "tensor"}
        with pytest.raises(RuntimeError, match=r"raised KeyError.*call the model"):
            find_groups(Takes(), {"y": torch.randn(4, 6)})

    def test_one_sample_under_batch_normalization(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        with pytest.raises(RuntimeError, match="larger batch"):
            find_groups(model, torch.randn(1, 3))

    def test_script(self):
        with pytest.raises(TypeError, match="TorchScript"):
            find_groups(torch.jit.ScriptModule(), images())

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_scripted_submodule(self):
        model = nn.Sequential(nn.Linear(3, 3), torch.jit.ScriptModule())
        with pytest.raises(TypeError, match="the submodule '1' is a TorchScript module"):
            find_groups(model, torch.randn(2, 3))


class TestText:
    def test_table(self):
        text = str(find_groups(conv_net(), images()))
        assert "0.weight   filter  8 × 27    1 (BatchNorm2d)" in text
        assert "8 rows in 1 parameter: 216 of 1396 numbers (15.5 %)" in text
        assert "rest: 4 parameters: 1.weight, 1.bias, 5.weight, 5.bias" in text
        assert "no effect: 1 parameter: 0.bias" in text

    def test_explain(self):
        model = conv_net()
        model[5].bias.requires_grad_(False)
        groups = find_groups(model, images())
        assert "rows: 'filter', 8 × 27" in groups.explain("0.weight")
        assert "reason: 1 (BatchNorm2d)" in groups.explain("0.weight")
        assert "no effect" in groups.explain("0.bias")
        assert "not radially invariant" in groups.explain("5.weight")
        assert "frozen" in groups.explain("5.bias")
        with pytest.raises(ValueError, match=r"no parameter is called 'x'.*0\.weight"):
            groups.explain("x")

    def test_a_note_on_eval_mode(self):
        model = conv_net().eval()
        groups = find_groups(model, images())
        assert groups.layouts == {"0.weight": "filter"}
        assert "eval mode" in str(groups)
        assert not model.training

    def test_a_note_on_batch_normalization_of_two_samples(self):
        """Its outputs are ±1 for all weights."""
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
        assert "pass a larger batch: 1" in str(find_groups(model, torch.randn(2, 6)))
        for samples in (3, 16):
            assert "larger batch" not in str(find_groups(model, torch.randn(samples, 6)))
        assert "larger batch" not in str(find_groups(conv_net(), torch.randn(2, 3, 8, 8)))

    def test_a_submodule_kept_in_eval_mode_stays_there(self):
        model = conv_net()
        model[1].eval()
        assert find_groups(model, images()).layouts == {}

    def test_no_known_layer(self):
        class Inline(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(6, 5))

            def forward(self, x: Tensor) -> Tensor:
                z = x @ self.w
                return ((z - z.mean(0)) / z.std(0)).tanh()

        groups = find_groups(Inline(), torch.randn(9, 6))
        assert groups.layouts == {"w": ("axis", 1)}
        assert "reason: unknown" in groups.explain("w")

    def test_parametrization_is_the_reason(self):
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh())
        groups = find_groups(model, torch.randn(9, 6))
        assert groups.groups[0].reason == "0.parametrizations.weight.0 (_WeightNorm)"

    def test_tied_names(self):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        model[2].weight = model[0].weight
        groups = find_groups(model, torch.randn(9, 6))
        assert groups.aliases == {"0.weight": ["2.weight"]}
        assert groups.explain("2.weight") == groups.explain("0.weight")

    def test_partly_invariant(self):
        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.qkv, self.norm = nn.Linear(8, 24, bias=False), nn.LayerNorm(4, elementwise_affine=False)

            def forward(self, x: Tensor) -> Tensor:
                q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
                return functional.scaled_dot_product_attention(self.norm(q), self.norm(k), v)

        torch.manual_seed(0)  # one weight in fifteen saturates the softmax, and other blocks are reported
        groups = find_groups(Attention(), torch.randn(3, 5, 8))
        assert groups.layouts == {}
        assert "of 3 equal blocks of dimension 0 only 0,1 are invariant" in groups.explain("qkv.weight")

    def test_partly_invariant_beside_a_nonlinearity(self):
        class GatedAttention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.q_gate, self.kv = nn.Linear(8, 16, bias=False), nn.Linear(8, 16)
                self.norm = nn.LayerNorm(4, elementwise_affine=False)

            def forward(self, x: Tensor) -> Tensor:
                q, gate = self.q_gate(x).unflatten(-1, (2, 8)).transpose(1, 2).chunk(2, -1)
                k, v = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
                return functional.scaled_dot_product_attention(self.norm(q), k, v) * gate.sigmoid()

        torch.manual_seed(0)
        groups = find_groups(GatedAttention(), torch.randn(3, 5, 8))
        assert groups.layouts == {}
        assert groups.partial == {"q_gate.weight": "of 4 equal blocks of dimension 0 only 0,2 are invariant"}

    def test_every_parameter_frozen(self):
        model = nn.Linear(3, 3).requires_grad_(False)
        groups = find_groups(model, torch.randn(2, 3))
        assert groups.frozen == ["weight", "bias"]
        assert groups.param_groups() == []


class TestScale:
    def test_defect_grows_as_the_radius_shrinks(self):
        defects = []
        for size in (1.0, 0.1, 0.01):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh())
            model[0].weight.data *= size
            groups = find_groups(model, torch.randn(16, 6))
            assert groups.layouts == {"0.weight": "filter"}
            defects.append(groups.groups[0].defect)
        assert defects[0] < 1e-3
        assert 30 < defects[1] / defects[0] < 300

    def test_rows_that_epsilon_dominates_are_reported(self):
        model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh())
        model[0].weight.data[2] *= 1e-5
        groups = find_groups(model, torch.randn(16, 6))
        assert groups.layouts == {"0.weight": "filter"}
        assert groups.groups[0].small == 1
        assert "ε dominates: 1 of 0.weight" in str(groups)

    def test_a_competing_branch_is_not_an_epsilon(self):
        class Sum(nn.Module):
            def __init__(self, share: float) -> None:
                super().__init__()
                self.fc, self.norm, self.share = nn.Linear(6, 6, bias=False), nn.LayerNorm(6), share

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(self.fc(x) + self.share * x).tanh()

        for share in (1.0, 0.1, 0.01):
            assert find_groups(Sum(share), torch.randn(16, 6)).layouts == {}

    @pytest.mark.parametrize("seed", range(4))
    def test_a_weak_path_around_the_normalization(self, seed: int):
        """Grown 1024-fold it is still below a hundredth, but it has grown."""

        class Narrow(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.norm, self.head = nn.Linear(6, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 2)

            def forward(self, x: Tensor) -> Tensor:
                y = self.fc(x)
                return self.head(self.norm(y).tanh() + 1e-5 * y)

        torch.manual_seed(seed)
        assert find_groups(Narrow(), torch.randn(10, 6)).layouts == {}

    @pytest.mark.parametrize("seed", [10, 23, 34, 36, 57, 58])
    def test_a_dead_unit_hides_no_branch(self, seed: int):
        """One branch normalizes, the other does not, and the only unit of ReLU on its path is dead at most points."""

        class Branches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.norm = nn.Linear(6, 3, bias=False), nn.LayerNorm(3)
                self.gate, self.out = nn.Linear(3, 1), nn.Linear(1, 3)
                nn.init.constant_(self.gate.bias, -4.0)

            def forward(self, x: Tensor) -> Tensor:
                h = self.fc(x)
                return self.norm(h).tanh() + self.out(self.gate(h).relu()).tanh()

        torch.manual_seed(seed)
        groups = find_groups(Branches(), torch.randn(6, 6))
        assert groups.layouts == {}
        assert groups.facts == []

    @pytest.mark.parametrize("seed", [3, 11, 22, 26, 29, 52])
    def test_a_stream_that_meets_gelu_behind_a_normalized_branch(self, seed: int):
        """GELU is nearly homogeneous for large inputs. The branch with its own scale must not hide it."""

        class Blocks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stem, self.inner = nn.Linear(5, 8), nn.Linear(8, 8)
                self.before, self.after, self.last = (nn.LayerNorm(8) for _ in range(3))
                self.up, self.down, self.head = (nn.Linear(8, n, bias=n == 3) for n in (8, 8, 3))

            def forward(self, x: Tensor) -> Tensor:
                x = self.stem(x)
                x = x + self.after(self.inner(self.before(x)).tanh())
                return self.head(self.last(x + self.down(functional.gelu(self.up(x)))))

        torch.manual_seed(seed)
        groups = find_groups(Blocks(), torch.randn(4, 6, 5))
        assert not any("stem.weight" in group.names for group in groups.groups)

    @pytest.mark.parametrize("seed", range(3))
    def test_rows_of_two_numbers(self, seed: int):
        """One of them may have next to no effect, and what ε does to such a row falls faster than to others."""
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4, affine=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(4, 6, 1, groups=2),
            nn.BatchNorm2d(6, affine=False),
            nn.Tanh(),
            nn.Conv2d(6, 3, 1),
        )
        assert find_groups(model, torch.randn(6, 3, 8, 8)).layouts == {"0.weight": "filter", "3.weight": "filter"}

    @pytest.mark.parametrize("seed", range(4))
    def test_a_clip_beyond_the_usual_range_hides_no_row(self, seed: int):
        """BN's outputs hardly exceed 6; with grown gain and bias, ReLU6 would output nothing but sixes."""
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, 3, 3, bias=False),
            nn.BatchNorm2d(3),
            nn.ReLU6(),
            nn.Conv2d(3, 4, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.Tanh(),
        )
        groups = find_groups(model, torch.randn(2, 3, 6, 6))
        assert groups.layouts == {"0.weight": "filter", "3.weight": "filter"}
        assert groups.passes[0] <= 13

    def test_rows_without_tokens_are_counted(self):
        model = nn.Sequential(nn.Embedding(20, 6), nn.LayerNorm(6), nn.Tanh())
        groups = find_groups(model, torch.arange(8).reshape(2, 4))
        assert groups.layouts == {"0.weight": "filter"}
        assert groups.groups[0].unseen == 12


class TestEffects:
    @pytest.mark.parametrize("seed", range(5))
    def test_a_length_in_front_of_batch_normalization(self, seed: int):
        """BN removes the length that weight_norm learns, up to ε."""
        torch.manual_seed(seed)
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.BatchNorm1d(5), nn.Tanh())
        groups = find_groups(model, torch.randn(16, 6))
        assert groups.layouts == {"0.parametrizations.weight.original1": "filter"}
        assert set(groups.no_effect) == {"0.bias", "0.parametrizations.weight.original0"}
        assert groups.passes[0] <= 13

    def test_a_weak_parameter_has_an_effect(self):
        class Weak(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.norm, self.head = nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 3)
                self.shift = nn.Parameter(torch.randn(3))

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.norm(self.fc(x)).tanh()) + 1e-3 * self.shift

        groups = find_groups(Weak(), torch.randn(16, 6))
        assert groups.layouts == {"fc.weight": "tensor"}
        assert groups.no_effect == []

    def test_an_empty_parameter(self):
        model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.LayerNorm(5))
        model.extra = nn.Parameter(torch.empty(0, 3))
        model.forward = lambda x: model[1](model[0](x)) + model.extra.sum()
        groups = find_groups(model, torch.randn(16, 6))
        assert groups.layouts == {"0.weight": "tensor"}
        assert groups.no_effect == ["extra"]
        assert groups.passes[0] <= 9


class KeyValueCache:
    def __init__(self, values: Tensor) -> None:
        self.values = values


class TestOutputs:
    @pytest.mark.parametrize("kept", [lambda v: {"past_key_values": (v,)}, lambda v: {"state": KeyValueCache(v)}])
    def test_caches_are_not_outputs(self, kept: Any):
        """No loss is computed from a cache for the next token."""

        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
                self.norm = nn.RMSNorm(8)

            def forward(self, x: Tensor) -> dict[str, Any]:
                v = self.v(x)
                y = functional.scaled_dot_product_attention(self.q(x), self.k(x), v)
                return {"logits": self.norm(y).tanh(), **kept(v)}

        assert find_groups(Attention(), torch.randn(3, 5, 8)).layouts == {"v.weight": "tensor"}

    @pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no grouped products")
    def test_grouped_products(self):
        """Experts behind one product, which torch does not compute in float64."""

        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.norm, self.down = nn.Parameter(torch.randn(3, 8, 16)), nn.LayerNorm(16), nn.Linear(16, 8)

            def forward(self, x: Tensor) -> Tensor:
                ends = torch.tensor([4, 4, 16], dtype=torch.int32)
                return self.down(self.norm(torch._grouped_mm(x, self.up, offs=ends)).tanh())

        groups = find_groups(Experts(), torch.randn(16, 8))
        assert groups.layouts == {"up": "filter"}
        assert groups.groups[0].unseen == 1
        assert [note.rpartition(": ")[2] for note in groups.notes] == ["1 of 3 slices of up"]


class TestIdleParts:
    """What is found of experts depends on whether they get tokens, and then a note says so."""

    @staticmethod
    def mixtral() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 50}
        config = transformers.MixtralConfig(**sizes, pad_token_id=None, bos_token_id=None, eos_token_id=None)
        torch.manual_seed(0)
        return transformers.MixtralForCausalLM(config)

    def test_mixtral_on_few_and_on_many_tokens(self):
        few, many = (find_groups(self.mixtral(), torch.randint(50, shape)) for shape in ((2, 16), (8, 64)))
        assert [fact.names for fact in few.facts] == [fact.names for fact in many.facts]
        assert many.notes == []
        assert len(few.notes) == 1
        assert re.search(
            r"depends on the batch.*1 of 8 slices of model\.layers\.\d\.mlp\.experts\.down_proj", few.notes[0]
        )
        assert few.notes[0] in str(few)

    @pytest.mark.parametrize("seed", range(3))
    def test_stacked_experts_of_small_weights(self, seed: int):
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate, self.norm, self.head = nn.Linear(32, 3), nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 2)
                self.up = nn.Parameter(0.02 * torch.randn(3, 64, 32))
                self.down = nn.Parameter(0.02 * torch.randn(3, 32, 32))

            def forward(self, x: Tensor) -> Tensor:
                gate, up = torch.einsum("nd,eod->neo", x, self.up).chunk(2, -1)
                y = torch.einsum("neo,edo->ned", functional.silu(gate) * up, self.down)
                y = torch.einsum("ne,ned->nd", self.gate(x).softmax(-1), y)
                return self.head((x + self.norm(y)).tanh())

        torch.manual_seed(seed)
        assert find_groups(Experts(), torch.randn(20, 32)).layouts == {"down": "tensor"}

    @pytest.mark.parametrize(("samples", "idle"), [(3, True), (64, False)])
    def test_experts_that_are_modules(self, samples: int, idle: bool):
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate, self.head = nn.Linear(6, 4), nn.Linear(8, 2)
                self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)) for _ in range(4))

            def forward(self, x: Tensor) -> Tensor:
                weight, chosen = self.gate(x).softmax(1).max(1)
                y = torch.zeros(len(x), 8, dtype=x.dtype)
                for k, expert in enumerate(self.experts):
                    y[chosen == k] = expert(x[chosen == k])
                return self.head(weight[:, None] * y)

        torch.manual_seed(0)
        notes = find_groups(Experts(), torch.randn(samples, 6)).notes
        assert bool(notes) == idle
        assert not idle or re.search(r"no gradient reached.*experts\.\S*0\.weight", notes[0])

    def test_a_branch_that_starts_at_zero_is_not_idle(self):
        class Residual(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.gain, self.head = nn.Linear(6, 6), nn.Parameter(torch.zeros(6)), nn.Linear(6, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(x + self.gain * self.inner(x).tanh())

        assert find_groups(Residual(), torch.randn(5, 6)).notes == []


class TestProgress:
    def test_each_pass_is_reported(self):
        calls: list[tuple[int, int]] = []
        groups = find_groups(conv_net(), images(), progress=lambda done, total: calls.append((done, total)))
        done, totals = zip(*calls, strict=True)
        assert list(done) == [*range(1, groups.passes[0] + 1), groups.passes[0]]
        assert all(d < total for d, total in calls[:-1])
        assert calls[-1][0] == calls[-1][1]
        assert min(totals) >= 8

    @pytest.mark.parametrize("terminal", [True, False])
    @pytest.mark.parametrize("seconds", [0.0, 60.0])
    def test_a_bar_on_a_terminal_if_it_takes_long(self, monkeypatch, terminal: bool, seconds: float):
        stream = io.StringIO()
        stream.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(thresholds, "BAR_SECONDS", seconds)
        monkeypatch.setenv("TERM", "xterm")
        find_groups(conv_net(), images())
        assert ("find_groups" in stream.getvalue()) == bool(stream.getvalue()) == (terminal and not seconds)


@dataclass
class Output:
    logits: Tensor
    words: str = "some"


class TestParamGroups:
    @pytest.fixture
    def groups(self) -> Groups:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(),
            nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2),
        )  # fmt: skip
        return find_groups(model, images())

    def test_rows(self, groups: Groups):
        made = groups.param_groups(weight_decay=1e-4, rest={"weight_decay": 0.0})
        assert [(g.get("rows"), g.get("joint", False), len(g["params"]), g["weight_decay"]) for g in made] == [
            ("filter", False, 2, 1e-4),
            (2, True, 2, 1e-4),
            (None, False, 9, 0.0),
        ]
        assert Layout(2).join(made[1]["params"]).shape == (2, 4 * 72 + 4)

    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
    def test_torch_optimizers_take_them(self, groups: Groups, optimizer: type[torch.optim.Optimizer]):
        made = optimizer(groups.param_groups(weight_decay=1e-4), lr=0.1)
        assert [g.get("rows") for g in made.state_dict()["param_groups"]] == ["filter", 2, None]

    def test_facts_on_request_only(self, groups: Groups):
        sets = [fact.names for fact in groups.facts]
        assert {("1.weight", "1.bias", "3.bias"), ("4.weight", "4.bias")} <= set(sets)
        with_facts = groups.param_groups(facts=True)
        assert sum(len(g["params"]) for g in with_facts) == len(groups.params)
        assert sum("rows" in g for g in with_facts) > sum("rows" in g for g in groups.param_groups())


def test_a_default_device_other_than_the_model_s():
    """`torch.set_default_device`, as in many scripts, does not move what is drawn and measured."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh())
    x = images()
    torch.set_default_device("meta")
    try:
        found = find_groups(model, x)
    finally:
        torch.set_default_device(None)
    assert found.joint == [("0.weight", "0.bias")]


class TestCost:
    def test_passes(self):
        model, calls = conv_net(), []
        model.register_forward_hook(lambda *_: calls.append(1))
        groups = find_groups(model, images())
        assert len(calls) == groups.passes[0] <= 13
        assert groups.passes[1] <= groups.passes[0]

    def test_passes_of_a_model_that_needs_its_own_dtypes(self):
        class Single(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.bn = nn.Linear(6, 5), nn.BatchNorm1d(5)

            def forward(self, x: Tensor) -> Tensor:
                if x.dtype != torch.float32:
                    raise TypeError("float32 only")
                return self.bn(self.fc(x)).tanh()

        groups = find_groups(Single(), torch.randn(16, 6))
        assert groups.layouts == {"fc.weight": "filter"}
        assert groups.passes[0] <= 13
        assert "own types" in str(groups)

    def test_outputs_in_any_nest(self):
        class Nested(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.bn = nn.Linear(6, 5), nn.BatchNorm1d(5)

            def forward(self, x: Tensor, *, options: dict[str, list[Tensor]]) -> dict[str, Any]:
                y = self.bn(self.fc(x) + options["extra"][0]).tanh()
                return {"outputs": [Output(y)], "labels": y.argmax(1), "text": "x"}

        groups = find_groups(Nested(), torch.randn(16, 6), options={"extra": [torch.zeros(16, 5)]})
        assert groups.layouts == {}
        assert groups.no_effect == ["fc.bias"]
