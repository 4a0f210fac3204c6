"""The scripts that measure, on tiny sizes: they run to their end, and what they compute with is right."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fnppo
from fnppo.testing import LiveBytes, tiny_llama

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def run_quick(script, out, *, option="--out"):
    command = [sys.executable, ROOT / "benchmarks" / script, "--quick", option, out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def check_page(page, out):
    """Same words as the page in docs, other figures; every plot that it shows is there."""
    written, kept = (out / page).read_text(), (ROOT / "docs/pages" / page).read_text()
    generated = re.compile(r"<!-- (.+?) -->.*?<!-- end of \1 -->", re.S)
    assert generated.sub(r"\1", written) == generated.sub(r"\1", kept)
    assert len(generated.findall(written)) >= 1
    for plot in re.findall(r"!\[.*?\]\((.+?)\)", written):
        assert (out / plot).read_text().startswith("<?xml"), plot
        assert (ROOT / "docs/pages" / plot).exists(), plot
    assert "nan" not in written.lower().split()


def test_work_is_what_torch_counts():
    """Products of a Llama with grouped heads, by torch's own counter: the eager attention computes all n² pairs."""
    from arithmetic import work_of

    module = tiny_llama(num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager")
    n = 7
    batch = fnppo.padded_batch([[1]], [[2] * (n - 1)])
    work = work_of(module.config, batch, fnppo.packed)
    with FlopCounterMode(display=False) as counter:
        module(torch.ones(1, n, dtype=torch.long), use_cache=False).logits.sum().backward()
    counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    pairs, attention = n * (n + 1) / 2, counts.pop("aten.bmm")
    assert sum(counts.values()) == work.layers + work.head * n / (n - 1)
    assert attention == work.attention * n**2 / pairs


def test_shared_prompts_are_work_once():
    from arithmetic import work_of

    config = tiny_llama().config
    rows = fnppo.padded_batch([list(range(1, 11))] * 3, [[11], [12, 1], [4, 5]])
    packed, shared = (work_of(config, rows, layout) for layout in (fnppo.packed, fnppo.shared))
    assert shared.head == packed.head
    assert shared.layers / packed.layers == (10 + 1 + 2 + 2) / (11 + 12 + 12)
    assert shared.attention / packed.attention == pytest.approx((55 + 11 + 23 + 23) / (66 + 78 + 78))


def test_exponents():
    from cost_page import exponent

    assert exponent([1, 2, 4, 8], [3 * x**1.5 for x in (1, 2, 4, 8)]) == pytest.approx(1.5)
    assert exponent([1, 2, 4], [5, 5, 5]) == 0


@pytest.mark.slow
def test_the_curves_of_cost(tmp_path):
    run_quick("cost.py", tmp_path)
    check_page("cost.md", tmp_path)
    data = json.loads((tmp_path / "plots/cost.json").read_text())
    for sweep in data["sweeps"].values():
        assert all(row["peak"] > 0 and row["seconds"] > 0 for row in sweep["rows"])
    rows = {(row["series"], row["x"]): row["peak"] for row in data["sweeps"]["tokens"]["rows"]}
    # Counted, so the same on every machine.
    assert (
        rows["one micro-batch", 64] > 1.5 * rows["one micro-batch", 32] == 1.5 * rows["micro-batches of 32 tokens", 32]
    )
    again = [sys.executable, ROOT / "benchmarks/cost.py", "--draw", "--out", tmp_path]
    page = (tmp_path / "cost.md").read_text()
    subprocess.run(again, check=True)
    assert (tmp_path / "cost.md").read_text() == page


def test_a_page_without_its_marks_is_refused(tmp_path):
    from generated import write_parts

    with pytest.raises(ValueError, match=r"cost\.md has 0 places for nothing\. Put its two marks there once\."):
        write_parts("cost.md", {"nothing": "text"}, out=tmp_path)
    assert not (tmp_path / "cost.md").exists()


@pytest.mark.parametrize("max_tokens", [None, 256])
def test_the_formula_of_the_peak_is_what_is_counted(max_tokens):
    """docs/pages/cost.md explains memory by it. The optimizer is the peak where the batch is small."""
    import cost

    sizes = cost.QUICK._replace(hidden=64, inner=160, layers=3, vocab=512, length=64)
    updates = cost.Updates(sizes)
    for rows, response in ((16, 32), (8, 60), (1, 2)):
        batch = cost.rollouts(rows, prompt=sizes.length - response, response=response, vocab=512)
        point = cost.Point("", 0, batch, max_tokens=max_tokens)
        updates.prepare(point)
        with LiveBytes() as memory:
            updates.run(point)
        assert memory.peak == pytest.approx(updates.expected_peak(point), rel=0.03), rows


@pytest.mark.slow
def test_half_precision_is_measured(tmp_path):
    """Each dtype with fewer digits errs more, and gradients in float16 are lost only without a scale."""
    run_quick("precision.py", tmp_path, option="--write")
    check_page("precision.md", tmp_path)
    data = json.loads((tmp_path / "plots/precision.json").read_text())
    errors = {(row["dtype"], row["layout"]): row for row in data["errors"] if row["scale"] or row["dtype"] != "float16"}
    assert len(errors) == 6
    for layout in ("packed", "padded"):
        for kind in ("logprob_max", "logprob_mean", "entropy_mean", "gradient"):
            exact, half, brain = (errors[dtype, layout][kind] for dtype in ("float32", "float16", "bfloat16"))
            assert 0 < 2 * exact < half, kind
            assert 2 * half < brain < 0.2, kind
    lost = {bool(row["scale"]): row["lost"] for row in data["errors"] if row["dtype"] == "float16"}
    assert lost[True] < lost[False]
    assert data["pairs"][-1]["max"] < 1e-5  # both in float32


@pytest.mark.slow
def test_contenders_agree(tmp_path):
    """fnppo in both layouts and a plain loop: the same numbers, and figures of each."""
    script, data = ROOT / "benchmarks/peers/run.py", tmp_path / "found.json"
    options = ["--workloads", "tiny", "--rounds", "1", "--only", "fnppo", "plain", "--json", data]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(data.read_text())["workloads"]["tiny"]
    assert set(found["apart"]) == {"fnppo shared", "fnppo packed", "plain"}
    assert all(0 < error < 1e-4 for name in ("fnppo shared", "fnppo packed") for error in found["apart"][name].values())
    assert all(error == 0 for error in found["apart"]["plain"].values())
    for work in found["work"].values():
        assert all(seconds > 0 for rounds in work["seconds"].values() for seconds in rounds)
        assert all(memory > 100 for memory in work["memory"].values())
    assert "| fnppo packed |" in done.stdout
