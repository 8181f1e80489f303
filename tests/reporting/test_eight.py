"""The pages of eight kinds of runs in a real browser, and what each says first."""

import re

import eight
import numpy as np
import pytest
from browser import see_all

from steradian.reporting.page import report
from steradian.watching.records import labels, read_run
from steradian.watching.verdict import verdict

OVERPRINTED = """() => {
  const found = [];
  for (const plot of document.querySelectorAll(".plot")) {
    const texts = [...plot.querySelectorAll(".main-svg text")].filter((text) => !text.closest(".hoverlayer"));
    const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width);
    const meet = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from]);
    boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([two, b]) => {
      const overprinted = meet(a, b, "left", "right") > 2 && meet(a, b, "top", "bottom") > 3;
      if (overprinted) found.push(`${plot.closest("figure").id}: ${one} | ${two}`);
    }));
  }
  return found;
}"""
AWAY = """(id) => {
  const target = document.getElementById(id), heading = target.querySelector("h2, h3") ?? target;
  return heading.getBoundingClientRect().top - document.querySelector(".bar").getBoundingClientRect().bottom;
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name → list of runs, each made once."""
    made = {}

    def make(name):
        if name not in made:
            found = eight.RUNS[name](tmp_path_factory.mktemp("eight"))
            made[name] = found if isinstance(found, list) else [found]
        return made[name]

    return make


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            made[name] = report(runs(name), tmp_path_factory.mktemp("pages") / "page.html")
        return made[name]

    return make


def land(tab, link):
    """Click a link of the contents; pixels from the bar to the heading when the figures there are drawn."""
    tab.eval_on_selector(f'nav a[href="#{link}"]', "(link) => link.click()")
    tab.wait_for_function("window.Plotly")
    if tab.locator(f"#{link} > figure").count():
        tab.wait_for_selector(f"#{link} > figure[data-drawn]")
    return tab.evaluate(AWAY, link)


USUAL = [(390, "dark"), (1400, "light")]
SIGHTS = [
    pytest.param(name, width, scheme, marks=() if (width, scheme) == USUAL[k % 2] else pytest.mark.slow)
    for k, name in enumerate(eight.RUNS)
    for width in (390, 1400)
    for scheme in ("light", "dark")
]


@pytest.mark.parametrize(("name", "width", "scheme"), SIGHTS)
def test_links_land_nothing_overprints_nothing_scrolls_sideways(name, width, scheme, page, visit):
    tab = visit(page(name), viewport={"width": width, "height": 900}, color_scheme=scheme)
    links = [link.removeprefix("#") for link in tab.eval_on_selector_all("nav a", "(all) => all.map((a) => a.hash)")]
    assert 0 <= land(tab, links[-2]) <= 8  # nothing above it has been drawn
    assert 0 <= land(tab, links[len(links) // 2]) <= 8
    see_all(tab)
    assert tab.evaluate(OVERPRINTED) == []
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert 0 <= land(tab, links[-1]) <= 8


def of(runs, name):
    """The run, its verdict, and the sentences by kind."""
    [folder] = runs(name)
    run = read_run(folder)
    found = verdict(run)
    return run, found, {sentence.kind: sentence for sentence in found}


def angles(run):
    """The median angle of each layer over the last tenth of the observed steps, in relation to the median layer."""
    table, layers = run.table, {each["name"] for each in run.about["groups"] if each["rows"] > 1}
    part = table[(table["quantity"] == "angle") & (table["statistic"] == "median") & table["group"].isin(layers)]
    wide = part.pivot(index="step", columns="group", values="value")
    last = wide.iloc[-max(5, len(wide) // 10) :].median()
    return last / last[last > 0].median()


@pytest.mark.parametrize("name", eight.RUNS)
def test_layers_are_said_to_turn_apart_if_they_do(name, runs):
    for folder in runs(name):
        run, ratio = read_run(folder), angles(read_run(folder))
        said = {sentence.kind: sentence.group for sentence in verdict(run) if sentence.kind in ("fast", "slow")}
        dead = {"branch.0.weight", "branch.2.weight"} if name == "dead layer" else set()
        moving = ratio[(ratio > 0) & ~ratio.index.isin(dead)]
        expected = {"fast": moving.idxmax()} if moving.max() > 3 else {}
        assert said == expected | ({"slow": moving.idxmin()} if moving.min() < 1 / 3 else {})


@pytest.mark.parametrize("name", ["demo", "three runs"])
def test_what_is_proved_is_counted(name, runs):
    for folder in runs(name):
        run = read_run(folder)
        found = {sentence.kind: sentence.text for sentence in verdict(run)}
        label = labels(run)
        size = {each["name"]: each["rows"] * each["size"] for each in run.about["groups"]}
        proved = sum(size[group] for group in size if label[group] == "invariant")
        assert (
            f"({proved:,} of {sum(size.values()):,}) are invariant: weight decay does not regularize" in found["share"]
        )
        assert not {"not finite", "frozen", "dead", "collapsed", "find_groups"} & set(found)


def test_under_one_cycle_weight_decay_never_finds_its_balance(runs):
    _, found, kinds = of(runs, "one cycle")
    assert "never will be under this schedule: the rate is almost 0" in kinds["balance"].text
    assert "97.8 % of the watched weights (16,812 of 17,190) are invariant" in kinds["share"].text
    assert {sentence.severity for sentence in found} <= {"warning", "note"}


def test_after_warm_up_and_cosine_nothing_is_wrong(runs):
    _, found, _ = of(runs, "warm-up and cosine")
    assert found[0].kind == "healthy"
    assert found[0].text.startswith("Nothing is wrong up to step 196: the median layer turns ")


def test_a_nan_under_lion_is_named_with_its_step(runs):
    _, found, _ = of(runs, "NaN under Lion")
    assert (found[0].kind, found[0].severity) == ("frozen", "bad")
    assert found[0].text.startswith("The optimizer froze after NaN or infinite gradients at step 42: 12 of 12 groups")


def test_a_dead_layer_is_named(runs):
    _, found, _ = of(runs, "dead layer")
    assert (found[0].kind, found[0].severity, found[0].group) == ("dead", "bad", "branch.0.weight")
    assert "2 of 6 layers are dead, with a gradient of exactly 0 since the first observed step: branch.0.weight, " in (
        found[0].text
    )


def test_one_of_198_layers_that_turns_faster_is_named(runs):
    run, found, kinds = of(runs, "Qwen3")
    assert [sentence.kind for sentence in found] == ["fast", "find_groups"]
    assert kinds["fast"].group == "model.layers.17.mlp.up_proj.weight"
    ratio = angles(run)["model.layers.17.mlp.up_proj.weight"]
    assert f"up_proj.weight {ratio:.2g} × (" in kinds["fast"].text


def test_a_long_run_is_judged_by_its_end(runs):
    run, found, _ = of(runs, "100,000 steps")
    table = run.table[(run.table["quantity"] == "angle") & (run.table["statistic"] == "median")]
    last = np.median([values.iloc[-21:].median() for _, values in table.groupby("group", observed=True)["value"]])
    assert re.match(
        rf"Nothing is wrong up to step 99,500: the median layer turns {last:.2g} rad per step", found[0].text
    )


def test_layers_in_blocks_are_shown_by_block_and_role_then_one_at_a_time(page, visit):
    tab = visit(page("Qwen3"), viewport={"width": 1400, "height": 900})
    assert tab.eval_on_selector_all("main > section", "(all) => all.map(({ id }) => id)")[2] == "heat"
    tab.locator("#blocks").scroll_into_view_if_needed()
    tab.wait_for_selector("#blocks[data-drawn]")
    roles, cells = tab.evaluate("(({ y, z }) => [y, z])(document.querySelector('#blocks .plot').data[0])")
    assert roles == [role for role in eight.ROLES if "proj" in role]
    assert [len(row) for row in cells] == [28] * 7
    named = "document.querySelector('#angle .plot').data.map(({ name }) => name)"
    tab.locator("#angle").scroll_into_view_if_needed()
    tab.wait_for_selector("#angle[data-drawn]")
    assert tab.evaluate(named) == [*roles, "model.embed_tokens.weight", "lm_head.weight"]
    tab.select_option("#layer", "*")
    assert "input_layernorm" in tab.evaluate(named)
    # The sentence about a layer leads to it.
    tab.click("#verdict a[data-layer='model.layers.17.mlp.up_proj.weight']")
    assert tab.input_value("#layer") == "model.layers.17.mlp.up_proj.weight"
    assert tab.evaluate(AWAY, "angle") <= 8
    assert [name for name in tab.evaluate(named) if name] == ["qwen3"]


@pytest.mark.parametrize(("name", "labels"), [("one cycle", 0), ("warm-up and cosine", 0), ("100,000 steps", 2)])
def test_only_isolated_jumps_of_the_rate_are_marked(name, labels, page, visit):
    tab = visit(page(name), viewport={"width": 1400, "height": 900})
    tab.locator("#effective-rate").scroll_into_view_if_needed()
    tab.wait_for_selector("#effective-rate[data-drawn]")
    plot = tab.evaluate("document.querySelector('#effective-rate .plot').layout.annotations.map(({ text }) => text)")
    assert [text for text in plot if text.startswith("η×")] == ["η×0.1"] * labels
    lines = tab.evaluate("document.querySelector('#effective-rate .plot').data.map(({ name, y }) => [name, [...y]])")
    [rates] = [values for name, values in lines if name == "nominal rate"]
    assert len(set(rates)) == 3 if labels else len(set(rates)) > 40
