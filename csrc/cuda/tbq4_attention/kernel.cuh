// Split-KV attention over a TBQ4 cache: few rows, many keys, so it is bound by the read of codes and norms.
//
// A persistent CTA streams its share of the plan (decode/plan.cuh). Its warps take turns on the tiles of a segment and
// know nothing of each other until its end. Queries arrive rotated, outputs leave the accumulators rotated, and norms
// multiply scores and weights, so that a value costs one table read for two. Codes are the left operands of
// mma.m16n8k16, rows are columns:
//   S^T (16 tokens, 8 rows) = C_k (16, block) Q'^T (block, 8),   O'^T (block, 8) += C_v^T (block, 16) P^T (16, 8).
// Keys of the exact pool follow when a segment's codes are done, and are merged with what those gave.
#pragma once
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/tbq4_attention/exact_tokens.cuh"
#include "cuda/tbq4_attention/weights.cuh"

namespace flashq::cuda {

// kTiles: 8-row tiles of an item.
template <int D, int kTiles> class CodeKernel {
  using Tile = CodeTile<D>;
  static constexpr int kAcc = D / 16;  // fragments of the outputs of 8 rows
  static constexpr int kQueryWords = Tile::kBlocks * Tile::kSteps * 2;

 public:
  __device__ __forceinline__ CodeKernel(const CodeParams& p, unsigned char* shared)
      : p_(p),
        shared_(shared),
        warps_(static_cast<int>(blockDim.x) / 32),
        at_(p.at),
        mine_(reinterpret_cast<CodeSegments*>(shared + at_.segments)[threadIdx.x / 32]) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    lane4_ = keep(lane * 4);
    k_lane_ = keep(kPairTableBytes + Tile::swizzle(Tile::piece(g) * 256 + t * (Tile::kWords * 4)));
    v_lane_ = keep(kPairTableBytes + Tile::kBytes + Tile::swizzle(t * 256 + g * (Tile::kWidth / 16)));
  }

  __device__ __forceinline__ void run() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    fill_tables(shared_, reinterpret_cast<uint32_t*>(shared_ + at_.rest_table));
    const Segment first =
        plan_worker(p_.call, p_.split, static_cast<int>(blockIdx.x),
                    [&](int batch, int token, bool padding) { write_blind_token(p_.call, batch, token, padding); });
    if (!first.given()) return;
    if (lane == 0) mine_.segment = mine_.loaded.segment = first;
    __syncwarp();
    const int ring = warp * p_.stages;
    CodeStream<D> stream(p_, mine_.loaded, ptx::shared_address(shared_), ring);
    int load_stage = 0, stage = 0;
    for (; load_stage < p_.stages - 1; ++load_stage) stream.load_next(p_, load_stage);

    for (bool first_segment = true; mine_.segment.given(); first_segment = false) {
      begin_segment();
      uint32_t query[kTiles][kQueryWords];
      float factor[kTiles][2], acc[kTiles][kAcc][4] = {};
      load_query(query, factor);
      LaneStates<kTiles> state;
#pragma unroll 1
      for (int tile = warp; tile < tiles_; tile += warps_) {
        if (p_.stages == 2)
          ptx::cp_async_wait<0>();
        else if (p_.stages == 3)
          ptx::cp_async_wait<1>();
        else
          ptx::cp_async_wait<2>();
        __syncwarp();  // the tile is there, and nobody reads the one before it any more
        stream.load_next(p_, load_stage);
        load_stage = load_stage + 1 == p_.stages ? 0 : load_stage + 1;
        attend_tile(tile, ring + stage, stream.complete(stage), query, factor, state, acc);
        stage = stage + 1 == p_.stages ? 0 : stage + 1;
      }
      end_segment(first_segment, state, acc);
    }
  }

 private:
  // What the rows are, which keys they see, and their queries. All warps.
  __device__ __forceinline__ void begin_segment() {
    const Segment& segment = mine_.segment;
    publish(mine_.item, ItemRows(p_.call, p_.split, segment));
    const ItemRows& item = mine_.item;
    const Mask mask = segment.sequence.mask(p_.call.score);
    const ExactRanges exact(p_, segment, item);
    const ExactRule rule{p_.call.kv.exact_first, p_.call.kv.exact_last};
    const auto in_item = [&](int64_t key) { return static_cast<int>(clamp(key, item.begin, item.end)); };
    origin_ = item.begin & -Tile::kTokens;
    tiles_ = (item.end - origin_ + Tile::kTokens - 1) / Tile::kTokens;
    clear_begin_ = max_of(in_item(mask.visible(item.last_query).begin), exact.lead_end);
    clear_end_ = min_of(in_item(mask.visible(item.first_query).end), exact.recent_begin);
    auto* ranges = reinterpret_cast<RowRange*>(shared_ + at_.ranges);
    for (int row = static_cast<int>(threadIdx.x); row < 8 * kTiles; row += static_cast<int>(blockDim.x)) {
      const int query = p_.split.group.quotient(item.first_row + min_of(row, item.rows - 1));
      const KeyRange keys = mask.visible(query);
      ranges[row] = {in_item(keys.begin), in_item(keys.end),
                     p_.exact ? in_item(rule.recent(mask, query).begin) : item.end};
    }
    auto* reach = reinterpret_cast<int*>(shared_ + at_.reach);
    if (threadIdx.x == 0) *reach = 0;
    __syncthreads();
    prepare_queries<D, kTiles>(p_, segment, item, shared_, at_);
    __syncthreads();
    reach_ = float_of(static_cast<uint32_t>(*reach));
  }

  __device__ __forceinline__ void load_query(uint32_t (&query)[kTiles][kQueryWords], float (&factor)[kTiles][2]) const {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int b = 0; b < Tile::kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < Tile::kSteps; ++i) {
          const auto words = load_fragment<D>(shared_ + at_.query, n, b, i);
#pragma unroll
          for (int j = 0; j < 2; ++j) query[n][(b * Tile::kSteps + i) * 2 + j] = words.value[j];
        }
#pragma unroll
      for (int c = 0; c < 2; ++c) factor[n][c] = straight() ? scales()[8 * n + 2 * t + c] : 1.f;
    }
  }
  __device__ __forceinline__ const float* scales() const {
    return reinterpret_cast<const float*>(shared_ + at_.scales);
  }
  // Whether a score is a product times its row's factor, so that the exponential can take the factor.
  __device__ __forceinline__ bool straight() const { return p_.plain && !p_.call.kv.k_offsets; }

  __device__ __forceinline__ void attend_tile(int tile, int buffer, bool complete,
                                              const uint32_t (&query)[kTiles][kQueryWords],
                                              const float (&factor)[kTiles][2], LaneStates<kTiles>& state,
                                              float (&acc)[kTiles][kAcc][4]) const {
    using Weights = TileWeights<D, kTiles>;
    const uint32_t k_at = k_lane_ + buffer * 2 * Tile::kBytes, v_at = v_lane_ + buffer * 2 * Tile::kBytes;
    const uint32_t norms = at_.norms + buffer * 2 * Tile::kNormBytes;
    const int first = origin_ + tile * Tile::kTokens;

    float s[Tile::kProducts][kTiles][4] = {};
    KeyCodes<D> keys[Tile::kProducts];
#pragma unroll
    for (int j = 0; j < Tile::kProducts; ++j) keys[j].read(shared_, k_at, j);
#pragma unroll
    for (int i = 0; i < Tile::kSteps; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kProducts; ++j) {
        uint32_t a[4];
        keys[j].operand(shared_, lane4_, i, a);
        const int word = ((Tile::kBlocks == 2 ? j * Tile::kSteps : 0) + i) * 2;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) ptx::mma_16x8x16<Float16>(s[j][n], a, query[n][word], query[n][word + 1]);
      }
    const uint32_t hidden = find_hidden(first, complete);
    float k_norm[Weights::kNorms], v_norm[Weights::kNorms];
    const bool coarse = read_norms(norms + Tile::piece(lane4_ / 16) * (Weights::kNorms * 2), hidden, k_norm, v_norm);

    Weights weights;
    bool rough = coarse, raised = false;
#pragma unroll 1
    while (true) {
      typename Weights::Scores x;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (Tile::kBlocks == 2) {
            x[0][n][i] = fmaf(s[0][n][i], k_norm[i / 2 * 2], s[1][n][i] * k_norm[i / 2 * 2 + 1]);
          } else {
#pragma unroll
            for (int j = 0; j < Tile::kGroups; ++j) x[j][n][i] = s[j][n][i] * k_norm[2 * j + i / 2];
          }
        }
      if (!straight()) finish_scores(first, buffer, x);
      const bool raise = weights.compute(x, factor, v_norm, hidden, state);
      if (!__any_sync(~0u, raise || rough)) break;
      if (__any_sync(~0u, rough)) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < Weights::kNorms; ++i) largest = fmaxf(largest, fabsf(k_norm[i]));
        const bool levels = __any_sync(~0u, !(largest * reach_ <= kReachOfLevels));
        add_rest<D, kTiles>(shared_, at_, k_at, lane4_, levels, s);
        rough = false;
      } else {
        if (raised) break;
        Weights::raise_bases(x, factor, v_norm, hidden, state, acc);
        raised = true;
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) state.sum[n][c] += weights.sum[n][c];

    constexpr int kVWords = Tile::kWidth / 64;  // of 8 codes, that a lane reads of a token's block of V
#pragma unroll
    for (int j = 0; j < Tile::kProducts; ++j) {
      uint32_t p[kTiles][2];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) p[n][h] = ptx::transpose_8x8(weights.packed[j][n][h]);
      Vector<uint32_t, kVWords> row[2][2];  // pieces t and t + 4
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          row[h][c] = load<Vector<uint32_t, kVWords>>(shared_ + (v_at ^ Tile::within(j, h) ^ c * 64) +
                                                      Tile::above(j, h) + c * 1024);
#pragma unroll
      for (int w = 0; w < kVWords; ++w) {
        const TokenPair low = pair_tokens(row[0][0].value[w], row[0][1].value[w]);
        const TokenPair high = pair_tokens(row[1][0].value[w], row[1][1].value[w]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t a[4] = {expand(shared_, low.even, lane4_, k), expand(shared_, low.odd, lane4_, k),
                                 expand(shared_, high.even, lane4_, k), expand(shared_, high.odd, lane4_, k)};
          const int i = (Tile::kBlocks == 2 ? j * 8 : 0) + w * 4 + k;
#pragma unroll
          for (int n = 0; n < kTiles; ++n) ptx::mma_16x8x16<Float16>(acc[n][i], a, p[n][0], p[n][1]);
        }
      }
    }
  }

  // Norms of this lane's tokens, as they are multiplied. Returns whether scores may be too large for fp16 queries.
  __device__ __forceinline__ bool read_norms(uint32_t at, uint32_t hidden,
                                             float (&k_norm)[TileWeights<D, kTiles>::kNorms],
                                             float (&v_norm)[TileWeights<D, kTiles>::kNorms]) const {
    constexpr int kNorms = TileWeights<D, kTiles>::kNorms;
    constexpr uint32_t kAllRows = (1u << 2 * kTiles) - 1;
    const auto k = load<Vector<uint32_t, kNorms / 2>>(shared_ + at);
    const auto v = load<Vector<uint32_t, kNorms / 2>>(shared_ + at + Tile::kNormBytes);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kNorms; ++i) {
      k_norm[i] = half_to_float(static_cast<uint16_t>(k.value[i / 2] >> (i % 2 * 16)));
      v_norm[i] = half_to_float(static_cast<uint16_t>(v.value[i / 2] >> (i % 2 * 16)));
      k_norm[i] += k_norm[i] - k_norm[i];  // an infinite one decodes to +-Inf, whose sum is NaN
      if (hidden && (hidden >> (i / Tile::kBlocks * 2 * kTiles) & kAllRows) == kAllRows) k_norm[i] = v_norm[i] = 0;
      largest = fmaxf(largest, fabsf(k_norm[i]));
    }
    return !(largest * reach_ <= kReachOfQuery);
  }

  // Row factors, page offsets and the cap. `first`: the tile's first token.
  __device__ __forceinline__ void finish_scores(int first, int buffer, float (&x)[Tile::kGroups][kTiles][4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4, piece = Tile::piece(g);
    const bool offsets = p_.call.kv.k_offsets != nullptr;
    float shared_offset[kTiles][2] = {};
    if (offsets && p_.whole_groups)
      score_offsets<D, kTiles>(shared_, at_,
                               at_.offsets + buffer * kOffsetBytes + piece / (8 / Tile::kGroups) * (D * 2) +
                                   t * (Tile::kWidth / 2),
                               shared_offset);
    const auto* offset_scales = reinterpret_cast<const float*>(shared_ + at_.offset_scales);
#pragma unroll
    for (int j = 0; j < Tile::kGroups; ++j) {
      float own_offset[kTiles][4];
      if (offsets && !p_.whole_groups) {
        int64_t page[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int token = first + piece * Tile::kPerLane + 2 * j + h;
          const bool seen = token >= mine_.item.begin && token < mine_.item.end;
          page[h] = seen ? plane_row(p_, mine_.segment.sequence.batch, mine_.item.kv_head, token).page : -1;
        }
        score_scattered_offsets<D, kTiles>(p_, shared_, at_, mine_.item.kv_head, page, own_offset);
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 8 * n + 2 * t + i % 2;
          float y = x[j][n][i] * scales()[row];
          if (offsets) y = fmaf(p_.whole_groups ? shared_offset[n][i % 2] : own_offset[n][i], offset_scales[row], y);
          x[j][n][i] = finish_score(p_.rule, y);
        }
    }
  }

  // One bit for each of the lane's tokens and rows: the row does not read the token from the codes. `complete`: all
  // tokens that some row sees are there.
  __device__ __forceinline__ uint32_t find_hidden(int first, bool complete) const {
    if (first >= clear_begin_ && first + Tile::kTokens <= clear_end_ && complete) return 0;
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    const ItemRows& item = mine_.item;
    const ExactRanges exact(p_, mine_.segment, item);
    const int sequence = mine_.segment.sequence.batch;
    const auto* ranges = reinterpret_cast<const RowRange*>(shared_ + at_.ranges);
    uint32_t hidden = 0;
#pragma unroll 1
    for (int i = 0; i < Tile::kPerLane; ++i) {
      const int token = first + Tile::piece(g) * Tile::kPerLane + i;
      const bool seen = token >= item.begin && token < item.end;
      const bool there = seen && (complete || plane_row(p_, sequence, item.kv_head, token).row >= 0);
      const bool held =
          seen && (token < exact.lead_end || token >= exact.recent_begin) && exact_page(p_, sequence, token) >= 0;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const RowRange keys = ranges[8 * n + 2 * t + c];
          const bool reads = there && token >= keys.begin && token < keys.end &&
                             !(held && (token < exact.lead_end || token >= keys.recent));
          if (!reads) hidden |= 1u << ((i * kTiles + n) * 2 + c);
        }
    }
    return hidden;
  }

  // Merges the warps' results with those of exact tokens, writes them out, and goes on to the next segment.
  __device__ __forceinline__ void end_segment(bool first_segment, LaneStates<kTiles>& state,
                                              float (&acc)[kTiles][kAcc][4]) {
    const Segment& segment = mine_.segment;
    const ItemRows& item = mine_.item;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const auto cta = static_cast<int>(blockIdx.x);
    const int slot = p_.split.unit_is_split ? segment.item_base + segment.lo : 2 * cta + !first_segment;
    const bool exact = p_.exact && ExactRanges(p_, segment, item).any(item);
    auto* states = reinterpret_cast<SoftmaxState<Binary>*>(shared_ + at_.states);
    __syncthreads();  // what the warps before parked has been read, and the table's unused halves are free
    park<D, kTiles>(shared_, at_, warp, p_.rows, state, acc, kLevelUnit<Tile::kWidth>);
    __syncthreads();
    const auto finish = [&](int row, int column, const SoftmaxState<Binary>& total, const float (&x)[8]) {
      if (row >= item.rows) return;
      const int query = p_.split.group.quotient(item.first_row + row);
      const int head = item.first_row + row - query * p_.split.group_size();
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 o{x[i], x[i + 1], x[i + 2], x[i + 3]};
        const int d = column + i;
        if (segment.whole()) {
          finish_values(p_.call, segment.sequence.batch, segment.sequence.q_begin + query,
                        item.kv_head * p_.split.group_size() + head, d, total, o);
        } else {
          *reinterpret_cast<float4*>(p_.partials.row(slot, row) + d) = o;
          if (d == 0) p_.partials.state(slot, row) = total;
        }
      }
    };
    if (!exact) {
      merge_parked<D, kTiles>(shared_, at_, p_.rows, true, finish);
    } else {
      merge_parked<D, kTiles>(shared_, at_, p_.rows, true,
                              [&](int row, int column, const SoftmaxState<Binary>& total, const float (&x)[8]) {
#pragma unroll
                                for (int i = 0; i < 8; i += 4)
                                  *parked_at<D>(shared_, at_.parked, row, row, column + i) = {x[i], x[i + 1], x[i + 2],
                                                                                              x[i + 3]};
                                if (column == 0) states[row] = total;
                              });
      __syncthreads();
      if (warp > 0) {  // warp 0's place holds what the codes gave
        LaneStates<kTiles> of_exact;
        float sums[kTiles][kAcc][4] = {};
        const auto* ranges = reinterpret_cast<const RowRange*>(shared_ + at_.ranges);
        if (p_.call.query.dtype == Dtype::kFloat16)
          ExactTokens<Float16, D, kTiles>(p_, segment, item, ranges).attend(warp - 1, warps_ - 1, of_exact, sums);
        else
          ExactTokens<Bfloat16, D, kTiles>(p_, segment, item, ranges).attend(warp - 1, warps_ - 1, of_exact, sums);
        park<D, kTiles>(shared_, at_, warp, p_.rows, of_exact, sums, 1);
      }
      __syncthreads();
      merge_parked<D, kTiles>(shared_, at_, p_.rows, false, finish);
    }
    publish(mine_.segment, next_segment(p_.call, p_.split, segment));
  }

  // Keeps what follows from the lane's number in a register: else it is worked out again for every tile.
  static __device__ __forceinline__ uint32_t keep(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
  }

  const CodeParams& p_;
  unsigned char* shared_;
  int warps_;
  uint32_t lane4_, k_lane_, v_lane_;  // 4 * lane; where this lane's codes of K and V are in the first buffer
  const SharedPlan& at_;
  CodeSegments& mine_;
  int origin_ = 0, tiles_ = 0, clear_begin_ = 0, clear_end_ = 0;  // of the segment; tokens
  float reach_ = 0;                                               // largest length of a query times the scale
};

template <int D, int kTiles, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1) code_attention_kernel(const __grid_constant__ CodeParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  ptx::allow_dependents();
  CodeKernel<D, kTiles>(p, shared).run();
}

}  // namespace flashq::cuda
