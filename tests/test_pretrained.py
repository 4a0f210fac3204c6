"""A model by its name: what is read, how often, and what is said when it cannot be."""

import contextlib
import importlib.util

import gguf
import numpy as np
import pytest
import torch

from fnppo import pretrained
from fnppo.pretrained import load_model, load_tokenizer


@pytest.fixture
def tiny_gguf(tmp_path):
    """A Llama of one layer, with random weights."""
    hidden, heads, inner, vocabulary = 8, 2, 12, 13
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (vocabulary, hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.attn_norm": (hidden,), "blk.0.ffn_norm": (hidden,), "blk.0.ffn_down": (hidden, inner)}
    shapes |= {"blk.0.ffn_gate": (inner, hidden), "blk.0.ffn_up": (inner, hidden)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_parsed_once_and_read_as_transformers_does(tiny_gguf, monkeypatch):
    parsed = []

    class Reader(gguf.GGUFReader):
        def __init__(self, *args):
            parsed.append(args)
            super().__init__(*args)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    ours = load_model(str(tiny_gguf))
    assert len(parsed) == 1
    assert gguf.GGUFReader is Reader
    monkeypatch.setattr(pretrained, "_read_once", contextlib.nullcontext)
    plain = load_model(str(tiny_gguf))
    assert len(parsed) == 3
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(ours(ids).logits, plain(ids).logits)
    assert ours.model.embed_tokens.weight.std() > 0.8  # those of the file, not the initial ones


def test_what_is_missing_is_named(tiny_gguf, tmp_path, monkeypatch):
    for load in (load_model, load_tokenizer):
        with pytest.raises(ValueError, match=r"there is no file .*other\.gguf"):
            load(str(tmp_path / "other.gguf"))
        with pytest.raises(ValueError, match="there is no folder"):
            load(str(tmp_path / "folder"))
    installed = importlib.util.find_spec
    for package in ("gguf", "accelerate"):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, gone=package: None if name == gone else installed(name)
        )
        with pytest.raises(ValueError, match=rf"needs the package {package}\. Run: pip install 'fnppo\[cli\]'"):
            load_model(str(tiny_gguf))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="SmolLM2 is not installed"):
        load_model("smollm2")
