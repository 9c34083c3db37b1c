// Attention of few rows over a 16- or 32-bit cache: split-KV decode, drafts of a few tokens, short prompts.
//
// Reading K and V once is most of the cost, so nothing is packed: a unit (sequence, block of KV heads, split) walks its
// 64-key tiles in the order in which a token-major cache lies in memory, a few keys of every head, then the next keys:
//   scores      (heads, rows, 64)   row dots: a group of 4 (2, 1) rows with as many keys as end in one vector
//   softmax_row (heads, rows, 64)   P, with each row's own mask
//   accumulate  (heads, rows, D)    P V, the same groups, whole value rows
// Rows a little ahead are prefetched into L2, one for each row of work. On 2 Zen 3 cores (AVX2, bf16, 8 KV heads, D
// 128) a group of 4 reads at 70 % of the read probe's rate, head by head at 53 %; groups of 1 and 2 at 77 %.
#include "cpu/attention/key_rows.h"
#include "cpu/kernels.h"

namespace flashq::FLASHQ_ISA {
namespace {

using cpu::kFewRows;

constexpr int kAhead = 16;  // keys between prefetch and use: 8 to 32 measure alike, 4 and 64 are 15 % slower

// Rows of the unit's first KV head; the other heads lie at multiples of the head stride. Entries past the last key
// repeat it: keys that nobody sees are neither read nor looked up.
template <class T> struct Tile {
  const T *k[2 * kTileK], *v[2 * kTileK];  // of this tile and of the next
};

// Prefetches one (key, head) row a step, in the order of the work.
struct Ahead {
  const void* const* rows;
  int64_t head_bytes;  // from head to head
  int row_bytes, heads, keys;
  int key = kAhead, head = 0;

  FLASHQ_SIMD void step() {
    if (key >= keys) return;
    const char* row = static_cast<const char*>(rows[key]) + head * head_bytes;
    for (int at = 0; at < row_bytes; at += 64) prefetch_l2(row + at);
    if (row_bytes % 64) prefetch_l2(row + row_bytes - 1);
    if (++head == heads) head = 0, ++key;
  }
};

// s (R, 64) = q (R, words) times the keys' rows.
template <class T, int R>
[[gnu::noinline]] void scores(const T* const* k, int64_t head, int keys, const float* q, int64_t q_stride,
                              int64_t words, float* s, Ahead* ahead) {
  using Words = typename Traits<T>::Words;
  constexpr int K = kLanes / R;
  const int64_t whole = words / kLanes * kLanes;
  for (int key = 0; key < keys; key += K) {
    if (ahead)
      for (int t = 0; t < K; ++t) ahead->step();
    VecF dot[kLanes];  // (R, K)
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) dot[i] = zero();
    const auto multiply = [&](int64_t word, int64_t count) __attribute__((always_inline)) {
      VecF kv[K];
#pragma GCC unroll 16
      for (int t = 0; t < K; ++t) kv[t] = as_float(Words::load_row_n(k[key + t] + head, word, count));
      VecF row[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        row[r] = load(q + r * q_stride + word);
        if (K > 1) asm("" : "+x"(row[r]));  // one load for K multiplications, not one each
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int t = 0; t < K; ++t) dot[r * K + t] = Words::mac(dot[r * K + t], row[r], kv[t]);
    };
    for (int64_t word = 0; word < whole; word += kLanes) multiply(word, kLanes);
    if (whole < words) multiply(whole, words - whole);
    alignas(64) float sums[kLanes];
    store(sums, sum_each(dot));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) std::memcpy(s + r * kTileK + key, sums + r * K, K * sizeof(float));
  }
}

// acc (R, dim) += P (R, 64) times the value rows.
template <class T, int R>
[[gnu::noinline]] void accumulate(const T* const* v, int64_t head, int keys, const float* p, float* acc, int64_t width,
                                  int64_t dim, Ahead* ahead) {
  using Words = typename Traits<T>::Words;
  constexpr int K = kLanes / R, kStep = K * Words::kPerWord;
  const int64_t whole = dim / kLanes * kLanes;
  for (int key = 0; key < keys; key += kStep) {
    if (ahead)
      for (int t = 0; t < kStep; ++t) ahead->step();
    VecF weight[R][K];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int t = 0; t < K; ++t) weight[r][t] = set1(p[r * kTileK + key / Words::kPerWord + t]);
    const auto multiply = [&](int64_t d, int64_t count) __attribute__((always_inline)) {
      VecF value[K];
#pragma GCC unroll 16
      for (int t = 0; t < K; ++t) {
        const T* const* pair = v + key + t * Words::kPerWord;
        value[t] = as_float(Words::load_pair_n(pair[0] + head, pair[Words::kPerWord - 1] + head, d, count));
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        VecF sum = load(acc + r * width + d);
#pragma GCC unroll 16
        for (int t = 0; t < K; ++t) sum = Words::mac(sum, weight[r][t], value[t]);
        store(acc + r * width + d, sum);
      }
    };
    for (int64_t d = 0; d < whole; d += kLanes) multiply(d, kLanes);
    if (whole < dim) multiply(whole, dim - whole);
  }
}

// Calls f<R>(first row) for groups that cover `rows` rows; three rows are a group of four with a row of zeros.
template <class F> FLASHQ_SIMD void for_row_groups(int rows, const F& f) {
  int r = 0;
  for (; rows - r >= 3; r += 4) f.template operator()<4>(r);
  if (rows - r == 2) f.template operator()<2>(r);
  if (rows - r == 1) f.template operator()<1>(r);
}

template <class T> struct FewRows {
  using Words = typename Traits<T>::Words;
  static constexpr int kBlock = kLanes * Words::kPerWord;  // keys of a head before the next head: what one row needs

  const Attention16Params& p;
  const Plan& plan;
  const Unit& u;
  const KeyRows places;
  const int64_t dim, words, width;   // of a row: elements, words, floats of a padded row
  const int rows, heads, head_rows;  // head_rows: with the row of zeros that makes a group of 4 of 3 rows
  float *q, *acc;                    // (heads, head_rows, width)
  float *s, *weights;                // (heads, head_rows, kTileK)
  RowState* state;                   // (heads, head_rows)

  FewRows(const Attention16Params& params, const Plan& pl, const Unit& unit, std::byte* scratch)
      : p(params),
        plan(pl),
        u(unit),
        places(params.kv, *unit.sequence),
        dim(params.query.head_dim),
        words(dim / Words::kPerWord),
        width(pl.width),
        rows(static_cast<int>(unit.rows)),
        heads(static_cast<int>(unit.heads)),
        head_rows(rows + (rows % 4 == 3)) {
    const int64_t size = int64_t{heads} * head_rows;
    q = reinterpret_cast<float*>(scratch);
    acc = q + size * width;
    s = acc + size * width;
    weights = s + size * kTileK;
    state = reinterpret_cast<RowState*>(weights + size * kTileK);
  }

  void load_rows() {
    const QueryView& query = p.query;
    const Sequence& sequence = *u.sequence;
    const int64_t size = int64_t{heads} * head_rows;
    std::memset(q, 0, static_cast<size_t>(2 * size * (width + kTileK)) * sizeof(float));  // and acc, s, weights
    for (int64_t i = 0; i < size; ++i) state[i] = empty_row();
    for (int h = 0; h < heads; ++h)
      for (int r = 0; r < rows; ++r) {
        const int64_t row = u.row + r, token = sequence.q_begin + row / plan.group;
        const int64_t q_head = (u.head + h) * plan.group + row % plan.group;
        const T* from = static_cast<const T*>(query.q) + sequence.batch * query.q_stride[0] +
                        token * query.q_stride[1] + q_head * query.q_stride[2];
        float* to = q + (h * head_rows + r) * width;
        for (int64_t w = 0; w < words; w += kLanes) store_words(to + w, Words::load_row_n(from, w, words - w));
      }
  }

  // The rows of the next tile: keys [first, first + keys).
  void locate(Tile<T>& tile, int64_t first, int keys) const {
    const KvView& kv = p.kv;
    const T** k = tile.k + kTileK;
    const T** v = tile.v + kTileK;
    const T* k0 = static_cast<const T*>(kv.k) + u.head * kv.k_stride[2];
    const T* v0 = static_cast<const T*>(kv.v) + u.head * kv.v_stride[2];
    const int64_t page_end = kv.block_table.given() ? kv.page_size : INT64_MAX;
    KeyRows::Place at = places.place(first);
    for (int i = 0; i < keys; ++i, ++at.slot) {
      if (at.slot == page_end) at = places.place(first + i);
      k[i] = k0 + at.page * kv.k_stride[0] + at.slot * kv.k_stride[1];
      v[i] = v0 + at.page * kv.v_stride[0] + at.slot * kv.v_stride[1];
    }
    for (int i = keys; i < kTileK; ++i) k[i] = k[keys - 1], v[i] = v[keys - 1];
  }

  void run() {
    load_rows();
    const ScoreRule rule(p.score);
    const Mask& mask = u.sequence->mask;
    KeyRange seen[kFewRows];
    for (int r = 0; r < rows; ++r) seen[r] = intersect(mask.visible((u.row + r) / plan.group), u.keys);

    Tile<T> tile;
    const auto keys_at = [&](int64_t key) { return static_cast<int>(min_of<int64_t>(u.keys.end - key, kTileK)); };
    if (!u.keys.empty()) locate(tile, u.keys.begin, keys_at(u.keys.begin));
    for (int64_t key = u.keys.begin; key < u.keys.end; key += kTileK) {
      const int keys = keys_at(key), next_keys = max_of(keys_at(key + kTileK), 0);
      std::memcpy(tile.k, tile.k + kTileK, kTileK * sizeof(T*));
      std::memcpy(tile.v, tile.v + kTileK, kTileK * sizeof(T*));
      if (next_keys > 0) locate(tile, key + kTileK, next_keys);
      Ahead ahead_k = ahead(tile.k, p.kv.k_stride[2], kTileK + next_keys);
      Ahead ahead_v = ahead(tile.v, p.kv.v_stride[2], kTileK + next_keys);
      uint64_t bits[kFewRows];
      for (int r = 0; r < rows; ++r) bits[r] = tile_bits(seen[r], key);
      for (int k0 = 0; k0 < keys; k0 += kBlock)
        for (int h = 0; h < heads; ++h) {
          const int64_t base = int64_t{h} * head_rows;
          for_row_groups(rows, [&]<int R>(int r) {
            scores<T, R>(tile.k + k0, h * p.kv.k_stride[2], kBlock, q + (base + r) * width, width, words,
                         s + (base + r) * kTileK + k0, r == 0 ? &ahead_k : nullptr);
          });
        }
      for (int h = 0; h < heads; ++h)
        for (int r = 0; r < rows; ++r) {
          const int64_t at = int64_t{h} * head_rows + r;
          VecF e[kN];
          softmax_row<Traits<T>::kExp2Degree>(s + at * kTileK, nullptr, bits[r], rule, state[at], acc + at * width,
                                              width, e);
          Words::store_p(weights + at * kTileK, e);
        }
      for (int k0 = 0; k0 < keys; k0 += kBlock)
        for (int h = 0; h < heads; ++h) {
          const int64_t base = int64_t{h} * head_rows;
          for_row_groups(rows, [&]<int R>(int r) {
            accumulate<T, R>(tile.v + k0, h * p.kv.v_stride[2], kBlock,
                             weights + (base + r) * kTileK + k0 / Words::kPerWord, acc + (base + r) * width, width, dim,
                             r == 0 ? &ahead_v : nullptr);
          });
        }
    }
    finish_unit(p, plan, u, {acc, state, head_rows},
                [&](int64_t kv_head, int64_t key) { return static_cast<const void*>(places.value<T>(kv_head, key)); });
  }

  Ahead ahead(const T* const* first, int64_t head_stride, int keys) const {
    return {reinterpret_cast<const void* const*>(first), head_stride * static_cast<int64_t>(sizeof(T)),
            static_cast<int>(dim * static_cast<int64_t>(sizeof(T))), heads, keys};
  }
};

}  // namespace

// Bits do not depend on it, because a head's rows see no other head.
int64_t few_rows_heads(const Attention16Params& p, int32_t workers) {
  const QueryView& q = p.query;
  const KvView& kv = p.kv;
  if (q.total_tokens == 0 || kv.k_stride[2] > kv.k_stride[1] || kv.v_stride[2] > kv.v_stride[1])
    return 1;  // head-major
  // Queries and accumulators stay in L2: 256 KiB.
  const int64_t group = q.q_heads / q.kv_heads, rows = min_of(group * max_of<int64_t>(q.q_len, 1), kFewRows);
  const int64_t most = min_of(max_of<int64_t>(32768 / (rows * q.head_dim), 1), q.kv_heads);
  // Short sequences have too few splits for the workers; then their heads are dealt out.
  int64_t splits = 0;
  for (int64_t b = 0; b < q.batch; ++b) {
    const int64_t keys = p.seqlens.given()         ? p.seqlens(b)
                         : kv.cu_seqlens_k.given() ? kv.cu_seqlens_k(b + 1) - kv.cu_seqlens_k(b)
                                                   : kv.page_size;
    splits += ceil_div(max_of<int64_t>(keys, 1), 1024);
  }
  return max_of<int64_t>(min_of(most, splits * q.kv_heads / (2 * int64_t{workers})), 1);
}

int64_t few_rows_worker_bytes(const Attention16Params& p, int64_t heads) {
  const int64_t row = 2 * (cpu::padded_dim(p.query.head_dim) + kTileK) * int64_t{sizeof(float)};
  return heads * kFewRows * (row + int64_t{sizeof(RowState)});
}

void run_few_rows(const Attention16Params& p, const Plan& plan, const Unit& u, std::byte* scratch) {
  switch (p.query.dtype) {
    case Dtype::kFloat32: return FewRows<float>(p, plan, u, scratch).run();
    case Dtype::kFloat16: return FewRows<Fp16>(p, plan, u, scratch).run();
    case Dtype::kBfloat16: return FewRows<Bf16>(p, plan, u, scratch).run();
  }
}

}  // namespace flashq::FLASHQ_ISA
