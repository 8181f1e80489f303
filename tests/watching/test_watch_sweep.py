"""One sweep over all rows, under Triton's interpreter, against the readings in plain torch."""

import pytest
import torch
from torch import Tensor

from steradian.groups import Layout
from steradian.scheme import reader_of
from steradian.watching._followed import Followed
from steradian.watching._seen import Seen
from steradian.watching._source import decoupled
from steradian.watching._station import Station
from steradian.watching._sweep import Swept, can_sweep

SHAPES = {"conv": (6, 4, 3, 3), "head": (5, 7), "whole": (3, 11), "long": (2, 20_000)}
LAYOUTS = {"conv": "filter", "head": "filter", "whole": "tensor", "long": "filter"}

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "SGD, dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-2),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=1e-1),
}


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    made["conv"].data = made["conv"].data.to(memory_format=torch.channels_last)
    return made


def follow(optimizer: torch.optim.Optimizer, made: dict[str, Tensor]) -> list[Followed]:
    [options] = optimizer.param_groups
    found = []
    for name, param in made.items():
        layout = Layout(LAYOUTS[name])
        n, d = layout.size(param.shape)
        found.append(Followed(name, (name,), [param], layout, options, n, d))
    return found


def set_gradients(made: dict[str, Tensor], step: int, skip: str = "") -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for name, param in made.items():
        gradient = torch.randn(param.shape, generator=generator)
        param.grad = None if name == skip else gradient.to(memory_format=torch.preserve_format)
        if name == "conv" and param.grad is not None:
            param.grad = param.grad.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_sweep_sees_what_is_read(make) -> None:
    made = params()
    optimizer = make(list(made.values()))
    entries, others = follow(optimizer, made), follow(optimizer, made)
    assert can_sweep(optimizer, entries)
    swept, seen = Swept(optimizer, entries), Seen(optimizer, others, reader=reader_of(optimizer))
    out = torch.zeros(4, sum(e.rows for e in entries), len(swept.columns), dtype=torch.float64)
    reference = torch.zeros(4, out.shape[1], len(seen.columns))
    rates = torch.zeros(4, out.shape[1], dtype=torch.float64)
    for step in range(4):
        set_gradients(made, step)
        swept.before()
        seen.before()
        optimizer.step()
        swept.after(out[step])
        seen.after(reference[step])
        rates[step] = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] *= 0.7
    decays = torch.full_like(rates, decoupled(optimizer.param_groups[0]))
    found, expected = swept.quantities(out, rates, decays), seen.quantities(reference, rates.float(), decays.float())
    assert set(found) == set(expected)
    places = {entry.name: entry.span for entry in others}
    for name, values in found.items():
        for entry in entries:
            one, other = values[:, entry.span], expected[name][:, places[entry.name]]
            tolerance = 1e-6 + 1e-5 * other.abs().max().item()
            torch.testing.assert_close(one, other, rtol=2e-4, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def test_rows_without_a_gradient_do_not_disturb_the_others() -> None:
    made = params()
    optimizer = torch.optim.Adam(list(made.values()), lr=0.01)
    entries = follow(optimizer, made)
    swept = Swept(optimizer, entries)
    results = []
    for skip in ("", "head"):
        set_gradients(made, 1, skip)
        swept.before()
        values = torch.zeros(1, sum(e.rows for e in entries), len(swept.columns), dtype=torch.float64)
        swept.after(values[0])
        results.append(values)
        if not skip:
            optimizer.step()
            swept.after(values[0])
    assert results[1][0, entries[0].span].isfinite().all()


def test_what_cannot_be_swept_is_seen() -> None:
    made = params()
    nesterov = torch.optim.SGD(list(made.values()), lr=0.1, momentum=0.9, nesterov=True)
    assert not can_sweep(nesterov, follow(nesterov, made))
    optimizer = torch.optim.RMSprop(list(made.values()))
    assert not can_sweep(optimizer, follow(optimizer, made))
    assert isinstance(Station(optimizer, follow(optimizer, made), phenomena=False).source, Seen)


def test_a_loaded_state_is_swept() -> None:
    """`load_state_dict` makes new param groups, which the rows are told of."""
    made = params()
    optimizer = torch.optim.Adam(list(made.values()), lr=0.01, betas=(0.9, 0.99))
    entries = follow(optimizer, made)
    swept = Swept(optimizer, entries)
    seen = Seen(optimizer, follow(optimizer, made), reader=reader_of(optimizer))
    values = torch.zeros(3, sum(entry.rows for entry in entries), len(swept.columns), dtype=torch.float64)
    reference = torch.zeros(3, values.shape[1], len(seen.columns))
    for step in range(3):
        set_gradients(made, step)
        swept.before()
        seen.before()
        optimizer.step()
        swept.after(values[step])
        seen.after(reference[step])
        state = optimizer.state_dict()
        state["param_groups"][0]["betas"] = (0.5, 0.8)
        optimizer.load_state_dict(state)
        for entry in [*entries, *(entry for batch in seen.batches for entry in batch.members)]:
            [entry.options] = optimizer.param_groups
    rates = torch.full(values.shape[:2], 0.01, dtype=torch.float64)
    found, expected = (s.quantities(v, rates, 0 * rates) for s, v in ((swept, values), (seen, reference)))
    places = {entry.name: entry.span for batch in seen.batches for entry in batch.members}
    for entry in entries:
        one, two = found["effective_lr"][:, entry.span], expected["effective_lr"][:, places[entry.name]]
        torch.testing.assert_close(one.double(), two.double(), rtol=2e-4, atol=1e-6)
