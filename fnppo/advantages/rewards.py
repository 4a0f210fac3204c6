"""Rewards as users give them, one a response, with their groups and with the responses that are rejected: checked.

The signatures say little of what is taken, since saying what is wrong with it is what these functions are for.
"""

import warnings

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fnppo.advantages.groups import group_count, group_index
from fnppo.arguments import check_device, check_tensor, check_whole
from fnppo.faults import Fault, refuse
from fnppo.transforms import inside_transform


def grouped(
    rewards: Tensor, groups: Tensor, keep: Tensor | None
) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"], Bool[Tensor, " batch"]]:
    """(rewards, `group_index` of the groups, rows that are kept), with a warning of a row that is alone in its group.

    Raises:
        ValueError: as `check_rewards` does, or groups do not fit.
    """
    check_row_column("groups", groups, rewards)
    rewards, kept = check_rewards(rewards, keep)
    return rewards, check_groups(groups, rewards, kept, stacklevel=4), kept


def check_groups(
    groups: Tensor, rows: Tensor, kept: Tensor | None = None, *, stacklevel: int = 3
) -> Int[Tensor, " batch"]:
    """`group_index` of groups that fit the rows, with a warning of a row that is alone; inside a transform ids are unknown.

    Raises:
        ValueError: there is not one integer a row, on the device of the rows.
    """
    check_tensor("groups", groups)
    if groups.shape != rows.shape[:1]:
        raise ValueError(
            f"groups has shape {tuple(groups.shape)}; there are {rows.shape[0]} rows. Give one integer a row."
        )
    check_device("groups", groups, "rewards", rows)
    check_whole("groups", groups)
    index = group_index(groups)
    if inside_transform():
        return index
    # Before rejection: that leaves one of a group on purpose, wrong group ids do not.
    alone = group_count(index, torch.ones_like(index, dtype=torch.bool)) == 1
    lone = (alone if kept is None else alone & kept).nonzero()[:, 0].tolist()
    if lone:
        warnings.warn(
            f"row {lone[0]} is alone in group {groups[lone[0]].item()}, with nothing to be compared with. Check the group ids.",
            stacklevel=stacklevel,
        )
    return index


def check_rewards(
    rewards: Tensor, keep: Tensor | None, *, name: str = "reward"
) -> tuple[Float[Tensor, " batch"], Bool[Tensor, " batch"]]:
    """(rewards as float32 or float64, 0 where they are rejected; rows that are kept).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a kept reward is not finite or too large to be squared.
    """
    check_row_column(f"{name}s", rewards, rewards)
    keep = torch.ones_like(rewards, dtype=torch.bool) if keep is None else keep
    check_row_column("keep", keep, rewards)
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    rewards = rewards.to(torch.promote_types(dtype, torch.float32))
    limit, kept = torch.finfo(rewards.dtype).max ** 0.5 / 1e3, keep != 0
    too_large = f"the {name} is {{value}}, and squares of rewards above {limit:.1e} overflow. Scale the rewards."
    refuse(
        not_a_row_mask("keep", keep),
        Fault(
            kept & ~rewards.isfinite(),
            f"the {name} is {{value}}. Mend it, or reject the row with keep.",
            rewards,
            "row",
        ),
        Fault(kept & (rewards.abs() > limit), too_large, rewards, "row"),
    )
    return torch.where(kept, rewards, 0), kept


def check_row_column(name: str, column: Tensor, rewards: Tensor) -> None:
    """Raise a `ValueError` where a column does not have one real number a row, as the rewards have."""
    check_tensor("rewards", rewards)
    check_tensor(name, column)
    if column.shape != rewards.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}, {name} {tuple(column.shape)}. Both need one value a row."
        )
    check_device(name, column, "rewards", rewards)
    if column.is_complex():
        raise ValueError(f"{name} has dtype {column.dtype}; it needs real numbers. Call .real on it.")


def not_a_row_mask(name: str, mask: Tensor) -> Fault:
    """Anything but True/False and 0/1 for a row."""
    message = f"{name} is {{value}}; a mask of rows holds True/False or 0/1. Give row numbers to select_rows instead."
    return Fault((mask != 0) & (mask != 1), message, mask, "row")
