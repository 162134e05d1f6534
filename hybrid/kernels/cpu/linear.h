// y = x · Wᵀ for few rows of x: W is read in place, row by row, in float32, bfloat16 or int8; sums are float32.
//
// A tile is ROWS rows of x times COLUMNS rows of W, both read along their contiguous dimension, so that no weight is
// ever packed or copied. Every output is the same chain of sums, whatever the tile and the batch.
//
// Layouts.  W [out, in], row-major and contiguous, as the model stores it (float, bf16 or int8_t):
//
//   row n of W     | w0 w1 w2 w3 ...                                 | next row at + in elements
//   scales (int8)  | s0 (in / groups weights) | s1 | ...             | float32 [out, groups]
//
// x [rows, ldx], float32. `halved` reorders each row of x in blocks of B = 2 · LANES elements, so that a block of x has
// the order in which a block of W comes out of its vector loads:
//
//   W: float, Int8<float>   x: | x0 x1 x2 ... x(B-1) |                             natural order
//   W: bf16, Int8<bf16>     x: | x0 x2 ... x(B-2) | x1 x3 ... x(B-1) |             even elements, then odd ones
//     with PAIRS            x: | (x0,x1) (x2,x3) ... (x(B-2),x(B-1)) | unused |    bf16 pairs in 32 bits, even one low
//
//   bf16 W, one load        32-bit lane i = | w(2i+1) : w(2i) |    << 16 gives the even elements as float32,
//                                                                  & 0xffff0000 the odd ones; with PAIRS, a lane is a pair
//   int8 W, one load        byte << 24 as integer, converted: 2^24 · w (INT8_UNIT); the sum is multiplied by s / 2^24
//
// The last in % B elements of a row (float W: in % LANES) keep their natural order and are added one by one. With
// groups > 1, in / groups is a multiple of B (`reads_int8` in hybrid/decoders/cpu_decoder.py), so that no block crosses
// a group.
#pragma once
#include <algorithm>
#include <type_traits>

#include "bfloat16.h"
#if LANES == 8 && defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int ROWS = 4;
constexpr int64_t WIDENED_ROWS = 32;
// An int8 weight of a model whose dtype is W.
template <typename W> struct Int8 {
  int8_t value;
};
// Read as INT8_UNIT times its value: shifting a byte to the top of an integer keeps its sign without a sign extension.
constexpr float INT8_UNIT = 1 << 24;
template <typename W> static inline float to_float(Int8<W> x) { return x.value * INT8_UNIT; }
template <typename V> constexpr bool IS_INT8 = false;
template <typename W> constexpr bool IS_INT8<Int8<W>> = true;

// ROWS x COLUMNS sums, one vector per column and one of a row fill the registers: 32 with AVX-512, else 16. Converting
// bfloat16 or int8 to float32 needs a few more.
template <typename V> constexpr int COLUMNS = LANES == 16 ? 6 : std::is_same_v<V, float> ? 3 : 2;

// Keeps a vector in a register: GCC 12 would load it again for each use, and loads limit the speed of a tile.
static inline Vec held(Vec v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX__) && LANES == 8
  asm("" : "+x"(v));
#endif
  return v;
}

// An unmerged LoRA adapter: adds scale · B (A x) to outputs [first, first + rows).  a [rank, in], b [rows, rank], in the
// model's dtype.  at: offset of A x [tokens, rank] in `reduced`, in floats per token.
struct LoraDelta {
  const void *a, *b;
  int64_t rank, first, rows, at;
  double scale;
};

// A matrix of 1 to 3 parts, one above the other (q, k, v; gate, up).  weight[i] [rows[i], in] in the model's dtype;
// bias[i] float32 [rows[i]] or null. If scale[i] is not null, float32 [rows[i], groups], weight[i] is int8.
// sides: unmerged adapters.
struct Linear {
  const void* weight[3];
  const float* bias[3];
  int64_t rows[3];
  int64_t parts;
  int64_t in;
  const LoraDelta* sides;
  int64_t num_sides;
  const float* scale[3];
  int64_t groups;
};

// The scales of int8 weights.  at: float32 [rows of W, groups], or null for other dtypes.
struct Scales {
  const float* at;
  int64_t groups;
};
static inline Scales operator+(Scales s, int64_t rows) { return {s.at ? s.at + rows * s.groups : nullptr, s.groups}; }

static inline int64_t outputs(const Linear& linear) {
  int64_t rows = 0;
  for (int i = 0; i < linear.parts; i++) rows += linear.rows[i];
  return rows;
}

template <int M, int N>
static inline __attribute__((always_inline)) void dots(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t in, Four* out) {
  Vec acc[N][ROWS] = {};
  int64_t k = 0;
  for (; k + LANES <= in; k += LANES) {
    Vec column[N];
    for (int n = 0; n < N; n++) column[n] = held(load(w + n * ldw + k));
    for (int m = 0; m < M; m++) {
      Vec row = held(load(x + m * ldx + k));
      for (int n = 0; n < N; n++) acc[n][m] += row * column[n];
    }
  }
  for (int n = 0; n < N; n++) out[n] = sums(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
  for (; k < in; k++)
    for (int n = 0; n < N; n++)
      for (int m = 0; m < M; m++) out[n].at[m] += x[m * ldx + k] * w[n * ldw + k];
}

// The two halves of a block of 2 · LANES weights, in the order of `halved` x: for bfloat16 models even, then odd elements.
static inline Vec first_half(const bf16* w) { return (Vec)(*(const VecUAny*)w << 16); }
static inline Vec second_half(const bf16* w) { return (Vec)(*(const VecUAny*)w & 0xffff0000u); }
#if LANES == 8 && defined(__AVX2__)
// INT8_UNIT times byte FIRST + STEP · lane of a block, for each lane.
template <int FIRST, int STEP> static inline Vec floats_of(const void* w) {
  const __m256i block = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)w));
  constexpr char Z = char(0x80), A = FIRST, B = FIRST + STEP, C = FIRST + 2 * STEP, D = FIRST + 3 * STEP, E = 4 * STEP;
  const __m256i top = _mm256_setr_epi8(Z, Z, Z, A, Z, Z, Z, B, Z, Z, Z, C, Z, Z, Z, D, Z, Z, Z, A + E, Z, Z, Z, B + E, Z, Z, Z, C + E, Z, Z, Z, D + E);
  return (Vec)_mm256_cvtepi32_ps(_mm256_shuffle_epi8(block, top));
}
static inline Vec first_half(const Int8<bf16>* w) { return floats_of<0, 2>(w); }
static inline Vec second_half(const Int8<bf16>* w) { return floats_of<1, 2>(w); }
static inline Vec first_half(const Int8<float>* w) { return floats_of<0, 1>(w); }
static inline Vec second_half(const Int8<float>* w) { return floats_of<8, 1>(w); }
#else
static inline VecI both(const Int8<bf16>* w) { return __builtin_convertvector(*(const VecSAny*)w, VecI); }
static inline Vec first_half(const Int8<bf16>* w) { return __builtin_convertvector(both(w) << 24, Vec); }
static inline Vec second_half(const Int8<bf16>* w) { return __builtin_convertvector(both(w) >> 8 << 24, Vec); }
static inline Vec first_half(const Int8<float>* w) { return __builtin_convertvector(__builtin_convertvector(*(const VecBAny*)w, VecI) << 24, Vec); }
static inline Vec second_half(const Int8<float>* w) { return first_half(w + LANES); }
#endif
#if PAIRS
static inline Vec pairs(const bf16* w) { return (Vec) * (const VecUAny*)w; }
static inline Vec pairs(const Int8<bf16>* w) { return (Vec)((VecU)first_half(w) >> 16 | ((VecU)second_half(w) & 0xffff0000u)); }
#endif

// Dot products with bfloat16 or int8 weights, converted as they are read; x after `halved`.
template <int M, int N, typename V>
static inline __attribute__((always_inline)) void dots(const float* x, int64_t ldx, const V* w, int64_t ldw, int64_t in, Four* out) {
  Vec acc[N][ROWS] = {};
  int64_t k = 0;
  for (; k + 2 * LANES <= in; k += 2 * LANES) {
    Vec column[N];
#if PAIRS
    if constexpr (!std::is_same_v<V, Int8<float>>) {
      for (int n = 0; n < N; n++) column[n] = held(pairs(w + n * ldw + k));
      for (int m = 0; m < M; m++) {
        Vec row = held(load(x + m * ldx + k));
        for (int n = 0; n < N; n++) acc[n][m] = dot_pairs(acc[n][m], (VecU)row, (VecU)column[n]);
      }
      continue;
    }
#endif
    for (int n = 0; n < N; n++) column[n] = held(first_half(w + n * ldw + k));
    for (int m = 0; m < M; m++) {
      Vec row = held(load(x + m * ldx + k));
      for (int n = 0; n < N; n++) acc[n][m] += row * column[n];
    }
    for (int n = 0; n < N; n++) column[n] = held(second_half(w + n * ldw + k));
    for (int m = 0; m < M; m++) {
      Vec row = held(load(x + m * ldx + k + LANES));
      for (int n = 0; n < N; n++) acc[n][m] += row * column[n];
    }
  }
  for (int n = 0; n < N; n++) out[n] = sums(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
  for (; k < in; k++)
    for (int n = 0; n < N; n++)
      for (int m = 0; m < M; m++) out[n].at[m] += x[m * ldx + k] * to_float(w[n * ldw + k]);
}

// Dot products of whole rows; with scales, the sum over groups of each group's dot product times its scale.
template <int M, int N, typename V>
static inline __attribute__((always_inline)) void products(const float* x, int64_t ldx, const V* w, Scales scales, int64_t in, Four* out) {
  if (!scales.at) return dots<M, N>(x, ldx, w, in, in, out);
  const int64_t each = in / scales.groups;
  for (int64_t g = 0; g < scales.groups; g++) {
    Four found[N];
    dots<M, N>(x + g * each, ldx, w + g * each, in, each, found);
    for (int n = 0; n < N; n++)
      for (int m = 0; m < M; m++) {
        const float scaled = found[n].at[m] * (scales.at[n * scales.groups + g] * (1 / INT8_UNIT));
        out[n].at[m] = g ? out[n].at[m] + scaled : scaled;
      }
  }
}

// Reorders a row of x in place for `products`, by the model's dtype: see the layouts above.
static inline void halved(float*, int64_t, const float*) {}
static inline void halved(float* row, int64_t in, const bf16*) {
  for (int64_t k = 0; k + 2 * LANES <= in; k += 2 * LANES) {
#if PAIRS
    paired(row + k);
#else
    float block[2 * LANES];
    for (int i = 0; i < LANES; i++) {
      block[i] = row[k + 2 * i];
      block[i + LANES] = row[k + 2 * i + 1];
    }
    std::memcpy(row + k, block, sizeof block);
#endif
  }
}

// How an output is written: stored, or multiplied by a factor and added to y (the residual).
struct Store {
  template <typename W> void operator()(float* y, float value) const { *y = value; }
};
struct Add {
  float factor;
  template <typename W> void operator()(float* y, float value) const {
    *y = rounded<W>(*y + (factor == 1.0f ? value : rounded<W>(value * factor)));
  }
};
struct AddScaled {  // adds an adapter's output, rounded as in PEFT
  float scale;
  template <typename W> void operator()(float* y, float value) const { *y = rounded<W>(*y + rounded<W>(value * scale)); }
};
// N columns of y for `rows` rows of x.  W: dtype that outputs are rounded to.  V: dtype of the stored matrix.
template <typename W, int N, typename V, typename Out>
static __attribute__((noinline)) void strip(const float* x, int64_t ldx, const V* w, Scales scales, const float* bias, int64_t in, float* y, int64_t ldy, int64_t rows, Out out) {
  Four found[N];
  auto write = [&](int64_t m, int count) {
    for (int n = 0; n < N; n++)
      for (int i = 0; i < count; i++)
        out.template operator()<W>(y + (m + i) * ldy + n, rounded<W>(found[n].at[i] + (bias ? bias[n] : 0.0f)));
  };
  int64_t m = 0;
  for (; m + ROWS <= rows; m += ROWS) {
    products<ROWS, N>(x + m * ldx, ldx, w, scales, in, found);
    write(m, ROWS);
  }
  const float* rest = x + m * ldx;
  switch (rows - m) {
    case 3: products<3, N>(rest, ldx, w, scales, in, found); break;
    case 2: products<2, N>(rest, ldx, w, scales, in, found); break;
    case 1: products<1, N>(rest, ldx, w, scales, in, found); break;
    default: return;
  }
  write(m, rows - m);
}

// A strip for one row of x: ALONE columns at once. One row leaves registers free, and more independent sums hide latency.
constexpr int ALONE = 4;
template <typename W, typename V, typename Out>
static __attribute__((noinline)) void strip_alone(const float* x, const V* w, Scales scales, const float* bias, int64_t in, float* y, Out out) {
  Four found[ALONE];
  products<1, ALONE>(x, 0, w, scales, in, found);
  for (int n = 0; n < ALONE; n++) out.template operator()<W>(y + n, rounded<W>(found[n].at[0] + (bias ? bias[n] : 0.0f)));
}

// Columns [0, count) of a block, for `rows` rows of x.
template <typename W, typename V, typename Out>
static void strips(const float* x, int64_t ldx, const V* w, Scales scales, const float* bias, int64_t in, float* y, int64_t ldy, int64_t rows, int64_t count, Out out) {
  constexpr int C = COLUMNS<V>;
  int64_t n = 0;
  if (rows == 1)
    for (; n + ALONE <= count; n += ALONE) strip_alone<W>(x, w + n * in, scales + n, bias ? bias + n : nullptr, in, y + n, out);
  for (; n + C <= count; n += C) strip<W, C>(x, ldx, w + n * in, scales + n, bias ? bias + n : nullptr, in, y + n, ldy, rows, out);
  for (; n < count; n++) strip<W, 1>(x, ldx, w + n * in, scales + n, bias ? bias + n : nullptr, in, y + n, ldy, rows, out);
}

// Rows of W as floats in the order of x, so that sums are bit-identical to those over W itself.
template <typename V> static const float* widened(const V* w, int64_t count) {
  static thread_local std::vector<float> wide;
  if (int64_t(wide.size()) < count) wide.resize(count);
  for (int64_t k = 0; k < count; k += 2 * LANES) {
    store(wide.data() + k, first_half(w + k));
    store(wide.data() + k + LANES, second_half(w + k));
  }
  return wide.data();
}

// Columns [first, last) of y for one matrix. Blocks are sized so that the rows of x in use stay in the L1 cache and the
// rows of W, used again for each of them, in the L2 cache; x is processed in chunks that fit the last-level cache.
template <typename W, typename V, typename Out>
static void columns(const float* x, int64_t ldx, const V* w, Scales scales, const float* bias, int64_t in, float* y, int64_t ldy, int64_t rows, int64_t first, int64_t last, Out out) {
#if TILES
  if constexpr (std::is_same_v<V, bf16>)
    if (in >= TILE_DEPTH && tiles_ready()) return tile_columns(x, ldx, w, bias, in, y, ldy, rows, first, last, out);
#endif
  // With enough rows it is faster to convert W to floats once than in every tile.
  constexpr bool WIDENS = IS_INT8<V> ? !PAIRS || std::is_same_v<W, float> : std::is_same_v<V, bf16> && !PAIRS;
  const bool widen = WIDENS && rows >= WIDENED_ROWS && in % (2 * LANES) == 0;
  const int64_t row_block = in <= 1024 ? 2 * ROWS : ROWS;
  const int64_t chunk = std::max<int64_t>((1 << 20) / (in * int64_t(sizeof(float))) / row_block, 8) * row_block;
  const int64_t C = widen ? COLUMNS<float> : COLUMNS<V>;
  const int64_t wanted = (96 << 10) / (in * int64_t(widen ? sizeof(float) : sizeof(V))) / C * C;
  const int64_t column_block = rows == 1 ? last - first : std::clamp<int64_t>(wanted, C, 16 * C);
  for (int64_t top = 0; top < rows; top += chunk) {
    const int64_t bottom = std::min(top + chunk, rows);
    for (int64_t n = first; n < last; n += column_block) {
      const int64_t count = std::min(column_block, last - n);
      const auto over_rows = [&](const auto* block) {
        for (int64_t m = top; m < bottom; m += row_block)
          strips<W>(x + m * ldx, ldx, block, scales + n, bias ? bias + n : nullptr, in, y + m * ldy + n, ldy, std::min(row_block, bottom - m), count, out);
      };
      if constexpr (WIDENS)
        if (widen) {
          over_rows(widened(w + n * in, count * in));
          continue;
        }
      over_rows(w + n * in);
    }
  }
}

// Rows [first, first + count) of a Linear that has one part and no bias.
template <typename W>
static inline Linear rows_of(const Linear& l, int64_t first, int64_t count) {
  const int64_t row_bytes = l.in * (l.scale[0] ? sizeof(Int8<W>) : sizeof(W));
  Linear part{{(const char*)l.weight[0] + first * row_bytes}, {}, {count}, 1, l.in};
  if (l.scale[0]) part.scale[0] = l.scale[0] + first * l.groups;
  part.groups = l.groups;
  return part;
}

// Columns [first, last) of y for part i of a Linear.
template <typename W, typename Out>
static void columns_of(const Linear& l, int i, const float* x, int64_t ldx, float* y, int64_t ldy, int64_t rows, int64_t first, int64_t last, Out out) {
  if (l.scale[i])
    columns<W>(x, ldx, (const Int8<W>*)l.weight[i], {l.scale[i], l.groups}, l.bias[i], l.in, y, ldy, rows, first, last, out);
  else
    columns<W>(x, ldx, (const W*)l.weight[i], {}, l.bias[i], l.in, y, ldy, rows, first, last, out);
}

// A thread's part of [0, count); boundaries are multiples of `grain`.
struct Part {
  int64_t first, last;
};
static inline Part part(int64_t count, int64_t grain, int thread, int threads) {
  const int64_t grains = (count + grain - 1) / grain;
  return {std::min(grains * thread / threads * grain, count), std::min(grains * (thread + 1) / threads * grain, count)};
}

// This thread's columns of y [rows, outputs] = x [rows, in] · Wᵀ + bias. No barrier: the caller adds one.
template <typename W, typename Out>
static void linear(const Linear& l, const float* x, int64_t ldx, int64_t rows, float* y, int64_t ldy, Out out, int thread, int threads) {
  const Part mine = part(outputs(l), COLUMNS<W>, thread, threads);
  int64_t offset = 0;
  for (int i = 0; i < l.parts; i++) {
    const int64_t first = std::max<int64_t>(mine.first - offset, 0), last = std::min(mine.last - offset, l.rows[i]);
    if (first < last) columns_of<W>(l, i, x, ldx, y + offset, ldy, rows, first, last, out);
    offset += l.rows[i];
  }
}

// LoRA A·x into `reduced` for every unmerged adapter of l, for this thread's tokens, `halved` for `add_sides`. No barrier.
template <typename W>
static void reduce_sides(const Linear& l, const float* x, int64_t ldx, int64_t rows, float* reduced, int thread, int threads) {
  const Part mine = part(l.num_sides * rows, 1, thread, threads);
  for (int64_t i = 0; i < l.num_sides; i++) {
    const LoraDelta& side = l.sides[i];
    const int64_t first = std::max<int64_t>(mine.first - i * rows, 0), last = std::min(mine.last - i * rows, rows);
    if (first >= last) continue;
    float* y = reduced + side.at * rows + first * side.rank;
    columns<W>(x + first * ldx, ldx, (const W*)side.a, {}, nullptr, l.in, y, side.rank, last - first, 0, side.rank, Store{});
    for (int64_t m = 0; m < last - first; m++) halved(y + m * side.rank, side.rank, (const W*)nullptr);
  }
}

// Adds scale · B · reduced of every unmerged adapter to columns [first, last) of y, in the order of the adapters.
template <typename W>
static void add_sides(const Linear& l, const float* reduced, int64_t rows, float* y, int64_t ldy, int64_t first, int64_t last) {
  for (int64_t i = 0; i < l.num_sides; i++) {
    const LoraDelta& side = l.sides[i];
    const int64_t from = std::max<int64_t>(first - side.first, 0), to = std::min(last - side.first, side.rows);
    if (from < to)
      columns<W>(reduced + side.at * rows, side.rank, (const W*)side.b, {}, nullptr, side.rank, y + side.first, ldy, rows, from, to, AddScaled{float(side.scale)});
  }
}
