"""Calling a user's function on batches that hypothesis draws, and saying what was found."""

import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

import optree
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st

from fnppo.arguments import check_count, check_number
from fnppo.testing.differences import largest_difference
from fnppo.testing.drawing import LEGEND, draw_batch
from fnppo.types import PaddedBatch

CALLS_MADE_TWICE = 3


class Isolated:
    """A function whose calls cannot touch each other: it gets copies, and its results are copied.

    A trainer may change its batch in place, or answer with the one buffer that holds its gradients. Its first calls are
    made twice, as a function that is random cannot be tested.
    """

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn, self.calls = fn, 0

    def __call__(self, argument: Any) -> Any:
        result = self._once(argument)
        if self.calls < CALLS_MADE_TWICE and largest_difference(self._once(argument), result, finite=False).size > 0:
            raise ValueError(
                "two calls on the same batch give different results. Turn dropout off (model.eval()), fix the seed, or undo the "
                "step that the function takes."
            )
        self.calls += 1
        return result

    def _once(self, argument: Any) -> Any:
        result = self.fn(optree.tree_map(torch.clone, argument))
        leaves, structure = optree.tree_flatten(result)
        if not leaves:
            raise ValueError(f"the function returned {result!r}; a tensor or a tree of tensors is needed. Return one.")
        return optree.tree_unflatten(structure, [torch.as_tensor(leaf).detach().clone() for leaf in leaves])


def check_result(result: Any, *shapes: tuple[int, ...]) -> None:
    """Raise a `ValueError` unless the result is one tensor of one of the shapes."""
    if not isinstance(result, torch.Tensor) or tuple(result.shape) not in shapes:
        found = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise ValueError(
            f"the function returned {found}; it needs a tensor of shape {' or '.join(map(str, shapes))}. Put shifted log-probs "
            "back: column t is about token t, so pad one column on the left."
        )


def run(
    check: Callable[..., None],
    *strategies: st.SearchStrategy[Any],
    vocab_size: int,
    tolerance: float,
    max_examples: int,
) -> None:
    """Call `check` on drawn arguments: the same in every run, shrunk when one fails; nothing is written to disk."""
    check_count("vocab_size", vocab_size, least=2, remedy="One token cannot be told from another.")
    check_number("tolerance", tolerance, least=0, remedy="Use 1e-4 in float32.")
    settings(
        max_examples=check_count("max_examples", max_examples, least=1, remedy="Use 50."),
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )(given(*strategies)(check))()


def fail(batch: PaddedBatch, what: str, cause: str) -> NoReturn:
    """Raise an `AssertionError` that shows the batch and the usual cause."""
    what, cause = (textwrap.fill(text, 110, break_on_hyphens=False) for text in (what, f"Usual cause: {cause}"))
    raise AssertionError(f"{what}\n\n{draw_batch(batch)}\n({LEGEND})\n\n{cause}")
