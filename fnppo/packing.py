"""From a padded rectangle to what the model reads, and back: the only layout change and the only next-token shift.

Packed, the existing tokens of all rows lie end to end on one axis, so no work is spent on padding:

    input_ids        attention_mask         packed ids     cu_seqlens    position_ids
    [[_, 5, 6],      [[0, 1, 1],      ->    5 6 7 8 9      0 2 5         0 1 0 1 2
     [7, 8, 9]]       [1, 1, 1]]

A target is an existing token with `loss_mask` set; its predictor is the existing token before it in the same row. So
the last token of one sequence can never be scored against the first of the next.

With shared prefixes, what rows have in common at their beginning is laid once, as a segment that the others go on from
(`fnppo.prefixes`), so one position can predict tokens of several rows:

    rows               tree                   packed ids         cu_seqlens    position_ids       parents
    7 8 5 6                    ┌─ 6           7 8 5 6 9 4 3      0 3 4 6 7     0 1 2 3 3 4 5      -1 0 0 2
    7 8 5 9 4          7 8 5 ──┤
    7 8 5 9 4 3                └─ 9 4 ── 3
"""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from fnppo.arguments import check_count, check_tensor
from fnppo.checks import FLOAT_COLUMNS, check_batch, check_targets
from fnppo.faults import Fault, refuse
from fnppo.prefixes import LEAST_SHARED, check_least_shared, tree_of_rows
from fnppo.types import ModelBatch, PackedInputs, PaddedBatch, PaddedInputs, Targets


def pack_sequences(
    batch: PaddedBatch,
    *,
    share_prefixes: bool = False,
    least_shared: int = LEAST_SHARED,
    pad_to: int | None = None,
) -> ModelBatch:
    """Lay the existing tokens of all rows end to end on one axis.

    Packing is preparation of data: it runs outside of torch.func transforms.

    Args:
        batch: the rollouts; padding may stand anywhere.
        share_prefixes: rows that begin with the same tokens share one copy of these, which is computed once: a prompt
            of several responses, the turns of a dialogue that goes on, the trunk of a tree search. Learned tokens are
            shared as well; each row keeps a target for each of its own. The numbers stay the same.
        least_shared: rows with fewer tokens in common at their beginning share nothing, see `fnppo.prefixes`.
        pad_to: if given, the axis is filled up to this many tokens, for static shapes. The filler forms segments of
            its own, after the rows, that no target points to. A batch without any token gets one filler token, as a
            model needs one.

    Returns:
        `ModelBatch` with `PackedInputs`. Where nothing is shared, segment i is row i.

    Raises:
        ValueError: the batch is malformed (see `fnppo.checks`) or has more than `pad_to` tokens, or a number is not whole
            or below 1.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[5], [7, 8]], [[6], [9]])
    >>> inputs, targets = pack_sequences(batch)
    >>> inputs.input_ids, inputs.cu_seqlens
    (tensor([5, 6, 7, 8, 9]), tensor([0, 2, 5], dtype=torch.int32))
    >>> targets.token_ids, targets.predictors
    (tensor([6, 9]), tensor([0, 3]))
    >>> batch = padded_batch([[7, 8], [7, 8]], [[5, 6], [5, 9, 4]])
    >>> inputs, targets = pack_sequences(batch, share_prefixes=True, least_shared=1)
    >>> inputs.input_ids, inputs.cu_seqlens, inputs.parents
    (tensor([7, 8, 5, 6, 9, 4]), tensor([0, 3, 4, 6], dtype=torch.int32), tensor([-1,  0,  0]))
    >>> targets.token_ids, targets.predictors
    (tensor([5, 6, 5, 9, 4]), tensor([1, 2, 1, 2, 4]))
    """
    batch = check_batch(batch)
    if pad_to is not None:
        check_count("pad_to", pad_to, least=1, remedy="None adds no filler.")
    check_least_shared(least_shared)
    kept = _kept(batch)
    counts, parents = batch.attention_mask.sum(1), None
    order = location = torch.arange(kept.numel(), device=kept.device)
    if share_prefixes and (shared := _share_prefixes(batch, kept, least_shared=least_shared)) is not None:
        order, location, counts, parents = shared
    tokens = order.numel()
    length = max(tokens, 1) if pad_to is None else pad_to
    if tokens > length:
        raise ValueError(f"the batch has {tokens} tokens, pad_to is {pad_to}. Raise pad_to or plan smaller batches.")
    filler = torch.arange(length - tokens, device=kept.device)
    # No filler segment is longer than the longest segment, so none needs a position that the model may not have.
    longest = max(int(counts.max()), 1) if counts.numel() else 1
    filler_counts = torch.bincount(filler // longest)
    if parents is not None:
        parents = torch.cat([parents, torch.full_like(filler_counts, -1)])
    inputs = PackedInputs(
        input_ids=torch.cat(
            [batch.input_ids.flatten()[kept[order]], torch.zeros_like(filler, dtype=batch.input_ids.dtype)]
        ),
        position_ids=torch.cat([_positions(batch).flatten()[kept[order]], filler % longest]),
        cu_seqlens=torch.nn.functional.pad(torch.cat([counts, filler_counts]).cumsum(0), (1, 0)).to(torch.int32),
        parents=parents,
    )
    return ModelBatch(inputs, _targets(batch, kept, location=location))


def pad_sequences(batch: PaddedBatch) -> ModelBatch:
    """One row a sequence, as wide as the longest: its existing tokens from the left on, padding on the right only.

    So nothing that exists ever comes after padding, and a causal model, also one with a recurrent state, computes for a
    row what it computes for the row alone. The same targets as `pack_sequences`, in the same order.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[5], [7, 8]], [[6], [9]])
    >>> inputs, targets = pad_sequences(batch)
    >>> inputs.input_ids
    tensor([[5, 6, 0],
            [7, 8, 9]])
    >>> targets.token_ids, targets.predictors
    (tensor([6, 9]), tensor([0, 4]))
    """
    batch = check_batch(batch)
    kept = _kept(batch)
    counts = batch.attention_mask.sum(1)
    if counts.numel() == 0:  # a model needs one token: a filler that no target points to
        counts = counts.new_zeros(1)
    rows, width = counts.numel(), max(int(counts.max()), 1)
    columns = torch.arange(width, device=kept.device)
    mask = columns < counts[:, None]
    place = rearrange(mask, "batch seq -> (batch seq)").nonzero()[:, 0]
    ids = batch.input_ids.new_zeros(rows * width).index_put((place,), batch.input_ids.flatten()[kept])
    inputs = PaddedInputs(
        input_ids=rearrange(ids, "(batch seq) -> batch seq", batch=rows),
        position_ids=columns.expand(rows, width),
        attention_mask=mask,
    )
    return ModelBatch(inputs, _targets(batch, kept, location=place))


def unpack_targets(
    values: Float[Tensor, " targets"], targets: Targets, *, shape: tuple[int, int], fill: float = 0.0
) -> Float[Tensor, "batch seq"]:
    """Put one value a target back to its place in the padded rectangle; all other places hold `fill`.

    Differentiable in `values`.

    Raises:
        ValueError: there is not one value a target, or a target is outside of `shape`.

    >>> from fnppo import padded_batch
    >>> batch = padded_batch([[5], [7, 8]], [[6], [9]])
    >>> targets = pack_sequences(batch).targets
    >>> unpack_targets(torch.tensor([0.5, 0.25]), targets, shape=(2, 3))
    tensor([[0.0000, 0.0000, 0.5000],
            [0.0000, 0.0000, 0.2500]])
    """
    check_targets(targets)
    check_tensor("values", values)
    if values.shape != targets.token_ids.shape:
        raise ValueError(
            f"values has shape {tuple(values.shape)}; there are {targets.token_ids.numel()} targets. Give one a target."
        )
    if not hasattr(shape, "__len__") or len(shape) != 2:
        raise ValueError(f"shape is {shape}; it must be (batch, seq). Give that of the batch that was laid out.")
    rows, columns = (check_count(f"shape[{i}]", n, least=0, remedy="Give (batch, seq).") for i, n in enumerate(shape))
    for name, place, size in (("row", targets.rows, rows), ("column", targets.columns, columns)):
        message = f"its {name} is {{value}}, shape has {size} {name}s. Give the shape of the batch that was laid out."
        refuse(Fault((place < 0) | (place >= size), message, place, "target"))
    rectangle = torch.full(shape, fill, dtype=values.dtype, device=values.device)
    return rectangle.index_put((targets.rows, targets.columns), values)


def _share_prefixes(
    batch: PaddedBatch, kept: Int[Tensor, " kept"], *, least_shared: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """The packed axis with shared prefixes: (order, location, counts, parents), or None if no two rows share one.

    order: which existing token stands at each place of the axis. location: at which place each existing token, or the
    copy that stands for it, is found. counts, parents: of each segment, which is a stretch of the tree.
    """
    row_lengths = batch.attention_mask.sum(1)
    tree = tree_of_rows(batch.input_ids.flatten()[kept].cpu().split(row_lengths.tolist()), least_shared=least_shared)
    starts, stops, holders, parents = (
        torch.tensor(numbers, dtype=torch.long, device=kept.device)
        for numbers in (tree.starts, tree.stops, tree.rows, tree.parents)
    )
    counts = stops - starts
    if int(counts.sum()) == kept.numel():
        return None
    lines = tree.lines()
    walk = torch.tensor([stretch for end in tree.ends for stretch in lines[end]], device=kept.device)
    stretch = walk.repeat_interleave(counts[walk])  # of each existing token
    place = counts.cumsum(0) - stops  # of a stretch's tokens on the axis, less their position in the row
    location = place[stretch] + _positions(batch).flatten()[kept]
    rows = torch.arange(len(row_lengths), device=kept.device).repeat_interleave(row_lengths)
    order = (holders[stretch] == rows).nonzero()[:, 0]  # the first row that comes to a stretch gives its tokens
    return order, location, counts, parents if bool((parents >= 0).any()) else None


def _kept(batch: PaddedBatch) -> Int[Tensor, " kept"]:
    """Flat indices of the existing tokens, row by row."""
    return rearrange(batch.attention_mask, "batch seq -> (batch seq)").nonzero()[:, 0]


def _positions(batch: PaddedBatch) -> Int[Tensor, "batch seq"]:
    """Position of each token among the existing tokens of its row; padding gets the last position before it, or 0."""
    return (batch.attention_mask.cumsum(1) - 1).clamp(min=0)


def _targets(batch: PaddedBatch, kept: Int[Tensor, " kept"], *, location: Int[Tensor, " kept"]) -> Targets:
    """The learned tokens; `location[k]` is where the layout has put the k-th existing token."""
    learned = batch.loss_mask.flatten()[kept].nonzero()[:, 0]  # indices into kept
    flat = kept[learned]

    def pick(column: Tensor) -> Tensor:
        return column.flatten()[flat]

    rows = flat // batch.input_ids.shape[1]
    return Targets(
        token_ids=pick(batch.input_ids).long(),
        predictors=location[learned - 1],  # check_batch has seen to it that a target is never the first of its row
        rows=rows,
        columns=flat % batch.input_ids.shape[1],
        groups=None if batch.groups is None else batch.groups[rows],
        extra={name: pick(column) for name, column in batch.extra.items()},
        **{name: pick(getattr(batch, name)) for name in FLOAT_COLUMNS if getattr(batch, name) is not None},
    )
