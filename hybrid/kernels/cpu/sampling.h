// Sampling: one pass over a row's logits for its maximum, sums and logprobs; then only the chunk with the drawn token is
// read again. Counter-based RNG (splitmix64), equal to that of hybrid/sampling/sampler.py.
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
// The largest logit, NaN not counted. `below`: cleared where a logit is NaN or +inf; masked tokens are -inf.
static inline float chunk_max(const float* x, int64_t count, VecI& below) {
  Vec top = splat(-INFINITY);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) top = max(load(x + i), top), below &= load(x + i) < INFINITY;
  float max_logit = largest(top);
  for (; i < count; i++) max_logit = std::max(max_logit, x[i]), below &= -(x[i] < INFINITY);
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
  float max_logit = -INFINITY;  // NaN, as the sums are, if a logit is NaN or +inf
  double mass = 0, raw = 0;  // sums of exp((x - max_logit) / T) and exp(x - max_logit)
  std::vector<ChunkSums> chunks;

  Row() : logits(nullptr), vocabulary(0) {}
  Row(const float* logits, int64_t vocabulary, float inverse_temperature) : logits(logits), vocabulary(vocabulary) {
    VecI below = ~VecI{};
    for (int64_t start = 0; start < vocabulary; start += CHUNK) {
      const int64_t count = std::min(CHUNK, vocabulary - start);
      ChunkSums b{chunk_max(logits + start, count, below), 0, 0};
      if (b.max_logit > -INFINITY) {
        b.raw = chunk_mass(logits + start, count, b.max_logit, 1.0f);
        b.mass = inverse_temperature == 1.0f ? b.raw : chunk_mass(logits + start, count, b.max_logit, inverse_temperature);
      }
      max_logit = std::max(max_logit, b.max_logit);
      chunks.push_back(b);
    }
    if (!all(below)) max_logit = mass = raw = NAN;
    for (ChunkSums& b : chunks) {
      if (b.max_logit == -INFINITY) continue;
      b.mass *= std::exp(double(b.max_logit - max_logit) * inverse_temperature);
      mass += b.mass;
      raw += b.raw * std::exp(double(b.max_logit) - max_logit);
    }
  }
  // Whether the logits have a softmax: none is NaN or +inf, and not all are -inf.
  bool is_valid() const { return max_logit > -INFINITY; }
  int64_t argmax() const {  // of a valid row
    int64_t chunk = 0;
    while (chunks[chunk].max_logit != max_logit) chunk++;
    int64_t token = chunk * CHUNK;
    while (logits[token] != max_logit) token++;
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
  int64_t inverse_cdf(double u, float inverse_temperature) const { return inverse_cdf_at(u * mass, inverse_temperature); }
  // The token at which the cumulative sum of exp((x - max_logit) / T) exceeds `target`.
  int64_t inverse_cdf_at(double target, float inverse_temperature) const {
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

// Runs body(row) for every row, over the threads.
template <typename Body> static void over_rows(int64_t rows, int64_t threads, Body body) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; r++) body(r);
}

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

// exp((x - max_logit) / T), and sums of it.
struct Weights {
  float max_logit, inverse_temperature;

  double of(float logit) const { return std::exp((double(logit) - max_logit) * inverse_temperature); }
  double total(const std::vector<Candidate>& some) const {
    double sum = 0;
    for (const Candidate& candidate : some) sum += of(candidate.first);
    return sum;
  }
};

// The most probable of `within` until those before one have probability top_p of `mass`. `within` is in the order of token
// ids, and stays so. Sorting would take longest for flat distributions: the last one to keep is found in one of RANGES of
// logits, by their sums, and there by halving.
static void keep_top_p(std::vector<Candidate>& within, double top_p, double mass, const Weights& weights) {
  constexpr int RANGES = 4096;
  float lowest = weights.max_logit;
  for (const Candidate& candidate : within) lowest = std::min(lowest, candidate.first);
  const float span = weights.max_logit - lowest, scale = span > 0 && span < INFINITY ? RANGES / span : 0;
  const auto range_of = [&](float logit) { return scale ? std::min(int((weights.max_logit - logit) * scale), RANGES - 1) : 0; };
  std::vector<double> sums(RANGES);
  for (const Candidate& candidate : within) sums[range_of(candidate.first)] += weights.of(candidate.first);
  double before = 0;
  int range = 0;
  for (; range + 1 < RANGES && before + sums[range] < top_p * mass; range++) before += sums[range];

  struct Weighted {
    Candidate candidate;
    double weight;
    bool operator>(const Weighted& other) const { return candidate > other.candidate; }
  };
  std::vector<Weighted> all;  // of the range
  for (const Candidate& candidate : within)
    if (range_of(candidate.first) == range) all.push_back({candidate, weights.of(candidate.first)});
  auto first = all.begin(), last = all.end();  // the last one to keep lies between; those before `first` are kept
  while (last - first > 64) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, std::greater<Weighted>());
    double upper = 0;
    for (auto it = first; it < middle; it++) upper += it->weight;
    if (before + upper >= top_p * mass)
      last = middle;
    else
      first = middle, before += upper;
  }
  std::sort(first, last, std::greater<Weighted>());
  while (first < last && (first == all.begin() || before < top_p * mass)) before += (first++)->weight;
  if (first == all.begin()) return;
  const Candidate least = (first - 1)->candidate;
  std::erase_if(within, [&](const Candidate& candidate) { return candidate < least; });
}

// The token of `kept` at which its cumulative softmax, in the order of token ids, exceeds u; `otherwise` if all have
// probability 0.  mass: set to the sum of the weights.
static Candidate draw_from(const std::vector<Candidate>& kept, double u, const Weights& weights, Candidate otherwise, double& mass) {
  mass = weights.total(kept);
  double target = u * mass;
  Candidate drawn = otherwise;
  for (const Candidate& candidate : kept) {
    const double p = weights.of(candidate.first);
    if (p <= 0) continue;
    drawn = candidate;
    if (target < p) break;
    target -= p;
  }
  return drawn;
}

// The least of `kept` besides the drawn token, by logit and then by token; the drawn token if there is no other.
static int64_t least_besides(const std::vector<Candidate>& kept, int64_t drawn) {
  const Candidate* least = nullptr;
  for (const Candidate& candidate : kept)
    if (candidate.second != drawn && candidate.first > -INFINITY && (!least || candidate < *least)) least = &candidate;
  return least ? least->second : drawn;
}

static inline const Draw& draw_of(const Samples& samples, int64_t row) {
  return samples.draws[samples.draw_of_row ? samples.draw_of_row[row] : 0];
}

// The least logit that min_p keeps.
static inline float min_p_floor(const Draw& draw, float max_logit) {
  return draw.min_p > 0 ? float(max_logit + std::log(draw.min_p) * draw.temperature) : -INFINITY;
}

// Tokens within this many temperatures of the largest logit are the candidates of top_p; doubled until they suffice.
constexpr float FIRST_DEPTH = 4, LAST_DEPTH = 1e30f;
// Whether candidates of a mass suffice for top_p of `before`.
static inline bool suffices(double mass, double top_p, double before) { return mass >= top_p * before * (1 + 1e-9); }

static inline bool truncates(const Draw& draw) { return draw.top_k > 0 || draw.top_p < 1 || draw.min_p > 0; }
static inline float inverse_temperature_of(const Draw& draw) { return draw.temperature > 0 ? float(1.0 / draw.temperature) : 1.0f; }

// A draw after Hugging Face's truncations, in their order: top_k keeps ties of the k-th; top_p keeps the most probable
// tokens until those before one have probability top_p, of what top_k kept; min_p keeps tokens with at least that share
// of the largest probability.  mass: set to the sum of exp((x - max_logit) / T) over the kept tokens.  sampling_mask: set to
// `least_besides` of them.
static int64_t truncated_draw(const Row& row, const Draw& draw, double u, double& mass, float& sampling_mask) {
  const Weights weights{row.max_logit, float(1.0 / draw.temperature)};
  std::vector<Candidate> kept;
  const float least = draw.top_k && draw.top_k < row.vocabulary ? kth_largest(row, int64_t(draw.top_k), kept) : -INFINITY;
  const float floor = min_p_floor(draw, row.max_logit);
  if (draw.top_p < 1) {
    double before = row.mass;
    if (least > -INFINITY) {
      candidates(row, least, kept);
      before = weights.total(kept);
    }
    for (float depth = FIRST_DEPTH;; depth *= 2) {
      const float from = std::max(least, float(row.max_logit - depth * draw.temperature));
      candidates(row, from, kept);
      if (from == least || depth > LAST_DEPTH || suffices(weights.total(kept), draw.top_p, before)) break;
    }
    keep_top_p(kept, draw.top_p, before, weights);
    std::erase_if(kept, [&](const Candidate& candidate) { return candidate.first < floor; });
  } else {
    candidates(row, std::max(least, floor), kept);
  }
  const int64_t token = draw_from(kept, u, weights, {0, row.argmax()}, mass).second;
  sampling_mask = float(least_besides(kept, token));
  return token;
}

// The tokens that a sampling mask keeps: `target`, and those whose logit, and then id, is at least that of `edge`, in the
// order of token ids, into `kept`.
static void masked_candidates(const Row& row, int64_t edge, int64_t target, std::vector<Candidate>& kept) {
  candidates(row, std::min(row.logits[edge], row.logits[target]), kept);
  const Candidate least{row.logits[edge], edge};
  std::erase_if(kept, [&](const Candidate& candidate) {
    return candidate.second != target && (edge == target || candidate < least);
  });
}
