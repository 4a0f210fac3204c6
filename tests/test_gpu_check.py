"""The script for GPUs, on a CPU and a tiny model: it runs to its end, and a wrong backend does not pass."""

import json
import subprocess
import sys
from pathlib import Path

import fnppo

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"


def test_it_runs_to_its_end(tmp_path):
    file = tmp_path / "check.json"
    command = [sys.executable, SCRIPT, "--small", "--device", "cpu", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(file.read_text())["lines"]
    verdicts = {line["check"]: line["verdict"] for line in lines}
    assert set(verdicts.values()) == {"ok", "cannot"}
    for check, verdict in verdicts.items():
        needs_cuda = check.startswith(("varlen_attention", "flash_attention"))
        assert verdict == ("cannot" if needs_cuda else "ok"), check
    assert len([check for check in verdicts if check.startswith("update, tiny")]) == 4
    assert all(f"| {check} | {verdict} |" in done.stdout for check, verdict in verdicts.items())


def test_without_a_gpu_it_says_what_to_do():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stderr) == (
        1,
        "There is no CUDA device. Run with --small --device cpu to test the script itself.\n",
    )


def test_a_wrong_backend_is_found(monkeypatch):
    """Windows that are a token too wide, prompts that are forgotten, gradients twice as large, NaN, an error."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu_check

    def too_wide(*tensors, window=None, **asked):
        return fnppo.sdpa_attention(*tensors, window=None if window is None else window + 1, **asked)

    def forgetful(query, key, value, segments, **asked):
        return fnppo.math_attention(query, key, value, segments._replace(ancestors=None), **asked)

    def twice(query, key, value, segments, **asked):
        value = 2 * value - value.detach()
        return fnppo.sdpa_attention(query, key, value, segments, **asked)

    def not_a_number(*tensors, **asked):
        return fnppo.sdpa_attention(*tensors, **asked) * float("nan")

    def broken(*tensors, **asked):
        raise ValueError("segments have the wrong shape")

    monkeypatch.setattr(gpu_check, "BACKENDS", (too_wide, forgetful, twice, not_a_number, broken))
    monkeypatch.setattr(gpu_check, "FAMILIES", {"window": gpu_check.FAMILIES["window"]})
    verdicts = {line.check: line.verdict for line in gpu_check.parity("cpu")}
    for dtype in ("float32", "bfloat16"):
        assert verdicts[f"too_wide, window, packed, {dtype}"] == "WRONG"
        assert verdicts[f"forgetful, window, shared, {dtype}"] == "WRONG"
        assert verdicts[f"forgetful, window, packed, {dtype}"] == "ok"
        for name in ("twice", "not_a_number", "broken"):
            assert verdicts[f"{name}, window, packed, {dtype}"] == "WRONG", name
