"""What the steps tell about themselves: the telemetry, and `read_step` on our optimizers."""

import pytest
import torch

from optim.table import TABLE, Make, assert_same, groups, parameters, set_gradients, train
from steradian import geometry, optim
from steradian.groups import Layout
from steradian.image import image_step
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
            _, reached = geometry.split(Layout(rows).rows(p.detach()))
            torch.testing.assert_close(image.next_direction, reached, rtol=1e-7, atol=1e-10)


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
