"""Which rows teach something, and how the others are kept out of a loss."""

from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from fnppo.advantages.groups import above_lowest, group_max
from fnppo.advantages.rewards import grouped, not_a_row_mask
from fnppo.arguments import check_device, check_tensor
from fnppo.checks import check_batch
from fnppo.corrections.masks import reject
from fnppo.faults import refuse
from fnppo.types import PaddedBatch


def rewards_differ(
    rewards: Shaped[Tensor, " batch"], groups: Int[Tensor, " batch"], *, keep: Shaped[Tensor, " batch"] | None = None
) -> Bool[Tensor, " batch"]:
    """True on the rows whose group has two different rewards; the advantages of all others are 0.

    With advantage 0 they still count as tokens and sequences in the divisor of the loss, and in a KL term. That is one
    choice. The other is to leave them out: `mask_rows(batch, rewards_differ(...))`, or `select_rows` with the same mask.

    Args:
        rewards, groups, keep: as in `grpo_advantages`. Rejected rows are False.

    Raises:
        ValueError: as `grpo_advantages` does.

    >>> import torch
    >>> rewards_differ(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([4, 9, 4, 9]))
    tensor([ True, False,  True, False])
    """
    rewards, index, kept = grouped(rewards, groups, keep)
    return kept & (group_max(above_lowest(rewards, index, kept), index) > 0)


def mask_rows(batch: PaddedBatch, rows: Shaped[Tensor, " batch"]) -> PaddedBatch:
    """The batch with `loss_mask` cleared on all rows but the given ones, which are then in no loss and in no divisor.

    `select_rows` drops rows instead; here all shapes stay.

    Args:
        rows: a mask: True on rows to be learned, such as `rewards_differ` gives.

    Raises:
        ValueError: the batch is malformed or has `loss_weights` already, or rows is not a mask with one entry a row.

    >>> import torch
    >>> from fnppo import padded_batch
    >>> mask_rows(padded_batch([[1], [1]], [[2, 3], [4]]), torch.tensor([True, False])).loss_mask
    tensor([[False,  True,  True],
            [False, False, False]])
    """
    batch = check_batch(batch)
    check_tensor("rows", rows)
    if rows.shape != batch.loss_mask.shape[:1]:
        raise ValueError(
            f"rows has shape {tuple(rows.shape)}; the batch has {batch.loss_mask.shape[0]} rows. Give one True or False each."
        )
    check_device("rows", rows, "loss_mask", batch.loss_mask)
    refuse(not_a_row_mask("rows", rows))
    return reject(batch, (rows != 0)[:, None].expand(batch.loss_mask.shape))
