"""Random draws from a seed, with the global random state as it was before."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the generators of the CPU and of `device` start at `seed`. No other generator is touched.

    >>> with seeded(0, torch.device("cpu")):
    ...     first = torch.rand(())
    >>> with seeded(0, torch.device("cpu")):
    ...     bool(first == torch.rand(()))
    True
    """
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
