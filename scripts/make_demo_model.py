"""Make what `kubetune demo` starts from: a small base model with its tokenizer, and the data of the demo's task.

Everything is drawn from demo_world.py with fixed seeds, so a second run on the same machine and torch version gives the
same bytes; another CPU may round the weights differently. About ten minutes on one core:

    python scripts/make_demo_model.py [--data-only]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from demo_world import HELD_OUT_SERVICES, SERVICES, pretraining_texts, task_rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TARGET = Path(__file__).parents[1] / "kubetune" / "demo"
SEED = 20
TRAIN_ROWS, HELD_OUT_ROWS = 1200, 100
VOCABULARY, BLOCK, BATCH, STEPS, PEAK_LEARNING_RATE = 1280, 128, 32, 1500, 3e-3
PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"
# Each turn is `<|start|>role\n…<|end|>\n`, as in ChatML; `generation` marks what assistant turns are trained on.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def write_data(folder: Path) -> None:
    """Write train.jsonl and heldout.jsonl; no service of one appears in the other."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = tuple(s for s in SERVICES if s not in HELD_OUT_SERVICES)
    for name, rows in (
        ("train", task_rows(SEED, TRAIN_ROWS, seen)),
        ("heldout", task_rows(SEED + 1, HELD_OUT_ROWS, HELD_OUT_SERVICES)),
    ):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def as_text(piece: str | tuple[str, str]) -> str:
    """Lay a piece of the world out as the chat template would."""
    if isinstance(piece, str):
        return f"{piece}{END}\n"
    question, answer = piece
    return f"{START}user\n{question}{END}\n{START}assistant\n{answer}{END}\n"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE whose digits stay apart, so that any number can be copied."""
    tokenizer = Tokenizer(models.BPE())
    words = r"[^\s\p{L}\p{N}]|\p{N}| ?\p{L}+|\s"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE, model_max_length=512
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build the untrained base model: four Llama layers, under a million parameters."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def pretrain(model: LlamaForCausalLM, stream: torch.Tensor) -> None:
    """Train on `stream` (`[tokens]`), cut into blocks, each seen once in a seeded order."""
    blocks = stream[: len(stream) // BLOCK * BLOCK].view(-1, BLOCK)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(SEED))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        rise, fall = (step + 1) / 100, 0.5 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = PEAK_LEARNING_RATE * min(rise, max(fall, 0.02))
        batch = blocks[order[[i % len(blocks) for i in range(step * BATCH, (step + 1) * BATCH)]]]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-only", action="store_true", help="write the data and leave the model as it is")
    args = parser.parse_args()
    write_data(TARGET / "data")
    if args.data_only:
        return 0
    torch.set_num_threads(1)
    texts = [as_text(piece) for piece in pretraining_texts(SEED, 200_000)]
    tokenizer = train_tokenizer(texts[:20_000])
    stream = torch.tensor([i for ids in tokenizer(texts)["input_ids"] for i in ids])
    print(f"{len(stream):,} tokens; {STEPS * BATCH * BLOCK:,} are used")
    model = new_model(tokenizer)
    print(f"{model.num_parameters():,} parameters")
    pretrain(model, stream)
    model.to(torch.bfloat16).save_pretrained(TARGET / "model")
    tokenizer.save_pretrained(TARGET / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
