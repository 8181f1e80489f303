"""find_groups on a GPU: models on it and across devices, synchronized statistics, generators restored."""

import pytest
import torch
from torch import Tensor, nn

from steradian.discovery import find_groups

from cases import CASES, Case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _to(value: object, device: str) -> object:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return type(value)(_to(item, device) for item in value) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_gpu_and_cpu_agree(case: Case):
    torch.manual_seed(0)
    model = case.build()
    args, kwargs = case.inputs()
    here = find_groups(model, *args, **kwargs)
    try:
        model = model.to("cuda")
        model(*_to(args, "cuda"), **_to(kwargs, "cuda"))
    except RuntimeError as error:
        if "same device" not in str(error):
            raise
        pytest.skip(f"the model keeps a tensor on the host: {error}")
    state = torch.cuda.get_rng_state()
    there = find_groups(model, *_to(args, "cuda"), **_to(kwargs, "cuda"))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert (there.layouts, set(there.joint), set(there.no_effect)) == (
        here.layouts,
        set(here.joint),
        set(here.no_effect),
    )


class Halves(nn.Module):
    """One half on the host, the other on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 2, 1)).to("cuda")
        self.scale = nn.Parameter(torch.ones((), device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.deep(self.bn(self.conv(x)).relu().to("cuda")).tanh()


def test_a_model_across_devices():
    torch.manual_seed(0)
    model = Halves()
    before = {name: t.detach().clone() for name, t in model.state_dict().items()}
    groups = find_groups(model, torch.randn(4, 3, 10, 10))
    assert groups.layouts == {"conv.weight": "filter", "deep.0.weight": 2, "deep.0.bias": 2}
    assert groups.joint == [("deep.0.weight", "deep.0.bias")]
    assert groups.no_effect == ["conv.bias"]
    for name, tensor in model.state_dict().items():
        assert tensor.device == before[name].device
        assert torch.equal(tensor, before[name])


def test_synchronized_statistics():
    """With one process they are those of batch normalization."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False))
    plain.append(nn.BatchNorm2d(4)).append(nn.Tanh()).append(nn.Conv2d(4, 2, 1))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(plain).to("cuda")
    groups = find_groups(model, torch.randn(4, 3, 10, 10, device="cuda"))
    assert groups.layouts == {"0.weight": "filter", "3.weight": "filter"}
    assert groups.no_effect == ["0.bias"]
    assert groups.groups[0].reason == "1 (SyncBatchNorm)"
    assert isinstance(model[1], nn.SyncBatchNorm)
    assert "forward" not in vars(model[1])


def test_inputs_on_the_host_raise():
    with pytest.raises(ValueError, match=r"inputs are on cpu but the model is on cuda:0; move the inputs"):
        find_groups(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).to("cuda"), torch.randn(2, 3))


def test_tf32_does_not_matter():
    """TF32 has ten bits; the probes that decide are made in float64."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 8)).to("cuda")
        groups = find_groups(model, torch.randn(64, 256, device="cuda"))
        assert groups.joint == [("0.weight", "0.bias")]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    groups = find_groups(model.to("cuda", dtype), torch.randn(8, 3, 12, 12, device="cuda", dtype=dtype))
    assert groups.layouts == {"0.weight": "filter"}
    assert model[0].weight.dtype == dtype
