"""KL(π ‖ π_ref) at each target, over the whole vocabulary instead of from one sampled token, a chunk of logits at a time.

    KL = Σ_v p_v (log p_v - log q_v)        p = softmax(z / temperature) of the policy, q the same of the reference

It has no sampling noise, in value and gradient, and is right for tokens from any policy. Its price is a forward of the
reference at every step, and two heads instead of one. As in `fnppo.head`, the backward computes each chunk again.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fnppo.arguments import check_count, check_device, check_type
from fnppo.checks import check_model_batch
from fnppo.head_gradients import differentiable_gradients, fast_gradients
from fnppo.linear_head import LinearHead, check_head, one_per_target, tempered_log_softmax
from fnppo.logit_chunks import Constants, Workspace, chunks, targets_per_chunk
from fnppo.policy import Policy
from fnppo.transforms import inside_forward_mode, inside_transform
from fnppo.types import ModelBatch, Params


def exact_kl(
    params: Params,
    ref_params: Params,
    batch: ModelBatch,
    *,
    policy: Policy,
    ref_policy: Policy | None = None,
    temperature: float | Float[Tensor, "..."],
    chunk_size: int | None = None,
) -> Float[Tensor, " targets"]:
    """The KL of the policy to a reference, for each target. Pure, and differentiable in `params`; not in `ref_params`.

    For the KL term of a loss: `ppo_loss(stats, targets, kl=exact_kl(...), kl_coef=...)`. The policy runs its own
    forward here. To share that of the log-probs, take `policy.hidden_states` once, and pass its rows `targets.predictors`
    to `chunked_logprobs` and `chunked_kl`.

    Args:
        params, batch, policy, temperature, chunk_size: as in `forward_logprobs`. The temperature divides both policies'
            logits.
        ref_params: parameters of the reference.
        ref_policy: its architecture, if it is another one; of the same vocabulary.

    Returns:
        [targets], in nats, at least 0 up to rounding; infinite where the policy can choose a token that the reference
        cannot; its gradient is NaN there, unless `ppo_loss(kl_cap=...)` takes it out.

    Raises:
        ValueError: as in `forward_logprobs`; the vocabularies differ; or the policy draws dropout, and no `ref_policy`
            says what the reference does.

    >>> from fnppo import functional_policy, pack_sequences, padded_batch
    >>> from fnppo.testing import tiny_llama
    >>> policy, params = functional_policy(tiny_llama())
    >>> batch = pack_sequences(padded_batch([[1, 5], [3]], [[4], [6, 2]]))
    >>> exact_kl(params, params, batch, policy=policy, temperature=1.0)
    tensor([0., 0., 0.])
    """
    for name, value, wanted in (("policy", policy, Policy), ("params", params, dict), ("ref_params", ref_params, dict)):
        check_type(name, value, wanted, "Use what functional_policy(module) returned.")
    if ref_policy is None:
        if policy.dropout_seed is not None:
            raise ValueError(
                "the policy draws dropout, which a reference does not have. Pass ref_policy=functional_policy(module)[0]."
            )
        ref_policy = policy
    check_type("ref_policy", ref_policy, Policy, "Use what functional_policy(module) returned.")
    check_model_batch(batch, vocab_size=min(policy.vocab_size, ref_policy.vocab_size))
    if policy.split != ref_policy.split:
        raise ValueError(
            "tokens of the policy and of the reference are split over ranks in different ways. Pass a ref_policy with the "
            "same split."
        )
    places = policy.places(batch)
    with torch.no_grad():
        ref_hidden = ref_policy.hidden_at(ref_params, batch, places)
    hidden = policy.hidden_at(params, batch, places)
    heads = policy.head.bind(params), ref_policy.head.bind(ref_params)
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        temperature = temperature[places]
    found = chunked_kl(hidden, heads[0], ref_hidden, heads[1], temperature=temperature, chunk_size=chunk_size)
    together: Tensor = policy.together(found, batch, places)
    return together


def chunked_kl(
    hidden: Float[Tensor, "targets hidden"],
    head: LinearHead,
    ref_hidden: Float[Tensor, "targets ref_hidden"],
    ref_head: LinearHead,
    *,
    temperature: float | Float[Tensor, "..."],
    chunk_size: int | None = None,
) -> Float[Tensor, " targets"]:
    """`exact_kl` of two linear heads. Gradients flow to `hidden` and `head`; the reference is detached.

    Works under `torch.func` transforms, and bounds the memory, as `chunked_logprobs` does. A logit of -inf is a token of
    probability 0: the policy's add nothing, and get gradient 0.

    Args:
        hidden, ref_hidden: hidden states of each target's predictor; their sizes may differ.
        head, ref_head: over one vocabulary.
        temperature: above 0; a number, or one a target. No gradient flows to it.
        chunk_size: targets per chunk; by default as many as fit the chunk of `fnppo.logit_chunks` with the logits of both.

    Returns, raises: as `exact_kl`.

    >>> head = LinearHead(torch.eye(2))
    >>> chunked_kl(torch.tensor([[0.3, -0.2]]), head, torch.zeros(1, 2), head, temperature=1.0)
    tensor([0.0303])
    """
    for name, value in (("head", head), ("ref_head", ref_head)):
        check_type(name, value, LinearHead, "Use policy.head.bind(params).")
    check_head(hidden, head)
    check_head(ref_hidden, ref_head, of="ref_")
    check_device("ref_hidden", ref_hidden, "hidden", hidden)
    targets, vocab = hidden.shape[0], head.weight.shape[0]
    if ref_hidden.shape[0] != targets:
        raise ValueError(f"ref_hidden has {ref_hidden.shape[0]} rows, hidden {targets}. Give one a target in both.")
    if ref_head.weight.shape[0] != vocab:
        raise ValueError(
            f"the reference has {ref_head.weight.shape[0]} logits, the policy {vocab}; a KL needs one vocabulary. Cut off "
            "the entries that only one of them has, if they are padding."
        )
    if chunk_size is None:
        chunk_size = targets_per_chunk(2 * vocab, hidden.dtype, hidden.device)
    check_count("chunk_size", chunk_size, least=1, remedy="A chunk holds at least 1 target; None chooses a size.")
    temperature = one_per_target(temperature, targets, like=hidden)
    ref_hidden, ref_weight = ref_hidden.detach(), ref_head.weight.detach()
    ref_bias = None if ref_head.bias is None else ref_head.bias.detach()
    if inside_forward_mode():  # as in chunked_logprobs
        slices = chunks(chunk_size, hidden, ref_hidden, temperature)
        ref_head = ref_head._replace(weight=ref_weight, bias=ref_bias)
        return torch.cat([_definition(h, head, ref, ref_head, t) for h, ref, t in slices])
    constants = head[2:], ref_head[2:]
    found: Tensor = _ChunkedKL.apply(
        constants, chunk_size, hidden, *head[:2], ref_hidden, ref_weight, ref_bias, temperature
    )
    return found


def _definition(
    hidden: Tensor,
    head: LinearHead,
    ref_hidden: Tensor,
    ref_head: LinearHead,
    temperature: Tensor,
    unread: Tensor | None = None,
) -> Tensor:
    """One chunk, as plain torch. Where p is 0, both logarithms are put aside before they meet it: 0 · inf is NaN."""
    logp = tempered_log_softmax(head.logits(hidden), temperature)
    logq = tempered_log_softmax(ref_head.logits(ref_hidden), temperature).to(logp.dtype)
    if unread is not None:
        logq = torch.where(unread[:, None], 0, logq)
    p = logp.exp()
    return (p * (torch.where(p > 0, logp, 0) - torch.where(p > 0, logq, 0))).sum(-1)


class _ChunkedKL(torch.autograd.Function):
    """`_definition` over chunks, saving its inputs and the KL. The backward computes each chunk again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        constants: tuple[Any, Any],
        chunk_size: int,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ref_hidden: Tensor,
        ref_weight: Tensor,
        ref_bias: Tensor | None,
        temp: Tensor,
    ) -> Tensor:
        head, ref_head = LinearHead(weight, bias, *constants[0]), LinearHead(ref_weight, ref_bias, *constants[1])
        slices = chunks(chunk_size, hidden, ref_hidden, temp)
        if inside_transform():
            return torch.cat([_definition(h, head, ref, ref_head, t) for h, ref, t in slices])
        buffers = _Buffers(hidden, head, ref_hidden, ref_head, chunk_size)
        return torch.cat([buffers.kl(h, ref, t) for h, ref, t in slices])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.constants, ctx.chunk_size = inputs[:2]
        ctx.save_for_backward(*inputs[2:], output)

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, temp, kl = ctx.saved_tensors
        head, ref_head = (
            LinearHead(weight, bias, *ctx.constants[0]),
            LinearHead(ref_weight, ref_bias, *ctx.constants[1]),
        )
        # Where the loss does not use an infinite KL (a cap holds there), the gradient is 0; 0 · inf would be NaN.
        unread = (grad_kl == 0) & kl.isinf()
        slices = chunks(ctx.chunk_size, hidden, ref_hidden, temp, grad_kl, kl, unread)
        if torch.is_grad_enabled():  # somebody may differentiate these gradients in turn

            def definition(hidden: Tensor, weight: Tensor, bias: Tensor | None, *columns: Tensor) -> Tensor:
                ref_hidden, temp, unread = columns
                return _definition(hidden, head._replace(weight=weight, bias=bias), ref_hidden, ref_head, temp, unread)

            parts = ((h, (ref, t, u), g) for h, ref, t, g, _, u in slices)
            gradients = differentiable_gradients(definition, weight, bias, parts)
        else:
            buffers = _Buffers(hidden, head, ref_hidden, ref_head, ctx.chunk_size)
            gradients = fast_gradients(buffers.gradient, weight, bias, slices, wanted=ctx.needs_input_grad[2:5])
        return (None, None, *gradients, None, None, None, None)


class _Buffers:
    """`_definition` and its gradient by formula, in the buffers of two workspaces."""

    def __init__(
        self, hidden: Tensor, head: LinearHead, ref_hidden: Tensor, ref_head: LinearHead, chunk_size: int
    ) -> None:
        self.ref_head, self.head = ref_head, head
        self.policy = Workspace(_constants(head), hidden, head.weight, chunk_size)
        self.reference = Workspace(_constants(ref_head), ref_hidden, ref_head.weight, chunk_size)

    def kl(self, hidden: Tensor, ref_hidden: Tensor, temperature: Tensor) -> Tensor:
        parts = []
        for p, distance, *_ in self.blocks(hidden, ref_hidden, temperature):
            parts.append(p.mul_(distance.masked_fill_(p == 0, 0)).sum(-1))
        return torch.cat(parts)

    def gradient(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ref_hidden: Tensor,
        temperature: Tensor,
        grad_kl: Tensor,
        kl: Tensor,
        unread: Tensor,
    ) -> Tensor:
        """Gradient of the loss in x, from ∂KL/∂z_v = p_v (log p_v - log q_v - KL)."""
        columns = (grad_kl * self.head.scale / temperature, kl, unread)
        for p, distance, slope, grad, of_block, unread in self.blocks(hidden, ref_hidden, temperature, *columns):
            distance.masked_fill_((p == 0) | unread[:, None], 0)
            distance.sub_(torch.where(unread, 0, of_block)[:, None]).mul_(p).mul_(grad[:, None])
            if slope is not None:
                distance.mul_(slope)
        return self.policy.chunk[: hidden.shape[0]]

    def blocks(self, hidden: Tensor, ref_hidden: Tensor, temperature: Tensor, *columns: Tensor) -> Iterator[Any]:
        """(p, log p - log q, cap', *columns) of each block of a chunk, in buffers; the second is anything where p is 0,
        and stands in the chunk of the policy.
        """
        x = self.policy.logits(hidden, self.head.weight, self.head.bias)
        y = self.reference.logits(ref_hidden, self.ref_head.weight, self.ref_head.bias)
        size = min(self.policy.block_size, self.reference.block_size)
        for z, ref_z, temp, *of_block in chunks(size, x, y, temperature, *columns):
            p, q = self.policy.softmax(z, temp), self.reference.softmax(ref_z, temp)
            slope = self.policy.slope(p, temp)
            distance = z.sub_(q.z).sub_((p.total.log() - q.total.log())[:, None])
            yield self.policy.exp_of_block(z).div_(p.total[:, None]), distance, slope, *of_block


def _constants(head: LinearHead) -> Constants:
    return Constants(head.scale, head.softcap, entropy=False)
