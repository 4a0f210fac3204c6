"""Which rows are learned, and in no divisor if they are not."""

from inspect import unwrap  # an unwrapped function is without the run-time check of shapes, as users have it

import pytest
import torch
from torch import tensor

from fnppo import padded_batch, sequence_mean, token_mean
from fnppo.advantages.outcome import dr_grpo_advantages
from fnppo.advantages.row_filters import mask_rows, rewards_differ


def test_groups_of_equal_rewards_are_kept_or_dropped():
    """H6: losses 1, 1 | 0, 0, the second group with equal rewards: kept 0.5, dropped 1.0. And so for a lone response."""
    rewards, groups = tensor([1.0, 0.0, 0.7, 0.7]), [4, 4, -2, -2]
    batch, losses = padded_batch([[1]] * 4, [[2]] * 4, groups=groups), tensor([1.0, 1.0, 0.0, 0.0])
    differ = rewards_differ(rewards, batch.groups)
    assert differ.tolist() == [True, True, False, False]
    for weights in (token_mean, sequence_mean):
        loss = lambda batch: (weights(batch).loss_weights.sum(1) * losses).sum().item()
        assert loss(batch) == 0.5
        assert loss(mask_rows(batch, differ)) == 1.0
    with pytest.warns(UserWarning, match="row 2 is alone"):
        assert rewards_differ(rewards[:3], tensor(groups[:3])).tolist() == [True, True, False]


def test_a_rejected_row_is_in_no_statistic_and_in_no_divisor():
    rewards, keep = tensor([1.0, 0.0, float("nan")]), tensor([True, True, False])
    batch = mask_rows(padded_batch([[1]] * 3, [[2], [3, 4], [5, 6]], groups=[0, 0, 0]), keep)
    assert dr_grpo_advantages(rewards, batch.groups, keep=keep).tolist() == [0.5, -0.5, 0.0]
    assert token_mean(batch).loss_weights.sum(1).tolist() == pytest.approx([1 / 3, 2 / 3, 0.0])
    assert torch.equal(mask_rows(batch, torch.ones(3)).loss_mask, batch.loss_mask)


def test_bad_masks_of_rows():
    batch = padded_batch([[1]] * 2, [[2]] * 2)
    with pytest.raises(ValueError, match=r"rows has shape \(3,\); the batch has 2 rows"):
        unwrap(mask_rows)(batch, torch.ones(3))
    with pytest.raises(ValueError, match="row 1: rows is 7; a mask of rows holds True/False or 0/1"):
        mask_rows(batch, tensor([1, 7]))
