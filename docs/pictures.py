"""The pictures of README and the documentation: `make pictures` makes all of them anew.

It runs the demo, trains a narrow ResNet20 on digits at a good rate and at one that is 30 times as high, and writes a
page of both. Chromium (`CHROMIUM=path`, or chromium on the path) takes pictures of parts of the two pages, light and
dark.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from sklearn.cluster import KMeans
from torch import nn

import steradian as st
from steradian.lab import demo
from steradian.lab.data import digits
from steradian.lab.models import resnet20

IMAGES = Path(__file__).parent / "images"
WIDTH = 760  # CSS pixels; README and the site show pictures about as wide, so that letters keep their size
RATES = (0.01, 0.3)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
STYLE = """
body { background: var(--card); }
header, .bar, nav, .controls, .tools, figcaption { display: none !important; }
.frame { display: block; padding: 0; }
.card { border: 0; border-radius: 0; padding: 0; }
.figure, #verdict { margin: 0 0 20px; padding: 14px 16px 12px; border: 0; }
"""
CHANGES = {
    "</style>": f"{STYLE}</style>",
    "least = 290": "least = 210",  # the width of a panel, so that three fit beside each other
    ": hover a line for its layer, click to see it alone": "",
}


def main() -> None:
    """Train, write the pages, take the pictures."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        raise SystemExit("no Chromium was found: install chromium, or set CHROMIUM")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        out = Path(folder)
        demo.run(out / "demo")
        known = st.report([out / "demo" / "runs" / name for name in ("SGD", "Adam")], out / "known.html")
        rates = st.report([train(out / f"AdamW, rate {rate:g}", rate) for rate in RATES], out / "rates.html")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        take(browser, known, {"effective-rate": "effective-rate"})
        take(browser, out / "demo" / "index.html", {"trajectory": "sphere"})
        take(browser, rates, {"verdict": "verdict", "heat-map": "heat-map", "angle": "good-and-bad"})
        browser.close()


def train(folder: Path, rate: float, *, steps: int = 320, batch: int = 64) -> Path:
    """Train a narrow ResNet20 on digits with AdamW, and record every fifth step."""
    data, _ = digits()
    torch.manual_seed(0)
    model = resnet20(channels=1, width=8)
    groups = st.find_groups(model, data.images[:batch])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.3)
    with st.watch(optimizer, groups, to=folder, every=5) as watch:
        for _ in range(steps):
            chosen = torch.randint(len(data.labels), (batch,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data.images[chosen]), data.labels[chosen])
            loss.backward()
            optimizer.step()
            watch.log(loss=loss)
    return folder


def take(browser: Browser, page: Path, parts: dict[str, str]) -> None:
    """Write pictures of parts of a page: {id: name of the picture}."""
    text = page.read_text(encoding="utf-8")
    for old, new in CHANGES.items():
        if old not in text:
            raise SystemExit(f"{old!r} is not in the page any more: adapt CHANGES")
        text = text.replace(old, new, 1)
    page.write_text(text, encoding="utf-8")
    for scheme in SCHEMES:
        view = browser.new_page(viewport={"width": WIDTH, "height": 1200}, device_scale_factor=2, color_scheme=scheme)
        view.goto(page.resolve().as_uri())
        view.wait_for_function("window.Plotly")
        for part, name in parts.items():
            place = view.locator(f"#{part}")
            place.scroll_into_view_if_needed()
            if part == "trajectory":  # the row of the last layer, whose path is the longest
                choose = "e => { e.selectedIndex = e.options.length - 1; e.dispatchEvent(new Event('change')); }"
                place.locator("[data-control=sphere-row]").evaluate(choose)
            if part != "verdict":
                view.wait_for_selector(f"#{part}[data-drawn]")
            view.wait_for_timeout(500)
            path = IMAGES / (f"{name}.png" if scheme == "light" else f"{name}-{scheme}.png")
            place.screenshot(path=path)
            with Image.open(path) as picture:
                few = few_colours(picture)
            few.save(path, optimize=True)
            print(f"docs/images/{path.name}: {few.width} × {few.height}, {path.stat().st_size / 1000:.0f} kB")
        view.close()


def few_colours(picture: Image.Image) -> Image.Image:
    """The picture with a palette of 256 colours.

    Colours count by the root of their pixels, so that the ground does not cost small letters and keys their colour.
    """
    pixels = np.asarray(picture.convert("RGB")).astype(np.int64)
    colours, at, counts = np.unique(pixels @ [1 << 16, 1 << 8, 1], return_inverse=True, return_counts=True)
    points = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1)
    found = KMeans(min(256, len(points)), n_init=1, random_state=0).fit(points, sample_weight=np.sqrt(counts))
    few = Image.fromarray(found.labels_.astype(np.uint8)[at].reshape(pixels.shape[:2]))
    few.putpalette(found.cluster_centers_.round().astype(np.uint8).tobytes())
    return few


if __name__ == "__main__":
    main()
