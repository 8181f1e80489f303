"""What the steps tell about themselves: the telemetry, and `read_step` on our optimizers."""

import numpy as np
import pytest
import torch

from optim.table import TABLE, Make, assert_same, groups, parameters, set_gradients, train
from steradian import geometry, optim
from steradian.groups import Layout
from steradian.image import image_step
from steradian.optim import TELEMETRY
from steradian.scheme import UnreadableOptimizerError, read_step


@pytest.fixture(params=TABLE.values(), ids=TABLE)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def tangent_gradients(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Gradients as a radially invariant loss has them."""
    set_gradients(optimizer, seed)
    for group in optimizer.param_groups:
        layout = Layout(group["rows"])
        for p in group["params"]:
            _, u = geometry.split(layout.rows(p.detach()))
            p.grad = layout.restore(geometry.tangent(layout.rows(p.grad), u), p.shape)


def test_telemetry_is_the_image_of_the_step_as_read(make: Make) -> None:
    """Radius, angle and effective rate that the step emits, against `read_step` and `image_step`."""
    radial = [group for group in groups(torch.float64, radial_alone=True) if "joint" not in group]
    optimizer = make(radial)
    optimizer.emit()
    for k in range(4):
        tangent_gradients(optimizer, k)
        before = [p.detach().clone() for p in parameters(optimizer)]
        optimizer.step()
        for p, old in zip(parameters(optimizer), before, strict=True):
            rows = next(g["rows"] for g in optimizer.param_groups if any(p is q for q in g["params"]))
            image = image_step(old, read_step(optimizer, p, before=old), rows=rows)
            told = optimizer.telemetry[p]
            on_sphere = isinstance(optimizer, optim.AdamG | optim.AdaGradG)
            torch.testing.assert_close(told[:, 0], torch.ones_like(told[:, 0]) if on_sphere else image.radius)
            torch.testing.assert_close(told[:, 1], image.angle, rtol=1e-7, atol=1e-12)
            torch.testing.assert_close(told[:, 2], image.effective_lr, rtol=1e-7, atol=1e-12)
            torch.testing.assert_close(told[:, 6], image.radial, rtol=1e-7, atol=1e-12)
            _, reached = geometry.split(Layout(rows).rows(p.detach()))
            torch.testing.assert_close(image.next_direction, reached, rtol=1e-7, atol=1e-10)


def told_by_hand(x: np.ndarray, gradient: np.ndarray, x_next: np.ndarray) -> list[float]:
    """Radius, angle, next radius, gradient norm and defect of one row, from what is seen from outside."""
    r, r_next, slope = (float(np.sqrt((q * q).sum())) for q in (x, x_next, gradient))
    angle = np.arccos((x @ x_next) / (r * r_next))
    return [r, angle, r_next, slope, abs(float(x @ gradient)) / (r * slope)]


@pytest.mark.parametrize("maximize", [False, True])
def test_telemetry_against_what_is_seen_from_outside(make: Make, maximize: bool) -> None:
    """Also for joint rows, gradients that are not tangent, and L2, which is no part of the gradient told."""
    optimizer = make(groups(torch.float64), maximize=maximize)
    optimizer.emit()
    columns = [TELEMETRY.index(name) for name in ("radius", "angle", "next_radius", "gradient_norm", "defect")]
    for k in range(3):
        set_gradients(optimizer, k)
        seen = []
        for group in (group for group in optimizer.param_groups if "rows" in group):
            sets = [group["params"]] if group.get("joint") else [[p] for p in group["params"]]
            seen += [
                (Layout(group["rows"]), params, Layout(group["rows"]).join(params).detach().clone()) for params in sets
            ]
        optimizer.step()
        for layout, params, before in seen:
            x, after = before.numpy(), layout.join(params).detach().numpy()
            gradients = layout.join([p.grad for p in params]).numpy()
            if isinstance(
                optimizer, optim.AdamG | optim.AdaGradG
            ):  # the step starts at u, where Lemma 1 has ∇L(u) = r∇L(x)
                r = np.sqrt((x * x).sum(axis=1, keepdims=True))
                x, gradients = x / r, gradients * r
            expected = [told_by_hand(*rows) for rows in zip(x, gradients, after, strict=True)]
            told = optimizer.telemetry[params[0]][:, columns]
            torch.testing.assert_close(told, torch.tensor(expected), rtol=1e-7, atol=1e-9)


def test_telemetry_of_rows_without_a_direction_or_gradient(make: Make) -> None:
    rows = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0], [1.0, 2.0]])
    p = torch.nn.Parameter(rows.clone())
    optimizer = make([{"params": [p], "rows": "filter"}])
    optimizer.emit()
    p.grad = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1e-30, 0.0]])
    optimizer.step()
    told = dict(zip(TELEMETRY, optimizer.telemetry[p].unbind(1), strict=True))
    assert optimizer.telemetry[p].isfinite().all()
    torch.testing.assert_close(told["defect"][:3], torch.tensor([5**-0.5, 0.0, 0.0]))
    torch.testing.assert_close(told["effective_lr"][1], torch.tensor(0.0))
    torch.testing.assert_close(told["gradient_norm"][1:3], torch.tensor([1.0, 0.0]))


def test_all_telemetry_lies_in_one_tensor_that_stays(make: Make) -> None:
    optimizer = make(groups())
    optimizer.emit()
    [buffer] = optimizer.telemetry.buffers
    assert buffer.shape == (sum(told.shape[0] for told in optimizer.telemetry.values()), len(TELEMETRY))
    for p, told in optimizer.telemetry.items():
        index, rows = optimizer.telemetry.place(p)
        assert optimizer.telemetry.buffers[index][rows].data_ptr() == told.data_ptr()
        assert told.shape == buffer[rows].shape
    first, *others = parameters(optimizer)
    train(optimizer)
    kept = optimizer.telemetry[first].clone()
    for p in others:
        p.grad = torch.ones_like(p)
    first.grad = None
    optimizer.step()
    optimizer.emit()
    assert optimizer.telemetry.buffers[0] is buffer
    torch.testing.assert_close(optimizer.telemetry[first], kept, rtol=0, atol=0)
    extra = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra], "rows": "filter"})
    assert optimizer.telemetry[extra].shape == (3, len(TELEMETRY))
    assert [each.dtype for each in optimizer.telemetry.buffers] == [torch.float32, torch.float64]
    torch.testing.assert_close(optimizer.telemetry[first], kept, rtol=0, atol=0)
    train(optimizer)
    assert (optimizer.telemetry[extra][:, 0] > 0).all()


def test_a_joint_set_tells_under_its_first_parameter_whichever_has_a_gradient(make: Make) -> None:
    weight, bias = torch.nn.Parameter(torch.ones(4, 5)), torch.nn.Parameter(torch.ones(4))
    optimizer = make([{"params": [weight, bias], "rows": 2, "joint": True}])
    optimizer.emit()
    bias.grad = torch.ones(4)
    optimizer.step()
    assert list(optimizer.telemetry) == [weight]
    on_sphere = isinstance(optimizer, optim.AdamG | optim.AdaGradG)
    torch.testing.assert_close(optimizer.telemetry[weight][:, 0], torch.full((2,), 1.0 if on_sphere else 2**0.5))


def test_telemetry_covers_joint_rows_and_can_be_stopped(make: Make) -> None:
    optimizer = make(groups())
    assert optimizer.telemetry is None
    optimizer.emit()
    train(optimizer)
    sizes = {tuple(p.shape): told.shape[0] for p, told in optimizer.telemetry.items()}
    assert sizes == {(6, 4, 3, 3): 6, (3, 5): 3, (4, 3, 2): 3, (4, 5): 2}
    assert all((told[:, :2] > 0).all() for told in optimizer.telemetry.values())
    memory = {p: told.data_ptr() for p, told in optimizer.telemetry.items()}
    train(optimizer)
    assert memory == {p: told.data_ptr() for p, told in optimizer.telemetry.items()}
    optimizer.emit(False)
    train(optimizer)
    assert optimizer.telemetry is None


def test_emitting_changes_no_step(make: Make) -> None:
    one, other = make(groups()), make(groups())
    one.emit()
    train(one)
    train(other)
    assert_same(one, other)


def test_reading_needs_the_point_before_where_the_momentum_moved() -> None:
    optimizer = optim.Adam(groups(radial_alone=True), without="abc")
    train(optimizer, 1)
    with pytest.raises(ValueError, match="pass before="):
        read_step(optimizer, parameters(optimizer)[0])


def test_joint_rows_are_read_where_nothing_must_be_scaled_back() -> None:
    for without, readable in (("", True), ("b", True), ("abc", False)):
        made = [group for group in groups(radial_alone=True) if "joint" in group]
        optimizer = optim.Adam(made, without=without)
        p = parameters(optimizer)[0]
        before = p.detach().clone()
        train(optimizer, 1)
        if readable:
            assert read_step(optimizer, p, before=before).a.shape == p.shape
        else:
            with pytest.raises(UnreadableOptimizerError, match="span several parameters"):
                read_step(optimizer, p, before=before)


def test_a_rate_keeps_its_digits() -> None:
    """0.1 is not a float32 number; the default dtype has no part in it."""
    optimizer = optim.SGD(groups(torch.float64, radial_alone=True), lr=0.1)
    optimizer.emit()
    before = parameters(optimizer)[0].detach().flatten(1).clone()
    train(optimizer, 1)
    p = parameters(optimizer)[0]
    expected = 0.1 / (before * p.detach().flatten(1)).sum(1)
    torch.testing.assert_close(optimizer.telemetry[p][:, 2], expected, rtol=1e-13, atol=0)
