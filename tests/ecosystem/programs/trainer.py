"""transformers' Trainer on a small GPT-2 or BERT: trainer.py FOLDER [--init plain|lockstep|torch] …"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from tests.ecosystem.programs.handing import hand_over

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--init", default="plain", choices=["plain", "lockstep", "torch"])
parser.add_argument("--backend")
parser.add_argument("--model", default="gpt2", choices=["gpt2", "bert"])
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--checkpoints", help="where the Trainer saves; the last one there is gone on from")
parser.add_argument("--steps", type=int, default=8)
options = parser.parse_args()

world_size = int(os.environ.get("WORLD_SIZE", "1"))
if options.init == "lockstep":
    import lockstep

    lockstep.init("shm")
elif options.init == "torch":
    import torch.distributed as dist

    import lockstep  # registers the backend

    dist.init_process_group("shm")

set_seed(0)
generator = torch.Generator().manual_seed(1)
words = torch.randint(0, 64, (96, 16), generator=generator)
model: torch.nn.Module
if options.model == "bert":  # one class for each sequence
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=4,
        )
    )
    data = [{"input_ids": row, "labels": number % 4} for number, row in enumerate(words)]
else:  # the next word, over sequences that count for different numbers of words
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    lengths = torch.randint(3, 17, (96, 1), generator=generator)
    labels = words.where(torch.arange(16) < lengths, -100)
    data = [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]
model = model.double()
arguments = TrainingArguments(
    output_dir=options.checkpoints or f"{options.folder}/out",
    use_cpu=True,
    ddp_backend=options.backend,
    per_device_train_batch_size=12 // world_size // options.accumulate,
    gradient_accumulation_steps=options.accumulate,
    max_steps=8,
    learning_rate=0.01,
    save_strategy="steps" if options.checkpoints else "no",
    save_steps=4,
    average_tokens_across_devices=options.model == "gpt2",
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
if options.steps < arguments.max_steps:

    class Stop(TrainerCallback):  # type: ignore[misc]  # untyped here
        """End in the middle, as an interrupted run does."""

        def on_step_end(self, _arguments: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= options.steps

    trainer.add_callback(Stop())
resumed = bool(options.checkpoints) and os.path.isdir(f"{options.checkpoints}/checkpoint-4")
trainer.train(resume_from_checkpoint=resumed)
losses = {f"loss {entry['step']}": entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
guesses = trainer.predict(data[:50]).predictions  # gathered from all ranks, the padding cut off again
hand_over(options.folder, [*model.state_dict().items(), ("guesses", torch.from_numpy(guesses))], **losses)
