"""Every signature of fnppo is checked at run time, types and shapes, in all tests by day but those with `unchecked`.

Properties that are `core` go without as well: they compare numbers with an oracle, in many examples, whose time the check
would double.
"""

import os
import sys
from collections import Counter
from contextlib import suppress
from math import ceil
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import jaxtyping
import pytest
from jaxtyping import install_import_hook

collect_ignore = ["mutation.py", "mutation_report.py"]  # of a tool that only `make mutation` installs
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
LIBRARY = Path(__file__).parent.parent / "fnppo"
# A mutant must be caught by what it computes, and test_malformed.py meets the library as users do: without this check.
# By night it would cost a third of the examples.
if PROFILE == "default" and "FNPPO_WITHOUT_CHECKER" not in os.environ:
    modules = [*(file.stem for file in LIBRARY.glob("[!_]*.py")), "surrogates", "advantages", "corrections"]
    install_import_hook([f"fnppo.{module}" for module in modules], "typecheck.check")

import torch
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings
from hypothesis.errors import InvalidArgument

torch.set_num_threads(1)
settings.register_profile(
    "default", max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "nightly",
    max_examples=10_000,
    deadline=None,
    derandomize=False,  # not even where CI is set: each night draws others
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
# The first example that fails kills a mutant, and nobody reads it.
settings.register_profile(
    "mutation",
    parent=settings.get_profile("default"),
    max_examples=5,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(PROFILE)

if PROFILE == "mutation":
    pytest_plugins = ["mutation"]


@pytest.fixture(autouse=True)
def core_is_unchecked(request):
    if request.node.get_closest_marker("core"):
        request.getfixturevalue("unchecked")


@pytest.fixture
def unchecked():
    """The library as users meet it: torch.compile cannot read the checker, and it is most of the time of small calls."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_collection_modifyitems(items):
    """The cases of a parametrized property share its examples: 60 by day, at most 20 and at least 3 each."""
    cases = Counter(item.function for item in items if is_hypothesis_test(getattr(item, "function", None)))
    for function, count in cases.items():
        share = {"default": min(20, max(3, ceil(60 / count))), "nightly": ceil(settings().max_examples / count)}
        with suppress(InvalidArgument):  # it has settings of its own
            settings(max_examples=share.get(PROFILE, settings().max_examples))(function)
