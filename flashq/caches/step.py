"""One append to some sequences of a cache: what every layer writes and reads, in tensors that all layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashq.caches.arguments import as_integer
from flashq.caches.index import Chunk, Prompt

if TYPE_CHECKING:
    from flashq.caches.base import PagedCache


class Step:
    """What `extend` and `lookup` return: the tokens of some sequences that come next, packed in the order asked for.

    Call `attend` (or `append`) once a layer, before the cache's next `extend`, `truncate`, `free` or `load`. A step of
    one chunk in which no sequence gets more than 16 tokens uses the same tensors as every such step of as many
    sequences and tokens, so its layers can be captured in a CUDA graph: `extend` writes the next step's values into
    them, outside of the graph.
    """

    def __init__(
        self, cache: PagedCache, counts: list[int], chunks: list[Chunk], prompt: Prompt | None = None, *,
        appends: bool = True,
    ) -> None:  # fmt: skip
        self._cache, self._prompt, self._appends = cache, prompt, appends
        self._generation = cache._generation
        self.counts = counts
        self.tokens = sum(counts)
        self.chunks = chunks

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the step's keys and values of one layer.

        Args:
            layer: from 0.
            k, v: (T, Hkv, D), or (B, S, Hkv, D) where all sequences get S tokens; in the cache's dtype.
        """
        self._write(layer, *self._check_new(layer, k, v))

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        for chunk in self.chunks:
            self._cache._write(layer, chunk, k[chunk.begin : chunk.end], v[chunk.begin : chunk.end])

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        causal: bool = True,
        kv_chunk: int = 0,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Append k and v, if given, and attend with q over all that the sequences hold in this layer.

        Args:
            layer: from 0. Its window is the cache's business.
            q: (T, Hq, D), or (B, S, Hq, D) where all sequences have S tokens; in the cache's dtype.
            k, v: as in `append`; None: they were appended before, or this is a `lookup`.
            scale, sinks, softcap, causal, kv_chunk, out_dtype: as in `flashq.decode`.

        Returns:
            out like q, lse fp32 (Hq, T) or (B, Hq, S).

        Raises:
            ValueError: a shape or dtype that does not fit; the step is not the cache's latest; k and v are missing in a
                step of several chunks, or it is not causal.
        """
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "causal": causal}
        if (k is None) != (v is None):
            self._refuse("attend", "k, v", "both or none", "one")
        if k is not None:
            k, v = self._check_new(layer, k, v)
        elif len(self.chunks) > 1:
            self._refuse("attend", "k, v", f"both, because the step has {len(self.chunks)} chunks", "None")
        if len(self.chunks) > 1 and not causal:
            self._refuse("attend", "causal", f"True, because the step has {len(self.chunks)} chunks", "False")
        self._check("attend", layer)
        self._check_tensor("attend", "q", q)
        batched = q.dim() == 4
        if q.shape[: q.dim() - 2] != ((len(self.counts), self._uniform_count()) if batched else (self.tokens,)):
            expected = f"({self.tokens}, Hq, {self._cache.head_dim})"
            if self._uniform_count() is not None:
                expected += f" or ({len(self.counts)}, {self._uniform_count()}, Hq, {self._cache.head_dim})"
            self._refuse("attend", "q", f"shape {expected}", f"shape {tuple(q.shape)}")
        packed = q.flatten(0, 1) if batched else q
        # An op that reads k and v as they come takes no split of them: with one, bits depend on the sequence alone.
        if k is not None and self._prompt is not None and not kv_chunk and out_dtype in (None, q.dtype):
            self._write(layer, k, v)
            out, lse = self._cache._attend_prompt(layer, self._prompt, packed, k, v, sinks, **options)
        else:
            options |= {"kv_chunk": kv_chunk, "out_dtype": out_dtype}
            if len(self.chunks) == 1:
                if k is not None:
                    self._write(layer, k, v)
                return self._cache._attend(layer, self.chunks[0], q, sinks, **options)
            out = torch.empty(packed.shape, dtype=out_dtype or q.dtype, device=q.device)
            lse = torch.empty(packed.shape[1], packed.shape[0], dtype=torch.float32, device=q.device)
            for chunk in self.chunks:
                tokens = slice(chunk.begin, chunk.end)
                self._cache._write(layer, chunk, k[tokens], v[tokens])
                out[tokens], lse[:, tokens] = self._cache._attend(layer, chunk, packed[tokens], sinks, **options)
        if not batched:
            return out, lse
        return out.view(q.shape), lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()

    def _uniform_count(self) -> int | None:
        return self.counts[0] if self.counts and len(set(self.counts)) == 1 else None

    def _refuse(self, method: str, argument: str, expected: str, got: str) -> None:
        self._cache._refuse(method, argument, expected, got)

    def _check_tensor(self, method: str, name: str, x: Any) -> None:
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            self._refuse(method, name, "a dense tensor", f"a {type(x).__name__}")

    def _check(self, method: str, layer: int) -> None:
        if self._generation != self._cache._generation:
            self._refuse(method, "step", "the cache's latest", "an older one")
        as_integer(self._cache._where(method), "layer", layer, most=self._cache.num_layers - 1)

    def _check_new(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (T, Hkv, D), as the cache takes them."""
        self._check("append", layer)
        if not self._appends:
            self._refuse("append", "step", "one that extend returned", "one of lookup")
        cache, checked = self._cache, []
        heads = (cache.kv_heads, cache.head_dim)
        for name, x in (("k", k), ("v", v)):
            self._check_tensor("append", name, x)
            batched = x.dim() == 4 and x.shape[:2] == (len(self.counts), self._uniform_count())
            if x.shape[-2:] != heads or not (batched or x.shape == (self.tokens, *heads)):
                self._refuse("append", name, f"shape {(self.tokens, *heads)}", f"shape {tuple(x.shape)}")
            if x.dtype != cache.dtype:
                self._refuse("append", name, f"{cache.dtype}, the cache's dtype", str(x.dtype))
            checked.append(x.flatten(0, 1) if batched else x)
        return checked[0], checked[1]
