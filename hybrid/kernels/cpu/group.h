// Ranks that share a decoder, each with slices of its weights: sums of float32 over the ranks, in rank order, so that all
// ranks have the same bits.
//
// Ranks of one host exchange through memory that all of them have mapped:
//
//   | an Arrival of each rank | buffer 0 of each rank | buffer 1 of each rank |       a buffer: `capacity` floats
//
// A round: a rank writes to its buffer of the round's parity, arrives, waits for the others, and reads all ranks' buffers.
// It writes to the same buffer again two rounds later: by then all ranks have arrived at the round between, so they have
// read. `Group::sum` replaces all this for ranks of several hosts.
#pragma once
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "linear.h"

// Why a round ended before all ranks arrived, in `Group::status`, with the rank's index in `Group::culprit`.
enum GroupStatus { GROUP_OK, RANK_FAILED, RANK_ENDED, RANK_SILENT, SUM_FAILED };

struct alignas(64) Arrival {
  std::atomic<int64_t> round;   // rounds that the rank has arrived at
  std::atomic<int64_t> failed;  // number of the call in which it has failed
};

static inline Arrival* arrivals(const Group& g) { return (Arrival*)g.memory; }
static inline char* buffer_of(const Group& g, int64_t round, int64_t rank) {
  return (char*)(arrivals(g) + g.size) + ((round & 1) * g.size + rank) * g.capacity * sizeof(float);
}

// Whether a process runs: a killed one may stay as a zombie until its parent has read its exit status.
static bool is_running(int64_t pid) {
  char path[64], state = 0;
  std::snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
  FILE* file = std::fopen(path, "r");
  if (!file) return false;
  const int read = std::fscanf(file, "%*d (%*[^)]) %c", &state);
  std::fclose(file);
  return read != 1 || (state != 'Z' && state != 'X');
}

// Waits until rank `other` has arrived at round g.round.
static GroupStatus wait_for(const Group& g, int64_t other) {
  using Clock = std::chrono::steady_clock;
  const Arrival& peer = arrivals(g)[other];
  const auto arrived = [&] { return peer.round.load(std::memory_order_acquire) > g.round; };
  for (int i = 0; i < 256; i++) {
    if (arrived()) return GROUP_OK;
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
  }
  const auto start = Clock::now();
  auto looked = start;
  while (!arrived()) {
    if (peer.failed.load(std::memory_order_acquire) == g.call) return arrived() ? GROUP_OK : RANK_FAILED;
    const auto now = Clock::now();
    now - start < std::chrono::milliseconds(5) ? (void)sched_yield() : (void)usleep(50);
    if (now - looked < std::chrono::milliseconds(100)) continue;
    looked = now;
    if (!is_running(g.pids[other])) return arrived() ? GROUP_OK : RANK_ENDED;
    if (now - start > std::chrono::seconds(g.timeout_s)) return RANK_SILENT;
  }
  return GROUP_OK;
}

// Ends a round: returns when all ranks have arrived, or with a status.
static void end_round(Group& g) {
  arrivals(g)[g.index].round.store(g.round + 1, std::memory_order_release);
  for (int64_t r = 0; r < g.size && g.status == GROUP_OK; r++)
    if (r != g.index) g.status = wait_for(g, r), g.culprit = r;
  g.round++;
}

// All ranks' `own`, `bytes` each, into `all`, in rank order.
static void gather_over_ranks(Group& g, const char* own, int64_t bytes, char* all) {
  const int64_t step = g.capacity * sizeof(float);
  for (int64_t at = 0; at < bytes && g.status == GROUP_OK; at += step) {
    const int64_t count = std::min(step, bytes - at), round = g.round;
    std::memcpy(buffer_of(g, round, g.index), own + at, count);
    end_round(g);
    for (int64_t r = 0; r < g.size; r++) std::memcpy(all + r * bytes + at, buffer_of(g, round, r), count);
  }
}

// data [count] becomes its sum over the ranks.  barrier: of the rank's threads, which all call this; no barrier at the end.
template <typename Barrier> static void sum_in_memory(Group& g, float* data, int64_t count, int thread, int threads, Barrier barrier) {
  for (int64_t at = 0; at < count && g.status == GROUP_OK; at += g.capacity) {
    const Range mine = partition(std::min(g.capacity, count - at), LANES, thread, threads);
    const int64_t round = g.round, floats = mine.last - mine.first;
    const auto part = [&](int64_t rank) { return (float*)buffer_of(g, round, rank) + mine.first; };
    float* own = data + at + mine.first;
    std::memcpy(part(g.index), own, floats * sizeof(float));
    barrier();
    if (thread == 0) end_round(g);
    barrier();
    std::memcpy(own, part(0), floats * sizeof(float));
    for (int64_t r = 1; r < g.size; r++)
      for (int64_t i = 0; i < floats; i++) own[i] += part(r)[i];
  }
}
