// The threads that run a forward together: their barrier, and their shares of the work. Results do not depend on how many
// threads there are, nor on who does what.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

// [first, last)
struct Range {
  int64_t first, last;

  int64_t size() const { return last - first; }
};
// A thread's range of [0, count); boundaries are multiples of `grain`.
static inline Range partition(int64_t count, int64_t grain, int thread, int threads) {
  const int64_t grains = (count + grain - 1) / grain;
  return {std::min(grains * thread / threads * grain, count), std::min(grains * (thread + 1) / threads * grain, count)};
}

// A thread's part of a product: rows of x, and columns of y (rows of W).
struct Share {
  Range rows, columns;
};
// How products are divided.  rows, columns: of the smallest parts that are computed at full speed.  weight_bytes: of a weight.
// macs: multiply-adds a cycle.
struct Grain {
  int64_t rows, columns, weight_bytes, macs;
};
constexpr int64_t BYTES_A_CYCLE = 8;  // that a thread reads from the caches that it shares with others
constexpr int64_t LEAST_ROWS = 4;     // grains of rows of a share

// Threads divide the columns, so that each reads its part of W only. With many rows they form a grid instead: each reads
// fewer rows of x and more of W, where that is less in all.
static inline Share share_of(int64_t rows, int64_t columns, Grain grain, int thread, int threads) {
  const auto in_grains = [](int64_t count, int64_t size, int64_t parts) { return ((count + size - 1) / size + parts - 1) / parts * size; };
  const auto cycles = [&](int parts_of_rows) {  // of the largest share, an input
    const int64_t r = in_grains(rows, grain.rows, parts_of_rows), c = in_grains(columns, grain.columns, threads / parts_of_rows);
    return double(r * c) / grain.macs + double(r * int64_t(sizeof(float)) + c * grain.weight_bytes) / BYTES_A_CYCLE;
  };
  int best = 1;
  for (int parts = 2; parts <= threads && rows >= parts * LEAST_ROWS * grain.rows; parts++)
    if (threads % parts == 0 && cycles(parts) < cycles(best)) best = parts;
  const int across = threads / best;
  return {partition(rows, grain.rows, thread / across, best), partition(columns, grain.columns, thread % across, across)};
}

// A barrier of `threads` threads. A waiting thread spins SPINS times, then yields its core, which the thread that it waits
// for may need. (GNU OpenMP's barrier spins for milliseconds: two processes on the same cores are then ten times slower.)
struct Barrier {
  static constexpr int SPINS = 1000;
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> round{0};

  void wait(int threads) {
    const int current = round.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      round.store(current + 1, std::memory_order_release);
      return;
    }
    for (int i = 0; i < SPINS; i++) {
      if (round.load(std::memory_order_acquire) != current) return;
#ifdef __x86_64__
      __builtin_ia32_pause();
#endif
    }
    while (round.load(std::memory_order_acquire) == current) sched_yield();
  }
};

// Items [0, count) handed out to threads as they ask: in runs, of which the last are short, because some items take longer.
struct Queue {
  std::atomic<int64_t> next{0};

  // Before a barrier that precedes the first `take`, by one thread.
  void restart() { next.store(0, std::memory_order_relaxed); }
  // The next run; empty at the end.
  Range take(int64_t count, int threads) {
    int64_t first = next.load(std::memory_order_relaxed), last;
    do last = std::min(count, first + std::max<int64_t>((count - first) / (4 * threads), 1));
    while (first < count && !next.compare_exchange_weak(first, last, std::memory_order_relaxed));
    return {std::min(first, count), last};
  }
};
