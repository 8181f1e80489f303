"""The examples of docs/watching.md run, in their order."""

import re
from pathlib import Path

import torch
from test_real_use_alerts import SITUATIONS

from steradian.watch.records import QUANTITIES

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(block, names)
    assert set(names["table"]["group"]) == {"0.weight", ""}
    assert names["angle"] > 0


def test_every_quantity_and_alert_is_explained():
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in QUANTITIES)
    assert all(f"| `{kind}` |" in page for kind in SITUATIONS)
