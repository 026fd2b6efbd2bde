"""A language model trained by the Trainer of transformers, with evaluation, checkpoints and the
best model at the end.
"""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

steps = int(os.environ.get("STEPS", 60))
text = list(
    b"The quick brown fox jumps over the lazy dog, and a shoal of fish turns at once. " * 50
)
rows = [
    {"input_ids": text[at : at + 32], "labels": text[at : at + 32]}
    for at in range(0, len(text) - 32, 7)
]
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=1, n_head=4))
args = TrainingArguments(
    "out",
    max_steps=steps,
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    report_to=[],
    logging_steps=10,
    disable_tqdm=True,
    use_cpu=True,
    seed=int(os.environ.get("SEED", 0)),
    eval_strategy="steps",
    save_strategy="steps",
    eval_steps=20,
    save_steps=20,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
)
trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:16])
trainer.train()
print("loss", trainer.evaluate()["eval_loss"])
