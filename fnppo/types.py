"""The data that flows through an update, as NamedTuples (so each is a pytree for optree and torch.func).

Legend of dims, used in every signature of the library:

    batch    rows of a batch: one prompt with one response (or one multi-turn dialogue)
    seq      columns of a padded batch
    tokens   positions that the model reads: packed, one flat axis; padded, batch x seq flattened
    targets  tokens that have a loss; each has one position, its predictor, whose hidden state predicts it
    segments sequences, or parts of them, inside a packed axis
    vocab, hidden, heads, kv_heads, dim    as usual; dim is the size of one attention head

Columns are token-aligned: column t of `old_logprobs` or `advantages` is about the token in column t, never about the
token that follows it. The one shift from token to predictor happens in `fnppo.packing`, and nowhere else.
"""

from typing import Any, NamedTuple, TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
"""Parameters of a policy: name -> tensor. Tied weights appear once."""

PyTree: TypeAlias = Any
"""A tree of tensors: gradients and updates have the tree of their parameters."""


class PaddedBatch(NamedTuple):
    """Rollouts as a rectangle, the way samplers hand them over.

    Padding may stand anywhere: left, right, or as holes. Only `attention_mask` says which tokens exist, and values at
    masked places are never read.

    Attributes:
        input_ids: token ids of prompt and response.
        attention_mask: True where a token exists.
        loss_mask: True on tokens to be learned (the response, or the assistant's turns). A learned token must exist and
            must have a predecessor in its row, since something has to predict it.
        old_logprobs: log π_old(token) of the policy that sampled.
        advantages: advantage of each learned token.
        ref_logprobs: log π_ref(token) of the reference policy, for a KL term.
        loss_weights: the `w` of loss = Σ w·l; made by `token_mean` and its siblings, once per mini-batch.
        groups: prompt group of each row, for group-relative advantages and `group_token_mean`.
        extra: any further column that a custom loss needs; it is carried through every layout.
    """

    input_ids: Int[Tensor, "batch seq"]
    attention_mask: Bool[Tensor, "batch seq"]
    loss_mask: Bool[Tensor, "batch seq"]
    old_logprobs: Float[Tensor, "batch seq"] | None = None
    advantages: Float[Tensor, "batch seq"] | None = None
    ref_logprobs: Float[Tensor, "batch seq"] | None = None
    loss_weights: Float[Tensor, "batch seq"] | None = None
    groups: Int[Tensor, " batch"] | None = None
    extra: dict[str, Tensor] = {}  # never changed in place


class Targets(NamedTuple):
    """The tokens that have a loss, in row-major order, whatever layout the model reads.

    Attributes:
        token_ids: the tokens to be scored.
        predictors: index, on the `tokens` axis, of the position whose hidden state predicts each target.
        rows, columns: where each target stands in the `PaddedBatch` (see `unpack_targets`).
        loss_weights, old_logprobs, advantages, ref_logprobs, groups, extra: as in `PaddedBatch`, one value a target.
    """

    token_ids: Int[Tensor, " targets"]
    predictors: Int[Tensor, " targets"]
    rows: Int[Tensor, " targets"]
    columns: Int[Tensor, " targets"]
    loss_weights: Float[Tensor, " targets"] | None = None
    old_logprobs: Float[Tensor, " targets"] | None = None
    advantages: Float[Tensor, " targets"] | None = None
    ref_logprobs: Float[Tensor, " targets"] | None = None
    groups: Int[Tensor, " targets"] | None = None
    extra: dict[str, Tensor] = {}  # never changed in place


class PackedInputs(NamedTuple):
    """Segments laid end to end on one axis; segment i is `cu_seqlens[i]:cu_seqlens[i + 1]`. Segments may be empty.

    A segment is a whole sequence, or goes on where another segment ends: its parent, whose tokens (and those of the
    parent's parents) it also reads. So one prompt can serve many responses. `parents` holds the number of each
    segment's parent, which stands before it, or -1; None where no segment has one.
    """

    input_ids: Int[Tensor, " tokens"]
    position_ids: Int[Tensor, " tokens"]
    cu_seqlens: Int[Tensor, " boundaries"]
    parents: Int[Tensor, " segments"] | None = None


class PaddedInputs(NamedTuple):
    """One sequence a row; positions count existing tokens only."""

    input_ids: Int[Tensor, "batch seq"]
    position_ids: Int[Tensor, "batch seq"]
    attention_mask: Bool[Tensor, "batch seq"]


class ModelBatch(NamedTuple):
    """What the model reads (`inputs`) and what the loss reads (`targets`)."""

    inputs: PackedInputs | PaddedInputs
    targets: Targets


class TokenStats(NamedTuple):
    """Per-target log-probability and entropy of the policy, in nats, float32 or better."""

    logprobs: Float[Tensor, "*targets"]
    entropy: Float[Tensor, "*targets"] | None = None
