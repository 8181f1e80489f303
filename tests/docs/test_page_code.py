"""Every block of Python in the documentation runs, and prints what the page shows."""

import pytest
import torch

from pages import PAGES, ROOT, blocks, run, unlike
from setups import SETUPS, nothing


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:lightning.*")
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    setup = SETUPS.get(page.name, nothing)
    run(page, lambda block, names: setup(block, names, monkeypatch))


def test_what_is_shown_must_be_what_is_printed():
    assert unlike("a  1.0\nb 2\n", "a 1.3\nb 2") is None
    assert unlike("a\n...\n", "a\nb\nc\n") is None
    assert unlike("a 1.0", "a 3.0") is not None
    assert unlike("rows 2", "rows 3") is not None
    assert unlike("a 1.0", "b 1.0") is not None
    assert unlike("a", "a\nb") is not None
