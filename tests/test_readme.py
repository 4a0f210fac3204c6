"""The README's example and the scripts in examples/ run as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def rewards(*command, cwd):
    """What a script prints as rewards, line by line."""
    out = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert out.returncode == 0, out.stderr
    return [[float(x) for x in re.findall(r"reward ([\d.]+)", line)] for line in out.stdout.splitlines()]


def all_rise(found, by):
    return all(last > first + by for first, last in zip(found[0], found[-1], strict=True))


def test_the_example_in_the_readme_learns(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len([line for line in block.splitlines() if line]) <= 20
    (tmp_path / "example.py").write_text(block)
    found = rewards("example.py", cwd=tmp_path)
    assert len(found) == 20
    assert all_rise(found, by=2)


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SMALL = [path for path in EXAMPLES if "--small" in path.read_text()]


@pytest.mark.parametrize("script", ["01_first_update.py", "02_actor_critic.py"])
def test_examples_learn(script, tmp_path):
    assert all_rise(rewards(str(ROOT / "examples" / script), cwd=tmp_path), by=2)


@pytest.mark.parametrize("script", SMALL, ids=lambda path: path.name)
def test_examples_run_to_their_end(script, tmp_path):
    """They check what they claim; see the end of each."""
    out = subprocess.run(
        [sys.executable, script, "--small"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert "nan" not in out.stdout


def test_every_example_is_tested():
    """The third runs under torchrun, in tests/distributed."""
    assert len(EXAMPLES) == len(SMALL) + 3


def test_examples_are_short():
    assert all(len(path.read_text().splitlines()) < 120 for path in EXAMPLES)
    assert len((ROOT / "examples" / "01_first_update.py").read_text().splitlines()) < 40


def test_every_public_name_that_the_documents_mention_exists():
    import fnppo
    from fnppo import advantages, checkpoint, corrections, rollout, surrogates, testing

    for name in re.findall(r"`(\w+)`", (ROOT / "README.md").read_text()):
        if name.endswith(
            (
                "_mean",
                "_sequences",
                "_logprobs",
                "_loss",
                "_advantages",
                "_policy",
                "_step",
                "_checkpoint",
                "_batch",
                "_grad",
            )
        ):
            assert any(
                hasattr(place, name)
                for place in (fnppo, advantages, checkpoint, corrections, rollout, surrogates, testing)
            ), name


def test_every_function_in_the_tables_of_losses_exists():
    from fnppo import advantages, kl, kl_exact, surrogates

    page = (ROOT / "docs" / "pages" / "losses.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `") and "fnppo." not in line]
    names = [name for cell in cells for name in re.findall(r"`([a-z]\w+)", cell)]
    assert len(names) > 35
    for name in names:
        assert any(hasattr(place, name) for place in (advantages, kl, kl_exact, surrogates)), name


def test_every_metric_is_in_the_glossary():
    import torch

    import fnppo

    one = torch.ones(1)
    index = torch.zeros(1, dtype=torch.long)
    targets = fnppo.Targets(index, index, index, index, one, -one, one, -one)
    _, metrics = fnppo.ppo_loss(fnppo.TokenStats(-one, one), targets, kl_coef=0.1, kl_cap=1.0, entropy_coef=0.1)
    glossary = (ROOT / "docs" / "pages" / "metrics.md").read_text()
    for name in [*fnppo.summarize(metrics), "grad_norm", "loss_scale", "steps"]:
        assert f"`{name}`" in glossary, name


def test_no_placeholder_is_left():
    for page in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        assert not re.search(r"\b(RESULTS|TODO|FIXME|XXX)\b", (ROOT / page).read_text())
