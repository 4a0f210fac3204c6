"""functional_policy: purity, heads, tied weights, modes, and models that are refused by name."""

import copy
import dataclasses
from functools import cache

import pytest
import torch
from hypothesis import given
from tiny import VOCAB, tiny
from torch import nn, tensor
from torch.func import jvp, vmap
from torch.testing import assert_close

import fnppo
from fnppo import functional_policy
from fnppo.attention import choose_attention, varlen_attention
from fnppo.self_checks import _in_float32
from fnppo.testing import float64_everywhere, padded_batches, tiny_causal_lm

FAMILIES = ["llama", "tied", "gpt2", "mistral", "gemma2", "gpt_oss", "granite", "cohere", "phi"]
BATCH = fnppo.padded_batch([[1, 2], [3]], [[4, 5], [6]])


def logprobs(policy, params, batch=BATCH, layout=fnppo.pack_sequences):
    return fnppo.forward_logprobs(params, layout(batch), policy=policy, temperature=1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_the_models_own(family):
    module = tiny(family)
    policy, params = functional_policy(module)
    ids = tensor([5, 3, 1, 2])
    hidden = policy.hidden_states(params, fnppo.PackedInputs(ids, torch.arange(4), tensor([0, 4]).int()))
    assert_close(policy.head.bind(params).logits(hidden), module(ids[None]).logits[0], rtol=1e-5, atol=1e-6)
    assert policy.vocab_size == VOCAB


def test_heads_are_described():
    assert functional_policy(tiny("gemma2"))[0].head.softcap == 3.0
    assert functional_policy(tiny("granite"))[0].head.scale == pytest.approx(1 / 3)
    assert functional_policy(tiny("cohere"))[0].head.scale == 0.25
    assert functional_policy(tiny("phi"))[0].head.bias == "lm_head.bias"


def test_tied_weights_are_there_once_and_get_both_gradients():
    """G4: the gradient is the sum of those of an untied copy."""
    policy, params = functional_policy(tiny("tied"))
    assert policy.head.weight == "model.embed_tokens.weight"
    assert "lm_head.weight" not in params
    loss_fn = lambda p, _: (logprobs(policy, p).logprobs.sum(), fnppo.Metrics())
    _, grads = fnppo.value_and_grad(loss_fn)(params, None)
    module = copy.deepcopy(tiny("tied"))
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().clone())
    module.config.tie_word_embeddings = False
    free, untied = functional_policy(module)
    _, apart = fnppo.value_and_grad(lambda p, _: (logprobs(free, p).logprobs.sum(), fnppo.Metrics()))(untied, None)
    both = apart["model.embed_tokens.weight"] + apart["lm_head.weight"]
    assert_close(grads["model.embed_tokens.weight"], both, rtol=1e-6, atol=1e-8)
    assert bool((apart["lm_head.weight"].abs().max() > 0.1) & (apart["model.embed_tokens.weight"].abs().max() > 0.1))


def test_tied_gradient_by_hand():
    """G4: loss 1.361995, gradient of the shared matrix from its use as embedding and as head."""
    from fnppo.head import chunked_logprobs

    loss_fn = lambda p, _: (
        -chunked_logprobs(p["E"][tensor([0, 1])], tensor([1, 2]), weight=p["E"]).logprobs.mean(), fnppo.Metrics()
    )  # fmt: skip
    (loss, _), grads = fnppo.value_and_grad(loss_fn)({"E": tensor([[1.0, 0], [0, 1], [1, 1]])}, None)
    assert loss.item() == pytest.approx(1.361995, abs=1e-6)
    assert_close(grads["E"], tensor([[0.6335, -0.1335], [-0.6335, 0.1335], [0.2112, -0.2888]]), atol=1e-4, rtol=0)


def test_the_policy_holds_no_weights_and_the_module_is_left_alone():
    module = copy.deepcopy(tiny("llama"))
    before = {name: p.clone() for name, p in module.state_dict().items()}
    policy, params = functional_policy(module)
    assert all(p.is_meta for p in policy.skeleton.parameters())
    assert module.config._attn_implementation == "eager"
    stats = logprobs(policy, params)
    for p in module.parameters():
        p.data = torch.full_like(p, float("nan"))
    assert_close(logprobs(policy, params).logprobs, stats.logprobs, rtol=0, atol=0)
    assert all(torch.equal(params[name], before[name]) for name in params)
    moved = {name: p + 1 for name, p in params.items()}
    assert not torch.equal(logprobs(policy, moved).logprobs, stats.logprobs)


def test_a_missing_parameter_is_an_error():
    policy, params = functional_policy(tiny("llama"))
    for name in ("model.norm.weight", "lm_head.weight"):
        with pytest.raises((ValueError, KeyError), match=name.removeprefix("model.")):
            logprobs(policy, {n: p for n, p in params.items() if n != name})


MISREAD = dict(
    vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    attn_implementation="eager", pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def test_a_window_that_only_the_mask_knows_is_honoured():
    """Qwen2Moe passes no window to its attention; its own eager backend finds it in the mask."""
    import transformers

    config = transformers.Qwen2MoeConfig(
        **MISREAD, moe_intermediate_size=8, shared_expert_intermediate_size=8, num_experts=2, num_experts_per_tok=1,
        use_sliding_window=True, sliding_window=3, max_window_layers=0,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.Qwen2MoeForCausalLM(config)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    policy, params = functional_policy(module.eval())
    ids = torch.randint(VOCAB, (12,))
    hidden = policy.hidden_states(params, fnppo.PackedInputs(ids, torch.arange(12), tensor([0, 12]).int()))
    assert_close(policy.head.bind(params).logits(hidden), module(ids[None]).logits[0], rtol=1e-3, atol=1e-3)


def test_a_window_that_transformers_disagrees_about_is_refused():
    """OLMoE passes a window to its attention that its own eager mask has not."""
    import transformers

    config = transformers.OlmoeConfig(**MISREAD, num_experts=2, num_experts_per_tok=1)
    config.sliding_window = 3
    with pytest.raises(ValueError, match="asks for a window of 3 by keyword and of None in its mask"):
        functional_policy(transformers.OlmoeForCausalLM(config))


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}])
def test_rotary_embeddings_that_depend_on_the_batch_are_refused(rope):
    import transformers

    config = transformers.LlamaConfig(**MISREAD, rope_parameters=rope | {"rope_theta": 10000.0})
    with pytest.raises(ValueError, match="LlamaForCausalLM has dynamic rotary embeddings"):
        functional_policy(transformers.LlamaForCausalLM(config))


def test_every_kind_of_randomness_needs_a_seed():
    """C21: layer drop and router jitter are no Dropout modules."""
    import transformers

    mixtral = transformers.MixtralConfig(**MISREAD, num_local_experts=2, num_experts_per_tok=1, router_jitter_noise=0.3)
    opt = transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=8, ffn_dim=8, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=8,
        layerdrop=0.5, dropout=0.0, attention_dropout=0.0, pad_token_id=0,
    )  # fmt: skip
    for module in (transformers.MixtralForCausalLM(mixtral), transformers.OPTForCausalLM(opt)):
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match="is random in training mode"):
            functional_policy(module, train=True)
        assert torch.equal(state, torch.get_rng_state())


def test_modes_of_submodules_are_left_alone():
    module = copy.deepcopy(tiny("gpt2")).train()
    module.transformer.h[0].eval()
    functional_policy(module)
    assert module.transformer.h[1].training
    assert not module.transformer.h[0].training


def test_tokens_outside_the_vocabulary():
    policy, params = functional_policy(tiny("llama"))
    with pytest.raises(ValueError, match=f"token_ids holds 99, but the model's vocabulary has {VOCAB}"):
        logprobs(policy, params, fnppo.padded_batch([[1]], [[99]]))


def test_float32_is_float32():
    """C24: no autocast is hidden anywhere: a float32 policy gives the module's own float32 logits."""
    policy, params = functional_policy(tiny("llama", torch.float32))
    ids = tensor([1, 5, 3, 2])
    hidden = policy.hidden_states(params, fnppo.PackedInputs(ids, torch.arange(4), tensor([0, 4]).int()))
    own = tiny("llama", torch.float32)(ids[None]).logits[0]
    assert_close(policy.head.bind(params).logits(hidden), own, rtol=1e-6, atol=2e-6)


def test_remat_keeps_less_and_runs_layers_twice(monkeypatch):
    """That there is something to be exact about: fewer saved numbers, and a second forward of each layer."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    saved, runs = {}, {}
    forward = LlamaMLP.forward
    for remat in (False, True):
        calls, sizes = [], []
        monkeypatch.setattr(LlamaMLP, "forward", lambda self, x, calls=calls: calls.append(1) or forward(self, x))
        policy, params = functional_policy(tiny("llama"), remat=remat)
        calls.clear()
        leaves = {n: p.requires_grad_() for n, p in params.items()}
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            hidden = policy.hidden_states(leaves, fnppo.pack_sequences(BATCH).inputs)
        hidden.sum().backward()
        saved[remat], runs[remat] = sum(sizes), len(calls)
    assert runs == {False: 2, True: 4}
    assert saved[True] < saved[False] / 2


@pytest.mark.parametrize("remat", [False, True])
def test_compiled_layers_give_the_same_bits_and_keep_as_much(remat, unchecked):
    """Without code generation. Under remat what runs again is compiled, and the running again is not lost."""
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        policy, params = functional_policy(tiny("llama"), remat=remat)
        inputs, sizes, graphs = fnppo.pack_sequences(BATCH).inputs, [], []
        if compiled:
            for layer in policy.skeleton.model.layers:
                layer.compile(
                    dynamic=True, backend=lambda graph, _, graphs=graphs: graphs.append(graph) or graph.forward
                )
        leaves = [p.requires_grad_() for p in params.values()]
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            hidden = policy.hidden_states(params, inputs)
        grads = torch.autograd.grad(hidden.square().sum(), leaves, allow_unused=True)
        found.append((sum(sizes), hidden, *(grad for grad in grads if grad is not None)))
        assert bool(graphs) == compiled
    (kept, *eager), (kept_compiled, *compiled) = found
    assert kept_compiled == kept
    assert_close(compiled, eager, rtol=0, atol=0)


class Repeating(nn.Module):
    """A module that is no causal LM."""


class Shifted(nn.Module):
    """Adds a little of the position before."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y + 0.01 * nn.functional.pad(y, (0, 0, 1, 0))[:, :-1]


class Ahead(Shifted):
    """Adds a little of the position after."""

    def forward(self, x):
        y = self.inner(x)
        return y + 0.01 * nn.functional.pad(y, (0, 0, 0, 1))[:, 1:]


class Cumulative(nn.Module):
    """Mixes positions outside of attention."""

    def forward(self, x):
        return x + x.cumsum(1)


def test_what_is_no_causal_lm_is_refused():
    import transformers

    with pytest.raises(ValueError, match="Repeating is no causal LM from transformers"):
        functional_policy(Repeating())
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ValueError, match="LlamaModel has no (backbone|linear)"):
        functional_policy(transformers.LlamaModel(config))


def refuses_packed_and_pads(module, reason):
    """Packed is refused for the reason, with the way out; padded is the model itself."""
    policy, params = functional_policy(module)
    assert policy.layout == "padded"
    with pytest.raises(ValueError, match=f"the batch is packed, and .*{reason}.*Use pad_sequences"):
        logprobs(policy, params)
    ours = logprobs(policy, params, layout=fnppo.pad_sequences).logprobs
    rows = [tensor([1, 2, 4, 5]), tensor([3, 6])]
    own = [module(row[None]).logits[0].float().log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0] for row in rows]
    tolerance = 0.1 if params[policy.head.weight].dtype.itemsize == 2 else 1e-5
    assert_close(ours.float(), torch.cat([own[0][1:], own[1]]), rtol=tolerance, atol=tolerance)


def test_a_model_with_its_own_attention_is_refused_packed_by_name():
    """B4: models that would not be told where sequences end."""
    refuses_packed_and_pads(tiny_causal_lm("bloom"), "Bloom.*interface")


def test_recurrent_layers_are_refused_packed_by_name():
    refuses_packed_and_pads(tiny_causal_lm("mamba"), "MambaForCausalLM has layers of type linear_attention")


def test_padding_before_a_token_is_refused_where_it_would_be_read():
    policy, params = functional_policy(tiny_causal_lm("mamba"))
    mask = tensor([[True, True, True], [False, True, True]])
    inputs = fnppo.PaddedInputs(tensor([[1, 2, 3]] * 2), torch.arange(3).expand(2, 3), mask)
    with pytest.raises(ValueError, match="has padding on the left of a token"):
        policy.hidden_states(params, inputs)


def test_positions_that_the_model_would_not_read_are_refused():
    """A model that counts positions itself would ignore these."""
    policy, params = functional_policy(tiny_causal_lm("bloom"))
    inputs = fnppo.PaddedInputs(tensor([[1, 2, 3]] * 2), tensor([[0, 1, 2], [0, 5, 9]]), torch.ones(2, 3).bool())
    with pytest.raises(ValueError, match="row 1 has position 5 in column 1.*Count from 0"):
        policy.hidden_states(params, inputs)
    missing = inputs._replace(attention_mask=tensor([[True] * 3, [True, False, False]]))
    assert policy.hidden_states(params, missing).isfinite().all()  # what stands in the padding is never read


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_says_nothing_about_packing(error):
    """A model that ran out of memory on packed tokens is not one that cannot read them."""
    module = copy.deepcopy(tiny("llama"))
    module.model.layers[0].mlp.act_fn = Exhausted(error)
    with pytest.raises(error, match="no memory left"):
        functional_policy(module)


class Exhausted(nn.Module):
    """Has no memory for the first of its inputs, packed tokens, and has some for the others."""

    def __init__(self, error):
        super().__init__()
        self.error, self.left = error, [1]

    def forward(self, x):
        if self.left:
            self.left.clear()
            raise self.error("no memory left")
        return nn.functional.silu(x)

    def __deepcopy__(self, memo):  # the policy has a copy of the module
        return self


def test_a_backend_that_was_chosen_is_never_dropped():
    """Where the attention that the caller wants cannot be used, there is no policy with another."""
    with pytest.raises(ValueError, match="Bloom.*interface"):
        functional_policy(tiny_causal_lm("bloom"), attention=fnppo.math_attention)


def test_a_model_that_sees_later_tokens_is_refused():
    module = copy.deepcopy(tiny("llama"))
    module.model.layers[0].mlp = Ahead(module.model.layers[0].mlp)
    with pytest.raises(ValueError, match="LlamaForCausalLM lets a token see those after it"):
        functional_policy(module)
    with pytest.raises(ValueError, match="bidirectional|see those after it"):
        functional_policy(tiny_causal_lm("bert-generation", is_decoder=False))


def test_a_model_that_lets_sequences_see_each_other_is_refused_packed():
    """B4: the self-test, on a model that reads its neighbours outside of attention."""
    module = copy.deepcopy(tiny("llama"))
    mlp = module.model.layers[0].mlp
    mlp.act_fn = Cumulative()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        refuses_packed_and_pads(module.to(dtype), "LlamaForCausalLM lets sequences of a packed batch see each other")


def test_a_small_leak_in_half_precision_is_refused_packed():
    """A shift of the residual stream, as some models have it; half precision must not hide it."""
    module = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    module.model.layers[0].mlp = Shifted(module.model.layers[0].mlp)
    refuses_packed_and_pads(module, "lets sequences of a packed batch see each other")


def test_a_head_that_was_misread_is_refused():
    module = copy.deepcopy(tiny("llama"))
    module.config.logits_scaling = 2.0  # the model itself does not scale
    with pytest.raises(ValueError, match="packed logits differ from the model's own"):
        functional_policy(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.2, 1.01])
def test_a_head_that_was_misread_by_little_is_refused_in_any_precision(dtype, scale):
    """Half precision's roundings, large in a deep model, must not hide it."""
    import transformers

    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * scale
            return output

    module = Scaled(tiny("llama").config)
    module.load_state_dict(tiny("llama").state_dict())
    with pytest.raises(ValueError, match="Scaled.* logits differ from the model's own"):
        functional_policy(module.to(dtype))


def test_half_precision_with_hidden_states_in_float32():
    """Their dtype does not say how the layers round."""
    module = tiny_causal_lm("falcon_mamba").to(torch.bfloat16)
    policy, params = functional_policy(module)
    inputs = fnppo.PaddedInputs(tensor([[1, 2]]), tensor([[0, 1]]), tensor([[True, True]]))
    assert policy.hidden_states(params, inputs).dtype == torch.float32


def test_a_model_that_insists_on_half_precision_is_compared_in_it_and_says_so():
    module = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    module.model.layers[0].mlp.act_fn = OnlyHalf()
    with pytest.warns(UserWarning, match="LlamaForCausalLM does not run in float32 .*no kernel"):
        policy, _ = functional_policy(module)
    assert policy.padded_only is None
    module.config.logits_scaling = 2.0
    with pytest.raises(ValueError, match="packed logits differ"):
        functional_policy(module)


def test_kernels_for_half_precision_alone_give_way_where_float32_decides():
    policy, params = functional_policy(copy.deepcopy(tiny("llama")).to(torch.bfloat16))
    flash = dataclasses.replace(policy, attention=varlen_attention, sampling_attention="flash_attention_2")
    wide, copies = _in_float32(flash, params)
    assert (wide.attention, wide.sampling_attention) == (choose_attention, "eager")
    assert {value.dtype for value in copies.values()} == {torch.float32}
    assert all(value.dtype == torch.bfloat16 for value in params.values())


class OnlyHalf(nn.Module):
    def forward(self, x):
        if x.dtype != torch.bfloat16:
            raise RuntimeError(f"no kernel for {x.dtype}")
        return nn.functional.silu(x)


def test_an_attention_that_was_misread_is_refused():
    module = copy.deepcopy(tiny("llama"))
    wrong = lambda q, k, v, segments, *, scaling, **asked: fnppo.math_attention(
        q, k, v, segments, scaling=2 * scaling, **asked
    )
    with pytest.raises(ValueError, match="packed logits differ"):
        functional_policy(module, attention=wrong)


def test_dropout_needs_a_seed_in_training_mode():
    """C21."""
    module = tiny("gpt2")
    with pytest.raises(ValueError, match="GPT2LMHeadModel is random in training mode .*Pass dropout_seed"):
        functional_policy(module, train=True)
    calm, params = functional_policy(module)
    random_state = torch.get_rng_state()
    one, _ = functional_policy(module, train=True, dropout_seed=1)
    first, again = logprobs(one, params).logprobs, logprobs(one, params).logprobs
    assert torch.equal(first, again)
    assert not torch.equal(first, logprobs(calm, params).logprobs)
    assert not torch.equal(first, logprobs(one.with_dropout_seed(2), params).logprobs)
    assert torch.equal(random_state, torch.get_rng_state())
    functional_policy(tiny("llama"), train=True)  # no dropout, no seed needed


def test_dropout_is_the_same_when_layers_are_computed_again():
    module = tiny("gpt2")
    grads = []
    for remat in (False, True):
        policy, params = functional_policy(module, train=True, dropout_seed=3, remat=remat)
        grads.append(
            fnppo.value_and_grad(lambda p, _: (logprobs(policy, p).logprobs.sum(), fnppo.Metrics()))(params, None)
        )
    assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_many_policies_at_once():
    """vmap over stacked parameters, and a directional derivative, of the whole packed forward."""
    policy, params = functional_policy(tiny("llama"))
    model_batch = fnppo.pack_sequences(BATCH)
    run = lambda p: fnppo.forward_logprobs(p, model_batch, policy=policy, temperature=0.7)
    other = {n: p + 0.1 for n, p in params.items()}
    stacked = {n: torch.stack([params[n], other[n]]) for n in params}
    together = vmap(run)(stacked)
    for i, one in enumerate((params, other)):
        assert_close(together.logprobs[i], run(one).logprobs, rtol=1e-5, atol=1e-6)
        assert_close(together.entropy[i], run(one).entropy, rtol=1e-5, atol=1e-6)
    direction = {n: torch.ones_like(p) for n, p in params.items()}
    slope = jvp(lambda p: run(p).logprobs, (params,), (direction,))[1]
    _, grads = fnppo.value_and_grad(lambda p, _: (run(p).logprobs.sum(), fnppo.Metrics()))(params, None)
    assert_close(slope.sum(), sum(g.sum() for g in grads.values()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_curvature(family):
    """Gradient of gradient, Hessian-vector product and jvp of jvp of the whole packed forward agree with each other."""
    from torch.func import grad

    with float64_everywhere():
        policy, params = functional_policy(tiny(family))
        model_batch = fnppo.pack_sequences(BATCH)
        stats = lambda p: fnppo.forward_logprobs(p, model_batch, policy=policy, temperature=0.7)
        loss = lambda p: (stats(p).logprobs + stats(p).entropy.sin()).sum()
        g = torch.Generator().manual_seed(0)
        v = {n: torch.randn(p.shape, generator=g, dtype=p.dtype) for n, p in params.items()}
        dot = lambda a, b: sum((a[n] * b[n]).sum() for n in a)
        forward_over_reverse = dot(jvp(grad(loss), (params,), (v,))[1], v)
        reverse_over_reverse = dot(grad(lambda p: dot(grad(loss)(p), v))(params), v)
        assert_close(reverse_over_reverse, forward_over_reverse, rtol=1e-8, atol=1e-9)
        twice = lambda: jvp(lambda p: jvp(loss, (p,), (v,))[1], (params,), (v,))[1]
        if family == "gpt2":
            with pytest.raises(ValueError, match="layer_norm is silently wrong"):
                twice()
        else:
            assert_close(twice(), forward_over_reverse, rtol=1e-8, atol=1e-9)
        step = 1e-4
        moved = lambda s: loss({n: params[n] + s * v[n] for n in params})
        numeric = (moved(step) - 2 * moved(0.0) + moved(-step)) / step**2
        assert_close(forward_over_reverse, numeric, rtol=1e-3, atol=1e-3)


def test_why_jvp_of_jvp_is_refused_with_layer_norm():
    """torch's own layer_norm: d²/ds² f(x + s v) by jvp of jvp is not that of jvp of grad. Right by 2.13? Then allow it."""
    from torch.func import grad

    g = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 3, 4, generator=g, dtype=torch.float64)
    f = lambda x: nn.functional.layer_norm(x, (4,)).sin().sum()
    forward = jvp(lambda x: jvp(f, (x,), (v,))[1], (x,), (v,))[1]
    reverse = (jvp(grad(f), (x,), (v,))[1] * v).sum()
    assert abs(forward - reverse) > 0.01


def test_updates_of_many_seeds_at_once():
    """vmap over a whole train_step of a transformers model, optimizer state included."""
    policy, params = functional_policy(tiny("llama"))
    batch = BATCH._replace(
        advantages=torch.where(BATCH.loss_mask, 1.0, 0.0), old_logprobs=torch.full(BATCH.input_ids.shape, -2.0)
    )
    micro_batches = [fnppo.pack_sequences(fnppo.select_rows(fnppo.token_mean(batch), [row])) for row in (0, 1)]
    optimizer = fnppo.skip_nonfinite(fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(1e-2)))

    def loss_fn(params, micro_batch):
        stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=1.0)
        return fnppo.ppo_loss(stats, micro_batch.targets, entropy_coef=0.01)

    def two_steps(params):
        state = optimizer.init(params)
        for _ in range(2):
            params, state, metrics = fnppo.train_step(
                params, state, micro_batches, loss_fn=loss_fn, optimizer=optimizer
            )
        return params, metrics.per_step["loss"]

    seeds = [params, {n: p + 0.1 for n, p in params.items()}]
    together, losses = vmap(two_steps)({n: torch.stack([s[n] for s in seeds]) for n in params})
    for i, one in enumerate(seeds):
        alone, loss = two_steps(one)
        assert_close(losses[i], loss, rtol=1e-5, atol=1e-6)
        for n in params:
            assert_close(together[n][i], alone[n], rtol=1e-4, atol=1e-5)


@cache
def in_both_precisions():
    return functional_policy(copy.deepcopy(tiny("llama")).to(torch.bfloat16)), functional_policy(tiny("llama"))


@pytest.mark.core
@given(padded_batches(vocab_size=VOCAB))
def test_half_precision_models_give_float32_logprobs(batch):
    """C3, C24: the dtype of the model is honoured, and log-probs are float32 whatever it is."""
    (policy, params), (exact_policy, exact) = in_both_precisions()
    stats = logprobs(policy, params, batch)
    assert stats.logprobs.dtype == stats.entropy.dtype == torch.float32
    exact = {n: params[n].double() for n in exact}
    reference = logprobs(exact_policy, exact, batch)
    assert_close(stats.logprobs.double(), reference.logprobs, rtol=0.1, atol=0.35)
    hidden = policy.hidden_states(params, fnppo.pack_sequences(batch).inputs)
    assert hidden.dtype == torch.bfloat16


def test_params_share_memory_with_the_module():
    module = tiny("llama")
    _, params = functional_policy(module)
    assert params["lm_head.weight"].data_ptr() == module.lm_head.weight.data_ptr()
    assert not params["lm_head.weight"].requires_grad
