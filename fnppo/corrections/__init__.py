"""Weights for tokens that another policy has sampled: an older one, or the same in an engine that rounds otherwise.

The sampler reports the log-probs of what it drew, `extra["sampler_logprobs"]`; the trainer computes its own for the same
tokens, `old_logprobs`. With ρ_t = π_old(token_t) / π_sampler(token_t):

    ratios     token_ratios ρ_t,  sequence_ratios Π ρ_t,  geometric_ratios (Π ρ_t)^(1/n)       from a batch
    weights    truncate, mask_outside, token_normalized, sequence_normalized                   from ratios
    masks      inside, whole_rows, near_sampler, off_policy_mask                               from either

and they end in one of two places: `with_importance_weights` puts weights beside the batch, for a surrogate that multiplies
by them; `reject` clears `loss_mask` where a mask does. Compose them as the papers do:

    TIS (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training")
        truncate(token_ratios(batch), at=2.0)
    IcePop (arXiv:2510.18855)
        mask_outside(token_ratios(batch), low=0.5, high=5.0)
    MIS (Liu et al., 2025, "When speed kills stability")
        mask_outside(sequence_ratios(batch), low=0.0, high=2.0)
    geometric sequence mask, here over truncated token weights
        torch.where(inside(geometric_ratios(batch), low=0.99, high=1.01), truncate(token_ratios(batch), at=2.0), 0)
    veto: no row with a token that the trainer would hardly have drawn
        reject(batch, whole_rows(inside(token_ratios(batch), low=1e-4, high=math.inf), batch))
    off-policy sequence mask (DeepSeek-V3.2, arXiv:2512.02556)
        with_importance_weights(batch, off_policy_mask(batch, threshold=0.1))

All of it runs once for a batch, before it is split. No value is read where `loss_mask` is clear; ratios are 0 there, and
what a mask says there is of no consequence. Sequences are rows with a learned token; what is of a row stands at each of its
learned tokens. Both log-probs must be of the distribution that was sampled from, at its temperature. A number is a float or
a tensor of one.
"""

from fnppo.corrections.diagnostics import effective_share, off_policy_diagnostics
from fnppo.corrections.masks import inside, near_sampler, off_policy_mask, reject, whole_rows
from fnppo.corrections.weights import (
    geometric_ratios,
    mask_outside,
    sequence_normalized,
    sequence_ratios,
    token_normalized,
    token_ratios,
    truncate,
    with_importance_weights,
)

__all__ = [
    "effective_share",
    "geometric_ratios",
    "inside",
    "mask_outside",
    "near_sampler",
    "off_policy_diagnostics",
    "off_policy_mask",
    "reject",
    "sequence_normalized",
    "sequence_ratios",
    "token_normalized",
    "token_ratios",
    "truncate",
    "whole_rows",
    "with_importance_weights",
]
