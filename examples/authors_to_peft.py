"""Adapters of a small GPT-2 for authors, a new one among them, in folders that ``peft`` opens without fedkeep.

What is common to all authors is trained together; each keeps a factor of the adapter. The GPT-2 is drawn at random, so nothing
is downloaded: ``pip install '.[transformers]'`` is all. One of your own comes from ``AutoModelForCausalLM.from_pretrained``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

import fedkeep

WORDS, LONGEST = 40, 12


def write(authors: range, sentences: int = 60) -> fedkeep.FederatedData:
    """Write sentences of 6 to 12 words, padded with 0; author k mostly goes k + 1 words on in the dictionary."""
    draw, rows = np.random.default_rng(authors.start), len(authors) * sentences
    author, length = np.repeat(list(authors), sentences), draw.integers(6, LONGEST + 1, rows)
    step = np.where(draw.random((rows, LONGEST)) < 0.9, author[:, None] % 5 + 1, 7).cumsum(1)
    mask = (np.arange(LONGEST) < length[:, None]).astype(np.int64)
    ids = (draw.integers(0, WORDS, (rows, 1)) + step) % (WORDS - 1) * mask + mask
    columns = {"input_ids": ids, "attention_mask": mask, "label": fedkeep.data.next_tokens(ids, mask)}
    names, meta = [f"author-{a}" for a in author], {"task": "next_token", "classes": WORDS}
    return fedkeep.FederatedData.from_columns(names, columns, meta=meta).split_per_user()


def main(folder: Path) -> dict[str, float]:
    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "n_positions": LONGEST, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True
    )
    model = peft.get_peft_model(base, lora)
    local = fedkeep.Phase(optimizer=fedkeep.adam(0.01), epochs=2, batch_size=10)
    run = fedkeep.simulate(
        model, fedkeep.methods.furl("*lora_B*", local=local), write(range(10)), rounds=8, cohort=5
    )
    later = write(range(10, 12))
    run.fit(rows=later)  # authors who come later: their own factor alone is fitted
    for author in ("author-3", "author-11"):
        fedkeep.save_adapter(model, folder / author, run.parameters(author))
    new = run.on(later)
    found = {
        f"author-11, {stage}": new.evaluate(clients=["author-11"], stage=stage)["perplexity"]
        for stage in ("own", "shared")
    }
    found |= {"all authors": run.evaluate()["perplexity"]}
    print({name: round(value, 2) for name, value in found.items()})
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
