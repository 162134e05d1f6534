// Paged attention, one KV head at a time: its query heads share every load.
//
// A block holds BLOCK_SIZE tokens.  keys [blocks, kv_heads, key_dims, BLOCK_SIZE], values [blocks, kv_heads, BLOCK_SIZE,
// head_pad] of the model's dtype; head_pad is value_dim rounded up to whole vectors. Where bfloat16 is multiplied in pairs,
// keys are [.., key_dims / 2, BLOCK_SIZE, 2] and values [.., BLOCK_SIZE / 2, head_pad, 2], so that a load is of pairs, and
// 16 rows are an operand of AMX.
//
// A context is computed in splits of SPLIT_TOKENS positions, in three passes: products with the keys, of which each query's
// largest is taken while they are in the L1 cache; exponentials; products with the values. A query's result does not depend
// on the other queries. The splits are merged in order (as Flash-Decoding does, Dao et al. 2023): threads may compute those
// of a long sequence at the same time, with the same sums. Probabilities are rounded to the model's dtype before the product
// with values, as in torch's kernels. Scores are rounded only where Hugging Face computes them step by step ("eager"
// attention: soft caps, BLOOM's bias).
#pragma once
#include <algorithm>
#include <type_traits>

#include "bfloat16.h"
#include "team.h"

constexpr int BLOCK_SIZE = 32;
constexpr int BLOCK_VECS = BLOCK_SIZE / LANES;
constexpr int SPLIT_TOKENS = 512;
constexpr int QUERIES = LANES == 16 ? 6 : 3;  // computed together, so that their sums fill the registers
constexpr float LOG2_E = 1.44269504088896341f;
constexpr int64_t SCORES_STRIDE = SPLIT_TOKENS + 16;  // of a query's row: with a power of 2, rows would share cache sets

template <typename T> constexpr bool IN_PAIRS = PAIRS && std::is_same_v<std::remove_const_t<T>, bf16>;
template <typename T> static inline bool in_tiles() { return IN_PAIRS<T> && tiles_ready(); }
constexpr int MOST_QUERIES = TILES ? 32 : QUERIES;
// Queries that `attend_split` takes at a time.
template <typename T> static inline int queries_at_once() { return in_tiles<T>() ? MOST_QUERIES : QUERIES; }
// Queries that `attend` takes: with tiles, a split's keys and values come from the L2 cache for all but the first of them. A
// multiple of every `queries_at_once`.
constexpr int HELD_QUERIES = TILES ? 96 : QUERIES;

// Elements of a head's block: dimension i of the key or value of token t.
template <typename T> static inline T* key_at(T* keys, int64_t i, int64_t t) {
  return IN_PAIRS<T> ? keys + (i / 2 * BLOCK_SIZE + t) * 2 + i % 2 : keys + i * BLOCK_SIZE + t;
}
template <typename T> static inline T* value_at(T* values, int64_t head_pad, int64_t i, int64_t t) {
  return IN_PAIRS<T> ? values + (t / 2 * head_pad + i) * 2 + t % 2 : values + t * head_pad + i;
}
// Dimensions of a key in the cache: an even number.
static inline int64_t key_dims(int64_t key_dim) { return (key_dim + 1) / 2 * 2; }

struct AttentionShape {
  int64_t kv_heads, key_dim, value_dim, head_pad;
  float scale, softcap;
  int64_t window;  // as LayerSpec's
  bool alibi_bfloat16;
};

// One query head of one token.
struct Query {
  const float* q;   // [key_dim]
  float* out;       // [value_dim]
  int64_t position;
  float slope;      // ALiBi's; 0: none
  float* parts;     // the sums of each of its splits, as SplitSums::save writes them; null: they are merged
  const float* sink;  // the logit of a key without a value; null: none
};

// The first token that one at `position` sees.
static inline int64_t first_seen(int64_t window, int64_t position) {
  if (window < 0) return position / -window * -window;
  return window ? std::max<int64_t>(position - window + 1, 0) : 0;
}

// Splits that a token at `position` sees.
static inline Range splits_seen(const AttentionShape& s, int64_t position) {
  return {first_seen(s.window, position) / SPLIT_TOKENS, position / SPLIT_TOKENS + 1};
}
// From the first to the last of `splits` that any of `count` queries sees.
static inline Range splits_seen(const AttentionShape& s, const Query* queries, int count, Range splits) {
  Range seen{INT64_MAX, 0};
  for (int n = 0; n < count; n++) {
    const Range one = splits_seen(s, queries[n].position);
    seen = {std::min(seen.first, one.first), std::max(seen.last, one.last)};
  }
  return {std::max(splits.first, seen.first), std::min(splits.last, seen.last)};
}

// Of a query and the tokens of a split: the largest score, the sum of exp(score - largest), and that of its products with
// the values.
struct SplitSums {
  float max_score, total;
  float* out;  // [head_pad]

  static int64_t floats(int64_t head_pad) { return head_pad + LANES; }
  void save(float* to, int64_t head_pad) const {
    to[0] = max_score, to[1] = total;
    std::memcpy(to + LANES, out, head_pad * sizeof(float));
  }
  static SplitSums saved(float* from) { return {from[0], from[1], from + LANES}; }

  // Not inlined, so that merges are compiled once.
  __attribute__((noinline)) void merge(const SplitSums& next, int64_t head_pad) {
    if (next.max_score == -INFINITY) return;
    const float new_max = std::max(max_score, next.max_score);
    const float own = exp(splat(max_score - new_max))[0], other = exp(splat(next.max_score - new_max))[0];
    total = fused_multiply_add(total, own, unfused(next.total * other));
    for (int64_t i = 0; i < head_pad; i += LANES) store(out + i, load(out + i) * own + unfused(load(next.out + i) * other));
    max_score = new_max;
  }
};

// ALiBi's bias of keys at positions `token`, rounded as DecoderSpec.alibi_bfloat16 says.
template <typename T> static inline Vec alibi(const AttentionShape& s, float slope, Vec token) {
  if (!s.alibi_bfloat16) return rounded<T>(slope * token);
  return rounded<T>(to_bf16(to_bf16(slope / s.scale) * to_bf16(token)) * s.scale);
}
template <typename T> static inline Vec capped(const AttentionShape& s, Vec dot) {
  Vec score = rounded<T>(rounded<T>(rounded<T>(dot) * s.scale) / s.softcap);
  return rounded<T>(rounded<T>(tanh(score)) * s.softcap);
}

// A thread's memory in `attend`.
struct AttentionWork {
  float* all;       // sums of the splits so far, [HELD_QUERIES, head_pad]
  float* sums;      // of a split, [MOST_QUERIES, head_pad]
  float* scores;    // [MOST_QUERIES, SCORES_STRIDE], then the probabilities: floats, or pairs in the first half of a row
  uint32_t* pairs;  // of the queries, [HELD_QUERIES, pairs_stride]

  // Of a query in pairs: whole tiles, of which the rest is 0.
  static int64_t pairs_stride(int64_t key_dim) { return (key_dim + 31) / 32 * 16; }
  static int64_t floats(int64_t key_dim, int64_t head_pad) {
    return MOST_QUERIES * (head_pad + SCORES_STRIDE) + HELD_QUERIES * (head_pad + pairs_stride(key_dim));
  }
  AttentionWork(float* base, int64_t head_pad)
      : all(base),
        sums(all + HELD_QUERIES * head_pad),
        scores(sums + MOST_QUERIES * head_pad),
        pairs((uint32_t*)(scores + MOST_QUERIES * SCORES_STRIDE)) {}
};

// The blocks of a split that some queries see, as one KV head has them.
template <typename T> struct Context {
  const AttentionShape& shape;
  const T *keys, *values;
  const int32_t* table;
  int64_t kv_head;
  Range tokens;  // tokens.first: of a block

  int64_t first_block() const { return tokens.first / BLOCK_SIZE; }
  int64_t blocks() const { return (tokens.size() + BLOCK_SIZE - 1) / BLOCK_SIZE; }
  int64_t at(int64_t block) const { return table[first_block() + block] * shape.kv_heads + kv_head; }
  const T* key(int64_t block) const { return keys + at(block) * key_dims(shape.key_dim) * BLOCK_SIZE; }
  const T* value(int64_t block) const { return values + at(block) * BLOCK_SIZE * shape.head_pad; }
  // Tokens of a block: the rest of the last one may never have been written.
  int64_t tokens_of(int64_t block) const { return std::min<int64_t>(BLOCK_SIZE, tokens.size() - block * BLOCK_SIZE); }
};

// Calls body(N, first query) for runs of N of `count` queries; N is a compile-time constant.
template <typename Body> static inline void in_runs(int count, Body body) {
  int done = 0;
  for (; count - done >= QUERIES; done += QUERIES) body(std::integral_constant<int, QUERIES>(), done);
  for (; count - done >= 3; done += 3) body(std::integral_constant<int, 3>(), done);
  if (count - done == 2) body(std::integral_constant<int, 2>(), done);
  if (count - done == 1) body(std::integral_constant<int, 1>(), done);
}

// Products of N queries and the keys of a block.  pairs: the queries in pairs.  next: the keys of the next block, which may be
// in another page, where processors do not prefetch them.  products: their rows, SCORES_STRIDE apart.
template <int N, typename T>
static __attribute__((noinline)) void key_products(const AttentionShape& s, const Query* queries, const uint32_t* pairs, const T* keys, const T* next,
                                                   float* products) {
  const int64_t dims = s.key_dim;
  Vec acc[N][BLOCK_VECS];
  for (int n = 0; n < N; n++)  // GCC 12 would make a call of memset of `= {}`
    for (int j = 0; j < BLOCK_VECS; j++) acc[n][j] = Vec{};
#if PAIRS
  if constexpr (IN_PAIRS<T>) {
    const int64_t stride = AttentionWork::pairs_stride(dims);
    for (int64_t d = 0; d < (dims + 1) / 2; d++) {
      VecU key[BLOCK_VECS];
      for (int j = 0; j < BLOCK_VECS; j++) __builtin_prefetch(next + (d * BLOCK_SIZE + j * LANES) * 2);
      for (int j = 0; j < BLOCK_VECS; j++) key[j] = *(const VecUAny*)(keys + (d * BLOCK_SIZE + j * LANES) * 2);
      for (int n = 0; n < N; n++)
        for (int j = 0; j < BLOCK_VECS; j++) acc[n][j] = dot_pairs(acc[n][j], splat(pairs[n * stride + d]), key[j]);
    }
  } else
#endif
    for (int64_t d = 0; d < dims; d++) {
      Vec key[BLOCK_VECS];
      for (int j = 0; j < BLOCK_VECS; j++) key[j] = load(keys + d * BLOCK_SIZE + j * LANES);
      for (int n = 0; n < N; n++)
        for (int j = 0; j < BLOCK_VECS; j++) acc[n][j] += queries[n].q[d] * key[j];
    }
  for (int n = 0; n < N; n++)
    for (int j = 0; j < BLOCK_VECS; j++) store(products + n * SCORES_STRIDE + j * LANES, acc[n][j]);
}

// A query in pairs, the rest of its last tile 0.
static inline void pairs_of_query(const float* q, int64_t dims, uint32_t* pairs) {
  int64_t d = 0;
  for (; d + 2 * LANES <= dims; d += 2 * LANES) *(VecUAny*)(pairs + d / 2) = pairs_in_order(load(q + d), load(q + d + LANES));
  for (; d < 2 * AttentionWork::pairs_stride(dims); d += 2) pairs[d / 2] = pair_of(d < dims ? q[d] : 0.0f, d + 1 < dims ? q[d + 1] : 0.0f);
}

// Whether a query's products are its scores but for the scale, by which `to_probabilities` multiplies them.
static inline bool scales_late(const AttentionShape& s, const Query& query) { return s.scale > 0 && !s.softcap && !query.slope; }

// A query's products with the keys of a block, whose first token is `begin`, become its scores: scaled unless that is late,
// capped, biased; -inf for tokens that it does not see. Gives the largest of each lane and `top`.
template <typename T> static Vec to_scores(const AttentionShape& shape, const Query& query, int64_t begin, float* row, Vec top) {
  const AttentionShape s = shape;  // a copy: a store of a float cannot change it
  const int32_t position = int32_t(query.position), first = int32_t(first_seen(s.window, position));
  const float slope = query.slope;
  const bool late = scales_late(s, query);
  VecI token;
  for (int i = 0; i < LANES; i++) token[i] = int32_t(begin + i);
  for (int t = 0; t < BLOCK_SIZE; t += LANES, token += LANES) {
    Vec score = s.softcap ? capped<T>(s, load(row + t)) : late ? load(row + t) : unfused(load(row + t) * s.scale);
    if (slope) score += alibi<T>(s, slope, __builtin_convertvector(token, Vec));
    if (slope && !s.alibi_bfloat16) score = rounded<T>(score);
    if (s.window || begin + t + LANES - 1 > position) {
      VecI seen = token <= position;
      if (s.window) seen &= token >= first;
      score = seen ? score : splat(-INFINITY);
    }
    store(row + t, score);
    top = max(top, score);
  }
  return top;
}

// Scores of `count` tokens become exp(scale · score - max_score), rounded to the model's dtype, as floats or pairs; gives their
// sum before they are rounded.
template <typename T> static float to_probabilities(float* row, int64_t count, float scale, float max_score) {
  if (max_score == -INFINITY) {  // no token is seen
    std::memset(row, 0, count * sizeof(float));
    return 0;
  }
  Vec total[BLOCK_VECS] = {};
  for (int64_t t = 0; t < count; t += BLOCK_SIZE) {
    Vec e[BLOCK_VECS];
    for (int j = 0; j < BLOCK_VECS; j++) {
      const Vec score = load(row + t + j * LANES);
      if constexpr (std::is_same_v<T, bf16>)
        e[j] = exp2_for_bf16(score * (scale * LOG2_E) - max_score * LOG2_E);
      else
        e[j] = exp(unfused(score * scale) - max_score);
      total[j] += e[j];
      if (!IN_PAIRS<T>) store(row + t + j * LANES, rounded<T>(e[j]));
    }
#if PAIRS
    if constexpr (IN_PAIRS<T>) *(VecUAny*)(row + t / 2) = rounded_pairs(e[0], e[1]);
#endif
  }
  for (int j = 1; j < BLOCK_VECS; j++) total[0] += total[j];
  return sum(total[0]);
}

// out[n] [C vectors] = the sum over tokens of p[n][token] · value[token], of dimensions from `dim` on.  p: rows of SCORES_STRIDE.
template <int N, int C, typename T>
static __attribute__((noinline)) void value_products(const Context<T>& context, const float* p, int64_t dim, float* out) {
  const int64_t head_pad = context.shape.head_pad, blocks = context.blocks();
  Vec acc[N][C] = {};
  for (int64_t block = 0; block < blocks; block++) {
    const T* values = value_at(context.value(block), head_pad, dim, 0);
    const int64_t tokens = context.tokens_of(block);
#if PAIRS
    if constexpr (IN_PAIRS<T>) {
      const uint32_t* pairs = (const uint32_t*)p + block * BLOCK_SIZE / 2;
      for (int64_t t = 0; t < (tokens + 1) / 2; t++) {
        VecU value[C];
        for (int c = 0; c < C; c++) value[c] = *(const VecUAny*)(values + (t * head_pad + c * LANES) * 2);
        for (int n = 0; n < N; n++)
          for (int c = 0; c < C; c++) acc[n][c] = dot_pairs(acc[n][c], splat(pairs[n * SCORES_STRIDE + t]), value[c]);
      }
    } else
#endif
      for (int64_t t = 0; t < tokens; t++) {
        Vec value[C];
        for (int c = 0; c < C; c++) value[c] = load(values + t * head_pad + c * LANES);
        for (int n = 0; n < N; n++)
          for (int c = 0; c < C; c++) acc[n][c] += p[n * SCORES_STRIDE + block * BLOCK_SIZE + t] * value[c];
      }
  }
  for (int n = 0; n < N; n++)
    for (int c = 0; c < C; c++) store(out + n * head_pad + dim + c * LANES, acc[n][c]);
}

#if TILES
// `key_products` of 16 queries, or of 32 (TWO), in tiles of [16 queries, 16 tokens]: with 32, four products for four loads.
template <bool TWO> static void key_tiles(const AttentionShape& s, const uint32_t* pairs, const bf16* keys, float* products) {
  const int64_t stride = AttentionWork::pairs_stride(s.key_dim), key_pairs = key_dims(s.key_dim) / 2;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t d = 0; d < key_pairs; d += TILE) {
    const TileRows first(keys + d * BLOCK_SIZE * 2, BLOCK_SIZE * 4, key_pairs - d), second(keys + (d * BLOCK_SIZE + TILE) * 2, BLOCK_SIZE * 4, key_pairs - d);
    _tile_loadd(4, pairs + d, stride * 4);
    _tile_loadd(5, first.base, first.stride);
    _tile_loadd(6, second.base, second.stride);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (TWO) {
      _tile_loadd(7, pairs + TILE * stride + d, stride * 4);
      _tile_dpbf16ps(2, 7, 5);
      _tile_dpbf16ps(3, 7, 6);
    }
  }
  _tile_stored(0, products, SCORES_STRIDE * 4);
  _tile_stored(1, products + TILE, SCORES_STRIDE * 4);
  if constexpr (TWO) {
    _tile_stored(2, products + TILE * SCORES_STRIDE, SCORES_STRIDE * 4);
    _tile_stored(3, products + TILE * SCORES_STRIDE + TILE, SCORES_STRIDE * 4);
  }
}

// `value_products` of 16 queries, in C tiles of [16 queries, 16 dimensions]; or of 32 (TWO), C at most 2.
template <bool TWO, int C> static void value_tiles(const Context<bf16>& context, const float* p, int64_t dim, float* out) {
  static_assert(!TWO || C <= 2, "there are 8 tiles");
  const int64_t head_pad = context.shape.head_pad, blocks = context.blocks();
  _tile_zero(0);
  if (C > 1) _tile_zero(1);
  if (C > 2 || TWO) _tile_zero(2);
  if (C > 2 || TWO) _tile_zero(3);
  for (int64_t block = 0; block < blocks; block++) {
    const bf16* values = value_at(context.value(block), head_pad, dim, 0);
    const int64_t rows = (context.tokens_of(block) + 1) / 2;
    const auto of_dims = [&](int c) { return TileRows(values + c * TILE * 2, head_pad * 4, rows); };
    const TileRows first = of_dims(0);
    _tile_loadd(4, p + block * TILE, SCORES_STRIDE * 4);
    _tile_loadd(5, first.base, first.stride);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (TWO) {
      _tile_loadd(7, p + TILE * SCORES_STRIDE + block * TILE, SCORES_STRIDE * 4);
      _tile_dpbf16ps(2, 7, 5);
    }
    if constexpr (C > 1) {
      const TileRows second = of_dims(1);
      _tile_loadd(6, second.base, second.stride);
      _tile_dpbf16ps(1, 4, 6);
      if constexpr (TWO) _tile_dpbf16ps(3, 7, 6);
    }
    if constexpr (C > 2) {
      const TileRows third = of_dims(2), fourth = of_dims(3);
      _tile_loadd(5, third.base, third.stride);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, fourth.base, fourth.stride);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  const auto at = [&](int query, int c) { return out + query * head_pad + dim + c * TILE; };
  _tile_stored(0, at(0, 0), head_pad * 4);
  if (C > 1) _tile_stored(1, at(0, 1), head_pad * 4);
  if (C > 2 || TWO) _tile_stored(2, TWO ? at(TILE, 0) : at(0, 2), head_pad * 4);
  if (C > 2 || (TWO && C > 1)) _tile_stored(3, TWO ? at(TILE, 1) : at(0, 3), head_pad * 4);
}
#endif

// Calls body(C, dimension) for runs of C vectors of a head, at most MOST, 4 or 2; C is a compile-time constant.
template <int MOST = 4, typename Body> static inline void over_dims(int64_t head_pad, Body body) {
  int64_t dim = 0;
  if constexpr (MOST == 4)
    for (; dim + 4 * LANES <= head_pad; dim += 4 * LANES) body(std::integral_constant<int, 4>(), dim);
  for (; dim + 2 * LANES <= head_pad; dim += 2 * LANES) body(std::integral_constant<int, 2>(), dim);
  if (dim < head_pad) body(std::integral_constant<int, 1>(), dim);
}

// `count` queries, at most `queries_at_once`, and the tokens of a split.  pairs: the queries in pairs.  sums[n].out: rows of
// [MOST_QUERIES, head_pad].
template <typename T>
static void attend_split(const AttentionShape& s, const Query* queries, const uint32_t* pairs, int count, int64_t kv_head, int64_t split, const T* keys,
                         const T* values, const int32_t* table, const AttentionWork& work, SplitSums* sums) {
  int64_t first = INT64_MAX, last = 0;             // tokens that any query sees
  int64_t seen_by_all = 0, position = INT64_MAX;  // from and to the tokens that every query sees
  bool late = true;
  for (int n = 0; n < count; n++) {
    const int64_t begin = first_seen(s.window, queries[n].position);
    last = std::max(last, queries[n].position), position = std::min(position, queries[n].position);
    first = std::min(first, begin), seen_by_all = std::max(seen_by_all, begin);
    late &= scales_late(s, queries[n]);
  }
  first = std::max(first, split * SPLIT_TOKENS) / BLOCK_SIZE * BLOCK_SIZE, last = std::min(last + 1, (split + 1) * SPLIT_TOKENS);
  const Context<T> context{s, keys, values, table, kv_head, {first, last}};
  const int64_t blocks = context.blocks();
  Vec top[MOST_QUERIES];
  for (int n = 0; n < count; n++) top[n] = splat(-INFINITY);
  for (int64_t block = 0; block < blocks; block++) {
    float* products = work.scores + block * BLOCK_SIZE;
    const auto in_vectors = [&] {
      const T* next = context.key(std::min(block + 1, blocks - 1));
      in_runs(count, [&](auto n, int from) {
        key_products<n>(s, queries + from, pairs + from * AttentionWork::pairs_stride(s.key_dim), context.key(block), next, products + from * SCORES_STRIDE);
      });
    };
#if TILES
    if constexpr (IN_PAIRS<T>) {
      if (in_tiles<T>())
        (count > TILE ? key_tiles<true> : key_tiles<false>)(s, pairs, context.key(block), products);
      else
        in_vectors();
    } else
#endif
      in_vectors();
    const int64_t begin = first + block * BLOCK_SIZE;
    if (late && begin >= seen_by_all && begin + BLOCK_SIZE - 1 <= position) {  // every query sees the whole block
      for (int n = 0; n < count; n++)
        for (int j = 0; j < BLOCK_VECS; j++) top[n] = max(top[n], load(products + n * SCORES_STRIDE + j * LANES));
      continue;
    }
    for (int n = 0; n < count; n++) top[n] = to_scores<T>(s, queries[n], begin, products + n * SCORES_STRIDE, top[n]);
  }
  for (int n = 0; n < count; n++) {
    const float scale = scales_late(s, queries[n]) ? s.scale : 1.0f;
    sums[n].max_score = unfused(largest(top[n]) * scale);
    sums[n].total = to_probabilities<T>(work.scores + n * SCORES_STRIDE, blocks * BLOCK_SIZE, scale, sums[n].max_score);
  }
#if TILES
  if constexpr (IN_PAIRS<T>)
    if (in_tiles<T>()) {
      if (count > TILE)
        over_dims<2>(s.head_pad, [&](auto c, int64_t dim) { value_tiles<true, c>(context, work.scores, dim, sums[0].out); });
      else
        over_dims(s.head_pad, [&](auto c, int64_t dim) { value_tiles<false, c>(context, work.scores, dim, sums[0].out); });
      return;
    }
#endif
  in_runs(count, [&](auto n, int from) {
    over_dims(s.head_pad, [&](auto c, int64_t dim) { value_products<n, c>(context, work.scores + from * SCORES_STRIDE, dim, sums[from].out); });
  });
}

template <typename T> static inline void write_output(const AttentionShape& s, const Query& query, const SplitSums& sums) {
  const float total = query.sink ? sums.total + exp(splat(*query.sink - sums.max_score))[0] : sums.total;
  for (int64_t d = 0; d < s.value_dim; d++) query.out[d] = rounded<T>(sums.out[d] / total);
}

// `count` queries of one KV head, at most HELD_QUERIES, over some splits of their sequence.
template <typename T>
static void attend(const AttentionShape& s, const Query* queries, int count, int64_t kv_head, Range splits, const T* keys, const T* values,
                   const int32_t* table, const AttentionWork& work) {
  const int64_t stride = AttentionWork::pairs_stride(s.key_dim);
  SplitSums all[HELD_QUERIES], sums[MOST_QUERIES];
  for (int n = 0; n < count; n++) {
    if constexpr (IN_PAIRS<T>) pairs_of_query(queries[n].q, s.key_dim, work.pairs + n * stride);
    all[n].out = work.all + n * s.head_pad;
  }
  for (int n = 0; n < MOST_QUERIES; n++) sums[n].out = work.sums + n * s.head_pad;
  const Range seen_by_any = splits_seen(s, queries, count, splits);
  for (int64_t split = seen_by_any.first; split < seen_by_any.last; split++)
    for (int from = 0, some; from < count; from += some) {
      some = std::min(queries_at_once<T>(), count - from);
      const Range seen = splits_seen(s, queries + from, some, splits);
      if (split < seen.first || split >= seen.last) continue;
      const bool merges = split > seen.first && !queries[0].parts;
      attend_split<T>(s, queries + from, work.pairs + from * stride, some, kv_head, split, keys, values, table, work, merges ? sums : all + from);
      for (int n = from; n < from + some; n++)
        if (merges)
          all[n].merge(sums[n - from], s.head_pad);
        else if (queries[n].parts)
          all[n].save(queries[n].parts + split * SplitSums::floats(s.head_pad), s.head_pad);
    }
  for (int n = 0; n < count && !queries[0].parts; n++) write_output<T>(s, queries[n], all[n]);
}

// The output of a query whose splits other threads have computed.
template <typename T> static void merge_parts(const AttentionShape& s, const Query& query) {
  const Range splits = splits_seen(s, query.position);
  const auto part = [&](int64_t split) { return SplitSums::saved(query.parts + split * SplitSums::floats(s.head_pad)); };
  SplitSums all = part(splits.first);
  for (int64_t split = splits.first + 1; split < splits.last; split++) all.merge(part(split), s.head_pad);
  write_output<T>(s, query, all);
}
