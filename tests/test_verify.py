"""`fnppo verify`: right models pass in every dtype, and each planted fault fails the check that is there for it."""

import dataclasses
import io
import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from tiny import tiny

import fnppo
from fnppo.attention import choose_attention
from fnppo.cli import main
from fnppo.testing import tiny_causal_lm
from fnppo.verify import Check, Report, verify
from fnppo.verify.measure import apart, grads_apart
from fnppo.verify.run import examine


def failed(policy, params, module, length=24):
    found = []
    examine(module, policy, params, length=length, seed=0, note=found.append)
    return {check.name for check in found if check.passed is False}, found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["gpt2", "gemma2"])
def test_right_models_pass(architecture, dtype):
    report = verify(tiny_causal_lm(architecture).to(dtype))
    assert report.verified
    assert report.verdict.startswith("VERIFIED")
    names = {check.name.split(":")[0] for check in report.checks if check.passed}
    assert names >= {"one by one", "packed", "shared", "padded", "head", "tied weights", "remat", "micro-batches",
                     "head in chunks"}  # fmt: skip
    assert ("dropout" in names) == (architecture == "gpt2")
    if dtype == torch.float64:
        assert max(check.error or 0 for check in report.checks) < 1e-10


def test_a_recurrent_model_is_verified_padded_and_refused_packed():
    report = verify(tiny_causal_lm("mamba2"))
    assert report.verified
    by_name = {check.name: check for check in report.checks}
    assert by_name["packed"].passed is None
    assert "layout=padded" in by_name["packed"].note
    assert by_name["padded: gradients"].passed


def test_a_bidirectional_model_is_not_verified():
    report = verify(tiny_causal_lm("bert", is_decoder=False))
    assert not report.verified
    assert "after it" in report.checks[0].note


def test_a_window_that_no_row_reaches_is_said():
    long = {check.name: check for check in verify(tiny_causal_lm("gemma2", sliding_window=100)).checks}
    assert long["sliding window"].passed is None
    assert "--length 108" in long["sliding window"].note


def across(query, key, value, segments, **options):
    """Attention that has lost the boundaries of packed rows."""
    one = segments._replace(
        ids=torch.zeros_like(segments.ids), packed=None, positions=torch.arange(query.shape[2])[None], ancestors=None
    )
    return fnppo.math_attention(query, key, value, one if segments.packed else segments, **options)


def unscaled(query, key, value, segments, *, scaling, **options):
    return choose_attention(query, key, value, segments, scaling=1.1 * scaling, **options)


def test_planted_faults_fail_their_checks():
    module = tiny("gpt2", torch.float32)
    policy, params = fnppo.functional_policy(module)
    assert failed(policy, params, module)[0] == set()

    names, found = failed(dataclasses.replace(policy, attention=across), params, module)
    assert {"packed: log-probs", "packed: gradients", "packed: no leak"} <= names
    assert not any(name.startswith(("padded", "one by one")) for name in names)
    assert next(check for check in found if check.name == "packed: gradients").note.endswith("Use layout=padded.")

    names, _ = failed(dataclasses.replace(policy, attention=unscaled), params, module)
    assert {"one by one: log-probs", "packed: log-probs", "shared: log-probs", "padded: gradients"} <= names

    names, _ = failed(dataclasses.replace(policy, head=policy.head._replace(scale=1.01)), params, module)
    assert "one by one: log-probs" in names


class RunsOn(fnppo.Policy):
    """Positions that do not restart with a packed row."""

    def hidden_states(self, params, inputs):
        if isinstance(inputs, fnppo.PackedInputs):
            inputs = inputs._replace(position_ids=torch.arange(inputs.input_ids.numel()))
        return super().hidden_states(params, inputs)


def test_positions_that_run_on_are_seen():
    module = tiny_causal_lm("gpt2", n_positions=200)
    policy, params = fnppo.functional_policy(module)
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    assert {"packed: restart", "packed: log-probs"} <= failed(RunsOn(**fields), params, module)[0]


def test_numbers_that_are_not_finite_are_no_success():
    module = tiny_causal_lm("llama")
    policy, params = fnppo.functional_policy(module)
    params["model.embed_tokens.weight"] = params["model.embed_tokens.weight"].clone()
    params["model.embed_tokens.weight"][12] = float("nan")
    with pytest.raises(ValueError, match="not finite in float32"):
        failed(policy, params, module)
    inf = grads_apart({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "b": torch.tensor([float("nan")])})
    assert inf == float("inf")


def test_more_tokens_than_positions():
    report = verify(tiny_causal_lm("gpt2"), length=100)
    assert "length is 100, but the model has 64 positions" in report.checks[0].note


def test_a_window_without_layer_types():
    found = {check.name: check for check in verify(tiny_causal_lm("mistral", sliding_window=400)).checks}
    assert found["sliding window"].passed is None


@pytest.mark.parametrize(
    ("place", "fault", "name"),
    [
        ("head", "logits", "head: logits"),
        ("one_by_one", "grads", "tied weights"),
        ("remat", "remat", "remat: gradients"),
        ("micro_batches", "micro", "micro-batches: gradients"),
        ("dropout", "dropout", "dropout"),
    ],
)
def test_each_later_check_can_fail(monkeypatch, place, fault, name):
    """What a check computes is made wrong behind its back, and it alone is asked."""
    from fnppo.verify import checks
    from fnppo.verify.subject import subject_of

    module = tiny("gpt2", torch.float32)
    policy, params = fnppo.functional_policy(module)
    subject = subject_of(module, policy, params, length=16, seed=0)
    check = getattr(checks, place)
    assert all(row.passed is not False for row in check(subject))

    if fault in ("grads", "micro"):
        right = checks.by_the_library
        monkeypatch.setattr(checks, "by_the_library", lambda *a, **k: _scaled(right(*a, **k)))
    elif fault == "dropout":
        right, calls = checks.logprobs_by_the_library, []
        monkeypatch.setattr(
            checks, "logprobs_by_the_library", lambda *a: right(*a) + 0.01 * len(calls) + (calls.append(1) or 0)
        )
    elif fault == "remat":
        monkeypatch.setattr(
            checks, "_with_copied_skeleton", lambda policy: dataclasses.replace(policy, attention=unscaled)
        )
    else:
        subject = dataclasses.replace(subject, logits=subject.logits + 1)
    assert name in {row.name for row in check(subject) if row.passed is False}


def _scaled(measured):
    return measured._replace(grads={name: grad * 1.01 for name, grad in measured.grads.items()})


def test_half_precision_says_whether_it_was_rounding(monkeypatch):
    from fnppo.verify import run

    tight = run.subject_of

    def strict(module, policy, params, **options):
        subject = tight(module, policy, params, **options)
        half = params[policy.head.weight].dtype == torch.bfloat16
        return dataclasses.replace(subject, relative=0.0) if half else subject

    monkeypatch.setattr(run, "subject_of", strict)
    report = verify(tiny_causal_lm("llama").to(torch.bfloat16))
    assert not report.verified
    assert "rounding" in report.checks[-1].note


def test_measures():
    a = {"w": torch.tensor([1.0, 3.0]), "tiny": torch.tensor([1e-9])}
    b = {"w": torch.tensor([1.0, 2.0]), "tiny": torch.tensor([0.0])}
    assert grads_apart(a, b) == 0.5
    assert grads_apart({"w": torch.tensor([float("nan")])}, {"w": torch.tensor([1.0])}) == float("inf")
    assert apart(torch.zeros(0), torch.zeros(0)) == 0.0


def test_a_report_in_words_and_data():
    checks = [
        Check("good", True, "", 1e-7, 1e-6),
        Check("bad", False, "why", float("inf"), 1e-6),
        Check("no", None, "n/a"),
    ]
    report = Report("Model", "float32", "cpu", checks)
    assert not report.verified
    assert report.verdict == "NOT VERIFIED: Model in float32: bad"
    plain = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert plain["checks"][1]["error"] == "inf"
    assert plain["verified"] is False
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.as_table())
    text = console.export_text()
    for words in ("FAIL", "why", "1.0e-07"):
        assert words in text


def run_command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "fnppo", "verify", *arguments],
        capture_output=True,
        text=True,
    )


def test_the_command(tmp_path, monkeypatch, capsys):
    good = run_command("qwen3", "--json", "--dtype", "float64")
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["verified"] is True
    tiny_causal_lm("llama").save_pretrained(tmp_path / "model")
    for arguments, status, words in (
        ([str(tmp_path / "model")], 0, "VERIFIED: LlamaForCausalLM in float32"),
        (["bert"], 1, "runs at all"),
        (["gpt2", "--length", "100"], 1, "64 positions"),
        (["quen3"], 1, "Did you mean qwen3"),
        (["./nowhere"], 1, "there is no folder ./nowhere"),
        (["llama", "--device", "nonsense"], 1, "device nonsense cannot be used"),
    ):
        monkeypatch.setattr(sys, "argv", ["fnppo", "verify", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        shown, code = capsys.readouterr(), end.value.code
        assert (code if isinstance(code, int) else 1) == status
        assert words in f"{shown.out} {shown.err} {code}"
