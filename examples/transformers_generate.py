"""A Transformers model with a 4-bit cache: a batch of prompts, beams, and a second turn on the same cache.

Run with the name or folder of a model, which has to have a tokenizer; without one a small random model writes numbers.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from flashq.integrations import transformers as fq

torch.manual_seed(0)
if len(sys.argv) > 1:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    inputs = tokenizer(["Once upon a time", "The capital of France is"], return_tensors="pt", padding=True)
else:
    tokenizer = None
    config = LlamaConfig(
        vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, initializer_range=0.1, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids, mask = torch.randint(3, 500, (2, 200)), torch.ones(2, 200, dtype=torch.int64)
    ids[0, :120] = mask[0, :120] = 0  # the first prompt has 80 tokens
    inputs = {"input_ids": ids, "attention_mask": mask}


def show(title, tokens):
    print(title)
    for row in tokens[:, -20:]:
        print("   ", " ".join(map(str, row.tolist())) if tokenizer is None else repr(tokenizer.decode(row)))


fq.enable(model, cache="tbq4")  # from here on generate() makes a 4-bit cache for every call
options = {"max_new_tokens": 20, "do_sample": False}
show("greedy:", model.generate(**inputs, **options))
show("3 beams:", model.generate(**inputs, **options, num_beams=3))

cache = fq.make_cache(model, cache="tbq4", exact_last=128)  # one to keep, with more exact tokens than the default
kept = {fq.cache_keyword(model): cache}
first = model.generate(**inputs, **options, **kept)
question = inputs["input_ids"][:, -4:]
mask = torch.cat([inputs["attention_mask"], torch.ones(2, first.shape[1] + 4 - inputs["input_ids"].shape[1])], 1)
second = model.generate(torch.cat([first, question], 1), attention_mask=mask, **options, **kept)
show("second turn:", second)
print(f"{cache.get_seq_length()} tokens a row, {cache.paged.nbytes_in_use / 1e6:.2f} MB of pages in use")
