"""The lab's own convolutions and networks that use them, against torch's in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from steradian.lab.kernels import convolution, joining
from steradian.lab.kernels.convolution import FILTERS, _Corner, _Strip, _Tile, convolve
from steradian.lab.models import ResNet, build
from steradian.lab.training import Execution, Training

from lab.studies import few, methods

CUDA = torch.cuda.is_available()


def plan(monkeypatch, one, two, corner):
    """Plans of convolutions with stride 1, with stride 2, and of gradients to weights."""
    by_filters = {1: dict.fromkeys(FILTERS, one), 2: dict.fromkeys(FILTERS, two)}
    monkeypatch.setattr(convolution, "_FORWARD", by_filters)
    monkeypatch.setattr(convolution, "_INPUT_GRADIENT", by_filters)
    monkeypatch.setattr(convolution, "_WEIGHT_GRADIENT", dict.fromkeys((1, 2), dict.fromkeys(FILTERS, corner)))


@pytest.fixture(params=["tiles", "strips"])
def few_pixels(request, monkeypatch):
    """Blocks so small that several programs share the work and the last is not full."""
    if request.param == "tiles":
        plan(monkeypatch, _Tile(32, 2), _Tile(32, 1), _Corner(32, 2, 4, 4))
    else:
        plan(monkeypatch, _Strip(16, 3), _Tile(64, 2), _Corner(16, 3, 1, 1))


@pytest.fixture
def many_pixels(monkeypatch):
    """One program: the interpreter is slow for each."""
    plan(monkeypatch, _Strip(16, 4), _Tile(64, 1), _Corner(64, 1, 4, 1))


def twin(x, weight, stride):
    y = functional.conv2d(x, weight, stride=stride, padding=1)
    return y, torch.stack([(y**power).sum(dim=(0, 2, 3)) for power in (1, 2)])


SHAPES = [
    (16, 16, 1, (6, 10), torch.float32),
    (16, 16, 1, (5, 3), torch.float16),
    (16, 32, 2, (6, 10), torch.float32),
    (32, 32, 1, (4, 6), torch.float32),
    (32, 64, 2, (8, 4), torch.float32),
    (8, 16, 1, (7, 9), torch.float32),
    (3, 16, 2, (4, 4), torch.float32),
    (3, 64, 1, (5, 6), torch.float32),
]
# Other combinations use no other kernel.
DIFFERENT = {"strips": range(8), "tiles": (0, 2, 7)}


@pytest.mark.skipif(CUDA, reason="float32 is only computed in the interpreter; the next test is the GPU's")
@pytest.mark.parametrize(
    ("few_pixels", "channels", "filters", "stride", "size", "dtype"),
    [
        pytest.param(name, *shape, marks=[] if k in DIFFERENT[name] else pytest.mark.slow)
        for name in DIFFERENT
        for k, shape in enumerate(SHAPES)
    ],
    indirect=["few_pixels"],
)
def test_convolution_and_gradients_are_torchs(few_pixels, channels, filters, stride, size, dtype):
    torch.manual_seed(0)
    x = torch.randn(3, channels, *size).to(dtype).requires_grad_(channels in FILTERS)
    weight = torch.randn(filters, channels, 3, 3).div(12).requires_grad_()
    y, sums = convolve(x, weight, stride=stride)
    assert y.dtype == dtype
    assert sums.dtype == torch.float32
    assert y.is_contiguous(memory_format=torch.channels_last)
    to_y, to_sums = torch.randn_like(y, dtype=torch.float32), torch.randn_like(sums) / 10
    ((y.float() * to_y).sum() + (sums * to_sums).sum()).backward()

    exact = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in (x, weight)]
    other, other_sums = twin(*exact, stride)
    ((other * to_y.double()).sum() + (other_sums * to_sums.double()).sum()).backward()
    near = {"rtol": 0, "atol": 2e-6 if dtype == torch.float32 else 2e-3}
    for ours, expected in ((y, other), (sums, other_sums), (x.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        if expected is not None:
            scale = float(expected.detach().abs().max())
            torch.testing.assert_close(ours.double() / scale, expected / scale, **near)


def test_sums_are_empty_if_not_wanted(few_pixels):
    x, weight = torch.randn(2, 16, 4, 4), torch.randn(16, 16, 3, 3)
    device = "cuda" if CUDA else "cpu"
    kind = torch.bfloat16 if CUDA else torch.float32
    y, sums = convolve(x.to(device, kind), weight.to(device), sums=False)
    assert sums.numel() == 0
    near = {"rtol": 0, "atol": 0.2 if CUDA else 1e-4}
    torch.testing.assert_close(y.float().cpu(), functional.conv2d(x, weight, padding=1), **near)


@pytest.mark.skipif(CUDA, reason="float32 is only computed in the interpreter")
def test_sums_alone_have_a_gradient(many_pixels):
    x, weight = torch.randn(2, 3, 4, 4), torch.randn(16, 3, 3, 3, requires_grad=True)
    convolve(x, weight)[1][1].sum().backward()
    exact = weight.detach().double().requires_grad_()
    twin(x.double(), exact, 1)[1][1].sum().backward()
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-5, atol=1e-4)


def test_nan_is_passed_on(many_pixels):
    x = torch.full((1, 16, 4, 4), torch.nan, device="cuda" if CUDA else "cpu", dtype=torch.bfloat16 if CUDA else None)
    y, sums = convolve(x, torch.ones(16, 16, 3, 3, device=x.device))
    assert y.isnan().all()
    assert sums.isnan().all()


def made(model, **options):
    """A network for images of 4 × 4; "small" and "projected" are ResNet20 with one block in each stage."""
    if model in ("small", "projected"):
        return ResNet([16, 32, 64], 1, norm="bn", project=model == "projected", channels=3, classes=10, size=4)
    return build(model, size=4, **options)


def shaken(network):
    """The network with random terms of BN and a random head."""
    torch.manual_seed(1)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d) and layer.affine:
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.3)
    nn.init.normal_(network.head.weight)
    return network


@pytest.mark.skipif(CUDA, reason="float32 is only computed in the interpreter; the next test is the GPU's")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("small", {}),
        pytest.param("ResNet20", {}, marks=pytest.mark.slow),
        pytest.param("ResNet20", {"norm": "bn-no-affine"}, marks=pytest.mark.slow),
        pytest.param("ResNet20", {"released": True}, marks=pytest.mark.slow),
        ("projected", {}),
    ],
)
def test_a_joined_network_is_the_network(many_pixels, model, options):
    plain = shaken(made(model, **options))
    ours = copy.deepcopy(plain)
    assert joining.can_join(ours)
    ours.route = joining.forward
    plain.double()
    images = torch.randn(3, 3, 4, 4)
    logits, expected = ours(images), plain(images.double())
    toward = torch.randn_like(logits)
    (logits * toward).sum().backward()
    (expected * toward.double()).sum().backward()
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(logits.double() / scale, expected / scale, rtol=0, atol=1e-5)
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        error = float((one.grad.double() - other.grad).norm() / other.grad.norm())
        assert error < 1e-4, name
    for (name, one), other in zip(ours.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6, msg=name)
    ours.eval()
    plain.eval()
    judged, expected = ours(images), plain(images.double())
    torch.testing.assert_close(judged.double() / scale, expected / scale, rtol=0, atol=1e-5)
    [one], [other] = (
        torch.autograd.grad(y.sum(), next(net.parameters())) for y, net in ((judged, ours), (expected, plain))
    )
    assert float((one.double() - other).norm() / other.norm()) < 1e-4


@pytest.mark.skipif(CUDA, reason="float32 is only computed in the interpreter")
@pytest.mark.parametrize("model", ["small", pytest.param("ResNet20", marks=pytest.mark.slow)])
def test_a_compiled_network_has_the_gradients_of_one_that_is_not(many_pixels, model):
    network = shaken(made(model, width=16))
    network.route = joining.forward
    images, found = torch.randn(3, 3, 4, 4), []
    for forward in (network, torch.compile(network, backend="aot_eager", dynamic=False)):
        network.zero_grad()
        forward(images).square().sum().backward()
        found.append([parameter.grad for parameter in network.parameters()])
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-4


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("ResNet18", {"norm": "bn"}),
        ("VGG16", {"norm": "bn"}),
        ("ResNet20", {"norm": "ln"}),
        ("ResNet20", {"norm": "gn"}),
        ("ResNet20", {"norm": "wn"}),
    ],
)
def test_other_networks_are_run_layer_by_layer(model, options):
    assert not joining.can_join(build(model, **options))


@pytest.mark.parametrize(
    ("change", "joined"), [({}, True), ({"precision": "float32"}, False), ({"model": "VGG16"}, False)]
)
def test_narrow_residual_networks_are_joined_in_half_precision(change, joined):
    data = few("cpu", train=20, test=10)
    [config] = methods("Adam", **{"model": "ResNet20", "width": 16, "precision": "bf16", "epochs": 1} | change)
    training = Training(config, data, execution=Execution(joined=True))
    assert (getattr(training.model, "route", None) is not None) == joined


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["ResNet20"])
def test_on_a_gpu_a_joined_network_is_as_near_to_float32_as_torchs(model):
    plain = shaken(build(model)).cuda().to(memory_format=torch.channels_last)
    images = torch.randn(32, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    toward = torch.randn_like(plain(images))

    def gradients(route, half):
        network = copy.deepcopy(plain)
        network.route = route
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            logits = network(images)
        (logits.float() * toward).sum().backward()
        return [parameter.grad for parameter in network.parameters()]

    exact = gradients(None, False)
    errors = [
        sum(float((a - b).norm() / b.norm()) for a, b in zip(gradients(route, True), exact, strict=True))
        for route in (None, joining.forward)
    ]
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_on_a_gpu_a_training_takes_the_joint_kernels_and_learns_alike():
    data = few("cuda", train=1000, test=100)
    [config] = methods("Adam", model="ResNet20", width=16, precision="bf16", epochs=3)
    losses = []
    for joined in (None, False):
        training = Training(config, data, execution=Execution(joined=joined))
        assert (training.model.route is not None) == (joined is None)
        while not training.finished:
            training.run_epoch()
        losses.append(training.curves["train_loss"])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.05, atol=0.05)
