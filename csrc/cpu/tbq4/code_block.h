// Attention of a block of rows of one KV head over TBQ4 codes, tile by tile.
//
// Queries are rotated once and outputs are accumulated in the rotated domain, so codes meet rotated operands only: they
// are looked up in registers (AVX2), or for a tile of 64 keys into operands of a product (16 KiB at width 128) that the
// next tile overwrites. Norms multiply scores and probabilities in fp32, never values. Per block of kWidth dims n:
//   scores   s[r][key]  += sum_i q'[r][i] c[key][i] * norm_k[key]
//   outputs  o'[r][dim] += sum_key P[r][key] norm_v[key] c[key][dim]
#pragma once
#include "core/tbq4/rotation.h"
#include "cpu/tbq4/fp32_math.h"
#include "cpu/tbq4/int16_direct.h"
#include "cpu/tbq4/int16_expanded.h"
#include "cpu/tbq4/product.h"

namespace flashq::FLASHQ_ISA {
namespace {

#if defined(__AVX512F__)
template <int kWidth> using CodeMath = ExpandedInt16<kWidth>;
constexpr bool kInt16 = true, kDirect = false;
#elif defined(__AVX2__)
template <int kWidth> using CodeMath = DirectInt16<kWidth>;
constexpr bool kInt16 = true, kDirect = true;
#else
template <int kWidth> using CodeMath = Fp32Math<kWidth>;
constexpr bool kInt16 = false, kDirect = false;
#endif

// A score of length(q) * norm(k) * scale above this is computed in fp32: int16 is off by 8e-6 of that product (standard
// deviation), and the output by about the error of the scores.
constexpr float kInt16Reach = 64;

// Which keys of a tile a query reads from the codes, and which from the exact pool.
class KeySelector {
 public:
  FLASHQ_SIMD KeySelector(const Tbq4View& kv, const Sequence& s)
      : kv_(kv), s_(s), rule_{kv.exact_first, kv.exact_last}, on_(kv.exact.k && rule_.any()) {}

  FLASHQ_SIMD bool any_exact() const { return on_; }
  FLASHQ_SIMD uint64_t visible(int64_t query, int64_t first_key) const {
    return tile_bits(s_.mask.visible(query), first_key);
  }
  FLASHQ_SIMD uint64_t exact(int64_t query, int64_t first_key) const {
    const uint64_t wanted = visible(query, first_key) & (tile_bits(rule_.leading(s_.mask), first_key) |
                                                         tile_bits(rule_.recent(s_.mask, query), first_key));
    return wanted ? wanted & held(first_key, wanted) : 0;
  }
  // Of all queries together. The first query that sees a key reaches back furthest.
  FLASHQ_SIMD uint64_t exact_of_any(int64_t first_key) const {
    const int64_t last_query = s_.mask.q_len - 1;
    const uint64_t wanted =
        tile_bits(s_.mask.visible(0, last_query), first_key) &
        (tile_bits(rule_.leading(s_.mask), first_key) | tile_bits(rule_.recent(s_.mask, 0), first_key));
    return wanted ? held(first_key, wanted) : 0;
  }
  FLASHQ_SIMD uint64_t coded(int64_t query, int64_t first_key) const {
    return on_ ? visible(query, first_key) & ~exact(query, first_key) : visible(query, first_key);
  }
  // Keys outside both ranges are read exactly by no query of [first, last].
  FLASHQ_SIMD KeyRange leading(KeyRange keys) const { return intersect(keys, rule_.leading(s_.mask)); }
  FLASHQ_SIMD KeyRange recent(KeyRange keys, int64_t first_query) const {
    const KeyRange r = intersect(keys, rule_.recent(s_.mask, first_query));
    return {max_of(r.begin, leading(keys).end), r.end};
  }

 private:
  [[gnu::noinline]] uint64_t held(int64_t first_key, uint64_t wanted) const {
    uint64_t bits = 0;
    for (uint64_t left = wanted; left; left &= left - 1) {
      const int i = __builtin_ctzll(left);
      if (kv_.exact.holds(s_.batch, first_key + i)) bits |= uint64_t{1} << i;
    }
    return bits;
  }

  const Tbq4View& kv_;
  const Sequence& s_;
  ExactRule rule_;
  bool on_;
};

template <int D> class CodeBlock {
  static constexpr int kWidth = tbq4::block_width(D), kBlocks = D / kWidth;
  using Math = CodeMath<kWidth>;
  using Fine = Fp32Math<kWidth>;
  static constexpr int kWordsQ = kWidth / Math::kPerWord, kWordsP = kTileK / Math::kPerWord;

 public:
  static constexpr int64_t scratch_bytes(int64_t rows) {
    const int64_t floats = rows * (3 * D + kBlocks * (kWordsQ + kWordsP) + kTileK) + kTileK * kWidth;
    return floats * 4 + rows * int64_t{sizeof(RowState)} + round_up(rows * (2 * 8 + 4 * (3 * kBlocks + 1)), 64);
  }

  // Rows of a unit; all start empty.
  FLASHQ_SIMD CodeBlock(const AttentionTbq4Params& p, const Plan& plan, const Unit& u, std::byte* scratch)
      : p_(p),
        u_(u),
        group_(plan.group),
        rows_(u.rows),
        select_(p.kv, *u.sequence),
        pages_(p.kv, u.sequence->batch, u.head, p.query.kv_heads),
        rule_(p.score) {
    const auto take = [&](int64_t bytes) {
      std::byte* at = scratch;
      scratch += bytes;
      return at;
    };
    const auto floats = [&](int64_t n) { return reinterpret_cast<float*>(take(n * 4)); };
    expanded_ = floats(kTileK * kWidth);
    state_ = reinterpret_cast<RowState*>(take(rows_ * int64_t{sizeof(RowState)}));
    acc_ = floats(rows_ * D);
    raw_q_ = floats(rows_ * D);
    fine_q_ = floats(rows_ * D);
    q_ = floats(rows_ * kBlocks * kWordsQ);
    weights_ = floats(rows_ * kBlocks * kWordsP);
    s_ = floats(rows_ * kTileK);
    bits_[0] = reinterpret_cast<uint64_t*>(take(rows_ * 8));
    bits_[1] = reinterpret_cast<uint64_t*>(take(rows_ * 8));
    q_unit_ = floats(rows_ * kBlocks);
    q_length_ = floats(rows_ * kBlocks);
    weight_unit_ = floats(rows_ * kBlocks);
    fine_ = floats(rows_);
    std::memset(acc_, 0, static_cast<size_t>(rows_) * D * sizeof(float));
    for (int64_t r = 0; r < rows_; ++r) state_[r] = empty_row();
  }

  FLASHQ_SIMD float* raw_query(int64_t row) { return raw_q_ + row * D; }  // fill these before attend()
  FLASHQ_SIMD float* acc(int64_t row) { return acc_ + row * D; }
  FLASHQ_SIMD RowState& state(int64_t row) { return state_[row]; }
  FLASHQ_SIMD UnitRows rows() const { return {acc_, state_, rows_}; }
  FLASHQ_SIMD const KeySelector& selector() const { return select_; }

  // Goes through the unit's keys; the accumulators end up in the domain of the values.
  void attend() {
    TileRows tiles[2];
    int64_t key = u_.keys.begin / kTileK * kTileK;
    int at = 0;
    bool more = find_tile(key, 0, tiles[0]);
    if (!more) return;
    for (int64_t r = 0; r < rows_; ++r) prepare_query(r);
    while (more) {
      key = tiles[at].first_key + kTileK;
      more = find_tile(key, 1 - at, tiles[1 - at]);
      process(tiles[at], bits_[at], tiles[more ? 1 - at : at]);
      at = 1 - at;
    }
    for (int64_t r = 0; r < rows_; ++r) unrotate(acc_ + r * D);
  }

 private:
  FLASHQ_SIMD int64_t query_of(int64_t row) const { return (u_.row + row) / group_; }

  // The next tile from `key` on of which some row reads a key from the codes.
  bool find_tile(int64_t key, int at, TileRows& tile) {
    for (; key < u_.keys.end; key += kTileK) {
      const uint64_t within = tile_bits(u_.keys, key);
      uint64_t* bits = bits_[at];
      uint64_t needed = 0;
      for (int64_t r = 0; r < rows_; ++r) {
        bits[r] = r > 0 && (u_.row + r) % group_ != 0 ? bits[r - 1] : select_.coded(query_of(r), key) & within;
        needed |= bits[r];
      }
      if (!needed) continue;
      pages_.locate(key, needed, tile);
      return true;
    }
    return false;
  }

  void prepare_query(int64_t r) {
    float* q = fine_q_ + r * D;
    std::memcpy(q, raw_q_ + r * D, D * sizeof(float));
    for (int n = 0; n < kBlocks; ++n) {
      float* block = q + n * kWidth;
      tbq4::rotate<kWidth>(block);
      VecF squares = zero();
      for (int i = 0; i < kWidth; i += kLanes) squares = fma(load(block + i), load(block + i), squares);
      q_length_[n * rows_ + r] = scaled_length(block, reduce_add(squares));
      q_unit_[n * rows_ + r] = Math::prepare_query(block, q_ + (n * rows_ + r) * kWordsQ);
    }
  }

  // The length of a query's block times |scale|, at most 1e38: times a norm of 0 that is 0. Where a scale above 1 may
  // make scores of a query whose squares underflow, 1e38: int16 is no arithmetic for it.
  FLASHQ_SIMD float scaled_length(const float* block, float squares) const {
    const float scale = __builtin_fabsf(p_.score.scale);
    if (squares < 1e-26f && scale > 1) [[unlikely]] {
      VecF top = zero();
      for (int i = 0; i < kWidth; i += kLanes) top = max(top, abs(load(block + i)));
      if (reduce_max(top) > 0) return 1e38f;
    }
    return min_of(__builtin_sqrtf(squares) * scale, 1e38f);
  }

  void process(const TileRows& tile, const uint64_t* bits, const TileRows& next) {
    alignas(64) float k_norms[kBlocks][kTileK], v_norms[kBlocks][kTileK];
    for (int n = 0; n < kBlocks; ++n) {
      load_norms<kBlocks>(p_.kv.k_norms, tile, n, k_norms[n]);
      load_norms<kBlocks>(p_.kv.v_norms, tile, n, v_norms[n]);
    }
    int64_t first = 0, last = rows_;  // rows that read a key of the tile lie in [first, last)
    while (!bits[first]) ++first;
    while (!bits[last - 1]) --last;

    prefetch_norms(next);
    const int64_t fine = kInt16 ? find_fine_rows(k_norms, bits, first, last) : 0;
    if (fine < last - first)
      for (int n = 0; n < kBlocks; ++n) add_scores(n, tile, k_norms[n], next, first, last);
    if (fine > 0) fine_scores(tile, k_norms, first, last);

    for (int64_t r = first; r < last; ++r) weigh(r, tile, bits[r], v_norms);
    for (int n = 0; n < kBlocks; ++n) add_outputs(n, tile, next, first, last);
  }

  FLASHQ_SIMD void add_scores(int n, const TileRows& tile, const float* norms, const TileRows& next, int64_t first,
                              int64_t last) {
    const uint8_t* codes = p_.kv.k_codes + n * kWidth / 2;
    const float *q = q_ + n * rows_ * kWordsQ, *unit = q_unit_ + n * rows_;
    if constexpr (kDirect) {
      for_row_groups(first, last, [&]<int kRows>(int64_t r) {
        Math::template scores<kRows>(q + r * kWordsQ, codes, D / 2, tile, s_ + r * kTileK, unit + r, norms, n > 0,
                                     prefetcher(codes, next, r == first));
      });
    } else {
      Math::expand_keys(codes, D / 2, tile, expanded_, prefetcher(codes, next));
      multiply_code_rows<Math>(last - first, q + first * kWordsQ, kWordsQ, expanded_, kWordsQ, kTileK,
                               {s_ + first * kTileK, kTileK, unit + first, norms, n > 0});
    }
  }
  FLASHQ_SIMD void add_outputs(int n, const TileRows& tile, const TileRows& next, int64_t first, int64_t last) {
    const uint8_t* codes = p_.kv.v_codes + n * kWidth / 2;
    const float *weights = weights_ + n * rows_ * kWordsP, *unit = weight_unit_ + n * rows_;
    float* acc = acc_ + n * kWidth;
    if constexpr (kDirect) {
      for_row_groups(first, last, [&]<int kRows>(int64_t r) {
        Math::template accumulate<kRows>(weights + r * kWordsP, codes, D / 2, tile, expanded_, acc + r * D, D, unit + r,
                                         prefetcher(codes, next, r == first));
      });
    } else {
      Math::expand_values(codes, D / 2, tile, expanded_, prefetcher(codes, next));
      multiply_code_rows<Math>(last - first, weights + first * kWordsP, kWordsP, expanded_, kWordsP, kWidth,
                               {acc + first * D, D, unit + first, nullptr, true});
    }
  }

  // Calls f<rows>(first row) for groups of up to 8 rows. The number is a constant of the code: leaving a loop over 4
  // rows is mispredicted, once for every vector of codes.
  template <class F> FLASHQ_SIMD static void for_row_groups(int64_t first, int64_t last, const F& f) {
    int64_t r = first;
    for (; last - r >= 8; r += 8) f.template operator()<8>(r);
    switch (last - r) {
      case 7: return f.template operator()<7>(r);
      case 6: return f.template operator()<6>(r);
      case 5: return f.template operator()<5>(r);
      case 4: return f.template operator()<4>(r);
      case 3: return f.template operator()<3>(r);
      case 2: return f.template operator()<2>(r);
      case 1: return f.template operator()<1>(r);
      default: return;
    }
  }

  // Marks the rows whose scores int16 may miss; returns their number. A row's own keys decide, not its neighbours'.
  int64_t find_fine_rows(const float (&norms)[kBlocks][kTileK], const uint64_t* bits, int64_t first, int64_t last) {
    float largest[kBlocks];
    for (int n = 0; n < kBlocks; ++n) largest[n] = largest_norm(norms[n], ~uint64_t{0});
    int64_t count = 0;
    for (int64_t r = first; r < last; ++r) {
      float reach = 0, own = 0;
      for (int n = 0; n < kBlocks; ++n) reach += q_length_[n * rows_ + r] * largest[n];
      if (reach > kInt16Reach)
        for (int n = 0; n < kBlocks; ++n) own += q_length_[n * rows_ + r] * largest_norm(norms[n], bits[r]);
      fine_[r] = own > kInt16Reach ? 1.f : 0.f;
      count += own > kInt16Reach;
    }
    return count;
  }
  FLASHQ_SIMD static float largest_norm(const float* norms, uint64_t bits) {
    VecF top = zero();
    for (int i = 0; i < kTileK; i += kLanes) top = max(abs(keep_bits(load(norms + i), bits >> i, zero())), top);
    return reduce_max(top);
  }

  // Scores of the marked rows in fp32.
  [[gnu::noinline]] void fine_scores(const TileRows& tile, const float (&norms)[kBlocks][kTileK], int64_t first,
                                     int64_t last) {
    alignas(64) const float ones[kProductRows] = {1, 1, 1, 1, 1, 1};
    for (int n = 0; n < kBlocks; ++n) {
      Fine::expand_keys(p_.kv.k_codes + n * kWidth / 2, D / 2, tile, expanded_, [](int, int) {});
      for (int64_t r = first, end; r < last; r = end) {
        end = r + 1;
        if (fine_[r] == 0) continue;
        while (end < last && fine_[end] != 0 && end - r < kProductRows) ++end;
        multiply_code_rows<Fine>(end - r, fine_q_ + r * D + n * kWidth, D, expanded_, kWidth, kTileK,
                                 {s_ + r * kTileK, kTileK, ones, norms[n], n > 0});
      }
    }
  }

  // Scores of a row to the operands of its output: weights times norms.
  FLASHQ_SIMD void weigh(int64_t r, const TileRows& tile, uint64_t bits, const float (&norms)[kBlocks][kTileK]) {
    if (!bits) {
      for (int n = 0; n < kBlocks; ++n) {
        std::memset(weights_ + (n * rows_ + r) * kWordsP, 0, kWordsP * sizeof(float));
        weight_unit_[n * rows_ + r] = 0;
      }
      return;
    }
    alignas(64) float bias[kTileK];
    if (p_.kv.k_offsets) offset_scores(r, tile, bias);
    VecF e[kN], x[kN];
    softmax_row<4>(s_ + r * kTileK, p_.kv.k_offsets ? bias : nullptr, bits, rule_, state_[r], acc_ + r * D, D, e);
    for (int n = 0; n < kBlocks; ++n) {
#pragma GCC unroll 16
      for (int j = 0; j < kN; ++j) x[j] = mul(e[j], load(norms[n] + j * kLanes));
      if (~bits)  // a norm that only other rows read may be NaN
#pragma GCC unroll 16
        for (int j = 0; j < kN; ++j) x[j] = keep_bits(x[j], bits >> (j * kLanes), zero());
      weight_unit_[n * rows_ + r] = Math::prepare_weights(x, weights_ + (n * rows_ + r) * kWordsP);
    }
  }

  // q.offset for every key, in fp32 from the query and the offset as they came.
  void offset_scores(int64_t r, const TileRows& tile, float (&bias)[kTileK]) const {
    const float* q = raw_q_ + r * D;
    for (int i = 0; i < kTileK; i += kLanes) store(bias + i, zero());
    for (int i = 0; i < tile.runs; ++i) {
      const TileRows::Run run = tile.run[i];
      const Fp16* offset = pages_.offset(run.page);
      VecF sum[2] = {zero(), zero()};
#pragma GCC unroll 2
      for (int d = 0; d < D; d += 2 * kLanes) {
        sum[0] = fma(load(q + d), widen(offset + d), sum[0]);
        sum[1] = fma(load(q + d + kLanes), widen(offset + d + kLanes), sum[1]);
      }
      const float x = reduce_add(add(sum[0], sum[1]));
      for (int key = run.begin; key < run.end; ++key) bias[key] = x;
    }
  }

  // Rows of the next tile, a few at a time: all at once they fill the queue of misses.
  FLASHQ_SIMD static auto prefetcher(const uint8_t* codes, const TileRows& next, bool on = true) {
    return [codes, &next, on](int begin, int end) {
      if (on)
        for (int i = begin; i < end; ++i) prefetch_l2(codes + next.row[i] * (D / 2));
    };
  }
  FLASHQ_SIMD void prefetch_norms(const TileRows& next) const {
    for (int i = 0; i < kTileK; i += 16) {
      prefetch_l2(p_.kv.k_norms + next.row[i] * kBlocks);
      prefetch_l2(p_.kv.v_norms + next.row[i] * kBlocks);
    }
  }

  // From positions of the product to dims, and back to the domain of the values.
  static void unrotate(float* acc) {
    for (int n = 0; n < kBlocks; ++n, acc += kWidth) {
      alignas(64) float natural[kWidth];
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; ++i) natural[Math::dim_of(i)] = acc[i];
      tbq4::unrotate<kWidth>(natural);
      std::memcpy(acc, natural, sizeof natural);
    }
  }

  const AttentionTbq4Params& p_;
  const Unit& u_;
  int64_t group_, rows_;
  KeySelector select_;
  CodePages pages_;
  ScoreRule rule_;
  RowState* state_;
  float* expanded_;                           // keys or values of a tile, or sums of rows
  float *acc_, *raw_q_, *fine_q_;             // (rows, D); fine_q_ is rotated
  float *q_, *weights_;                       // (blocks, rows, words)
  float *q_unit_, *q_length_, *weight_unit_;  // (blocks, rows)
  float* s_;                                  // (rows, kTileK)
  float* fine_;                               // (rows): 1 where the tile's scores need fp32
  uint64_t* bits_[2];                         // (rows), of this tile and the next
};

}  // namespace
}  // namespace flashq::FLASHQ_ISA
