// Paged attention, one KV head at a time: its query heads share every load.
//
// A block holds BLOCK_SIZE tokens.  keys [blocks, kv_heads, key_dims, BLOCK_SIZE], values [blocks, kv_heads, BLOCK_SIZE,
// head_pad] of the model's dtype; head_pad is head_dim rounded up to whole vectors. Where bfloat16 is multiplied in pairs,
// keys are [.., key_dims / 2, BLOCK_SIZE, 2] and values [.., BLOCK_SIZE / 2, head_pad, 2], so that a load is of pairs.
//
// Softmax is computed block by block (Milakov and Gimelshein 2018, arXiv:1805.02867), each query by itself: its result does
// not depend on the other queries. Every SPLIT_TOKENS positions it begins anew, and the results are merged in order (as
// Flash-Decoding does, Dao et al. 2023): threads may compute the splits of a long sequence at the same time, with the same
// sums. Probabilities are rounded to the model's dtype before the product with values, as in torch's kernels. Scores are rounded
// only where Hugging Face computes them step by step ("eager" attention: soft caps, BLOOM's bias).
#pragma once
#include <algorithm>
#include <type_traits>

#include "bfloat16.h"
#include "team.h"

constexpr int BLOCK_SIZE = 32;
constexpr int BLOCK_VECS = BLOCK_SIZE / LANES;
constexpr int SPLIT_TOKENS = 512;
constexpr int QUERIES = LANES == 16 ? 6 : 3;  // computed together, so that their sums fill the registers

template <typename T> constexpr bool IN_PAIRS = PAIRS && std::is_same_v<std::remove_const_t<T>, bf16>;

// Elements of a head's block: dimension i of the key or value of token t.
template <typename T> static inline T* key_at(T* keys, int64_t i, int64_t t) {
  return IN_PAIRS<T> ? keys + (i / 2 * BLOCK_SIZE + t) * 2 + i % 2 : keys + i * BLOCK_SIZE + t;
}
template <typename T> static inline T* value_at(T* values, int64_t head_pad, int64_t i, int64_t t) {
  return IN_PAIRS<T> ? values + (t / 2 * head_pad + i) * 2 + t % 2 : values + t * head_pad + i;
}
// Dimensions of a key in the cache: an even number.
static inline int64_t key_dims(int64_t head_dim) { return (head_dim + 1) / 2 * 2; }

struct AttentionShape {
  int64_t kv_heads, head_dim, head_pad;
  float scale, softcap;
  int64_t window;  // 0: none
  bool alibi_bfloat16;
};

// One query head of one token.
struct Query {
  const float* q;   // [head_dim]
  float* out;       // [head_dim]
  int64_t position;
  float slope;      // ALiBi's; 0: none
  float* parts;     // the sums of each of its splits, as SplitSums::save writes them; null: they are merged
};

// Splits that a token at `position` sees.
static inline Range splits_seen(const AttentionShape& s, int64_t position) {
  return {(s.window ? std::max<int64_t>(position - s.window + 1, 0) : 0) / SPLIT_TOKENS, position / SPLIT_TOKENS + 1};
}

// Of a query and the tokens of a split: the largest score, the sum of exp(score - largest), and that of its products with
// the values.
struct SplitSums {
  float max_score, total;
  float* out;  // [head_pad]

  static int64_t floats(int64_t head_pad) { return head_pad + LANES; }
  void clear(int64_t head_pad) {
    max_score = -INFINITY, total = 0;
    std::memset(out, 0, head_pad * sizeof(float));
  }
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

// Products of N queries and the keys of a block.  pairs: the queries in pairs, [N, head_pad / 2].
template <int N, typename T>
static inline void block_products(const AttentionShape& s, const Query* queries, const uint32_t* pairs, const T* keys, Vec products[N][BLOCK_VECS]) {
  Vec acc[N][BLOCK_VECS] = {};
#if PAIRS
  if constexpr (IN_PAIRS<T>) {
    for (int64_t d = 0; d < key_dims(s.head_dim) / 2; d++) {
      VecU key[BLOCK_VECS];
      for (int j = 0; j < BLOCK_VECS; j++) key[j] = *(const VecUAny*)(keys + (d * BLOCK_SIZE + j * LANES) * 2);
      for (int n = 0; n < N; n++)
        for (int j = 0; j < BLOCK_VECS; j++) acc[n][j] = dot_pairs(acc[n][j], splat(pairs[n * s.head_pad / 2 + d]), key[j]);
    }
  } else
#endif
    for (int64_t d = 0; d < s.head_dim; d++) {
      Vec key[BLOCK_VECS];
      for (int j = 0; j < BLOCK_VECS; j++) key[j] = load(keys + d * BLOCK_SIZE + j * LANES);
      for (int n = 0; n < N; n++)
        for (int j = 0; j < BLOCK_VECS; j++) acc[n][j] += queries[n].q[d] * key[j];
    }
  std::memcpy(products, acc, sizeof acc);
}

// Scores of N queries against the tokens of a block, scaled and capped; -inf for tokens that a query does not see.
// plain: they are scaled only, and every query sees every token.
template <int N, typename T>
static inline void block_scores(const AttentionShape& s, const Query* queries, const uint32_t* pairs, const T* keys, int64_t block_start,
                                bool plain, Vec scores[N][BLOCK_VECS]) {
  block_products<N>(s, queries, pairs, keys, scores);
  if (plain) {
    for (int n = 0; n < N; n++)
      for (int j = 0; j < BLOCK_VECS; j++) scores[n][j] = unfused(scores[n][j] * s.scale);
    return;
  }
  for (int n = 0; n < N; n++)
    for (int j = 0; j < BLOCK_VECS; j++) {
      Vec score = s.softcap ? capped<T>(s, scores[n][j]) : unfused(scores[n][j] * s.scale);
      VecI token;
      for (int i = 0; i < LANES; i++) token[i] = int32_t(block_start + j * LANES + i);
      const int32_t position = int32_t(queries[n].position);
      if (queries[n].slope) score += alibi<T>(s, queries[n].slope, __builtin_convertvector(token, Vec));
      if (queries[n].slope && !s.alibi_bfloat16) score = rounded<T>(score);
      VecI seen = token <= position;
      if (s.window) seen &= token > int32_t(position - s.window);
      scores[n][j] = seen ? score : splat(-INFINITY);
    }
}

// Probabilities of a block's tokens, rounded to the model's dtype: floats, or pairs.
union Probabilities {
  float p[BLOCK_SIZE];
  uint32_t pairs[BLOCK_SIZE / 2];
};

// out[n] = out[n] * shrink[n] + sum over tokens of p[n][token] * value[token], over C vectors of the head.
template <int N, int C, typename T>
static inline void add_values(const T* values, int64_t head_pad, int64_t tokens, const Probabilities* p, const float* shrink, float* out[N]) {
  Vec acc[N][C];
  for (int n = 0; n < N; n++)
    for (int c = 0; c < C; c++) acc[n][c] = load(out[n] + c * LANES) * shrink[n];
#if PAIRS
  if constexpr (IN_PAIRS<T>) {
    for (int64_t t = 0; t < (tokens + 1) / 2; t++) {
      VecU value[C];
      for (int c = 0; c < C; c++) value[c] = *(const VecUAny*)(values + (t * head_pad + c * LANES) * 2);
      for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) acc[n][c] = dot_pairs(acc[n][c], splat(p[n].pairs[t]), value[c]);
    }
  } else
#endif
    for (int64_t t = 0; t < tokens; t++) {
      Vec value[C];
      for (int c = 0; c < C; c++) value[c] = load(values + t * head_pad + c * LANES);
      for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) acc[n][c] += p[n].p[t] * value[c];
    }
  for (int n = 0; n < N; n++)
    for (int c = 0; c < C; c++) store(out[n] + c * LANES, acc[n][c]);
}

// Adds the tokens of a split to the sums of N queries, whose `out` are [N, head_pad].
template <int N, typename T>
static __attribute__((noinline)) void attend_split(const AttentionShape& shape, const Query* queries, const uint32_t* pairs, int64_t kv_head,
                                                   int64_t split, const T* keys, const T* values, const int32_t* table, SplitSums* sums) {
  const AttentionShape s = shape;  // a copy, as below: a store of a float cannot change it
  int64_t last = 0, first = INT64_MAX, seen_by_all = INT64_MAX;
  bool plain = !s.softcap && !s.window;
  for (int n = 0; n < N; n++) {
    plain &= !queries[n].slope;
    seen_by_all = std::min(seen_by_all, queries[n].position);
    last = std::max(last, queries[n].position);
    first = std::min(first, s.window ? std::max<int64_t>(queries[n].position - s.window + 1, 0) : 0);
  }
  float *out[N], max_score[N], total[N];
  for (int n = 0; n < N; n++) out[n] = sums[0].out + n * s.head_pad, max_score[n] = sums[n].max_score, total[n] = sums[n].total;
  first = std::max(first, split * SPLIT_TOKENS), last = std::min(last, (split + 1) * SPLIT_TOKENS - 1);
  for (int64_t block = first / BLOCK_SIZE; block <= last / BLOCK_SIZE; block++) {
    const int64_t head_block = table[block] * s.kv_heads + kv_head, start = block * BLOCK_SIZE;
    Vec scores[N][BLOCK_VECS];
    Probabilities p[N];
    float shrink[N];
    block_scores<N>(s, queries, pairs, keys + head_block * key_dims(s.head_dim) * BLOCK_SIZE, start,
                    plain && start + BLOCK_SIZE - 1 <= seen_by_all, scores);
    for (int n = 0; n < N; n++) {
      Vec top = scores[n][0];
      for (int j = 1; j < BLOCK_VECS; j++) top = max(top, scores[n][j]);
      const float new_max = std::max(max_score[n], largest(top));
      if (new_max == -INFINITY) {  // no token of this block or an earlier one is seen
        std::memset(&p[n], 0, sizeof p[n]);
        shrink[n] = 1;
        continue;
      }
      Vec sum_exp = {}, e[BLOCK_VECS];
      for (int j = 0; j < BLOCK_VECS; j++) {
        e[j] = exp(scores[n][j] - new_max);
        sum_exp += e[j];
        if (!IN_PAIRS<T>) store(p[n].p + j * LANES, rounded<T>(e[j]));
      }
#if PAIRS
      if constexpr (IN_PAIRS<T>) *(VecUAny*)p[n].pairs = rounded_pairs(e[0], e[1]);
#endif
      shrink[n] = max_score[n] == new_max ? 1.0f : exp(splat(max_score[n] - new_max))[0];
      total[n] = fused_multiply_add(total[n], shrink[n], sum(sum_exp));
      max_score[n] = new_max;
    }
    const T* value = values + head_block * BLOCK_SIZE * s.head_pad;
    const int64_t tokens = std::min<int64_t>(BLOCK_SIZE, last - start + 1);  // the rest of the block was never written
    int64_t c = 0;
    float* chunk[N];
    for (; c + 4 * LANES <= s.head_pad; c += 4 * LANES) {
      for (int n = 0; n < N; n++) chunk[n] = out[n] + c;
      add_values<N, 4>(value_at(value, s.head_pad, c, 0), s.head_pad, tokens, p, shrink, chunk);
    }
    for (; c < s.head_pad; c += LANES) {
      for (int n = 0; n < N; n++) chunk[n] = out[n] + c;
      add_values<N, 1>(value_at(value, s.head_pad, c, 0), s.head_pad, tokens, p, shrink, chunk);
    }
  }
  for (int n = 0; n < N; n++) sums[n].max_score = max_score[n], sums[n].total = total[n];
}

template <typename T> static inline void write_output(const AttentionShape& s, const Query& query, const SplitSums& sums) {
  for (int64_t d = 0; d < s.head_dim; d++) query.out[d] = rounded<T>(sums.out[d] / sums.total);
}

// N queries of one KV head over some splits of their sequence.  work: float [3, N, head_pad].
template <int N, typename T>
static void attend(const AttentionShape& s, const Query* queries, int64_t kv_head, Range splits, const T* keys, const T* values, const int32_t* table,
                   float* work) {
  Range seen = splits_seen(s, queries[0].position);
  for (int n = 1; n < N; n++) {
    const Range other = splits_seen(s, queries[n].position);
    seen = {std::min(seen.first, other.first), std::max(seen.last, other.last)};
  }
  splits = {std::max(splits.first, seen.first), std::min(splits.last, seen.last)};
  uint32_t* const pairs = (uint32_t*)(work + 2 * N * s.head_pad);
  SplitSums all[N], sums[N];
  for (int n = 0; n < N; n++) {
    if (IN_PAIRS<T>)
      for (int64_t d = 0; d < s.head_dim; d += 2)
        pairs[(n * s.head_pad + d) / 2] = pair_of(queries[n].q[d], d + 1 < s.head_dim ? queries[n].q[d + 1] : 0.0f);
    all[n].out = work + n * s.head_pad, sums[n].out = work + (N + n) * s.head_pad;
  }
  for (int64_t split = splits.first; split < splits.last; split++) {
    const bool merges = split > splits.first && !queries[0].parts;
    SplitSums* const into = merges ? sums : all;
    for (int n = 0; n < N; n++) into[n].clear(s.head_pad);
    attend_split<N>(s, queries, pairs, kv_head, split, keys, values, table, into);
    for (int n = 0; n < N; n++)
      if (merges)
        all[n].merge(sums[n], s.head_pad);
      else if (queries[n].parts)
        all[n].save(queries[n].parts + split * SplitSums::floats(s.head_pad), s.head_pad);
  }
  for (int n = 0; n < N && !queries[0].parts; n++)
    write_output<T>(s, queries[n], all[n]);
}

// The output of a query whose splits other threads have computed.
template <typename T> static void merge_parts(const AttentionShape& s, const Query& query) {
  const Range splits = splits_seen(s, query.position);
  const auto part = [&](int64_t split) { return SplitSums::saved(query.parts + split * SplitSums::floats(s.head_pad)); };
  SplitSums all = part(splits.first);
  for (int64_t split = splits.first + 1; split < splits.last; split++) all.merge(part(split), s.head_pad);
  write_output<T>(s, query, all);
}
