"""Pages of the documentation run as printed: code in order, and failures with the messages that the page shows."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parent.parent / "docs" / "pages"
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.S)


def run(page):
    """Execute the page's Python blocks. One that a text block follows must fail with that text."""
    text = (PAGES / page).read_text()
    blocks, names, failures = list(BLOCK.finditer(text)), {}, []
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block[1] == "text":
            continue
        code = compile(block[2], page, "exec")
        if following is None or following[1] == "python":
            exec(code, names)
            continue
        with pytest.raises(AssertionError) as error:
            exec(code, names)
        failures.append((following[2], f"{error.value}\n"))
    return failures


def test_three_planted_bugs_are_found():
    failures = run("test-your-trainer.md")
    assert len(failures) == 3
    for shown, found in failures:
        assert found == shown


def test_losses_are_composed_as_printed(capsys):
    assert run("losses.md") == []
    assert "policy_loss" in capsys.readouterr().out
