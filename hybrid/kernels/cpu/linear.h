// y = x · Wᵀ for few rows of x: W is read in place, row by row, in float32, bfloat16 or int8; sums are float32.
//
// A tile is ROWS rows of x times COLUMNS rows of W, both read along their contiguous dimension, so that no weight is
// ever packed or copied. Every output is the same chain of sums, whatever the tile and the batch.
//
//   columns   blocks for the caches: rows of x stay in L1, rows of W in L2
//    strip    COLUMNS rows of W over all rows of x of a block; `one_row` for a single row of x
//     tile    ROWS rows of x; over the groups of scales of int8 weights
//      dots   the sums
//
// Layouts.  W [outputs, inputs], row-major and contiguous, as the model stores it (float, bf16 or int8_t):
//
//   row n of W     | w0 w1 w2 w3 ...                                 | next row at + inputs elements
//   scales (int8)  | s0 (inputs / groups weights) | s1 | ...         | float32 [outputs, groups]
//
// x [rows, stride], float32. Its layout's `arrange` reorders each row in blocks of B = 2 · LANES elements, so that a block
// of x has the order in which a block of W comes out of its vector loads:
//
//   Natural  W: float, Int8<float>   | x0 x1 x2 ... x(B-1) |
//   EvenOdd  W: bf16, Int8<bf16>     | x0 x2 ... x(B-2) | x1 x3 ... x(B-1) |
//   Pairs    the same, with PAIRS    | (x0,x1) (x2,x3) ... (x(B-2),x(B-1)) | unused |   bf16 pairs in 32 bits, even one low
//
//   bf16 W, one load        32-bit lane i = | w(2i+1) : w(2i) |    << 16 gives the even elements as float32,
//                                                                  & 0xffff0000 the odd ones; in Pairs, a lane is a pair
//   int8 W, one load        byte << 24 as integer, converted: 2^24 · w (INT8_UNIT); the sum is multiplied by s / 2^24;
//                           with PAIRS converted to w, and rounded to pairs, which is exact
//
// The last inputs % B elements of a row (float W: inputs % LANES) keep their natural order and are added one by one. With
// groups > 1, inputs / groups is a multiple of B (`reads_int8` in hybrid/decoders/cpu_decoder.py), so that no block
// crosses a group.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>

#include "bfloat16.h"
#include "records.h"
#include "team.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int ROWS = LANES == 16 ? 6 : 4;
// Blocks: tiles of rows of x that a strip of W is used for at least, bytes of W, strips. Processors with AVX-512 have larger
// L2 caches.
constexpr int CACHED_TILES = LANES == 16 ? 2 : 1;
constexpr int64_t CACHE_LINE = 64, CACHED_BYTES = (LANES == 16 ? 384 : 96) << 10, MOST_STRIPS = LANES == 16 ? 64 : 16;

// ---------------------------------------------------------------- operands

struct Rows {  // of x, arranged
  const float* data;
  int64_t stride, count;
  const uint32_t* tiles = nullptr;  // the same rows, as `make_tiles` writes them; null: each product makes them
  int64_t tile_stride = 0;          // of a row, on average

  const float* row(int64_t i) const { return data + i * stride; }
  // With tiles, `first` is the first row of one.
  Rows part(int64_t first, int64_t rows) const { return {row(first), stride, rows, tiles ? tiles + first * tile_stride : nullptr, tile_stride}; }
};

template <typename V> struct Matrix {  // rows of W of dtype V
  const V* weight;
  const float *bias, *scale;  // or null
  int64_t inputs, groups;

  Matrix from(int64_t row) const { return {weight + row * inputs, bias ? bias + row : nullptr, scale ? scale + row * groups : nullptr, inputs, groups}; }
};

// Where outputs go: stored, or multiplied by a factor and added (ADD: the residual; ADD_LORA: rounded as in PEFT, except
// that float32 fuses product and sum).  is_partial: not rounded, because other ranks' parts are added before.
struct Output {
  enum Mode { STORE, ADD, ADD_LORA } mode;
  float* data;
  int64_t stride;
  float factor = 1.0f;
  bool is_partial = false;
  bool keeps_float32 = false;  // ADD: the sum is not rounded

  Output at(int64_t row, int64_t column) const { return {mode, data + row * stride + column, stride, factor, is_partial, keeps_float32}; }
  // As many columns of a row as W, a vector, has lanes.
  template <typename T, typename W> requires (sizeof(W) > sizeof(float)) void write(int64_t row, int64_t column, W sums) const {
    float* y = data + row * stride + column;
    if (mode == ADD_LORA) {
      for (size_t i = 0; i < sizeof(W) / sizeof(float); i++) write<T>(row, column + int64_t(i), float(sums[i]));
      return;
    }
    W value = is_partial ? sums : rounded<T>(sums);
    if (mode == ADD) {
      W before;
      std::memcpy(&before, y, sizeof before);
      const W added = before + unfused(rounded<T>(value * factor));
      value = keeps_float32 ? added : rounded<T>(added);
    }
    std::memcpy(y, &value, sizeof value);
  }
  template <typename T> void write(int64_t row, int64_t column, float sum) const {
    float& y = data[row * stride + column];
    const float value = is_partial ? sum : rounded<T>(sum);
    if (mode == STORE) {
      y = value;
    } else if (mode == ADD_LORA && (std::is_same_v<T, float> || is_partial)) {
      y = fused_multiply_add(value, factor, y);
    } else {
      const float added = y + unfused(rounded<T>(value * factor));
      y = keeps_float32 ? added : rounded<T>(added);
    }
  }
};

// ---------------------------------------------------------------- dtypes of W

// An int8 weight of a model whose dtype is T.
template <typename T> struct Int8 {
  int8_t value;
};
// Read as INT8_UNIT times its value: shifting a byte to the top of an integer keeps its sign without a sign extension.
template <typename T> constexpr float INT8_UNIT = PAIRS && std::is_same_v<T, bf16> ? 1 : 1 << 24;
template <typename T> static inline float to_float(Int8<T> x) { return x.value * INT8_UNIT<T>; }

// A weight of a model whose dtype is T, converted by `widened` to what is multiplied, in the order of x: to bfloat16 for
// Pairs, else to float32.
template <typename T> struct Widened {
  std::conditional_t<PAIRS && std::is_same_v<T, bf16>, bf16, float> value;
};
template <typename T> static inline float to_float(Widened<T> x) { return to_float(x.value); }
template <typename V> constexpr bool is_widened = false;
template <typename T> constexpr bool is_widened<Widened<T>> = true;

static inline VecI ints(const int8_t* from) {
#if LANES == 16 && defined(__AVX512F__)  // GCC 12 would convert byte by byte
  return (VecI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  return __builtin_convertvector(*(const VecBAny*)from, VecI);
#endif
}

#if LANES == 8 && defined(__AVX2__)
// INT8_UNIT times byte FIRST + STEP · lane of a block, for each lane.
template <int FIRST, int STEP> static inline Vec floats_of(const void* w) {
  const __m256i block = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)w));
  constexpr char Z = char(0x80), A = FIRST, B = FIRST + STEP, C = FIRST + 2 * STEP, D = FIRST + 3 * STEP, E = 4 * STEP;
  const __m256i top = _mm256_setr_epi8(Z, Z, Z, A, Z, Z, Z, B, Z, Z, Z, C, Z, Z, Z, D, Z, Z, Z, A + E, Z, Z, Z, B + E, Z, Z, Z, C + E, Z, Z, Z, D + E);
  return (Vec)_mm256_cvtepi32_ps(_mm256_shuffle_epi8(block, top));
}
static inline Vec half_block(const Int8<bf16>* w, bool second) { return second ? floats_of<1, 2>(w) : floats_of<0, 2>(w); }
static inline Vec half_block(const Int8<float>* w, bool second) { return second ? floats_of<8, 1>(w) : floats_of<0, 1>(w); }
#else
static inline Vec half_block(const Int8<bf16>* w, bool second) {
  const VecI both = __builtin_convertvector(*(const VecSAny*)w, VecI);
  return __builtin_convertvector(second ? both >> 8 << 24 : both << 24, Vec);
}
static inline Vec half_block(const Int8<float>* w, bool second) {
  return __builtin_convertvector(ints((const int8_t*)w + second * LANES) << 24, Vec);
}
#endif
// The two halves of a block of 2 · LANES weights, in the order of x.
static inline Vec half_block(const bf16* w, bool second) {
  const VecU both = *(const VecUAny*)w;
  return (Vec)(second ? both & 0xffff0000u : both << 16);
}

// How W of dtype V is read: a block of BLOCK elements as VECTORS vectors, in the order of x.  Model: dtype that outputs are
// rounded to.
template <typename V> struct Reader;
template <> struct Reader<float> {
  using Model = float;
  using Layout = Natural;
  static constexpr int VECTORS = 1, BLOCK = LANES;
  static Vec read(const float* w, int) { return load(w); }
};
template <typename T> struct Reader<Widened<T>> {
  using Model = T;
  using Layout = Natural;  // x has the order of the weights before they were widened
  static constexpr int VECTORS = 1, BLOCK = LANES;
  static Vec read(const Widened<T>* w, int) { return load(&w->value); }
};
template <> struct Reader<Int8<float>> {
  using Model = float;
  using Layout = Natural;
  static constexpr int VECTORS = 2, BLOCK = 2 * LANES;
  static Vec read(const Int8<float>* w, int i) { return half_block(w, i); }
};
template <typename V> struct Bfloat16Reader {
  using Model = bf16;
  using Layout = Bfloat16Layout;
  static constexpr int VECTORS = PAIRS ? 1 : 2, BLOCK = 2 * LANES;
  static Vec read(const V* w, int i) {
    if constexpr (!PAIRS)
      return half_block(w, i);
    else if constexpr (sizeof(V) == sizeof(bf16))
      return (Vec)*(const VecUAny*)w;
#if PAIRS
    else
      return (Vec)rounded_pairs(floats((const int8_t*)w), floats((const int8_t*)w + LANES));
#endif
  }
  static Vec floats(const int8_t* from) { return __builtin_convertvector(ints(from), Vec); }
};
template <> struct Reader<bf16> : Bfloat16Reader<bf16> {};
template <> struct Reader<Int8<bf16>> : Bfloat16Reader<Int8<bf16>> {};
#if PAIRS
template <> struct Reader<Widened<bf16>> : Bfloat16Reader<Widened<bf16>> {};
#endif

// ROWS x COLUMNS sums, one vector per column and one of a row fill the registers: 32 with AVX-512, else 16. Converting
// bfloat16 or int8 to float32 needs a few more.
template <typename V> constexpr int COLUMNS = LANES == 16 ? 4 : Reader<V>::VECTORS == 1 ? 3 : 2;
// With enough rows it is faster to convert W to floats once than in every tile.
template <typename V> constexpr bool WIDENS = Reader<V>::VECTORS == 2 || (PAIRS && std::is_same_v<V, Int8<bf16>>);
template <typename V> constexpr int64_t WIDENED_ROWS = Reader<V>::VECTORS == 2 ? 32 : 7;
// A single row leaves registers free, and more independent sums hide latency.
constexpr int COLUMNS_OF_ONE_ROW = 4;

// ---------------------------------------------------------------- the product

// Keeps a vector in a register: GCC 12 would load it again for each use, and loads limit the speed of a tile.
static inline Vec held(Vec v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX__) && LANES == 8
  asm("" : "+x"(v));
#endif
  return v;
}

// Sums of ROWS rows and up to 4 columns; a row's are a Vec4 where columns are written four at a time.
struct Tile {
  float at[ROWS][4];

  Vec4 row(int m) const { return *(const Vec4Any*)at[m]; }
};

// Dot products of M rows of x and N rows of W.  out.at[m][n].  prefetch_next: prefetch the next N rows of W.
template <int M, int N, typename V>
static inline __attribute__((always_inline)) void dots(const float* x, int64_t x_stride, const V* w, int64_t w_stride, int64_t inputs, Tile& out, bool prefetch_next) {
  using R = Reader<V>;
  Vec acc[4][ROWS] = {};
  int64_t k = 0;
  for (; k + R::BLOCK <= inputs; k += R::BLOCK) {
#pragma GCC unroll 2
    for (int i = 0; i < R::VECTORS; i++) {
      Vec column[N];
      if (LANES == 16 && i == 0 && !is_widened<V> && prefetch_next)  // a cache line a block: the same inputs of the next rows of W
        for (int n = 0; n < N; n++) __builtin_prefetch(w + (N + n) * w_stride + k, 0, 2);
      for (int n = 0; n < N; n++) column[n] = held(R::read(w + n * w_stride + k, i));
      for (int m = 0; m < M; m++) {
        Vec row = held(load(x + m * x_stride + k + i * LANES));
        for (int n = 0; n < N; n++) acc[n][m] = R::Layout::multiply_add(acc[n][m], row, column[n]);
      }
    }
  }
  if constexpr (COLUMNS<V> == 4) {
    for (int m = 0; m < M; m++) *(Vec4Any*)out.at[m] = sums(acc[0][m], acc[1][m], acc[2][m], acc[3][m]);
  } else {
    for (int n = 0; n < N; n++) {
      const Vec4 column = sums(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
      for (int m = 0; m < M; m++) out.at[m][n] = column[m];
    }
  }
  for (; k < inputs; k++)
    for (int n = 0; n < N; n++)
      for (int m = 0; m < M; m++) out.at[m][n] += x[m * x_stride + k] * to_float(w[n * w_stride + k]);
}

// The same; with scales, the sum over groups of each group's dot product times its scale.
template <int M, int N, typename V>
static inline __attribute__((always_inline)) void tile(const float* x, int64_t x_stride, const Matrix<V>& w, Tile& out, bool prefetch_next) {
  if (!w.scale) return dots<M, N>(x, x_stride, w.weight, w.inputs, w.inputs, out, prefetch_next);
  const int64_t each = w.inputs / w.groups;
  for (int64_t g = 0; g < w.groups; g++) {
    Tile group;
    dots<M, N>(x + g * each, x_stride, w.weight + g * each, w.inputs, each, group, prefetch_next);
    Vec4 scale = {};
    for (int n = 0; n < N; n++) scale[n] = w.scale[n * w.groups + g] * (1 / INT8_UNIT<typename Reader<V>::Model>);
    for (int m = 0; m < M; m++) {
      const Vec4 scaled = unfused(group.row(m) * scale);
      *(Vec4Any*)out.at[m] = g ? out.row(m) + scaled : scaled;
    }
  }
}

// N columns of M rows of y, from row `m` on.  prefetch_next: as in `strip`.
template <int M, int N, typename V> static inline __attribute__((always_inline)) void tile_of(const Rows& x, const Matrix<V>& w, const Output& y, int64_t m, bool prefetch_next) {
  using T = typename Reader<V>::Model;
  Tile sums;
  tile<M, N>(x.row(m), x.stride, w, sums, prefetch_next && m == 0);
  for (int i = 0; i < M; i++) {
    if constexpr (N == 4)
      y.write<T>(m + i, 0, w.bias ? Vec4(sums.row(i) + *(const Vec4Any*)w.bias) : Vec4(sums.row(i)));
    else
      for (int n = 0; n < N; n++) y.write<T>(m + i, n, sums.at[i][n] + (w.bias ? w.bias[n] : 0.0f));
  }
}

// N columns of y.  prefetch_next: the first tile prefetches the next N rows of W.
template <int N, typename V> static __attribute__((noinline)) void strip(const Rows& x, const Matrix<V>& w, const Output& y, bool prefetch_next) {
  int64_t m = 0;
  for (; m + ROWS <= x.count; m += ROWS) tile_of<ROWS, N>(x, w, y, m, prefetch_next);
  switch (x.count - m) {
    case 5: return tile_of<std::min(ROWS, 5), N>(x, w, y, m, prefetch_next);
    case 4: return tile_of<4, N>(x, w, y, m, prefetch_next);
    case 3: return tile_of<3, N>(x, w, y, m, prefetch_next);
    case 2: return tile_of<2, N>(x, w, y, m, prefetch_next);
    case 1: return tile_of<1, N>(x, w, y, m, prefetch_next);
  }
}

// The columns of y for one row of x, N at a time; returns how many of `count` are computed, a multiple of N.
template <int N, typename V> static __attribute__((noinline)) int64_t one_row(const Rows& x, const Matrix<V>& w, const Output& y, int64_t count) {
  int64_t n = 0;
  for (; n + N <= count; n += N) tile_of<1, N>(x, w.from(n), y.at(0, n), 0, true);
  return n;
}

// Columns [0, count) of y.  prefetch_next: as in `strip`.  next: as many rows of W of `next_bytes` each, which are needed next; or null.
template <typename V> static void strips(const Rows& x, const Matrix<V>& w, const Output& y, int64_t count, bool prefetch_next, const void* next = nullptr, int64_t next_bytes = 0) {
  constexpr int C = COLUMNS<V>;
  int64_t n = x.count == 1 ? one_row<COLUMNS_OF_ONE_ROW>(x, w, y, count) : 0;
  for (; n + C <= count; n += C) {
    for (int64_t byte = n * next_bytes; next && byte < (n + C) * next_bytes; byte += CACHE_LINE) __builtin_prefetch((const char*)next + byte, 0, 2);
    strip<C>(x, w.from(n), y.at(0, n), prefetch_next);
  }
  for (; n < count; n++) strip<1>(x, w.from(n), y.at(0, n), prefetch_next);
}

// `count` rows of W, converted, in the order of x, so that sums are bit-identical to those over W itself.
template <typename V, typename T = typename Reader<V>::Model> static Matrix<Widened<T>> widened(const Matrix<V>& w, int64_t count) {
  static thread_local std::vector<Widened<T>> wide;
  count *= w.inputs;
  if (int64_t(wide.size()) < count) wide.resize(count);
  int64_t k = 0;
  for (; k + 2 * LANES <= count; k += 2 * LANES)
    if constexpr (Reader<Widened<T>>::BLOCK == 2 * LANES)
      *(VecUAny*)&wide[k] = (VecU)Reader<V>::read(w.weight + k, 0);
    else
      for (int half = 0; half < 2; half++) store(&wide[k + half * LANES].value, half_block(w.weight + k, half));
  for (; k < count; k++) store(&wide[k].value, to_float(w.weight[k]));
  return {wide.data(), w.bias, w.scale, w.inputs, w.groups};
}

#if TILES
// Words of x in tiles that several threads make together, and tiles from which that saves more time than its barrier takes: one
// takes 18 to 29 ns on an EPYC.
constexpr int64_t SHARED_WORDS = 1 << 18, SHARING_TILES = 128;

typedef float TileSums[2][2][TILE][TILE];  // of 2 tiles of W and 2 of x

// Rows [row, row + count) of W for tiles: those of a bfloat16 matrix in place.
static const bf16* tile_weights(const Matrix<bf16>& w, int64_t row, int64_t) { return w.from(row).weight; }
// int8 numbers are exact in bfloat16. Their scales come after the sums.
static const bf16* tile_weights(const Matrix<Int8<bf16>>& w, int64_t row, int64_t count) { return &widened(w.from(row), count).weight->value; }

// sums[tile of W] += those of a group · its scales, or = for the first group. The scales are of rows of W from `row` on.
template <typename V> static void add_scaled(const Matrix<V>& w, int64_t row, int64_t rows, int64_t group, const TileSums& of_group, TileSums& sums) {
  for (int64_t n = 0; n < rows; n++)
    for (int half = 0; half < 2; half++)
      for (int64_t m = 0; m < TILE; m++) {
        float& sum = sums[n / TILE][half][n % TILE][m];
        const float scaled = unfused(of_group[n / TILE][half][n % TILE][m] * w.scale[(row + n) * w.groups + group]);
        sum = group ? sum + scaled : scaled;
      }
}

// Writes the sums of a tile, [16 rows of W, 16 rows of x], to the first `width` columns of the rows of y. Elements of x from
// `tail` on are added one by one. The sums of several groups are scaled already.
template <typename V> static void write_tile(const Rows& x, const Matrix<V>& w, const Output& y, float (&sums)[TILE][TILE], int64_t tail, int64_t width) {
  transpose(sums);
  for (int64_t r = 0; r < x.count; r++) {
    float* row = sums[r];
    for (int64_t c = 0; c < width && tail < w.inputs; c++)
      for (int64_t k = tail; k < w.inputs; k++) row[c] += x.row(r)[k] * to_float(w.weight[c * w.inputs + k]);
    for (int64_t c = 0; c < width && w.scale && w.groups == 1; c++) row[c] = unfused(row[c] * w.scale[c]);
    if (width == TILE) {
      y.write<bf16>(r, 0, w.bias ? load(row) + load(w.bias) : load(row));
      continue;
    }
    for (int64_t c = 0; c < width; c++) y.write<bf16>(r, c, row[c] + (w.bias ? w.bias[c] : 0.0f));
  }
}

// Words of a row of x in tiles, on average.
static inline int64_t tile_stride(int64_t inputs) { return inputs / TILE_DEPTH * TILE; }

// x with tiles, in memory of this thread until its next call.
static Rows in_own_tiles(const Rows& x, int64_t inputs) {
  static thread_local std::vector<uint32_t> tiles;
  const int64_t stride = tile_stride(inputs), words = (x.count + TILE - 1) / TILE * TILE * stride;
  if (int64_t(tiles.size()) < words) tiles.resize(words);
  make_tiles(x.data, x.stride, x.count, inputs / TILE_DEPTH, tiles.data());
  return {x.data, x.stride, x.count, tiles.data(), stride};
}

// Rows of the next strip of W that each pass of this strip over `count` rows of x requests, 32 to 2: all passes together request
// the strip, so that memory is never idle.
static inline int64_t requested_in_a_pass(int64_t count) {
  const int64_t passes = (count + 2 * TILE - 1) / (2 * TILE);
  return std::bit_ceil(uint64_t(std::max<int64_t>(2 * TILE / passes, 2)));
}

// `columns` in AMX tiles, for rows of x that have them. Elements of a row after its last whole block are added one by one.
template <typename V> static void tile_columns(const Rows& x, const Matrix<V>& w, const Output& y, int64_t first, int64_t last) {
  const int64_t blocks = w.inputs / TILE_DEPTH, tail = blocks * TILE_DEPTH;
  alignas(64) TileSums sums = {}, of_group = {};
  const int64_t a_pass = requested_in_a_pass(x.count);
  tiles_begin();
  for (int64_t n = first; n < last; n += 2 * TILE) {
    const int64_t rows_of_w = std::min(2 * TILE, last - n);
    const bf16* weight = tile_weights(w, n, rows_of_w);
    for (int64_t m = 0, requested = 0; m < x.count; m += 2 * TILE) {
      const uint32_t *x0 = x.tiles + m * x.tile_stride, *x1 = x0 + TILE * x.tile_stride;
      const int64_t fetched = std::is_same_v<V, bf16> && n + 4 * TILE <= last && requested < 2 * TILE ? a_pass : 0;
      const bf16* next = (const bf16*)w.from(n + 2 * TILE + requested).weight;
      requested += fetched;
      const auto products = m + TILE < x.count ? products_that_fetch<true>(fetched) : products_that_fetch<false>(fetched);
      if (w.groups == 1) products(weight, w.inputs, rows_of_w, x0, x1, 0, blocks, next, sums);
      for (int64_t g = 0; g < w.groups && w.groups > 1; g++) {
        products(weight, w.inputs, rows_of_w, x0, x1, g * blocks / w.groups, (g + 1) * blocks / w.groups, next, of_group);
        add_scaled(w, n, rows_of_w, g, of_group, sums);
      }
      for (int half = 0; half < 2; half++)
        for (int64_t c = n; c < std::min(n + 2 * TILE, last); c += TILE) {
          const int64_t r0 = m + half * TILE, count = std::min(TILE, x.count - r0), width = std::min(TILE, last - c);
          if (count > 0) write_tile(x.part(r0, count), w.from(c), y.at(r0, c), sums[(c - n) / TILE][half], tail, width);
        }
    }
  }
  tiles_end();
}

// Rows of W of a gate, and as many of an up projection, without scales and biases. inputs: a multiple of TILE_DEPTH.
struct GateAndUp {
  const bf16 *gate, *up;  // null: none that tiles can multiply together
  int64_t inputs;
};

// Rows [first, last) of both W, a multiple of 32, over rows of x that have tiles. Calls body(row of x, first, gates, ups) for 32
// sums each, as 2 vectors: they never leave the L1 cache, where `tile_columns` would write and `activate` read whole rows.
template <typename Body> static void gated_tile_columns(const Rows& x, const GateAndUp& w, int64_t first, int64_t last, Body body) {
  const int64_t blocks = w.inputs / TILE_DEPTH, a_pass = requested_in_a_pass(x.count);
  alignas(64) TileSums gates = {}, ups = {};
  tiles_begin();
  for (int64_t n = first; n < last; n += 2 * TILE)
    for (int64_t m = 0, requested = 0; m < x.count; m += 2 * TILE) {
      const uint32_t *x0 = x.tiles + m * x.tile_stride, *x1 = x0 + TILE * x.tile_stride;
      const int64_t fetched = n + 4 * TILE <= last && requested < 2 * TILE ? a_pass : 0, next = (n + 2 * TILE + requested) * w.inputs;
      requested += fetched;
      const auto products = m + TILE < x.count ? products_that_fetch<true>(fetched) : products_that_fetch<false>(fetched);
      products(w.gate + n * w.inputs, w.inputs, 2 * TILE, x0, x1, 0, blocks, w.gate + next, gates);
      products(w.up + n * w.inputs, w.inputs, 2 * TILE, x0, x1, 0, blocks, w.up + next, ups);
      for (int64_t half = 0; half < 2 && m + half * TILE < x.count; half++) {
        for (int tile = 0; tile < 2; tile++) transpose(gates[tile][half]), transpose(ups[tile][half]);
        const auto of = [half](const TileSums& sums, int64_t r) { return std::array<Vec, 2>{load(sums[0][half][r]), load(sums[1][half][r])}; };
        for (int64_t r = 0; r < std::min(TILE, x.count - m - half * TILE); r++) body(m + half * TILE + r, n, of(gates, r), of(ups, r));
      }
    }
  tiles_end();
}
#endif

// Whether products of a model of dtype T are in tiles.
template <typename T> static inline bool in_product_tiles(int64_t inputs) {
#if TILES
  return std::is_same_v<T, bf16> && inputs >= TILE_DEPTH && tiles_ready();
#else
  return false;
#endif
}

// Calls body(rows of x, first of them) for all rows. Where products are in tiles the rows have them: made before, or here for
// every product in `body`, as many rows at a time as stay in the L2 cache.
template <typename T, typename Body> static void over_tiled_rows(const Rows& x, int64_t inputs, Body body) {
#if TILES
  if (in_product_tiles<T>(inputs) && !x.tiles) {
    const int64_t at_once = tile_rows(inputs);
    for (int64_t top = 0; top < x.count; top += at_once) body(in_own_tiles(x.part(top, std::min(at_once, x.count - top)), inputs), top);
    return;
  }
#endif
  body(x, int64_t(0));
}

// Addresses that are a multiple of SAME_SET floats apart map to the same set of the L1 cache, so that rows of x at this stride
// evict each other. A set has room for ROWS_OF_A_SET rows of x and a tile's rows of W. Copying x pays for COPYING_COLUMNS or more
// rows of W.
constexpr int64_t SAME_SET = 1024, ROWS_OF_A_SET = 4, COPYING_COLUMNS = 32;

// The rows of x an odd number of cache lines apart, in memory of this thread until its next call.
static Rows apart(const Rows& x, int64_t inputs) {
  static thread_local std::vector<float> copy;
  constexpr int64_t LINE = CACHE_LINE / int64_t(sizeof(float));
  const int64_t stride = ((inputs + LINE - 1) / LINE | 1) * LINE;
  if (int64_t(copy.size()) < x.count * stride + LINE) copy.resize(x.count * stride + LINE);
  float* rows = copy.data() + -(uintptr_t)copy.data() % CACHE_LINE / sizeof(float);
  for (int64_t m = 0; m < x.count; m++) std::memcpy(rows + m * stride, x.row(m), inputs * sizeof(float));
  return {rows, stride, x.count};
}

// Columns [first, last) of y for one matrix. Blocks are sized so that the rows of x in use stay in the L1 cache and the
// rows of W, used again for each of them, in the L2 cache; x is processed in chunks that fit the last-level cache.
template <typename V> static void columns(const Rows& x, const Matrix<V>& w, const Output& y, int64_t first, int64_t last) {
#if TILES
  if constexpr (std::is_same_v<typename Reader<V>::Model, bf16>)
    if (in_product_tiles<bf16>(w.inputs))
      return over_tiled_rows<bf16>(x, w.inputs, [&](const Rows& rows, int64_t top) { tile_columns(rows, w, y.at(top, 0), first, last); });
#endif
  using Wide = Widened<typename Reader<V>::Model>;
  const bool widen = WIDENS<V> && x.count >= WIDENED_ROWS<V> && w.inputs % (2 * LANES) == 0;
  const int64_t row_block = (w.inputs <= 1024 ? 2 : 1) * CACHED_TILES * ROWS;
  const int64_t chunk = std::max<int64_t>((1 << 20) / (w.inputs * int64_t(sizeof(float))) / row_block, 8) * row_block;
  const int64_t C = widen ? COLUMNS<Wide> : COLUMNS<V>;
  const int64_t wanted = (widen && PAIRS ? CACHED_BYTES / 8 : CACHED_BYTES) / (w.inputs * int64_t(widen ? sizeof(Wide) : sizeof(V))) / C * C;
  const int64_t column_block = x.count == 1 ? last - first : std::clamp<int64_t>(wanted, C, MOST_STRIPS * C);
  // Products of other dtypes were no faster.
  const bool copies = std::is_same_v<V, float> && x.stride % SAME_SET == 0 && x.count > ROWS_OF_A_SET && last - first >= COPYING_COLUMNS;
  for (int64_t top = 0; top < x.count; top += chunk) {
    const Rows given = x.part(top, std::min(chunk, x.count - top)), rows = copies ? apart(given, w.inputs) : given;
    for (int64_t n = first; n < last; n += column_block) {
      const int64_t count = std::min(column_block, last - n);
      const auto over_rows = [&](const auto& block, const V* next) {
        for (int64_t m = 0; m < rows.count; m += row_block, next = nullptr)
          strips(rows.part(m, std::min(row_block, rows.count - m)), block, y.at(top + m, n), count, m == 0, next, w.inputs * int64_t(sizeof(V)));
      };
      if constexpr (WIDENS<V>)
        if (widen) {
          over_rows(widened(w.from(n), count), n + 2 * count <= last ? w.from(n + count).weight : nullptr);
          continue;
        }
      over_rows(w.from(n), nullptr);
    }
  }
}

// ---------------------------------------------------------------- matrices of several parts, over threads

static inline int64_t outputs(const Linear& l) {
  int64_t rows = 0;
  for (int i = 0; i < l.parts; i++) rows += l.rows[i];
  return rows;
}

// Rows of x and columns of y that are computed at full speed together.  T: the model's dtype.
template <typename T> static inline Grain product_grain() {
#if TILES
  if (std::is_same_v<T, bf16> && tiles_ready()) return {2 * TILE, 2 * TILE, sizeof(T), 512};
#endif
  return {ROWS, COLUMNS<T>, sizeof(T), PAIRS && std::is_same_v<T, bf16> ? 2 * LANES : LANES};
}

// Columns [first, last) of y [rows, outputs] = x [rows, inputs] · Wᵀ + bias.  T: the model's dtype.
template <typename T> static void linear(const Linear& l, const Rows& x, const Output& y, int64_t first, int64_t last) {
  over_tiled_rows<T>(x, l.inputs, [&](const Rows& rows, int64_t top) {
    int64_t offset = 0;
    for (int i = 0; i < l.parts; i++) {
      const int64_t from = std::max<int64_t>(first - offset, 0), to = std::min(last - offset, l.rows[i]);
      if (from < to && l.scale[i])
        columns(rows, Matrix<Int8<T>>{(const Int8<T>*)l.weight[i], l.bias[i], l.scale[i], l.inputs, l.groups}, y.at(top, offset), from, to);
      else if (from < to)
        columns(rows, Matrix<T>{(const T*)l.weight[i], l.bias[i], nullptr, l.inputs, 1}, y.at(top, offset), from, to);
      offset += l.rows[i];
    }
  });
}

// Rows [first, first + count) of a Linear that has one part, without its bias.
template <typename T> static inline Linear rows_of(const Linear& l, int64_t first, int64_t count) {
  Linear part{};
  part.weight[0] = (const char*)l.weight[0] + first * l.inputs * (l.scale[0] ? sizeof(Int8<T>) : sizeof(T));
  if (l.scale[0]) part.scale[0] = l.scale[0] + first * l.groups;
  part.rows[0] = count, part.parts = 1, part.inputs = l.inputs, part.groups = l.groups;
  return part;
}

// body(part) for each run of rows whose tokens have the delta's adapter.  adapters: as Batch's, of the first row on.
template <typename Body> static void over_rows_with(const LoraDelta& delta, const int32_t* adapters, Range rows, Body body) {
  if (delta.adapter < 0) return body(rows);
  for (int64_t first = rows.first, last; first < rows.last; first = last) {
    for (last = first + 1; last < rows.last && adapters[last] == adapters[first];) last++;
    if (adapters[first] == delta.adapter) body(Range{first, last});
  }
}

// LoRA A·x into `ax` for every unmerged adapter of l, for this thread's tokens that have it, arranged for `add_lora`. No
// barrier.
template <typename T> static void lora_a(const Linear& l, const Rows& x, const int32_t* adapters, float* ax, int thread, int threads) {
  const Range mine = partition(l.num_lora_deltas * x.count, 1, thread, threads);
  for (int64_t i = 0; i < l.num_lora_deltas; i++) {
    const LoraDelta& delta = l.lora_deltas[i];
    const int64_t first = std::max<int64_t>(mine.first - i * x.count, 0), last = std::min(mine.last - i * x.count, x.count);
    over_rows_with(delta, adapters, {first, last}, [&](Range rows) {
      float* out = ax + delta.offset * x.count + rows.first * delta.rank;
      columns(Rows{x.row(rows.first), x.stride, rows.size()}, Matrix<T>{(const T*)delta.a, nullptr, nullptr, l.inputs, 1}, {Output::STORE, out, delta.rank}, 0, delta.rank);
      for (int64_t m = 0; m < rows.size(); m++) Reader<T>::Layout::arrange(out + m * delta.rank, delta.rank);
    });
  }
}

// Adds scale · B · ax of every unmerged adapter to a share of y [rows, outputs], in the order of the adapters.
template <typename T> static void add_lora(const Linear& l, const float* ax, const int32_t* adapters, int64_t rows, const Output& y, Share share) {
  for (int64_t i = 0; i < l.num_lora_deltas; i++) {
    const LoraDelta& delta = l.lora_deltas[i];
    const int64_t from = std::max<int64_t>(share.columns.first - delta.first, 0), to = std::min(share.columns.last - delta.first, delta.rows);
    const Output out{Output::ADD_LORA, y.data + delta.first, y.stride, float(delta.scale), y.is_partial};
    const Rows all{ax + delta.offset * rows, delta.rank, rows};
    if (from >= to) continue;
    over_rows_with(delta, adapters, share.rows, [&](Range part) {
      columns(all.part(part.first, part.size()), Matrix<T>{(const T*)delta.b, nullptr, nullptr, delta.rank, 1}, out.at(part.first, 0), from, to);
    });
  }
}
