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
    out = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout
    assert float(out) < 10  # seconds beside other tests; on an idle machine well under one


def test_all_names_are_there():
    import fnppo

    assert all(getattr(fnppo, name) is not None for name in fnppo.__all__)
    assert len(set(fnppo.__all__)) == len(fnppo.__all__)
