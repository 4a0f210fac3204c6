"""Trees of rows for the tests of plans, and the tokens that rows take when what they have in common is laid once."""

import torch

from fnppo import plan_shared_microbatches
from fnppo.prefixes import tree_of_rows


def tree_of(rows):
    return tree_of_rows([torch.tensor(row, dtype=torch.long) for row in rows], least_shared=1)


def plan_prompts(lengths, prompts, **options):
    """A plan of rows that share the prompts {prompt: rows}, and go on with tokens that no other row has."""
    rows, fresh = [[] for _ in lengths], 1000
    for prompt, members in prompts.items():
        for row in members:
            own = lengths[row] - len(prompt)
            rows[row] = [*prompt, *range(fresh, fresh + own)]
            fresh += own
    return plan_shared_microbatches(tree_of(rows), **options)


def tokens_once(rows):
    """The naive count: every beginning of a row is one token, the same beginnings are one."""
    return len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})
