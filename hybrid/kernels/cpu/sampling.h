// Sampling: one pass over a row's logits for its maximum, sums and logprobs; then only the chunk with the drawn token is
// read again. Counter-based RNG (splitmix64), equal to that of hybrid/generation/sampling.py.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "records.h"
#include "vector.h"

constexpr int64_t CHUNK = 256;  // logits in a chunk; a multiple of LANES

static inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
static inline double uniform(uint64_t key, uint64_t position) {
  return double(mixed(key + 0x9E3779B97F4A7C15ull * (position + 1)) >> 11) * 0x1p-53;
}

// A chunk's largest logit and its sums of exp((x - largest) / T) and exp(x - largest).
struct ChunkSums {
  float max_logit;
  double mass, raw;
};
static inline float chunk_max(const float* x, int64_t count) {  // NaN counts as -inf
  Vec top = splat(-INFINITY);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) top = max(load(x + i), top);
  float max_logit = largest(top);
  for (; i < count; i++) max_logit = std::max(max_logit, x[i]);
  return max_logit;
}
static inline double chunk_mass(const float* x, int64_t count, float max_logit, float inverse_temperature) {
  Vec mass = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) mass += exp((load(x + i) - max_logit) * inverse_temperature);
  double total = sum(mass);
  for (; i < count; i++) total += std::exp((x[i] - max_logit) * inverse_temperature);
  return total;
}

struct Row {
  const float* logits;
  int64_t vocabulary;
  float max_logit = -INFINITY;
  double mass = 0, raw = 0;  // sums of exp((x - max_logit) / T) and exp(x - max_logit)
  std::vector<ChunkSums> chunks;

  Row(const float* logits, int64_t vocabulary, float inverse_temperature) : logits(logits), vocabulary(vocabulary) {
    for (int64_t start = 0; start < vocabulary; start += CHUNK) {
      const int64_t count = std::min(CHUNK, vocabulary - start);
      ChunkSums b{chunk_max(logits + start, count), 0, 0};
      if (b.max_logit > -INFINITY) {
        b.raw = chunk_mass(logits + start, count, b.max_logit, 1.0f);
        b.mass = inverse_temperature == 1.0f ? b.raw : chunk_mass(logits + start, count, b.max_logit, inverse_temperature);
      }
      max_logit = std::max(max_logit, b.max_logit);
      chunks.push_back(b);
    }
    for (ChunkSums& b : chunks) {
      if (b.max_logit == -INFINITY) continue;
      b.mass *= std::exp(double(b.max_logit - max_logit) * inverse_temperature);
      mass += b.mass;
      raw += b.raw * std::exp(double(b.max_logit) - max_logit);
    }
  }
  int64_t argmax() const {
    int64_t chunk = 0;
    while (chunks[chunk].max_logit != max_logit) chunk++;
    int64_t token = chunk * CHUNK;
    while (logits[token] != max_logit && token + 1 < vocabulary) token++;  // the last one if all are NaN
    return token;
  }
  // The sum of exp(y) · -y over tokens, y = (x - max_logit) / T. The entropy is log(mass) + entropy_sum / mass.
  double entropy_sum(float inverse_temperature) const {
    double total = 0;
    for (int64_t start = 0; start < vocabulary; start += CHUNK) {
      const int64_t end = std::min(start + CHUNK, vocabulary);
      Vec part = {};
      int64_t i = start;
      for (; i + LANES <= end; i += LANES) {
        Vec y = max((load(logits + i) - max_logit) * inverse_temperature, splat(-1e4f));  // 0 · -inf is NaN
        part -= exp(y) * y;
      }
      total += sum(part);
      for (; i < end; i++) {
        const double y = std::max((double(logits[i]) - max_logit) * inverse_temperature, -1e4);
        total -= std::exp(y) * y;
      }
    }
    return total;
  }
  // The token at which the cumulative softmax, in the order of token ids, exceeds u.
  int64_t inverse_cdf(double u, float inverse_temperature) const {
    double target = u * mass;
    size_t chunk = 0, chosen = 0;  // `chosen`: this one, or the last chunk with any mass, if rounding skips them all
    for (; chunk < chunks.size(); chunk++) {
      if (chunks[chunk].mass <= 0) continue;
      chosen = chunk;
      if (target < chunks[chunk].mass) break;
      target -= chunks[chunk].mass;
    }
    const int64_t start = chosen * CHUNK, end = std::min(start + CHUNK, vocabulary);
    int64_t token = start;
    for (int64_t i = start; i < end; i++) {
      const double p = std::exp((double(logits[i]) - max_logit) * inverse_temperature);
      if (p <= 0) continue;
      token = i;
      if (target < p) break;
      target -= p;
    }
    return token;
  }
};

typedef std::pair<float, int64_t> Candidate;  // logit, token

// The tokens whose logit is at least `least`, in the order of token ids, into `kept`.
static void candidates(const Row& row, float least, std::vector<Candidate>& kept) {
  kept.clear();
  for (size_t b = 0; b < row.chunks.size(); b++) {
    if (row.chunks[b].max_logit < least) continue;
    const int64_t start = b * CHUNK, end = std::min<int64_t>(start + CHUNK, row.vocabulary);
    for (int64_t i = start; i < end; i++)
      if (row.logits[i] >= least) kept.push_back({row.logits[i], i});
  }
}

// The k-th largest logit. The k-th largest chunk maximum is a lower bound of it, so that few tokens are candidates.
static float kth_largest(const Row& row, int64_t k, std::vector<Candidate>& kept) {
  std::vector<float> tops;
  for (const ChunkSums& b : row.chunks) tops.push_back(b.max_logit);
  float least = -INFINITY;
  if (k <= int64_t(tops.size())) {
    std::nth_element(tops.begin(), tops.begin() + k - 1, tops.end(), std::greater<float>());
    least = tops[k - 1];
  }
  candidates(row, least, kept);
  if (k > int64_t(kept.size())) return -INFINITY;
  std::nth_element(kept.begin(), kept.begin() + k - 1, kept.end(),
                   [](const Candidate& a, const Candidate& b) { return a.first > b.first; });
  return kept[k - 1].first;
}

// A draw after Hugging Face's truncations, in their order: top_k keeps ties of the k-th; top_p keeps the most probable
// tokens until those before one have probability top_p, of what top_k kept; min_p keeps tokens with at least that share
// of the largest probability.  mass: set to the sum of exp((x - max_logit) / T) over the kept tokens.
static int64_t truncated_draw(const Row& row, const Draw& draw, double u, double& mass) {
  const float inverse_temperature = float(1.0 / draw.temperature);
  std::vector<Candidate> kept, within;
  auto weight = [&](float logit) { return std::exp((double(logit) - row.max_logit) * inverse_temperature); };
  auto total = [&](const std::vector<Candidate>& some) {
    double sum = 0;
    for (const Candidate& candidate : some) sum += weight(candidate.first);
    return sum;
  };
  float least = draw.top_k && draw.top_k < row.vocabulary ? kth_largest(row, draw.top_k, kept) : -INFINITY;
  const float floor = draw.min_p > 0 ? float(row.max_logit + std::log(draw.min_p) * draw.temperature) : -INFINITY;
  if (draw.top_p < 1) {
    double before_top_p = row.mass;
    if (least > -INFINITY) {
      candidates(row, least, kept);
      before_top_p = total(kept);
    }
    // Collect ever more of the most probable tokens until they have enough mass, then sort only these.
    for (float depth = 4;; depth *= 2) {
      const float from = std::max(least, float(row.max_logit - depth * draw.temperature));
      candidates(row, from, within);
      if (from == least || depth > 1e30f || total(within) >= draw.top_p * before_top_p * (1 + 1e-9)) break;
    }
    std::sort(within.begin(), within.end(), std::greater<Candidate>());
    double before = 0;
    size_t count = 0;
    while (count < within.size() && (count == 0 || before < draw.top_p * before_top_p)) before += weight(within[count++].first);
    within.resize(count);
    std::sort(within.begin(), within.end(), [](const Candidate& a, const Candidate& b) { return a.second < b.second; });
    kept.clear();
    for (const Candidate& candidate : within)
      if (candidate.first >= floor) kept.push_back(candidate);
  } else {
    candidates(row, std::max(least, floor), kept);
  }
  mass = total(kept);
  double target = u * mass;
  int64_t token = row.argmax();
  for (const Candidate& candidate : kept) {
    const double p = weight(candidate.first);
    if (p <= 0) continue;
    token = candidate.second;
    if (target < p) break;
    target -= p;
  }
  return token;
}
