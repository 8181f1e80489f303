"""What pages say of other files: the tests that they name exist, and the glossary has every word of the house."""

import re

import pytest

from pages import PAGES, ROOT

TEST = re.compile(r"`(test_\w+)`")
WORDS = """
row radius direction spec layout n_rows group groups joint invariant "not invariant" untested pair step scheme image
"effective rate" "effective direction" velocity angle collapsed phenomena (a) (b1) (b2) (c) watch run report verdict
training method column study fleet
"""


@pytest.mark.parametrize("page", [page for page in PAGES if TEST.search(page.read_text(encoding="utf-8"))], ids=str)
def test_a_test_that_a_page_names_exists(page):
    defined = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    for name in TEST.findall(page.read_text(encoding="utf-8")):
        assert f"def {name}(" in defined, name


def test_the_glossary_has_every_word():
    there = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {word.strip('"') for word in re.findall(r'"[^"]+"|\S+', WORDS)} <= set(there)


def test_the_paths_of_the_four_readers_have_three_pages_each():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    readers = re.split(r"^\*\*(I .*?)\*\*$", index, flags=re.MULTILINE)[1:]
    paths = {
        reader: re.findall(r"^\d\. \[.*?\]\((.*?)\)", text, re.MULTILINE)
        for reader, text in zip(readers[::2], readers[1::2], strict=True)
    }
    assert list(paths) == ["I train CNNs", "I train language models", "I develop optimizers", "I read the paper"]
    for pages in paths.values():
        assert len(pages) == len(set(pages)) == 3
        assert all((ROOT / "docs" / page).is_file() for page in pages)
