"""Directions of chosen rows are those of the weights after each observed step."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import steradian as st
from steradian import watch
from steradian.groups import Layout
from steradian.reporting.rows import trajectories
from steradian.watching.records import read_run

from small import groups_of, rows, set_gradients, train


def directions(found, group, row):
    """{step: direction} of one row."""
    table = found.paths[(found.paths["group"] == group) & (found.paths["row"] == row)]
    return dict(zip(table["step"].tolist(), map(np.asarray, table["direction"]), strict=True))


@pytest.mark.parametrize("layout", ["filter", ("axis", 1)])
def test_paths_go_through_flushes_and_through_weights_that_move(layout, tmp_path):
    params = rows((3, 4), (2, 5), dtype=torch.float32)
    options = [{**group, "rows": layout} for group in groups_of(params)]
    optimizer = st.optim.Adam(options, lr=0.05, without="abc")
    chosen, expected = [("w", params[0], 2), ("v", params[1], 0)], {}
    with watch(optimizer, to=tmp_path, every=1, paths={"w": [2], "v": [0]}) as watcher:
        for step in range(80):
            if step == 10:
                watcher.flush()
            if step == 60:
                params[0].data = params[0].data.clone()
            train(optimizer, params, 1, first=step)
            for name, param, row in chosen:
                x = Layout(layout).rows(param.detach())[row]
                expected[name, row, step] = (x / x.norm()).numpy().copy()
    assert watcher.error is None
    found = read_run(tmp_path)
    for name, _, row in chosen:
        here = directions(found, name, row)
        assert sorted(here) == list(range(80))
        for step, direction in here.items():
            np.testing.assert_allclose(direction, expected[name, row, step], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["filter", "tensor"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_path_goes_on_in_its_coordinates_when_the_memory_format_changes(at, layout, tmp_path):
    [param] = params = rows((3, 2, 3, 4), dtype=torch.float32)
    options = [{**group, "rows": layout} for group in groups_of(params)]
    optimizer = st.optim.Adam(options, lr=0.05, without="abc")
    expected, row = [], int(layout == "filter")
    with watch(optimizer, to=tmp_path, paths={"w": [row]}):
        for step in range(6):
            if step == at:
                param.data = param.data.to(memory_format=torch.channels_last)
            train(optimizer, params, 1, first=step)
            x = Layout(layout).rows(param.detach())[row]
            expected.append((x / x.norm()).numpy().copy())
    found = directions(read_run(tmp_path), "w", row)
    np.testing.assert_allclose(np.stack([found[step] for step in range(6)]), expected, atol=1e-6)


def test_a_row_at_the_origin_has_no_direction_and_is_no_point_of_a_trajectory(tmp_path):
    [param] = params = rows((3, 4), dtype=torch.float32)
    optimizer = torch.optim.SGD(groups_of(params), lr=0.05)
    with watch(optimizer, to=tmp_path, paths={"w": [0]}):
        for step in range(4):
            set_gradients(params, step)
            if step >= 2:
                param.data[0], param.grad[0] = 0, 0
            optimizer.step()
    found = directions(read_run(tmp_path), "w", 0)
    assert [np.isnan(found[step]).all() for step in range(4)] == [False, False, True, True]
    [[path]] = trajectories([read_run(tmp_path).paths]).values()
    assert path.steps.tolist() == [0, 1]


def test_a_row_at_infinity_has_no_direction(tmp_path):
    [param] = params = rows((3, 4), dtype=torch.float32)
    optimizer = torch.optim.SGD(groups_of(params), lr=0.05)
    with watch(optimizer, to=tmp_path, paths={"w": [0, 1]}) as watcher:
        for step in range(4):
            set_gradients(params, step)
            if step == 2:
                param.data[0, 0] = torch.inf
            optimizer.step()
    assert watcher.error is None
    found = {row: directions(read_run(tmp_path), "w", row) for row in (0, 1)}
    assert [np.isnan(found[0][step]).all() for step in range(4)] == [False, False, True, True]
    assert np.isfinite([found[1][step] for step in range(4)]).all()


def test_a_long_training_keeps_ever_fewer_points(tmp_path):
    params = rows((3, 4), dtype=torch.float32)
    optimizer = st.optim.Adam(groups_of(params), lr=0.05, without="abc")
    with watch(optimizer, to=tmp_path, every=1, rows_every=0):
        train(optimizer, params, 600)
    found = directions(read_run(tmp_path), "w", 0)
    gaps = [b - a for a, b in pairwise(found)]
    assert min(found) == 0
    assert gaps == [1] * 127 + [2] * 64 + [4] * 64 + [8] * 11


def test_long_rows_have_paths_only_if_they_are_named(tmp_path):
    def recorded(folder, **options):
        params = rows((2, 1024), (2, 1025), dtype=torch.float32)
        optimizer = torch.optim.SGD(groups_of(params), lr=0.05)
        with watch(optimizer, to=tmp_path / folder, **options):
            train(optimizer, params, 2)
        table = read_run(tmp_path / folder).paths
        columns = (table[name] for name in ("step", "group", "row", "direction"))
        return [(step, group, row, len(u)) for step, group, row, u in zip(*columns, strict=True)]

    assert recorded("usual") == [(0, "w", 0, 1024), (1, "w", 0, 1024)]
    assert recorded("named", paths={"v": [1]}) == [(0, "v", 1, 1025), (1, "v", 1, 1025)]
