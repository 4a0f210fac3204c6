"""One architecture for each mechanism that models have, on every layout that reads it, against the naive oracle."""

from functools import cache, partial

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fnppo
from fnppo.testing import (
    causal_lms,
    float64_everywhere,
    oracle_stats,
    padded_batches,
    tiny_causal_lm,
    tiny_models,
)
from fnppo.testing.strategies import FAMILIES

VOCAB = 13
TOLERANCE = 1e-10
PACKED = {
    "experts": "qwen3_moe",
    "latent attention": "deepseek_v3",
    "a sliding window": "gemma3_text",
    "chunks of attention, layers without positions": "llama4_text",
    "a sliding window, without positions": "smollm3",
    "softcaps": "gemma2",
    "sinks": "gpt_oss",
    "QK-norm": "qwen3",
    "multipliers": "granite",
    "absolute positions": "gpt2",
    "partial rotary positions": "phi",
}
PADDED = {
    "ALiBi": "bloom",
    "a convolution and attention": "lfm2",
    "a selective state space": "mamba2",
    "linear attention and experts": "qwen3_next",
    "a state space beside attention, multipliers": "falcon_h1",
    "a gated linear recurrence, softcap under another name": "recurrent_gemma",
    "time mixing": "rwkv",
}
LAYOUTS = {
    "packed": fnppo.pack_sequences,
    "padded": fnppo.pad_sequences,
    "shared": partial(fnppo.pack_sequences, share_prefixes=True, least_shared=1),
}
CONFIG = {"llama4_text": {"attn_temperature_tuning": False}}
TUNED = {"attn_temperature_tuning": True, "floor_scale": 2, "attn_scale": 0.7}
BATCHES = padded_batches(vocab_size=VOCAB, max_rows=3, max_length=10)


@cache
def subject(architecture):
    """(module, policy, params), in float64."""
    return made(architecture, **CONFIG.get(architecture, {}))


def made(architecture, **config):
    with float64_everywhere():
        module = tiny_causal_lm(architecture, vocab_size=VOCAB, **config).double()
        return module, *fnppo.functional_policy(module.requires_grad_(False))


def check(module, policy, params, layout, batch):
    """Log-probs, entropies and gradients of all parameters are those of the model's own attention, row by row."""
    params = {name: value.detach().requires_grad_() for name, value in params.items()}
    model_batch = layout(batch)
    with float64_everywhere():
        expected = oracle_stats(module, params, batch, temperature=0.8)
        stats = fnppo.forward_logprobs(params, model_batch, policy=policy, temperature=0.8)
        targets = model_batch.targets
        assert list(zip(targets.rows.tolist(), targets.columns.tolist(), strict=True)) == sorted(expected)
        if not expected:
            return
        reference = torch.stack([torch.stack(expected[place]) for place in sorted(expected)], dim=1)
        ours = torch.stack(list(stats))
        weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        grads, own = (
            torch.autograd.grad((weights * numbers).sum(), list(params.values()), materialize_grads=True)
            for numbers in (ours, reference)
        )
    assert float((ours - reference).detach().abs().max()) <= TOLERANCE
    for name, a, b in zip(params, grads, own, strict=True):
        assert float((a - b).abs().max()) <= TOLERANCE * max(1.0, float(b.abs().max())), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mechanism", PACKED)
@settings(max_examples=4)
@given(batch=BATCHES)
def test_mechanism(mechanism, layout, batch):
    module, policy, params = subject(PACKED[mechanism])
    assert policy.layout == "packed"
    check(module, policy, params, LAYOUTS[layout], batch)


@pytest.mark.parametrize("mechanism", PADDED)
@settings(max_examples=4)
@given(batch=BATCHES)
def test_mechanism_that_cannot_be_packed(mechanism, batch):
    """Rows of length 0, padding anywhere, and holes; packed and shared batches are refused with the way out."""
    module, policy, params = subject(PADDED[mechanism])
    check(module, policy, params, fnppo.pad_sequences, batch)
    for layout in ("packed", "shared"):
        with pytest.raises(ValueError, match=r"the batch is packed, and .*ForCausalLM.*Use pad_sequences"):
            fnppo.forward_logprobs(params, LAYOUTS[layout](batch), policy=policy, temperature=0.8)


@settings(max_examples=4)
@given(batch=BATCHES)
def test_a_temperature_that_grows_with_the_place_on_the_axis_is_not_packed(batch):
    """Llama 4 scales queries by the place on the axis, in steps of floor_scale tokens: padded only."""
    module, policy, params = subject_with_temperature()
    assert [layer.self_attn.use_rope for layer in module.model.layers] == [1, 0]
    check(module, policy, params, fnppo.pad_sequences, batch)
    for layout in ("packed", "shared"):
        with pytest.raises(ValueError, match="Llama4ForCausalLM has layers without rotary.*Use pad_sequences"):
            fnppo.forward_logprobs(params, LAYOUTS[layout](batch), policy=policy, temperature=0.8)


@cache
def subject_with_temperature():
    return made("llama4_text", **TUNED)


def test_a_temperature_is_not_packed_however_long_its_steps_are():
    """As in the published models: steps of 8192 tokens, which no short probe reaches."""
    policy, _ = fnppo.functional_policy(tiny_causal_lm("llama4_text"))
    assert "attn_temperature_tuning" in str(policy.padded_only)
    policy, _ = fnppo.functional_policy(tiny_causal_lm("llama4_text", no_rope_layers=[1, 1]))
    assert policy.padded_only is None  # layers with rotary positions have no temperature


def test_every_kind_of_layer_is_there():
    for architecture in ("qwen2", "qwen3", "smollm3"):
        assert set(tiny_causal_lm(architecture).config.layer_types) == {"full_attention", "sliding_attention"}
    for architecture in ("llama4_text", "smollm3"):
        assert tiny_causal_lm(architecture).config.no_rope_layers == [1, 0]


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("reformer", {"lsh_attn_chunk_length": 64}, "layers of type lsh, which choose keys by random hashes"),
        ("bert-generation", {"is_decoder": False}, "those after it"),
        ("xlnet", {}, "those after it"),
        ("deepseek_v32", {}, "choose a few keys by a score"),
        ("rwkv", {"rescale_every": 6}, "rescale_every is 6"),
        ("musicgen", {}, "no linear output head"),
    ],
)
def test_what_no_layout_can_do_is_refused(architecture, config, reason):
    with pytest.raises(ValueError, match=reason):
        fnppo.functional_policy(tiny_causal_lm(architecture, **config))


def test_a_model_that_changes_its_weights_when_it_runs_is_refused():
    module = tiny_causal_lm("llama")
    module.model.layers[0].mlp = Restless(module.model.layers[0].mlp)
    with pytest.raises(ValueError, match="LlamaForCausalLM has changed its parameters in place"):
        fnppo.functional_policy(module)


class Restless(torch.nn.Module):
    """Divides a weight by 2 each time."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.no_grad():
            self.inner.up_proj.weight.div_(2)
        return self.inner(x)


def test_layers_that_cannot_be_packed_are_computed_again():
    """remat of a model with a recurrent state: the same gradients."""
    module = tiny_causal_lm("mamba")
    batch = fnppo.pad_sequences(fnppo.padded_batch([[1, 2], [3]], [[4, 5], [6, 7, 8]]))
    grads = []
    for remat in (False, True):
        policy, params = fnppo.functional_policy(module, remat=remat)

        def loss_fn(params, batch, policy=policy):
            return fnppo.forward_logprobs(params, batch, policy=policy, temperature=1.0).logprobs.sum(), fnppo.Metrics()

        grads.append(fnppo.value_and_grad(loss_fn)(params, batch)[1])
    for a, b in zip(*map(optree.tree_leaves, grads), strict=True):
        assert torch.equal(a, b)


@settings(max_examples=8)
@given(model=tiny_models(vocab_size=VOCAB), batch=BATCHES, layout=st.sampled_from(list(LAYOUTS)))
def test_tiny_models(model, batch, layout):
    with float64_everywhere():
        policy, params = fnppo.functional_policy(model)
    check(model, policy, params, LAYOUTS["padded" if policy.padded_only else layout], batch)


def test_windows_and_chunks_are_shorter_than_rows():
    """That a wrong window could not hide: the last of eight tokens does not see the first in one local layer."""
    for architecture, kind in (
        ("llama4_text", "chunked_attention"),
        ("gemma3_text", "sliding_attention"),
        ("qwen2", "sliding_attention"),
    ):
        module = tiny_causal_lm(architecture)
        assert kind in module.config.layer_types
        config = {"layer_types": [kind], "mlp_layer_types": None, "num_hidden_layers": 1, "no_rope_layers": [1]}
        config = {name: value for name, value in config.items() if hasattr(module.config, name)}
        local = tiny_causal_lm(architecture, **config)
        ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [9, 2, 3, 4, 5, 6, 7, 8]])
        logits = local(ids).logits
        assert torch.equal(logits[0, -1], logits[1, -1])
        assert not torch.equal(logits[0, 3], logits[1, 3])


def test_names():
    assert set(FAMILIES) | set(PACKED.values()) | set(PADDED.values()) <= set(causal_lms())
    assert type(tiny_causal_lm("Qwen3ForCausalLM")).__name__ == "Qwen3ForCausalLM"
    with pytest.raises(ValueError, match="no causal LM called 'qwen33'. Did you mean qwen3"):
        tiny_causal_lm("qwen33")


def test_the_seed_is_all_that_a_tiny_model_depends_on():
    state = torch.get_rng_state()
    one, same, other = (tiny_causal_lm("llama", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
