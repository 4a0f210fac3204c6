"""verl's interface: against a loop in plain torch, for any split; every option changes a number or is refused."""

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCAB, tiny

from fnppo.interop.verl import Actor
from fnppo.testing import float64_everywhere

CONFIG = {
    "ppo_mini_batch_size": 3, "ppo_epochs": 2, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 12,
    "use_remove_padding": True, "grad_clip": 5.0, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0,
}  # fmt: skip
PROMPT, RESPONSE = 3, 4


def data_of(rows, seed=0, **more):
    """Prompts padded left, responses right, one observation inside of a response; NaN in masked slots."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, PROMPT + RESPONSE), generator=draw)
    attention = torch.ones_like(ids)
    for row in range(rows):
        attention[row, : row % PROMPT] = 0
        attention[row, PROMPT + 1 + (row * 5) % RESPONSE :] = 0
    mask = attention[:, PROMPT:].clone()
    mask[mask.sum(1) == RESPONSE, 1] = 0
    number = lambda: torch.randn(mask.shape, dtype=torch.float64, generator=draw)
    masked = lambda values: torch.where(mask == 1, values, torch.nan)
    columns = {
        "input_ids": ids, "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:], "response_mask": mask,
        "advantages": masked(number()), "ref_log_prob": masked(-3 + 0.3 * number()),
    }  # fmt: skip
    own = plain_logprobs(tiny("llama"), columns, 0.8)[0].detach()  # ratios on both sides of each clip
    columns["old_log_probs"] = masked(own + 0.15 * number())
    info = {"temperature": 0.8, "use_dynamic_bsz": True, "max_token_len": 14, "micro_batch_size": 2}
    return SimpleNamespace(batch=columns | more, meta_info=info, non_tensor_batch={})


def actor_of(config, lr=0.1):
    module = copy.deepcopy(tiny("llama")).requires_grad_(True)
    return Actor(CONFIG | config, module, torch.optim.SGD(module.parameters(), lr=lr))


def plain_logprobs(module, columns, temperature):
    """[rows, response] log-probs and entropies, a row at a time."""
    found = []
    for ids, there in zip(columns["input_ids"], columns["attention_mask"] == 1, strict=True):
        scores = (module(input_ids=ids[there][None]).logits[0] / temperature).log_softmax(-1)[:-1]
        of_tokens = scores.gather(-1, ids[there][1:, None])[:, 0]
        entropies = -(scores.exp() * scores).sum(-1)
        places = there.nonzero()[1:, 0]
        found.append(
            torch.stack(
                [torch.zeros(len(ids), dtype=torch.float64).index_put((places,), x) for x in (of_tokens, entropies)]
            )
        )
    return torch.stack(found)[:, :, PROMPT:].unbind(1)


def plain_update(module, data, config, lr=0.1):
    """verl's update over whole mini-batches, in plain torch: vanilla loss, token-mean, low_var_kl."""
    columns, optimizer, norms = data.batch, torch.optim.SGD(module.parameters(), lr=lr), []
    rows, size = len(columns["input_ids"]), config["ppo_mini_batch_size"]
    for _ in range(config["ppo_epochs"]):
        for first in range(0, rows, size):
            part = {name: column[first : first + size] for name, column in columns.items()}
            mask = part["response_mask"] == 1
            logprobs, entropy = (x[mask] for x in plain_logprobs(module, part, data.meta_info["temperature"]))
            old = logprobs.detach() if rows <= size and config["ppo_epochs"] == 1 else part["old_log_probs"][mask]
            ratio, advantages = (logprobs - old).exp(), part["advantages"][mask]
            loss = torch.maximum(
                -advantages * ratio,
                -advantages * ratio.clamp(1 - config["clip_ratio_low"], 1 + config["clip_ratio_high"]),
            )
            loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * config["clip_ratio_c"]), loss)
            distance = part["ref_log_prob"][mask] - logprobs
            kl = (distance.exp() - distance - 1).clamp(max=10)  # as verl
            (loss - config.get("entropy_coeff", 0) * entropy + config.get("kl_loss_coef", 0) * kl).mean().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), config["grad_clip"])))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def apart(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.core
@given(
    rows=st.integers(1, 6),
    seed=st.integers(0, 9),
    epochs=st.integers(1, 2),
    dynamic=st.booleans(),
    packed=st.booleans(),
)
def test_the_interface_against_plain_torch(rows, seed, epochs, dynamic, packed):
    split = {"ppo_max_token_len_per_gpu": 9} if dynamic else {"ppo_micro_batch_size_per_gpu": 2}
    config = {"use_remove_padding": packed, "use_dynamic_bsz": dynamic, "ppo_epochs": epochs, **split}
    config |= {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}
    with float64_everywhere():
        actor, data = actor_of(config), data_of(rows, seed)
        data.meta_info["use_dynamic_bsz"] = dynamic
        logprobs, entropies = actor.compute_log_prob(data, calculate_entropy=True)
        right = plain_logprobs(actor.actor_module, data.batch, 0.8)
        there = data.batch["attention_mask"][:, PROMPT:] == 1
        for found, expected in zip((logprobs, entropies), right, strict=True):
            torch.testing.assert_close(found, torch.where(there, expected, 0).detach(), atol=1e-10, rtol=1e-10)
        assert actor.compute_log_prob(data)[1] is None
        plain = copy.deepcopy(actor.actor_module)
        norms = plain_update(plain, data, CONFIG | config)
        metrics = actor.update_policy(data)
    assert apart(actor.actor_module, plain) < 1e-9
    assert metrics["actor/grad_norm"] == pytest.approx(norms, rel=1e-8)


@cache
def updated_by_default():
    return updated()


def updated(**option):
    with float64_everywhere():
        actor = actor_of(option)
        actor.update_policy(data_of(4))
    return actor.actor_module


def changed_by(option):
    """How far an option moves the parameters after an update."""
    return apart(updated_by_default(), updated(**option))


CHANGES = [
    {"ppo_mini_batch_size": 2}, {"ppo_epochs": 1}, {"clip_ratio_low": 0.01}, {"clip_ratio_high": 0.01}, {"clip_ratio_c": 1.01},
    {"clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio": 0.01}, {"entropy_coeff": 0.1}, {"use_kl_loss": True, "kl_loss_coef": 0.1},
    {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "mse"}, {"loss_agg_mode": "seq-mean-token-mean"},
    {"loss_agg_mode": "seq-mean-token-sum"}, {"loss_agg_mode": "seq-mean-token-sum-norm"},
    {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 50}, {"grad_clip": 0.1},
    *({"policy_loss": {"loss_mode": mode}} for mode in ("gspo", "sapo", "gpg", "geo_mean", "cispo")),
    {"policy_loss": {"loss_mode": "sapo"}, "tau_pos": 3.0}, {"policy_loss": {"loss_mode": "sapo"}, "tau_neg": 3.0},
    {"ppo_epochs": 1, "ppo_mini_batch_size": 4}, {"ppo_epochs": 1, "ppo_mini_batch_size": 4, "use_rollout_log_probs": True},
]  # fmt: skip


def test_every_option_changes_something():
    """J: an option that is read and does nothing is worse than one that is refused."""
    moved = {str(option): changed_by(option) for option in CHANGES}
    assert min(moved.values()) > 1e-6, moved
    assert len(set(moved.values())) == len(moved), moved  # and each something else


def test_half_precision_is_that_of_the_model():
    """float32 parameters; what is computed is in bfloat16."""
    found = []
    for dtype in ("float32", "bfloat16"):
        module = copy.deepcopy(tiny("llama")).float().requires_grad_(True)
        actor = Actor(CONFIG | {"fsdp_config": {"dtype": dtype}}, module, torch.optim.SGD(module.parameters(), lr=0.1))
        found.append(actor.compute_log_prob(data_of(3))[0])
        actor.update_policy(data_of(3))
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert 1e-3 < (found[0] - found[1]).abs().max() < 0.2


@pytest.mark.parametrize("option", [
    {"ppo_max_token_len_per_gpu": 100}, {"use_remove_padding": False}, {"calculate_entropy": True}, {"use_torch_compile": True},
    {"policy_loss": {"clip_cov_lb": 1.0}}, {"ppo_micro_batch_size_per_gpu": None}, {"qat": {"enable": False}},
    {"fsdp_config": {"param_offload": False, "ulysses_sequence_parallel_size": 1}}, {"use_prefix_grouper": False},
    {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1}, {"strategy": "fsdp"}, {"fsdp_config": {"dtype": "float32"}},
], ids=str)  # fmt: skip
def test_how_it_is_computed_changes_nothing(option):
    assert changed_by(option) < 1e-12


def test_metrics_have_verls_names_and_a_value_a_step():
    metrics = actor_of({"use_kl_loss": True, "calculate_entropy": True}).update_policy(data_of(4))
    names = ("pg_loss", "kl_loss", "entropy", "grad_norm", "pg_clipfrac_lower", "ppo_kl")
    for name in names:
        assert len(metrics[f"actor/{name}"]) == 4
    assert all(isinstance(value, float) for values in metrics.values() for value in values)


def test_importance_weights_weigh_the_surrogate():
    with float64_everywhere():
        one, two = actor_of({}), actor_of({})
        one.update_policy(data_of(4))
        two.update_policy(data_of(4, rollout_is_weights=torch.rand(4, RESPONSE, dtype=torch.float64)))
    assert apart(one.actor_module, two.actor_module) > 1e-4


def test_parameters_that_are_moved_are_followed():
    """G15: what offloading does is to give each parameter other memory; an update in between must be seen as well."""
    with float64_everywhere():
        stays, moves = actor_of({}), actor_of({})
        for actor in (stays, moves):
            actor.update_policy(data_of(3))
            if actor is moves:
                for parameter in actor.actor_module.parameters():
                    old, parameter.data = parameter.data, parameter.data.clone()
                    old.fill_(torch.nan)
            actor.update_policy(data_of(3))
        assert torch.equal(*(actor.compute_log_prob(data_of(3))[0] for actor in (stays, moves)))
    assert apart(stays.actor_module, moves.actor_module) == 0


def test_adapters_that_are_disabled_are_the_reference():
    from peft import LoraConfig, get_peft_model

    module = get_peft_model(
        copy.deepcopy(tiny("llama")), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    actor = Actor(CONFIG, module.double())
    with module.disable_adapter():
        reference = actor.compute_log_prob(data_of(3))[0]
    assert torch.equal(reference, Actor(CONFIG, tiny("llama")).compute_log_prob(data_of(3))[0])
    assert (reference - actor.compute_log_prob(data_of(3))[0]).abs().max() > 1e-2


def test_nothing_is_changed_by_what_is_refused():
    for option, tokens in (
        ({"ppo_mini_batch_size": 1}, 999),
        ({"ppo_mini_batch_size": 1, "ppo_max_token_len_per_gpu": 4}, 5),
    ):
        actor, data = actor_of(option), data_of(4)
        before = copy.deepcopy(actor.actor_module)
        data.batch["input_ids"][3, PROMPT] = tokens
        with pytest.raises(ValueError, match="999|max_tokens is 4"):
            actor.update_policy(data)
        assert apart(actor.actor_module, before) == 0
    data = data_of(2)
    data.meta_info |= {"use_dynamic_bsz": False, "micro_batch_size": -1}
    with pytest.raises(ValueError, match="micro_batch_size is -1"):
        actor.compute_log_prob(data)


def test_a_step_that_is_not_finite_is_skipped():
    actor, data = actor_of({"ppo_epochs": 1}), data_of(3)
    data.batch["advantages"] = data.batch["advantages"] * 1e300
    before = copy.deepcopy(actor.actor_module)
    assert not torch.isfinite(torch.tensor(actor.update_policy(data)["actor/grad_norm"])).all()
    assert apart(actor.actor_module, before) == 0


@pytest.mark.parametrize(("option", "words"), [
    ({"loss_agg_mode": "mean"}, "loss_agg_mode is mean; token-mean"),
    ({"policy_loss": {"loss_mode": "clip_cov"}}, "loss_mode is clip_cov; vanilla"),
    ({"use_kl_loss": True, "kl_loss_type": "full"}, "kl_loss_type is full"),
    ({"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size is 2; this actor needs 1"),
    ({"shuffle": True}, "shuffle is True; this actor needs False"),
    ({"router_replay": {"mode": "R2"}}, "router_replay.mode is R2"),
    ({"fsdp_config": {"dtype": "float16"}}, "fsdp_config.dtype is float16"),
    ({"use_dynamic_bsz": False}, "ppo_micro_batch_size_per_gpu is None without use_dynamic_bsz"),
    ({"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 0}, "ppo_micro_batch_size_per_gpu is 0"),
    ({"ppo_mini_batch_size": 0}, "ppo_mini_batch_size is 0"),
    ({"clip_ration_low": 0.1}, "clip_ration_low is an option that is not known"),
    ({"policy_loss": {"lossmode": "gspo"}}, r"policy_loss\.lossmode is an option that is not known"),
    ({"policy_loss": "gspo"}, "policy_loss. is 'gspo'; a configuration is needed"),
    ({"fsdp_config": {"dtyp": "bfloat16"}}, r"fsdp_config\.dtyp is an option that is not known"),
    ({"fsdp_config": {"ulysses_sequence_parallel_size": 2}}, r"fsdp_config\.ulysses_sequence_parallel_size is 2"),
    ({"kl_loss_type": "low_var_kk"}, "kl_loss_type is low_var_kk"),
    ({"grad_clip": -1.0}, "grad_clip is -1.0"),
    ({"use_prefix_grouper": True}, "use_prefix_grouper is True"),
    ({"qat": {"enable": True}}, r"qat\.enable is True"),
], ids=str)  # fmt: skip
def test_refused_options(option, words):
    with pytest.raises(ValueError, match=words):
        actor_of(option)


def test_refused_data():
    actor = actor_of({})
    for change, words in (
        (lambda d: d.batch.pop("advantages"), "data has no column advantages"),
        (
            lambda d: d.batch.update(position_ids=d.batch["position_ids"] + 1),
            "row 0, column 0: position_ids is 1, expected 0",
        ),
        (
            lambda d: d.batch.update(position_ids=d.batch["position_ids"].expand(3, -1, -1)),
            "position_ids has 3 dimensions",
        ),
        (lambda d: d.meta_info.pop("temperature"), "meta_info has no temperature"),
        (lambda d: d.non_tensor_batch.update(multi_modal_inputs=[]), "data has multi_modal_inputs"),
    ):
        data = data_of(2)
        change(data)
        with pytest.raises(ValueError, match=words):
            actor.update_policy(data)
    with pytest.raises(ValueError, match="there is no actor_optimizer"):
        Actor(CONFIG, tiny("llama")).update_policy(data_of(2))
