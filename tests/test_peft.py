"""PEFT: log-probs with and without adapters, gradients of adapters alone, and folders that PEFT and transformers load."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from tiny import tiny
from transformers import AutoModelForCausalLM

import fnppo
import fnppo.checkpoint
from fnppo.interop.peft import save_adapter, save_merged, trained_by

TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn"], "tied": "all-linear"}
BATCH = fnppo.padded_batch(
    [[1], [2, 3]], [[4, 5], [6, 7, 8]], old_logprobs=[[-2.0, -2.0], [-2.0] * 3], advantages=[1.0, -1.0]
)


def wrapped(family, **options):
    torch.manual_seed(0)
    base = copy.deepcopy(tiny(family))
    return get_peft_model(
        base, LoraConfig(r=2, target_modules=TARGETS[family], init_lora_weights=False, **options)
    ).double()


def logprobs(params, policy, layout=fnppo.packed):
    return fnppo.compute_logprobs(params, BATCH, policy=policy, temperature=1.0, max_tokens=100, layout=layout).logprobs


def own_logprobs(model):
    """By the wrapped model itself, row by row."""
    rows = []
    for ids, existing, learned in zip(BATCH.input_ids, BATCH.attention_mask, BATCH.loss_mask, strict=True):
        scores = model(input_ids=ids[existing][None]).logits[0].log_softmax(-1)
        own = torch.zeros(ids.shape, dtype=torch.float64)
        own[existing.nonzero()[1:, 0]] = scores[:-1].gather(-1, ids[existing][1:, None])[:, 0]
        rows.append(torch.where(learned, own, 0.0))
    return torch.stack(rows).detach()


@pytest.mark.parametrize("family", TARGETS)
def test_with_and_without_adapters(family):
    """One set of weights is policy and reference: packed, padded, and as the wrapped model computes them."""
    model = wrapped(family)
    policy, params = fnppo.functional_policy(model)
    with model.disable_adapter():
        reference, same = fnppo.functional_policy(model)
        right = own_logprobs(model)
    assert all(leaf.data_ptr() == same[name].data_ptr() for name, leaf in params.items())
    for layout in (fnppo.packed, fnppo.padded, fnppo.shared):
        torch.testing.assert_close(logprobs(params, policy, layout), own_logprobs(model), atol=1e-5, rtol=0)
        torch.testing.assert_close(logprobs(params, reference, layout), right, atol=1e-5, rtol=0)
    plain, alone = fnppo.functional_policy(tiny(family))
    torch.testing.assert_close(logprobs(alone, plain), right, atol=1e-5, rtol=0)
    assert (right - own_logprobs(model)).abs().max() > 1e-2


@pytest.mark.parametrize("family", TARGETS)
def test_an_update_of_the_adapters_alone(family, tmp_path):
    """G13: gradients and moments for them, and no change of the rest; PEFT and transformers load what came out."""
    model = wrapped(family)
    policy, params = fnppo.functional_policy(model)
    trained, frozen = fnppo.partition(params, trained_by(model))
    assert trained
    assert all("lora_" in name for name in trained)

    def loss_fn(trained, micro_batch):
        stats = fnppo.forward_logprobs(fnppo.combine(trained, frozen), micro_batch, policy=policy, temperature=1.0)
        return fnppo.ppo_loss(stats, micro_batch.targets)

    micro_batch = fnppo.pack_sequences(fnppo.token_mean(BATCH))
    _, grads = fnppo.value_and_grad(loss_fn)(trained, micro_batch)
    loss, _ = fnppo.ppo_loss(oracle_wrapped(model), micro_batch.targets)
    loss.backward()
    own = dict(model.get_base_model().named_parameters())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, own[name].grad, atol=1e-6, rtol=1e-4)
    assert {name for name, leaf in own.items() if leaf.grad is not None} == grads.keys()

    optimizer = fnppo.adamw(1e-2)
    new, opt_state, _ = fnppo.update_policy(
        trained, optimizer.init(trained), BATCH, loss_fn=loss_fn, optimizer=optimizer, mini_batch_size=1, max_tokens=100
    )
    assert opt_state.first_moment.keys() == trained.keys()
    params = fnppo.combine(new, frozen)
    found = logprobs(params, policy)

    save_adapter(tmp_path / "adapter", params, model)
    loaded = PeftModel.from_pretrained(copy.deepcopy(tiny(family)), tmp_path / "adapter").double()
    torch.testing.assert_close(own_logprobs(loaded), found, atol=1e-5, rtol=0)
    save_merged(tmp_path / "merged", params, model)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(own_logprobs(merged), found, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        own_logprobs(model), logprobs(fnppo.functional_policy(model)[1], policy), atol=1e-5, rtol=0
    )


def oracle_wrapped(model):
    """Log-probs of all targets, with the graph of the wrapped module."""
    scores = []
    for ids, existing, learned in zip(BATCH.input_ids, BATCH.attention_mask, BATCH.loss_mask, strict=True):
        ids, learned = ids[existing], learned[existing]
        rows = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        scores.append(rows[learned[1:]])
    return fnppo.TokenStats(torch.cat(scores), None)


def test_nothing_else_is_lost(tmp_path):
    model = wrapped("llama")
    _, params = fnppo.functional_policy(model)
    (tmp_path / "optimizer.bin").write_text("kept")
    for save, words in ((save_adapter, "without adapter_config.json"), (save_merged, "without config.json")):
        with pytest.raises(ValueError, match=words):
            save(tmp_path, params, model)
    assert (tmp_path / "optimizer.bin").read_text() == "kept"
    for parameter in model.get_base_model().model.norm.parameters():
        parameter.requires_grad_(True)
    with pytest.raises(ValueError, match="model.norm.weight is trained, and PEFT does not save it"):
        save_adapter(tmp_path / "a", params, model)
    model = wrapped("llama")
    model.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="model has the adapters default, b"):
        save_adapter(tmp_path / "a", fnppo.functional_policy(model)[1], model)


def test_refusals(tmp_path):
    prefixed = get_peft_model(
        copy.deepcopy(tiny("llama")), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    with pytest.raises(ValueError, match="PREFIX_TUNING puts tokens or keys before those of a row"):
        fnppo.functional_policy(prefixed)
    with_head = get_peft_model(copy.deepcopy(tiny("llama")), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(
        ValueError, match="output head of LlamaForCausalLM has .*lora_A.*; only a weight and a bias are read"
    ):
        fnppo.functional_policy(with_head)
    whole_head = get_peft_model(
        copy.deepcopy(tiny("llama")), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    with pytest.raises(ValueError, match="output head of LlamaForCausalLM has .*modules_to_save"):
        fnppo.functional_policy(whole_head)
    place_bound = LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[7])
    with pytest.raises(ValueError, match="alora_invocation_tokens is set"):
        fnppo.functional_policy(get_peft_model(copy.deepcopy(tiny("llama")), place_bound))
    mixed = get_peft_model(copy.deepcopy(tiny("llama")), LoraConfig(r=2, target_modules=["q_proj"]), mixed=True)
    with pytest.raises(ValueError, match="module is a PeftMixedModel"):
        fnppo.functional_policy(mixed)
    model = wrapped("llama")
    policy, params = fnppo.functional_policy(model)
    with pytest.raises(ValueError, match=r"adapters of PEFT .* Use save_adapter or save_merged"):
        fnppo.checkpoint.save_pretrained(tmp_path / "model", params, policy=policy)
    with pytest.raises(ValueError, match="LlamaForCausalLM, no PeftModel"):
        save_adapter(tmp_path / "adapter", params, tiny("llama"))
    for save in (save_adapter, save_merged):
        with pytest.raises(ValueError, match=r"params lacks .*lora_A.*combine\(trained, frozen\)"):
            save(tmp_path / "adapter", {name: leaf for name, leaf in params.items() if "lora_" not in name}, model)
        for name, words in (
            ("nowhere", "is not there in the policy"),
            ("model.norm.weight", r"is \(8,\) there in the policy"),
        ):
            with pytest.raises(ValueError, match=words):
                save(tmp_path / "adapter", params | {name: torch.zeros(3)}, model)
    assert not list(tmp_path.iterdir())
