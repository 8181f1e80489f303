"""How the page does at size: python tests/reporting/stress.py [folder].

It writes a run of 300 layers and 10,000 steps, 400 of them observed, with every quantity but the phenomena and with 64
rows of each layer at 5 steps, then prints the seconds to write its page, the page's size, and its first paint.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from steradian.reporting.page import report
from steradian.watching.records import QUANTITIES, STATISTICS
from steradian.watching.sinks import RunFiles

PHENOMENA = ("deformation", "gradient_memory", "l2_memory", "radius_ratio")


def words(values, repeats):
    """A dictionary column: each of `values` `repeats` times, without a Python string per line."""
    return pa.DictionaryArray.from_arrays(np.repeat(np.arange(len(values), dtype=np.int32), repeats), list(values))


def write(folder, *, groups=20, rows=50, steps=10_000, every=1, rows_at=40, d=64, parts=5, name="stress"):
    """Random walks in the logarithm, in parts as a long training leaves them."""
    files, data = RunFiles(folder), np.random.default_rng(0)
    files.folder.mkdir(parents=True, exist_ok=True)
    names = [f"layer{i // 5}.{i % 5}.conv.weight" for i in range(groups)]
    recorded = [q for q in QUANTITIES if q not in PHENOMENA]
    lines = [(g, q, s) for g in names for q in recorded for s in (STATISTICS if q != "lr" else ("mean",))]
    level = data.normal(-4, 1, len(lines))
    per = steps // parts // every
    for part in range(parts):
        walk = np.cumsum(data.normal(0, 0.02, (len(lines), per)), axis=1)
        value = np.exp(level[:, None] + walk)
        level = np.log(value[:, -1])
        at = np.array([q == "lr" for _, q, _ in lines])
        observed = every * np.arange(part * per, (part + 1) * per)
        value[at] = 0.1 * 0.1 ** np.digitize(observed, [steps // 2, 3 * steps // 4])
        columns = {"run": words([name], value.size), "step": np.tile(observed, len(lines))}
        for i, column in enumerate(("group", "quantity", "statistic")):
            labels = sorted({line[i] for line in lines})
            codes = np.repeat(np.array([labels.index(line[i]) for line in lines], dtype=np.int32), per)
            columns[column] = pa.DictionaryArray.from_arrays(codes, labels)
        columns["value"] = value.ravel()
        parquet.write_table(pa.table(columns), files.folder / f"part-{part:05d}.parquet")
    at_rows = np.linspace(0, steps // every - 1, rows_at).astype(int) * every
    quantities = [q for q in recorded if q != "lr"]
    each, count = len(at_rows) * rows, len(at_rows) * rows * len(quantities)
    columns = {
        "run": words([name], count * groups),
        "step": np.tile(np.repeat(at_rows, rows), len(quantities) * groups),
        "group": words(names, count),
        "quantity": pa.DictionaryArray.from_arrays(
            np.tile(np.repeat(np.arange(len(quantities), dtype=np.int32), each), groups), quantities
        ),
        "row": np.tile(np.arange(rows), len(at_rows) * len(quantities) * groups),
        "value": np.exp(data.normal(-3, 1, count * groups)),
    }
    parquet.write_table(pa.table(columns), files.folder / "rows-00000.parquet")
    files.describe({"run": name, "groups": [{"name": g, "rows": rows, "size": d, "layout": "filter"} for g in names]})
    return Path(folder)


def first_paint(page):
    """Milliseconds to the first contentful paint, and to the last figure in sight drawn."""
    from browser import launch
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = launch(playwright)
        tab = browser.new_page()
        started = time.perf_counter()
        tab.goto(page.as_uri())
        tab.evaluate("document.querySelector('#rates').scrollIntoView()")
        tab.wait_for_selector("#effective-rate[data-drawn]")
        drawn = 1000 * (time.perf_counter() - started)
        paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        browser.close()
    return paint, drawn


def main():
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        started = time.perf_counter()
        run = write(folder / "run", groups=300, rows=64, every=25, rows_at=5)
        print(f"run written in {time.perf_counter() - started:.1f} s")
        started, busy = time.perf_counter(), time.process_time()
        page = report([run], folder / "page.html")
        passed = time.perf_counter() - started, time.process_time() - busy
        print(f"page written in {passed[0]:.1f} s ({passed[1]:.1f} s of a core), {page.stat().st_size / 1e6:.2f} MB")
        paint, drawn = first_paint(page.resolve())
        print(f"first contentful paint after {paint:.0f} ms, first figure drawn after {drawn:.0f} ms")


if __name__ == "__main__":
    main()
