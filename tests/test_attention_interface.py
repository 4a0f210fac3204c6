"""What a model asks its attention for is done or refused by name."""

import pytest
import torch
from transformers import masking_utils

from fnppo.attention_interface import attention_forward, window_mark

CALL = {"query": torch.zeros(1, 2, 3, 4), "key": torch.zeros(1, 2, 3, 4), "value": torch.zeros(1, 2, 3, 4)}


class SomeAttention(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "does not forward keyword arguments"),
        ({"is_causal": False}, "is bidirectional"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "brings a mask of its own"),
        ({"attention_mask": window_mark(local_size=4), "sliding_window": 3}, "of 3 by keyword and of 4 in its mask"),
        ({"attention_mask": window_mark(), "sliding_window": 3}, "of 3 by keyword and of None in its mask"),
        ({"position_bias": torch.zeros(1)}, "asks its attention for position_bias"),
    ],
)
def test_what_a_model_asks_for_is_done_or_refused(given, reason):
    """B4, J3: named by the class of the model's attention; nothing is ignored."""
    if given:
        given = {"attend": lambda *x, **_: x[0]} | given
    with pytest.raises(ValueError, match=f"SomeAttention.*{reason}"):
        attention_forward(SomeAttention(), **CALL, **given)


SLIDING = masking_utils.sliding_window_causal_mask_function(5)
CHUNKED = masking_utils.chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.long))
PACKED = masking_utils.remap_positions_for_packed_sequence(CHUNKED, torch.tensor([[0, 1, 0]]))


@pytest.mark.parametrize(
    ("mask", "keyword", "window", "chunk"),
    [
        (None, None, None, None),
        (None, 3, 3, None),
        (window_mark(), None, None, None),
        (window_mark(mask_function=masking_utils.causal_mask_function), None, None, None),
        (window_mark(local_size=5), None, 5, None),
        (window_mark(local_size=5, mask_function=SLIDING), 5, 5, None),
        (window_mark(local_size=5, mask_function=CHUNKED), None, None, 5),
        (window_mark(local_size=5, mask_function=PACKED), None, None, 5),
    ],
)
def test_where_a_window_comes_from(mask, keyword, window, chunk):
    """From the keyword, or from the mask that a model would have built."""
    seen = {}
    attention_forward(
        SomeAttention(),
        **CALL,
        attention_mask=mask,
        sliding_window=keyword,
        attend=lambda q, *_, **asked: seen.update(asked) or q,
    )
    assert (seen["window"], seen["chunk"]) == (window, chunk)


def test_a_pattern_over_the_mask_is_refused():
    with pytest.raises(ValueError, match="lays a pattern of its own"):
        window_mark(use_vmap=True)
    blocks = masking_utils.blockwise_overlay(torch.zeros(1, 3, dtype=torch.long))
    both_ways = masking_utils.or_masks(masking_utils.causal_mask_function, blocks)
    with pytest.raises(ValueError, match="lays a pattern of its own"):
        window_mark(mask_function=both_ways)
