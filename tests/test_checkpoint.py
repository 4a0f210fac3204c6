"""Checkpoints: bit for bit, all or nothing, and refused when they belong to another run."""

import copy
import os

import optree
import pytest
import torch
from tiny import tiny

import fnppo
from fnppo import adamw, chain, clip_by_global_norm, skip_nonfinite
from fnppo.checkpoint import load_checkpoint, save_checkpoint, save_pretrained


def state(seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    params = {"b": torch.randn(3, generator=g).to(dtype), "a": torch.randn(2, 2, generator=g).to(dtype)}
    optimizer = skip_nonfinite(chain(clip_by_global_norm(1.0), adamw(0.1)))
    updates, opt_state = optimizer.update(params, optimizer.init(params), params)
    return fnppo.apply_updates(params, updates), opt_state


def same(a, b):
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_for_bit(tmp_path, dtype):
    tree = state(0, dtype)
    save_checkpoint(tmp_path / "deep" / "c.pt", tree, step=7)
    loaded, step = load_checkpoint(tmp_path / "deep" / "c.pt", state(1, dtype))
    assert step == 7
    assert same(loaded, tree)
    assert optree.tree_structure(loaded) == optree.tree_structure(tree)
    assert os.listdir(tmp_path / "deep") == ["c.pt"]


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    save_checkpoint(path, state(0), step=1)

    def half(content, file):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(path, state(1), step=2)
    loaded, step = load_checkpoint(path, state(1))
    assert step == 1
    assert same(loaded, state(0))
    assert os.listdir(tmp_path) == ["c.pt"]


def test_what_is_loaded_does_not_depend_on_the_file(tmp_path):
    path = tmp_path / "c.pt"
    save_checkpoint(path, state(0), step=1)
    loaded, _ = load_checkpoint(path, state(1))
    save_checkpoint(path, state(2), step=2)
    assert same(loaded, state(0))


def test_foreign_and_damaged_files_are_refused(tmp_path):
    path = tmp_path / "c.pt"
    with pytest.raises(FileNotFoundError):
        load_checkpoint(path, state())
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="is not a checkpoint of fnppo, or is damaged"):
        load_checkpoint(path, state())
    save_checkpoint(path, state(), step=1)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is not a checkpoint of fnppo, or is damaged"):
        load_checkpoint(path, state())
    save_checkpoint(path, state(), step=1)
    (params, opt_state) = state()
    with pytest.raises(ValueError, match="0/c is nothing"):
        load_checkpoint(path, (params | {"c": torch.zeros(1)}, opt_state))
    with pytest.raises(ValueError, match="0/a is .* expected"):
        load_checkpoint(path, (params | {"a": torch.zeros(5)}, opt_state))
    with pytest.raises(ValueError, match="also holds"):
        load_checkpoint(path, ({"a": params["a"]}, opt_state))


@pytest.mark.parametrize("family", ["llama", "tied", "gpt2"])
def test_transformers_loads_what_is_saved(tmp_path, family):
    from transformers import AutoModelForCausalLM

    module = copy.deepcopy(tiny(family))
    policy, params = fnppo.functional_policy(module)
    params = {name: p + 0.125 for name, p in params.items()}
    for _ in range(2):  # also over an existing folder
        save_pretrained(tmp_path / "model", params, policy=policy)
    assert os.listdir(tmp_path) == ["model"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert all(torch.equal(p, params[name]) for name, p in loaded.named_parameters())
    assert set(dict(loaded.named_parameters())) == set(params)
    ids = torch.tensor([[1, 2, 3]])
    packed = fnppo.PackedInputs(ids[0], torch.arange(3), torch.tensor([0, 3]).int())
    logits = policy.head.bind(params).logits(policy.hidden_states(params, packed))
    assert torch.allclose(loaded(ids).logits[0], logits, atol=1e-5)
    with pytest.raises(ValueError, match="params lacks"):
        save_pretrained(tmp_path / "model", dict(list(params.items())[1:]), policy=policy)
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_folder_is_not_replaced_by_a_file(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "precious").write_text("x")
    with pytest.raises(ValueError, match="is a folder; a checkpoint is one file"):
        save_checkpoint(tmp_path / "runs", state(), step=1)
    policy, params = fnppo.functional_policy(tiny("llama"))
    with pytest.raises(ValueError, match="holds something else than a model"):
        save_pretrained(tmp_path / "runs", params, policy=policy)
    assert (tmp_path / "runs" / "precious").read_text() == "x"


def test_other_files_of_a_model_folder_stay(tmp_path):
    policy, params = fnppo.functional_policy(tiny("llama"))
    save_pretrained(tmp_path / "model", params, policy=policy)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    save_pretrained(tmp_path / "model", params, policy=policy)
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"
    assert os.listdir(tmp_path) == ["model"]


def test_a_folder_is_put_back_when_its_replacement_fails(tmp_path, monkeypatch):
    from pathlib import Path

    policy, params = fnppo.functional_policy(tiny("llama"))
    save_pretrained(tmp_path / "model", params, policy=policy)
    before = (tmp_path / "model" / "model.safetensors").read_bytes()

    def interrupted(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(tmp_path / "model", {n: p + 1 for n, p in params.items()}, policy=policy)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["model"]


def test_names_that_collide_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two leaves of the tree have the same name"):
        save_checkpoint(tmp_path / "c.pt", {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}, step=1)


def test_old_weights_do_not_stay_beside_new_ones(tmp_path):
    policy, params = fnppo.functional_policy(tiny("llama"))
    save_pretrained(tmp_path / "model", params, policy=policy)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json"):
        (tmp_path / "model" / name).write_text("old")
    save_pretrained(tmp_path / "model", params, policy=policy)
    assert {p.name for p in (tmp_path / "model").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
