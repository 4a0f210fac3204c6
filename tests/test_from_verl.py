"""docs/pages/from-verl.md: every name of fnppo on it exists and takes the keywords shown, every link leads somewhere."""

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
PAGE = (PAGES / "from-verl.md").read_text()
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


def spans():
    """The code of the tables' second columns."""
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    return [span for row in rows for span in re.findall(r"`([^`]+)`", row[1])]


NAMES = public_names()


@pytest.mark.parametrize("span", sorted(set(spans())))
def test_the_name_exists_and_takes_these_keywords(span):
    tree = ast.parse(span, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            assert node.id in NAMES or node.id in PaddedBatch._fields, f"fnppo has no {node.id}"
        if isinstance(node, ast.Call):
            parameters = inspect.signature(inspect.unwrap(NAMES[node.func.id])).parameters
            for keyword in node.keywords:
                assert keyword.arg in parameters, f"{node.func.id} has no keyword {keyword.arg}"


@pytest.mark.parametrize("anchor", sorted(set(re.findall(r"parity\.md#([\w-]+)", PAGE))))
def test_the_difference_is_on_the_page_about_parity(anchor):
    assert f'<a id="{anchor}"></a>' in (PAGES / "parity.md").read_text()


def test_the_tables_are_read():
    assert {"ppo_loss(kl_coef=.001)", "gspo", "token_mean"} <= set(spans())
    assert "gspo_of_another_paper" not in NAMES
