"""Layouts: every cut against an explicit loop, there and back, and as views; rows of a model that was changed."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from steradian import find_groups
from steradian.groups import Layout


def loop(tensor, spec):
    """Rows by indexing, one at a time."""
    if spec == "tensor":
        return [tensor.flatten()]
    if spec == "filter":
        return [part.flatten() for part in tensor]
    if isinstance(spec, int):
        return [part.flatten() for part in tensor.chunk(spec)]
    if spec[0] == "axis":
        return [part.flatten() for part in tensor.unbind(spec[1])]
    counts = [tensor.shape[i] if g == -1 else g for i, g in enumerate(spec[1:])]
    rows = []
    for index in itertools.product(*map(range, counts)):
        part = tensor
        for dim, (i, g) in enumerate(zip(index, counts, strict=True)):
            width = tensor.shape[dim] // g
            part = part.narrow(dim, i * width, width)
        rows.append(part.flatten())
    return rows


SPECS = ["filter", "tensor", 1, 2, 4, 8, ("axis", 0), ("axis", 1), ("axis", -1), ("axis", 2)]
GRIDS = [("grid", 2), ("grid", 2, -1), ("grid", 4, 3), ("grid", -1, -1), ("grid", 1, 3, -1), ("grid", 2, 1, 5)]


@pytest.mark.parametrize("spec", SPECS + GRIDS)
@pytest.mark.parametrize("memory", ["contiguous", "channels_last", "transposed", "strided"])
def test_rows_equal_the_loop_and_come_back(spec, memory):
    x = torch.randn(8, 6, 5, 3)
    if memory == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    elif memory == "transposed":
        x = torch.randn(6, 8, 5, 3).transpose(0, 1)
    elif memory == "strided":
        x = torch.randn(16, 6, 5, 3)[::2]
    layout = Layout(spec)
    rows = layout.rows(x)
    assert rows.shape == layout.size(x.shape)
    torch.testing.assert_close(rows, torch.stack(loop(x, spec)), rtol=0, atol=0)
    torch.testing.assert_close(layout.restore(rows, x.shape), x.contiguous(), rtol=0, atol=0, check_stride=False)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_any_grid_comes_back(blocks, widths):
    dims = min(len(blocks), len(widths))
    shape = [b * w for b, w in zip(blocks[:dims], widths[:dims], strict=True)]
    x = torch.arange(float(torch.tensor(shape).prod())).view(shape)
    layout = Layout(("grid", *blocks[:dims]))
    torch.testing.assert_close(layout.restore(layout.rows(x), shape), x, rtol=0, atol=0)
    assert sorted(layout.rows(x).flatten().tolist()) == x.flatten().tolist()


@pytest.mark.parametrize("spec", ["filter", "tensor", 4, ("axis", 0), ("grid", 4)])
def test_contiguous_rows_are_views(spec):
    x = torch.zeros(8, 6, 5)
    Layout(spec).rows(x).fill_(1)
    assert x.eq(1).all()


def test_a_transposed_convolution_can_be_a_view_too():
    x = torch.zeros(6, 8).t()
    Layout(("axis", 1)).rows(x).fill_(1)
    assert x.eq(1).all()


def test_joint_rows_there_and_back():
    weight, bias = torch.randn(8, 3, 3), torch.randn(8)
    layout = Layout(4)
    rows = layout.join([weight, bias])
    assert rows.shape == (4, 20)
    torch.testing.assert_close(rows[1], torch.cat([weight[2:4].flatten(), bias[2:4]]))
    for back, original in zip(layout.part(rows, [weight.shape, bias.shape]), (weight, bias), strict=True):
        torch.testing.assert_close(back, original, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("spec", "shape", "size"),
    [
        ("filter", (), (1, 1)),
        ("tensor", (), (1, 1)),
        ("filter", (5,), (5, 1)),
        ("filter", (0, 5), (0, 5)),
        ("tensor", (0, 5), (1, 0)),
        ("filter", (5, 0), (5, 0)),
        (("axis", 1), (4, 0, 3), (0, 12)),
    ],
)
def test_small_and_empty_shapes(spec, shape, size):
    x = torch.zeros(shape)
    assert Layout(spec).rows(x).shape == size
    assert Layout(spec).restore(Layout(spec).rows(x), shape).shape == shape


def test_a_layout_is_plain_data():
    assert Layout(["axis", 1]) == Layout(("axis", 1))
    assert Layout(["axis", 1]).spec == ("axis", 1)
    assert len({Layout("filter"), Layout("filter"), Layout(1)}) == 2


@pytest.mark.parametrize(
    "spec", ["filters", 0, -2, True, 1.5, None, ("axis",), ("axis", "1"), ("grid", 0), ("grid",), ()]
)
def test_bad_specs_say_what_is_right(spec):
    with pytest.raises(ValueError, match="rows must be"):
        Layout(spec)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Layout(3).rows(torch.zeros(8, 2)), "do not divide"),
        (lambda: Layout(("axis", 2)).rows(torch.zeros(8, 2)), "need a dimension 2"),
        (lambda: Layout(("grid", 1, 1, 1)).rows(torch.zeros(8, 2)), "need 3 dimensions"),
        (lambda: Layout(2).rows(torch.tensor(1.0)), "cannot be cut"),
        (lambda: Layout("filter").restore(torch.zeros(2, 3), (2, 4)), r"\(2, 4\)"),
        (lambda: Layout("filter").join([torch.zeros(2), torch.zeros(3)]), "different numbers of rows"),
        (lambda: Layout("filter").join([]), "at least one"),
        (lambda: Layout("filter").part(torch.zeros(2, 3), [(2, 4)]), "4 numbers"),
    ],
)
def test_bad_shapes(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)), nn.Linear(4, 3), nn.Linear(3, 2))


CHANGES = {
    "copied": lambda model: model,
    "compiled": torch.compile,
    "parts compiled": lambda model: model.__setitem__(0, torch.compile(model[0])) or model,
    "checkpointed": lambda model: model.__setitem__(0, checkpoint_wrapper(model[0])) or model,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_rows_of_a_model_whose_parameters_are_new(change):
    model = blocks()
    model[2].requires_grad_(False)
    found = find_groups(model, torch.randn(5, 6))
    other = CHANGES[change](copy.deepcopy(model))
    groups = found.of(other)
    assert str(groups) == str(found)
    assert groups.joint == [("0.0.weight", "0.0.bias")]
    names = {id(param): name for name, param in found.params.items()}
    new = {id(param): name for name, param in zip(names.values(), other.parameters(), strict=True)}
    for before, after in zip(found.param_groups(), groups.param_groups(), strict=True):
        assert [new[id(param)] for param in after.pop("params")] == [names[id(p)] for p in before.pop("params")]
        assert after == before
    assert all(param is not other for param, other in zip(found.params.values(), groups.params.values(), strict=True))


def test_rows_of_another_model_are_refused():
    groups = find_groups(blocks(), torch.randn(5, 6))
    wider, shorter = blocks(), blocks()
    wider[1] = nn.Linear(4, 5)
    with pytest.raises(ValueError, match=r"1\.weight.*\(3, 4\).*\(5, 4\)"):
        groups.of(wider)
    with pytest.raises(ValueError, match=r"2\.weight.*no such parameter"):
        groups.of(shorter[:2])


@pytest.mark.parametrize(
    ("spec", "weight", "blocks"),
    [
        (("axis", 1), (4, 6, 3), lambda w, i: w[:, i]),
        (("grid", 1, 2), (4, 6, 3), lambda w, i: w[:, 3 * i : 3 * i + 3]),
        (("grid", 2, -1), (4, 3, 3), lambda w, i: w[2 * (i // 3) : 2 * (i // 3) + 2, i % 3]),
        (("grid", 2, 2), (4, 4, 3), lambda w, i: w[2 * (i // 2) : 2 * (i // 2) + 2, 2 * (i % 2) : 2 * (i % 2) + 2]),
    ],
)
def test_a_bias_goes_with_the_outputs_of_any_weight(spec, weight, blocks):
    """A transposed convolution has its outputs on dimension 1, and inside blocks of dimension 0 if it has groups."""
    outputs = weight[1] * (2 if spec[1] == 2 else 1)
    w, b = torch.randn(weight), torch.randn(outputs)
    joint = Layout(spec).join([w, b])
    for i, row in enumerate(joint):
        assert torch.equal(row, torch.cat([blocks(w, i).flatten(), b.chunk(len(joint))[i]]))
    assert all(map(torch.equal, Layout(spec).part(joint, [w.shape, b.shape]), (w, b)))
