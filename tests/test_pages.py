"""Pages of the documentation run as printed: their Python in order, with the output and the errors that they show."""

import ast
import re
import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import matplotlib
import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs"
PAGES = DOCS / "pages"
LIBRARY = DOCS.parent / "fnppo"
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.S)
WITH_CODE = [str(page.relative_to(PAGES)) for page in sorted(PAGES.rglob("*.md")) if "```python" in page.read_text()]
FAILURES = {"test-your-trainer.md": 3}  # pages that show errors, and how many
FIGURES = sorted((DOCS / "figures").glob("*.py"))


def run(page):
    """What the page's Python blocks print and raise, beside the text blocks that follow them."""
    blocks, names = list(BLOCK.finditer((PAGES / page).read_text())), {"__name__": "__main__"}
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block[1] == "text":
            continue
        code, out, fails = compile(block[2], page, "exec"), StringIO(), False
        promised = following[2] if following is not None and following[1] == "text" else None
        try:
            with redirect_stdout(out):
                exec(code, names)
        except (AssertionError, ValueError) as error:
            if promised is None:
                raise
            fails = True
            out.write(f"{error}\n")
        if promised is not None:
            yield promised, out.getvalue(), fails


@pytest.mark.parametrize("page", WITH_CODE)
def test_a_page_is_what_its_code_prints(page, tmp_path, monkeypatch, unchecked):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    failures = 0
    for promised, found, fails in run(page):
        assert found == promised
        failures += fails
    assert failures == FAILURES.get(page, 0)


@pytest.mark.parametrize("script", FIGURES, ids=lambda path: path.stem)
def test_a_figure_is_what_its_script_draws(script, tmp_path, monkeypatch, unchecked):
    """Each script writes `<its name>.svg` to the folder that it is given."""
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    with matplotlib.rc_context():
        runpy.run_path(str(script), run_name="__main__")
    drawn = tmp_path / f"{script.stem}.svg"
    assert drawn.read_text() == (PAGES / "plots" / drawn.name).read_text()


def test_every_module_is_in_the_reference():
    """But for programs, and packages whose parts are there."""
    text = (PAGES / "reference.md").read_text()
    for file in sorted(LIBRARY.rglob("*.py")):
        parts = file.relative_to(LIBRARY.parent).with_suffix("").parts
        if not {"cli", "__main__", "__init__", "demo", "command"} & set(parts):
            assert f"::: {'.'.join(parts)}\n" in text, parts


def test_every_public_symbol_has_a_docstring():
    for file in sorted(LIBRARY.rglob("*.py")):
        module = ast.parse(file.read_text())
        classes = [node for node in module.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for node in [module, *module.body, *(node for owner in classes for node in owner.body)]:
            public = isinstance(node, ast.Module) or (
                isinstance(node, ast.ClassDef | ast.FunctionDef)
                and not node.name.startswith("_")
                and node.name not in ("forward", "backward")  # of autograd's functions
            )
            assert not public or ast.get_docstring(node), (file.name, getattr(node, "name", ""))
