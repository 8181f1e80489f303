"""Statistics over the rows of groups, sorted and selected, against numpy's."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

import steradian as st
from steradian import watch
from steradian.watching import statistics
from steradian.watching.records import STATISTICS

from small import groups_of, rows, set_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (3, 1, 64, 130, 0, 65)
EDGES = np.cumsum([0, *LENGTHS]).tolist()
SPANS = [slice(start, stop) for start, stop in pairwise(EDGES)]


def numbers(dtype):
    """Numbers of every kind: ties, both infinities, both zeros, NaN, and some that are hardly numbers any more."""
    values = torch.randn(2, 3, EDGES[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0, 0, 5] = math.nan
    values[0, 0, 70:80] = -math.inf
    values[0, 1, 10] = math.inf
    values[0, 1, 2] = -math.nan
    values[0, 1, 68:] = math.inf
    values[0, 2] = values[0, 2].round()
    values[0, 2, :4] = torch.tensor([0.0, -0.0, 0.0, -5.0])
    values[1, 0] = 3.0
    values[1, 1] *= torch.finfo(dtype).tiny
    values[1, 2] *= torch.finfo(dtype).max / 1000
    return values


def by_numpy(group):
    """In the order of STATISTICS, in float64; NaN throughout where the mean is."""
    x = np.sort(group.double().numpy())
    with np.errstate(invalid="ignore"):
        mean = x.mean() if len(x) else math.nan
    if math.isnan(mean):
        return np.full(len(STATISTICS), math.nan)
    return np.array([x.min(), *(quantile(x, level) for level in (0.1, 0.5, 0.9)), x.max(), mean])


def quantile(ordered, level):
    """As numpy has it, and between two infinities of one sign that infinity."""
    share, low = math.modf(level * (len(ordered) - 1))
    below, above = ordered[int(low)], ordered[min(int(low) + 1, len(ordered) - 1)]
    if np.isfinite(ordered).all():
        return np.quantile(ordered, level)
    return below if share == 0 or below == above else below + (above - below) * share


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("selected", [False, True])
def test_statistics_are_those_of_numpy(selected, dtype, monkeypatch):
    monkeypatch.setattr(statistics, "runs_kernels", lambda device: selected)
    values = numbers(dtype)
    reduction = statistics.Statistics(SPANS, device=DEVICE)
    assert bool(reduction.selected) == selected
    found = reduction(values.to(DEVICE)).cpu().double().numpy()
    close = {"rtol": 1e-6, "atol": 2e-45} if dtype == torch.float32 else {"rtol": 1e-13, "atol": 1e-323}
    for line in np.ndindex(2, 3):
        for k, span in enumerate(SPANS):
            want, case = by_numpy(values[line][span]), f"{line} {LENGTHS[k]}"
            np.testing.assert_allclose(found[(*line, k)][:-1], want[:-1], **close, err_msg=case)
            # Numbers that cancel each other leave a mean that is exact to their size, not to its own.
            size = np.abs(want).max() if np.isfinite(want).all() else 0.0
            np.testing.assert_allclose(
                found[(*line, k)][-1], want[-1], close["rtol"], close["rtol"] * size, err_msg=case
            )


@pytest.mark.parametrize("selected", [False, True])
def test_very_long_groups_beside_short_ones(selected, monkeypatch):
    monkeypatch.setattr(statistics, "runs_kernels", lambda device: selected)
    spans = [slice(0, 9_000), slice(9_000, 9_100), slice(9_100, 17_292)]
    values = torch.randn(3, 17_292)
    values[1] = (4 * values[1]).round()
    values[2, 4_000:9_000] = math.inf
    values[2, 17_000] = math.nan
    found = statistics.Statistics(spans, device=DEVICE)(values.to(DEVICE)).cpu().double().numpy()
    for line in range(3):
        for k, span in enumerate(spans):
            np.testing.assert_allclose(found[line, k], by_numpy(values[line, span]), rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the host does not wait for a CPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("ours", [True, False])
def test_a_flush_does_not_make_the_host_wait(ours, tmp_path):
    params = rows((4, 5), (300, 5), dtype=torch.float32, device=DEVICE)
    kind = st.optim.Adam if ours else torch.optim.Adam
    optimizer = kind(groups_of(params), lr=0.05, weight_decay=0.01, capturable=True)
    with watch(optimizer, every=1, to=tmp_path / "run", rows_every=3) as watcher:
        for step in range(600):
            set_gradients(params, step)
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert watcher.error is None
    assert watcher.records()["step"].nunique() == 600
