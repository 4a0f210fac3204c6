"""The promise of the library, for every surrogate and all weights: split, order and layout change no number."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from surrogate_cases import CASES
from test_weights import MODES
from torch.testing import assert_close

import fnppo
from fnppo import TokenStats, ppo_loss
from fnppo.surrogates.selection import select_clip_cov, select_kl_cov, select_top_entropy
from fnppo.testing import padded_batches, splits

LAYOUTS = st.sampled_from(
    [fnppo.pack_sequences, fnppo.pad_sequences, partial(fnppo.pack_sequences, share_prefixes=True, least_shared=1)]
)
KLS = st.sampled_from([fnppo.kl_k2, fnppo.kl_k3, fnppo.straight_through(fnppo.kl_abs)])


def loss_and_gradient(parts, theta, mode, **options):
    """Sums over the targets of micro-batches, with a log-prob a token as the parameter."""
    theta = theta.clone().requires_grad_()
    total, metrics = torch.zeros((), dtype=theta.dtype), fnppo.Metrics()
    for targets in parts:
        logprobs = theta[targets.extra["place"].long()]
        entropy = logprobs.exp()  # any function of the parameters
        targets = targets._replace(loss_weights=targets.extra[mode])
        loss, found = ppo_loss(TokenStats(logprobs, entropy), targets, **options)
        total, metrics = total + loss, fnppo.merge_metrics(metrics, found)
    return total.detach(), torch.autograd.grad(total, theta)[0], fnppo.summarize(metrics)


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_a_split_and_an_order_change_no_number(name, unchecked, data):
    """Loss, gradient and metrics add up to those of the mini-batch in one piece, with the weights of every mode."""
    batch = data.draw(padded_batches(vocab_size=9))
    groups = data.draw(splits(len(batch.input_ids)))
    shape = batch.input_ids.shape
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    normal = lambda: torch.randn(shape, generator=g, dtype=torch.float64)
    theta = torch.where(batch.loss_mask, batch.old_logprobs, 0) + 0.3 * normal()
    extra = {
        "place": torch.arange(theta.numel(), dtype=torch.float64).reshape(shape),
        "sampler_logprobs": theta + 0.3 * normal(),
        "importance_weights": torch.where(normal() > 0, normal().exp(), 0),
        **{mode: weights(batch).loss_weights for mode, weights in MODES.items()},
    }
    batch = select_clip_cov(batch._replace(extra=extra), theta, generator=g, fraction=0.4, low=-9.0, high=9.0)
    batch = select_top_entropy(select_kl_cov(batch, theta, fraction=0.4), normal().abs(), fraction=0.4)
    whole = [fnppo.pack_sequences(batch).targets]
    parts = [data.draw(LAYOUTS)(fnppo.select_rows(batch, rows)).targets for rows in groups]
    surrogate, numbers = CASES[name]
    options = {"surrogate": surrogate, "entropy_coef": 0.1, "kl_coef": 0.2, "kl": data.draw(KLS), **numbers}
    for mode in MODES:
        one = loss_and_gradient(whole, theta.flatten(), mode, **options)
        many = loss_and_gradient(parts, theta.flatten(), mode, **options)
        assert_close(many[:2], one[:2], rtol=1e-10, atol=1e-10)
        assert many[2] == pytest.approx(one[2], rel=1e-10, abs=1e-10, nan_ok=True)
