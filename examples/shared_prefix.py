"""Many questions about one document: its keys and values are read once a step, for all of them.

Each question's queries attend to the document and to the question's own tokens apart; `merge_states` combines both. The
document is one sequence of the cache, and every question another that starts behind it.
"""

import torch

import flashq

HEADS, KV_HEADS, D, DOCUMENT, QUESTIONS, TOKENS = 8, 2, 64, 700, 6, 5
torch.manual_seed(0)
torch.set_grad_enabled(False)

cache = flashq.PagedKVCache(1, KV_HEADS, D, num_pages=40, page_size=64, dtype=torch.float32)
document = cache.alloc()
k, v = torch.randn(2, DOCUMENT, KV_HEADS, D)
cache.extend(document, DOCUMENT).append(0, k, v)

# What it has to equal: questions that fork the document, each reading all of it.
forks = [cache.fork(document) for _ in range(QUESTIONS)]
questions = [cache.alloc() for _ in range(QUESTIONS)]
worst = 0.0
for _ in range(TOKENS):
    q, k, v = (torch.randn(QUESTIONS, heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
    expected, _ = cache.extend(forks).attend(0, q, k, v)

    step = cache.extend(questions)
    # To the document all questions' queries are rows of one sequence: every one of them sees all of it.
    on_document = cache.lookup(document, QUESTIONS).attend(0, q, causal=False, out_dtype=torch.float32)
    on_question = step.attend(0, q, k, v, out_dtype=torch.float32)
    outs, lses = (torch.stack(pair) for pair in zip(on_document, on_question, strict=True))
    out, _ = flashq.merge_states(outs, lses)
    worst = max(worst, (out - expected).abs().max().item())

print(f"{QUESTIONS} questions over {DOCUMENT} tokens: largest difference to reading it for each {worst:.1e}")
assert worst < 1e-5
