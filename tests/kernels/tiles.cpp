// AMX tiles, emulated: a line for each case of test_cpu_bfloat16.py, "name loads products"; exits with 1 and a message where a
// row's bits depend on what is computed with it, or a probability is not the exponential.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "attention.h"
#include "linear.h"

static std::mt19937 generator;
static std::vector<float> normal(int64_t count) {
  std::normal_distribution<float> draw;
  std::vector<float> numbers(count);
  for (float& x : numbers) x = to_bf16(draw(generator));
  return numbers;
}
static std::vector<bf16> weights(int64_t count) {
  std::vector<bf16> numbers(count);
  const std::vector<float> from = normal(count);
  for (int64_t i = 0; i < count; i++) store(&numbers[i], from[i]);
  return numbers;
}
static void require_equal(const std::vector<float>& a, const std::vector<float>& b, const char* name, int64_t size) {
  if (std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0) return;
  std::printf("bits differ: %s, %ld\n", name, long(size));
  std::exit(1);
}
template <typename Body> static void counted(const char* name, int64_t size, Body body) {
  const int64_t loads = emulated_loads, products = emulated_products;
  body();
  std::printf("%s%ld %ld %ld\n", name, long(size), long(emulated_loads - loads), long(emulated_products - products));
}

// One KV head of a sequence, whose last tokens are queries.
struct Sequence {
  int64_t dim, pad, tokens;
  AttentionShape shape;
  std::vector<bf16> keys, values;
  std::vector<int32_t> table;
  std::vector<float> q, work;

  Sequence(int64_t dim, int64_t tokens, int64_t window, float softcap)
      : dim(dim), pad((dim + LANES - 1) / LANES * LANES), tokens(tokens), shape{1, dim, dim, pad, 0.125f, softcap, window, false} {
    const int64_t blocks = (tokens + BLOCK_SIZE - 1) / BLOCK_SIZE;
    keys = weights(blocks * key_dims(dim) * BLOCK_SIZE), values = weights(blocks * pad * BLOCK_SIZE);
    for (int64_t i = 0; i < blocks; i++) table.push_back(int32_t(blocks - 1 - i));
    q = normal(HELD_QUERIES * dim), work.resize(AttentionWork::floats(dim, pad));
  }
  // Outputs of `count` queries from `first` on, computed together; or each split by itself, and then merged.
  std::vector<float> attended(int first, int count, bool merged = false) {
    const int64_t splits = (tokens - 1) / SPLIT_TOKENS + 1, each = splits * SplitSums::floats(pad);
    std::vector<float> out(count * dim), parts(merged ? count * each : 0);
    std::vector<Query> queries;
    for (int n = 0; n < count; n++)
      queries.push_back({&q[(first + n) * dim], &out[n * dim], tokens - HELD_QUERIES + first + n, 0, merged ? &parts[n * each] : nullptr, nullptr});
    for (int64_t split = 0; split < (merged ? splits : 1); split++)
      attend<bf16>(shape, queries.data(), count, 0, {split, merged ? split + 1 : splits}, keys.data(), values.data(), table.data(),
                   AttentionWork(work.data(), pad));
    for (int n = 0; merged && n < count; n++) merge_parts<bf16>(shape, queries[n]);
    return out;
  }
};

static void queries_in_every_pattern() {
  for (const int64_t dim : {40, 64})
    for (const int64_t window : {0, 530})
      for (const float softcap : {0.0f, 30.0f}) {
        Sequence sequence(dim, 1070, window, softcap);
        std::vector<float> alone;
        for (int n = 0; n < HELD_QUERIES; n++) {
          const std::vector<float> one = sequence.attended(n, 1);
          alone.insert(alone.end(), one.begin(), one.end());
        }
        for (const int count : {7, 16, 17, 31, 32, 33, HELD_QUERIES})
          for (const bool merged : {false, true}) {
            const int first = HELD_QUERIES - count;
            require_equal(sequence.attended(first, count, merged), {alone.begin() + first * dim, alone.end()}, "queries", count);
          }
      }
}

// A product with rows of W that fill whole tiles, or not.
static void rows_of_x() {
  constexpr int64_t INPUTS = 2 * TILE_DEPTH + 5, OUTPUTS = 41, ROWS_OF_X = 70;
  const std::vector<bf16> w = weights(OUTPUTS * INPUTS);
  std::vector<float> x = normal(ROWS_OF_X * INPUTS), alone;
  for (int64_t r = 0; r < ROWS_OF_X; r++) Bfloat16Layout::arrange(&x[r * INPUTS], INPUTS);
  Linear l{};
  l.weight[0] = w.data(), l.weight[1] = w.data() + 9 * INPUTS;
  l.rows[0] = 9, l.rows[1] = OUTPUTS - 9, l.parts = 2, l.inputs = INPUTS, l.groups = 1;
  const auto product = [&](const Rows& rows) {
    std::vector<float> y(rows.count * OUTPUTS);
    linear<bf16>(l, rows, {Output::STORE, y.data(), OUTPUTS}, 0, OUTPUTS);
    return y;
  };
  const Rows all{x.data(), INPUTS, ROWS_OF_X};
  for (int64_t r = 0; r < ROWS_OF_X; r++) {
    const std::vector<float> one = product(all.part(r, 1));
    alone.insert(alone.end(), one.begin(), one.end());
  }
  for (const int64_t count : {15, 16, 17, 32, 33, 70})
    require_equal(product(all.part(0, count)), {alone.begin(), alone.begin() + count * OUTPUTS}, "rows", count);
  // Tiles that are there are used, also from a later row on.
  const int64_t stride = tile_stride(INPUTS);
  std::vector<uint32_t> tiles((ROWS_OF_X + TILE - 1) / TILE * TILE * stride);
  make_tiles(x.data(), INPUTS, ROWS_OF_X, INPUTS / TILE_DEPTH, tiles.data());
  const Rows tiled{x.data(), INPUTS, ROWS_OF_X, tiles.data(), stride};
  require_equal(product(tiled.part(2 * TILE, ROWS_OF_X - 2 * TILE)), {alone.begin() + 2 * TILE * OUTPUTS, alone.end()}, "shared tiles", ROWS_OF_X);
  std::fill(tiles.begin(), tiles.end(), 0);
  if (product(tiled) == alone) std::printf("tiles that are there were made again\n"), std::exit(1);
}

// Probabilities of a split against the C library's exponentials; tokens that are not seen have none.
static void probabilities() {
  constexpr float SCALE = 0.125f, MAX = 3.0f;
  std::vector<float> row(SPLIT_TOKENS), scores;
  for (int64_t t = 0; t < SPLIT_TOKENS; t++) row[t] = t % 7 == 3 ? -INFINITY : (MAX - float(t) * 0.18f) / SCALE;
  scores = row;
  const float total = to_probabilities<bf16>(row.data(), SPLIT_TOKENS, SCALE, MAX);
  double expected_total = 0;
  for (int64_t t = 0; t < SPLIT_TOKENS; t++) {
    const double expected = std::exp(double(scores[t]) * SCALE - MAX);
    const float actual = to_float(((const bf16*)row.data())[t]);
    expected_total += expected;
    if (expected < 1e-37 ? actual > 1e-37f : std::abs(actual / expected - 1) > 0.00392) std::printf("probability %ld: %g for %g\n", long(t), actual, expected), std::exit(1);
  }
  if (std::abs(total / expected_total - 1) > 5e-6) std::printf("the probabilities' sum is %g for %g\n", total, expected_total), std::exit(1);
}

int main() {
  probabilities();
  queries_in_every_pattern();
  rows_of_x();
  Sequence sequence(64, SPLIT_TOKENS, 0, 0);
  for (const int count : {16, 32, 96}) counted("attention ", count, [&] { sequence.attended(HELD_QUERIES - count, count); });
  constexpr int64_t INPUTS = 256, OUTPUTS = 64;
  const std::vector<bf16> w = weights(OUTPUTS * INPUTS);
  std::vector<Int8<bf16>> w8(OUTPUTS * INPUTS, Int8<bf16>{3});
  const std::vector<float> scale(OUTPUTS, 1.0f), x = normal(64 * INPUTS);
  std::vector<float> y(64 * OUTPUTS);
  for (const int64_t rows : {1, 16, 64}) {
    const Rows of{x.data(), INPUTS, rows};
    const Output out{Output::STORE, y.data(), OUTPUTS};
    counted("bfloat16 ", rows, [&] { columns(of, Matrix<bf16>{w.data(), nullptr, nullptr, INPUTS, 1}, out, 0, OUTPUTS); });
    counted("int8 ", rows, [&] { columns(of, Matrix<Int8<bf16>>{w8.data(), nullptr, scale.data(), INPUTS, 1}, out, 0, OUTPUTS); });
  }
}
