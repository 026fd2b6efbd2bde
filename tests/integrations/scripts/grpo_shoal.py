"""A policy trained by trl's GRPOTrainer to write short words: any model and reward will do."""

import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import shoal
from shoal.node.integrations.transformers import SwarmCallback

letters = {letter: number for number, letter in enumerate("_.abcdefghijklmnopqrstuvwxyz")}
core = Tokenizer(models.WordLevel(letters, unk_token="_"))
core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=core, pad_token="_", eos_token=".", unk_token="_"
)
torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=len(letters),
        n_positions=32,
        n_embd=32,
        n_layer=1,
        n_head=4,
        eos_token_id=1,
        pad_token_id=0,
    )
)


def reward(completions, **kwargs):
    return [text.count("a") / 8 for text in completions]


args = GRPOConfig(
    "out",
    max_steps=int(os.environ.get("STEPS", 20)),
    per_device_train_batch_size=8,
    num_generations=8,
    max_completion_length=8,
    learning_rate=1e-2,
    report_to=[],
    logging_steps=10,
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
    save_strategy="no",
    seed=int(os.environ.get("SEED", 0)),
)
prompts = Dataset.from_list([{"prompt": letter} for letter in "bcdefghi" * 8])
with shoal.create(state=model, every=5) as session:  # the others: shoal.join(LINK, state=model)
    callbacks = [SwarmCallback(session)]
    trainer = GRPOTrainer(
        model, reward, args, train_dataset=prompts, processing_class=tokenizer, callbacks=callbacks
    )
    trainer.train()
print("loss", -[row["reward"] for row in trainer.state.log_history if "reward" in row][-1])
