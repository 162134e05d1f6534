// A whole decoder on the CPU: all layers of a forward in one call, with barriers between the threads' steps.
//
// Activations are float32, rounded to the model's dtype wherever Hugging Face's modules round; weights are read in place.
// hybrid/models/spec.py explains the fields of Layer and Decoder, hybrid/decoders/batch.py those of Batch.
#include <omp.h>

#include "attention.h"
#include "linear.h"
#include "sampling.h"

enum Activation { SILU, GELU, GELU_TANH, RELU };

struct Norm {
  const float* weight;  // null: no norm
  const float* bias;
};

struct Layer {
  Norm attention_norm, q_norm, k_norm, attention_post_norm, mlp_norm, mlp_post_norm;
  Linear qkv, o, up, down, router;  // up: gate above up where the MLP is gated
  Linear experts_up, experts_down;  // all experts' matrices, one above the other
  const float *cos, *sin;  // [positions, rotary_dim / 2], or null
  void *keys, *values;
  int64_t window, experts;
};

struct Decoder {
  int64_t half;  // 0: float32, 1: bfloat16
  int64_t vocabulary, hidden, embedding_size, heads, kv_heads, head_dim, intermediate, expert_intermediate;
  int64_t layer_norm, norm_float32, activation, stepwise, gated, parallel, rotary_dim, interleaved, rotary_float32, qk_norm_row;
  int64_t position_offset, num_experts, experts_per_token, normalize_experts, experts_float32, alibi_bfloat16, embedding_rows;
  int64_t side_ranks;  // floats per token of `reduced`: the maximum over layers and the part outside them
  double norm_eps, norm_offset, attention_scale, attention_softcap, logits_softcap;
  double embedding_multiplier, residual_multiplier, logits_divisor;
  const float* slopes;
  const void *embedding, *positions;
  Norm embedding_norm, final_norm;
  Linear project_in, project_out, head;
  const Layer* layers;
};

struct Batch {
  int64_t tokens, sequences, table_width;
  const int64_t* ids;
  const int32_t *positions, *cu_seqlens, *block_tables;
};

// The float work space: [tokens, ·] buffers, one after the other.
struct Work {
  float *normed, *mlp_normed, *delta, *qkv, *attended, *up, *expert_in, *expert_out, *shares, *reduced, *scratch;
};

static int64_t head_pad(const Decoder& d) { return (d.head_dim + LANES - 1) / LANES * LANES; }

static int64_t carve(const Decoder& d, int64_t tokens, int64_t threads, float* base, Work* work) {
  int64_t used = 0;
  auto take = [&](int64_t floats) {
    float* here = base + used;
    used += (floats + 15) / 16 * 16;
    return here;
  };
  const int64_t width = std::max({d.hidden, d.embedding_size, d.heads * d.head_dim});
  Work w;
  w.normed = take(tokens * width);
  w.mlp_normed = take(tokens * d.hidden);
  w.delta = take(tokens * std::max(d.hidden, d.embedding_size));
  w.qkv = take(tokens * (d.heads + 2 * d.kv_heads) * d.head_dim);
  w.attended = take(tokens * d.heads * d.head_dim);
  w.up = take(tokens * std::max(d.intermediate, d.expert_intermediate) * 2);
  w.expert_in = take(d.num_experts ? tokens * d.hidden : 0);
  w.expert_out = take(d.num_experts ? tokens * d.hidden : 0);
  w.shares = take(tokens * d.num_experts);
  w.reduced = take(tokens * d.side_ranks);
  w.scratch = take(threads * (QUERIES * head_pad(d)));
  if (work) *work = w;
  return used;
}

template <typename W>
struct Run {
  const Decoder& d;
  const Batch& batch;
  const Work& work;
  int thread, threads;

  void barrier() const {
    if (threads > 1) {
#pragma omp barrier
    }
  }
  Part rows() const { return part(batch.tokens, 1, thread, threads); }
  void ready(float* row, int64_t in) const { halved(row, in, (const W*)nullptr); }

  // LoRA A·x of l's unmerged adapters into `reduced` [tokens, rank]; ends in a barrier.
  void reduce(const Linear& l, const float* x, int64_t ldx) const {
    if (!l.num_sides) return;
    reduce_sides<W>(l, x, ldx, batch.tokens, work.reduced, thread, threads);
    barrier();
  }
  // This thread's columns of y = l(x), unmerged adapters included. No barrier at the end.
  void product(const Linear& l, const float* x, int64_t ldx, float* y, int64_t ldy) const {
    reduce(l, x, ldx);
    linear<W>(l, x, ldx, batch.tokens, y, ldy, Store{}, thread, threads);
    const Part mine = part(outputs(l), COLUMNS<W>, thread, threads);
    add_sides<W>(l, work.reduced, batch.tokens, y, ldy, mine.first, mine.last);
  }

  // y = norm(x), rounded as in the model; y = x if there is no norm.
  void norm(const Norm& n, const float* x, float* y, int64_t size) const {
    if (!n.weight) {
      if (y != x) std::memcpy(y, x, size * sizeof(float));
      return;
    }
    double mean = 0, square = 0;
    if (d.layer_norm) {
      for (int64_t i = 0; i < size; i++) mean += x[i];
      mean /= size;
    }
    const float centre = float(mean);
    Vec squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      Vec v = load(x + i) - centre;
      squares += v * v;
    }
    square = sum(squares);
    for (; i < size; i++) square += (x[i] - centre) * (x[i] - centre);
    const float factor = 1.0f / std::sqrt(float(square / size) + float(d.norm_eps)), offset = float(d.norm_offset);
    for (i = 0; i < size; i++) {
      float v = (x[i] - centre) * factor;
      if (d.layer_norm)
        v = rounded<W>(v * n.weight[i] + (n.bias ? n.bias[i] : 0.0f));
      else if (d.norm_float32)
        v = rounded<W>(v * (n.weight[i] + offset));
      else
        v = rounded<W>(rounded<W>(v) * (n.weight[i] + offset));
      y[i] = v;
    }
  }

  // gelu_new: transformers computes it in Python, with every operation rounded.
  Vec gelu_stepwise(Vec x) const {
    Vec inner = rounded<W>(x + rounded<W>(0.044715f * rounded<W>(x * x * x)));
    Vec gate = rounded<W>(1.0f + rounded<W>(tanh(rounded<W>(0.79788456080286536f * inner))));
    return rounded<W>(0.5f * x) * gate;
  }
  Vec activated(Vec x) const {
    switch (d.activation) {
      case SILU: return x / (1.0f + exp(-max(x, splat(-88.0f))));  // e^89 overflows
      case GELU: return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
      case GELU_TANH: return d.stepwise ? gelu_stepwise(x) : 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
      default: return max(x, Vec{});
    }
  }
  // Elements [first, last) of a row: act(gate) · up of gate before up if gated, else act(up).
  void activate(float* row, int64_t first, int64_t last, int64_t intermediate) const {
    auto made = [&](const float* gate, const float* up) {
      const Vec v = rounded<W>(activated(load(gate)));
      return d.gated ? rounded<W>(v * load(up)) : v;
    };
    int64_t i = first;
    for (; i + LANES <= last; i += LANES) store(row + i, made(row + i, row + intermediate + i));
    if (i == last) return;
    float gate[LANES] = {}, up[LANES] = {};
    const int64_t rest = (last - i) * sizeof(float);
    std::memcpy(gate, row + i, rest);
    if (d.gated) std::memcpy(up, row + intermediate + i, rest);
    store(gate, made(gate, up));
    std::memcpy(row + i, gate, rest);
  }

  // The up (and gate) projection and activation of an MLP over `count` rows, for this thread's columns. No barrier at the
  // end: a thread activates the columns that it has computed itself.
  void expand(const Linear& up, const float* x, int64_t count, float* y, int64_t intermediate) const {
    const int64_t width = outputs(up);
    reduce(up, x, d.hidden);
    const Part mine = part(intermediate, 2 * LANES, thread, threads);
    if (mine.first >= mine.last) return;
    auto half = [&](int64_t from) {  // columns `from` + mine of the joined matrix, which may be one part or two
      int64_t offset = 0;
      for (int p = 0; p < up.parts; p++) {
        const int64_t first = std::max<int64_t>(mine.first + from - offset, 0);
        const int64_t last = std::min(mine.last + from - offset, up.rows[p]);
        if (first < last) columns_of<W>(up, p, x, d.hidden, y + offset, width, count, first, last, Store{});
        offset += up.rows[p];
      }
      add_sides<W>(up, work.reduced, count, y, width, mine.first + from, mine.last + from);
    };
    half(0);
    if (d.gated) half(intermediate);
    for (int64_t m = 0; m < count; m++) {
      activate(y + m * width, mine.first, mine.last, intermediate);
      // Parts begin at multiples of 2 · LANES: whole blocks, and in the last part the tail.
      halved(y + m * width + mine.first, mine.last - mine.first, (const W*)nullptr);
    }
  }

  // Norm and RoPE of q and k, and the write of k and v to the KV cache, for this thread's tokens.
  void turn_and_write(const Layer& layer) const {
    const int64_t size = d.head_dim, q = d.heads * size, kv = d.kv_heads * size, pad = head_pad(d);
    W *keys = (W*)layer.keys, *values = (W*)layer.values;
    const Part mine = rows();
    int64_t sequence = 0;
    for (int64_t t = mine.first; t < mine.last; t++) {
      while (batch.cu_seqlens[sequence + 1] <= t) sequence++;
      float* row = work.qkv + t * (q + 2 * kv);
      if (d.qk_norm_row) {
        norm(layer.q_norm, row, row, q);
        norm(layer.k_norm, row + q, row + q, kv);
      } else {
        for (int64_t h = 0; h < d.heads; h++) norm(layer.q_norm, row + h * size, row + h * size, size);
        for (int64_t h = 0; h < d.kv_heads; h++) norm(layer.k_norm, row + q + h * size, row + q + h * size, size);
      }
      const int64_t position = batch.positions[t];
      if (layer.cos)
        for (int64_t h = 0; h < d.heads + d.kv_heads; h++)
          turn(row + h * size, layer.cos + position * (d.rotary_dim / 2), layer.sin + position * (d.rotary_dim / 2));
      const int64_t page = batch.block_tables[sequence * batch.table_width + position / PAGE], slot = position % PAGE;
      for (int64_t h = 0; h < d.kv_heads; h++) {
        W* key = keys + (page * d.kv_heads + h) * size * PAGE + slot;
        W* value = values + ((page * d.kv_heads + h) * PAGE + slot) * pad;
        for (int64_t i = 0; i < size; i++) put(key + i * PAGE, row[q + h * size + i]);
        for (int64_t i = 0; i < size; i++) put(value + i, row[q + kv + h * size + i]);
        for (int64_t i = size; i < pad; i++) put(value + i, 0.0f);
      }
    }
  }
  void turn(float* head, const float* cos, const float* sin) const {
    const int64_t half = d.rotary_dim / 2, step = d.interleaved ? 2 : 1, apart = d.interleaved ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
      float *a = head + i * step, *b = a + apart;
      const float x = *a, y = *b;
      if (d.rotary_float32) {
        *a = rounded<W>(x * cos[i] - y * sin[i]);
        *b = rounded<W>(y * cos[i] + x * sin[i]);
      } else {
        *a = rounded<W>(rounded<W>(x * cos[i]) - rounded<W>(y * sin[i]));
        *b = rounded<W>(rounded<W>(y * cos[i]) + rounded<W>(x * sin[i]));
      }
    }
  }

  // Attention for this thread's part of the (KV head, token) pairs, in that order: consecutive tokens often share pages
  // (a common prefix), which then stay in the thread's cache.
  void attention(const Layer& layer) const {
    const int64_t size = d.head_dim, group = d.heads / d.kv_heads, width = (d.heads + 2 * d.kv_heads) * size;
    const AttentionShape shape{d.heads, d.kv_heads, size, head_pad(d), float(d.attention_scale), float(d.attention_softcap), d.slopes, layer.window, d.alibi_bfloat16 != 0};
    const Part mine = part(d.kv_heads * batch.tokens, 1, thread, threads);
    float* scratch = work.scratch + thread * QUERIES * shape.head_pad;
    Query queries[QUERIES];
    int64_t at = mine.first;
    while (at < mine.last) {
      const int64_t head = at / batch.tokens, first = at % batch.tokens;
      const int64_t end = std::min(batch.tokens, first + mine.last - at);  // this thread's tokens of this head
      int64_t sequence = std::upper_bound(batch.cu_seqlens, batch.cu_seqlens + batch.sequences + 1, int32_t(first)) - batch.cu_seqlens - 1;
      for (int64_t t = first; t < end; sequence++) {
        const int64_t last = std::min<int64_t>(batch.cu_seqlens[sequence + 1], end);
        int count = 0;
        const int32_t* table = batch.block_tables + sequence * batch.table_width;
        auto flush = [&] {
          const W *keys = (const W*)layer.keys, *values = (const W*)layer.values;
          int done = 0;
          while (count - done >= 3) attend<3>(shape, queries + done, head, keys, values, table, scratch), done += 3;
          if (count - done == 2) attend<2>(shape, queries + done, head, keys, values, table, scratch);
          if (count - done == 1) attend<1>(shape, queries + done, head, keys, values, table, scratch);
          count = 0;
        };
        for (; t < last; t++)
          for (int64_t g = 0; g < group; g++) {
            const int64_t h = head * group + g;
            queries[count++] = {work.qkv + t * width + h * size, work.attended + (t * d.heads + h) * size, batch.positions[t], d.slopes ? d.slopes[h] : 0.0f};
            if (count == QUERIES) flush();
          }
        flush();
      }
      at += end - first;
    }
  }

  // hidden += factor · norm(delta), for this thread's rows.
  void add_normed(const Norm& n, const float* delta, float* hidden) const {
    const float factor = float(d.residual_multiplier);
    std::vector<float> row(d.hidden);
    for (int64_t t = rows().first; t < rows().last; t++) {
      norm(n, delta + t * d.hidden, row.data(), d.hidden);
      for (int64_t i = 0; i < d.hidden; i++) Add{factor}.template operator()<W>(hidden + t * d.hidden + i, row[i]);
    }
  }
  // hidden += attention + MLP, which are in `delta` and `normed`, for this thread's rows.
  void add_both(const Layer& layer, float* hidden) const {
    for (int64_t t = rows().first; t < rows().last; t++) {
      float *attended = work.delta + t * d.hidden, *made = work.normed + t * d.hidden, *row = hidden + t * d.hidden;
      norm(layer.attention_post_norm, attended, attended, d.hidden);
      norm(layer.mlp_post_norm, made, made, d.hidden);
      for (int64_t i = 0; i < d.hidden; i++) row[i] = rounded<W>(row[i] + rounded<W>(made[i] + attended[i]));
    }
  }
  // hidden += l(x), unmerged adapters included, through the post norm if there is one. Ends in a barrier.
  void add_linear(const Linear& l, const float* x, int64_t ldx, const Norm& post, float* hidden) const {
    if (post.weight || l.num_sides) {
      product(l, x, ldx, work.delta, d.hidden);
      barrier();
      add_normed(post, work.delta, hidden);
    } else {
      linear<W>(l, x, ldx, batch.tokens, hidden, d.hidden, Add{float(d.residual_multiplier)}, thread, threads);
    }
    barrier();
  }

  void layer(const Layer& layer, float* hidden) const {
    const bool own_norm = d.parallel && layer.mlp_norm.weight;
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = work.normed + t * d.hidden;
      norm(layer.attention_norm, hidden + t * d.hidden, row, d.hidden);
      if (d.parallel) {  // the MLP's input, before attention adds to the residual
        float* other = work.mlp_normed + t * d.hidden;
        if (own_norm)
          norm(layer.mlp_norm, hidden + t * d.hidden, other, d.hidden);
        else
          std::memcpy(other, row, d.hidden * sizeof(float));
        ready(other, d.hidden);
      }
      ready(row, d.hidden);
    }
    barrier();
    const int64_t q = d.heads * d.head_dim;
    product(layer.qkv, work.normed, d.hidden, work.qkv, (d.heads + 2 * d.kv_heads) * d.head_dim);
    barrier();
    turn_and_write(layer);
    barrier();
    attention(layer);
    barrier();
    if (d.half) {
      for (int64_t t = rows().first; t < rows().last; t++) ready(work.attended + t * q, q);
      barrier();
    }
    const int64_t intermediate = outputs(layer.up) / (d.gated ? 2 : 1);
    if (d.parallel) {
      product(layer.o, work.attended, q, work.delta, d.hidden);
      expand(layer.up, work.mlp_normed, batch.tokens, work.up, intermediate);
      barrier();
      product(layer.down, work.up, outputs(layer.up), work.normed, d.hidden);
      barrier();
      add_both(layer, hidden);
      barrier();
      return;
    }
    add_linear(layer.o, work.attended, q, layer.attention_post_norm, hidden);
    for (int64_t t = rows().first; t < rows().last; t++) {
      norm(layer.mlp_norm, hidden + t * d.hidden, work.mlp_normed + t * d.hidden, d.hidden);
      ready(work.mlp_normed + t * d.hidden, d.hidden);
    }
    barrier();
    if (layer.experts) {
      mixture(layer);
      add_normed(layer.mlp_post_norm, work.delta, hidden);
      barrier();
      return;
    }
    expand(layer.up, work.mlp_normed, batch.tokens, work.up, intermediate);
    barrier();
    add_linear(layer.down, work.up, outputs(layer.up), layer.mlp_post_norm, hidden);
  }

  // A mixture of experts into `delta`: each expert in turn over the tokens routed to it.
  void mixture(const Layer& layer) const {
    const int64_t experts = layer.experts, intermediate = d.expert_intermediate, width = intermediate * (d.gated ? 2 : 1);
    product(layer.router, work.mlp_normed, d.hidden, work.shares, experts);
    barrier();
    for (int64_t t = rows().first; t < rows().last; t++) {
      route(work.shares + t * experts, experts);
      std::memset(work.delta + t * d.hidden, 0, d.hidden * sizeof(float));
    }
    barrier();
    std::vector<int64_t> chosen;
    for (int64_t e = 0; e < experts; e++) {
      chosen.clear();
      for (int64_t t = 0; t < batch.tokens; t++)
        if (work.shares[t * experts + e] != 0) chosen.push_back(t);
      if (chosen.empty()) continue;
      const Part mine = part(chosen.size(), 1, thread, threads);
      for (int64_t i = mine.first; i < mine.last; i++)
        std::memcpy(work.expert_in + i * d.hidden, work.mlp_normed + chosen[i] * d.hidden, d.hidden * sizeof(float));
      barrier();
      const Linear up = rows_of<W>(layer.experts_up, e * width, width), down = rows_of<W>(layer.experts_down, e * d.hidden, d.hidden);
      expand(up, work.expert_in, chosen.size(), work.up, intermediate);
      barrier();
      linear<W>(down, work.up, width, chosen.size(), work.expert_out, d.hidden, Store{}, thread, threads);
      barrier();
      for (int64_t i = mine.first; i < mine.last; i++) {
        const float share = work.shares[chosen[i] * experts + e];
        for (int64_t k = 0; k < d.hidden; k++) {
          const float scaled = work.expert_out[i * d.hidden + k] * share;
          work.delta[chosen[i] * d.hidden + k] += d.experts_float32 ? scaled : rounded<W>(scaled);
        }
      }
      barrier();
    }
    for (int64_t t = rows().first; t < rows().last; t++)
      for (int64_t k = 0; k < d.hidden; k++) work.delta[t * d.hidden + k] = rounded<W>(work.delta[t * d.hidden + k]);
  }
  // Router logits to expert weights, in place: softmax over all experts, the top experts_per_token kept, 0 elsewhere.
  void route(float* shares, int64_t experts) const {
    float most = shares[0];
    for (int64_t e = 1; e < experts; e++) most = std::max(most, shares[e]);
    float total = 0;
    for (int64_t e = 0; e < experts; e++) total += shares[e] = std::exp(shares[e] - most);
    std::vector<int64_t> order(experts);
    for (int64_t e = 0; e < experts; e++) order[e] = e;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return shares[a] > shares[b]; });
    float kept = 0;
    for (int64_t i = 0; i < experts; i++) {
      float& share = shares[order[i]];
      share = i < d.experts_per_token ? share / total : 0.0f;
      kept += share;
    }
    for (int64_t e = 0; e < experts; e++) {
      const float share = d.normalize_experts ? shares[e] / kept : shares[e];
      shares[e] = d.experts_float32 ? share : rounded<W>(share);
    }
  }

  void embed(float* hidden) const {
    const W *table = (const W*)d.embedding, *positions = (const W*)d.positions;
    float* rows_in = d.project_in.parts ? work.delta : hidden;
    const int64_t size = d.embedding_size;
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = rows_in + t * size;
      const W* source = table + batch.ids[t] * size;
      for (int64_t i = 0; i < size; i++) {
        row[i] = to_float(source[i]);
        if (d.embedding_multiplier != 1.0) row[i] = rounded<W>(row[i] * float(d.embedding_multiplier));
      }
      if (d.project_in.parts) ready(row, size);
    }
    barrier();
    if (d.project_in.parts) {
      product(d.project_in, work.delta, size, hidden, d.hidden);
      barrier();
    }
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = hidden + t * d.hidden;
      if (positions) {
        const W* source = positions + (batch.positions[t] + d.position_offset) * d.hidden;
        for (int64_t i = 0; i < d.hidden; i++) row[i] = rounded<W>(row[i] + to_float(source[i]));
      }
      norm(d.embedding_norm, row, row, d.hidden);
    }
    barrier();
  }

  // Logits of every row of hidden, into out [tokens, vocabulary].
  void logits(const float* hidden, float* out) const {
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = work.normed + t * d.hidden;
      norm(d.final_norm, hidden + t * d.hidden, row, d.hidden);
      ready(row, d.hidden);
    }
    barrier();
    const float* x = work.normed;
    int64_t in = d.hidden;
    if (d.project_out.parts) {
      in = d.embedding_size;
      product(d.project_out, x, d.hidden, work.delta, in);
      barrier();
      for (int64_t t = rows().first; t < rows().last; t++) ready(work.delta + t * in, in);
      barrier();
      x = work.delta;
    }
    product(d.head, x, in, out, d.vocabulary);
    barrier();
    if (d.logits_divisor == 1.0 && d.logits_softcap == 0.0) return;
    for (int64_t i = rows().first * d.vocabulary; i < rows().last * d.vocabulary; i++) {
      float value = rounded<W>(out[i] / float(d.logits_divisor));
      if (d.logits_softcap) {
        const float cap = float(d.logits_softcap);
        value = rounded<W>(rounded<W>(std::tanh(rounded<W>(value / cap))) * cap);
      }
      out[i] = value;
    }
  }
};

template <typename Body> static void team(int64_t threads, Body body) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  body(omp_get_thread_num(), omp_get_num_threads());
}

template <typename Body> static void in_dtype(const Decoder& d, const Batch& batch, float* base, int64_t threads, Body body) {
  Work work;
  carve(d, batch.tokens, threads, base, &work);
  team(threads, [&](int thread, int count) {
    if (d.half)
      body(Run<bf16>{d, batch, work, thread, count});
    else
      body(Run<float>{d, batch, work, thread, count});
  });
}

extern "C" {
int64_t lanes() { return LANES; }

// Floats of work space that a call with `tokens` tokens needs.
int64_t work_floats(const Decoder* d, int64_t tokens, int64_t threads) { return carve(*d, tokens, threads, nullptr, nullptr); }

// hidden float32 [tokens, hidden] through layers [first, last), in place; first = -1 computes it from the ids before.
// Returns 0; or 1, with nothing changed, if an id is outside the embedding.
int64_t forward(const Decoder* d, const Batch* batch, int64_t first, int64_t last, float* hidden, float* work, int64_t threads) {
  for (int64_t t = 0; first < 0 && t < batch->tokens; t++)
    if (batch->ids[t] < 0 || batch->ids[t] >= d->embedding_rows) return 1;
  in_dtype(*d, *batch, work, threads, [&](const auto& run) {
    if (first < 0) run.embed(hidden);
    for (int64_t i = std::max<int64_t>(first, 0); i < last; i++) run.layer(d->layers[i], hidden);
  });
  return 0;
}

// Logits of hidden, float32 [count, hidden], into out, float32 [count, vocabulary].
void logits(const Decoder* d, const float* hidden, int64_t count, float* out, float* work, int64_t threads) {
  Batch batch{};
  batch.tokens = count;
  in_dtype(*d, batch, work, threads, [&](const auto& run) { run.logits(hidden, out); });
}

// For each row of logits float32 [rows, vocabulary]: a token int64 and three logprobs float32: under the distribution
// that was sampled from, before truncation, and before truncation at temperature 1. Greedy: all under softmax(logits).
// keys, positions int64 [rows]: of the sampling RNG.
void sample(const float* logits, int64_t rows, int64_t vocabulary, const int64_t* keys, const int64_t* positions, const Draw* draw,
            int64_t* tokens, float* sampling_logps, float* old_logps, float* raw_logps, int64_t threads) {
  const float inverse = draw->temperature > 0 ? float(1.0 / draw->temperature) : 1.0f;
  const bool truncated = draw->top_k > 0 || draw->top_p < 1 || draw->min_p > 0;
  team(threads, [&](int thread, int count) {
    const Part mine = part(rows, 1, thread, count);
    for (int64_t r = mine.first; r < mine.last; r++) {
      const Row row(logits + r * vocabulary, vocabulary, inverse);
      double mass = row.mass;
      if (draw->temperature == 0) {
        tokens[r] = row.argmax();
      } else {
        const double u = uniform(keys[r], positions[r]);
        tokens[r] = truncated ? truncated_draw(row, *draw, u, mass) : row.inverse_cdf(u, inverse);
      }
      const double gap = double(row.logits[tokens[r]]) - row.most;
      sampling_logps[r] = float(gap * inverse - std::log(mass));
      old_logps[r] = float(gap * inverse - std::log(row.mass));
      raw_logps[r] = float(gap - std::log(row.raw));
    }
  });
}

// For each row of logits float32 [rows, vocabulary]: the logprob of its target, int64 [rows], and the entropy in nats,
// float32 [rows] each, both of softmax(logits / temperature).
void score(const float* logits, int64_t rows, int64_t vocabulary, const int64_t* targets, double temperature,
           float* logps, float* entropies, int64_t threads) {
  const float inverse = float(1.0 / temperature);
  team(threads, [&](int thread, int count) {
    const Part mine = part(rows, 1, thread, count);
    for (int64_t r = mine.first; r < mine.last; r++) {
      const Row row(logits + r * vocabulary, vocabulary, inverse);
      logps[r] = float((double(row.logits[targets[r]]) - row.most) * inverse - std::log(row.mass));
      entropies[r] = float(std::log(row.mass) + row.spread(inverse) / row.mass);
    }
  });
}
}
