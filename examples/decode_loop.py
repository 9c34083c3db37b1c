"""Greedy decoding on a paged cache, with nothing of flashq but torch.ops: a model of two layers and random weights."""

import torch
import torch.nn.functional as F

import flashq  # noqa: F401  # registers torch.ops.flashq

ops = torch.ops.flashq
LAYERS, HEADS, KV_HEADS, D, VOCAB, PAGE, PAGES = 2, 8, 2, 64, 500, 16, 20
torch.manual_seed(0)
torch.set_grad_enabled(False)

embedding, unembedding = torch.randn(2, VOCAB, HEADS * D)
to_qkv = torch.randn(LAYERS, HEADS * D, (HEADS + 2 * KV_HEADS) * D) / (HEADS * D) ** 0.5
to_out = torch.randn(LAYERS, HEADS * D, HEADS * D) / (HEADS * D) ** 0.5
k_cache, v_cache = torch.zeros(2, LAYERS, PAGES, PAGE, KV_HEADS, D)
table = torch.randperm(PAGES, dtype=torch.int32)[None]  # the sequence's pages, wherever they are


def rope(x, position):
    angle = position[:, None, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def forward(tokens, start, cached=True):
    """The logits after tokens that stand at positions from `start` on."""
    x, position = embedding[tokens], torch.arange(start, start + len(tokens))
    slots = table[0, position // PAGE].long() * PAGE + position % PAGE
    length = torch.tensor([start + len(tokens)])
    for layer in range(LAYERS):
        q, k, v = (
            (F.rms_norm(x, x.shape[-1:]) @ to_qkv[layer])
            .unflatten(1, (-1, D))
            .split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        )
        q, k = rope(q, position), rope(k, position)
        if cached:
            ops.kv_append_(k, v, k_cache[layer], v_cache[layer], slots)
            out, _ = ops.decode(q[None], k_cache[layer], v_cache[layer], length, table)
        else:
            out, _ = ops.prefill(q[None], k[None], v[None], causal=True)
        x = x + out[0].flatten(1) @ to_out[layer]
    return F.rms_norm(x[-1], x.shape[-1:]) @ unembedding.T


prompt = torch.randint(VOCAB, (40,)).tolist()
tokens, logits = list(prompt), forward(prompt, 0)
for _ in range(100):
    tokens.append(int(logits.argmax()))
    logits = forward(tokens[-1:], len(tokens) - 1)

again = forward(tokens, 0, cached=False)  # all at once, without a cache
print("generated:", tokens[len(prompt) :])
print("largest difference to logits without a cache:", (logits - again).abs().max().item())
assert torch.allclose(logits, again, atol=1e-2)
