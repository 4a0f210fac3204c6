"""Checkpoints of many ranks: resumed to the bit, on any mesh, complete or not there, refused where they are not ours."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from batches import some_batch
from programs import (
    beside_frozen,
    exported,
    failing_save,
    foreign,
    keep_saving,
    loaded_in_between,
    saved,
    saved_and_loaded,
)
from ranks import Failed
from transformers import AutoModelForCausalLM

import fnppo
from fnppo.distributed.checkpoint import MANIFEST, _wait_for, checkpoints

PARTS = [some_batch(2, seed) for seed in range(4)]


def parts_for(shape):
    """The same rows in the same order, over the data ranks of a mesh."""
    data_ranks, size = shape[0] * shape[1], len(PARTS)
    dealt = [PARTS[rank * size // data_ranks : (rank + 1) * size // data_ranks] for rank in range(data_ranks)]
    rows = [[row for part in own for row in _lists(part)] for own in dealt]
    return [_batch(rows[rank // shape[2]]) for rank in range(math.prod(shape))]


def _lists(batch):
    for row in range(batch.input_ids.shape[0]):
        at = batch.attention_mask[row]
        yield [
            column[row][at]
            for column in (batch.input_ids, batch.loss_mask, batch.old_logprobs, batch.advantages, batch.ref_logprobs)
        ]


def _batch(rows):
    pad = lambda i: torch.nn.utils.rnn.pad_sequence([row[i] for row in rows], batch_first=True)
    ids, mask = pad(0), torch.nn.utils.rnn.pad_sequence([torch.ones_like(row[1]) for row in rows], batch_first=True)
    return fnppo.PaddedBatch(ids, mask.bool(), pad(1), pad(2), pad(3), pad(4))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_that_is_resumed_is_the_run(tmp_path, pools):
    """To the bit, on the same mesh; to 1e-12 on others, whose sums have another order."""
    shape = (1, 2, 1)
    through = pools(2).run(saved, shape, tmp_path / "a", 4, False, each=parts_for(shape))[0]
    first = pools(2).run(saved, shape, tmp_path / "b", 2, True, each=parts_for(shape))[0]
    assert not same(through, first)
    rest = pools(2).run(saved_and_loaded, shape, tmp_path / "b", 4, each=parts_for(shape))[0]
    assert rest[0] == (2, {"row": 16}, True)
    assert same(rest[1], through)
    for other in ((1, 4, 1), (1, 2, 2), (1, 1, 2), (2, 1, 2)):
        found = pools(math.prod(other)).run(saved_and_loaded, other, tmp_path / "b", 2, each=parts_for(other))[0]
        assert found[0][:2] == (2, {"row": 16})
        assert found[0][2] == (math.prod(other) == 2)
        assert same(found[1], first), other  # what is loaded is what was saved, to the bit
    four = pools(4).run(saved, (1, 4, 1), tmp_path / "c", 1, True, each=parts_for((1, 4, 1)))[0]
    for other in ((1, 2, 1), (1, 1, 1), (1, 1, 2)):
        found = pools(math.prod(other)).run(saved_and_loaded, other, tmp_path / "c", 1, each=parts_for(other))[0]
        assert same(found[1], four), other


def test_the_last_are_kept(tmp_path, pools):
    pools(2).run(keep_saving, (1, 2, 1), tmp_path, 5, 2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000003", "step-000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_a_step_that_is_there_is_not_written_over(tmp_path, pools):
    pools(2).run(keep_saving, (1, 2, 1), tmp_path, 2, None)
    with pytest.raises(Failed, match="step-000001 is there already. Load it to go on from it, or name another folder."):
        pools(2).run(keep_saving, (1, 2, 1), tmp_path, 2, None)


def test_what_fails_on_one_rank_is_said_on_all(tmp_path, pools):
    """A rank that cannot write: the others do not wait for it, and the checkpoint before is the last one."""
    for said in pools(2).run(failing_save, (1, 2, 1), tmp_path):
        assert "rank 1 has not written its part: no space left" in said
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000000"]


def test_a_folder_that_gets_its_name_while_others_wait(tmp_path):
    """The first rank renames it between a look at one name and a look at the other."""
    seen = iter((False, False, True))
    _wait_for(lambda: next(seen), tmp_path / ".step-000000")
    assert next(seen, None) is None


def test_damage_is_named(tmp_path, pools):
    pools(2).run(keep_saving, (1, 2, 1), tmp_path, 2, None)
    last = checkpoints(tmp_path)[-1]
    shard = next(last.glob("__1_*"))
    whole = shard.read_bytes()
    for damage in (whole[:-1], whole[:10] + bytes([whole[10] ^ 1]) + whole[11:], None):
        shard.unlink() if damage is None else shard.write_bytes(damage)
        with pytest.raises(Failed, match=f"{shard.name} .*the checkpoint is damaged"):
            pools(2).run(saved_and_loaded, (1, 2, 1), tmp_path, 2, each=parts_for((1, 2, 1)))
    shard.write_bytes(whole)
    manifest = last / MANIFEST
    text = manifest.read_text()
    changed = lambda **new: json.dumps(json.loads(text) | new)
    for content, words in (
        ("{", "is no checkpoint of fnppo"),
        ("[]", "is no checkpoint of fnppo"),
        (changed(fnppo_sharded=9), "has version 9"),
        (changed(step=7), "has other content than was written"),
        (changed(files={}), "has other content than was written"),
        (changed(tensors=[]), "has other content than was written"),
    ):
        manifest.write_text(content)
        with pytest.raises(Failed, match=words):
            pools(2).run(saved_and_loaded, (1, 2, 1), tmp_path, 2, each=parts_for((1, 2, 1)))
    manifest.write_text(text)
    pools(2).run(saved_and_loaded, (1, 2, 1), tmp_path, 2, each=parts_for((1, 2, 1)))


def test_a_checkpoint_of_another_model(tmp_path, pools):
    pools(2).run(keep_saving, (1, 2, 1), tmp_path, 1, None)
    for said in pools(2).run(foreign, (1, 2, 1), "gpt2", tmp_path):
        assert "It belongs to another run: name another folder." in said


def test_a_checkpoint_beside_other_frozen_weights(tmp_path, pools):
    """G5, G13: they are not in it, so what is loaded would be another model; the mesh does not matter."""
    for shape in ((1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 4, 1), (2, 2, 1)):
        assert pools(math.prod(shape)).run(beside_frozen, shape, tmp_path, 0.0)[0] == (1,)
    with pytest.raises(
        Failed, match=r"model.layers.1.mlp.up_proj.weight is frozen, .* has other values than in the run"
    ):
        pools(2).run(beside_frozen, (1, 2, 1), tmp_path, 1e-6)


def test_what_is_loaded_is_what_runs(tmp_path, pools):
    """Also where layers are kept gathered, where a save is on its way, and the step is before the last."""
    for reshard in (True, False):
        folder = tmp_path / str(reshard)
        first, again, said = pools(2).run(loaded_in_between, (1, 2, 1), folder, reshard, each=parts_for((1, 2, 1)))[0]
        assert torch.equal(first, again)
        assert "step-000002 is there already" in said


def test_export(tmp_path, pools):
    """G11: transformers loads what two ranks wrote."""
    params = pools(2).run(exported, (1, 2, 1), "tied", tmp_path / "model")[0]
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert same({name: p.detach() for name, p in module.named_parameters()}, params)
    assert module.lm_head.weight is module.model.embed_tokens.weight


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_at_any_moment(kills, tmp_path):
    script = Path(__file__).parent / "kills.py"
    run = subprocess.run([sys.executable, script, tmp_path, str(kills), "0"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-3]) > kills // 4  # most kills came after a checkpoint, or while one was written
