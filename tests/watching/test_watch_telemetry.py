"""Records of our fused optimizers, whose steps write to the buffer themselves, are those of copied telemetry."""

import pytest
import torch

import steradian as st
from steradian import watch

from small import groups_of, rows, series, train

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUANTITIES = ("radius", "angle", "effective_lr", "gradient_norm", "defect")


def make():
    params = rows((4, 5), (3, 7), dtype=torch.float32, device=DEVICE)
    return params, st.optim.Adam(groups_of(params), lr=0.05, weight_decay=0.01, without="abc", fused=True)


def assert_same(one, other):
    for quantity in QUANTITIES:
        for group in ("w", "v"):
            here, there = (series(table, quantity, group) for table in (one, other))
            assert here.keys() == there.keys()
            assert here == pytest.approx(there, rel=1e-6, abs=1e-7, nan_ok=True), (quantity, group)


def reference(steps):
    """The records of the same training, where the step is not fused and everything is copied."""
    params = rows((4, 5), (3, 7), dtype=torch.float32, device=DEVICE)
    optimizer = st.optim.Adam(groups_of(params), lr=0.05, weight_decay=0.01, without="abc", fused=False)
    with watch(optimizer) as watcher:
        train(optimizer, params, steps)
    return watcher.records()


def test_records_of_fused_steps_are_those_of_reference_steps():
    params, optimizer = make()
    with watch(optimizer) as watcher:
        train(optimizer, params, 5)
        watcher.flush()  # observations begin at the front again
        train(optimizer, params, 4, first=5)
    assert watcher.error is None
    expected = reference(9)
    for quantity in QUANTITIES:
        here, there = series(watcher.records(), quantity), series(expected, quantity)
        assert here == pytest.approx(there, rel=1e-4, abs=1e-6), quantity


def test_more_steps_than_a_buffer_holds(monkeypatch):
    monkeypatch.setattr("steradian.watching.buffer._STEPS", 3)
    params, optimizer = make()
    with watch(optimizer) as watcher:
        train(optimizer, params, 8)
    with_copies = make()
    with watch(with_copies[1]) as other, watch(with_copies[1]):  # the second one takes the place
        train(with_copies[1], with_copies[0], 8)
    assert_same(watcher.records(), other.records())


def test_two_watches_of_one_optimizer():
    params, optimizer = make()
    with watch(optimizer) as one:
        with watch(optimizer) as two:
            train(optimizer, params, 4)
        train(optimizer, params, 3, first=4)
    expected = reference(7)
    for watcher, steps in ((one, 7), (two, 4)):
        assert watcher.error is None
        here, there = series(watcher.records(), "radius"), series(expected, "radius")
        assert here == pytest.approx({k: there[k] for k in range(steps)}, rel=1e-5)


def test_steps_that_do_not_write_to_the_buffer_are_recorded():
    """A replayed graph writes to the telemetry alone; a step without a parameter does not write all rows."""
    params, optimizer = make()
    with watch(optimizer) as watcher:
        train(optimizer, params, 3)
        with watcher.around():
            for buffer in optimizer.telemetry.buffers:
                buffer[:, 0] = 17
        params[0].grad = None
        optimizer.step()
    assert series(watcher.records(), "radius")[3] == 17
    assert list(series(watcher.records(), "radius")) == [0, 1, 2, 3]
    assert list(series(watcher.records(), "radius", "v")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("every", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_between_observed_ones_are_not_mistaken_for_them(every):
    params, optimizer = make()
    with watch(optimizer, every=every) as watcher:
        train(optimizer, params, 7)
    expected = series(reference(7), "angle")
    assert series(watcher.records(), "angle") == pytest.approx({k: expected[k] for k in range(0, 7, every)}, rel=1e-4)


def test_nothing_is_written_to_a_watch_that_stopped():
    params, optimizer = make()
    optimizer.emit()
    with watch(optimizer) as watcher:
        train(optimizer, params, 3)
    assert watcher.error is None
    assert optimizer.telemetry.also is None
