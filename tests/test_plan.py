"""`fnppo plan`: estimates against counted bytes of real updates, formulas against values by hand, laws of all layouts."""

import importlib.util
import json
import math
from functools import cache
from pathlib import Path

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fnppo
from fnppo.attention import sdpa_attention
from fnppo.live_bytes import LiveBytes
from fnppo.plan import (
    Layout,
    Shape,
    empty_model,
    flops_per_token,
    memory_of,
    plan_update,
    shape_of,
    traffic_of,
)
from fnppo.plan.live import LiveWork
from fnppo.plan.models import SHAPES, empty_module
from fnppo.plan.search import layouts_of
from fnppo.plan.shape import Heads, Layer
from fnppo.segments import segments_of
from fnppo.testing import tiny_causal_lm

ROOT = Path(__file__).parent.parent
WITHIN = 0.15
SIZES = dict(
    hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512,
)  # fmt: skip


def config(family, vocab):
    import transformers as t

    return {
        "llama": lambda: t.LlamaConfig(vocab_size=vocab, **SIZES),
        "qwen2, tied": lambda: t.Qwen2Config(vocab_size=vocab, **SIZES, tie_word_embeddings=True),
        "gpt2": lambda: t.GPT2Config(vocab_size=vocab, n_embd=128, n_layer=6, n_head=4, n_positions=512),
        "gemma2, tied": lambda: t.Gemma2Config(
            vocab_size=vocab, **SIZES, head_dim=32, attn_logit_softcapping=None, final_logit_softcapping=30.0
        ),
        "experts": lambda: t.Qwen3MoeConfig(
            vocab_size=vocab, **SIZES, head_dim=32, moe_intermediate_size=96, num_experts=8, num_experts_per_tok=2
        ),
    }[family]()


class Update:
    """A small real update of two micro-batches, and the shape of its model with the attention that a CPU has."""

    def __init__(self, family, vocab, length, remat, dtype):
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_config(config(family, vocab)).float().eval()
        self.policy, params = fnppo.functional_policy(module, remat=remat)
        self.params = {name: parameter.clone() for name, parameter in params.items()}
        self.dtype, self.layout = dtype, Layout(remat=remat)
        self.optimizer = fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(1e-4))
        self.state = self.optimizer.init(self.params)
        rows = fnppo.padded_batch(
            [[1, 2, 3, 4]] * 4, [[5] * length] * 4, old_logprobs=[[-7.0] * length] * 4, advantages=[1.0, -1.0] * 2
        )
        rows = fnppo.token_mean(rows)
        self.batches = [fnppo.pack_sequences(fnppo.select_rows(rows, group)) for group in ([0, 1], [2, 3])]
        inputs, targets = self.batches[0]
        self.tokens, self.targets = inputs.input_ids.numel(), targets.token_ids.numel()
        segments = segments_of(inputs)

        def attention(query, key, value, chunk=None, **options):
            return sdpa_attention(query, key, value, segments, **options)

        self.shape = shape_of(module, dtype=dtype, tokens=self.tokens, attention=attention)
        self.memory = memory_of(self.shape, self.layout, tokens=self.tokens, targets=self.targets, device="cpu")

    def loss(self, params, batch):
        if self.dtype != torch.float32:
            params = fnppo.cast(params, self.dtype)
        stats = fnppo.forward_logprobs(params, batch, policy=self.policy, temperature=1.0)
        return fnppo.ppo_loss(stats, batch.targets)


def size(tree):
    return sum(leaf.untyped_storage().nbytes() for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def assert_close(estimate, counted):
    assert estimate == pytest.approx(counted, rel=WITHIN), f"{estimate / counted:.3f} of {counted:,} bytes"


CASES = [
    ("llama", 2000, 100, torch.float32),  # most at the head
    ("llama", 60, 150, torch.float32),  # in the layers
    ("llama", 60, 3, torch.float32),  # in the optimizer
    pytest.param("qwen2, tied", 2000, 100, torch.float32, marks=pytest.mark.slow),
    pytest.param("gpt2", 300, 100, torch.float32, marks=pytest.mark.slow),
    pytest.param("gemma2, tied", 1000, 50, torch.float32, marks=pytest.mark.slow),
    ("experts", 300, 40, torch.bfloat16),
]


@pytest.mark.core
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.parametrize(
    ("family", "vocab", "length", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch.")
)
def test_a_real_update(family, vocab, length, dtype, remat):
    """Parameters, gradients, moments, what the forward keeps, and the peak of the whole step, each to 15%."""
    update = Update(family, vocab, length, remat, dtype)
    memory, params = update.memory, update.params
    assert memory.params == size(params)
    assert memory.moments == size(update.state[1].first_moment) + size(update.state[1].second_moment)
    aliases = {name: parameter.detach().requires_grad_() for name, parameter in params.items()}
    with LiveBytes() as live:
        loss, _ = update.loss(aliases, update.batches[0])
    assert_close(memory.activations + memory.gathered, live.live)
    grads = torch.autograd.grad(loss, list(aliases.values()), materialize_grads=True)
    assert memory.grads == sum(grad.numel() * grad.element_size() for grad in grads)
    del loss, grads, aliases
    before = size(params) + memory.moments
    with LiveBytes() as live:
        fnppo.train_step(
            params, update.state, update.batches, loss_fn=update.loss, optimizer=update.optimizer, donate=True
        )
    assert_close(memory.peak, before + live.peak)


def test_the_cases_are_most_in_different_places():
    places = set()
    for _, vocab, length, dtype in CASES[:3]:
        shape = shape_of(empty_module(config("llama", vocab)), dtype=dtype)
        stages = memory_of(shape, Layout(), tokens=2 * (length + 4), device="cpu").stages
        places.add(max(stages, key=stages.__getitem__))
    assert places == {"head", "layers", "optimizer"}


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_head(dtype, softcap):
    """Chunks of logits and the gradients of the head, forward and backward, at a vocabulary that takes several chunks."""
    vocab, hidden, targets = 200_000, 16, 60
    states = torch.zeros(targets, hidden, dtype=dtype, requires_grad=True)
    weight = torch.zeros(vocab, hidden, dtype=dtype, requires_grad=True)
    with LiveBytes() as live:
        stats = fnppo.chunked_logprobs(states, torch.zeros(targets, dtype=torch.long), weight=weight, softcap=softcap)
        torch.autograd.grad((stats.logprobs + stats.entropy).sum(), (states, weight))
    layer = BY_HAND.layers[0]
    shape = BY_HAND._replace(dtype=dtype, vocabulary=vocab, hidden=hidden, layers=(layer._replace(times=0),))
    assert_close(memory_of(shape, Layout(), tokens=targets, device="cpu").head, live.peak)


def test_the_count_is_the_allocators():
    """`LiveBytes` against what torch's CPU allocator was asked for and given back, over a forward and a backward."""
    from torch.profiler import ProfilerActivity, profile

    update = Update("llama", 500, 50, False, torch.float32)
    aliases = {name: parameter.detach().requires_grad_() for name, parameter in update.params.items()}

    def run():
        loss, _ = update.loss(aliases, update.batches[0])
        return torch.autograd.grad(loss, list(aliases.values()))

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    with LiveBytes() as live:
        run()
    assert live.peak == pytest.approx(peak, rel=0.03)


def test_live_bytes():
    old = torch.zeros(100)
    with LiveWork() as live:
        view = old[:50]
        a = old * 2
        b = a.view(10, 10)
        del a
        assert (live.live, live.peak) == (400, 400)
        c = b @ b
        assert (live.live, live.flops) == (800, 2 * 10**3)
        del b, view
        assert (live.live, live.peak) == (400, 800)
        c.add_(1)
    assert (live.live, live.peak) == (400, 800)
    del c
    assert live.live == 0


SIXTEEN = {"moe_intermediate_size": 16}  # grouped products want rows of 16 bytes
EXPERTS = {"qwen3_moe": SIXTEEN, "deepseek_v3": SIXTEEN}


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3", "phi", "smollm3", "cohere"]
)
def test_any_architecture_is_counted_and_is_linear(architecture):
    """A token's share does not depend on the number of tokens; layers of all kinds are there, each as often as it is."""
    module = tiny_causal_lm(architecture, **EXPERTS.get(architecture, {}))
    few, many = (shape_of(module, tokens=tokens) for tokens in (512, 2048))
    assert few.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert sum(layer.times for layer in few.layers) == module.config.num_hidden_layers
    assert few.outside > 0
    for a, b in zip(few.layers, many.layers, strict=True):
        assert a[:3] == b[:3]
        assert a.attention == b.attention
        for one, other in zip(a[3:8], b[3:8], strict=True):
            assert one == pytest.approx(other, rel=0.01)
    assert all(layer.held >= layer.inner > 0 and layer.work > 0 and layer.flops > 0 for layer in few.layers)


def test_the_module_is_not_changed():
    module = tiny_causal_lm("llama")
    ids = torch.tensor([[1, 2, 3]])
    before = module(ids).logits
    shape_of(module)
    assert module.config._attn_implementation == "eager"
    assert torch.equal(module(ids).logits, before)


def test_kinds_of_layers():
    """Dense and expert layers apart; layers that differ in their place alone are of one kind."""
    assert [layer.times for layer in shape_of(empty_model("qwen2.5-0.5b")).layers] == [24]
    dense, experts = shape_of(
        tiny_causal_lm("deepseek_v3", num_hidden_layers=4, mlp_layer_types=["dense"] + ["sparse"] * 3, **SIXTEEN)
    ).layers
    assert (dense.times, experts.times) == (1, 3)
    assert experts.parameters > dense.parameters


@pytest.mark.parametrize(("architecture", "words"), [("gpt_oss", "sinks"), ("gemma2", "flash-attn")])
def test_what_is_left_out_is_said(architecture, words):
    assert words in " ".join(shape_of(tiny_causal_lm(architecture)).notes)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("mamba2", "attention interface|no layers|layers of type"),
        ("bloom", "attention interface"),
        ("lfm2", "layers of type conv"),
    ],
)
def test_what_cannot_be_counted_is_refused(architecture, reason):
    with pytest.raises(ValueError, match=reason):
        shape_of(tiny_causal_lm(architecture))


def test_experts_in_float32_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="Use bfloat16"):
        shape_of(tiny_causal_lm("qwen3_moe"), dtype=torch.float32)


PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "llama-3.1-70b": 70_553_706_496,
}


@cache
def shape(model):
    return shape_of(empty_model(model))


def test_known_models_have_the_parameters_that_are_published():
    assert {model: shape(model).parameters for model in SHAPES} == PUBLISHED


BY_HAND = Shape(
    name="by hand",
    dtype=torch.bfloat16,
    parameters=1400,
    layers=(Layer(3, 300, 100, input=20.0, held=200.0, inner=180.0, work=50.0, flops=600.0, attention=(Heads(4, 2, 5, 5),)),),
    rest=10.0,
    vocabulary=20,
    hidden=10,
    tied=False,
)  # fmt: skip


def test_memory_by_hand():
    """1400 parameters, 3 layers of 300 and 500 outside; 64 tokens on 2 groups of 2."""
    memory = memory_of(BY_HAND, Layout(2, 2), tokens=64)
    assert memory.params == memory.grads == 4 * 350
    assert memory.moments == 8 * 350
    assert memory.gathered == 2 * (500 + 2 * 300)
    assert memory.activations == 32 * (3 * 200 + 10) + 32 * 10 * 2
    # the backward of a layer; queries as they are sent and arrive; gradients in bfloat16 and float32; the head's
    assert memory.layer == 32 * (50 + 2 * 20 * 2) + 300 * (2 + 4) + 20 * 10 * 2
    # a chunk and two blocks in float32, a copy in bfloat16; the weight's gradient in both; hidden states' twice
    assert memory.head == 32 * 20 * (3 * 4 + 2) + 200 * (4 + 2) + 2 * 32 * 10 * 2
    assert memory.ends == 500 * (2 + 4)
    assert memory.updates == 4 * 350
    again = memory_of(BY_HAND, Layout(2, 2, remat=True), tokens=64)
    assert again.activations == 32 * (3 * 20 + 10) + 32 * 10 * 2
    assert again.layer == memory.layer + 32 * 180
    away = memory_of(BY_HAND, Layout(2, 2, offload=True), tokens=64)
    assert away.params == away.grads == away.moments == away.updates == 0
    assert away.host == 350 * (4 + 4 + 8 + 4)
    assert memory.host == 0
    # keys of 2 heads for 4 GPUs are copied once more: keys and values of 2 heads of 5 numbers
    copied = memory_of(BY_HAND, Layout(1, 4), tokens=64)
    assert copied.activations == 16 * (3 * (200 + 2 * 2 * 5 * 2) + 10) + 16 * 10 * 2


def test_half_precision_state_by_hand():
    memory = memory_of(BY_HAND, Layout(4), tokens=64, master=torch.bfloat16)
    assert (memory.params, memory.grads, memory.moments, memory.updates) == (700, 1400, 1400, 700)


def test_one_gpu_by_hand():
    single = memory_of(BY_HAND, Layout(), tokens=64)
    assert single.gathered == 2 * (1400 - 20 * 10)
    assert single.layer == 64 * 50 + 100 * (2 + 4)
    same = memory_of(BY_HAND._replace(dtype=torch.float32), Layout(), tokens=64)
    assert same.gathered == 0
    assert same.layer == 64 * 50 + 100 * 4
    assert same.ends == 4 * 200
    tied = memory_of(BY_HAND._replace(tied=True), Layout(), tokens=64)
    assert tied.layer == single.layer + 2 * 200


def test_traffic_by_hand():
    traffic = traffic_of(BY_HAND, Layout(2, 2), tokens=64, update_tokens=300)
    assert traffic.gather_forward == 1400 * 2 * 3 // 4
    assert traffic.gather_backward == 900 * 2 * 3 // 4
    assert traffic.reduce_scatter == 1400 * 4 * 3 // 4
    # q and out of 4 heads, k and v of 2, 5 numbers each, 3 layers, in bfloat16, half of 32 tokens, forward and backward
    assert traffic.all_to_all == 2 * 16 * 3 * (2 * 4 * 5 + 2 * 2 * 5) * 2
    assert traffic.micro_batches == 3
    assert traffic.update == 3 * traffic.micro_batch
    again = traffic_of(BY_HAND, Layout(2, 2, remat=True), tokens=64, update_tokens=300)
    assert 2 * again.all_to_all == 3 * traffic.all_to_all
    away = traffic_of(BY_HAND, Layout(2, 2, offload=True), tokens=64, update_tokens=300)
    assert away.host == 350 * (2 * 4 + 4)
    alone = traffic_of(BY_HAND, Layout(), tokens=64, update_tokens=300)
    assert alone.micro_batch == 0


def test_arithmetic_by_hand():
    matrices, attention = flops_per_token(BY_HAND, remat=False)
    assert (matrices, attention) == (3 * 1800 + 4 * 400, 3.5 * 3 * 4 * 10)
    again = flops_per_token(BY_HAND, remat=True)
    assert again == (4 * 1800 + 4 * 400, 4.5 * 3 * 4 * 10)
    assert again.update(10, length=7) == 10 * (again.matrices + 7 * again.attention)


def test_arithmetic_of_experts_counts_those_that_are_used():
    layer = shape_of(tiny_causal_lm("qwen3_moe", num_local_experts=4, **SIXTEEN)).layers[0]
    more = shape_of(tiny_causal_lm("qwen3_moe", num_local_experts=8, **SIXTEEN)).layers[0]
    assert more.parameters > 1.3 * layer.parameters
    assert more.flops == layer.flops + 2 * 16 * 4  # the router alone has more to do


layouts = st.builds(Layout, st.integers(1, 9), st.sampled_from([1, 2, 4]), st.booleans(), st.booleans())
heads = st.builds(Heads, st.just(8), st.sampled_from([1, 2, 4, 8]), st.integers(1, 64), st.integers(1, 64))
layers = st.builds(
    lambda count, parameters, share, numbers, heads: Layer(
        count, parameters, max(1, int(parameters * share)), *sorted(numbers[:3])[::2],
        sorted(numbers[:3])[1], *numbers[3:], (heads,),
    ),
    st.integers(1, 80), st.integers(1, 10**9), st.floats(0.01, 1), st.lists(st.floats(1, 1e6), min_size=5, max_size=5), heads,
)  # fmt: skip


@st.composite
def shapes(draw):
    kinds = tuple(draw(st.lists(layers, min_size=1, max_size=3)))
    vocabulary, hidden, tied = draw(st.integers(1, 200_000)), draw(st.integers(1, 8192)), draw(st.booleans())
    outside = vocabulary * hidden * (1 if tied else 2) + hidden
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    total = outside + sum(layer.times * layer.parameters for layer in kinds)
    return Shape("drawn", dtype, total, kinds, draw(st.floats(0, 1e5)), vocabulary, hidden, tied, draw(st.booleans()))


tokens = st.integers(1, 100_000)
masters = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.mark.core
@given(shape=shapes(), layout=layouts, tokens=tokens, master=masters)
def test_laws_of_memory(shape, layout, tokens, master):
    """Shards add up to at least all; more tokens never take less; remat and more GPUs never keep more."""
    memory = memory_of(shape, layout, tokens=tokens, master=master)
    assert all(size >= 0 for size in memory)
    held = memory.host if layout.offload else memory.params + memory.grads + memory.moments
    assert held * layout.gpus >= shape.parameters * (3 * master.itemsize + 4)
    assert memory.peak >= held * (not layout.offload)
    more = memory_of(shape, layout, tokens=tokens + 1, master=master)
    assert all(a <= b for a, b in zip(memory, more, strict=True))
    assert memory.peak <= more.peak
    wider = memory_of(shape, layout._replace(fsdp=2 * layout.fsdp), tokens=tokens, master=master)
    assert wider.params <= memory.params
    assert wider.activations == memory.activations
    kept, again = (memory_of(shape, layout._replace(remat=remat), tokens=tokens) for remat in (False, True))
    if all(layer.input <= layer.held for layer in shape.layers):
        assert again.activations <= kept.activations


@pytest.mark.core
@given(shape=shapes(), layout=layouts, tokens=tokens, updates=st.integers(1, 100))
def test_laws_of_traffic(shape, layout, tokens, updates):
    """What all GPUs gather is what each lacks; micro-batches cover the update; one GPU sends nothing."""
    traffic = traffic_of(shape, layout, tokens=tokens, update_tokens=updates * tokens)
    assert traffic.micro_batches == math.ceil(updates / layout.fsdp)
    lacking = (layout.gpus - 1) * shape.parameters * shape.dtype.itemsize
    assert lacking <= traffic.gather_forward * layout.gpus < lacking + layout.gpus + 1
    assert traffic.gather_backward <= traffic.gather_forward
    assert (traffic.all_to_all > 0) == (layout.ulysses > 1)
    assert traffic.micro_batch - traffic.host == 0 or layout.gpus > 1
    more = traffic_of(shape, layout, tokens=2 * tokens, update_tokens=2 * updates * tokens)
    assert more.all_to_all >= traffic.all_to_all
    assert more.gather_forward == traffic.gather_forward


@given(
    shape=shapes(),
    gpus=st.integers(1, 16),
    tokens=st.integers(1, 50_000),
    gib=st.integers(1, 200),
    offload=st.booleans(),
)
def test_laws_of_a_plan(shape, gpus, tokens, gib, offload):
    """The recommended layout fits and none that fits sends less; what is said to fit does, and one more does not."""
    budget = gib << 30
    plan = plan_update(shape, gpus=gpus, budget=budget, tokens=tokens, offload=offload)
    assert offload or not any(row.layout.offload for row in plan.rows)
    assert {row.layout.gpus for row in plan.rows} == {gpus}
    fitting = [row for row in plan.rows if row.memory.peak <= budget]
    assert (plan.recommended is not None) == bool(fitting) == (plan.fewest_gpus == gpus)
    if plan.recommended is not None:
        best = plan.recommended
        assert best in fitting
        alike = [row for row in fitting if row.layout.offload == best.layout.offload]
        assert best.traffic.update == min(row.traffic.update for row in alike)
        assert not best.layout.offload or all(row.layout.offload for row in fitting)
    most = plan.most_tokens

    def fits(number):
        layouts = layouts_of(shape, gpus, offload=offload)
        return any(memory_of(shape, layout, tokens=number).peak <= budget for layout in layouts)

    assert most == 0 or fits(most)
    assert most == 1 << 24 or not fits(most + 1)
    assert (most >= tokens) == bool(fitting)


def test_advice_is_true():
    """Where nothing fits, the GPUs that are said to be enough are, and half as many are not."""
    nothing = plan_update(shape("llama-3.1-70b"), gpus=2, budget=24 << 30, tokens=16384)
    assert nothing.recommended is None
    assert nothing.fewest_gpus is not None
    enough = plan_update(shape("llama-3.1-70b"), gpus=nothing.fewest_gpus, budget=24 << 30, tokens=16384)
    assert enough.recommended is not None
    fewer = plan_update(shape("llama-3.1-70b"), gpus=nothing.fewest_gpus // 2, budget=24 << 30, tokens=16384)
    assert fewer.recommended is None


@pytest.mark.parametrize(
    ("wrong", "words"), [({"gpus": 0}, "gpus is 0"), ({"tokens": 0}, "tokens is 0"), ({"budget": -1}, "budget is -1")]
)
def test_wrong_numbers(wrong, words):
    with pytest.raises(ValueError, match=words):
        plan_update(BY_HAND, **{"gpus": 1, "budget": 1 << 30, "tokens": 10} | wrong)


def command(*arguments):
    import typer

    from fnppo.plan.command import plan

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(plan)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


def test_the_command(tmp_path):
    found = command("qwen2.5-7b", "--json")
    assert found.exit_code == 0
    data = json.loads(found.stdout)
    assert data["parameters"] == PUBLISHED["qwen2.5-7b"]
    best = data["layouts"][data["recommended"]]
    assert best["fits"]
    assert best["memory"]["peak"] + best["left"] == data["budget"] == 76 << 30
    words = command("qwen2.5-7b")
    assert "RECOMMENDED" in words.stdout
    assert "8 x 1 *" in words.stdout
    assert "offload" not in words.stdout
    assert "offload" in command("llama-3.1-70b", "--offload").stdout
    tiny_causal_lm("llama").config.save_pretrained(tmp_path)
    assert command(tmp_path, "--gpus", 1, "--memory", 5, "--tokens", 100).exit_code == 0
    for arguments, words in (
        (["llama-3.1-70b", "--gpus", 8], "32 GPUs would be enough"),
        (["qwen2.5-7b", "--gpus", 1, "--memory", 5], "NOTHING FITS"),
    ):
        found = command(*arguments)
        assert found.exit_code == 1
        assert words in " ".join(found.stdout.split())
    for arguments, words in (
        (["qwem2.5-7b"], "Did you mean qwen2.5-7b"),
        (["qwen2.5-7b", "--memory", 3], "Give more, or lower --reserve"),
    ):
        found = command(*arguments)
        assert found.exit_code == 1
        assert words in str(found.exception)


def test_the_page_shows_what_the_command_prints():
    """docs/pages/plan.md as `python benchmarks/plan_page.py` would write it now."""
    spec = importlib.util.spec_from_file_location("plan_page", ROOT / "benchmarks" / "plan_page.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "pages" / "plan.md").read_text()
    assert page.count("```text") == 5
    assert script.filled(page) == page
