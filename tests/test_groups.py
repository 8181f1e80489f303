"""Layouts: every cut against an explicit loop, there and back, and as views; groups, changed, saved and printed."""

import copy
import dataclasses
import itertools
import operator
import re
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from steradian import find_groups
from steradian.groups import Group, Groups, Layout, Pair
from steradian.names import fold


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
    for part, original in zip(rows.split([18, 2], dim=1), (weight, bias), strict=True):
        assert torch.equal(layout.restore(part, original.shape), original)


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
        (lambda: Layout(("grid", 1, 1, 1)).rows(torch.zeros(8, 2)), "need a dimension 2"),
        (lambda: Layout(2).rows(torch.tensor(1.0)), "need a dimension 0"),
        (lambda: Layout("filter").restore(torch.zeros(2, 3), (2, 4)), r"\(2, 4\)"),
        (lambda: Layout("filter").join([torch.zeros(2), torch.zeros(3)]), "different numbers of rows"),
        (lambda: Layout("filter").join([]), "at least one"),
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
    "data-parallel": nn.DataParallel,
    "data-parallel and compiled": lambda model: torch.compile(nn.DataParallel(torch.compile(model))),
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
    with pytest.raises(ValueError, match=r"the model also has '3\.weight'"):
        groups.of(nn.Sequential(*blocks(), nn.Linear(2, 2)))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", ["found", "loaded"])
def test_saved_groups_come_back_for_a_wrapped_model_and_from_one(change, where, tmp_path):
    plain, path = blocks(), tmp_path / "runs" / "groups.json"
    plain[2].requires_grad_(False)
    wrapped = CHANGES[change](copy.deepcopy(plain))
    first, second = (wrapped, plain) if where == "found" else (plain, wrapped)
    found = find_groups(first, torch.randn(5, 6, generator=torch.Generator().manual_seed(0)))
    assert list(found.params) == [name for name, _ in blocks().named_parameters()]
    assert found.groups[0].reason == "0.1 (LayerNorm)"
    found.save(path)
    loaded = Groups.load(path, second)
    for field in dataclasses.fields(Groups):
        if field.name != "params":
            assert getattr(loaded, field.name) == getattr(found, field.name), field.name
    assert str(loaded) == str(found)
    assert all(map(operator.is_, loaded.params.values(), second.parameters()))
    optimizer = torch.optim.SGD(loaded.param_groups(), lr=0.1)
    assert [group.get("rows") for group in optimizer.param_groups] == ["tensor", None]


def test_every_kind_of_spec_and_every_remark_is_saved(tmp_path):
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.Linear(4, 4), nn.Linear(4, 4))
    specs = ["filter", "tensor", 2, ("axis", 1), ("grid", 2, -1)]
    groups = Groups(dict(model.named_parameters()), passes=(7, 6))
    groups.groups = [Group(("0.weight", "0.bias"), spec, 2, 3, "a layer, näher", 1e-300, 1, 2) for spec in specs]
    groups.facts = [Group(("1.weight",), ("grid", 1, 2), 2, 8, "no known layer", 0.0)]
    groups.pairs = [Pair(("1.weight", "1.bias"), ("2.weight",), ("filter", 4), (("axis", 1),), 4, "1 meets 2")]
    groups.partial, groups.aliases, groups.notes = {"1.bias": "half"}, {"2.bias": ["x", "y"]}, ["ε"]
    groups.save(tmp_path / "groups.json")
    assert Groups.load(tmp_path / "groups.json", model) == groups


def test_groups_of_another_model_are_not_loaded(tmp_path):
    path, frozen = tmp_path / "groups.json", blocks().requires_grad_(False)
    frozen[0].requires_grad_(True)
    find_groups(frozen, torch.randn(5, 6)).save(path)
    wider = blocks()
    wider[1], wider[2] = nn.Linear(4, 5), nn.Linear(5, 2)
    for model, words in [
        (wider, r"'1\.weight' has shape \(3, 4\), and the model has one of shape \(5, 4\)"),
        (blocks()[:2], r"'2\.weight' has shape \(2, 3\), and the model has no such parameter"),
        (nn.Sequential(*frozen, nn.Linear(2, 2)), r"the model also has '3\.weight'"),
        (blocks(), r"'1\.weight' was frozen and not tested, and in the model it requires a gradient"),
    ]:
        with pytest.raises(ValueError, match=words):
            Groups.load(path, model)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 99}'])
def test_another_file_is_refused(content, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x\.json"):
        Groups.load(tmp_path / "x.json", blocks())
    with pytest.raises(ValueError, match=r"path must be a file that Groups\.save wrote, got Sequential$"):
        Groups.load(blocks(), tmp_path / "x.json")


class Layers(nn.Module):
    """Layers with BN in front of each other, which differ in nothing but their number."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(depth))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def test_printing_folds_layers_that_repeat():
    groups = find_groups(Layers(12), torch.randn(8, 6))
    text = str(groups)
    assert re.search(
        r"^layers\.\{0-11\}\.0\.weight +filter +6 × 6 +layers\.\{0-11\}\.1 \(BatchNorm1d\) +\S+$", text, re.M
    )
    assert "72 rows in 12 parameters: 432 of 662 numbers" in text
    assert "no effect: 12 parameters: layers.{0-11}.0.bias" in text
    assert f"{max(group.defect for group in groups.groups):.1e}" in text
    assert len(text.splitlines()) < 12


def test_printing_folds_pairs_and_facts():
    groups = Groups(dict(Layers(4).named_parameters()))
    for k in range(4):
        groups.facts.append(Group((f"layers.{k}.1.weight",), "filter", 6, 1, f"layers.{k + 1}.1 (BatchNorm1d)", 0.0))
    for k in range(3):
        sides = (f"layers.{k}.0.weight", f"layers.{k}.0.bias"), (f"layers.{k + 1}.0.weight",)
        groups.pairs.append(Pair(*sides, ("filter", "filter"), (("axis", 1),), 6, f"through layers.{k} (Block)"))
    groups.pairs.append(Pair(("layers.3.0.weight",), ("head.weight",), ("tensor",), ("tensor",), 1, "linear"))
    stage = tuple(f"layers.{k}.1.weight" for k in range(4)), ("head.weight",)
    groups.pairs.append(Pair(*stage, ("filter",) * 4, (("axis", 1),), 6, "linear"))
    lines = str(groups).splitlines()
    assert "fact: layers.{0-3}.1.weight are invariant as 'filter' (6 × 1, layers.{1-4}.1 (BatchNorm1d))" in lines
    a, b = "layers.{0-2}.0.weight 'filter' + layers.{0-2}.0.bias 'filter'", "layers.{1-3}.0.weight ('axis', 1)"
    assert f"pair: {a} against {b} (6 pairs, through layers.{{0-2}} (Block))" in lines
    assert "pair: layers.3.0.weight 'tensor' against head.weight 'tensor' (1 pair, linear)" in lines
    assert "pair: layers.{0-3}.1.weight 'filter' against head.weight ('axis', 1) (6 pairs, linear)" in lines
    assert "pair: layers.1.0.weight" in groups.explain("layers.2.0.weight")


def test_printing_wraps_to_the_terminal(monkeypatch):
    groups = find_groups(Layers(4), torch.randn(8, 6))
    groups.groups[1] = dataclasses.replace(groups.groups[1], reason="elsewhere " * 9)
    wide = str(groups)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "64")
    narrow = str(groups)
    assert max(map(len, wide.splitlines())) > 100
    assert max(map(len, narrow.splitlines())) <= 64
    assert sorted("".join(narrow.split())) == sorted("".join(wide.split()))


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["a.0.w", "a.1.w"], ["a.0.w", "a.1.w"]),
        (["a.0.w", "a.1.w", "a.2.w", "a.4.w"], ["a.{0-2,4}.w"]),
        (["a.0.w", "b", "a.1.w", "c", "a.2.w"], ["a.{0-2}.w", "b", "c"]),
        ([f"a.{i}.e.{j}.w" for i in range(3) for j in range(8)], ["a.{0-2}.e.{0-7}.w"]),
        # A product that lacks a corner is told apart.
        ([f"a.{i}.e.{j}.w" for i in range(3) for j in range(8) if i + j], ["a.0.e.{1-7}.w", "a.{1,2}.e.{0-7}.w"]),
        (["a.0.w + a.0.b", "a.1.w + a.1.b", "a.2.w + a.2.b"], ["a.{0-2}.w + a.{0-2}.b"]),
        (["a.0.w a.1.n", "a.1.w a.2.n", "a.2.w a.3.n", "a.3.w n"], ["a.{0-2}.w a.{1-3}.n", "a.3.w n"]),
        (["conv1.w", "conv2.w", "conv3.w"], ["conv1.w", "conv2.w", "conv3.w"]),
        (["0.w", "3.w", "6.w"], ["{0,3,6}.w"]),
    ],
)
def test_folding(names, folded):
    found = fold(names)
    assert [text for text, _ in found] == folded
    assert sorted(i for _, members in found for i in members) == list(range(len(names)))


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from("ab")), min_size=1))
def test_a_folded_name_stands_for_its_own_names_alone(entries):
    names = [f"l.{i}.m.{j}.{kind}" for i, j, kind in sorted(entries)]

    def unfold(text):
        match = re.search(r"\{([\d,-]+)\}", text)
        if match is None:
            return [text]
        runs = [run.split("-") for run in match[1].split(",")]
        numbers = [n for run in runs for n in range(int(run[0]), int(run[-1]) + 1)]
        return [name for n in numbers for name in unfold(text.replace(match[0], str(n), 1))]

    found = fold(names)
    assert sorted(name for text, _ in found for name in unfold(text)) == sorted(names)
    for text, members in found:
        assert sorted(unfold(text)) == sorted(names[i] for i in members)


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
    parts = joint.split([Layout(spec).size(t.shape)[1] for t in (w, b)], dim=1)
    assert all(torch.equal(Layout(spec).restore(part, t.shape), t) for part, t in zip(parts, (w, b), strict=True))
