"""Which layouts fit, which of them sends least, and what would fit if none does."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from fnppo.arguments import check_count, check_number
from fnppo.plan.arithmetic import Flops, flops_per_token
from fnppo.plan.memory import Layout, Memory, memory_of
from fnppo.plan.shape import Shape
from fnppo.plan.traffic import Traffic, traffic_of

MOST_GPUS = 4096
"""As far as a number of GPUs is looked for."""
MOST_TOKENS = 1 << 24
"""As far as a number of tokens is looked for."""


class Row(NamedTuple):
    """A layout and what it takes."""

    layout: Layout
    memory: Memory
    traffic: Traffic
    flops: Flops
    left: int
    """Bytes; below 0 it does not fit."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.left >= 0


class Plan(NamedTuple):
    """All layouts of one model on one number of GPUs."""

    shape: Shape
    gpus: int
    budget: int
    """Bytes of a GPU that are for the update."""
    tokens: int
    update_tokens: int
    master: torch.dtype
    rows: tuple[Row, ...]
    recommended: Row | None
    """The one that fits and sends least."""
    most_tokens: int
    """The largest micro-batch that fits, in any layout; 0 if none does."""
    fewest_gpus: int | None
    """The least number, doubled from `gpus`, on which `tokens` fit; None if none does."""


def plan_update(
    shape: Shape,
    *,
    gpus: int,
    budget: int,
    tokens: int,
    update_tokens: int | None = None,
    master: torch.dtype = torch.float32,
    offload: bool = False,
) -> Plan:
    """Every layout of `gpus` GPUs, and the one that fits into `budget` bytes and sends the fewest.

    Among equals the one that does less arithmetic is taken, and one that offloads only where nothing else fits.

    Args:
        tokens: of a micro-batch.
        update_tokens: of a mini-batch, on all GPUs; by default one micro-batch for each.
        master: dtype of parameters and moments.
        offload: whether to look at layouts with parameters, gradients and moments on the host too.

    Raises:
        ValueError: a number is not above 0.

    >>> from fnppo.plan import empty_model, shape_of
    >>> plan = plan_update(shape_of(empty_model("qwen2.5-7b")), gpus=8, budget=70 << 30, tokens=16384)
    >>> plan.recommended.layout
    Layout(fsdp=8, ulysses=1, remat=True, offload=False)
    """
    check_count("gpus", gpus, least=1, remedy="An update needs at least 1.")
    check_count("tokens", tokens, least=1, remedy="Give the tokens of a micro-batch.")
    check_number("budget", budget, above=0, remedy="It is the memory of a GPU less the reserve, in bytes.")
    update_tokens = gpus * tokens if update_tokens is None else update_tokens
    check_count("update_tokens", update_tokens, least=1, remedy="Give the tokens of a mini-batch.")

    def fits(layout: Layout, tokens: int) -> bool:
        return memory_of(shape, layout, tokens=tokens, master=master).peak <= budget

    layouts = layouts_of(shape, gpus, offload=offload)
    rows = tuple(
        Row(
            layout,
            memory := memory_of(shape, layout, tokens=tokens, master=master),
            traffic_of(shape, layout, tokens=tokens, update_tokens=update_tokens, master=master),
            flops_per_token(shape, remat=layout.remat),
            budget - memory.peak,
        )
        for layout in layouts
    )
    more = (n for k in range(14) if (n := gpus << k) <= max(MOST_GPUS, gpus))
    return Plan(
        shape, gpus, budget, tokens, update_tokens, master, rows,
        recommended=min((row for row in rows if row.fits), key=_cost, default=None),
        most_tokens=max(_most(partial(fits, layout)) for layout in layouts),
        fewest_gpus=next((n for n in more if any(fits(layout, tokens) for layout in layouts_of(shape, n, offload=offload))), None),
    )  # fmt: skip


def layouts_of(shape: Shape, gpus: int, *, offload: bool = False) -> list[Layout]:
    """Every way to use the GPUs: Ulysses groups divide them and all heads, and share or copy keys evenly.

    >>> from fnppo.plan import empty_model, shape_of
    >>> sorted({layout.ulysses for layout in layouts_of(shape_of(empty_model("qwen2.5-7b")), 8)})  # 28 heads
    [1, 2, 4]
    """
    heads = [heads for layer in shape.layers for heads in layer.attention]

    def possible(size: int) -> bool:
        if size == 1:
            return True
        return bool(heads) and all(h.queries % size == 0 and (h.keys % size == 0 or size % h.keys == 0) for h in heads)

    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0 and possible(size)]
    return [
        Layout(gpus // size, size, remat, away)
        for away in ((False, True) if offload else (False,))
        for size in sizes
        for remat in (False, True)
    ]


def _cost(row: Row) -> tuple[float, ...]:
    return row.layout.offload, row.traffic.update, row.flops.matrices, row.layout.ulysses


def _most(fits: Callable[[int], bool]) -> int:
    """The largest number of tokens that fits: memory grows with tokens, so that is one place, found by halving.

    >>> _most(lambda tokens: tokens <= 1000)
    1000
    """
    low, high = 0, MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
