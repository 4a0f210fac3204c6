"""The demo on a tiny model: it runs, it stops at Ctrl-C, and it goes on to the same bits."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

typer = pytest.importorskip("typer")

from fnppo.demo.task import Question, questions, reward


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny random Llama and a tokenizer of characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = ["<end>", "<other>", *"0123456789+-? .aehinrstuW"]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<other>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    path = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<other>").save_pretrained(path)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(letters), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )
    ).save_pretrained(path)  # fmt: skip
    return path


def command(model, out, *options):
    sizes = ["--prompts", "2", "--responses", "3", "--max-new-tokens", "4", "--eval-questions", "3", "--steps", "5"]
    return [
        sys.executable,
        "-m",
        "fnppo",
        "demo",
        "--model",
        str(model),
        "--out",
        str(out),
        "--save-every",
        "2",
        *sizes,
        *options,
    ]


ENV = os.environ | {"COLUMNS": "200", "TERM": "dumb", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(*args):
    return subprocess.run(args, capture_output=True, text=True, env=ENV, timeout=300)


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "one"
    done = run(*command(model, out))
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_what_it_shows_and_writes(uninterrupted):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, text = uninterrupted
    assert re.search(r"before: greedy [\d.]+% right, sampled [\d.]+% right, of 3 held-out questions", text)
    assert re.search(r"after: greedy [\d.]+% -> [\d.]+% right, sampled [\d.]+% -> [\d.]+% right, of 3 held-out", text)
    assert all(f"step {i:3d}  reward" in text for i in range(1, 6))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert {"reward", "accuracy", "kl", "entropy", "tokens/s", "grad_norm", "loss", "policy_loss"} <= rows[0].keys()
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    AutoTokenizer.from_pretrained(out / "model")
    AutoModelForCausalLM.from_pretrained(out / "model")


def stop_after(process, line):
    """Send Ctrl-C once `line` has been printed; the rest of the output."""
    for text in process.stdout:
        if line in text:
            process.send_signal(signal.SIGINT)
            break
    return process.communicate(timeout=300)


def test_ctrl_c_and_resume_give_the_same_bits(model, uninterrupted, tmp_path):
    out = tmp_path / "two"
    process = subprocess.Popen(command(model, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    rest, errors = stop_after(process, "step   1  reward")
    assert process.returncode == 130, (rest, errors)
    assert "stopped after step" in rest
    resumed = run(*command(model, out))
    assert resumed.returncode == 0, resumed.stderr
    assert "going on after step" in resumed.stdout
    assert re.search(r"after: greedy [\d.]+% -> [\d.]+% right", resumed.stdout)
    check_same(uninterrupted[0], out)


def test_a_killed_run_goes_on_from_its_last_checkpoint(model, uninterrupted, tmp_path):
    out = tmp_path / "three"
    process = subprocess.Popen(command(model, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    for text in process.stdout:
        if "step   3  reward" in text:
            process.kill()
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert run(*command(model, out)).returncode == 0
    check_same(uninterrupted[0], out)


def check_same(a, b):
    """The same parameters, optimizer state and metrics, to the bit; times aside."""
    one, two = (torch.load(out / "checkpoint.pt") for out in (a, b))
    assert one["step"] == two["step"] == 5
    assert one["tensors"].keys() == two["tensors"].keys()
    assert all(torch.equal(one["tensors"][name], two["tensors"][name]) for name in one["tensors"])
    clocks = {"tokens/s", "sampling_s", "update_s", "peak_gb"}
    rows = [[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for out in (a, b)]
    assert [{k: v for k, v in row.items() if k not in clocks} for row in rows[0]] == [
        {k: v for k, v in row.items() if k not in clocks} for row in rows[1]
    ]


def test_a_run_with_other_settings_is_not_continued(model, uninterrupted):
    out, _ = uninterrupted
    done = run(*command(model, out, "--learning-rate", "0.5"))
    assert done.returncode == 1
    assert "has learning_rate = 2e-05, not 0.5. Choose another --out" in done.stderr


def test_help_documents_every_option():
    import inspect

    from fnppo.demo.run import demo

    text = run(sys.executable, "-m", "fnppo", "demo", "--help").stdout
    for name, parameter in inspect.signature(demo).parameters.items():
        assert f"--{name.replace('_', '-')}" in text
        assert parameter.annotation.__metadata__[0].help


def test_errors_are_one_line(tmp_path):
    done = run(sys.executable, "-m", "fnppo", "demo", "--model", "missing.gguf", "--out", str(tmp_path / "x"))
    assert done.returncode == 1
    assert done.stderr.strip() == "error: there is no file missing.gguf."


def test_the_task():
    asked = questions(held_out=False, count=40, seed=3)
    held_out = questions(held_out=True, count=200, seed=4)
    assert len(held_out) == 200
    assert not set(asked) & set(held_out)
    assert asked == questions(held_out=False, count=40, seed=3)
    for text, answer in held_out:
        expression = re.fullmatch(r"What is (.*)\? Answer with just a number\.", text).group(1)
        assert eval(expression) == answer
    assert isinstance(asked[0], Question)


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("3", 3, 1),
        ("4 - 1 = 3.", 3, 1),
        ("3 or 4", 3, 0),
        ("-3", -3, 1),
        ("-3", 3, 0),
        ("5-3", 3, 1),
        ("", 0, 0),
        ("four", 4, 0),
    ],
)
def test_the_reward_is_the_last_number(response, answer, value):
    assert reward(response, answer) == value


def test_the_script_is_short():
    from pathlib import Path

    import fnppo.demo.run

    assert len(Path(fnppo.demo.run.__file__).read_text().splitlines()) < 150


def test_a_typo_does_not_block_a_folder(model, tmp_path):
    out = tmp_path / "run"
    assert run(*command("missing.gguf", out)).returncode == 1
    assert run(*command(model, out, "--steps", "0")).returncode == 0
