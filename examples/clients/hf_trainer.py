"""The Hugging Face Trainer: "auto" values, bf16, evaluation, checkpoints and resuming, with a plan.

torchrun --nproc_per_node 2 examples/clients/hf_trainer.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from data import sequences
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments

import ds_osdp

CONFIG = str(Path(__file__).with_name("ds_auto.json"))
SHAPE = GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=256, n_positions=32)


def make_trainer(deepspeed: Any, output: str) -> Trainer:
    """A Trainer like any other: the arguments come first, so that the model is made already partitioned."""
    arguments = TrainingArguments(
        output,
        deepspeed=deepspeed,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        learning_rate=1e-3,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPE)
    data = [{"input_ids": row, "labels": row} for row in sequences(SHAPE.vocab_size)]
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])


def main(deepspeed: Any = CONFIG, output: str | None = None) -> dict[str, Any]:
    """Train, evaluate, save; then resume half-way in a new Trainer.  Returns what was logged."""
    ds_osdp.enable()
    output = output or tempfile.mkdtemp()
    trainer = make_trainer(deepspeed, output)
    trainer.train()
    trainer.save_model(f"{output}/final")
    resumed = make_trainer(deepspeed, output)
    resumed.train(resume_from_checkpoint=f"{output}/checkpoint-2")
    histories = [t.state.log_history for t in (trainer, resumed)]
    losses, again = ([row["loss"] for row in history if "loss" in row] for history in histories)
    evaluation = next(row["eval_loss"] for row in histories[0] if "eval_loss" in row)
    return {"losses": losses, "resumed": again, "evaluation": evaluation, "engine": trainer.model_wrapped}


if __name__ == "__main__":
    found = main()
    if torch.distributed.get_rank() == 0:
        print({name: value for name, value in found.items() if name != "engine"})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
