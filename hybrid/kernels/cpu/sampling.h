// Sampling: one pass over a row's logits for its maximum, sums and logprobs; then only the block with the drawn token is
// read again. Counter-based RNG (splitmix64), equal to that of hybrid/generation/sampling.py.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "vector.h"

constexpr int64_t BLOCK = 256;  // logits in a block; a multiple of LANES

struct Draw {
  double temperature;  // 0: greedy
  int64_t top_k;       // 0: off
  double top_p, min_p; // 1 and 0: off
};

static inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
static inline double uniform(uint64_t key, uint64_t position) {
  return double(mixed(key + 0x9E3779B97F4A7C15ull * (position + 1)) >> 11) * 0x1p-53;
}

// A block's largest logit and its sums of exp((x - largest) / T) and exp(x - largest).
struct BlockSums {
  float most;
  double mass, raw;
};
static inline float block_max(const float* x, int64_t count) {  // NaN counts as -inf
  Vec top = splat(-INFINITY);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) top = max(load(x + i), top);
  float most = largest(top);
  for (; i < count; i++) most = std::max(most, x[i]);
  return most;
}
static inline double block_mass(const float* x, int64_t count, float most, float inverse) {
  Vec mass = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) mass += exp((load(x + i) - most) * inverse);
  double total = sum(mass);
  for (; i < count; i++) total += std::exp((x[i] - most) * inverse);
  return total;
}

struct Row {
  const float* logits;
  int64_t vocabulary;
  float most = -INFINITY;
  double mass = 0, raw = 0;  // sums of exp((x - most) / T) and exp(x - most)
  std::vector<BlockSums> blocks;

  Row(const float* logits, int64_t vocabulary, float inverse) : logits(logits), vocabulary(vocabulary) {
    for (int64_t start = 0; start < vocabulary; start += BLOCK) {
      const int64_t count = std::min(BLOCK, vocabulary - start);
      BlockSums b{block_max(logits + start, count), 0, 0};
      if (b.most > -INFINITY) {
        b.raw = block_mass(logits + start, count, b.most, 1.0f);
        b.mass = inverse == 1.0f ? b.raw : block_mass(logits + start, count, b.most, inverse);
      }
      most = std::max(most, b.most);
      blocks.push_back(b);
    }
    for (BlockSums& b : blocks) {
      if (b.most == -INFINITY) continue;
      b.mass *= std::exp(double(b.most - most) * inverse);
      mass += b.mass;
      raw += b.raw * std::exp(double(b.most) - most);
    }
  }
  int64_t argmax() const {
    int64_t block = 0;
    while (blocks[block].most != most) block++;
    int64_t token = block * BLOCK;
    while (logits[token] != most && token + 1 < vocabulary) token++;  // the last one if all are NaN
    return token;
  }
  // The sum of exp(y) · -y over tokens, y = (x - most) / T. The entropy is log(mass) + spread / mass.
  double spread(float inverse) const {
    double total = 0;
    for (int64_t start = 0; start < vocabulary; start += BLOCK) {
      const int64_t end = std::min(start + BLOCK, vocabulary);
      Vec part = {};
      int64_t i = start;
      for (; i + LANES <= end; i += LANES) {
        Vec y = max((load(logits + i) - most) * inverse, splat(-1e4f));  // 0 · -inf is NaN
        part -= exp(y) * y;
      }
      total += sum(part);
      for (; i < end; i++) {
        const double y = std::max((double(logits[i]) - most) * inverse, -1e4);
        total -= std::exp(y) * y;
      }
    }
    return total;
  }
  // The token at which the cumulative softmax, in the order of token ids, exceeds u.
  int64_t inverse_cdf(double u, float inverse) const {
    double target = u * mass;
    size_t block = 0, likely = 0;  // `likely`: the last block with any mass, if rounding skips them all
    for (; block < blocks.size(); block++) {
      if (blocks[block].mass <= 0) continue;
      likely = block;
      if (target < blocks[block].mass) break;
      target -= blocks[block].mass;
    }
    const int64_t start = likely * BLOCK, end = std::min(start + BLOCK, vocabulary);
    int64_t token = start;
    for (int64_t i = start; i < end; i++) {
      const double p = std::exp((double(logits[i]) - most) * inverse);
      if (p <= 0) continue;
      token = i;
      if (target < p) break;
      target -= p;
    }
    return token;
  }
};

typedef std::pair<float, int64_t> Candidate;  // logit, token

// The tokens whose logit is at least `least`, in the order of token ids, into `found`.
static void candidates(const Row& row, float least, std::vector<Candidate>& found) {
  found.clear();
  for (size_t b = 0; b < row.blocks.size(); b++) {
    if (row.blocks[b].most < least) continue;
    const int64_t start = b * BLOCK, end = std::min<int64_t>(start + BLOCK, row.vocabulary);
    for (int64_t i = start; i < end; i++)
      if (row.logits[i] >= least) found.push_back({row.logits[i], i});
  }
}

// The k-th largest logit. The k-th largest block maximum is a lower bound of it, so that few tokens are candidates.
static float kth_largest(const Row& row, int64_t k, std::vector<Candidate>& found) {
  std::vector<float> tops;
  for (const BlockSums& b : row.blocks) tops.push_back(b.most);
  float least = -INFINITY;
  if (k <= int64_t(tops.size())) {
    std::nth_element(tops.begin(), tops.begin() + k - 1, tops.end(), std::greater<float>());
    least = tops[k - 1];
  }
  candidates(row, least, found);
  if (k > int64_t(found.size())) return -INFINITY;
  std::nth_element(found.begin(), found.begin() + k - 1, found.end(),
                   [](const Candidate& a, const Candidate& b) { return a.first > b.first; });
  return found[k - 1].first;
}

// A draw after Hugging Face's truncations, in their order: top_k keeps ties of the k-th; top_p keeps the most probable
// tokens until those before one have probability top_p, of what top_k kept; min_p keeps tokens with at least that share
// of the largest probability.  mass: set to the sum of exp((x - most) / T) over the kept tokens.
static int64_t truncated_draw(const Row& row, const Draw& draw, double u, double& mass) {
  const float inverse = float(1.0 / draw.temperature);
  std::vector<Candidate> kept, within;
  auto weight = [&](float logit) { return std::exp((double(logit) - row.most) * inverse); };
  auto total = [&](const std::vector<Candidate>& some) {
    double sum = 0;
    for (const Candidate& one : some) sum += weight(one.first);
    return sum;
  };
  float least = draw.top_k && draw.top_k < row.vocabulary ? kth_largest(row, draw.top_k, kept) : -INFINITY;
  const float floor = draw.min_p > 0 ? float(row.most + std::log(draw.min_p) * draw.temperature) : -INFINITY;
  if (draw.top_p < 1) {
    double before_top_p = row.mass;
    if (least > -INFINITY) {
      candidates(row, least, kept);
      before_top_p = total(kept);
    }
    // Collect ever more of the most probable tokens until they have enough mass, then sort only these.
    for (float depth = 4;; depth *= 2) {
      const float from = std::max(least, float(row.most - depth * draw.temperature));
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
    for (const Candidate& one : within)
      if (one.first >= floor) kept.push_back(one);
  } else {
    candidates(row, std::max(least, floor), kept);
  }
  mass = total(kept);
  double target = u * mass;
  int64_t token = row.argmax();
  for (const Candidate& one : kept) {
    const double p = weight(one.first);
    if (p <= 0) continue;
    token = one.second;
    if (target < p) break;
    target -= p;
  }
  return token;
}
