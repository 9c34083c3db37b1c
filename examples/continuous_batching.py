"""Continuous batching over a paged 4-bit cache: requests come at any time, and share steps while they run.

Prompts and single tokens of different requests go through the model together. When pages run out, the request that
came last gives its pages back and starts again later. Each result equals that of the request served alone.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import flashq

LAYERS, HEADS, KV_HEADS, D, VOCAB = 2, 8, 2, 64, 500
torch.manual_seed(0)
torch.set_grad_enabled(False)

embedding, unembedding = torch.randn(2, VOCAB, HEADS * D)
to_qkv = torch.randn(LAYERS, HEADS * D, (HEADS + 2 * KV_HEADS) * D) / (HEADS * D) ** 0.5
to_out = torch.randn(LAYERS, HEADS * D, HEADS * D) / (HEADS * D) ** 0.5


@dataclass
class Request:
    prompt: list[int]
    wanted: int
    arrival: int = 0
    sequence: int = -1
    generated: list[int] = field(default_factory=list)

    @property
    def new_tokens(self) -> list[int]:
        return self.generated[-1:] or self.prompt


def rope(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    angle = position[:, None, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def next_tokens(cache: flashq.TBQ4Cache, requests: list[Request]) -> list[int]:
    """One forward pass for all of them. Raises CacheFullError before it has changed anything."""
    counts = [len(r.new_tokens) for r in requests]
    step = cache.extend([r.sequence for r in requests], counts)
    x = embedding[[token for r in requests for token in r.new_tokens]]
    starts = [cache.length(r.sequence) - count for r, count in zip(requests, counts, strict=True)]
    position = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    for layer in range(LAYERS):
        heads = (F.rms_norm(x, x.shape[-1:]) @ to_qkv[layer]).unflatten(1, (-1, D))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        # With a fixed split a row's bits do not depend on the other requests in the batch.
        out, _ = step.attend(layer, rope(q, position), rope(k, position), v, kv_chunk=256)
        x = x + out.flatten(1) @ to_out[layer]
    last = torch.tensor(counts).cumsum(0) - 1
    return (F.rms_norm(x[last], x.shape[-1:]) @ unembedding.T).argmax(-1).tolist()


def serve(cache: flashq.TBQ4Cache, requests: list[Request]) -> dict[str, int]:
    waiting, running = deque(sorted(requests, key=lambda r: r.arrival)), []
    steps = preempted = largest = 0
    while waiting or running:
        while waiting and waiting[0].arrival <= steps and len(running) < cache.max_sequences:
            running.append(waiting.popleft())
            running[-1].sequence = cache.alloc()
        steps += 1
        if not running:
            continue
        try:
            tokens = next_tokens(cache, running)
        except flashq.CacheFullError:
            if len(running) == 1:
                raise  # it will never fit
            last = running.pop()
            cache.free(last.sequence)
            last.generated.clear()
            waiting.appendleft(last)
            waiting[0].arrival = steps + 5
            preempted += 1
            continue
        largest = max(largest, len(running))
        for request, token in zip(list(running), tokens, strict=True):
            request.generated.append(token)
            if len(request.generated) == request.wanted:
                cache.free(request.sequence)
                running.remove(request)
    return {"steps": steps, "preempted": preempted, "largest batch": largest}


def make_cache(num_pages: int) -> flashq.TBQ4Cache:
    return flashq.TBQ4Cache(
        LAYERS, KV_HEADS, D, num_pages=num_pages, page_size=16, max_sequences=8, dtype=torch.float32
    )


requests = [Request(torch.randint(VOCAB, (20 + 37 * i % 90,)).tolist(), 10 + 7 * i % 30, 2 * i) for i in range(16)]
cache = make_cache(num_pages=36)
print("served together:", serve(cache, requests), "pages in use at the end:", cache.pages_in_use["pages"][0])

for request in requests:
    alone = Request(request.prompt, request.wanted)
    serve(make_cache(num_pages=36), [alone])
    assert alone.generated == request.generated
print(f"all {len(requests)} results are those of the requests served alone")
