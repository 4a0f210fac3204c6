"""Random draws from a seed, with the global random state as it was before."""

import contextlib
from collections.abc import Iterator

import torch

from fnppo.arguments import check_count


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the generators of the CPU and of `device` start at `seed`. No other generator is touched.

    >>> with seeded(0, torch.device("cpu")):
    ...     first = torch.rand(())
    >>> with seeded(0, torch.device("cpu")):
    ...     bool(first == torch.rand(()))
    True
    """
    seed = check_seed(seed)
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def check_seed(seed: int) -> int:
    """`seed`, or a `ValueError` if a generator cannot start there."""
    if check_count("seed", seed, least=-(2**63), remedy="Count from 0.") >= 2**64:
        raise ValueError(f"seed is {seed}; it must be below 2**64. Take it modulo 2**64.")
    return seed
