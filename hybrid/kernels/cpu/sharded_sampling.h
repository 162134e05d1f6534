// Sampling and scoring where each rank of a group has the logits of a slice of the vocabulary. Ranks exchange sums and
// candidates, never logits; all compute the same results, those of sampling.h over the whole vocabulary up to rounding.
#pragma once
#include "group.h"
#include "sampling.h"

// What a rank knows of a row: its largest logit, the token of that, and sums over its slice; for scoring, entropy_sum and
// the target's logit (if it is in the slice).
struct SliceSums {
  double max_logit, mass, raw, entropy_sum, target_logit;
  int64_t argmax, has_target;
};
// A token that a rank has found for a row; -1: another rank has it.
struct Found {
  int64_t token;
  double logit;
};

// Every rank's `own`, of equal length: [rank * own.size() + i].
template <typename E> static std::vector<E> gathered(Group& g, const std::vector<E>& own) {
  std::vector<E> all(own.size() * g.size);
  gather_over_ranks(g, (const char*)own.data(), own.size() * sizeof(E), (char*)all.data());
  return all;
}

// The sums over all slices of each row, relative to the largest logit of all. All NaN if a slice's are.
struct WholeRow {
  double max_logit, mass, raw, entropy_sum, target_logit;
  int64_t argmax;
};
static WholeRow whole_row(const Group& g, const std::vector<SliceSums>& all, int64_t rows, int64_t row, float inverse_temperature) {
  WholeRow whole{-INFINITY, 0, 0, 0, 0, 0};
  for (int64_t r = 0; r < g.size; r++)
    if (const SliceSums& slice = all[r * rows + row]; r == 0 || slice.max_logit > whole.max_logit || std::isnan(slice.max_logit))
      whole.max_logit = slice.max_logit, whole.argmax = slice.argmax;
  for (int64_t r = 0; r < g.size; r++) {
    const SliceSums& slice = all[r * rows + row];
    if (slice.has_target) whole.target_logit = slice.target_logit;
    if (slice.max_logit == -INFINITY) continue;
    const double gap = (slice.max_logit - whole.max_logit) * inverse_temperature, scale = std::exp(gap);
    whole.mass += slice.mass * scale;
    whole.entropy_sum += (slice.entropy_sum - gap * slice.mass) * scale;
    whole.raw += slice.raw * std::exp(slice.max_logit - whole.max_logit);
  }
  return whole;
}

// Untruncated draws: the rank whose slice the cumulative softmax passes u in finds the token.
static std::vector<Found> inverse_cdf(Group& g, const std::vector<Row>& own, const std::vector<WholeRow>& whole, const std::vector<SliceSums>& all,
                                      const std::vector<double>& u, int64_t first, float inverse_temperature, int64_t threads) {
  const int64_t rows = own.size();
  std::vector<Found> found(rows, Found{-1, 0});
  over_rows(rows, threads, [&](int64_t row) {
    double target = u[row] * whole[row].mass, here = 0;
    int64_t chosen = -1;  // the last rank with any mass, if rounding skips them all
    for (int64_t r = 0; r < g.size; r++) {
      const SliceSums& slice = all[r * rows + row];
      const double scale = std::exp((slice.max_logit - whole[row].max_logit) * inverse_temperature), mass = slice.mass * scale;
      if (!(mass > 0)) continue;
      chosen = r, here = target / scale;
      if (target < mass) break;
      target -= mass;
    }
    if (chosen != g.index) return;
    const int64_t token = own[row].inverse_cdf_at(here, inverse_temperature);
    found[row] = {first + token, own[row].logits[token]};
  });
  return found;
}

// The least logit that top_k keeps of each row: the k-th largest of the ranks' k largest.
static std::vector<float> least_of_top_k(Group& g, const std::vector<Row>& own, int64_t k, int64_t threads) {
  const int64_t rows = own.size();
  std::vector<float> tops(rows * k, -INFINITY), least(rows);
  over_rows(rows, threads, [&](int64_t row) {
    std::vector<Candidate> kept;
    const float from = k < own[row].vocabulary ? kth_largest(own[row], k, kept) : -INFINITY;
    candidates(own[row], from, kept);
    const int64_t count = std::min<int64_t>(k, kept.size());
    std::partial_sort(kept.begin(), kept.begin() + count, kept.end(), std::greater<Candidate>());
    for (int64_t i = 0; i < count; i++) tops[row * k + i] = kept[i].first;
  });
  const std::vector<float> all = gathered(g, tops);
  over_rows(rows, threads, [&](int64_t row) {
    std::vector<float> values;
    for (int64_t r = 0; r < g.size; r++) values.insert(values.end(), &all[(r * rows + row) * k], &all[(r * rows + row) * k] + k);
    std::nth_element(values.begin(), values.begin() + k - 1, values.end(), std::greater<float>());
    least[row] = values[k - 1];
  });
  return least;
}

// The mass of each row's tokens whose logit is at least `from`, over all ranks.
static std::vector<double> mass_from(Group& g, const std::vector<Row>& own, const std::vector<float>& from, const std::vector<WholeRow>& whole,
                                     float inverse_temperature, int64_t threads) {
  const int64_t rows = own.size();
  std::vector<double> mass(rows), total(rows);
  over_rows(rows, threads, [&](int64_t row) {
    std::vector<Candidate> kept;
    candidates(own[row], from[row], kept);
    mass[row] = Weights{float(whole[row].max_logit), inverse_temperature}.total(kept);
  });
  const std::vector<double> all = gathered(g, mass);
  for (int64_t r = 0; r < g.size; r++)
    for (int64_t row = 0; row < rows; row++) total[row] += all[r * rows + row];
  return total;
}

// Finer steps than those of `truncated_draw`: candidates are sent.
constexpr float DEEPER = 1.25f;
struct SentCandidate {
  float logit;
  int32_t token;
};

// Truncated draws, as `truncated_draw`: ranks exchange the candidates, and each draws from all of them.
static std::vector<Found> truncated_draws(Group& g, const std::vector<Row>& own, const std::vector<WholeRow>& whole, const Draw& draw,
                                          const std::vector<double>& u, int64_t first, int64_t vocabulary, std::vector<double>& mass,
                                          std::vector<int64_t>& sampling_mask, int64_t threads) {
  const int64_t rows = own.size();
  const float inverse_temperature = float(1.0 / draw.temperature);
  std::vector<float> least(rows, -INFINITY), from(rows);
  std::vector<double> before(rows);
  for (int64_t row = 0; row < rows; row++) before[row] = whole[row].mass;
  if (draw.top_k && draw.top_k < vocabulary) {
    least = least_of_top_k(g, own, int64_t(draw.top_k), threads);
    if (draw.top_p < 1) before = mass_from(g, own, least, whole, inverse_temperature, threads);
  }
  for (int64_t row = 0; row < rows; row++) from[row] = std::max(least[row], min_p_floor(draw, float(whole[row].max_logit)));
  if (draw.top_p < 1) {
    float depth = FIRST_DEPTH;
    for (bool enough = false; !enough; depth *= DEEPER) {
      for (int64_t row = 0; row < rows; row++) from[row] = std::max(least[row], float(whole[row].max_logit - depth * draw.temperature));
      const std::vector<double> within = mass_from(g, own, from, whole, inverse_temperature, threads);
      enough = depth > LAST_DEPTH || g.status != GROUP_OK;
      if (!enough) {
        enough = true;
        for (int64_t row = 0; row < rows; row++) enough &= from[row] == least[row] || suffices(within[row], draw.top_p, before[row]);
      }
    }
  }
  // The candidates of all rows, one row after the other, and their number.
  std::vector<std::vector<Candidate>> kept(rows);
  over_rows(rows, threads, [&](int64_t row) { candidates(own[row], from[row], kept[row]); });
  std::vector<int64_t> counts(rows);
  for (int64_t row = 0; row < rows; row++) counts[row] = kept[row].size();
  const std::vector<int64_t> all_counts = gathered(g, counts);
  int64_t most = 0;
  for (int64_t r = 0; r < g.size; r++) {
    int64_t sum = 0;
    for (int64_t row = 0; row < rows; row++) sum += all_counts[r * rows + row];
    most = std::max(most, sum);
  }
  std::vector<SentCandidate> list;
  for (const auto& some : kept)
    for (const Candidate& candidate : some) list.push_back({candidate.first, int32_t(first + candidate.second)});
  list.resize(most);
  const std::vector<SentCandidate> all = gathered(g, list);
  std::vector<Found> found(rows);
  std::vector<int64_t> at(g.size);
  for (int64_t row = 0; row < rows; row++) {
    std::vector<Candidate>& together = kept[row];
    together.clear();
    for (int64_t r = 0; r < g.size; r++) {  // slices are in the order of token ids
      for (int64_t i = 0; i < all_counts[r * rows + row]; i++) {
        const SentCandidate& candidate = all[r * most + at[r]++];
        together.push_back({candidate.logit, candidate.token});
      }
    }
  }
  over_rows(rows, threads, [&](int64_t row) {
    const Weights weights{float(whole[row].max_logit), inverse_temperature};
    const float floor = min_p_floor(draw, weights.max_logit);
    if (draw.top_p < 1) {
      keep_top_p(kept[row], draw.top_p, before[row], weights);
      std::erase_if(kept[row], [&](const Candidate& candidate) { return candidate.first < floor; });
    }
    const Candidate drawn = draw_from(kept[row], u[row], weights, {weights.max_logit, whole[row].argmax}, mass[row]);
    found[row] = {drawn.second, drawn.first};
    sampling_mask[row] = least_besides(kept[row], drawn.second);
  });
  return found;
}
