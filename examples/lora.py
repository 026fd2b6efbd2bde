"""LoRA fine-tuning of a Hugging Face model in transformers' own Trainer: only the adapters are
sent.

    pip install -e '.[hf]'
    # the first: prints a link
    python examples/lora.py --model PATH_OR_NAME --data notes.txt
    # with the same base model
    python examples/lora.py --model PATH_OR_NAME --data others.txt --link 'shoal://...'

Without --model it is a tiny random Llama that reads bytes, to try the setup.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import shoal
from shoal.node.integrations.transformers import SwarmCallback

LISTEN = "/ip4/0.0.0.0/tcp/0"


def base(name: str | None) -> tuple[Any, Any]:
    """Return the model and a function from text to token numbers; the same on every peer."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name), lambda text: tokenizer(text)["input_ids"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config), lambda text: list(text.encode())


def main() -> None:
    """Train the adapters, and save them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or name for from_pretrained")
    parser.add_argument(
        "--data", type=Path, default=Path(__file__), help="a text file, each peer its own"
    )
    parser.add_argument("--link", help="of the swarm to join; without it a new one begins")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--every", type=int, default=10, help="steps between two exchanges, of a new swarm"
    )
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    parser.add_argument("--listen", default=LISTEN, help="where others reach this peer")
    parser.add_argument("--out", default="adapters", help="folder to save the adapters in")
    chosen = parser.parse_args()

    frozen, encode = base(chosen.model)
    model = get_peft_model(
        frozen, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    tokens = torch.tensor(encode(chosen.data.read_text(encoding="utf-8")))
    count = len(tokens) // chosen.length
    rows = [
        {"input_ids": row, "labels": row}
        for row in tokens[: count * chosen.length].view(count, chosen.length)
    ]
    arguments = TrainingArguments(
        chosen.out,
        max_steps=chosen.steps,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        logging_steps=chosen.every,
    )
    network = shoal.NetworkOptions(listen=[chosen.listen])
    if chosen.link:
        session = shoal.join(chosen.link, state=model, network=network)
    else:
        session = shoal.create(state=model, every=chosen.every, network=network, finish="average")
        print(session.link, flush=True)
    with session as s:
        Trainer(model, arguments, train_dataset=rows, callbacks=[SwarmCallback(s)]).train()
    model.save_pretrained(chosen.out)


if __name__ == "__main__":
    main()
