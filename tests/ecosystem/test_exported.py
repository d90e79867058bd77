"""A checkpoint's model as Hugging Face's libraries read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lockstep.cli import main
from tests.checkpoints import State, save


@pytest.mark.parametrize("shard_size", ["0.0002", "5"], ids=["several files", "one file"])
def test_transformers_reads_what_was_exported(shard_size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else a thread of its progress bar stays

    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)  # whose embeddings are its head as well
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", [State(model.state_dict())])
    output = tmp_path / "model"
    done = CliRunner().invoke(
        main,
        ["checkpoint", "export", str(tmp_path / "run"), str(output), "--shards", "--shard-size", shard_size],
    )
    assert done.exit_code == 0, done.output
    assert (len([*output.glob("*.safetensors")]) == 1) == (shard_size == "5")
    config.save_pretrained(output)
    again, told = GPT2LMHeadModel.from_pretrained(output, output_loading_info=True)
    assert not any(told.values()), told
    words = torch.arange(30).reshape(2, 15)
    with torch.no_grad():
        assert torch.equal(again.eval()(words).logits, model.eval()(words).logits)
