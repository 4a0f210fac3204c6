"""docs/pages/from-*.md: every name of fnppo on them exists and takes the keywords shown, every link leads somewhere."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import fnppo
from fnppo.types import PaddedBatch

PAGES = Path(__file__).parent.parent / "docs" / "pages"
PEERS = ["from-openrlhf.md", "from-trl.md", "from-verl.md"]
RUNS = {"fnppo.cli", "fnppo.__main__", "fnppo.demo.run"}
"""Modules that are programs, with dependencies of their own."""


def public_names():
    """name -> what it is, of all modules."""
    found = {}
    for module in pkgutil.walk_packages(fnppo.__path__, "fnppo."):
        if module.name not in RUNS:
            public = vars(importlib.import_module(module.name)).items()
            found |= {name: value for name, value in public if not name.startswith("_")}
    return found


def rows(page):
    """The cells of the tables, without their heads."""
    lines = [line for line in (PAGES / page).read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in cells if row[1] != "fnppo"]


def spans(page):
    """The code of the tables' second columns."""
    return sorted({span for row in rows(page) for span in re.findall(r"`([^`]+)`", row[1])})


def links(page):
    """(the page, the anchor or None) of every link to another page."""
    return sorted(set(re.findall(r"\]\(([\w/-]+\.md)(?:#([\w-]+))?\)", (PAGES / page).read_text())))


NAMES = public_names()


@pytest.mark.parametrize(("page", "span"), [(page, span) for page in PEERS for span in spans(page)])
def test_the_name_exists_and_takes_these_keywords(page, span):
    tree = ast.parse(span, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            assert node.id in NAMES or node.id in PaddedBatch._fields, f"fnppo has no {node.id}"
        if isinstance(node, ast.Call):
            parameters = inspect.signature(inspect.unwrap(NAMES[node.func.id])).parameters
            for keyword in node.keywords:
                assert keyword.arg in parameters, f"{node.func.id} has no keyword {keyword.arg}"


@pytest.mark.parametrize(("page", "other", "anchor"), [(page, *link) for page in PEERS for link in links(page)])
def test_the_link_leads_somewhere(page, other, anchor):
    text = (PAGES / other).read_text()
    assert not anchor or f'<a id="{anchor}"></a>' in text or f"## {anchor}\n" in text.lower()


@pytest.mark.parametrize("page", PEERS)
def test_a_row_is_a_name_what_it_is_here_and_what_is_different(page):
    for row in rows(page):
        assert len(row) == 3
        assert row[0]
        assert re.fullmatch(r"No|`[^`]+`(, `[^`]+`)*", row[1]), row


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("from-verl.md", {"ppo_loss(kl_coef=.001)", "gspo", "token_mean"}),
        ("from-trl.md", {"ppo_loss(kl_coef=.04)", "gspo(clip_low=.2, clip_high=.2)", "sequence_mean"}),
        ("from-openrlhf.md", {"ppo_loss(kl_coef=.01)", "adapt_kl(target=6.0, gain=.1)", "geometric_ratios"}),
    ],
)
def test_the_tables_are_read(page, shown):
    assert shown <= set(spans(page))
    assert "gspo_of_another_paper" not in NAMES


def test_no_page_is_left_out():
    assert sorted(page.name for page in PAGES.glob("from-*.md")) == PEERS
