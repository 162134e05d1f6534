// Paged attention, one KV head at a time: its query heads share every load.
//
// A page holds PAGE tokens.  keys [pages, kv_heads, head_dim, PAGE], values [pages, kv_heads, PAGE, head_pad] of the
// model's dtype; head_pad is head_dim rounded up to whole vectors. Softmax is computed page by page (Milakov and
// Gimelshein 2018, arXiv:1805.02867), each query by itself: its result does not depend on the other queries.
// Probabilities are rounded to the model's dtype before the product with values, as in torch's kernels. Scores are rounded
// only where Hugging Face computes them step by step ("eager" attention: soft caps, BLOOM's bias).
#pragma once
#include "vector.h"

constexpr int PAGE = 32;
constexpr int PAGE_VECS = PAGE / LANES;
constexpr int QUERIES = LANES == 16 ? 6 : 3;  // computed together, so that their sums fill the registers

struct AttentionShape {
  int64_t heads, kv_heads, head_dim, head_pad;
  float scale, softcap;
  const float* slopes;  // ALiBi, by query head, or null
  int64_t window;       // 0: none
  bool alibi_bfloat16;
};

// One query head of one token.
struct Query {
  const float* q;   // [head_dim]
  float* out;       // [head_dim]
  int64_t position;
  float slope;
};

// ALiBi's bias of keys at positions `token`, rounded as DecoderSpec.alibi_bfloat16 says.
template <typename W> static inline Vec alibi(const AttentionShape& s, float slope, Vec token) {
  if (!s.alibi_bfloat16) return rounded<W>(slope * token);
  return rounded<W>(to_bf16(to_bf16(slope / s.scale) * to_bf16(token)) * s.scale);
}
template <typename W> static inline Vec capped(const AttentionShape& s, Vec dot) {
  Vec score = rounded<W>(rounded<W>(rounded<W>(dot) * s.scale) / s.softcap);
  return rounded<W>(rounded<W>(tanh(score)) * s.softcap);
}

// Scores of N queries against the tokens of a page, scaled and capped; -inf for tokens that a query does not see.
template <int N, typename W>
static inline void page_scores(const AttentionShape& s, const Query* queries, const W* keys, int64_t page_start, Vec scores[N][PAGE_VECS]) {
  Vec acc[N][PAGE_VECS] = {};
  for (int64_t d = 0; d < s.head_dim; d++) {
    Vec key[PAGE_VECS];
    for (int j = 0; j < PAGE_VECS; j++) key[j] = load(keys + d * PAGE + j * LANES);
    for (int n = 0; n < N; n++)
      for (int j = 0; j < PAGE_VECS; j++) acc[n][j] += queries[n].q[d] * key[j];
  }
  for (int n = 0; n < N; n++)
    for (int j = 0; j < PAGE_VECS; j++) {
      Vec score = s.softcap ? capped<W>(s, acc[n][j]) : acc[n][j] * s.scale;
      VecI token;
      for (int i = 0; i < LANES; i++) token[i] = int32_t(page_start + j * LANES + i);
      const int32_t position = int32_t(queries[n].position);
      if (queries[n].slope) score += alibi<W>(s, queries[n].slope, __builtin_convertvector(token, Vec));
      if (queries[n].slope && !s.alibi_bfloat16) score = rounded<W>(score);
      VecI seen = token <= position;
      if (s.window) seen &= token > int32_t(position - s.window);
      scores[n][j] = seen ? score : splat(-INFINITY);
    }
}

// out[n] = out[n] * shrink[n] + sum over tokens of p[n][token] * value[token], over C vectors of the head.
template <int N, int C, typename W>
static inline void add_values(const W* values, int64_t head_pad, int64_t tokens, const float p[N][PAGE], const float* shrink, float* out[N]) {
  Vec acc[N][C];
  for (int n = 0; n < N; n++)
    for (int c = 0; c < C; c++) acc[n][c] = load(out[n] + c * LANES) * shrink[n];
  for (int64_t t = 0; t < tokens; t++) {
    Vec value[C];
    for (int c = 0; c < C; c++) value[c] = load(values + t * head_pad + c * LANES);
    for (int n = 0; n < N; n++)
      for (int c = 0; c < C; c++) acc[n][c] += p[n][t] * value[c];
  }
  for (int n = 0; n < N; n++)
    for (int c = 0; c < C; c++) store(out[n] + c * LANES, acc[n][c]);
}

// N queries of one KV head over the pages of their sequence.  work: float [N, head_pad].
template <int N, typename W>
static void attend(const AttentionShape& s, const Query* queries, int64_t kv_head, const W* keys, const W* values, const int32_t* table, float* work) {
  int64_t last = 0, first = INT64_MAX;
  for (int n = 0; n < N; n++) {
    last = std::max(last, queries[n].position);
    first = std::min(first, s.window ? std::max<int64_t>(queries[n].position - s.window + 1, 0) : 0);
  }
  float *out[N], most[N], total[N];
  for (int n = 0; n < N; n++) {
    out[n] = work + n * s.head_pad;
    std::memset(out[n], 0, s.head_pad * sizeof(float));
    most[n] = -INFINITY;
    total[n] = 0;
  }
  for (int64_t page = first / PAGE; page <= last / PAGE; page++) {
    const int64_t at = table[page] * s.kv_heads + kv_head, start = page * PAGE;
    Vec scores[N][PAGE_VECS];
    float p[N][PAGE], shrink[N];
    page_scores<N>(s, queries, keys + at * s.head_dim * PAGE, start, scores);
    for (int n = 0; n < N; n++) {
      Vec top = scores[n][0];
      for (int j = 1; j < PAGE_VECS; j++) top = max(top, scores[n][j]);
      const float now = std::max(most[n], largest(top));
      if (now == -INFINITY) {  // no token of this page or an earlier one is seen
        std::memset(p[n], 0, sizeof p[n]);
        shrink[n] = 1;
        continue;
      }
      Vec mass = {};
      for (int j = 0; j < PAGE_VECS; j++) {
        Vec e = exp(scores[n][j] - now);
        store(p[n] + j * LANES, rounded<W>(e));
        mass += e;
      }
      shrink[n] = exp(splat(most[n] - now))[0];
      total[n] = total[n] * shrink[n] + sum(mass);
      most[n] = now;
    }
    const W* value = values + at * PAGE * s.head_pad;
    const int64_t tokens = std::min<int64_t>(PAGE, last - start + 1);  // the rest of the page was never written
    int64_t c = 0;
    float* chunk[N];
    for (; c + 4 * LANES <= s.head_pad; c += 4 * LANES) {
      for (int n = 0; n < N; n++) chunk[n] = out[n] + c;
      add_values<N, 4>(value + c, s.head_pad, tokens, p, shrink, chunk);
    }
    for (; c < s.head_pad; c += LANES) {
      for (int n = 0; n < N; n++) chunk[n] = out[n] + c;
      add_values<N, 1>(value + c, s.head_pad, tokens, p, shrink, chunk);
    }
  }
  for (int n = 0; n < N; n++)
    for (int64_t d = 0; d < s.head_dim; d++) queries[n].out[d] = rounded<W>(out[n][d] / total[n]);
}
