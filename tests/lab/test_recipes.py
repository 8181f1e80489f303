"""Recipes hold the trainings that the paper describes."""

from dataclasses import replace

import pytest
import torch

from steradian.groups import Group, Groups
from steradian.lab import paper
from steradian.lab.config import match_name
from steradian.lab.recipes import RECIPES, accuracy_tables, grid, pretraining, trajectories
from steradian.lab.registry import METHODS


def test_the_tables_are_seven_columns_of_seven_methods_and_five_seeds():
    for norm in ("bn", "bn-no-affine"):
        configs = accuracy_tables(norm=norm)
        assert len({c.key for c in configs}) == len(configs) == 7 * 7 * 5
        assert {(c.model, c.data) for c in configs} == set(paper.COLUMNS)
        assert {(c.epochs, c.milestones, c.batch_size, c.norm) for c in configs} == {(405, (135, 225, 315), 128, norm)}
    [one] = accuracy_tables(columns=["ResNet20 cifar10"], methods=["Adam w/o (abc)"], seeds=1)
    assert (one.lr, one.weight_decay, one.betas) == (1e-3, 5e-4, (0.9, 0.99))
    [sphere] = accuracy_tables(columns=["VGG16 cifar10"], methods=["AdamG"], seeds=1)
    assert (sphere.method, sphere.lr, sphere.weight_decay, sphere.betas) == ("AdamG†", 1e-2, 2.5e-4, (0.9, 0.999))


def test_the_released_hyper_parameters_are_the_printed_ones_but_shifted_on_cifar10():
    """Under the heading of each method the paper prints λ of the one before it in the read-me's order."""
    printed, released = paper.BEST, paper.RELEASED
    for column in paper.COLUMNS:
        for method in ("Adam", "AdamW†", "Adam w/o (a)", "Adam w/o (abc)"):
            assert printed[method][column].beta2 == released[method][column].beta2
            assert (printed[method][column] == released[method][column]) == (column[1] != "cifar10")
        if column[1] == "cifar10":
            for heading, method in (("AdamW†", "Adam"), ("AdamG†", "AdamW†"), ("Adam w/o (abc)", "Adam w/o (a)")):
                assert printed[heading][column].weight_decay == released[method][column].weight_decay
            assert printed["Adam"][column].weight_decay == released["SGD-M"][column].weight_decay


def test_tables_can_take_settings_and_networks_of_the_released_code():
    chosen = {"columns": ["ResNet20"], "methods": ["Adam w/o (abc)"], "seeds": 1}
    [one] = accuracy_tables(**chosen, settings="released", built_as="released")
    [printed] = accuracy_tables(**chosen)
    assert (one.weight_decay, one.released) == (1e-3 / 128, True)
    assert (printed.weight_decay, printed.released) == (5e-4, False)
    with pytest.raises(ValueError, match="settings must be one of printed, released"):
        accuracy_tables(settings="guessed")


def test_adamg_as_released_is_plain_adam_with_the_settings_of_adamg():
    [inverted] = accuracy_tables(columns=["ResNet20 cifar10"], methods=["AdamG as released"], seeds=1)
    [sphere] = accuracy_tables(columns=["ResNet20 cifar10"], methods=["AdamG"], seeds=1)
    assert replace(inverted, method=sphere.method) == sphere
    assert inverted.method not in {config.method for config in accuracy_tables()}
    filters, gain = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.ones(4))
    rows = [Group(("filters",), "filter", 4, 3, "bn", 0.0)]
    optimizer = METHODS[inverted.method](Groups({"filters": filters, "gain": gain}, rows), inverted)
    twin = filters.detach().double().clone()
    filters.grad, gain.grad = torch.randn(4, 3), torch.ones(4)
    optimizer.step()
    gradient = filters.grad.double() + inverted.weight_decay * twin
    torch.testing.assert_close(filters.double(), twin - 0.01 * gradient / (gradient.abs() + 1e-8), atol=1e-7, rtol=0)
    torch.testing.assert_close(gain.detach(), torch.full((4,), 0.999))


def test_recipes_scale():
    for name, recipe in RECIPES.items():
        if name == "trajectories":
            continue  # they start from SGD-M, with its own milestones
        configs = recipe(data="digits", columns=["VGG16"], methods=["Adam"], epochs=9, seeds=2)
        assert {(c.model, c.data, c.method, c.epochs, c.milestones) for c in configs} == {
            ("VGG16", "digits", "Adam", 9, (3, 5, 7))
        }
        assert {c.seed for c in configs} == {0, 1}
        with pytest.raises(ValueError, match="columns must be among"):
            recipe(columns=["ResNet50"])
        with pytest.raises(ValueError, match="methods must be among"):
            recipe(methods=["Lion"])


def test_names_match_by_letters_and_digits():
    """Every method of every recipe by its letters and digits alone, and no two of them are one."""
    assert len({match_name(name.lower(), METHODS) for name in METHODS}) == len(METHODS)
    for typed, name in (("adamw", "AdamW†"), ("ADAM-WO-ABC", "Adam w/o (abc)"), ("sgdm", "SGD-M"), ("adam", "Adam")):
        [one] = accuracy_tables(data="digits", columns=["resnet20-digits"], methods=[typed], seeds=1)
        assert (one.method, one.model) == (name, "ResNet20")
    both = accuracy_tables(columns=["vgg16 CIFAR10", "ResNet-20"], methods=["Adam"], seeds=1)
    assert [c.column for c in both] == ["ResNet20 cifar10", "VGG16 cifar10"]


def test_the_grid_is_the_papers():
    configs = grid(columns=["ResNet20"], methods=["Adam", "SGD-M"], seeds=1)
    assert len(configs) == 4 * 8 * 3 + 4 * 8
    few = grid(columns=["ResNet20"], methods=["Adam", "SGD-M"], lr=[0.5], weight_decay=[0.0, 0.25], beta2=[0.9, 0.8])
    assert {(c.lr, c.weight_decay, c.betas[1]) for c in few if c.method == "Adam"} == {
        (0.5, 0.0, 0.9),
        (0.5, 0.0, 0.8),
        (0.5, 0.25, 0.9),
        (0.5, 0.25, 0.8),
    }
    assert len(few) == 4 + 2
    best = paper.BEST["Adam"][("ResNet20", "cifar10")]
    assert any((c.lr, c.weight_decay, c.betas[1]) == (1e-3, best.weight_decay, best.beta2) for c in configs)


def test_trajectories_start_from_the_pretrained_networks():
    starts = pretraining()
    assert [c.norm for c in starts] == ["bn", "bn-no-affine", "wn"]
    assert {(c.epochs, c.milestones, c.lr, c.weight_decay) for c in starts} == {(200, (80, 120, 160), 0.1, 1e-4)}
    made = trajectories(starts)
    assert [c.method for c in made[:3]] == ["SGD", "AdaGradG", "AdaGrad"]
    assert [c.lr for c in made[:3]] == [1e-2, 1e-2, 1e-3]
    assert {c.start for c in made[:3]} == {starts[0].key}
