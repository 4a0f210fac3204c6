"""`import fnppo` is light: no model zoo, no hypothesis, no process group, no CUDA, no flash-attn."""

import subprocess
import sys

CHILD = """
import sys, time, torch
start = time.perf_counter()
import fnppo
seconds = time.perf_counter() - start
heavy = [name for name in sys.modules if name.split(".")[0] in ("transformers", "hypothesis", "flash_attn", "typer", "rich", "matplotlib")]
assert not heavy, heavy
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
print(seconds)
"""


def test_import_is_light():
    runs = [
        subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    ]
    assert min(map(float, runs)) < 1.0  # seconds


def test_signatures_are_checked_in_the_tests():
    import pytest
    import torch
    from jaxtyping import TypeCheckError

    from fnppo import kl_k3

    with pytest.raises(TypeCheckError):
        kl_k3(torch.zeros(2, 2), torch.zeros(2, 2))


def test_all_names_are_there():
    import fnppo

    assert all(getattr(fnppo, name) is not None for name in fnppo.__all__)
    assert len(set(fnppo.__all__)) == len(fnppo.__all__)
