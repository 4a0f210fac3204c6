"""Every signature of fnppo is checked at run time, types and shapes, in all tests."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

from jaxtyping import install_import_hook

LIBRARY = Path(__file__).parent.parent / "fnppo"
if "FNPPO_WITHOUT_CHECKER" not in os.environ:  # test_malformed.py meets the library as users do
    install_import_hook([f"fnppo.{file.stem}" for file in LIBRARY.glob("[!_]*.py")], "typecheck.check")

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "default", max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "nightly", max_examples=10_000, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
