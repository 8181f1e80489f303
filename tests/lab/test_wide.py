"""Convolutions with many channels, against torch's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from steradian.lab import hopper, joining, wide
from steradian.lab.hopper import convolution_parts, weight_gradient_parts
from steradian.lab.models import build
from steradian.lab.wide import convolve

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)


def made(batch, channels, filters, size, *, dtype, device="cpu"):
    """x, weight and dy; x and weight need gradients."""
    generator = torch.Generator().manual_seed(batch + channels + filters + size)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device)

    x = random(batch, channels, size, size).to(dtype, memory_format=torch.channels_last)
    weight = random(filters, channels, 3, 3).div(3 * channels**0.5)
    return x.requires_grad_(), weight.requires_grad_(), random(batch, filters, size, size).to(dtype)


def by_torch(x, weight, dy):
    """y and the gradients to x and weight in float64, from what is multiplied."""
    taps = weight.detach().to(x.dtype).double().requires_grad_()
    inside = x.detach().double().requires_grad_()
    y = functional.conv2d(inside, taps, padding=1)
    return [y.detach(), *torch.autograd.grad(y, (inside, taps), dy.double())]


def ours(x, weight, dy):
    y, sums = convolve(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)], sums


def error(one, other):
    return float((one.double() - other).norm() / other.norm())


@given(st.integers(1, 200), st.sampled_from([3, 64, 128, 256, 512]), st.sampled_from([48, 64, 512]), st.integers(2, 40))
def test_parts_of_a_gradient_take_every_image_once(batch, channels, filters, size):
    parts = weight_gradient_parts(torch.empty(batch, channels, size, size, device="meta"), filters)
    plan = hopper._GRADIENTS.get(size)
    if not parts:
        assert plan is None or channels % 64 or filters % 64 or batch % plan.images
        return
    assert batch % (parts * plan.images) == 0
    assert parts <= max(1, hopper._PROGRAMS // (filters // 64 * (channels // 64)))


@given(st.integers(1, 200), st.sampled_from([16, 8, 4]))
def test_parts_of_a_convolution_take_every_tile(batch, size):
    x = torch.empty(batch, 64, size, size, device="meta")
    parts, tiles = convolution_parts(x, 256), -(-batch // hopper._BLOCKS[size].images) * (size // 2)
    each = -(-tiles // parts)
    assert (parts - 1) * each < tiles <= parts * each


@pytest.mark.parametrize(("channels", "filters", "size", "batch"), [(48, 64, 8, 4), (64, 32, 32, 8), (64, 64, 6, 2)])
def test_what_is_not_ours_is_torchs(channels, filters, size, batch):
    x, weight, dy = made(batch, channels, filters, size, dtype=torch.float32)
    assert not weight_gradient_parts(x, filters)
    assert not convolution_parts(x, filters)
    found, sums = ours(x, weight, dy)
    assert sums is None
    for one, other in zip(found, by_torch(x, weight, dy), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.fixture
def played(monkeypatch):
    """The kernels played by torch, which leave their results where the kernels do; returns what was launched."""
    launched = []

    def launch(x, weight, y, sums, parts):
        launched.append("input" if sums is None else "forward")
        assert all(each.is_contiguous(memory_format=torch.channels_last) for each in (x, weight, y))
        taps = weight.to(y.dtype)
        if sums is None:
            y.copy_(functional.conv_transpose2d(x, taps, padding=1))
            return
        y.copy_(functional.conv2d(x, taps, padding=1))
        told = torch.stack([y.float().sum(dim=(0, 2, 3)), y.float().square().sum(dim=(0, 2, 3))])
        sums.copy_((told / parts).expand(parts, -1, -1))

    def launch_weight_gradient(x, dy, out):
        launched.append("weight")
        assert all(each.is_contiguous(memory_format=torch.channels_last) for each in (x, dy))
        shape = (dy.shape[1], x.shape[1], 3, 3)
        for part, inside, back in zip(out, x.float().chunk(len(out)), dy.float().chunk(len(out)), strict=True):
            part.copy_(torch.nn.grad.conv2d_weight(inside, shape, back, padding=1).permute(0, 2, 3, 1))

    monkeypatch.setattr(hopper, "_launch", launch)
    monkeypatch.setattr(hopper, "_launch_weight_gradient", launch_weight_gradient)
    return launched


@pytest.mark.parametrize(
    ("channels", "filters", "size", "batch", "frozen"),
    [
        (64, 64, 32, 8, False),
        (64, 64, 32, 8, True),
        (64, 64, 32, 4, False),
        (128, 64, 8, 6, False),
        (64, 128, 4, 16, False),
    ],
)
def test_parts_are_put_together_as_the_kernels_give_them(channels, filters, size, batch, frozen, played):
    x, weight, dy = made(batch, channels, filters, size, dtype=torch.float32)
    x.requires_grad_(not frozen)
    y, sums = convolve(x, weight)
    y.backward(dy)
    whole, back = bool(convolution_parts(x, filters)), bool(convolution_parts(dy, channels))
    assert played == ["forward"] * whole + ["input"] * (back and not frozen) + ["weight"]
    expected = by_torch(x, weight, dy)
    for one, other in zip([y, x.grad, weight.grad], expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one.detach().double(), other, rtol=1e-4, atol=1e-3)
    assert (x.grad is None) == frozen
    assert (sums is not None) == whole
    if whole:
        told = torch.stack([expected[0].sum(dim=(0, 2, 3)), expected[0].square().sum(dim=(0, 2, 3))])
        torch.testing.assert_close(sums.double(), told, rtol=1e-4, atol=1e-2)
        assert not sums.requires_grad


def test_operators_are_what_a_compiler_takes_them_for(played):
    x, weight, dy = made(8, 128, 128, 4, dtype=torch.float32)
    taps = weight.detach().contiguous(memory_format=torch.channels_last)
    inside, back = x.detach(), dy.contiguous(memory_format=torch.channels_last)
    for operator, arguments in (
        (hopper.forward, (inside, taps, convolution_parts(x, 128))),
        (hopper.input_gradient, (back, taps, convolution_parts(x, 128))),
        (hopper.weight_gradient, (inside, back, weight_gradient_parts(x, 128))),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("model", ["ResNet18", "VGG16"])
def test_a_compiled_network_with_them_is_the_network(model, played):
    """Traced as on a GPU, carried out on a CPU: logits, running statistics and gradients, trained and judged."""
    size = {"ResNet18": 16, "VGG16": 32}[model]
    images = torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(0))
    found = []
    for route in (None, joining.forward_on_hopper):
        torch.manual_seed(0)
        network = build(model).to(memory_format=torch.channels_last)
        network.route = route
        call = torch.compile(network, backend="aot_eager") if route else network
        logits = call(images)
        logits.square().sum().backward()
        network.eval()
        with torch.no_grad():
            judged = call(images)
        found.append([logits.detach(), judged, *(p.grad for p in network.parameters()), *network.buffers()])
    assert {"forward", "input", "weight"} == set(played)
    # Where rounding moves an activation across 0 a gradient jumps, torch's as well.
    for plain, other in zip(*found, strict=True):
        assert error(other, plain.double()) < 0.02 or plain.norm() == other.norm() == 0


def test_our_kernels_are_for_hopper_gpus():
    assert not wide.works(torch.device("cpu"))
    if CUDA and not HOPPER:
        assert not wide.works(torch.device("cuda"))


@pytest.fixture
def hopper_gpu(monkeypatch):
    """A machine that our kernels are for, as far as it says."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(wide, "_version", lambda package: "3.6.0")
    wide.works.cache_clear()
    yield torch.device("cuda", 0)
    wide.works.cache_clear()


@pytest.mark.parametrize(
    ("error", "text"), [(0.5, "off by 0.5"), (float("nan"), "off by nan"), (None, "fail: division")]
)
def test_kernels_that_fail_or_err_are_not_taken(hopper_gpu, error, text, monkeypatch):
    monkeypatch.setattr(wide, "_error", lambda *_: 1 / 0 if error is None else error)
    with pytest.warns(UserWarning, match=text):
        assert not wide.works(hopper_gpu)


@pytest.mark.parametrize(("version", "taken"), [("3.6.0", True), ("3.6.1", True), ("3.7.0", False), ("", False)])
def test_kernels_are_taken_with_the_versions_they_were_tried_with(hopper_gpu, version, taken, monkeypatch):
    monkeypatch.setattr(wide, "_version", lambda package: version)
    monkeypatch.setattr(wide, "_error", lambda *_: 0.001)
    assert wide.works(hopper_gpu) == taken


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("channels", "filters", "size", "batch"),
    [
        (64, 64, 32, 128), (64, 64, 32, 8), (64, 64, 32, 24), (64, 64, 32, 3), (128, 128, 16, 128), (64, 128, 16, 30),
        (256, 256, 8, 128), (128, 256, 8, 6), (512, 512, 4, 128), (256, 512, 4, 8), (512, 512, 2, 16),
        (128, 128, 16, 5), (128, 64, 16, 40), (256, 128, 8, 50), (64, 128, 4, 100),
    ],
)  # fmt: skip
def test_on_a_hopper_gpu_convolutions_and_gradients_are_torchs(channels, filters, size, batch):
    if not wide._version("triton").startswith(wide._TRITON):
        pytest.skip("our kernels were not tried with this version of Triton")
    assert wide.works(torch.device("cuda"))
    x, weight, dy = made(batch, channels, filters, size, dtype=torch.bfloat16, device="cuda")
    found, sums = ours(x, weight, dy)
    exact = by_torch(x, weight, dy)
    bounds = (5e-3, 5e-3, 2e-5 if weight_gradient_parts(x, filters) else 5e-3)
    for one, other, bound in zip(found, exact, bounds, strict=True):
        assert error(one, other) < bound
    assert (sums is not None) == (convolution_parts(x, filters) > 0)
    if sums is not None:
        y = found[0].double()
        assert error(sums, torch.stack([y.sum(dim=(0, 2, 3)), y.square().sum(dim=(0, 2, 3))])) < 1e-5
    # Whatever else runs on the device, and however often.
    ones = (convolution_parts(x, filters), convolution_parts(dy, channels), weight_gradient_parts(x, filters))
    for one, other, mine in zip(found, ours(x, weight, dy)[0], ones, strict=True):
        assert torch.equal(one, other) or not mine
