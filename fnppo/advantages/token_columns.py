"""Columns of numbers about the learned tokens of a batch: checked, made from one number a row, in the order of learning."""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fnppo.arguments import check_device, check_tensor
from fnppo.faults import Fault, not_a_mask, not_finite, refuse


def on_every_token(
    values: Shaped[Tensor, " batch"], loss_mask: Shaped[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """One number a row, given to all of its learned tokens; 0 elsewhere. So advantages of responses become a column.

    Raises:
        ValueError: there is not one finite number a row with learned tokens.

    >>> on_every_token(torch.tensor([2.0, 3.0]), torch.tensor([[False, True, True], [True, False, False]]))
    tensor([[0., 2., 2.],
            [3., 0., 0.]])
    """
    values, learned = _row_values(values, loss_mask)
    return torch.where(learned, values[:, None], 0)


def on_last_token(
    values: Shaped[Tensor, " batch"], loss_mask: Shaped[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """One number a row, given to its last learned token; 0 elsewhere. So rewards of responses become rewards of tokens.

    Raises:
        ValueError: there is not one finite number a row with learned tokens.

    >>> on_last_token(torch.tensor([2.0, 3.0]), torch.tensor([[False, True, True], [True, False, False]]))
    tensor([[0., 0., 2.],
            [3., 0., 0.]])
    """
    values, learned = _row_values(values, loss_mask)
    count = learned.cumsum(1)
    return torch.where(learned & (count == count[:, -1:]), values[:, None], 0)


def learned_columns(
    loss_mask: Shaped[Tensor, "batch seq"], **columns: Tensor
) -> tuple[Bool[Tensor, "batch seq"], list[Float[Tensor, "batch seq"]]]:
    """(loss_mask as booleans, the columns in float32 or better, with 0 elsewhere: what stands there is never read).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a column is not finite at a learned token.
    """
    everything = {**columns, "loss_mask": loss_mask}
    first, other = next(iter(everything.items()))
    for name, column in everything.items():
        check_tensor(name, column)
        check_device(name, column, first, other)
        if name != "loss_mask" and not column.is_floating_point():
            raise ValueError(f"{name} has dtype {column.dtype}; it needs floating point. Call .float() on it.")
    if loss_mask.dim() != 2 or any(column.shape != loss_mask.shape for column in columns.values()):
        shapes = ", ".join(f"{name} {tuple(column.shape)}" for name, column in everything.items())
        raise ValueError(f"shapes differ or are not [batch, seq]: {shapes}. Every column is token-aligned.")
    learned = loss_mask != 0
    refuse(not_a_mask("loss_mask", loss_mask), *(not_finite(name, each, learned) for name, each in columns.items()))
    precise = (column.to(torch.promote_types(column.dtype, torch.float32)) for column in columns.values())
    return learned, [torch.where(learned, column, 0) for column in precise]


def learned_first(learned: Bool[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """The column that each token moves to where the learned ones of its row come first, all as they follow each other.

    What stands between them, such as the output of a tool, and padding then part no two of them.

    >>> learned_first(torch.tensor([[False, True, False, True]]))
    tensor([[2, 0, 3, 1]])
    """
    before, others = learned.cumsum(1), (~learned).cumsum(1)
    return torch.where(learned, before, before[:, -1:] + others) - 1


def moved(values: Shaped[Tensor, "batch seq"], places: Int[Tensor, "batch seq"]) -> Shaped[Tensor, "batch seq"]:
    """A column with each entry moved to its place."""
    return torch.zeros_like(values).scatter(1, places, values)


def moved_back(values: Float[Tensor, "batch seq"], places: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq"]:
    """A column that was moved, as it stood before."""
    return values.gather(1, places)


def _row_values(values: Tensor, loss_mask: Tensor) -> tuple[Float[Tensor, " batch"], Bool[Tensor, "batch seq"]]:
    learned, _ = learned_columns(loss_mask)
    check_tensor("values", values)
    check_device("values", values, "loss_mask", loss_mask)
    if values.shape != learned.shape[:1] or values.is_complex():
        raise ValueError(
            f"values has shape {tuple(values.shape)} and dtype {values.dtype}; loss_mask has {learned.shape[0]} rows. Give "
            "one real number each."
        )
    bad = learned.any(1) & ~values.isfinite()
    refuse(Fault(bad, "its value is {value}. Mend it, or clear loss_mask in the row.", values, "row"))
    return values.to(values.dtype if values.is_floating_point() else torch.float32), learned
