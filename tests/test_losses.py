"""The PPO loss: hand-computed values, gradients, terms, metrics, and what it refuses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.func import grad, vmap
from torch.testing import assert_close

import fnppo
from fnppo import Metrics, Targets, TokenStats, on_policy, ppo_loss, straight_through, summarize
from fnppo.kl import kl_k2, kl_k3
from fnppo.surrogates import clipped_surrogate, column
from fnppo.testing import oracle_loss

F64 = torch.float64


def targets_of(advantages, *, weights=None, ref=None, rows=None, old=None):
    n = len(advantages)
    index = torch.arange(n)
    column = lambda values: None if values is None else tensor(values, dtype=F64)
    return Targets(
        token_ids=index,
        predictors=index,
        rows=index if rows is None else tensor(rows),
        columns=index,
        loss_weights=column([1 / max(n, 1)] * n if weights is None else weights),
        old_logprobs=column([0.0] * n if old is None else old),
        advantages=column(advantages),
        ref_logprobs=column(ref),
    )


def stats_of(logratios, entropy=None):
    """Old log-probs are 0, so log-probs are log-ratios."""
    return TokenStats(
        tensor(logratios, dtype=F64, requires_grad=True), None if entropy is None else tensor(entropy, dtype=F64)
    )


def value_and_slopes(logratios, targets, **options):
    stats = stats_of(logratios)
    loss, _ = ppo_loss(stats, targets, **options)
    return loss.item(), torch.autograd.grad(loss, stats.logprobs)[0].tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope_per_ratio", "clip"),
    [
        (1.1, 1.0, -1.1, -1.0, None),
        (1.5, 1.0, -1.28, 0.0, "clip_high"),  # 1 + clip_high
        (0.5, 1.0, -0.5, -1.0, None),  # a bad ratio for a good token is never clipped
        (0.5, -1.0, 0.8, 0.0, "clip_low"),  # 1 - clip_low
        (1.5, -1.0, 1.5, 1.0, None),
        (5.0, -1.0, 3.0, 0.0, "dual_clip"),  # C18
        (5.0, 0.0, 0.0, 0.0, None),
        (0.5, 0.0, 0.0, 0.0, None),
    ],
)
def test_clips_by_hand(ratio, advantage, loss, slope_per_ratio, clip):
    """C18: value, gradient, and which clip has removed the gradient."""
    targets, logratio = targets_of([advantage]), math.log(ratio)
    value, slopes = value_and_slopes([logratio], targets, clip_high=0.28)
    assert value == pytest.approx(loss)
    assert slopes == pytest.approx([slope_per_ratio * ratio])
    summary = summarize(ppo_loss(stats_of([logratio]), targets, clip_high=0.28)[1])
    for name in ("clip_low", "clip_high", "dual_clip"):
        assert summary[f"{name}_fraction"] == float(name == clip)
    assert summary["clamped_fraction"] == float(clip is not None)
    if clip == "dual_clip":
        assert value_and_slopes([logratio], targets, dual_clip=None)[0] == pytest.approx(5.0)


def test_on_the_edge_of_a_clip_the_gradient_is_alive():
    """As `torch.clamp` has it: the first step, where every ratio is 1, learns under clips of 0."""
    for advantage in (1.0, -1.0):
        targets = targets_of([advantage])
        assert value_and_slopes([0.0], targets, clip_low=0.0, clip_high=0.0) == (-advantage, [-advantage])
    edge = tensor(math.log(2.0), dtype=F64).exp().item()
    assert value_and_slopes([math.log(2.0)], targets_of([-1.0]), dual_clip=edge) == (edge, [edge])
    _, clips = clipped_surrogate(stats_of([1.0]), targets_of([1.0]), clip_low=0.0, clip_high=0.0, dual_clip=2.0)
    assert {clip.dtype for clip in clips.values()} == {F64}


def test_a_clip_for_each_target():
    clips = {"clip_low": tensor([0.1, 0.4], dtype=F64), "clip_high": tensor([0.2, 0.3], dtype=F64)}
    bounds = {"dual_clip": tensor([2.0, 4.0], dtype=F64)} | clips
    for ratio, advantage, loss in ((1.5, 1.0, -1.25), (0.5, -1.0, 0.75), (5.0, -1.0, 3.0)):
        targets = targets_of([advantage] * 2)
        assert value_and_slopes([math.log(ratio)] * 2, targets, **bounds) == (pytest.approx(loss), [0.0, 0.0])
    with pytest.raises(ValueError, match="clip_low is tensor"):
        value_and_slopes([0.0] * 2, targets, clip_low=tensor([0.1, -0.4]))


def test_a_masked_token_with_a_huge_ratio():
    """C11: masked tokens are not among the targets, so no exp of theirs exists. What is left is the valid token."""
    batch = fnppo.padded_batch([[1]], [[2, 3]], advantages=[1.0], old_logprobs=[[-100.0, -0.1]])
    batch = fnppo.token_mean(batch._replace(loss_mask=tensor([[0, 0, 1]])))
    targets = fnppo.pack_sequences(batch).targets
    logprobs = torch.zeros(1, requires_grad=True)
    loss, _ = ppo_loss(TokenStats(logprobs), targets, clip_high=10.0)
    assert loss.item() == pytest.approx(-1.105171, abs=1e-6)
    assert torch.autograd.grad(loss, logprobs)[0].item() == pytest.approx(-1.105171, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("logratio", "advantage", "loss", "slope"),
    [
        (1000, 1.0, -1.2, 0),
        (1000, -1.0, 3.0, 0),
        (1000, 0.0, 0, 0),
        (-1000, -1.0, 0.8, 0),
        (-1000, 1.0, 0, 0),
        (-1000, 0.0, 0, 0),
    ],
)
def test_a_valid_token_whose_ratio_overflows(logratio, advantage, loss, slope, dtype):
    """C11: a clip selects before the exp, so its gradient is 0 and not 0 · inf."""
    targets = targets_of([advantage])
    logprobs = tensor([float(logratio)], dtype=dtype, requires_grad=True)
    value, _ = ppo_loss(TokenStats(logprobs), targets)
    assert value.item() == pytest.approx(loss)
    assert torch.autograd.grad(value, logprobs)[0].item() == slope


def test_a_ratio_that_nothing_bounds_overflows():
    assert value_and_slopes([1000.0], targets_of([-1.0]), dual_clip=None)[0] == math.inf


def test_nan_at_a_valid_token_surfaces():
    """C12."""
    loss, metrics = ppo_loss(stats_of([math.nan]), targets_of([1.0]))
    assert math.isnan(loss.item())
    assert math.isnan(summarize(metrics)["ratio_max"])


HALVES = (slice(0, 1), slice(1, 2))


def rows_of(targets, rows):
    return targets._replace(**{k: v[rows] for k, v in targets._asdict().items() if isinstance(v, torch.Tensor)})


@pytest.mark.parametrize(("d", "value"), [(0.5, 0.106531), (-0.5, 0.148721)])
def test_kl_is_added(d, value):
    """C17, A2: the KL term adds to the loss, with the weights of the policy term."""
    for kl in (kl_k3, straight_through(kl_k3)):
        loss, metrics = ppo_loss(stats_of([d]), targets_of([0.0], ref=[0.0]), kl_coef=1.0, kl=kl)
        assert loss.item() == pytest.approx(value, abs=1e-6)
        assert summarize(metrics)["kl"] == pytest.approx(value, abs=1e-6)
    one = targets_of([0.0, 0.0], ref=[0.0, 0.0])
    logprobs = stats_of([math.sqrt(2.0), math.sqrt(20.0)])
    whole, _ = ppo_loss(logprobs, one, kl_coef=1.0, kl=kl_k2)
    parts = sum(ppo_loss(TokenStats(logprobs.logprobs[s]), rows_of(one, s), kl_coef=1.0, kl=kl_k2)[0] for s in HALVES)
    assert whole.item() == parts.item() == pytest.approx(5.5)  # mean of 1 and 10, for one micro-batch and for two
    assert_close(*(torch.autograd.grad(x, logprobs.logprobs, retain_graph=True) for x in (whole, parts)))


def test_a_kl_that_is_capped_is_counted():
    """C13, C14: at d = -25 the cap takes value and gradient; the metric says so. Without it the pull is e^25."""
    targets, stats = targets_of([0.0] * 3, ref=[0.0] * 3, weights=[1.0, 2.0, 4.0]), stats_of([-25.0, -3.0, 0.5])
    loss, metrics = ppo_loss(stats, targets, kl_coef=0.5, kl_cap=10.0)
    assert loss.item() == pytest.approx(0.5 * (10 + 2 * 10 + 4 * 0.106531), abs=1e-5)
    slopes = torch.autograd.grad(loss, stats.logprobs)[0].tolist()
    assert slopes == pytest.approx([0, 0, 0.5 * 4 * 0.393469], abs=1e-5)
    summary = summarize(metrics)
    assert summary["kl_capped_fraction"] == pytest.approx(2 / 3)
    assert summary["kl"] == pytest.approx((10 + 10 + 0.106531) / 3, abs=1e-5)
    loss, metrics = ppo_loss(stats, targets, kl_coef=0.5)
    assert torch.autograd.grad(loss, stats.logprobs)[0][1].item() == pytest.approx(-19.0855, abs=1e-4)
    assert "kl_capped_fraction" not in summarize(metrics)


def test_the_kl_of_each_target_may_be_given(unchecked):
    """Then there is no reference column. It adds with the weights, is the metric, and can be capped as well."""
    targets = targets_of([0.0, 0.0], weights=[1.0, 2.0])
    kl = tensor([0.5, math.inf], dtype=F64, requires_grad=True)
    loss, metrics = ppo_loss(stats_of([0.0, 0.0]), targets, kl_coef=0.5, kl=kl, kl_cap=3.0)
    assert loss.item() == 0.5 * (0.5 + 2 * 3)
    assert torch.autograd.grad(loss, kl)[0].tolist() == [0.5, 0.0]
    assert (summarize(metrics)["kl"], summarize(metrics)["kl_capped_fraction"]) == (1.75, 0.5)
    loss, metrics = ppo_loss(stats_of([0.0, 0.0]), targets, kl=kl.detach()[:1].expand(2))
    assert (loss.item(), summarize(metrics)["kl"]) == (0.0, 0.5)  # measured, not in the loss
    for cap in (None, 1.0):
        with pytest.raises(ValueError, match=r"kl gave shape \(3,\) for 2 targets"):
            ppo_loss(stats_of([0.0, 0.0]), targets, kl=torch.zeros(3), kl_cap=cap)
    said = r"^kl is a str; an estimator or a tensor is needed\. Use one of fnppo\.kl, or exact_kl\.$"
    with pytest.raises(ValueError, match=said):
        ppo_loss(stats_of([0.0, 0.0]), targets, kl_coef=0.1, kl="k3")
    with pytest.raises(ValueError, match=r"^kl has layout torch\.sparse_coo; a dense tensor is needed"):
        ppo_loss(stats_of([0.0, 0.0]), targets, kl=torch.ones(2, dtype=F64).to_sparse())
    for cap in (0.0, -1.0, math.nan, tensor([1.0, 2.0])):
        with pytest.raises(
            ValueError, match=r"^kl_cap (is .*It is the largest KL of a token; None is no cap|has shape .*)\.$"
        ):
            ppo_loss(stats_of([0.0, 0.0]), targets, kl=kl, kl_cap=cap)
    uncapped = ppo_loss(stats_of([0.0, 0.0]), targets, kl=kl.detach()[:1].expand(2), kl_coef=0.5, kl_cap=math.inf)
    assert uncapped[0].item() == 0.5 * (0.5 + 2 * 0.5)
    assert uncapped[1].per_token["kl_capped_fraction"] == 0
    assert uncapped[1].per_token["kl_capped_fraction"].dtype == F64
    with pytest.raises(ValueError, match=r"kl_cap is 2\.0, but no KL is computed: kl_coef is 0 and .* Leave it out\."):
        ppo_loss(stats_of([0.0, 0.0]), targets, kl_cap=2.0)
    referred = targets._replace(ref_logprobs=torch.zeros(2, dtype=F64))
    metrics = ppo_loss(stats_of([0.0, 0.0]), referred, kl_cap=2.0)[1]
    assert "kl_capped_fraction" in summarize(metrics)  # counted, though without weight


def test_a_cap_under_transforms():
    targets = targets_of([1.0, -1.0], ref=[0.1, 0.2])
    logprobs, caps = tensor([0.5, -3.0], dtype=F64), tensor([0.01, 0.5, 100.0], dtype=F64)

    def loss(logprobs, cap, kl=kl_k3):
        return ppo_loss(TokenStats(logprobs), targets, kl_coef=0.3, kl_cap=cap, kl=kl)[0]

    assert_close(vmap(loss, (None, 0))(logprobs, caps), torch.stack([loss(logprobs, cap) for cap in caps]))
    slopes = vmap(grad(loss, (0, 1)), (None, 0))(logprobs, caps)
    leaf = logprobs.clone().requires_grad_()
    assert_close(slopes[0], torch.stack([torch.autograd.grad(loss(leaf, cap), leaf)[0] for cap in caps]))
    assert_close(slopes[1], tensor([0.3, 0.15, 0.0], dtype=F64))  # 0.3 / 2 for each token above the cap
    of_kl = lambda kl: loss(logprobs, 0.5, kl)
    assert_close(grad(of_kl)(tensor([0.1, 0.9], dtype=F64)), tensor([0.15, 0.0], dtype=F64))


def test_every_term_has_the_same_normaliser():
    """A1-A3: policy losses [1, 2, 3 | 10] and an auxiliary 1 a token at 0.5 give 4.5, in one batch or two."""
    losses = [1.0, 2.0, 3.0, 10.0]
    one = targets_of([-x for x in losses], rows=[0, 0, 0, 1])
    parts = [
        one._replace(**{k: v[s] for k, v in one._asdict().items() if isinstance(v, torch.Tensor)})
        for s in (slice(3), slice(3, 4))
    ]
    for pieces in ([one], parts):
        total = torch.zeros((), dtype=F64)
        metrics = fnppo.Metrics()
        for piece in pieces:
            n = len(piece.rows)
            loss, found = ppo_loss(stats_of([0.0] * n, entropy=[1.0] * n), piece, entropy_coef=-0.5)
            total, metrics = total + loss, fnppo.merge_metrics(metrics, found)
        assert total.item() == pytest.approx(4.5)
        summary = summarize(metrics)
        assert summary["policy_loss"] == pytest.approx(4.0)
        assert (summary["tokens"], summary["rows"], summary["entropy"]) == (4.0, 2.0, 1.0)


def test_the_policy_metric_has_no_entropy_in_it():
    """I4."""
    loss, metrics = ppo_loss(stats_of([0.0], entropy=[0.5]), targets_of([-1.0]), entropy_coef=0.6)
    summary = summarize(metrics)
    assert loss.item() == pytest.approx(0.7)
    assert summary["loss"] == pytest.approx(0.7)
    assert summary["policy_loss"] == pytest.approx(1.0)


def test_ratio_metrics():
    summary = summarize(ppo_loss(stats_of([math.log(0.5), 0.0, math.log(3.0)]), targets_of([0.0] * 3))[1])
    assert summary["ratio_mean"] == pytest.approx(1.5)
    assert (summary["ratio_min"], summary["ratio_max"]) == pytest.approx((0.5, 3.0))
    # tokens come from the old policy, so the unbiased k3 of KL(old | new) is r - 1 - log r
    expected = ((0.5 - 1 - math.log(0.5)) + 0 + (3 - 1 - math.log(3))) / 3
    assert summary["approx_kl"] == pytest.approx(expected)


def test_no_targets():
    """A8."""
    stats = stats_of([])
    loss, metrics = ppo_loss(stats, targets_of([]))
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, stats.logprobs)[0].shape == (0,)
    summary = summarize(metrics)
    assert (summary["tokens"], summary["rows"]) == (0, 0)
    assert math.isnan(summary["ratio_min"])


def test_on_policy_is_said_not_guessed():
    """C22, and a caller's old_logprobs are never replaced in silence."""
    stats = stats_of([0.3, -0.2])
    targets = targets_of([1.0, -1.0])._replace(old_logprobs=None)
    with pytest.raises(ValueError, match=r"needs targets\.old_logprobs: or state that the batch is on-policy"):
        ppo_loss(stats, targets)
    loss, metrics = ppo_loss(stats, on_policy(targets, stats))
    assert torch.autograd.grad(loss, stats.logprobs)[0].tolist() == [-0.5, 0.5]
    summary = summarize(metrics)
    assert (summary["ratio_min"], summary["ratio_max"], summary["clamped_fraction"]) == (1.0, 1.0, 0.0)


def test_a_surrogate_without_clips_and_one_that_reduces():
    targets = targets_of([1.0, -1.0])
    metrics = ppo_loss(stats_of([0.0, 0.0]), targets, surrogate=lambda stats, targets: (-stats.logprobs, {}))[1]
    assert torch.equal(metrics.per_token["clamped_fraction"], torch.zeros((), dtype=F64))
    said = r"^surrogate gave shape \(\) for 2 targets; the loss needs one value a target\. Do not reduce in it\.$"
    with pytest.raises(ValueError, match=said):
        ppo_loss(stats_of([0.0, 0.0]), targets, surrogate=lambda stats, targets: (-stats.logprobs.sum(), {}))


def test_what_is_missing_is_named():
    targets = targets_of([1.0])
    with pytest.raises(
        ValueError, match=r"^the loss needs targets\.extra\['mine'\]: put the column into batch\.extra\.$"
    ):
        column("mine", targets)
    for name, way_out in (
        ("loss_weights", r"call token_mean\(batch\) or a sibling once per mini-batch"),
        ("old_logprobs", r"or state that the batch is on-policy: on_policy\(targets, stats\)"),
        ("advantages", "such as grpo_advantages gives"),
        ("ref_logprobs", "for the KL term, from compute_logprobs with the reference; or set kl_coef=0"),
    ):
        with pytest.raises(ValueError, match=rf"^the loss needs targets\.{name}: {way_out}\.$"):
            ppo_loss(stats_of([0.0]), targets._replace(**{name: None}), kl_coef=0.1)
    with pytest.raises(ValueError, match=r"entropy_coef is 0\.1, but stats\.entropy is None"):
        ppo_loss(stats_of([0.0]), targets, entropy_coef=0.1)
    for bound in (0.5, 1.0):
        with pytest.raises(ValueError, match=f"dual_clip is {bound}"):
            ppo_loss(stats_of([0.0]), targets, dual_clip=bound)
        with pytest.raises(ValueError, match=f"dual_clip is {bound}"):
            vmap(lambda logprobs: ppo_loss(TokenStats(logprobs), targets, dual_clip=bound)[0])(torch.zeros(2, 1))
    for name, bad in (("clip_low", -0.1), ("clip_high", -0.1), ("clip_high", tensor(-0.1))):
        with pytest.raises(ValueError, match=rf"^{name} is (tensor\()?-0.1"):
            ppo_loss(stats_of([0.0]), targets, **{name: bad})


def test_columns_of_another_length_are_not_broadcast():
    """B19."""
    with pytest.raises(ValueError, match=r"stats\.logprobs has shape \(6,\); there are 1 targets"):
        ppo_loss(stats_of([0.0] * 6), targets_of([1.0]))
    with pytest.raises(ValueError, match=r"targets\.loss_weights has shape \(1,\), token_ids \(6,\)"):
        ppo_loss(stats_of([0.0] * 6), targets_of([1.0] * 6)._replace(loss_weights=torch.ones(1)))


numbers = st.floats(-3, 3)


@pytest.mark.core
@given(
    st.lists(st.tuples(numbers, numbers, numbers, st.floats(0, 3), numbers), min_size=1, max_size=5),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(1.01, 4),
)
def test_against_the_oracle(rows, clip_low, clip_high, dual_clip):
    """Value and gradient for any log-probs, advantages, entropies, references and clips."""
    logprobs, old, advantages, entropy, ref = (list(column) for column in zip(*rows, strict=True))
    weights = [1 / (i + 1) for i in range(len(rows))]
    targets = targets_of(advantages, weights=weights, ref=ref, old=old)
    options = {
        "clip_low": clip_low,
        "clip_high": clip_high,
        "dual_clip": dual_clip,
        "entropy_coef": 0.3,
        "kl_coef": 0.2,
    }
    stats = TokenStats(*(tensor(x, dtype=F64, requires_grad=True) for x in (logprobs, entropy)))
    loss, _ = ppo_loss(stats, targets, **options)
    gradients = torch.autograd.grad(loss, list(stats))
    leaves = [tensor(x, dtype=F64, requires_grad=True) for x in (logprobs, entropy)]
    batch = fnppo.PaddedBatch(*[torch.zeros(1, len(rows), dtype=torch.long)] * 3)
    batch = batch._replace(**{k: getattr(targets, k)[None] for k in ("old_logprobs", "advantages", "ref_logprobs")})
    places = {(0, i): (leaves[0][i], leaves[1][i]) for i in range(len(rows))}
    expected = oracle_loss(places, batch, dict(zip(places, weights, strict=True)), **options)
    assert_close(loss, expected, rtol=1e-11, atol=1e-11)
    on_an_edge = any(
        abs(math.exp(a - b) - edge) < 1e-9
        for a, b in zip(logprobs, old, strict=True)
        for edge in (1 - clip_low, 1 + clip_high, dual_clip)
    )
    if not on_an_edge:
        assert_close(gradients, torch.autograd.grad(expected, leaves), rtol=1e-10, atol=1e-10)


def test_under_transforms_also_over_its_own_numbers():
    targets = targets_of([1.0, -1.0], ref=[0.1, 0.2])
    logprobs = tensor([0.5, -0.4], dtype=F64)

    def loss(logprobs, clip, kl_coef):
        return ppo_loss(TokenStats(logprobs), targets, clip_low=clip, clip_high=clip, kl_coef=kl_coef)[0]

    clips, coefs = tensor([0.1, 0.3], dtype=F64), tensor([0.0, 1.0], dtype=F64)
    batched = vmap(loss, (None, 0, 0))(logprobs, clips, coefs)
    assert_close(batched, torch.stack([loss(logprobs, c, k) for c, k in zip(clips, coefs, strict=True)]))
    by_clip, by_coef = grad(loss, (1, 2))(logprobs, clips[1], coefs[1])
    assert by_clip.item() == pytest.approx(-0.5 - 0.5)  # both tokens sit on their clip: -(1 + c)/2 and (1 - c)/2
    assert by_coef.item() == pytest.approx(kl_k3(logprobs, targets.ref_logprobs).mean().item())


def test_compiled_once_for_all_lengths_and_numbers(unchecked):
    """With `dynamic=True` the hyper-parameters are symbols too: checking them must not break the graph."""
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(ppo_loss, fullgraph=True, dynamic=True, backend=count)
    for n, kl_coef in ((3, 0.1), (5, 0.2), (8, 0.3)):
        logratios = torch.linspace(-0.7, 0.5, n, dtype=F64)
        targets = targets_of([1.0] * n, ref=[0.25] * n)
        numbers = {"kl_coef": kl_coef, "entropy_coef": 0.01, "clip_high": 0.28}
        stats = TokenStats(logratios, logratios.square())
        assert_close(compiled(stats, targets, **numbers)[0], ppo_loss(stats, targets, **numbers)[0], rtol=0, atol=0)
    assert len(graphs) == 1


def test_the_default_device_is_not_used():
    """What is made is where the targets are. On `meta`, the default here, tensors have no values."""
    stats, targets = stats_of([0.5, -0.4], entropy=[1.0, 2.0]), targets_of([1.0, -1.0], ref=[0.1, 0.2])
    with torch.device("meta"):
        loss, metrics = ppo_loss(
            stats, targets, kl_coef=0.1, entropy_coef=0.1, clip_low=tensor(0.2, dtype=F64, device="cpu")
        )
    expected, expected_metrics = ppo_loss(stats, targets, kl_coef=0.1, entropy_coef=0.1)
    assert_close(loss, expected)
    assert summarize(metrics) == summarize(expected_metrics)


def test_two_losses_of_the_same_targets(unchecked):
    """Sums of each, coef times the second; every metric of both, and targets counted once."""
    policy = tensor(1.5, dtype=F64, requires_grad=True)
    value = tensor(4.0, dtype=F64, requires_grad=True)
    totals = {"tokens": tensor(3), "rows": tensor(2)}
    first = Metrics(
        {"loss": tensor(1.5), "policy_loss": tensor(1.5)}, {"entropy": tensor(0.5)}, totals, {"low": tensor(1.0)}
    )
    second = Metrics({"loss": tensor(4.0)}, {"value_mean": tensor(2.0)}, totals, {}, {"high": tensor(7.0)})
    loss, metrics = fnppo.add_losses((policy, first), (value, second), coef=0.5)
    assert loss.item() == 3.5
    assert [grad.item() for grad in torch.autograd.grad(loss, (policy, value))] == [1.0, 0.5]
    assert not metrics.per_step["loss"].requires_grad
    assert metrics.per_step == {"loss": 3.5, "policy_loss": 1.5}
    assert metrics.per_token == {"entropy": 0.5, "value_mean": 2.0}
    assert metrics.totals == {"tokens": 3, "rows": 2}
    assert (metrics.minima, metrics.maxima) == ({"low": 1.0}, {"high": 7.0})
    twice = second._replace(per_token={"entropy": tensor(0.0)})
    with pytest.raises(ValueError, match=r"^both losses have a metric entropy, and one would be lost\. Rename one\.$"):
        fnppo.add_losses((policy, first), (value, twice), coef=1.0)
    with pytest.raises(
        ValueError, match=r"^first is no \(loss, metrics\)\. Give what ppo_loss or value_loss returned\.$"
    ):
        fnppo.add_losses((policy,), (value, second), coef=1.0)
    with pytest.raises(ValueError, match=r"^second is no \(loss, metrics\)"):
        fnppo.add_losses((policy, first), (value, {}), coef=1.0)
    with pytest.raises(ValueError, match=r"^coef is nan; .* It weighs the second loss\.$"):
        fnppo.add_losses((policy, first), (value, second), coef=math.nan)
