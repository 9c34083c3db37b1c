"""PagedKVCache and TBQ4Cache against plain tensors: every method, alone and in random orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_model import Pair, check_pages, random_inputs, snapshot
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import flashq
from flashq.caches import PagedCache, base

KINDS: dict[str, dict[str, Any]] = {
    "16bit": {},
    "tbq4": {},
    "tbq4 plain": {"page_offsets": False, "exact_first": 0, "exact_last": 0},
    "tbq4 offsets": {"exact_first": 0, "exact_last": 0},
    "tbq4 first": {"exact_first": 20, "exact_last": 0},
}


def make(kind: str, **options: Any) -> PagedCache:
    options = {
        "num_pages": 40, "page_size": 16, "max_sequences": 5, "max_length": 400, "max_chunk": 100,
        "window_left": [-1, 70], "dtype": torch.float32,
    } | options  # fmt: skip
    layers = len(options["window_left"])
    if kind == "16bit":
        return flashq.PagedKVCache(layers, 2, 64, **options)
    return flashq.TBQ4Cache(layers, 2, 64, **KINDS[kind], **options)


def pair(kind: str, **options: Any) -> Pair:
    cache = make(kind, **options)
    if cache.dtype != torch.float32:
        return Pair(cache, 1e-2)
    return Pair(cache, 1e-5 if kind == "16bit" else 2e-3)


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest) -> Pair:
    return pair(request.param)


def test_token_by_token_over_pages_and_windows(both: Pair) -> None:
    a = both.alloc()
    both.extend([a], [30])
    for i in range(160):
        both.extend([a], [1], compare=i % 9 == 0)
    check_pages(both.cache)
    both.lookup([a])
    both.free(a)
    assert all(used == 0 for used, _ in both.cache.pages_in_use.values())


def test_a_long_prompt_goes_in_chunks(both: Pair) -> None:
    a, b = both.alloc(), both.alloc()
    both.extend([a, b], [250, 130])  # max_chunk is 100
    both.extend([b, a], [101, 1])
    check_pages(both.cache)


def test_forks_share_pages_and_part_when_they_grow(both: Pair) -> None:
    a = both.alloc()
    both.extend([a], [40])
    before = dict(both.cache.pages_in_use)
    b = both.fork(a)
    c = both.fork(b)
    assert both.cache.pages_in_use == before
    both.extend([a, b], [3, 1])
    assert both.cache.pages_in_use["pages"][0] == before["pages"][0] + 2
    both.extend([a, b, c], [20, 30, 5])
    both.free(a)
    both.extend([b, c], [1, 1])
    both.lookup([c, b])
    check_pages(both.cache)


def test_truncated_tokens_are_forgotten(both: Pair) -> None:
    a = both.alloc()
    both.extend([a], [90])
    b = both.fork(a)
    for length in (89, 80, 79):
        both.truncate(a, length)
        both.extend([a, b], [2, 1])
    both.truncate(a, 64)  # a page's end
    both.extend([a], [17])
    both.truncate(b, 0)
    both.extend([b], [5])
    both.lookup([a, b])
    check_pages(both.cache)


@pytest.mark.parametrize("kind", ["16bit", "tbq4"])
@pytest.mark.parametrize(
    ("window", "kv_start", "fits", "wrong"),
    [(0, 0, (48, 32), (40,)), (4, 20, (52, 16), (20, 18)), (4, 16, (16,), (24,))],
)
def test_tokens_are_not_taken_back_into_a_released_page(
    kind: str, window: int, kv_start: int, fits: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    """A window that sees none of the page does not suffice: the next token's key belongs there."""
    for length in fits:
        both = pair(kind, window_left=[-1, window], slack=0)
        a = both.alloc(kv_start)
        both.extend([a], [64])
        for refused in wrong:
            with pytest.raises(ValueError, match=f"truncate: lengths: expected at least .* released.*, got {refused}"):
                both.cache.truncate(a, refused)
        both.truncate(a, length)
        both.extend([a], [5])
        check_pages(both.cache)


def test_more_than_the_slack_is_read_from_codes() -> None:
    both = pair("tbq4", window_left=[-1])
    a = both.alloc()
    both.extend([a], [100])
    both.extend([a], [100])
    both.extend([a], [1])
    both.truncate(a, 77)  # the pool holds 4 first tokens and those from 112 on
    for _ in range(30):  # a page opens whose last 64 keys were decoded
        both.extend([a], [1])
    both.lookup([a])


def test_padding_is_neither_seen_nor_stored(both: Pair) -> None:
    sequences = [both.alloc(kv_start) for kv_start in (0, 5, 37, 16)]
    for counts in ([20] * 4, [20] * 4, [1] * 4, [40, 1, 1, 1]):  # 20 tokens of the third are all padding
        both.extend(sequences, counts)
    both.lookup(sequences)
    assert both.cache._tables[0].pages[both.cache._sequences[sequences[2]].row, :3].tolist()[:2] == [-1, -1]
    check_pages(both.cache)


def test_batched_tensors_are_packed_ones(both: Pair) -> None:
    for cache in (both.cache, make("tbq4", max_chunk=7)):
        a, b = cache.alloc(), cache.alloc()
        c, d = cache.fork(a), cache.fork(b)
        q, k, v = random_inputs(cache, 10, 1)
        step = cache.extend([a, b], 5)
        packed = [step.attend(layer, q[layer], k[layer], v[layer]) for layer in range(2)]
        step = cache.extend([c, d], 5)
        q, k, v = (x.unflatten(1, (2, 5)) for x in (q, k, v))
        for layer, (out, lse) in enumerate(packed):
            ours, our_lse = step.attend(layer, q[layer], k[layer], v[layer])
            torch.testing.assert_close(ours, out.unflatten(0, (2, 5)))
            torch.testing.assert_close(our_lse, lse.unflatten(1, (2, 5)).transpose(0, 1))


def test_append_then_attend_is_attend_with_new_keys(both: Pair) -> None:
    cache = both.cache
    q, k, v = random_inputs(cache, 20, 3)
    outs = []
    for apart in (False, True):
        step = cache.extend(cache.alloc(), 20)
        if apart:
            step.append(1, k[1], v[1])
        outs.append(step.attend(1, q[1], *(() if apart else (k[1], v[1])), softcap=5.0, scale=0.2, sinks=torch.ones(4)))
    assert all(map(torch.equal, *outs))


def test_select_is_beam_search(both: Pair) -> None:
    beams = [both.alloc() for _ in range(3)]
    both.extend(beams, [20, 21, 22])
    old = dict(both.model.states)
    chosen = both.cache.select(beams, [2, 0, 2])
    assert chosen[0] == beams[2]
    assert chosen[1] == beams[0]
    assert [both.cache.length(s) for s in chosen] == [22, 20, 22]
    both.model.states = {beams[0]: old[beams[0]], beams[2]: old[beams[2]]}
    both.model.fork(beams[2], chosen[2])
    both.extend(chosen, [1, 1, 1])
    assert both.cache.select(chosen, []) == []
    assert both.cache.sequences == []
    check_pages(both.cache)


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_pages_changes_nothing(kind: str) -> None:
    both = pair(kind, num_pages=12)
    a = both.alloc()
    both.extend([a], [100])
    b = both.fork(a)
    both.extend([a], [20])  # 9 pages with b's own copy
    before, generation = snapshot(both.cache), both.cache._generation
    for sequences, counts in (([a], [400]), ([b, a], [1, 80]), ([b], [100])):
        with pytest.raises(
            flashq.CacheFullError, match=r"flashq\.\w+(\.extend)?: (pages|max_length): expected .*, got"
        ):
            both.cache.extend(sequences, counts)
        assert snapshot(both.cache) == before
        assert both.cache._generation == generation
    both.extend([b, a], [1, 2])
    check_pages(both.cache)


def test_an_extend_that_memory_is_not_enough_for_changes_nothing(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device it may be found out late. The step before has ended then: its tensors may be half overwritten."""

    def no_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError

    a = both.alloc()
    both.extend([a], [20])
    b = both.fork(a)
    step, before = both.cache.lookup([a]), snapshot(both.cache)
    for counts in ([1, 1], [150, 60]):
        with monkeypatch.context() as patch:
            patch.setattr(base, "upload", no_memory)
            with pytest.raises(torch.OutOfMemoryError):
                both.cache.extend([a, b], counts)
        assert snapshot(both.cache) == before
    with pytest.raises(ValueError, match="step: expected the cache's latest"):
        step.attend(0, torch.zeros(1, 4, 64))
    both.extend([a, b], [1, 150])
    check_pages(both.cache)


def test_the_exact_pool_is_bounded() -> None:
    """First + last + chunk + 2 pages a sequence, however long the prompt."""
    cache = flashq.TBQ4Cache(
        1, 1, 64, num_pages=200, max_sequences=1, exact_pages=1 + 4 + 256 + 2, dtype=torch.float16
    )  # fmt: skip
    a = cache.alloc()
    for count in (9000, 1, 37, 2500, 1):
        step = cache.extend(a, count)
        assert max(chunk.end - chunk.begin for chunk in step.chunks) <= 4096
        k = torch.zeros(count, 1, 64, dtype=torch.float16)
        step.append(0, k, k)
    cache.extend(a, 1)
    assert cache.pages_in_use["exact pages"][0] <= 1 + 4 + 1 + 2


def test_windows_release_their_pages() -> None:
    cache = make("tbq4", window_left=[-1, 40, 70], num_pages=100, max_length=1600, max_sequences=2)
    a = cache.alloc()
    for _ in range(30):
        cache.extend(a, 50)
        in_use = cache.pages_in_use
        assert in_use["pages of window 40"][0] <= -(-(40 + 16 + 50) // 16) + 1
        assert in_use["pages of window 70"][0] <= -(-(70 + 16 + 50) // 16) + 1
    assert in_use["pages"][0] == -(-1500 // 16)
    with pytest.raises(ValueError, match=r"truncate: lengths: expected at least 1480, .* released"):
        cache.truncate(a, 1300)
    cache.truncate(a, 1484)
    for sequence in (a, cache.fork(a)):  # what was released at 1500 tokens stays so
        with pytest.raises(ValueError, match=r"truncate: lengths: expected at least 1480, .* released"):
            cache.truncate(sequence, 1479)
    with pytest.raises(ValueError, match="lookup: counts: expected queries whose window 40 is still held, got 60"):
        cache.lookup(a, 60)


def test_steps_share_their_tensors() -> None:
    """What a CUDA graph needs: the next step's numbers in the same memory."""
    cache = make("tbq4")
    a, b, c = (cache.alloc() for _ in range(3))
    cache.extend([a, b, c], [50, 20, 1])
    steps = [cache.extend(sequences).chunks[0] for sequences in ([a, b], [c, a], [b, c])]
    for name in ("seqlens", "kv_start", "cu_seqlens"):
        assert len({getattr(chunk, name).data_ptr() for chunk in steps}) == 1
    for i in range(3):
        assert len({chunk.block_tables[i].data_ptr() for chunk in steps}) == 1
        assert len({chunk.slots[i].data_ptr() for chunk in steps}) == 1
    assert steps[0].seqlens.tolist() == [22, 3]


class Machine(RuleBasedStateMachine):
    """Random calls, on a cache that is often full."""

    kind = "tbq4"

    def __init__(self) -> None:
        super().__init__()
        self.both = pair(self.kind, num_pages=22, max_sequences=4, max_length=200, max_chunk=60)

    @property
    def sequences(self) -> list[int]:
        return self.both.cache.sequences

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.sequences))

    @rule(kv_start=st.sampled_from([0, 0, 3, 20]))
    def alloc(self, kv_start: int) -> None:
        if len(self.sequences) < 4:
            self.both.alloc(kv_start)
        else:
            before = snapshot(self.both.cache)
            with pytest.raises(flashq.CacheFullError):
                self.both.cache.alloc(kv_start)
            assert snapshot(self.both.cache) == before

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.sequences), min_size=1, unique=True))
        size = st.one_of(st.integers(0, 3), st.integers(0, 100))
        counts = data.draw(st.lists(size, min_size=len(chosen), max_size=len(chosen)))
        before = snapshot(self.both.cache)
        try:
            self.both.extend(chosen, counts)
        except flashq.CacheFullError:
            assert snapshot(self.both.cache) == before

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if len(self.sequences) < 4:
            self.both.fork(self.pick(data))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), back=st.integers(0, 40))
    def truncate(self, data: st.DataObject, back: int) -> None:
        sequence = self.pick(data)
        length = max(0, self.both.cache.length(sequence) - back)
        if self.both.model.can_truncate(sequence, length):
            self.both.truncate(sequence, length)
        else:
            with pytest.raises(ValueError, match="released"):
                self.both.cache.truncate(sequence, length)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.both.free(self.pick(data))

    @invariant()
    def pages_are_accounted_for(self) -> None:
        check_pages(self.both.cache)


class Machine16(Machine):
    kind = "16bit"


_SETTINGS = settings(max_examples=10, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck))
TestRandomTBQ4 = Machine.TestCase
TestRandom16 = Machine16.TestCase
TestRandomTBQ4.settings = TestRandom16.settings = _SETTINGS
