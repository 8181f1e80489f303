"""The page in a real Chromium: it draws, its selectors change what is drawn, and it needs no network."""

import re
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import simulate
from browser import Visits, see, see_all

from steradian.reporting.page import report
from steradian.reporting.sections import SECTIONS
from steradian.watching.records import read_run
from steradian.watching.sinks import RunFiles

LAYERS = {"conv1.weight": (8, 9), "layer1.conv.weight": (8, 18), "layer2.0.downsample.conv.weight": (12, 18)}
STEPS = 80


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    names = {"SGD": "SGD-M", "Adam": "Adam", "Ours": "Adam without (abc)"}
    options = {"layers": LAYERS, "steps": STEPS, "every_rows": 20}
    return [simulate.write(folder / kind, kind, name=name, **options) for kind, name in names.items()]


@pytest.fixture(scope="module")
def page_file(runs, tmp_path_factory):
    return report(runs, tmp_path_factory.mktemp("page") / "page.html", title="Three runs")


@pytest.fixture(scope="module")
def kept_open(browser, page_file):
    visits = Visits(browser)
    yield visits, visits(page_file)
    visits.close()


@pytest.fixture
def tab(kept_open):
    """The page with three runs, which these tests share; all layers chosen."""
    visits, tab = kept_open
    tab.select_option("#layer", "")
    yield tab
    visits.check()


def lines(tab, figure):
    """What Plotly was given: name, colour, panel and numbers of each line with a name."""
    return tab.evaluate(
        """(id) => document.querySelector(`#${id} .plot`).data.filter((trace) => trace.name).map((trace) => ({
             name: trace.name, colour: trace.line?.color, panel: trace.yaxis, x: [...trace.x], y: [...trace.y] }))""",
        figure,
    )


def choose(tab, figure, control, value):
    tab.select_option(f'#{figure} [data-control="{control}"]', value)


def slide(tab, figure, control, position):
    tab.eval_on_selector(
        f'#{figure} [data-control="{control}"]',
        "(slider, to) => { slider.value = to; slider.dispatchEvent(new Event('input')); }",
        str(position),
    )


def recorded(folder, quantity, group, statistic):
    table = read_run(folder).table
    chosen = (table["quantity"] == quantity) & (table["group"] == group) & (table["statistic"] == statistic)
    return table[chosen].sort_values("step")["value"].tolist()


def test_every_figure_is_drawn_and_none_is_too_wide_for_a_window_that_became_narrow(visit, page_file):
    tab = visit(page_file, viewport={"width": 1200, "height": 800})
    assert tab.title() == "Three runs · Steradian"
    assert tab.locator("main > section").count() == len(SECTIONS) - 1 + 3  # no pairs; verdict, overview, paper
    assert tab.locator("#any[data-drawn]").count() == 0  # figures wait until they are in sight
    for section in SECTIONS:
        for figure in section.figures:
            if figure.id in ("blocks", "schedule", "update", "radial-share", "imbalance"):  # for other runs
                assert tab.locator(f"#{figure.id}").count() == 0
                continue
            see(tab, figure.id)
            shown = tab.locator(f"#{figure.id} .plot svg").first.is_visible()
            assert shown or tab.locator(f"#{figure.id} .note").inner_text() == "No row collapsed."
    tab.set_viewport_size({"width": 400, "height": 800})
    tab.wait_for_function("document.documentElement.scrollWidth === 400", timeout=5000)


def test_the_buttons_of_a_figure_wait_for_the_pointer_and_send_nothing_away(tab):
    see(tab, "effective-rate")
    figure = tab.locator("#effective-rate .plot")
    bar = figure.locator(".modebar-group").first
    tab.mouse.move(0, 0)
    tab.wait_for_function("e => getComputedStyle(e).opacity === '0'", arg=bar.element_handle())
    figure.hover()
    tab.wait_for_function("e => Number(getComputedStyle(e).opacity) > 0.5", arg=bar.element_handle())
    buttons = figure.locator(".modebar-btn").evaluate_all("found => found.map((b) => b.dataset.title)")
    assert "Zoom" in buttons
    assert not [
        name for name in buttons if "share" in name.lower() or "cloud" in name.lower() or "edit" in name.lower()
    ]


def test_a_chosen_layer_is_drawn_in_the_colours_of_the_runs(tab, runs):
    see(tab, "effective-rate")
    every = [line for line in lines(tab, "effective-rate") if line["name"] != "nominal rate"]
    assert {line["name"] for line in every} == set(LAYERS)
    assert {line["panel"] for line in every} == {"y", "y2", "y3"}
    tab.select_option("#layer", "layer1.conv.weight")
    one = [line for line in lines(tab, "effective-rate") if line["name"] != "nominal rate"]
    assert [line["name"] for line in one] == ["SGD-M", "Adam", "Adam without (abc)"]
    assert len({line["colour"] for line in one}) == 3
    for line, folder in zip(one, runs, strict=True):
        assert line["x"] == list(range(STEPS))
        assert line["y"] == pytest.approx(recorded(folder, "effective_lr", "layer1.conv.weight", "median"), rel=2e-5)
    rate = next(line for line in lines(tab, "effective-rate") if line["name"] == "nominal rate")
    assert rate["y"] == pytest.approx(recorded(runs[0], "lr", "layer1.conv.weight", "mean"), rel=2e-5)


def test_selectors_change_quantity_and_statistic(tab, runs):
    see(tab, "any")
    for quantity, statistic in (("nu", "q90"), ("angle", "min"), ("radial", "mean")):
        choose(tab, "any", "quantity", quantity)
        choose(tab, "any", "statistic", statistic)
        found = next(line for line in lines(tab, "any") if line["name"] == "conv1.weight")
        assert found["y"] == pytest.approx(recorded(runs[0], quantity, "conv1.weight", statistic), rel=2e-5)
    axis = "document.querySelector('#any .plot').layout.yaxis.type"
    choose(tab, "any", "quantity", "radius")
    assert tab.evaluate(axis) == "log"
    choose(tab, "any", "scale", "linear")
    assert tab.evaluate(axis) == "linear"


def test_heat_map_and_bounds_show_what_was_recorded(tab, runs):
    see(tab, "heat-map")
    choose(tab, "heat-map", "quantity", "velocity")
    choose(tab, "heat-map", "statistic", "max")
    maps = tab.evaluate(
        "document.querySelector('#heat-map .plot').data.map(({ y, customdata }) => ({ y, customdata }))"
    )
    assert [each["y"] for each in maps] == [list(LAYERS)] * 3
    assert maps[1]["customdata"][2] == pytest.approx(
        recorded(runs[1], "velocity", "layer2.0.downsample.conv.weight", "max"), rel=2e-5
    )
    # The bounds show the maximum of the absolute value.
    see(tab, "h1")
    found = next(line for line in lines(tab, "h1") if line["name"] == "conv1.weight")
    low, high = (recorded(runs[0], "radial", "conv1.weight", which) for which in ("min", "max"))
    assert found["y"] == pytest.approx([max(abs(a), abs(b)) for a, b in zip(low, high, strict=True)], rel=2e-5)
    heights = "document.querySelector('#h2 .plot').layout.shapes.map((shape) => shape.y0)"
    see(tab, "h2")
    assert pytest.approx(3.14159265) in tab.evaluate(heights)


def test_a_heat_map_has_no_gaps_where_layers_are_observed_more_rarely_than_the_loss(visit, tmp_path):
    run = simulate.write(tmp_path / "run", "Adam", layers=LAYERS, steps=60, every=7)
    tab = visit(report([run], tmp_path / "page.html"))
    see(tab, "heat-map")
    choose(tab, "heat-map", "quantity", "velocity")
    [found] = tab.evaluate(
        "document.querySelector('#heat-map .plot').data.map(({ x, customdata }) => ({ x, customdata }))"
    )
    assert found["x"] == list(range(0, 60, 7))
    assert found["customdata"][0] == pytest.approx(recorded(run, "velocity", "conv1.weight", "median"), rel=2e-5)


def test_names_beside_a_heat_map_of_many_layers_do_not_overlap(visit, tmp_path):
    layers = {f"stages.{k}.conv.weight": (2, 4) for k in range(70)}
    run = simulate.write(tmp_path / "run", "Adam", layers=layers, steps=8, only=["velocity"], paths=False, every_rows=0)
    tab = visit(report([run], tmp_path / "page.html"))
    see(tab, "heat-map")
    boxes = tab.evaluate(
        """[...document.querySelectorAll("#heat-map .ytick text")].map((text) => {
             const { top, bottom, width, height } = text.getBoundingClientRect();
             return { top, bottom, width, height } })"""
    )
    assert len(boxes) > 10
    assert all(box["width"] > box["height"] for box in boxes)
    ordered = sorted(boxes, key=lambda box: box["top"])
    assert all(one["bottom"] <= two["top"] + 2 for one, two in pairwise(ordered))


def test_a_run_can_be_left_out(tab):
    see(tab, "angle")
    tab.click("text=SGD-M >> nth=0")
    assert {line["panel"] for line in lines(tab, "angle")} == {"y", "y2"}
    assert tab.get_attribute(".run-toggles button >> nth=0", "aria-pressed") == "false"
    tab.click(".run-toggles button >> nth=0")
    assert {line["panel"] for line in lines(tab, "angle")} == {"y", "y2", "y3"}


def test_histograms_follow_step_layer_and_quantity(tab):
    see(tab, "histogram")
    last = lines(tab, "histogram")
    assert len(last) == 3
    assert sum(last[0]["y"]) == pytest.approx(1, abs=1e-6)
    slide(tab, "histogram", "row-step", 0)
    assert tab.inner_text("#histogram output") == "0"
    assert "step 0" in tab.inner_text("#histogram .legend")
    assert lines(tab, "histogram") != last
    choose(tab, "histogram", "row-quantity", "radius")
    before = lines(tab, "histogram")
    choose(tab, "histogram", "row-group", "layer2.0.downsample.conv.weight")
    assert lines(tab, "histogram") != before


def test_trajectories_turn_zoom_go_back_in_time_and_are_compared(tab):
    see(tab, "trajectory")
    ball = "#trajectory .plot svg"
    assert tab.locator(f"{ball} .start").count() == 3
    whole, ways = tab.inner_html(ball), tab.locator(f"{ball} .way").count()
    tab.focus(ball)
    tab.keyboard.press("ArrowLeft")
    turned = tab.inner_html(ball)
    assert turned != whole
    tab.keyboard.press("+")
    assert tab.inner_html(ball) != turned
    slide(tab, "trajectory", "sphere-step", 10)
    assert tab.locator(f"{ball} .way").count() < ways
    choose(tab, "trajectory", "sphere-row", "1")
    assert "row 1" in tab.inner_text("#trajectory .facts")
    box = tab.locator(ball).bounding_box()
    still = tab.inner_html(ball)
    tab.mouse.move(box["x"] + 100, box["y"] + 100)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 180, box["y"] + 130)
    tab.mouse.up()
    assert tab.inner_html(ball) != still
    # Trajectories are compared with the reference.
    see(tab, "cosine")
    assert len(lines(tab, "cosine")) == 2 * 2 * len(LAYERS)  # two rows of each layer, two other runs
    choose(tab, "cosine", "reference", "1")
    assert "Compared with Adam." in tab.inner_text("#cosine .note")
    assert all(line["y"][0] == pytest.approx(1, abs=1e-5) for line in lines(tab, "cosine"))


def test_light_dark_and_the_button(visit, page_file):
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "document.querySelector('#angle .plot').layout.font.color"
    tab = visit(page_file, color_scheme="dark")
    see(tab, "angle")
    dark = tab.evaluate(ground), tab.evaluate(ink)
    tab.click("#theme")
    light = tab.evaluate(ground), tab.evaluate(ink)
    assert all(one != two for one, two in zip(dark, light, strict=True))
    other = visit(page_file, color_scheme="light")
    see(other, "angle")
    assert (other.evaluate(ground), other.evaluate(ink)) == light
    other.emulate_media(color_scheme="dark")
    other.wait_for_function(f"{ink} === '{dark[1]}'")
    assert other.evaluate(ground) == dark[0]


def test_selectors_work_from_the_keyboard(tab):
    tab.focus("#layer")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    assert tab.input_value("#layer") == "conv1.weight"
    for control in tab.query_selector_all("select, input"):
        assert control.evaluate("(element) => element.labels.length") == 1


def test_a_phone_scrolls_in_one_direction_only(visit, page_file):
    tab = visit(page_file, viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    see_all(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_on_paper_every_figure_is_drawn_dark_on_light_and_no_wider_than_the_paper(visit, page_file, tmp_path):
    tab = visit(page_file, viewport={"width": 1200, "height": 800}, color_scheme="dark")
    tab.wait_for_selector("figure[data-drawn]")  # by then the page listens itself, before this test does
    tab.evaluate(
        """() => window.addEventListener("beforeprint", () => { window.printed = {
             drawn: document.querySelectorAll("figure[data-kind][data-drawn]").length,
             widest: Math.max(...[...document.querySelectorAll(".plot .main-svg")].map((svg) => svg.clientWidth)),
             ground: getComputedStyle(document.body).backgroundColor } })"""
    )
    before = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.pdf(path=tmp_path / "page.pdf")
    printed = tab.evaluate("window.printed")
    assert printed["drawn"] == tab.locator("figure[data-kind]").count()
    assert 500 < printed["widest"] <= 700
    assert printed["ground"] == "rgb(246, 247, 248)"
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == before


def test_there_are_no_half_steps(visit, tmp_path):
    run = simulate.write(tmp_path / "run", "Adam", layers=LAYERS, steps=3)
    tab = visit(report([run], tmp_path / "page.html"))
    see(tab, "angle")
    assert tab.locator("#angle .xtick text").all_text_contents() == ["0", "1", "2"]
    see(tab, "heat-map")
    assert tab.locator("#heat-map .xtick text").all_text_contents() == ["0", "1", "2"]


def test_keys_are_those_of_the_lines_that_are_drawn(visit, tmp_path):
    def write(name, layers):
        return simulate.write(tmp_path / name, "SGD", name=name, layers=layers, steps=5, paths=False)

    many = [write(f"run {i}", {"a": (2, 3)}) for i in range(8)]
    tab = visit(report([*many, write("other", {"b": (2, 3)})], tmp_path / "page.html"))
    tab.select_option("#layer", "a")
    for figure in ("angle", "equilibrium-radius", "phenomena-turns"):
        see(tab, figure)
        keys = tab.locator(f"#{figure} .legend .key")
        assert [text for text in keys.all_text_contents() if text.startswith(("run", "other"))] == [
            f"run {i}" for i in range(8)
        ]
        dashes = keys.locator("i").evaluate_all("found => found.map((mark) => mark.className)")
        assert dashes[:8] == ["solid"] * 7 + ["dot"]  # colours come again after seven, and dashes are predictions


def test_many_layers_are_told_apart_in_every_run(visit, tmp_path):
    deep = simulate.write(tmp_path / "deep", "SGD", layers={f"{i}": (2, 3) for i in range(12)}, steps=5, paths=False)
    flat = simulate.write(tmp_path / "flat", "Adam", layers={"x": (2, 3), "y": (2, 3)}, steps=5, paths=False)
    tab = visit(report([deep, flat], tmp_path / "page.html"))
    see(tab, "angle")
    colours = {line["name"]: line["colour"] for line in lines(tab, "angle") if line["name"] != "nominal rate"}
    assert (colours["x"], colours["y"]) == (colours["0"], colours["11"])
    assert "first … last layer of each run" in tab.inner_text("#angle .legend")


def test_a_run_with_one_step_has_a_page(visit, tmp_path):
    file = report([simulate.write(tmp_path / "run", "Adam", layers=LAYERS, steps=1, every_rows=1)], tmp_path / "p.html")
    tab = visit(file)
    see(tab, "angle")
    assert tab.locator("#trajectory").count() == 0
    tab.select_option("#layer", "conv1.weight")


@pytest.mark.parametrize("width", [400, pytest.param(1600, marks=pytest.mark.slow)])
def test_long_names_widen_nothing(width, visit, tmp_path):
    options = {"layers": {"block." * 60 + name: (4, 9) for name in "ab"}, "steps": 20, "every_rows": 10}
    file = report([simulate.write(tmp_path / "run", "Adam", name="run-" * 60, **options)], tmp_path / "page.html")
    tab = visit(file, viewport={"width": width, "height": 800})
    see_all(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_many_runs_leave_room_for_figures(visit, tmp_path):
    """The bar that stays in sight is a small part of a phone's window, too, and what is jumped to lies below it."""
    options = {"layers": {"a": (2, 3)}, "steps": 2, "every_rows": 0, "paths": False}
    runs = [simulate.write(tmp_path / f"{k}", "Adam", name=f"a run with number {k}", **options) for k in range(30)]
    file = report(runs, tmp_path / "page.html")
    for width, height in ((390, 660), (1200, 800)):
        tab = visit(file, viewport={"width": width, "height": height})
        assert tab.inner_text("h1").endswith("a run with number 4 and 25 more")
        tab.evaluate("location.hash = 'rates'")
        tab.wait_for_function("scrollY > 500")
        bar, heading = (tab.locator(where).bounding_box() for where in (".bar", "#rates h2"))
        assert bar["height"] < height / 4
        assert heading["y"] >= bar["y"] + bar["height"]
        last = tab.locator(".run-toggles button").last
        last.scroll_into_view_if_needed()
        last.click()
        assert last.get_attribute("aria-pressed") == "false"
        if width > 1000:  # where the contents stay in sight as well
            assert tab.locator("nav").bounding_box()["y"] >= bar["y"] + bar["height"]


@pytest.fixture(scope="module")
def odd(browser, runs, tmp_path_factory):
    """A page of a usual run beside an unread one, one that is not finite, and one with quotes in its name."""
    folder = tmp_path_factory.mktemp("odd")
    write = partial(simulate.write, layers=LAYERS)
    unread = {"steps": 30, "only": ["radius", "angle", "velocity"], "paths": False, "every_rows": 0}
    blind = write(folder / "blind", "SGD", name="unread", **unread)
    lost = simulate.spoil(write(folder / "lost", "SGD", name="lost", steps=10, paths=False), 0)
    quoted = write(folder / "quoted", "Adam", name='"a" & b', steps=5)
    visits = Visits(browser)
    yield visits(report([runs[0], blind, lost, quoted], folder / "page.html"))
    visits.close()
    visits.check()


def test_what_a_run_lacks_is_said_beside_the_others(odd):
    see(odd, "equilibrium-radius")
    said = "Not recorded in unread (this optimizer cannot be read, only two points are known)"
    assert odd.inner_text("#equilibrium-radius .missing") == said
    for figure in ("heat-map", "equilibrium-radius", "equilibrium-angle"):
        see(odd, figure)
        assert odd.locator(f"#{figure} .plot").text_content().count("no finite number") == 1


def test_a_small_first_step_does_not_set_the_range(visit, tmp_path):
    run = simulate.write(tmp_path / "run", "SGD", layers=LAYERS, steps=STEPS)
    part = read_run(run).table.astype({"quantity": str})
    part.loc[(part["quantity"] == "angle") & (part["step"] == 0), "value"] *= 1e-6
    RunFiles(run).add("part", {name: part[name].tolist() for name in part.columns})
    tab = visit(report([run], tmp_path / "page.html"))
    see(tab, "angle")
    angles = [angle for line in lines(tab, "angle") for angle in line["y"]]
    low, high = tab.evaluate("document.querySelector('#angle .plot').layout.yaxis.range")
    assert min(angles) < 1e-6 * max(angles)
    assert high - low < 4


def test_a_map_of_zeros_says_so(visit, runs, tmp_path):
    still = simulate.write(tmp_path / "still", "SGD", name="still", layers=LAYERS, steps=3)
    table = read_run(still).table
    RunFiles(still).add("part", {**{name: table[name].tolist() for name in table.columns}, "value": [0.0] * len(table)})
    tab = visit(report([runs[0], still], tmp_path / "page.html"))
    see(tab, "heat-map")
    assert tab.locator("#heat-map .plot").text_content().count("0 throughout") == 1


def test_quotes_stand_in_headings_and_on_hovering_as_they_are(odd):
    see(odd, "angle")
    assert '"a" & b' in odd.locator("#angle .plot").text_content()
    assert "&quot;" not in odd.evaluate("JSON.stringify(document.querySelector('#angle .plot').data)")


def test_a_run_that_cannot_be_read_is_shown_as_far_as_it_goes(visit, runs, tmp_path):
    options = {"layers": LAYERS, "steps": 30, "only": ["radius", "angle", "velocity"], "paths": False, "every_rows": 0}
    blind = simulate.write(tmp_path / "run", "SGD", name="unread", **options)
    tab = visit(report([blind], tmp_path / "one.html"))
    for figure in ("angle", "h2", "any"):
        see(tab, figure)
    assert tab.locator("#effective-rate").count() == 0
    both = visit(report([runs[0], blind], tmp_path / "both.html"))
    see(both, "equilibrium-radius")
    both.select_option("#layer", "conv1.weight")
    assert [line["name"] for line in lines(both, "equilibrium-radius")] == ["SGD-M", "SGD-M", "unread"]


def test_a_run_that_is_not_a_number_says_so_and_does_not_hang(visit, tmp_path):
    run = simulate.write(tmp_path / "lost", "SGD", name="lost", layers=LAYERS, steps=10, paths=False)
    tab = visit(report([simulate.spoil(run, 0)], tmp_path / "one.html"))
    see_all(tab)
    for figure in ("effective-rate", "angle", "h1"):
        assert tab.inner_text(f"#{figure} .note") == "Not a finite number in any step: lost."
    assert tab.inner_text("#heat-map .note") == "Angle per step: no finite number in the runs chosen."
    assert tab.inner_text("#equilibrium-radius .note") == "No finite number in the runs and the layer chosen."
    assert tab.locator("#phenomena-turns .plot").text_content().count("no finite number") == 4


def test_names_are_text_and_nothing_else(visit, tmp_path):
    evil = "</script><b id=evil onclick=x>&amp;"
    options = {"layers": {evil: (4, 9), "b": (4, 9)}, "steps": 20, "every_rows": 10}
    tab = visit(report([simulate.write(tmp_path / "run", "Adam", name=evil, **options)], tmp_path / "page.html"))
    see_all(tab)
    tab.select_option("#layer", evil)
    assert tab.locator("#evil").count() == 0
    assert tab.inner_text(".run h3") == evil


def test_the_pointer_shows_all_lines_of_a_panel(tab):
    see(tab, "angle")
    box = tab.locator("#angle .plot .draglayer .xy").bounding_box()
    tab.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    tab.wait_for_selector("#angle .hoverlayer .legend")
    said = tab.locator("#angle .hoverlayer .legend text").all_text_contents()
    assert said[0].startswith("step ")
    assert {text.split(" : ")[0] for text in said[1:]} == set(LAYERS)


def test_smoothing_averages_neighbours_and_leaves_bounds_alone(tab, runs):
    see(tab, "angle")
    raw = np.array(recorded(runs[0], "angle", "conv1.weight", "median"))
    tab.eval_on_selector("#smoothing", "(e) => { e.value = 2; e.dispatchEvent(new Event('input')); }")
    smooth = next(line["y"] for line in lines(tab, "angle") if line["name"] == "conv1.weight")
    assert smooth[10] == pytest.approx(raw[8:13].mean(), rel=1e-4)
    assert smooth[0] == pytest.approx(raw[:3].mean(), rel=1e-4)
    see(tab, "h2")
    bound = next(line["y"] for line in lines(tab, "h2") if line["name"] == "conv1.weight")
    assert max(bound) == pytest.approx(max(recorded(runs[0], "velocity", "conv1.weight", "max")), rel=2e-5)
    tab.eval_on_selector("#smoothing", "(e) => { e.value = 0; e.dispatchEvent(new Event('input')); }")


def timed(folder, kind, seconds):
    """A run whose observed steps have times."""
    run = simulate.write(folder, kind, layers=LAYERS, steps=len(seconds))
    part = read_run(run).table.astype(str).astype({"step": int, "value": float})
    times = simulate.whole(kind, "seconds", seconds)
    RunFiles(run).add("part", {name: [*part[name], *times[name]] for name in part})
    return run


def test_time_may_be_on_the_axis(visit, tmp_path):
    slow, fast = 5.0 * np.arange(STEPS), 100 + np.arange(STEPS)
    pair = [timed(tmp_path / "slow", "SGD", slow), timed(tmp_path / "fast", "Adam", fast)]
    tab = visit(report(pair, tmp_path / "page.html"))
    see(tab, "whole")
    assert tab.evaluate("document.querySelector('#whole .plot').layout.annotations.map(({ text }) => text)") == [
        "<b>Loss</b>"  # and not the seconds
    ]
    title = "document.querySelector('#angle .plot').layout.xaxis.title.text"
    tab.select_option("#layer", "conv1.weight")
    see(tab, "angle")
    assert tab.evaluate(title) == "step"
    assert [line["x"] for line in lines(tab, "angle")] == [list(range(STEPS))] * 2
    tab.select_option("#axis", "time")
    assert tab.evaluate(title) == "minutes since the start"
    assert [line["x"] for line in lines(tab, "angle")] == [pytest.approx(of / 60) for of in (slow, fast)]
    drops = tab.evaluate("document.querySelector('#angle .plot').layout.shapes.map(({ x0 }) => x0)")
    assert drops == pytest.approx([(49 * 5) / 60, (69 * 5) / 60, 149 / 60, 169 / 60])
    box = tab.locator("#angle .plot .draglayer .xy").bounding_box()
    tab.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"])
    tab.wait_for_selector("#angle .hoverlayer .legend")
    said = tab.locator("#angle .hoverlayer .legend text").all_text_contents()
    assert re.fullmatch(r"[\d.]+ minutes", said[0])
    assert all(re.search(r"\(step \d+\)$", text) for text in said[1:])
    see_all(tab)
    tab.select_option("#axis", "")
    see(tab, "angle")
    tab.wait_for_function(f"{title} === 'step'")


def test_a_run_without_times_has_steps_on_the_axis(tab, visit, runs, tmp_path):
    assert not tab.is_visible("#axis")
    both = visit(report([runs[0], timed(tmp_path / "new", "Adam", np.arange(10.0))], tmp_path / "page.html"))
    assert not both.is_visible("#axis")
    both.click(".run-toggles button:first-child")
    assert both.is_visible("#axis")


def test_a_click_chooses_the_nearest_line(tab):
    see(tab, "angle")
    box = tab.locator("#angle .plot .draglayer .xy").bounding_box()
    x, y = tab.evaluate(
        """() => {
             const plot = document.querySelector("#angle .plot"), { xaxis, yaxis } = plot._fullLayout;
             const line = plot.data.find(({ name, yaxis }) => name === "layer1.conv.weight" && yaxis === "y");
             return [xaxis.d2p(line.x[40]), yaxis.d2p(line.y[40])];
           }"""
    )
    tab.mouse.move(box["x"] + x, box["y"] + y)
    tab.wait_for_selector("#angle .hoverlayer .legend")
    tab.mouse.down()
    tab.mouse.up()
    tab.wait_for_function("document.getElementById('layer').value === 'layer1.conv.weight'")


def test_the_first_and_the_last_layer_have_colours_that_can_be_seen(visit, page_file):
    """A contrast of 3 with the ground in the dark, and of 2 in the light, where yellow is the last."""

    def light(colour):
        parts = [int(value) / 255 for value in colour]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    for scheme, least in (("dark", 3), ("light", 2)):
        tab = visit(page_file, color_scheme=scheme)
        see(tab, "angle")
        ground = tab.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor.match(/\\d+/g)")
        for line in lines(tab, "angle"):
            one, two = sorted((light(re.findall(r"\d+", line["colour"])), light(ground)))
            assert (two + 0.05) / (one + 0.05) > least, (scheme, line["colour"])


def test_cards_show_what_differs_between_runs(tab):
    cards = tab.locator(".run").all_inner_texts()
    assert all("torch.optim" in card or "steradian.optim" in card for card in cards)
    assert not [card for card in cards if "betas" in card or "weight_decay" in card or "foreach" in card]
    tab.click(".same summary")
    assert "betas\n0.9, 0.99" in tab.inner_text(".same")
    tab.click(".same summary")
