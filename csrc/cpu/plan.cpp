#include "cpu/plan.h"

#include <algorithm>
#include <new>

namespace flashq::cpu {
namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t kMinBlockRows = 48;
constexpr int64_t kMostPartials = int64_t{1} << 48;  // no allocator has room for so many
constexpr double kSmallWork = 50e3;                  // ns; waking a sleeping pool costs about as much

struct Totals {
  int64_t sequences = 0, units = 0, partials = 0, counters = 0;
  double work = 0;
};

Sequence describe(const AttentionParams& p, const PlanOptions& options, int64_t b, int64_t block_rows) {
  const QueryView& q = p.query;
  const int64_t group = q.q_heads / q.kv_heads;
  Sequence s{};
  s.batch = b;
  s.mask = {.q_len = q.q_len,
            .kv_len = options.page_size,
            .kv_start = 0,
            .window_left = p.score.window_left,
            .window_right = p.score.window_right,
            .causal = p.score.causal};
  if (q.cu_seqlens_q.given()) {
    s.q_begin = q.cu_seqlens_q(b);
    s.mask.q_len = q.cu_seqlens_q(b + 1) - s.q_begin;
  }
  if (options.cu_seqlens_k.given()) {
    s.k_begin = options.cu_seqlens_k(b);
    s.mask.kv_len = options.cu_seqlens_k(b + 1) - s.k_begin;
  }
  if (p.seqlens.given()) s.mask.kv_len = p.seqlens(b);
  if (p.kv_start.given()) s.mask.kv_start = p.kv_start(b);
  s.rows = s.mask.q_len * group;
  s.few_rows = s.rows <= options.few_rows;
  s.block_rows = s.few_rows ? s.rows : block_rows;
  s.block_heads = s.few_rows ? std::min(options.few_rows_heads, q.kv_heads) : 1;
  return s;
}

// Rows past the last sequence, as a sequence without keys.
Sequence describe_padding(const AttentionParams& p, int64_t begin, int64_t block_rows) {
  Sequence s{};
  s.q_begin = begin;
  s.mask = {.q_len = p.query.total_tokens - begin,
            .kv_len = 0,
            .kv_start = 0,
            .window_left = kUnlimited,
            .window_right = kUnlimited,
            .causal = false};
  s.rows = s.mask.q_len * (p.query.q_heads / p.query.kv_heads);
  s.block_rows = block_rows;
  s.block_heads = 1;
  s.padding = true;
  return s;
}

// The splits, the cost and the places in the totals.
void add(const AttentionParams& p, Sequence& s, Totals& totals) {
  const QueryView& q = p.query;
  const KeyRange seen = s.mask.visible(0, s.mask.q_len - 1);
  s.splits = plan_splits(seen, s.rows, s.padding ? 0 : p.kv_chunk);
  s.block_rows = std::min(s.block_rows, s.rows);
  s.row_blocks = ceil_div(s.rows, s.block_rows);
  s.head_blocks = ceil_div(q.kv_heads, s.block_heads);
  s.first_unit = totals.units;
  s.first_partial = totals.partials;
  s.first_counter = totals.counters;
  totals.sequences += 1;
  const int64_t rows = q.kv_heads * s.rows;
  const bool endless = s.splits.count > kMostPartials / rows;
  const int64_t units = endless ? kMostPartials : s.head_blocks * s.row_blocks * s.splits.count;
  totals.units = min_of(totals.units + units, kMostPartials);
  if (s.splits.count > 1) {
    totals.counters += s.head_blocks * s.row_blocks;
    totals.partials = min_of(totals.partials + (endless ? kMostPartials : rows * s.splits.count), kMostPartials);
  }
  // Per key and KV head: 4 D FLOP a row at about 60 a nanosecond, 4 D bytes at about 20.
  const double keys = static_cast<double>(seen.size()), dim = static_cast<double>(q.head_dim);
  const double row = keys * dim * 4 / 60 + dim, read = keys * dim * 4 / 20;
  totals.work += static_cast<double>(q.kv_heads) * (row * static_cast<double>(s.rows) + read);
  s.unit_cost = (row * static_cast<double>(s.block_rows) + read) * static_cast<double>(s.block_heads) /
                static_cast<double>(s.splits.count);
}

// Calls f(sequence) for every sequence that has rows, in the order of the batch.
template <class F> void for_each(const AttentionParams& p, const PlanOptions& options, int64_t block_rows, F f) {
  const QueryView& q = p.query;
  if (q.total_tokens == 0) return;  // however many sequences
  for (int64_t b = 0; b < q.batch; ++b) {
    Sequence s = describe(p, options, b, block_rows);
    if (s.rows > 0) f(s);
  }
  if (!q.cu_seqlens_q.given()) return;
  Sequence padding = describe_padding(p, q.cu_seqlens_q(q.batch), block_rows);
  if (padding.rows > 0) f(padding);
}

Totals survey(const AttentionParams& p, const PlanOptions& options, int64_t block_rows) {
  Totals totals;
  for_each(p, options, block_rows, [&](Sequence& s) { add(p, s, totals); });
  return totals;
}

// Smaller blocks where there would be too few units for the workers: they pack K and V more often, and idle less.
int64_t choose_block_rows(const AttentionParams& p, const PlanOptions& options, int32_t workers) {
  int64_t rows = options.block_rows;
  while (rows / 2 >= kMinBlockRows && survey(p, options, rows).units < 4 * int64_t{workers}) rows /= 2;
  return rows;
}

struct Layout {
  int64_t next = 0, sequences = 0, arrived = 0, partials = 0, workers = 0, bytes = 0;

  Layout(const AttentionParams& p, const Totals& totals, int64_t worker_bytes, int32_t worker_count) {
    const int64_t stride = padded_dim(p.query.head_dim) + 16;
    const auto take = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += round_up(size, kAlign);
      return at;
    };
    next = take(kAlign);
    sequences = take(totals.sequences * int64_t{sizeof(Sequence)});
    arrived = take(totals.counters * int64_t{sizeof(int32_t)});
    partials = take(totals.partials * stride * int64_t{sizeof(float)});
    workers = take(min_of<int64_t>(worker_count, totals.units) * round_up(worker_bytes, kAlign));
  }
};

Unit locate(const Plan& plan, int64_t index) {
  const Sequence* s = std::upper_bound(plan.sequences, plan.sequences + plan.sequence_count, index,
                                       [](int64_t i, const Sequence& sequence) { return i < sequence.first_unit; }) -
                      1;
  index -= s->first_unit;
  const int64_t split = index % s->splits.count;
  const int64_t head_block = index / s->splits.count % s->head_blocks;
  const int64_t row_block = s->row_blocks - 1 - index / s->splits.count / s->head_blocks;  // longest rows first

  Unit u{};
  u.sequence = s;
  u.head = head_block * s->block_heads;
  u.heads = std::min(s->block_heads, plan.kv_heads - u.head);
  u.row = row_block * s->block_rows;
  u.rows = std::min(s->block_rows, s->rows - u.row);
  u.split = split;
  u.keys = intersect(s->mask.visible(u.row / plan.group, (u.row + u.rows - 1) / plan.group), s->splits.range(split));
  u.counter = s->first_counter + head_block * s->row_blocks + row_block;
  return u;
}

}  // namespace

int64_t plan_scratch_bytes(const AttentionParams& p, const PlanOptions& options, int64_t worker_bytes,
                           int32_t workers) {
  return Layout(p, survey(p, options, choose_block_rows(p, options, workers)), worker_bytes, workers).bytes;
}

Plan make_plan(const AttentionParams& p, const PlanOptions& options, int64_t worker_bytes, int32_t workers) {
  const int64_t block_rows = choose_block_rows(p, options, workers);
  Totals totals = survey(p, options, block_rows);
  const Layout layout(p, totals, worker_bytes, workers);
  auto* base = static_cast<std::byte*>(p.scratch);
  auto* sequences = reinterpret_cast<Sequence*>(base + layout.sequences);

  Sequence* end = sequences;
  Totals unordered;
  for_each(p, options, block_rows, [&](Sequence& s) {
    add(p, s, unordered);
    new (end++) Sequence(s);
  });
  std::sort(sequences, end, [](const Sequence& a, const Sequence& b) {
    return a.unit_cost != b.unit_cost ? a.unit_cost > b.unit_cost : a.first_unit < b.first_unit;
  });
  int64_t units = 0;
  for (Sequence* s = sequences; s != end; ++s) {
    s->first_unit = units;
    units += s->head_blocks * s->row_blocks * s->splits.count;
  }

  Plan plan{};
  plan.group = p.query.kv_heads ? p.query.q_heads / p.query.kv_heads : 1;
  plan.kv_heads = p.query.kv_heads;
  plan.width = padded_dim(p.query.head_dim);
  plan.sequences = sequences;
  plan.sequence_count = end - sequences;
  plan.units = units;
  plan.work = totals.work;
  plan.next = new (base + layout.next) int64_t{0};
  plan.arrived = reinterpret_cast<int32_t*>(base + layout.arrived);
  std::fill_n(plan.arrived, totals.counters, 0);
  plan.partials = reinterpret_cast<float*>(base + layout.partials);
  plan.worker_scratch = base + layout.workers;
  plan.worker_bytes = round_up(worker_bytes, kAlign);
  return plan;
}

void run_units(const Plan& plan, const Launch& launch, void (*run)(void*, const Unit&, std::byte*), void* context) {
  if (plan.units == 0) return;
  struct Region {
    const Plan& plan;
    void (*run)(void*, const Unit&, std::byte*);
    void* context;
  } region{plan, run, context};
  const auto body = [](void* self, int32_t worker) {
    const Region& r = *static_cast<Region*>(self);
    std::byte* scratch = r.plan.worker_scratch + worker * r.plan.worker_bytes;
    for (int64_t i; (i = __atomic_fetch_add(r.plan.next, 1, __ATOMIC_RELAXED)) < r.plan.units;)
      r.run(r.context, locate(r.plan, i), scratch);
  };
  const int64_t wanted = plan.work < kSmallWork ? 1 : std::min<int64_t>(launch.workers, plan.units);
  if (wanted <= 1 || !launch.parallel)
    body(&region, 0);
  else
    launch.parallel(static_cast<int32_t>(wanted), body, &region);
}

}  // namespace flashq::cpu
