// Recurrent mixers' updates of a state, token by token: in prefills as in decode steps, so that a row's bits do not depend on how
// its tokens were computed. A state is [rows, stride], with its columns padded to whole vectors.
#pragma once
#include "vector.h"

constexpr int STATE_VECTORS = 8;  // columns of a state that a thread updates at once, in vectors

static inline int64_t padded(int64_t columns) { return (columns + LANES - 1) / LANES * LANES; }

// Columns of a state [rows, stride] from `state` on, of which `valid` are no padding.
struct StateColumns {
  float* state;
  int64_t rows, stride, valid;
};

// The gated delta rule (arXiv:2412.06464): the state decays, then k ⊗ beta · (v - kᵀ state) is added, then out = qᵀ state.
// q, k [rows]; v, out [valid].  decay: of row i at i · step.
template <int W> static void delta_rule(const StateColumns& at, const float* q, const float* k, const float* v, float* out, const float* decay, int64_t step, float beta) {
  Vec known[W] = {}, delta[W], read[W] = {};
  for (int64_t i = 0; i < at.rows; i++) {
    float* row = at.state + i * at.stride;
    const Vec key = splat(k[i]);
    for (int w = 0; w < W; w++) {
      const Vec s = load(row + w * LANES) * decay[i * step];
      store(row + w * LANES, s);
      known[w] += s * key;
    }
  }
  float buffer[W * LANES] = {};
  std::memcpy(buffer, v, at.valid * sizeof(float));
  for (int w = 0; w < W; w++) delta[w] = (load(buffer + w * LANES) - known[w]) * beta;
  for (int64_t i = 0; i < at.rows; i++) {
    float* row = at.state + i * at.stride;
    const Vec key = splat(k[i]), query = splat(q[i]);
    for (int w = 0; w < W; w++) {
      const Vec s = load(row + w * LANES) + key * delta[w];
      store(row + w * LANES, s);
      read[w] += s * query;
    }
  }
  for (int w = 0; w < W; w++) store(buffer + w * LANES, read[w]);
  std::memcpy(out, buffer, at.valid * sizeof(float));
}

// A head of a Mamba 2 mixer (arXiv:2405.21060): the state decays, then b ⊗ step · x is added, then out = cᵀ state + skip · x.
// b, c [rows]; x, out [valid].
template <int W>
static void selective_scan(const StateColumns& at, const float* b, const float* c, const float* x, float* out, float decay, float step, float skip) {
  Vec input[W], scaled[W], read[W] = {};
  float buffer[W * LANES] = {};
  std::memcpy(buffer, x, at.valid * sizeof(float));
  for (int w = 0; w < W; w++) input[w] = load(buffer + w * LANES), scaled[w] = input[w] * step;
  for (int64_t i = 0; i < at.rows; i++) {
    float* row = at.state + i * at.stride;
    const Vec in = splat(b[i]), query = splat(c[i]);
    for (int w = 0; w < W; w++) {
      const Vec s = unfused(load(row + w * LANES) * decay) + in * scaled[w];
      store(row + w * LANES, s);
      read[w] += s * query;
    }
  }
  for (int w = 0; w < W; w++) store(buffer + w * LANES, read[w] + input[w] * skip);
  std::memcpy(out, buffer, at.valid * sizeof(float));
}

// Calls f with the number of vectors, up to STATE_VECTORS, by which the columns of a padded state can be divided, as a constant.
template <typename F> static inline void with_vectors(int64_t pad, F f) {
  int vectors = STATE_VECTORS;
  while (pad % (vectors * LANES)) vectors /= 2;
  switch (vectors) {
    case 8: return f(std::integral_constant<int, 8>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 2: return f(std::integral_constant<int, 2>{});
    default: return f(std::integral_constant<int, 1>{});
  }
}
