// bfloat16 products in hardware: pairs, which AVX512_BF16 multiplies and adds in one instruction, and AMX tiles of pairs.
//
// With EMULATE_BF16 (1: pairs, 2: tiles too) functions replace the instructions, as Intel's manual defines them, so that
// the code around them runs and is tested on machines without them.
#pragma once
#include <algorithm>
#include <vector>

#include "vector.h"

#if defined(__AVX512BF16__) || defined(EMULATE_BF16)
#define PAIRS 1
static_assert(LANES == 16, "pairs fill vectors of 512 bits");

#ifdef EMULATE_BF16
static inline Vec dot_pairs(Vec sum, VecU a, VecU b) {
  for (int i = 0; i < LANES; i++) {
    sum[i] += to_float(bf16{uint16_t(a[i] >> 16)}) * to_float(bf16{uint16_t(b[i] >> 16)});
    sum[i] += to_float(bf16{uint16_t(a[i])}) * to_float(bf16{uint16_t(b[i])});
  }
  return sum;
}
static inline VecU rounded_pairs(Vec first, Vec second) {
  VecU pairs;
  for (int i = 0; i < LANES; i++) {
    const Vec from = i < LANES / 2 ? to_bf16(first) : to_bf16(second);
    const int at = 2 * i % LANES;
    pairs[i] = ((VecU)from)[at] >> 16 | (((VecU)from)[at + 1] & 0xffff0000u);
  }
  return pairs;
}
#else
#include <immintrin.h>
static inline Vec dot_pairs(Vec sum, VecU a, VecU b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
// The elements of two vectors, in order, rounded to bfloat16, as pairs. Neither may hold denormal numbers, which become 0.
static inline VecU rounded_pairs(Vec first, Vec second) { return (VecU)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }
#endif

#else
#define PAIRS 0
#endif

// Bfloat16 numbers, held as floats, as pairs: even ones low.
static inline VecU pairs_of(Vec even, Vec odd) { return (VecU)even >> 16 | ((VecU)odd & 0xffff0000u); }
// Those of two vectors, in order.
static inline VecU pairs_in_order(Vec first, Vec second) {
  VecI even, odd;  // indices into both
  for (int i = 0; i < LANES; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
  return pairs_of(__builtin_shuffle(first, second, even), __builtin_shuffle(first, second, odd));
}
static inline uint32_t pair_of(float even, float odd) {
  uint32_t low, high;
  std::memcpy(&low, &even, 4), std::memcpy(&high, &odd, 4);
  return low >> 16 | (high & 0xffff0000u);
}

// The layouts of a row of x, drawn in linear.h, and how a vector of it is multiplied by one of W and added.

struct Natural {  // float32 models
  static void arrange(float*, int64_t) {}
  static Vec multiply_add(Vec sum, Vec x, Vec w) { return sum + x * w; }
};

#if PAIRS
struct Pairs {
  static void arrange(float* row, int64_t size) {
    for (int64_t k = 0; k + 2 * LANES <= size; k += 2 * LANES) store(row + k, (Vec)pairs_in_order(load(row + k), load(row + k + LANES)));
  }
  static Vec multiply_add(Vec sum, Vec x, Vec w) { return dot_pairs(sum, (VecU)x, (VecU)w); }
};
using Bfloat16Layout = Pairs;
#else
struct EvenOdd {
  static void arrange(float* row, int64_t size) {
    for (int64_t k = 0; k + 2 * LANES <= size; k += 2 * LANES) {
      float block[2 * LANES];
      for (int i = 0; i < LANES; i++) {
        block[i] = row[k + 2 * i];
        block[i + LANES] = row[k + 2 * i + 1];
      }
      std::memcpy(row + k, block, sizeof block);
    }
  }
  static Vec multiply_add(Vec sum, Vec x, Vec w) { return sum + x * w; }
};
using Bfloat16Layout = EvenOdd;
#endif

#if PAIRS && (defined(__AMX_BF16__) || EMULATE_BF16 > 1)  // tiles are made of pairs
#define TILES 1
constexpr int64_t TILE = 16;         // rows of W, and rows of x, in a tile
constexpr int64_t TILE_DEPTH = 32;   // elements of a row in a tile: 16 pairs
// Rows of x that are converted to tiles at once, and that a strip of W is used for: so many that they stay in the L2 cache.
static inline int64_t tile_rows(int64_t inputs) { return std::clamp<int64_t>((1 << 20) / (inputs * int64_t(sizeof(bf16))) / TILE, 4, 32) * TILE; }

#ifdef EMULATE_BF16
static thread_local uint32_t emulated_tiles[8][TILE][TILE];
static thread_local int64_t emulated_loads, emulated_products;  // of this thread so far
static inline bool tiles_ready() { return true; }
static inline void tiles_begin() {}
static inline void tiles_end() {}
#define _tile_zero(t) std::memset(emulated_tiles[t], 0, sizeof emulated_tiles[t])
static inline void _tile_loadd(int t, const void* base, int64_t stride) {
  emulated_loads++;
  for (int r = 0; r < TILE; r++) std::memcpy(emulated_tiles[t][r], (const char*)base + r * stride, 64);
}
static inline void _tile_stored(int t, void* base, int64_t stride) {
  for (int r = 0; r < TILE; r++) std::memcpy((char*)base + r * stride, emulated_tiles[t][r], 64);
}
static inline void _tile_dpbf16ps(int c, int a, int b) {
  emulated_products++;
  for (int m = 0; m < TILE; m++)
    for (int k = 0; k < TILE; k++)
      for (int n = 0; n < TILE; n++) {
        float sum;
        std::memcpy(&sum, &emulated_tiles[c][m][n], 4);
        const uint32_t x = emulated_tiles[a][m][k], y = emulated_tiles[b][k][n];
        sum += to_float(bf16{uint16_t(x)}) * to_float(bf16{uint16_t(y)});
        sum += to_float(bf16{uint16_t(x >> 16)}) * to_float(bf16{uint16_t(y >> 16)});
        std::memcpy(&emulated_tiles[c][m][n], &sum, 4);
      }
}
#else
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
// Linux enables AMX for a process on request (arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
static inline bool tiles_ready() {
  static const bool permitted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return permitted;
}
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// GCC 12's intrinsics do not say which memory they read, so that stores to it may come later, or never.
static inline void tiles_begin() {
  const TileConfig config;
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
#undef _tile_loadd
#define _tile_loadd(tile, base, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"(int64_t(stride)) : "memory")
static inline void tiles_end() { _tile_release(); }
#endif

// A tile's lanes `DISTANCE` apart exchanged between rows `DISTANCE` apart.
template <int DISTANCE> static inline void exchange_lanes(Vec (&rows)[TILE]) {
  VecI low, high;  // indices into both rows' lanes
  for (int i = 0; i < TILE; i++) {
    low[i] = i & DISTANCE ? TILE + i - DISTANCE : i;
    high[i] = i & DISTANCE ? TILE + i : i + DISTANCE;
  }
  for (int i = 0; i < TILE; i++) {
    if (i & DISTANCE) continue;
    const Vec a = rows[i], b = rows[i + DISTANCE];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + DISTANCE] = __builtin_shuffle(a, b, high);
  }
}
static inline void transpose(Vec (&rows)[TILE]) {
  exchange_lanes<8>(rows);
  exchange_lanes<4>(rows);
  exchange_lanes<2>(rows);
  exchange_lanes<1>(rows);
}
static inline void transpose(float (&tile)[TILE][TILE]) {
  Vec rows[TILE];
  for (int i = 0; i < TILE; i++) rows[i] = load(tile[i]);
  transpose(rows);
  for (int i = 0; i < TILE; i++) store(tile[i], rows[i]);
}

// `rows` rows of x, in Pairs, to tiles [rows / 16, blocks, 16 pairs, 16 rows], rounded up and padded with zeros.
static void make_tiles(const float* x, int64_t stride, int64_t rows, int64_t blocks, uint32_t* tiles) {
  for (int64_t top = 0; top < rows; top += TILE)
    for (int64_t b = 0; b < blocks; b++, tiles += TILE * TILE) {
      Vec pairs[TILE];
      for (int64_t m = 0; m < TILE; m++) pairs[m] = top + m < rows ? load(x + (top + m) * stride + b * TILE_DEPTH) : Vec{};
      transpose(pairs);
      for (int64_t k = 0; k < TILE; k++) store((float*)tiles + k * TILE, pairs[k]);
    }
}

// 16 rows for a tile, of 64 bytes each, `stride` bytes apart, in place; if only `rows` of them are there, a copy with zeros for
// the others, so that every row is computed alike.
struct TileRows {
  const void* base;
  int64_t stride;
  alignas(64) char copy[TILE][TILE_DEPTH * sizeof(bf16)];

  TileRows(const bf16* from, int64_t bytes_apart, int64_t rows) : base(from), stride(bytes_apart) {
    if (rows >= TILE) return;
    std::memset(copy, 0, sizeof copy);
    for (int64_t r = 0; r < rows; r++) std::memcpy(copy[r], (const char*)from + r * stride, sizeof copy[r]);
    base = copy, stride = sizeof copy[0];
  }
};

// Sums of blocks [first, last) of `rows` rows of W [rows, inputs], at most 32.  sums [2 tiles of W, 2 tiles of x, 16 rows of W,
// 16 rows of x]; of one tile of x (TWO false) only sums[.][0] are written.  next: FETCHED rows of W that are requested, a line
// of each for each block: the processor does not follow so many rows by itself.
template <bool TWO, int FETCHED> static void tile_products(const bf16* w, int64_t inputs, int64_t rows, const uint32_t* x0, const uint32_t* x1, int64_t first,
                                                           int64_t last, const bf16* next, float (*sums)[2][TILE][TILE]) {
  const int64_t stride = inputs * int64_t(sizeof(bf16));
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (TWO) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int64_t b = first; b < last; b++) {
#pragma GCC unroll 32
    for (int r = 0; r < FETCHED; r++) __builtin_prefetch((const char*)(next + b * TILE_DEPTH) + r * stride, 0, 2);
    const TileRows upper(w + b * TILE_DEPTH, stride, rows), lower(w + TILE * inputs + b * TILE_DEPTH, stride, rows - TILE);
    _tile_loadd(4, upper.base, upper.stride);
    _tile_loadd(5, lower.base, lower.stride);
    _tile_loadd(6, x0 + b * TILE * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (TWO) {
      _tile_loadd(7, x1 + b * TILE * TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(2, sums[1][0], 64);
  if constexpr (TWO) {
    _tile_stored(1, sums[0][1], 64);
    _tile_stored(3, sums[1][1], 64);
  }
}
template <bool TWO> static auto products_that_fetch(int64_t rows) {
  switch (rows) {
    case 32: return tile_products<TWO, 32>;
    case 16: return tile_products<TWO, 16>;
    case 8: return tile_products<TWO, 8>;
    case 4: return tile_products<TWO, 4>;
    case 2: return tile_products<TWO, 2>;
    default: return tile_products<TWO, 0>;
  }
}
#else
#define TILES 0
static inline bool tiles_ready() { return false; }
static inline void tiles_begin() {}
static inline void tiles_end() {}
#endif
