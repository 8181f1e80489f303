"""One launch over all rows, on a GPU or in Triton's interpreter, against the readings in plain torch."""

import pytest
import torch
from torch import Tensor

from steradian.groups import Group, Layout
from steradian.watching.buffer import decoupled_decay, sources_of
from steradian.watching.rows import WatchedGroup
from steradian.watching.sources.observed import SUMS, ObservedSource
from steradian.watching.sources.triton import TritonSource, supports

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"conv": (6, 4, 3, 3), "head": (5, 7), "whole": (3, 11), "long": (2, 20_000)}
LAYOUTS = {"conv": "filter", "head": "filter", "whole": "tensor", "long": "filter"}

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "SGD, dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-2),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=1e-1),
    "two points": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def params(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator).to(DEVICE, dtype) for name, shape in SHAPES.items()}
    made = {name: torch.nn.Parameter(tensor) for name, tensor in made.items()}
    made["conv"].data = made["conv"].data.to(memory_format=torch.channels_last)
    return made


def watched(optimizer: torch.optim.Optimizer, made: dict[str, Tensor]) -> list[WatchedGroup]:
    [options] = optimizer.param_groups
    found = []
    for name, param in made.items():
        size = Layout(LAYOUTS[name]).size(param.shape)
        group = Group((name,), LAYOUTS[name], *size, "", 0.0)
        found.append(WatchedGroup(group, [param], optimizer, options, "invariant"))
    return found


def quantities(source, *given: Tensor) -> dict[str, Tensor]:
    image, more = source.numbers(*given)
    names = ("radius", "angle", "velocity", "effective_lr", "direction_norm", "radial", "nu")
    return {**{name: value for name in names if (value := getattr(image, name)) is not None}, **more}


def set_gradients(made: dict[str, Tensor], step: int, skip: str = "") -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for name, param in made.items():
        gradient = torch.randn(param.shape, generator=generator).to(param)
        param.grad = None if name == skip else gradient.to(memory_format=torch.preserve_format)
        if name == "conv" and param.grad is not None:
            param.grad = param.grad.to(memory_format=torch.channels_last)


def compare(optimizer, made, steps, after, *, names=None) -> None:
    """Quantities of some steps from one launch and from plain torch; `after` is called after each, with the groups."""
    entries, others = watched(optimizer, made), watched(optimizer, made)
    assert all(map(supports, entries))
    launched, read = TritonSource(optimizer, entries), ObservedSource(optimizer, others)
    n_rows = sum(entry.n_rows for entry in entries)
    out = torch.zeros(steps, n_rows, len(launched.columns), dtype=torch.float64, device=DEVICE)
    reference = torch.zeros(steps, n_rows, len(read.columns), dtype=torch.float64, device=DEVICE)
    rates = torch.zeros(steps, n_rows, dtype=torch.float64, device=DEVICE)
    for step in range(steps):
        set_gradients(made, step)
        launched.before()
        read.before()
        optimizer.step()
        launched.after(out[step])
        read.after(reference[step])
        rates[step] = optimizer.param_groups[0]["lr"]
        after([*entries, *others])
    decays = torch.full_like(rates, decoupled_decay(optimizer.param_groups[0]))
    found = quantities(launched, out, rates, decays)
    expected = quantities(read, reference, rates, decays)
    assert set(found) == set(expected)
    places = {entry.name: entry.span for entry in others}
    for name in names or found:
        for entry in entries:
            one, other = found[name][:, entry.span], expected[name][:, places[entry.name]]
            tolerance = 1e-6 + 1e-5 * other.abs().max().item()
            torch.testing.assert_close(one, other, rtol=2e-4, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    "name",
    [name if "," not in name else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS],
)
def test_sums_in_one_launch_give_what_is_read(name) -> None:
    made = params()
    optimizer = OPTIMIZERS[name](list(made.values()))

    def after(_) -> None:
        optimizer.param_groups[0]["lr"] *= 0.7

    compare(optimizer, made, 4, after)


class Clipping(torch.optim.Adam):
    """A step of its own, without Adam's state, that clips the gradient in place."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.sub_(0.1 * param.grad.div_(param.grad.norm()))


def test_a_step_that_alters_the_gradient() -> None:
    made = params()
    optimizer = Clipping(list(made.values()), lr=0.01)
    compare(optimizer, made, 3, lambda _: None)
    entries = watched(optimizer, made)
    launched = TritonSource(optimizer, entries)
    values = torch.zeros(1, sum(e.n_rows for e in entries), len(SUMS), dtype=torch.float64, device=DEVICE)
    set_gradients(made, 5)
    norms = torch.cat([group.layout.rows(group.params[0].grad.double()).norm(dim=1) for group in entries])
    launched.before()
    optimizer.step()
    launched.after(values[0])
    torch.testing.assert_close(values[0, :, SUMS.index("gg")].sqrt(), norms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_observed_from_two_points(dtype) -> None:
    made = params(dtype)
    optimizer = torch.optim.AdamW(list(made.values()), lr=0.01, eps=1e-3)  # 1e-8 is 0 in float16
    assert TritonSource(optimizer, watched(optimizer, made)).two_points
    compare(optimizer, made, 3, lambda _: None)


def test_rows_without_a_gradient_do_not_disturb_the_others() -> None:
    made = params()
    optimizer = torch.optim.Adam(list(made.values()), lr=0.01)
    entries = watched(optimizer, made)
    launched = TritonSource(optimizer, entries)
    results = []
    for skip in ("", "head"):
        set_gradients(made, 1, skip)
        launched.before()
        values = torch.zeros(
            1, sum(e.n_rows for e in entries), len(launched.columns), dtype=torch.float64, device=DEVICE
        )
        launched.after(values[0])
        results.append(values)
        if not skip:
            optimizer.step()
            launched.after(values[0])
    assert results[1][0, entries[0].span].isfinite().all()


def test_what_one_launch_cannot_read_is_read_in_torch() -> None:
    made = params()
    nesterov = torch.optim.SGD(list(made.values()), lr=0.1, momentum=0.9, nesterov=True)
    assert not any(map(supports, watched(nesterov, made)))
    optimizer = torch.optim.RMSprop(list(made.values()))
    entries = watched(optimizer, made)
    assert not any(map(supports, entries))
    assert [type(source) for source in sources_of(optimizer, entries, phenomena=False)] == [ObservedSource]


def test_a_loaded_state_is_read() -> None:
    """`load_state_dict` makes new param groups, which the watched groups get."""
    made = params()
    optimizer = torch.optim.Adam(list(made.values()), lr=0.01, betas=(0.9, 0.99))

    def after(groups) -> None:
        state = optimizer.state_dict()
        state["param_groups"][0]["betas"] = (0.5, 0.8)
        optimizer.load_state_dict(state)
        for group in groups:
            [group.settings] = optimizer.param_groups

    compare(optimizer, made, 3, after, names=["effective_lr"])
