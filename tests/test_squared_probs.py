"""Σ_v π(v)² of every layout and chunk size, against the whole softmax of one row at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_exactness import policy_of
from tiny import VOCAB, tiny

import fnppo
from fnppo.layouts import sharing
from fnppo.testing import float64_everywhere, padded_batches


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi"])
@given(
    batch=padded_batches(vocab_size=VOCAB),
    layout=st.sampled_from([fnppo.packed, sharing(least_shared=1), fnppo.padded]),
    chunk_size=st.sampled_from([1, 3, None]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
)
def test_against_the_softmax_of_a_row(family, batch, layout, chunk_size, temperature):
    """Softcap, bias and temperature are in it; NaN and foreign ids at masked places are not."""
    policy, params = policy_of(family)
    expected = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    with float64_everywhere(), torch.no_grad():
        for row in range(len(expected)):
            places = batch.attention_mask[row].nonzero()[:, 0].tolist()
            if not places:
                continue
            logits = tiny(family)(batch.input_ids[row, places][None]).logits[0]
            for before, column in enumerate(places[1:]):
                if batch.loss_mask[row, column]:
                    p = (logits[before] / temperature).softmax(-1)
                    expected[row, column] = sum(x * x for x in p.tolist())
        found = fnppo.compute_sum_squared_probs(
            params, batch, policy=policy, temperature=temperature, max_tokens=100, chunk_size=chunk_size, layout=layout
        )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_what_is_refused():
    policy, params = policy_of("gpt2")
    batch = fnppo.padded_batch([[1]], [[2, 3]])
    compute = lambda **bad: fnppo.compute_sum_squared_probs(
        params, batch, **{"policy": policy, "temperature": 1.0, "max_tokens": 9, **bad}
    )
    for bad, named in (
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"max_tokens": 2}, "row 0"),
    ):
        with pytest.raises(ValueError, match=named):
            compute(**bad)
