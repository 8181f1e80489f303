"""docs/watching.md names everything that is recorded or said; tests/docs runs its examples."""

from pathlib import Path

from test_alerts import SITUATIONS

from steradian.watching.records import QUANTITIES

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"


def test_every_quantity_and_alert_is_explained():
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in QUANTITIES)
    assert all(f"| `{kind}` |" in page for kind in SITUATIONS)
