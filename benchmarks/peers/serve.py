"""The other end of `run.py`: a contender in a process of its own, which works when it is told to.

`python SIDE.py WORKLOAD MODE` reads a line for each piece of work from its input and answers with one line of JSON:

    logprobs        log-probs and entropies of all response tokens, without gradients
    update          one optimizer step over the whole batch
    profile         where the seconds of an update go
    found FILE      the first log-probs, entropies and clipped gradients, to a file
"""

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Contender(NamedTuple):
    """What is compared.

    Attributes:
        logprobs: () -> (log-probs, entropies), [rows, responses], anything where `response_mask` is 0.
        update: () -> None, one optimizer step.
        gradients: () -> {parameter: gradient}, clipped, of the last update since `watch` was called.
    """

    logprobs: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    update: Callable[[], None]
    gradients: Callable[[], dict[str, torch.Tensor]]
    version: str


def serve(make: Callable[[dict[str, Any], str], Contender]) -> None:
    """Command line of a side."""
    _, file, mode = sys.argv
    workload = torch.load(file)
    torch.set_num_threads(workload["threads"])
    answers = sys.stdout
    sys.stdout = sys.stderr  # where what the libraries print does no harm
    contender = make(workload, mode)
    print(json.dumps({"version": contender.version}), file=answers, flush=True)
    found: Any = None
    for line in sys.stdin:
        work, _, argument = line.strip().partition(" ")
        start = time.perf_counter()
        answer: dict[str, Any] = {}
        if work == "profile":
            answer["kinds"] = profile(contender.update, workload["config"]["vocab_size"])
        elif work == "found":
            torch.save((*found, contender.gradients()), argument)
        else:
            result = getattr(contender, work)()
            answer = {"seconds": time.perf_counter() - start, "peak": most_resident()}
            found = found or result
        print(json.dumps(answer), file=answers, flush=True)


def most_resident() -> float:
    """MiB of this process when it had most of them."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def profile(run: Callable[[], None], vocab: int) -> dict[str, float]:
    """Seconds by kind of operation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as found:
        run()
    seconds: Counter[str] = Counter()
    for event in found.key_averages(group_by_input_shape=True):
        of_head = any(vocab in shape for shape in event.input_shapes if isinstance(shape, list))
        if event.key.removeprefix("aten::").rstrip("_") in ("mm", "addmm", "bmm", "linear"):
            kind = "products of the head" if of_head else "products of the layers"
        elif "attention" in event.key:
            kind = "attention"
        else:
            kind = "the head's softmax and its derivative" if of_head else "all else"
        seconds[kind] += event.self_cpu_time_total / 1e6
    return dict(seconds)


def watched(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Callable[[], dict[str, torch.Tensor]]:
    """The gradients of the first step that an optimizer of torch takes: they are copied once, and then no more."""
    seen: dict[str, torch.Tensor] = {}

    def copy(*_: Any) -> None:
        if not seen:
            seen.update((name, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None)

    optimizer.register_step_pre_hook(copy)
    return lambda: seen
