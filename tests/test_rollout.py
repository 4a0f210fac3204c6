"""Sampling: what is recorded is what was sampled, seeds decide, nothing outside is touched."""

import copy
from functools import cache

import pytest
import torch
from tiny import VOCAB
from tiny import tiny as any_tiny
from torch.testing import assert_close

import fnppo
from fnppo.rollout import generate
from fnppo.testing import tiny_causal_lm


def tiny(family):
    """In float32: transformers' eager attention in float64 makes NaN of left padding."""
    return any_tiny(family, torch.float32)


@cache
def policy_of(family):
    return fnppo.functional_policy(tiny(family))


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8]]


def sample(family="llama", **options):
    policy, params = policy_of(family)
    options = {"policy": policy, "max_new_tokens": 6, "seed": 0, "eos_token_id": 2, "num_responses": 3} | options
    return generate(params, options.pop("prompts", PROMPTS), **options)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "tied"])
@pytest.mark.parametrize("prompts", [PROMPTS, [[1, 2, 3], [4, 5]]], ids=["one of a single token", "shared prefill"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_samplers_logprobs_are_the_policys(family, prompts, temperature):
    policy, params = policy_of(family)
    batch = sample(family, prompts=prompts, temperature=temperature)
    stats = fnppo.compute_logprobs(params, batch, policy=policy, temperature=temperature, max_tokens=100)
    assert bool(batch.loss_mask.any())
    # the sampler's softmax is in float32
    assert_close(batch.old_logprobs, stats.logprobs, rtol=0, atol=2e-5)


def test_shape_of_a_rollout():
    batch = sample()
    assert batch.groups.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for row, prompt in enumerate(p for p in PROMPTS for _ in range(3)):
        ids = batch.input_ids[row]
        assert ids[batch.attention_mask[row] & ~batch.loss_mask[row]].tolist() == prompt
        response = ids[batch.loss_mask[row]].tolist()
        assert 1 <= len(response) <= 6
        assert 2 not in response[:-1]  # the end token ends it, and belongs to it
        assert len(response) == 6 or response[-1] == 2
    assert batch.input_ids.max() < VOCAB


def test_responses_of_full_length():
    batch = sample(eos_token_id=())
    assert batch.loss_mask.sum(1).tolist() == [6] * 9


def test_several_end_tokens():
    batch = sample(eos_token_id=[2, 3, 4, 5, 6, 7])
    for row in range(9):
        response = batch.input_ids[row][batch.loss_mask[row]].tolist()
        assert all(token not in range(2, 8) for token in response[:-1])


def test_seeds_decide_and_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    first = sample()
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(1)
    again, other = sample(), sample(seed=1)
    assert torch.equal(first.input_ids, again.input_ids)
    assert torch.equal(first.old_logprobs, again.old_logprobs)
    assert first.input_ids.shape != other.input_ids.shape or not torch.equal(first.input_ids, other.input_ids)


def test_no_other_devices_generator_is_seeded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded all CUDA devices"))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeded everything"))
    sample()


def test_greedy_takes_the_most_probable_token():
    policy, params = policy_of("llama")
    batch = sample(greedy=True, num_responses=1, prompts=[[1, 2, 3]], eos_token_id=())
    ids = [1, 2, 3]
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(tiny("llama")(torch.tensor([ids])).logits[0, -1].argmax()))
    assert batch.input_ids[0].tolist() == ids
    assert torch.equal(sample(greedy=True, seed=5).input_ids, sample(greedy=True, seed=6).input_ids)


def test_frequencies_are_those_of_the_policy():
    """One token from one prompt, many times: no top-k, no top-p, the temperature applied once."""
    policy, params = policy_of("llama")
    batch = sample(prompts=[[1, 2]], num_responses=4000, max_new_tokens=1, temperature=1.5, eos_token_id=())
    with torch.no_grad():
        p = (tiny("llama")(torch.tensor([[1, 2]])).logits[0, -1] / 1.5).softmax(-1)
    counts = torch.bincount(batch.input_ids[:, -1], minlength=VOCAB) / 4000
    assert_close(counts.double(), p.double(), rtol=0, atol=0.04)


def test_the_models_own_generation_settings_are_not_used():
    module = copy.deepcopy(tiny("llama"))
    module.generation_config.do_sample, module.generation_config.top_k = True, 1
    module.generation_config.repetition_penalty = 5.0
    policy, params = fnppo.functional_policy(module)
    options = {"max_new_tokens": 6, "seed": 0, "eos_token_id": 2, "num_responses": 3}
    assert torch.equal(generate(params, PROMPTS, policy=policy, **options).input_ids, sample().input_ids)


def test_parameters_are_the_ones_given():
    policy, params = policy_of("llama")
    other = {n: p * 1.5 for n, p in params.items()}
    a, b = (
        generate(p, PROMPTS, policy=policy, max_new_tokens=6, seed=0, eos_token_id=(), num_responses=2)
        for p in (params, other)
    )
    assert not torch.equal(a.input_ids, b.input_ids)
    stats = fnppo.compute_logprobs(other, b, policy=policy, temperature=1.0, max_tokens=100)
    assert_close(b.old_logprobs, stats.logprobs, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"num_responses": 0}, "num_responses is 0"),
        ({"prompts": []}, "there are 0 prompts"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1], [99]]}, "prompt 1 holds 99 to 99, but the model's vocabulary has"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        sample(**options)


def test_the_pad_token_is_never_read_and_no_end_is_no_end():
    batch, other = sample(), sample(pad_token_id=-1)
    assert torch.equal(batch.old_logprobs, other.old_logprobs)
    assert bool((other.input_ids[~other.attention_mask] == -1).all())
    assert torch.equal(sample(eos_token_id=None).input_ids, sample(eos_token_id=()).input_ids)


@pytest.mark.parametrize("architecture", ["rwkv", "bart", "mamba"])
def test_a_policy_that_cannot_be_packed_is_not_sampled(architecture):
    """Its model reads the padding before a short prompt: log-probs would be wrong by nats, with no error."""
    policy, params = fnppo.functional_policy(tiny_causal_lm(architecture))
    with pytest.raises(ValueError, match="generate cannot sample from this policy: .*ForCausalLM.*padded_batch"):
        generate(params, PROMPTS, policy=policy, max_new_tokens=2, seed=0, eos_token_id=None)


def test_the_way_out_for_a_policy_that_cannot_be_packed():
    """The model's own generate on prompts of one length, then padded_batch."""
    module = tiny_causal_lm("mamba")
    policy, params = fnppo.functional_policy(module)
    prompts = [[1, 2, 3], [4, 5, 6]]
    rows = module.generate(torch.tensor(prompts), max_new_tokens=4, do_sample=False, eos_token_id=None)
    batch = fnppo.padded_batch(prompts, rows[:, 3:].tolist())
    stats = fnppo.compute_logprobs(params, batch, policy=policy, temperature=1.0, max_tokens=100, layout=fnppo.padded)
    own = module(rows).logits.log_softmax(-1)[:, 2:-1].gather(-1, rows[:, 3:, None])[..., 0]
    assert_close(stats.logprobs[:, 3:], own, rtol=0, atol=2e-5)
