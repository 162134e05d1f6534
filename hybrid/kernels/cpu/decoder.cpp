// A whole decoder on the CPU: all layers of a forward in one call, with barriers between the threads' steps.
//
// Activations are float32, rounded to the model's dtype wherever Hugging Face's modules round; weights are read in place.
// hybrid/models/spec.py explains the fields of Layer and Decoder, hybrid/decoders/batch.py those of Batch.
#include <omp.h>

#include <numeric>

#include "attention.h"
#include "drafts.h"
#include "group.h"
#include "linear.h"
#include "recurrent.h"
#include "sharded_sampling.h"

// The float work space: [tokens, ·] buffers, one after the other.
struct Work {
  uint32_t* tiles;  // of x, as several threads make them: those of two products
  float *normed, *mlp_normed, *projected, *qkv, *latent_queries, *attended, *mixed, *per_head, *gate_up, *expert_in, *expert_out, *latent, *latent_out, *router_in, *router_weights, *shared_gate, *lora_ax, *squares, *per_layer, *scratch;
};

constexpr int64_t EXPERT_ROWS = 1024;

// Elements of a gated delta net's keys and values, and of a Mamba 2 mixer's heads.
static int64_t delta_keys(const Decoder& d) { return d.delta.key_heads * d.delta.key_dim; }
static int64_t delta_values(const Decoder& d) { return d.delta.value_heads * d.delta.value_dim; }
static int64_t mamba_inner(const Decoder& d) { return d.mamba.heads * d.mamba.head_dim; }

static int64_t kimi_inner(const Decoder& d) { return d.kimi.heads * d.kimi.head_dim; }

// A Kimi delta attention's elements of a token in `per_head`: betas, what decays and gates are made of, decays, gates.
static int64_t kimi_width(const Decoder& d) { return d.kimi.heads + 2 * d.kimi.head_dim + 2 * kimi_inner(d); }

// The convolution of a model's recurrent mixers: over elements [first, first + channels) of each token's `width` in qkv.
struct Convolution {
  int64_t taps, channels, first, width;
};
static Convolution convolution(const Decoder& d) {
  if (const int64_t channels = d.short_conv.channels) return {d.short_conv.conv_width, channels, 0, 3 * channels};
  if (const int64_t inner = kimi_inner(d)) return {d.kimi.conv_width, 3 * inner, 0, 3 * inner};
  const int64_t values = delta_values(d), inner = mamba_inner(d);
  const int64_t channels = d.mamba.heads ? inner + 2 * d.mamba.groups * d.mamba.state_size : 2 * delta_keys(d) + values;
  return {d.mamba.heads ? d.mamba.conv_width : d.delta.conv_width, channels, inner, inner + channels + values + d.mamba.heads};
}

// Of a layer, or of the decoder: the most of any layer.
// Elements of a token's queries, with their gates, keys and values.
template <typename Sizes> int64_t queries_width(const Decoder& d, const Sizes& of) { return d.num_heads * (1 + d.output_gate) * of.head_dim; }
template <typename Sizes> int64_t value_dim(const Decoder& d, const Sizes& of) { return d.latent_dim ? d.latent_dim : d.value_dim ? d.value_dim : of.head_dim; }
template <typename Sizes> int64_t qkv_width(const Decoder& d, const Sizes& of) { return queries_width(d, of) + of.num_kv_heads * (of.head_dim + value_dim(d, of)); }
static int64_t qkv_width(const Decoder& d, const Layer& of) { return queries_width(d, of) + (of.reads_other_kv ? 0 : of.num_kv_heads * (of.head_dim + value_dim(d, of))); }
// Elements of a key in the cache, which has `value_dim` of a value.
template <typename Sizes> int64_t key_dim(const Decoder& d, const Sizes& of) { return d.latent_dim ? d.latent_dim + d.rotary_dim : of.head_dim; }
template <typename Sizes> int64_t head_pad(const Decoder& d, const Sizes& of) { return (value_dim(d, of) + LANES - 1) / LANES * LANES; }
// Elements of the latents of a token's queries, and of its latent and shared key, side by side.
static int64_t latents_width(const Decoder& d) { return d.latent_dim ? d.query_rank + key_dim(d, d) : 0; }

// Rows of the buffers of experts: of all (token, expert) pairs of a decode step; of a larger batch, of some experts at a time.
static int64_t expert_rows(const Decoder& d, int64_t tokens) {
  return d.num_experts ? std::max(tokens, std::min(tokens * d.experts_per_token, EXPERT_ROWS)) : 0;
}

// Width of the experts' inputs and outputs.
static int64_t expert_size(const Decoder& d) { return d.latent_size ? d.latent_size : d.hidden_size; }

static bool routers_read_residual(const Decoder& d) {
  return std::any_of(d.layers, d.layers + d.num_layers, [](const Layer& layer) { return layer.router_scale; });
}

// Sets `work` to the buffers from `base` on, unless it is null; returns the number of floats that they take.
static int64_t divide(const Decoder& d, int64_t tokens, int64_t threads, float* base, Work* work) {
  int64_t used = 0;
  auto take = [&](int64_t floats) {
    float* buffer = base + used;
    used += (floats + 15) / 16 * 16;
    return buffer;
  };
  const int64_t width = std::max({d.hidden_size, d.embedding_size, d.num_heads * d.head_dim});
  Work w;
  w.normed = take(tokens * width);
  w.mlp_normed = take(tokens * d.hidden_size);
  w.projected = take(tokens * std::max(d.hidden_size, d.embedding_size));
  w.qkv = take(tokens * std::max({qkv_width(d, d), d.num_heads * d.value_dim, convolution(d).width}));
  w.latent_queries = take(d.latent_dim ? tokens * d.num_heads * key_dim(d, d) : 0);
  w.attended = take(tokens * std::max({d.num_heads * value_dim(d, d), delta_values(d), mamba_inner(d), d.short_conv.channels, kimi_inner(d)}));
  w.mixed = take(tokens * std::max({convolution(d).channels, latents_width(d), d.num_heads * d.gate_dim}));
  w.per_head = take(tokens * (2 * (d.delta.value_heads + d.mamba.heads) + kimi_width(d)));
  w.gate_up = take(std::max(tokens, expert_rows(d, tokens)) * std::max(d.intermediate_size * 2, d.per_layer_input_size));
  w.expert_in = take(expert_rows(d, tokens) * expert_size(d));
  w.expert_out = take(expert_rows(d, tokens) * expert_size(d));
  w.latent = take(tokens * d.latent_size);
  w.latent_out = take(tokens * d.latent_size);
  const bool keeps_input = d.num_experts && d.bfloat16 && (d.router.float32 || d.router.scales_inputs);
  w.router_in = take(keeps_input || routers_read_residual(d) ? tokens * d.hidden_size : 0);
  w.router_weights = take(tokens * d.num_experts);
  w.shared_gate = take(d.num_experts ? tokens : 0);
  w.lora_ax = take(tokens * d.lora_ranks);
  w.squares = take(d.group && (d.qk_norm == ROW || d.mamba.group_ranks > 1) ? tokens * 2 : 0);
  w.per_layer = take(tokens * d.num_layers * d.per_layer_input_size);
#if TILES
  w.tiles = (uint32_t*)take(d.bfloat16 && threads > 1 && tiles_ready() ? 2 * SHARED_WORDS : 0);
#endif
  w.scratch = take(threads * AttentionWork::floats(key_dim(d, d), head_pad(d, d)));
  if (work) *work = w;
  return used;
}

// Tokens [first, last) of a sequence, for attention to splits of its context.
struct AttentionItem {
  int64_t sequence, first, last;
  Range splits;
};

// What the threads of a call share.
struct Team {
  Barrier barrier;
  Queue queue;
  std::vector<AttentionItem> items;  // for each KV head
  int64_t splits = 0;                // of the longest context, if splits are items of their own, for a few tokens; else 0
  std::vector<float> parts;          // sums of splits, [tokens, heads, splits]

  Team(const Decoder& d, const Batch& batch, int64_t threads) {
    // With tiles those whose queries `attend` takes, or 32; else 48. Of a KV head, whole runs of `queries_at_once`.
    const int64_t item_tokens = TILES ? std::max<int64_t>(HELD_QUERIES * d.num_kv_heads / std::max<int64_t>(d.num_heads, 1), 32) : 48;
    int64_t longest = 0;
    for (int64_t s = 0; s < batch.sequences; s++)
      for (int64_t t = batch.cu_seqlens[s]; t < batch.cu_seqlens[s + 1]; t += item_tokens) {
        const int64_t last = std::min<int64_t>(t + item_tokens, batch.cu_seqlens[s + 1]), end = batch.positions[last - 1] / SPLIT_TOKENS + 1;
        items.push_back({s, t, last, {0, end}});
        longest = std::max(longest, end);
      }
    if (longest < 2 || batch.tokens * d.num_kv_heads >= 2 * threads) return;
    splits = longest;
    parts.resize(batch.tokens * d.num_heads * splits * SplitSums::floats(head_pad(d, d)));
    std::vector<AttentionItem> whole;
    whole.swap(items);
    for (const AttentionItem& item : whole)
      for (int64_t split = 0; split < item.splits.last; split++) items.push_back({item.sequence, item.first, item.last, {split, split + 1}});
  }
};

template <typename T>
struct Run {
  const Decoder& d;
  const Batch& batch;
  const Work& work;
  Team& team;
  int thread, threads;
  mutable int64_t shared = 0;  // calls of `shared_rows` whose tiles are shared

  void barrier() const {
    if (threads > 1) team.barrier.wait(threads);
  }
  Range rows() const { return partition(batch.tokens, 1, thread, threads); }
  Share share(int64_t rows, int64_t columns) const { return share_of(rows, columns, product_grain<T>(), thread, threads); }
  void arrange(float* row, int64_t size) const { Reader<T>::Layout::arrange(row, size); }

  // data [count] becomes its sum over the ranks of a group, rounded. Call it between barriers; it ends in one.
  void sum_over_ranks(Group* group, float* data, int64_t count) const {
    if (!group) return;
    Group& g = *group;
    if (!g.memory) {
      const auto sum = (int64_t(*)(float*, int64_t))g.sum;
      if (thread == 0 && g.status == GROUP_OK && sum(data, count)) g.status = SUM_FAILED;
    } else {
      sum_in_memory(g, data, count, thread, threads, [&] { barrier(); });
    }
    barrier();
    const Range mine = partition(count, LANES, thread, threads);
    for (int64_t i = mine.first; i < mine.last; i++) data[i] = rounded<T>(data[i]);
    barrier();
  }

  // A·x of l's unmerged LoRA adapters into `lora_ax`; ends in a barrier if there are any.
  void prepare_lora(const Linear& l, const Rows& x) const {
    if (!l.num_lora_deltas) return;
    lora_a<T>(l, x, batch.adapters, work.lora_ax, thread, threads);
    barrier();
  }
  // All tokens' x, with tiles that the threads make together, where that saves more time than its barrier takes. The memory of
  // the last call but one is used again: no thread reads it, since all have come to the last call's barrier.
  Rows shared_rows(const float* x, int64_t stride, int64_t inputs) const {
    const Rows rows{x, stride, batch.tokens};
#if TILES
    const int64_t tops = (batch.tokens + TILE - 1) / TILE, blocks = inputs / TILE_DEPTH, words = TILE * tile_stride(inputs);
    if (threads == 1 || !in_product_tiles<T>(inputs) || tops * blocks < SHARING_TILES || tops * words > SHARED_WORDS) return rows;
    uint32_t* tiles = work.tiles + shared++ % 2 * SHARED_WORDS;
    const Range mine = partition(tops, 1, thread, threads);
    const Rows part = rows.part(mine.first * TILE, std::min(mine.last * TILE, batch.tokens) - mine.first * TILE);
    if (mine.size()) make_tiles(part.data, part.stride, part.count, blocks, tiles + mine.first * words);
    barrier();
    return {x, stride, batch.tokens, tiles, tile_stride(inputs)};
#else
    return rows;
#endif
  }
  // A share of y = l(x).
  void multiply(const Linear& l, const Rows& x, const Output& y, Share mine) const {
    linear<T>(l, x.part(mine.rows.first, mine.rows.size()), y.at(mine.rows.first, 0), mine.columns.first, mine.columns.last);
  }
  // This thread's share of y = l(x), unmerged LoRA adapters included. No barrier at the end.
  void product(const Linear& l, const float* x, int64_t x_stride, float* y, int64_t y_stride, bool is_partial = false) const {
    const Rows rows = shared_rows(x, x_stride, l.inputs);
    const Output out{Output::STORE, y, y_stride, 1.0f, is_partial};
    const Share mine = share(batch.tokens, outputs(l));
    prepare_lora(l, rows);
    multiply(l, rows, out, mine);
    add_lora<T>(l, work.lora_ax, batch.adapters, batch.tokens, out, mine);
  }

  // The sum of (x - mean)^2.
  static double squared(const float* x, int64_t size, float mean) {
    Vec squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      Vec v = load(x + i) - mean;
      squares += v * v;
    }
    double square = sum(squares);
    for (; i < size; i++) square += (x[i] - mean) * (x[i] - mean);
    return square;
  }
  // y = norm(x), rounded as in the model; y = x if there is no norm.  eps: 0: the model's.
  void norm(const Norm& n, const float* x, float* y, int64_t size, double eps = 0) const {
    if (!n.weight) {
      if (y != x) std::memcpy(y, x, size * sizeof(float));
      return;
    }
    double total = 0;
    if (d.norm == LAYER)
      for (int64_t i = 0; i < size; i++) total += x[i];
    const float mean = float(total / size);
    scaled(n, x, y, size, mean, float(squared(x, size, mean) / size), eps);
  }
  // The norm of a row of the residual stream, which is rounded first. y is another row.
  void norm_residual(const Norm& n, const float* x, float* y) const {
    if (d.residual_float32)
      for (int64_t i = 0; i < d.hidden_size; i++) y[i] = rounded<T>(x[i]);
    norm(n, d.residual_float32 ? y : x, y, d.hidden_size);
  }
  // y = weight · (x - mean) / sqrt(variance) + bias, rounded as in the model.
  void scaled(const Norm& n, const float* x, float* y, int64_t size, float mean, float variance, double eps = 0) const {
    const float factor = 1.0f / std::sqrt(variance + float(eps ? eps : d.norm_eps)), offset = float(d.norm_offset);
    for (int64_t i = 0; i < size; i++) {
      float v = (x[i] - mean) * factor;
      if (d.norm == LAYER)
        v = rounded<T>(v * (d.norm_offset ? rounded<T>(n.weight[i] + offset) : n.weight[i]) + (n.bias ? n.bias[i] : 0.0f));
      else if (d.norm_float32 || (d.residual_float32 && &n == &d.final_norm))
        v = rounded<T>(v * (n.weight[i] + offset));
      else
        v = rounded<T>(rounded<T>(v) * (n.weight[i] + offset));
      y[i] = v;
    }
  }

  // gelu_new: transformers computes it in Python, with every operation rounded.
  Vec gelu_stepwise(Vec x) const {
    Vec inner = rounded<T>(x + rounded<T>(0.044715f * rounded<T>(x * x * x)));
    Vec gate = rounded<T>(1.0f + rounded<T>(tanh(rounded<T>(0.79788456080286536f * inner))));
    return rounded<T>(0.5f * x) * gate;
  }
  Vec activated(Vec x) const {
    switch (d.activation) {
      case SILU: return x / (1.0f + exp(-max(x, splat(-88.0f))));  // e^89 overflows
      case GELU: return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
      case GELU_TANH: return d.activation_stepwise ? gelu_stepwise(x) : 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
      case RELU2: return max(x, Vec{}) * max(x, Vec{});
      default: return max(x, Vec{});
    }
  }
  // xIELU with beta 0.5: transformers computes it in Python, with every operation rounded.
  Vec xielu(Vec x, float above, float below) const {
    const float most = rounded<T>(-1e-6f);
    const Vec low = x < most ? x : splat(most);
    const Vec series = low * (1.0f + low * (0.5f + low * (0.166666667f + low * (0.0416666667f + low * 0.00833333333f))));
    const Vec expm1 = rounded<T>(low > -0.1f ? series : exp(max(low, splat(-87.0f))) - 1.0f);
    const Vec curved = rounded<T>(rounded<T>(expm1 - x) * below), squared = rounded<T>(rounded<T>(above * x) * x);
    return (x > 0.0f ? squared : curved) + rounded<T>(0.5f * x);
  }
  static Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-max(x, splat(-88.0f)))); }
  Vec swiglu_clamped(Vec gate, Vec up) const {
    const Vec limit = splat(float(d.swiglu_limit));
    gate = gate < limit ? gate : limit, up = max(up < limit ? up : limit, -limit);
    gate = rounded<T>(gate * rounded<T>(sigmoid(rounded<T>(gate * float(d.swiglu_alpha)))));
    return rounded<T>(rounded<T>(up + 1.0f) * gate);
  }
  // act(gate) · up if gated, else act(gate), rounded.  slopes: of xIELU, or null.
  Vec activated_product(Vec gate, Vec up, const float* slopes) const {
    if (d.activation == SWIGLU_CLAMPED) return swiglu_clamped(gate, up);
    const Vec x = d.gate_multiplier == 1.0 ? gate : rounded<T>(gate * float(d.gate_multiplier));
    const Vec v = rounded<T>(slopes ? xielu(x, slopes[0], slopes[1]) : activated(x));
    return d.gated ? rounded<T>(v * up) : v;
  }
  // Elements [first, last) of a row: act(gate) · up of gate before up if gated, else act(up).  bias: of a gated row,
  // added before, or null.
  void activate(float* row, int64_t first, int64_t last, int64_t intermediate, const float* bias = nullptr, const float* slopes = nullptr) const {
    for (int64_t i = first; bias && i < last; i++)
      for (int64_t at : {i, i + intermediate}) row[at] = rounded<T>(row[at] + bias[at]);
    int64_t i = first;
    for (; i + LANES <= last; i += LANES) store(row + i, activated_product(load(row + i), d.gated ? load(row + intermediate + i) : Vec{}, slopes));
    if (i == last) return;
    float gate[LANES] = {}, up[LANES] = {};
    const int64_t rest = (last - i) * sizeof(float);
    std::memcpy(gate, row + i, rest);
    if (d.gated) std::memcpy(up, row + intermediate + i, rest);
    store(gate, activated_product(load(gate), load(up), slopes));
    std::memcpy(row + i, gate, rest);
  }

#if TILES
  // The matrices of `expand`, where tiles can multiply them together. Whether they can does not depend on rows or threads.
  GateAndUp gate_and_up(const Linear& l, int64_t intermediate) const {
    const bool apart = l.parts == 2 && l.rows[0] == intermediate;
    const bool plain = !l.scale[0] && !l.bias[0] && !(apart && (l.scale[1] || l.bias[1])) && !l.num_lora_deltas;
    if (!d.gated || !plain || (!apart && l.parts != 1) || l.inputs % TILE_DEPTH || intermediate % (2 * TILE) || !in_product_tiles<T>(l.inputs)) return {};
    const bf16* gate = (const bf16*)l.weight[0];
    return {gate, apart ? (const bf16*)l.weight[1] : gate + intermediate * l.inputs, l.inputs};
  }
#endif
  // A share of the up (and gate) projection and activation of an MLP over rows of x.  share.columns: of [0, intermediate);
  // ranges begin at multiples of 2 · LANES: whole blocks, and in the last range the tail.  bias, slopes: as in `activate`.
  void expand(const Linear& gate_up, const Rows& x, float* y, int64_t intermediate, Share mine, const float* bias = nullptr, const float* slopes = nullptr) const {
    const int64_t width = outputs(gate_up);
#if TILES
    if constexpr (std::is_same_v<T, bf16>)
      if (const GateAndUp w = gate_and_up(gate_up, intermediate); w.gate && !bias) {
        over_tiled_rows<T>(x.part(mine.rows.first, mine.rows.size()), gate_up.inputs, [&](const Rows& rows, int64_t top) {
          gated_tile_columns(rows, w, mine.columns.first, mine.columns.last, [&](int64_t row, int64_t column, std::array<Vec, 2> gates, std::array<Vec, 2> ups) {
            Vec v[2];
            for (int i = 0; i < 2; i++) v[i] = activated_product(rounded<T>(gates[i]), rounded<T>(ups[i]), slopes);
            store(y + (mine.rows.first + top + row) * width + column, (Vec)pairs_in_order(v[0], v[1]));  // as `arrange` would
          });
        });
        return;
      }
#endif
    const Output out{Output::STORE, y, width};
    const auto over_parts = [&](auto body) {  // gate, up
      for (int64_t from = 0; from < width; from += intermediate) body(Share{mine.rows, {from + mine.columns.first, from + mine.columns.last}});
    };
    over_tiled_rows<T>(x.part(mine.rows.first, mine.rows.size()), gate_up.inputs, [&](const Rows& rows, int64_t top) {
      over_parts([&](const Share& part) { linear<T>(gate_up, rows, out.at(mine.rows.first + top, 0), part.columns.first, part.columns.last); });
    });
    over_parts([&](const Share& part) { add_lora<T>(gate_up, work.lora_ax, batch.adapters, x.count, out, part); });
    for (int64_t m = mine.rows.first; m < mine.rows.last; m++) {
      activate(y + m * width, mine.columns.first, mine.columns.last, intermediate, bias, slopes);
      arrange(y + m * width + mine.columns.first, mine.columns.size());
    }
  }
  // `expand` of an MLP that is not a mixture, over all tokens. No barrier at the end.
  void expand_all(const Linear& gate_up, int64_t intermediate, const float* slopes = nullptr) const {
    const Rows rows = shared_rows(work.mlp_normed, d.hidden_size, gate_up.inputs);
    prepare_lora(gate_up, rows);
    Grain grain = product_grain<T>();
    grain.columns = 2 * LANES;
    expand(gate_up, rows, work.gate_up, intermediate, share_of(batch.tokens, intermediate, grain, thread, threads), nullptr, slopes);
  }

  // Sums over the ranks of q^2 and k^2, into `squares`, for a norm of whole rows of which a rank has some heads. Key heads
  // that several ranks have are counted once for each of them, in the sum and in its size.
  void sum_squares() const {
    if (!d.group || d.qk_norm != ROW) return;
    const int64_t q = d.num_heads * d.head_dim, kv = d.num_kv_heads * d.head_dim;
    for (int64_t t = rows().first; t < rows().last; t++) {
      const float* row = work.qkv + t * (q + 2 * kv);
      work.squares[2 * t] = float(squared(row, q, 0)), work.squares[2 * t + 1] = float(squared(row + q, kv, 0));
    }
    barrier();
    Run<float>{d, batch, work, team, thread, threads}.sum_over_ranks(d.group, work.squares, 2 * batch.tokens);
  }
  // The norm of a row of which this rank has `size` elements.  square: index in `squares`.
  void norm_row(const Norm& n, float* row, int64_t size, int64_t square) const {
    if (d.group)
      scaled(n, row, row, size, 0, work.squares[square] / float(size * d.group->size));
    else
      norm(n, row, row, size);
  }

  // The cache position of token t of a sequence.
  int64_t slot(int64_t sequence, int64_t t) const {
    const int64_t position = batch.positions[t];
    return batch.block_tables[sequence * batch.table_width + position / BLOCK_SIZE] * int64_t(BLOCK_SIZE) + position % BLOCK_SIZE;
  }
  // Norm and RoPE of q and k, and the write of k and v to the KV cache, for this thread's tokens.
  void rope_and_write(const Layer& layer) const {
    const int64_t size = layer.head_dim, q_step = size * (1 + d.output_gate), q = d.num_heads * q_step, width = qkv_width(d, layer);
    const int64_t kv_heads = layer.reads_other_kv ? 0 : layer.num_kv_heads, kv = kv_heads * size, value_size = value_dim(d, layer);
    const Range mine = rows();
    if (thread == 0) team.queue.restart();  // for `attention`, which follows a barrier
    int64_t sequence = 0;
    for (int64_t t = mine.first; t < mine.last; t++) {
      while (batch.cu_seqlens[sequence + 1] <= t) sequence++;
      float* row = work.qkv + t * width;
      if (d.qkv_clip)
        for (int64_t i = 0; i < width; i++) row[i] = std::clamp(row[i], -float(d.qkv_clip), float(d.qkv_clip));
      if (d.key_multiplier != 1.0) scale_row(row + q, kv, d.key_multiplier);
      if (d.qk_norm == ROW) {
        norm_row(layer.q_norm, row, q, 2 * t);
        norm_row(layer.k_norm, row + q, kv, 2 * t + 1);
      } else if (!d.qk_norm_last) {
        norm_heads(layer, row);
      }
      const int64_t position = batch.positions[t];
      if (layer.cos)
        for (int64_t h = 0; h < d.num_heads + kv_heads; h++)
          rope(h < d.num_heads ? row + h * q_step : row + q + (h - d.num_heads) * size, layer.cos + position * (layer.rotary_dim / 2), layer.sin + position * (layer.rotary_dim / 2), layer.rotary_dim);
      if (d.qk_norm_last) norm_heads(layer, row);
      if (!(d.query_scale_unrotated && layer.cos)) scale_queries(row, q_step, size, position);
      for (int64_t h = 0; h < kv_heads; h++) {
        float* value = row + q + kv + h * value_size;
        norm(layer.v_norm, value, value, value_size);
        if (d.value_multiplier != 1.0) scale_row(value, value_size, d.value_multiplier);
        write_cache(layer, sequence, t, h, row + q + h * size, value);
      }
    }
  }
  static void scale_row(float* row, int64_t size, double factor) {
    for (int64_t i = 0; i < size; i++) row[i] = rounded<T>(row[i] * float(factor));
  }
  // Multiplies a token's queries, which are `step` apart, by the scale of its position.
  void scale_queries(float* queries, int64_t step, int64_t size, int64_t position) const {
    if (!d.query_scale_positions) return;
    const int64_t steps = (position + d.query_scale_unrotated) / d.query_scale_positions;
    const float exact = 1.0f + float(d.query_scale_beta) * std::log(float(1 + steps)), scale = d.query_scale_unrotated ? exact : rounded<T>(exact);
    for (int64_t h = 0; h < d.num_heads; h++)
      for (int64_t i = 0; i < size; i++) queries[h * step + i] = rounded<T>(queries[h * step + i] * scale);
  }
  // Writes the keys and values of all tokens, float32 [tokens, num_kv_heads, key_dim] and [tokens, num_kv_heads, value_dim], to the KV cache.
  void write_rows(const Layer& layer, const float* keys, const float* values) const {
    for (int64_t t = 0, sequence = 0; t < batch.tokens; t++) {
      while (batch.cu_seqlens[sequence + 1] <= t) sequence++;
      for (int64_t h = 0, row = t * layer.num_kv_heads; h < layer.num_kv_heads; h++, row++)
        write_cache(layer, sequence, t, h, keys + row * key_dim(d, layer), values + row * value_dim(d, layer));
    }
  }
  // Writes the key and value of token t of a sequence to a head of the KV cache.
  void write_cache(const Layer& layer, int64_t sequence, int64_t t, int64_t head, const float* key_row, const float* value_row) const {
    const int64_t block = slot(sequence, t) / BLOCK_SIZE, offset = batch.positions[t] % BLOCK_SIZE, key_size = key_dim(d, layer), value_size = value_dim(d, layer), pad = head_pad(d, layer);
    T* key = (T*)layer.keys + (block * layer.num_kv_heads + head) * key_dims(key_size) * BLOCK_SIZE;
    T* value = (T*)layer.values + (block * layer.num_kv_heads + head) * BLOCK_SIZE * pad;
    for (int64_t i = 0; i < key_dims(key_size); i++) store(key_at(key, i, offset), i < key_size ? key_row[i] : 0.0f);
    for (int64_t i = 0; i < pad; i++) store(value_at(value, pad, i, offset), i < value_size ? value_row[i] : 0.0f);
    if (IN_PAIRS<T> && offset % 2 == 0 && t + 1 == batch.cu_seqlens[sequence + 1])  // the next token's half is not written yet
      for (int64_t i = 0; i < pad; i++) store(value_at(value, pad, i, offset + 1), 0.0f);
  }
  // The norm of each head of a token's q and k, if the layer has these norms.
  void norm_heads(const Layer& layer, float* row) const {
    const int64_t size = layer.head_dim, q_step = size * (1 + d.output_gate);
    float* keys = row + d.num_heads * q_step;
    for (int64_t h = 0; h < d.num_heads; h++) norm(layer.q_norm, row + h * q_step, row + h * q_step, size);
    for (int64_t h = 0; !layer.reads_other_kv && h < layer.num_kv_heads; h++) norm(layer.k_norm, keys + h * size, keys + h * size, size);
  }
  void rope(float* head, const float* cos, const float* sin, int64_t dim) const {
    const int64_t half = dim / 2, step = d.rotary_interleaved ? 2 : 1, apart = d.rotary_interleaved ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
      float *a = head + i * step, *b = a + apart;
      const float x = *a, y = *b;
      if (d.rotary_float32) {
        *a = rounded<T>(x * cos[i] - y * sin[i]);
        *b = rounded<T>(y * cos[i] + x * sin[i]);
      } else {
        *a = rounded<T>(rounded<T>(x * cos[i]) - rounded<T>(y * sin[i]));
        *b = rounded<T>(rounded<T>(y * cos[i]) + rounded<T>(x * sin[i]));
      }
    }
  }

  // Attention, a KV head and an item at a time. Consecutive items often share blocks (a common prefix), which then stay in the
  // thread's cache.
  void attention(const Layer& layer) const {
    const int64_t size = key_dim(d, layer), out_size = value_dim(d, layer), group = d.num_heads / layer.num_kv_heads, q_step = size * (1 + d.output_gate);
    const int64_t width = d.latent_dim ? d.num_heads * size : qkv_width(d, layer);
    const float* of_queries = d.latent_dim ? work.latent_queries : work.qkv;
    const AttentionShape shape{layer.num_kv_heads, size, out_size, head_pad(d, layer), float(d.attention_scale), float(d.attention_softcap), layer.window, d.alibi_bfloat16 != 0};
    const T *keys = (const T*)layer.keys, *values = (const T*)layer.values;
    const AttentionWork scratch(work.scratch + thread * AttentionWork::floats(size, shape.head_pad), shape.head_pad);
    const int64_t count = team.items.size(), each = team.splits * SplitSums::floats(shape.head_pad);
    const auto query = [&](int64_t t, int64_t h) {
      const int64_t row = t * d.num_heads + h;
      float* parts = team.splits ? team.parts.data() + row * each : nullptr;
      return Query{of_queries + t * width + h * q_step, work.attended + row * out_size, batch.positions[t], d.alibi ? d.alibi[h] : 0.0f, parts, layer.sinks ? layer.sinks + h : nullptr};
    };
    Query queries[HELD_QUERIES];
    if (in_tiles<T>()) tiles_begin();
    for (Range run; run = team.queue.take(count * layer.num_kv_heads, threads), run.size();)
      for (int64_t i = run.first; i < run.last; i++) {
        const AttentionItem& item = team.items[i % count];
        const int64_t head = i / count;
        const int32_t* table = batch.block_tables + item.sequence * batch.table_width;
        int held = 0;
        const auto attend_held = [&] {
          if (held) attend<T>(shape, queries, held, head, item.splits, keys, values, table, scratch);
          held = 0;
        };
        for (int64_t t = item.first; t < item.last; t++)
          for (int64_t g = 0; g < group; g++) {
            queries[held++] = query(t, head * group + g);
            if (held == HELD_QUERIES) attend_held();
          }
        attend_held();
      }
    if (in_tiles<T>()) tiles_end();
    if (!team.splits) return;
    barrier();
    const Range mine = partition(batch.tokens * d.num_heads, 1, thread, threads);
    for (int64_t row = mine.first; row < mine.last; row++) merge_parts<T>(shape, query(row / d.num_heads, row % d.num_heads));
  }

  // Multiplies the attention output of token t by the sigmoid of its gates, which follow its queries in qkv, or are in `mixed`.
  void apply_output_gate(const Layer& layer, int64_t t) const {
    const int64_t size = layer.head_dim;
    for (int64_t h = 0; h < d.num_heads; h++) {
      const int64_t row = t * d.num_heads + h;
      float* attended = work.attended + row * size;
      if (d.gate_dim == 1) {
        const float factor = rounded<T>(sigmoid(splat(work.mixed[row]))[0]);
        for (int64_t i = 0; i < size; i++) attended[i] = rounded<T>(attended[i] * factor);
        continue;
      }
      const float* gate = d.gate_dim ? work.mixed + row * d.gate_dim : work.qkv + t * qkv_width(d, layer) + (2 * h + 1) * size;
      over_vectors(size, attended, attended, gate, [](Vec x, Vec g) { return rounded<T>(x * rounded<T>(sigmoid(g))); });
    }
  }
  // y[i] = f(a[i], b[i]), in vectors; y may be a.
  template <typename F> static void over_vectors(int64_t size, float* y, const float* a, const float* b, F f) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(y + i, f(load(a + i), load(b + i)));
    if (i == size) return;
    float x[LANES] = {}, z[LANES] = {};
    std::memcpy(x, a + i, (size - i) * sizeof(float));
    std::memcpy(z, b + i, (size - i) * sizeof(float));
    store(x, f(load(x), load(z)));
    std::memcpy(y + i, x, (size - i) * sizeof(float));
  }
  static Vec silu(Vec x) { return x / (1.0f + exp(-max(x, splat(-88.0f)))); }

  // Latent attention of `normed`, before its last projection, into `qkv`. Keys' and values' matrices are absorbed: queries
  // become those of the latents, and each head's output is made of the latents that it has read. Ends in a barrier.
  void latent_attention(const Layer& layer) const {
    const int64_t rank = d.query_rank, latent = d.latent_dim, rope_dim = d.rotary_dim, width = latents_width(d), key = key_dim(d, d);
    const int64_t size = d.head_dim, plain = size - rope_dim, q = d.num_heads * size, values = d.num_heads * d.value_dim;
    product(layer.kv_a, work.normed, d.hidden_size, work.mixed + rank, width);
    if (rank) {
      product(layer.q_a, work.normed, d.hidden_size, work.mixed, width);
      barrier();
      for (int64_t t = rows().first; t < rows().last; t++) {
        float* row = work.mixed + t * width;
        norm(layer.q_a_norm, row, row, rank, d.latent_norm_eps);
        arrange(row, rank);
      }
      barrier();
    }
    product(layer.q_b, rank ? work.mixed : work.normed, rank ? width : d.hidden_size, work.qkv, q);
    if (thread == 0) team.queue.restart();
    barrier();
    for (int64_t t = rows().first, sequence = 0; t < rows().last; t++) {
      while (batch.cu_seqlens[sequence + 1] <= t) sequence++;
      const auto turn = [&](float* part) {
        if (layer.cos) rope(part, layer.cos + batch.positions[t] * (rope_dim / 2), layer.sin + batch.positions[t] * (rope_dim / 2), rope_dim);
      };
      float* row = work.mixed + t * width + rank;
      norm(layer.kv_a_norm, row, row, latent, d.latent_norm_eps);
      turn(row + latent);
      write_cache(layer, sequence, t, 0, row, row);
      for (int64_t h = 0; h < d.num_heads; h++) turn(work.qkv + t * q + h * size + plain);
      scale_queries(work.qkv + t * q, size, size, batch.positions[t]);
      for (int64_t h = 0; h < d.num_heads; h++) {
        float* head = work.qkv + t * q + h * size;
        std::memcpy(work.latent_queries + (t * d.num_heads + h) * key + latent, head + plain, rope_dim * sizeof(float));
        arrange(head, plain);
      }
    }
    barrier();
    of_heads(layer.key_up, 0, latent, work.qkv, size, work.latent_queries, key);
    barrier();
    attention(layer);
    barrier();
    for (int64_t row = rows().first * d.num_heads; row < rows().last * d.num_heads; row++) arrange(work.attended + row * latent, latent);
    barrier();
    of_heads(layer.latent_up, plain, d.value_dim, work.attended, latent, work.qkv, d.value_dim);
    barrier();
    for (int64_t t = rows().first; t < rows().last; t++) arrange(work.qkv + t * values, values);
    barrier();
  }
  // This thread's share of y = W x for each head, where W is rows [skipped, skipped + count) of the head's part of l.  x, y: the
  // first head's, of the first token; those of the next head are x_step and y_step further.
  void of_heads(const Linear& l, int64_t skipped, int64_t count, const float* x, int64_t x_step, float* y, int64_t y_step) const {
    const int64_t grain = product_grain<T>().columns, grains = (count + grain - 1) / grain;
    const Range mine = partition(d.num_heads * grains, 1, thread, threads);
    for (int64_t h = mine.first / grains; h < d.num_heads && h * grains < mine.last; h++) {
      const int64_t first = std::max<int64_t>(mine.first - h * grains, 0) * grain, last = std::min((mine.last - h * grains) * grain, count);
      const Rows rows{x + h * x_step, d.num_heads * x_step, batch.tokens};
      const Output out{Output::STORE, y + h * y_step, d.num_heads * y_step};
      linear<T>(rows_of<T>(l, h * (skipped + count) + skipped, count), rows, out, first, last);
    }
  }

  // A recurrent mixer's projection of `normed` into qkv, its convolution into `mixed`, and prepare(t) for this thread's tokens.
  // `over_states` may follow.  more: the projection's last rows, if they are a matrix of its own; null: they are not.
  template <typename F> void project_and_convolve(const Layer& layer, const Linear& in, F prepare, const Linear* more = nullptr) const {
    const Convolution conv = convolution(d);
    product(in, work.normed, d.hidden_size, work.qkv, conv.width);
    if (more) product(*more, work.normed, d.hidden_size, work.qkv + outputs(in), conv.width);
    if (thread == 0) team.queue.restart();  // for `over_states`
    barrier();
    scale_projected(conv);
    convolve_rows(layer, conv, prepare);
  }
  // Multiplies the parts of a Mamba 2 mixer's projection by their factors. Ends in a barrier if there are any.
  void scale_projected(const Convolution& conv) const {
    const double* factors = d.mamba.multipliers;
    if (!d.mamba.heads || std::all_of(factors, factors + 5, [](double factor) { return factor == 1.0; })) return;
    const int64_t inner = mamba_inner(d), shared = d.mamba.groups * d.mamba.state_size, sizes[] = {inner, inner, shared, shared, d.mamba.heads};
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = work.qkv + t * conv.width;
      for (int part = 0; part < 5; row += sizes[part++]) scale_row(row, sizes[part], rounded<T>(float(factors[part])));
    }
    barrier();
  }
  // The convolution of qkv into `mixed`, and then(t), for this thread's tokens. After a barrier, its sequences' latest inputs.
  template <typename F> void convolve_rows(const Layer& layer, const Convolution& conv, F then) const {
    for (int64_t t = rows().first, sequence = 0; t < rows().last; t++) {
      while (batch.cu_seqlens[sequence + 1] <= t) sequence++;
      convolve(layer, conv, sequence, t);
      then(t);
    }
    barrier();
    keep_latest(layer, conv);
  }
  bool begins(int64_t sequence) const { return batch.positions[batch.cu_seqlens[sequence]] == 0; }
  float* latest(const Layer& layer, const Convolution& conv, int64_t sequence) const {
    return layer.latest + batch.state_slots[sequence] * (conv.taps - 1) * conv.channels;
  }
  // Token t's convolution, into `mixed`: silu of it, unless it is a short convolution.
  void convolve(const Layer& layer, const Convolution& conv, int64_t sequence, int64_t t) const {
    const int64_t channels = conv.channels, first = batch.cu_seqlens[sequence], before = conv.taps - 1;
    float* out = work.mixed + t * channels;
    if (layer.conv.bias)
      std::memcpy(out, layer.conv.bias, channels * sizeof(float));
    else
      std::memset(out, 0, channels * sizeof(float));
    for (int64_t tap = 0; tap <= before; tap++) {
      const int64_t from = t - before + tap;  // the input's row of the batch
      if (from < first && begins(sequence)) continue;
      const float* in = from < first ? latest(layer, conv, sequence) + (before + from - first) * channels : work.qkv + from * conv.width + conv.first;
      const float* weight = layer.conv.weight + tap * channels;
      for (int64_t c = 0; c < channels; c++) out[c] = fused_multiply_add(in[c], weight[c], out[c]);
    }
    const bool is_short = d.short_conv.channels;
    over_vectors(channels, out, out, out, [&](Vec x, Vec) { return is_short ? rounded<T>(x) : rounded<T>(silu(rounded<T>(x))); });
  }
  // The inputs of the next tokens' convolutions, of this thread's sequences.
  void keep_latest(const Layer& layer, const Convolution& conv) const {
    const int64_t channels = conv.channels, before = conv.taps - 1;
    const Range mine = partition(batch.sequences, 1, thread, threads);
    for (int64_t s = mine.first; s < mine.last; s++) {
      const int64_t first = batch.cu_seqlens[s], last = batch.cu_seqlens[s + 1];
      if (first == last) continue;
      float* kept = latest(layer, conv, s);
      for (int64_t i = 0; i < before; i++) {
        const int64_t from = last - before + i;
        float* to = kept + i * channels;
        if (from >= first)
          std::memcpy(to, work.qkv + from * conv.width + conv.first, channels * sizeof(float));
        else if (begins(s))
          std::memset(to, 0, channels * sizeof(float));
        else
          std::memcpy(to, kept + (i + last - first) * channels, channels * sizeof(float));
      }
    }
  }
  // Calls update(W, columns of a state, head, first column, t) for every token t, in order, of the states of this thread: some
  // columns of a head of a sequence at a time. States are [heads, height, padded(size)]. Ends in a barrier.
  template <typename F> void over_states(const Layer& layer, int64_t heads, int64_t height, int64_t size, F update) const {
    const int64_t pad = padded(size);
    with_vectors(pad, [&](auto vectors) {
      const int64_t columns = vectors * LANES, parts = pad / columns;
      for (Range run; run = team.queue.take(batch.sequences * heads * parts, threads), run.size();)
        for (int64_t i = run.first; i < run.last; i++) {
          const int64_t s = i / (heads * parts), h = i / parts % heads, column = i % parts * columns;
          if (batch.cu_seqlens[s] == batch.cu_seqlens[s + 1]) continue;
          const StateColumns at{layer.state + (batch.state_slots[s] * heads + h) * height * pad + column, height, pad, std::min(columns, size - column)};
          for (int64_t k = 0; begins(s) && k < height; k++) std::memset(at.state + k * pad, 0, columns * sizeof(float));
          for (int64_t t = batch.cu_seqlens[s]; t < batch.cu_seqlens[s + 1]; t++) update(vectors, at, h, column, t);
        }
    });
    barrier();
  }

  // A gated delta net of `normed`, before its last projection, into `attended`. Ends in a barrier.
  void gated_delta_net(const Layer& layer) const {
    const int64_t key_heads = d.delta.key_heads, heads = d.delta.value_heads, key_dim = d.delta.key_dim, size = d.delta.value_dim;
    const int64_t values = delta_values(d), keys = delta_keys(d), channels = 2 * keys + values, repeats = heads / key_heads;
    product(layer.delta_ba, work.normed, d.hidden_size, work.per_head, 2 * heads);
    const bool separate = layer.delta_conv_in.parts;
    const auto prepare = [&](int64_t t) { prepare_delta(layer, t); };
    project_and_convolve(layer, separate ? layer.delta_conv_in : layer.delta_in, prepare, separate ? &layer.delta_in : nullptr);
    over_states(layer, heads, key_dim, size, [&](auto vectors, const StateColumns& at, int64_t h, int64_t column, int64_t t) {
      const float *mixed = work.mixed + t * channels, *of_head = work.per_head + t * 2 * heads + h, *key = mixed + h / repeats * key_dim;
      float* out = work.attended + t * values + h * size + column;
      delta_rule<vectors>(at, key, key + keys, mixed + 2 * keys + h * size + column, out, of_head + heads, 0, of_head[0]);
      for (int64_t c = 0; c < at.valid; c++) out[c] = rounded<T>(out[c]);
    });
    for (int64_t t = rows().first; t < rows().last; t++) {
      for (int64_t h = 0; h < heads; h++) {
        float* read = work.attended + t * values + h * size;
        const float factor = 1.0f / std::sqrt(float(squared(read, size, 0) / size) + float(d.delta.norm_eps ? d.delta.norm_eps : d.norm_eps));
        for (int64_t i = 0; i < size; i++) read[i] = rounded<T>(rounded<T>(read[i] * factor) * layer.delta_norm.weight[i]);
        const float* gate = work.qkv + t * (channels + values) + channels + h * size;
        over_vectors(size, read, read, gate, [](Vec x, Vec z) { return rounded<T>(x * silu(z)); });
      }
      arrange(work.attended + t * values, values);
    }
    barrier();
  }
  static float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
  // Norms of token t's queries and keys, in place, and its betas and decays, in `per_head`.
  void prepare_delta(const Layer& layer, int64_t t) const {
    const int64_t heads = d.delta.value_heads;
    norm_delta_heads(work.mixed + t * convolution(d).channels, d.delta.key_heads, d.delta.key_dim);
    float* row = work.per_head + t * 2 * heads;
    for (int64_t h = 0; h < heads; h++) {
      row[h] = rounded<T>(1.0f / (1.0f + std::exp(-row[h]))) * float(d.delta.beta_scale);
      row[heads + h] = std::exp(-std::exp(layer.a_log.weight[h]) * softplus(row[heads + h] + layer.dt_bias.weight[h]));
    }
  }

  // The norms of a delta rule's queries, which are scaled too, and keys, in place.  heads: of each.
  static void norm_delta_heads(float* rows, int64_t heads, int64_t size) {
    for (int64_t h = 0; h < 2 * heads; h++) {
      float* head = rows + h * size;
      const float factor = 1.0f / std::sqrt(float(squared(head, size, 0)) + 1e-6f), scale = 1.0f / std::sqrt(float(size));
      for (int64_t i = 0; i < size; i++) head[i] = h < heads ? unfused(head[i] * factor) * scale : head[i] * factor;
    }
  }

  // A Kimi delta attention of `normed`, before its last projection, into `attended`. Ends in a barrier.
  void kimi_delta_attention(const Layer& layer) const {
    const int64_t heads = d.kimi.heads, size = d.kimi.head_dim, inner = kimi_inner(d), width = kimi_width(d);
    const int64_t forget = heads, gate = heads + size, decays = heads + 2 * size, gates = decays + inner;  // in a token's `per_head`
    product(layer.delta_ba, work.normed, d.hidden_size, work.per_head, width);
    project_and_convolve(layer, layer.delta_conv_in, [&](int64_t t) {
      norm_delta_heads(work.mixed + t * 3 * inner, heads, size);
      float* row = work.per_head + t * width;
      for (int64_t h = 0; h < heads; h++) row[h] = rounded<T>(1.0f / (1.0f + std::exp(-row[h])));
      arrange(row + forget, size);
      arrange(row + gate, size);
    });
    product(layer.delta_forget_b, work.per_head + forget, width, work.per_head + decays, width);
    product(layer.delta_z_b, work.per_head + gate, width, work.per_head + gates, width);
    barrier();
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = work.per_head + t * width + decays;
      for (int64_t i = 0; i < inner; i++) {
        const float x = row[i] + layer.dt_bias.weight[i], step = x > 20.0f ? x : std::log(1.0f + std::exp(x));  // as Hugging Face's, whose sum rounds
        row[i] = std::exp(-std::exp(layer.a_log.weight[i / size]) * step);
      }
    }
    barrier();
    over_states(layer, heads, size, size, [&](auto vectors, const StateColumns& at, int64_t h, int64_t column, int64_t t) {
      const float *query = work.mixed + t * 3 * inner + h * size, *value = query + 2 * inner + column, *of_token = work.per_head + t * width;
      float* out = work.attended + t * inner + h * size + column;
      delta_rule<vectors>(at, query, query + inner, value, out, of_token + decays + h * size, 1, of_token[h]);
      for (int64_t c = 0; c < at.valid; c++) out[c] = rounded<T>(out[c]);
    });
    for (int64_t t = rows().first; t < rows().last; t++) {
      for (int64_t h = 0; h < heads; h++) {
        float* read = work.attended + t * inner + h * size;
        const float factor = 1.0f / std::sqrt(float(squared(read, size, 0) / size) + float(d.norm_eps));
        for (int64_t i = 0; i < size; i++) read[i] = unfused(read[i] * factor) * layer.delta_norm.weight[i];
        over_vectors(size, read, read, work.per_head + t * width + gates + h * size, [](Vec x, Vec z) { return rounded<T>(x * sigmoid(z)); });
      }
      arrange(work.attended + t * inner, inner);
    }
    barrier();
  }

  // A Mamba 2 mixer of `normed`, before its last projection, into `attended`. Ends in a barrier.
  void mamba2(const Layer& layer) const {
    const int64_t heads = d.mamba.heads, size = d.mamba.head_dim, height = d.mamba.state_size, inner = mamba_inner(d);
    const auto [taps, channels, first, width] = convolution(d);
    project_and_convolve(layer, layer.mamba_in, [&](int64_t t) {  // the steps of the heads, and their decays
      const float* in = work.qkv + t * width + inner + channels;
      float* row = work.per_head + t * 2 * heads;
      for (int64_t h = 0; h < heads; h++) {
        const float step = rounded<T>(softplus(rounded<T>(in[h] + layer.dt_bias.weight[h])));
        row[h] = std::clamp(step, rounded<T>(float(d.mamba.min_step)), rounded<T>(float(d.mamba.max_step)));
        row[heads + h] = std::exp(-std::exp(layer.a_log.weight[h]) * row[h]);
      }
    });
    over_states(layer, heads, height, size, [&](auto vectors, const StateColumns& at, int64_t h, int64_t column, int64_t t) {
      const float *x = work.mixed + t * channels, *of_head = work.per_head + t * 2 * heads + h;
      const float *b = x + inner + h / (heads / d.mamba.groups) * height, *c = b + d.mamba.groups * height;
      selective_scan<vectors>(at, b, c, x + h * size + column, work.attended + t * inner + h * size + column, of_head[heads], of_head[0], layer.skip.weight[h]);
    });
    const int64_t group = inner / d.mamba.groups, ranks = d.mamba.group_ranks;
    const bool normed = layer.mamba_norm.weight, summed = normed && ranks > 1;
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = work.attended + t * inner;
      over_vectors(inner, row, row, work.qkv + t * width, [&](Vec x, Vec z) { return normed ? x * silu(z) : rounded<T>(rounded<T>(x) * rounded<T>(silu(z))); });
      if (summed) work.squares[t] = float(squared(row, inner, 0));
    }
    if (summed) {  // over the ranks, which have parts of one group
      barrier();
      Run<float>{d, batch, work, team, thread, threads}.sum_over_ranks(d.group, work.squares, batch.tokens);
    }
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = work.attended + t * inner;
      for (int64_t g = 0; normed && g < inner; g += group) {
        const float mean = summed ? work.squares[t] / float(inner * ranks) : float(squared(row + g, group, 0) / group);
        const float factor = 1.0f / std::sqrt(mean + float(d.norm_eps));
        for (int64_t i = g; i < g + group; i++) row[i] = rounded<T>(unfused(row[i] * factor) * layer.mamba_norm.weight[i]);
      }
      arrange(row, inner);
    }
    barrier();
  }

  // A gated short convolution of `normed`, before its last projection, into `attended`. Ends in the last reads of qkv.
  void short_convolution(const Layer& layer) const {
    const Convolution conv = convolution(d);
    const int64_t size = conv.channels;
    product(layer.conv_in, work.normed, d.hidden_size, work.qkv, conv.width);  // of a token: input gate, output gate, input
    barrier();
    const auto times = [](Vec x, Vec gate) { return rounded<T>(x * gate); };
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = work.qkv + t * conv.width;
      over_vectors(size, row, row, row + 2 * size, times);
    }
    barrier();
    convolve_rows(layer, conv, [&](int64_t t) {
      float* out = work.attended + t * size;
      over_vectors(size, out, work.mixed + t * size, work.qkv + t * conv.width + size, times);
      arrange(out, size);
    });
  }

  Output added_to(float* hidden, double factor = 1) const {
    return {Output::ADD, hidden, d.hidden_size, float(d.residual_multiplier * factor), false, bool(d.residual_float32)};
  }

  // hidden += factor · norm(projected), for this thread's rows.
  void add_normed(const Norm& n, float* hidden, double factor = 1) const {
    const Output out = added_to(hidden, factor);
    std::vector<float> row(d.hidden_size);
    for (int64_t t = rows().first; t < rows().last; t++) {
      norm(n, work.projected + t * d.hidden_size, row.data(), d.hidden_size);
      for (int64_t i = 0; i < d.hidden_size; i++) out.write<T>(t, i, row[i]);
    }
  }
  // hidden += attention + MLP, which are in `projected` and `normed`, for this thread's rows.
  void add_both(const Layer& layer, float* hidden) const {
    for (int64_t t = rows().first; t < rows().last; t++) {
      float *attended = work.projected + t * d.hidden_size, *mlp = work.normed + t * d.hidden_size, *row = hidden + t * d.hidden_size;
      norm(layer.attention_post_norm, attended, attended, d.hidden_size);
      norm(layer.mlp_post_norm, mlp, mlp, d.hidden_size);
      for (int64_t i = 0; i < d.hidden_size; i++)
        row[i] = d.attention_first ? rounded<T>(rounded<T>(row[i] + attended[i]) + mlp[i]) : rounded<T>(row[i] + rounded<T>(mlp[i] + attended[i]));
    }
  }
  // hidden += factor · l(x), unmerged LoRA adapters included, through the post norm if there is one. Ends in a barrier.
  void add_linear(const Linear& l, const float* x, int64_t x_stride, const Norm& post, float* hidden, double factor = 1) const {
    if (post.weight || l.num_lora_deltas || d.group) {
      product(l, x, x_stride, work.projected, d.hidden_size, d.group);
      barrier();
      sum_over_ranks(d.group, work.projected, batch.tokens * d.hidden_size);
      add_normed(post, hidden, factor);
    } else {
      multiply(l, shared_rows(x, x_stride, l.inputs), added_to(hidden, factor), share(batch.tokens, outputs(l)));
    }
    barrier();
  }

  // hidden through layer number `index`. Ends in a barrier.
  void layer(int64_t index, float* hidden) const {
    const Layer& layer = d.layers[index];
    if (layer.mixer != NO_MIXER) mix(layer, hidden);
    if (!d.parallel && (layer.down.parts || layer.experts_down.parts)) feed_forward(layer, hidden);
    if (d.per_layer_input_size) add_per_layer_input(layer, index, hidden);
    if (!layer.layer_scalar) return;
    for (int64_t i = rows().first * d.hidden_size; i < rows().last * d.hidden_size; i++) hidden[i] = rounded<T>(hidden[i] * *layer.layer_scalar);
    barrier();
  }
  // hidden += the MLP of a layer's inputs of its own. Ends in a barrier.
  void add_per_layer_input(const Layer& layer, int64_t index, float* hidden) const {
    const int64_t size = d.per_layer_input_size;
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = work.mlp_normed + t * d.hidden_size;
      std::memcpy(row, hidden + t * d.hidden_size, d.hidden_size * sizeof(float));
      arrange(row, d.hidden_size);
    }
    barrier();
    product(layer.per_layer_input_gate, work.mlp_normed, d.hidden_size, work.gate_up, size);
    barrier();
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* gate = work.gate_up + t * size;
      over_vectors(size, gate, gate, work.per_layer + (t * d.num_layers + index) * size, [&](Vec x, Vec input) { return rounded<T>(rounded<T>(activated(x)) * input); });
      arrange(gate, size);
    }
    barrier();
    product(layer.per_layer_projection, work.gate_up, size, work.projected, d.hidden_size);
    barrier();
    add_normed(layer.per_layer_post_norm, hidden);
    barrier();
  }
  // This thread's rows of the residual stream.
  void copy_rows(const float* from, float* to) const {
    std::memcpy(to + rows().first * d.hidden_size, from + rows().first * d.hidden_size, rows().size() * d.hidden_size * sizeof(float));
  }
  // The layers' inputs of their own into `per_layer`.  embedded: the tokens' embeddings, in `mlp_normed`, which are changed.
  void per_layer_inputs(float* embedded) const {
    const int64_t size = d.per_layer_input_size, width = size * d.num_layers;
    const T* table = (const T*)d.per_layer_embedding;
    const float projection_scale = float(1.0 / std::sqrt(double(d.hidden_size))), embedding_scale = rounded<T>(float(std::sqrt(double(size)))), sum_scale = float(std::sqrt(0.5));
    for (int64_t t = rows().first; t < rows().last; t++) arrange(embedded + t * d.hidden_size, d.hidden_size);
    barrier();
    product(d.per_layer_model_projection, embedded, d.hidden_size, work.per_layer, width);
    barrier();
    for (int64_t t = rows().first; t < rows().last; t++) {
      const bool is_known = batch.ids[t] >= 0 && batch.ids[t] < d.per_layer_rows;
      for (int64_t first = 0; first < width; first += size) {
        float* part = work.per_layer + t * width + first;
        for (int64_t i = 0; i < size; i++) part[i] = rounded<T>(part[i] * projection_scale);
        norm(d.per_layer_projection_norm, part, part, size);
        for (int64_t i = 0; i < size; i++) {
          const float of_token = is_known ? rounded<T>(to_float(table[batch.ids[t] * width + first + i]) * embedding_scale) : 0.0f;
          part[i] = rounded<T>(rounded<T>(part[i] + of_token) * sum_scale);
        }
      }
    }
    barrier();
  }
  // hidden += the mixer of it, and the MLP if that is parallel. Ends in a barrier.
  void mix(const Layer& layer, float* hidden) const {
    const bool own_norm = d.parallel && layer.mlp_norm.weight, is_hybrid = layer.mixer == HYBRID;
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = work.normed + t * d.hidden_size;
      norm_residual(layer.attention_norm, hidden + t * d.hidden_size, row);
      if (d.parallel) {  // the MLP's input, before attention adds to the residual
        float* other = work.mlp_normed + t * d.hidden_size;
        if (own_norm)
          norm_residual(layer.mlp_norm, hidden + t * d.hidden_size, other);
        else
          std::memcpy(other, row, d.hidden_size * sizeof(float));
        arrange(other, d.hidden_size);
      }
      if (is_hybrid) {  // the attention's input
        float* other = work.mlp_normed + t * d.hidden_size;
        std::memcpy(other, row, d.hidden_size * sizeof(float));
        scale_row(other, d.hidden_size, d.attention_in_multiplier);
        arrange(other, d.hidden_size);
      }
      if (d.mamba.in_multiplier != 1.0 && (layer.mixer == MAMBA2 || is_hybrid)) scale_row(row, d.hidden_size, d.mamba.in_multiplier);
      arrange(row, d.hidden_size);
    }
    barrier();
    if (layer.mixer == GATED_DELTA_NET) {
      gated_delta_net(layer);
      return add_linear(layer.delta_o, work.attended, delta_values(d), layer.attention_post_norm, hidden);
    }
    if (layer.mixer == KIMI_DELTA_ATTENTION) {
      kimi_delta_attention(layer);
      return add_linear(layer.delta_o, work.attended, kimi_inner(d), layer.attention_post_norm, hidden);
    }
    if (layer.mixer == MAMBA2) {
      mamba2(layer);
      return add_linear(layer.mamba_o, work.attended, mamba_inner(d), layer.attention_post_norm, hidden, d.mamba.out_multiplier);
    }
    if (layer.mixer == SHORT_CONV) {
      short_convolution(layer);
      return add_linear(layer.conv_o, work.attended, d.short_conv.channels, layer.attention_post_norm, hidden);
    }
    if (layer.mixer == LATENT_ATTENTION) {
      latent_attention(layer);
      return add_linear(layer.o, work.qkv, d.num_heads * d.value_dim, layer.attention_post_norm, hidden);
    }
    if (is_hybrid) {
      mamba2(layer);
      product(layer.mamba_o, work.attended, mamba_inner(d), work.normed, d.hidden_size, d.group);
    }
    const int64_t q = d.num_heads * value_dim(d, layer);  // of the output
    const float* input = is_hybrid ? work.mlp_normed : work.normed;
    product(layer.qkv, input, d.hidden_size, work.qkv, qkv_width(d, layer));
    if (d.gate_dim) product(layer.attention_gate, input, d.hidden_size, work.mixed, d.num_heads * d.gate_dim);
    barrier();
    sum_squares();
    rope_and_write(layer);
    barrier();
    attention(layer);
    barrier();
    if (d.bfloat16 || d.output_gate || d.gate_dim) {
      for (int64_t t = rows().first; t < rows().last; t++) {
        if (d.output_gate || d.gate_dim) apply_output_gate(layer, t);
        arrange(work.attended + t * q, q);
      }
      barrier();
    }
    if (d.parallel) {
      const int64_t intermediate = outputs(layer.gate_up) / (d.gated ? 2 : 1);
      product(layer.o, work.attended, q, work.projected, d.hidden_size, d.group);
      expand_all(layer.gate_up, intermediate, layer.xielu);
      barrier();
      product(layer.down, work.gate_up, outputs(layer.gate_up), work.normed, d.hidden_size, d.group);
      barrier();
      sum_over_ranks(d.group, work.projected, batch.tokens * d.hidden_size);
      sum_over_ranks(d.group, work.normed, batch.tokens * d.hidden_size);
      add_both(layer, hidden);
      barrier();
      return;
    }
    if (is_hybrid) {
      product(layer.o, work.attended, q, work.projected, d.hidden_size, d.group);
      barrier();
      sum_over_ranks(d.group, work.normed, batch.tokens * d.hidden_size);
      sum_over_ranks(d.group, work.projected, batch.tokens * d.hidden_size);
      for (int64_t t = rows().first; t < rows().last; t++) {
        float *attended = work.projected + t * d.hidden_size, *mixed = work.normed + t * d.hidden_size, *row = hidden + t * d.hidden_size;
        scale_row(attended, d.hidden_size, d.attention_out_multiplier);
        scale_row(mixed, d.hidden_size, d.mamba.out_multiplier);
        for (int64_t i = 0; i < d.hidden_size; i++) row[i] = rounded<T>(row[i] + rounded<T>(mixed[i] + attended[i]));
      }
      barrier();
      return;
    }
    add_linear(layer.o, work.attended, q, layer.attention_post_norm, hidden);
  }

  // hidden += the MLP of it plus the mixture of experts, behind norms of their own. Ends in a barrier.
  void mlp_and_experts(const Layer& layer, float* hidden) const {
    const int64_t size = d.hidden_size, width = outputs(layer.shared_gate_up);
    const float scale = float(1.0 / std::sqrt(double(size)));
    for (int64_t t = rows().first; t < rows().last; t++) {
      norm_residual(layer.mlp_norm, hidden + t * size, work.mlp_normed + t * size);
      arrange(work.mlp_normed + t * size, size);
    }
    barrier();
    expand_all(layer.shared_gate_up, width / (d.gated ? 2 : 1));
    barrier();
    product(layer.shared_down, work.gate_up, width, work.normed, size, d.group);
    barrier();
    sum_over_ranks(d.group, work.normed, batch.tokens * size);
    for (int64_t t = rows().first; t < rows().last; t++) {
      float *experts_in = work.mlp_normed + t * size, *router_in = work.router_in + t * size;
      norm_residual(layer.experts_norm, hidden + t * size, experts_in);
      norm_residual(layer.router_norm, hidden + t * size, router_in);
      for (int64_t i = 0; i < size; i++) router_in[i] = rounded<T>(rounded<T>(router_in[i] * layer.router_scale[i]) * scale);
      arrange(experts_in, size);
      if (!router_widens()) arrange(router_in, size);
    }
    barrier();
    mixture(layer);
    for (int64_t t = rows().first; t < rows().last; t++) {
      float *experts = work.projected + t * size, *mlp = work.normed + t * size;
      norm(layer.experts_post_norm, experts, experts, size);
      norm(layer.shared_post_norm, mlp, mlp, size);
      for (int64_t i = 0; i < size; i++) experts[i] = rounded<T>(mlp[i] + experts[i]);
    }
    add_normed(layer.mlp_post_norm, hidden);
    barrier();
  }
  // hidden += the MLP of it, or the mixture of experts. Ends in a barrier.
  void feed_forward(const Layer& layer, float* hidden) const {
    if (layer.experts_norm.weight) return mlp_and_experts(layer, hidden);
    for (int64_t t = rows().first; t < rows().last; t++) {
      norm_residual(layer.mlp_norm, hidden + t * d.hidden_size, work.mlp_normed + t * d.hidden_size);
      if (layer.router.parts && (router_widens() || (d.bfloat16 && d.router.scales_inputs)))
        std::memcpy(work.router_in + t * d.hidden_size, work.mlp_normed + t * d.hidden_size, d.hidden_size * sizeof(float));
      arrange(work.mlp_normed + t * d.hidden_size, d.hidden_size);
    }
    barrier();
    if (layer.router.parts) {
      mixture(layer);
      add_shared(layer);
      add_normed(layer.mlp_post_norm, hidden);
      barrier();
      return;
    }
    expand_all(layer.gate_up, outputs(layer.gate_up) / (d.gated ? 2 : 1), layer.xielu);
    barrier();
    add_linear(layer.down, work.gate_up, outputs(layer.gate_up), layer.mlp_post_norm, hidden, d.mlp_multiplier);
  }

  // Rows of an expert of this rank in the buffers of experts.
  struct ExpertRows {
    int64_t local;
    Range rows;
  };
  // Calls body(expert, its columns) for this thread's share of all experts' columns, `width` each. A column of an expert costs
  // as much as its rows, and reading it as much as READING_ROWS.
  static constexpr int64_t READING_ROWS = 8;
  template <typename Body> void over_columns(const std::vector<ExpertRows>& some, int64_t width, int64_t grain, Body body) const {
    const int64_t grains = (width + grain - 1) / grain;
    int64_t total = 0, before = 0;
    for (const ExpertRows& expert : some) total += (expert.rows.size() + READING_ROWS) * grains;
    const int64_t first = total * thread / threads, last = total * (thread + 1) / threads;
    for (const ExpertRows& expert : some) {
      const int64_t cost = expert.rows.size() + READING_ROWS;
      const auto column = [&](int64_t at) { return std::min(std::clamp<int64_t>((at - before + cost - 1) / cost, 0, grains) * grain, width); };
      const Range columns{column(first), column(last)};
      if (columns.size()) body(expert, columns);
      before += cost * grains;
    }
  }

  // Whether the router's product is in float32, and the model's others are not.
  bool router_widens() const { return d.router.float32 && d.bfloat16; }

  // Adds the shared experts' output to `projected`, for this thread's rows.
  void add_shared(const Layer& layer) const {
    if (!layer.shared_down.parts) return;
    const int64_t width = outputs(layer.shared_gate_up);
    if (layer.shared_router.parts) product(layer.shared_router, work.mlp_normed, d.hidden_size, work.shared_gate, 1);
    expand_all(layer.shared_gate_up, width / (d.gated ? 2 : 1));
    barrier();
    product(layer.shared_down, work.gate_up, width, work.normed, d.hidden_size, d.group);
    barrier();
    sum_over_ranks(d.group, work.normed, batch.tokens * d.hidden_size);
    for (int64_t t = rows().first; t < rows().last; t++) {
      const float gate = layer.shared_router.parts ? rounded<T>(sigmoid(splat(work.shared_gate[t]))[0]) : 1.0f;
      float *row = work.projected + t * d.hidden_size, *shared = work.normed + t * d.hidden_size;
      for (int64_t i = 0; i < d.hidden_size; i++) row[i] = rounded<T>(row[i] + unfused(rounded<T>(gate * shared[i])));
    }
  }

  // A mixture of experts into `projected`: as many experts at a time as the buffers hold rows for.
  void mixture(const Layer& layer) const {
    const int64_t experts = d.num_experts, intermediate = layer.experts_down.inputs, width = intermediate * (d.gated ? 2 : 1);
    const int64_t size = expert_size(d);
    const bool is_partial = d.expert_group;
    const float* inputs = d.latent_size ? work.latent : work.mlp_normed;
    float* sums = d.latent_size ? work.latent_out : work.projected;
    if (router_widens())
      Run<float>{d, batch, work, team, thread, threads}.product(layer.router, work.router_in, d.hidden_size, work.router_weights, experts);
    else
      product(layer.router, layer.router_scale ? work.router_in : work.mlp_normed, d.hidden_size, work.router_weights, experts);
    if (d.latent_size) product(layer.latent_in, work.mlp_normed, d.hidden_size, work.latent, size);
    barrier();
    for (int64_t t = rows().first, sequence = 0; t < rows().last; t++) {
      while (batch.cu_seqlens[sequence + 1] <= t) sequence++;
      const auto chosen_at = [&](int16_t* indices, int64_t row) { return indices + (row * d.num_moe_layers + layer.moe_layer) * d.experts_per_token; };
      int16_t* const cached = d.router_indices ? chosen_at(d.router_indices, slot(sequence, t)) : nullptr;
      int16_t* const kept = batch.router_indices ? chosen_at(batch.router_indices, batch.activation_rows[t]) : nullptr;
      route(work.router_weights + t * experts, experts, layer.correction, layer.expert_scale, {cached, kept});
      std::memset(sums + t * size, 0, size * sizeof(float));
      if (d.latent_size) arrange(work.latent + t * size, size);
    }
    barrier();
    std::vector<ExpertRows> some;
    std::vector<int64_t> tokens;  // of all experts in `some`
    for (int64_t local = 0; local < d.local_experts;) {
      some.clear(), tokens.clear();
      for (; local < d.local_experts; local++) {
        const int64_t first = tokens.size(), e = d.first_expert + local;
        for (int64_t t = 0; t < batch.tokens; t++)
          if (work.router_weights[t * experts + e] != 0) tokens.push_back(t);
        if (int64_t(tokens.size()) > expert_rows(d, batch.tokens)) {  // this expert is the first of the next ones
          tokens.resize(first);
          break;
        }
        if (int64_t(tokens.size()) > first) some.push_back({local, {first, int64_t(tokens.size())}});
      }
      const Range mine = partition(tokens.size(), 1, thread, threads);
      for (int64_t i = mine.first; i < mine.last; i++)
        std::memcpy(work.expert_in + i * size, inputs + tokens[i] * size, size * sizeof(float));
      if (d.router.scales_inputs) scale_expert_inputs(some, tokens);
      barrier();
      over_columns(some, intermediate, 2 * LANES, [&](const ExpertRows& expert, Range columns) {
        const Rows rows{work.expert_in + expert.rows.first * size, size, expert.rows.size()};
        const Linear gate_up = rows_of<T>(layer.experts_gate_up, expert.local * width, width);
        const float* bias = layer.experts_gate_up.bias[0];
        expand(gate_up, rows, work.gate_up + expert.rows.first * width, intermediate, {{0, rows.count}, columns},
               bias ? bias + expert.local * width : nullptr);
      });
      barrier();
      over_columns(some, size, product_grain<T>().columns, [&](const ExpertRows& expert, Range columns) {
        const Rows rows{work.gate_up + expert.rows.first * width, width, expert.rows.size()};
        const Output out{Output::STORE, work.expert_out + expert.rows.first * size, size, 1.0f, is_partial};
        multiply(rows_of<T>(layer.experts_down, expert.local * size, size), rows, out, {{0, rows.count}, columns});
      });
      barrier();
      const Range columns = partition(size, LANES, thread, threads);
      for (const ExpertRows& expert : some)
        for (int64_t i = expert.rows.first; i < expert.rows.last; i++) {
          const float weight = d.router.scales_inputs ? 1.0f : work.router_weights[tokens[i] * experts + d.first_expert + expert.local];
          const float* bias = layer.experts_down.bias[0] ? layer.experts_down.bias[0] + expert.local * size : nullptr;
          for (int64_t k = columns.first; k < columns.last; k++) {
            float out = work.expert_out[i * size + k];
            if (bias) out = is_partial ? out + bias[k] : rounded<T>(out + bias[k]);
            const float scaled = unfused(out * weight);
            sums[tokens[i] * size + k] += d.router.float32_weights || is_partial ? scaled : rounded<T>(scaled);
          }
        }
      barrier();
    }
    sum_over_ranks(d.expert_group, sums, batch.tokens * size);
    for (int64_t t = rows().first; t < rows().last; t++)
      for (int64_t k = 0; k < size; k++) sums[t * size + k] = rounded<T>(sums[t * size + k]);
    if (!d.latent_size) return;
    for (int64_t t = rows().first; t < rows().last; t++) arrange(sums + t * size, size);
    barrier();
    product(layer.latent_out, sums, size, work.projected, d.hidden_size);
    barrier();
  }
  // Multiplies the inputs of `some` experts by their weights, for this thread's rows.
  void scale_expert_inputs(const std::vector<ExpertRows>& some, const std::vector<int64_t>& tokens) const {
    const Range mine = partition(tokens.size(), 1, thread, threads);
    for (const ExpertRows& expert : some)
      for (int64_t i = std::max(mine.first, expert.rows.first); i < std::min(mine.last, expert.rows.last); i++) {
        float* row = work.expert_in + i * d.hidden_size;
        if (d.bfloat16) std::memcpy(row, work.router_in + tokens[i] * d.hidden_size, d.hidden_size * sizeof(float));  // not arranged
        scale_row(row, d.hidden_size, work.router_weights[tokens[i] * d.num_experts + d.first_expert + expert.local]);
        arrange(row, d.hidden_size);
      }
  }
  // Router logits to expert weights, in place: 0 for experts that are not chosen. hybrid/kernels/router.py has the meaning.
  // correction: added to the scores for the choice, or null.  expert_scale: factors of their weights, or null.  chosen: where the chosen experts are written, the one with
  // the largest score first; null: nowhere.
  void route(float* weights, int64_t experts, const float* correction, const float* expert_scale, std::initializer_list<int16_t*> chosen) const {
    const Router& router = d.router;
    const auto step = [&](float x) { return router.stepwise ? rounded<T>(x) : x; };
    std::vector<int64_t> order(experts);
    for (int64_t e = 0; e < experts; e++) order[e] = e;
    if (router.scores == SPARSEMIXER) {
      sparsemixer(weights, experts, order);
    } else {
      std::vector<float> choice(weights, weights + experts);
      float total = 1;  // of weights, which are divided by it
      if (router.scores == SIGMOID || router.scores == SIGMOID_CHOSEN) {
        for (int64_t e = 0; e < experts; e++) weights[e] = step(sigmoid(splat(weights[e]))[0]);
        if (router.scores == SIGMOID) choice = {weights, weights + experts};
      } else {
        const float max_logit = *std::max_element(weights, weights + experts);
        total = 0;
        for (int64_t e = 0; e < experts; e++) total += choice[e] = weights[e] = std::exp(weights[e] - max_logit);
      }
      if (correction)
        for (int64_t e = 0; e < experts; e++) {
          choice[e] = weights[e] / total + correction[e];
          if (!router.float32_choice) choice[e] = step(choice[e]);
        }
      if (router.groups > 1) keep_top_groups(choice);
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return choice[a] > choice[b]; });
      if (router.scores == SOFTMAX_CHOSEN) {
        total = 0;
        for (int64_t i = 0; i < d.experts_per_token; i++) total += weights[order[i]];
      }
      for (int64_t i = 0; i < experts; i++) weights[order[i]] = i < d.experts_per_token ? weights[order[i]] / total : 0.0f;
    }
    for (int16_t* to : chosen)
      for (int64_t i = 0; to && i < d.experts_per_token; i++) to[i] = int16_t(order[i]);
    float kept = 0;
    for (int64_t i = 0; i < d.experts_per_token; i++) kept += weights[order[i]];
    kept = std::max(step(step(kept) + float(router.epsilon)), float(router.min_total));
    for (int64_t e = 0; e < experts; e++) {
      const float weight = step(router.normalize ? weights[e] / kept : weights[e]) * float(router.scale) * (expert_scale ? expert_scale[e] : 1.0f);
      weights[e] = router.float32_weights ? weight : rounded<T>(weight);
    }
  }
  // -inf for the experts outside the groups with the largest sums of their best scores.
  void keep_top_groups(std::vector<float>& choice) const {
    const int64_t groups = d.router.groups, size = choice.size() / groups;
    std::vector<int64_t> order(groups);
    std::vector<float> sums(groups);
    for (int64_t g = 0; g < groups; g++) {
      std::vector<float> best(d.router.group_best);
      std::partial_sort_copy(choice.begin() + g * size, choice.begin() + (g + 1) * size, best.begin(), best.end(), std::greater<float>());
      order[g] = g, sums[g] = std::accumulate(best.begin(), best.end(), 0.0f);
    }
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return sums[a] > sums[b]; });
    for (int64_t i = d.router.top_groups; i < groups; i++)
      std::fill_n(choice.begin() + order[i] * size, size, -INFINITY);
  }
  // Router logits to weights, in place; the two experts first in `order`.
  void sparsemixer(float* weights, int64_t experts, std::vector<int64_t>& order) const {
    const std::vector<float> logits(weights, weights + experts);
    std::vector<float> left = logits;
    std::fill_n(weights, experts, 0.0f);
    for (int64_t i = 0; i < 2; i++) {
      const int64_t best = std::max_element(left.begin(), left.end()) - left.begin();
      float total = 0;
      for (int64_t e = 0; e < experts; e++) {
        const float size = std::max(std::abs(logits[e]), left[best]);
        const bool is_far = rounded<T>(rounded<T>(left[best] - logits[e]) / size) > float(2 * d.router.jitter);
        if (!is_far) total += std::exp(left[e] - left[best]);
      }
      weights[best] = rounded<T>(1.0f / total), order[i] = best;
      left[best] = -INFINITY;
    }
  }

  void embed(float* hidden) const {
    const T *table = (const T*)d.embedding, *positions = (const T*)d.positions;
    float* rows_in = d.project_in.parts ? work.projected : hidden;
    const int64_t size = d.embedding_size;
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = rows_in + t * size;
      const int64_t id = batch.ids[t] - d.first_row;
      const T* source = id >= 0 && id < d.local_rows ? table + id * size : nullptr;  // null: another rank has the row
      for (int64_t i = 0; i < size; i++) {
        row[i] = source ? to_float(source[i]) : 0.0f;
        if (d.embedding_multiplier != 1.0) row[i] = rounded<T>(row[i] * float(d.embedding_multiplier));
      }
    }
    barrier();
    sum_over_ranks(d.group, rows_in, batch.tokens * size);
    if (d.project_in.parts) {
      for (int64_t t = rows().first; t < rows().last; t++) arrange(rows_in + t * size, size);
      barrier();
      product(d.project_in, work.projected, size, hidden, d.hidden_size);
      barrier();
    }
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = hidden + t * d.hidden_size;
      if (positions) {
        const T* source = positions + (batch.positions[t] + d.position_offset) * d.hidden_size;
        for (int64_t i = 0; i < d.hidden_size; i++) row[i] = rounded<T>(row[i] + to_float(source[i]));
      }
      norm(d.embedding_norm, row, row, d.hidden_size);
    }
    barrier();
  }

  // Keeps hidden, the last layer's output, for this thread's tokens.
  void keep(const float* hidden) const {
    for (int64_t t = rows().first, sequence = 0; t < rows().last; t++) {
      while (batch.cu_seqlens[sequence + 1] <= t) sequence++;
      T* row = (T*)d.hidden_states + slot(sequence, t) * d.hidden_size;
      for (int64_t i = 0; i < d.hidden_size; i++) store(row + i, hidden[t * d.hidden_size + i]);
    }
  }

  // Keeps hidden, the input of a layer or, with index num_layers, of the final norm, for this thread's tokens.
  void keep_input(int64_t layer, const float* hidden) const {
    for (int64_t t = rows().first; t < rows().last; t++) {
      T* row = (T*)batch.layer_inputs + (layer * batch.layer_input_rows + batch.activation_rows[t]) * d.hidden_size;
      for (int64_t i = 0; i < d.hidden_size; i++) store(row + i, hidden[t * d.hidden_size + i]);
    }
  }

  // Logits of every row of hidden, into out [tokens, vocabulary].
  void logits(const float* hidden, float* out) const {
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = work.normed + t * d.hidden_size;
      norm(d.final_norm, hidden + t * d.hidden_size, row, d.hidden_size);
      arrange(row, d.hidden_size);
    }
    barrier();
    const float* x = work.normed;
    int64_t in = d.hidden_size;
    if (d.project_out.parts) {
      in = d.embedding_size;
      product(d.project_out, x, d.hidden_size, work.projected, in);
      barrier();
      for (int64_t t = rows().first; t < rows().last; t++) arrange(work.projected + t * in, in);
      barrier();
      x = work.projected;
    }
    product(d.head, x, in, out, d.vocab_size);
    barrier();
    if (d.logits_divisor == 1.0 && d.logits_softcap == 0.0) return;
    for (int64_t i = rows().first * d.vocab_size; i < rows().last * d.vocab_size; i++) {
      float value = rounded<T>(out[i] / float(d.logits_divisor));
      if (d.logits_softcap) {
        const float cap = float(d.logits_softcap);
        value = rounded<T>(rounded<T>(std::tanh(rounded<T>(value / cap))) * cap);
      }
      out[i] = value;
    }
  }
};

template <typename Body> static void in_dtype(const Decoder& d, const Batch& batch, float* base, int64_t threads, Body body) {
  Work work;
  divide(d, batch.tokens, threads, base, &work);
  Team team(d, batch, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  if (d.bfloat16)
    body(Run<bf16>{d, batch, work, team, omp_get_thread_num(), omp_get_num_threads()});
  else
    body(Run<float>{d, batch, work, team, omp_get_thread_num(), omp_get_num_threads()});
}

extern "C" {
// sizeof of each record, in the order of records.h.
extern const int64_t record_sizes[] = {sizeof(LoraDelta), sizeof(Linear), sizeof(Norm), sizeof(Router), sizeof(GatedDeltaNet), sizeof(Mamba2), sizeof(ShortConv), sizeof(KimiDeltaAttention), sizeof(Layer), sizeof(Group), sizeof(Decoder), sizeof(Batch), sizeof(Draw), sizeof(Samples), sizeof(Text), sizeof(Drafting)};

int64_t lanes() { return LANES; }
// Whether products of bfloat16 models are in AMX tiles.
int64_t multiplies_in_tiles() { return tiles_ready(); }

// A thread's part of a product of `rows` rows of x with `columns` rows of W, as its first and last row, and column. For tests.
void product_share(int64_t bfloat16, int64_t rows, int64_t columns, int64_t thread, int64_t threads, int64_t* share) {
  const Share mine = share_of(rows, columns, bfloat16 ? product_grain<bf16>() : product_grain<float>(), thread, threads);
  const int64_t bounds[] = {mine.rows.first, mine.rows.last, mine.columns.first, mine.columns.last};
  std::copy_n(bounds, 4, share);
}

// Floats of work space that a call with `tokens` tokens needs.
int64_t work_floats(const Decoder* d, int64_t tokens, int64_t threads) { return divide(*d, tokens, threads, nullptr, nullptr); }

// hidden float32 [tokens, hidden] through layers [first, last), in place; first = -1 computes it from the ids before.
// Returns 0; or 1, with nothing changed, if an id is outside the embedding.
int64_t forward(const Decoder* d, const Batch* batch, int64_t first, int64_t last, float* hidden, float* work, int64_t threads) {
  for (int64_t t = 0; first < 0 && t < batch->tokens; t++)
    if (batch->ids[t] < 0 || batch->ids[t] >= d->embedding_rows) return 1;
  in_dtype(*d, *batch, work, threads, [&](const auto& run) {
    if (first < 0) run.embed(hidden);
    if (d->per_layer_input_size) {
      if (first < 0)
        run.copy_rows(hidden, run.work.mlp_normed);
      else
        run.embed(run.work.mlp_normed);
      run.per_layer_inputs(run.work.mlp_normed);
    }
    for (int64_t i = std::max<int64_t>(first, 0); i < last; i++) {
      if (batch->layer_inputs) run.keep_input(i, hidden);  // a layer changes `hidden` after its first barrier
      run.layer(i, hidden);
    }
    if (batch->layer_inputs && last == d->num_layers) run.keep_input(last, hidden);
    if (d->hidden_states && last == d->num_layers) {
      run.barrier();
      run.keep(hidden);
    }
  });
  return 0;
}

// Writes a batch's keys and values, as another forward has computed them, to the cache of a layer; see `write_rows`.
void write_kv(const Decoder* d, const Batch* batch, int64_t layer, const float* keys, const float* values, float* work) {
  in_dtype(*d, *batch, work, 1, [&](const auto& run) { run.write_rows(d->layers[layer], keys, values); });
}

// Logits of hidden, float32 [count, hidden], into out, float32 [count, vocabulary].
void logits(const Decoder* d, const float* hidden, int64_t count, float* out, float* work, int64_t threads) {
  Batch batch{};
  batch.tokens = count;
  in_dtype(*d, batch, work, threads, [&](const auto& run) { run.logits(hidden, out); });
}

// Returns when all ranks have called it.
void barrier(Group* group) { end_round(*group); }

// All ranks' `own`, `bytes` each, into `all`, in rank order.
void gather(Group* group, const void* own, int64_t bytes, void* all) { gather_over_ranks(*group, (const char*)own, bytes, (char*)all); }

// data [count] becomes its sum over the ranks, through their shared memory.
void sum(Group* group, float* data, int64_t count) { sum_in_memory(*group, data, count, 0, 1, [] {}); }

// Draws from logits float32 [rows, vocabulary]. A row without a softmax gets token 0 and logprobs of NaN.
void sample(const float* logits, int64_t vocabulary, const Samples* samples, int64_t threads) {
  const auto& [draws, draw_of_row, rows, keys, positions, tokens, sampling_logps, old_logps, raw_logps, sampling_mask] = *samples;
  over_rows(rows, threads, [&](int64_t r) {
    const Draw& draw = draw_of(*samples, r);
    const float inverse_temperature = inverse_temperature_of(draw);
    const Row row(logits + r * vocabulary, vocabulary, inverse_temperature);
    double mass = row.mass;
    sampling_mask[r] = -1;
    if (!row.is_valid()) {
      tokens[r] = 0;
      sampling_logps[r] = old_logps[r] = raw_logps[r] = NAN;
      return;
    }
    if (draw.temperature == 0) {
      tokens[r] = row.argmax();
    } else {
      const double u = uniform(keys[r], positions[r]);
      tokens[r] = truncates(draw) ? truncated_draw(row, draw, u, mass, sampling_mask[r]) : row.inverse_cdf(u, inverse_temperature);
    }
    const double gap = double(row.logits[tokens[r]]) - row.max_logit;
    sampling_logps[r] = float(gap * inverse_temperature - std::log(mass));
    old_logps[r] = float(gap * inverse_temperature - std::log(row.mass));
    raw_logps[r] = float(gap - std::log(row.raw));
  });
}

// For each row of logits float32 [rows, vocabulary]: the logprob of its target, int64 [rows], and the entropy in nats,
// float32 [rows] each, both of softmax(logits / temperature).  sampling_mask: null; or int64 [rows], edges of
// `masked_candidates`, whose softmax it is then, with the sums of `truncated_draw`; -1: all tokens.
void score(const float* logits, int64_t rows, int64_t vocabulary, const int64_t* targets, const int64_t* sampling_mask, double temperature,
           float* logps, float* entropies, int64_t threads) {
  const float inverse_temperature = float(1.0 / temperature);
  over_rows(rows, threads, [&](int64_t r) {
    const Row row(logits + r * vocabulary, vocabulary, inverse_temperature);
    if (sampling_mask && sampling_mask[r] >= 0 && row.is_valid()) {
      std::vector<Candidate> kept;
      masked_candidates(row, sampling_mask[r], targets[r], kept);
      const Weights weights{row.max_logit, inverse_temperature};
      const double mass = weights.total(kept);
      double entropy_sum = 0;
      for (const Candidate& candidate : kept)
        if (const double p = weights.of(candidate.first); p > 0) entropy_sum -= p * (double(candidate.first) - row.max_logit) * inverse_temperature;
      logps[r] = float((double(row.logits[targets[r]]) - row.max_logit) * inverse_temperature - std::log(mass));
      entropies[r] = float(std::log(mass) + entropy_sum / mass);
      return;
    }
    logps[r] = float((double(row.logits[targets[r]]) - row.max_logit) * inverse_temperature - std::log(row.mass));
    entropies[r] = float(std::log(row.mass) + row.entropy_sum(inverse_temperature) / row.mass);
  });
}

// `sample_sharded` for the rows at[], which have the same settings.
static void sample_sharded_alike(Group* group, const float* logits, int64_t stride, int64_t width, int64_t first, int64_t vocabulary,
                                 const Samples* samples, const Draw& draw, const std::vector<int64_t>& at, int64_t threads) {
  const auto& [draws, draw_of_row, all_rows, keys, positions, tokens, sampling_logps, old_logps, raw_logps, sampling_mask] = *samples;
  const int64_t rows = at.size();
  const float inverse_temperature = inverse_temperature_of(draw);
  std::vector<SliceSums> sums(rows);
  std::vector<Row> own(rows);
  over_rows(rows, threads, [&](int64_t r) {
    own[r] = Row(logits + at[r] * stride, width, inverse_temperature);
    sums[r] = {own[r].max_logit, own[r].mass, own[r].raw, 0, 0, first + (own[r].is_valid() ? own[r].argmax() : 0), 0};
  });
  const std::vector<SliceSums> all = gathered(*group, sums);
  std::vector<WholeRow> whole(rows);
  std::vector<double> u(rows), mass(rows);
  std::vector<int64_t> masks(rows, -1);
  for (int64_t r = 0; r < rows; r++) {
    whole[r] = whole_row(*group, all, rows, r, inverse_temperature);
    mass[r] = whole[r].mass;
    if (draw.temperature > 0) u[r] = uniform(keys[at[r]], positions[at[r]]);
  }
  std::vector<Found> found(rows);
  if (draw.temperature == 0) {
    for (int64_t r = 0; r < rows; r++) found[r] = {whole[r].argmax, whole[r].max_logit};
  } else if (truncates(draw)) {
    found = truncated_draws(*group, own, whole, draw, u, first, vocabulary, mass, masks, threads);
  } else {
    const std::vector<Found> everyone = gathered(*group, inverse_cdf(*group, own, whole, all, u, first, inverse_temperature, threads));
    for (int64_t r = 0; r < rows; r++) {
      found[r] = {whole[r].argmax, whole[r].max_logit};  // if all logits are NaN or -inf
      for (int64_t rank = 0; rank < group->size; rank++)
        if (everyone[rank * rows + r].token >= 0) found[r] = everyone[rank * rows + r];
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    const double gap = found[r].logit - whole[r].max_logit;
    tokens[at[r]] = found[r].token;
    sampling_logps[at[r]] = float(gap * inverse_temperature - std::log(mass[r]));
    old_logps[at[r]] = float(gap * inverse_temperature - std::log(whole[r].mass));
    raw_logps[at[r]] = float(gap - std::log(whole[r].raw));
    sampling_mask[at[r]] = float(masks[r]);
  }
}

// `sample` where each rank has logits [rows, stride] of a slice of the vocabulary: of `width` tokens, which begin at token
// `first` of `vocabulary`. Every rank gets the same tokens and logprobs; NaN in one slice is a row's NaN on all.
// Rows of equal settings are sampled together, in the same order on all ranks.
void sample_sharded(Group* group, const float* logits, int64_t stride, int64_t width, int64_t first, int64_t vocabulary, const Samples* samples,
                    int64_t threads) {
  std::vector<std::vector<int64_t>> rows_of;
  for (int64_t r = 0; r < samples->rows; r++) {
    const size_t draw = samples->draw_of_row ? samples->draw_of_row[r] : 0;
    if (draw >= rows_of.size()) rows_of.resize(draw + 1);
    rows_of[draw].push_back(r);
  }
  for (size_t draw = 0; draw < rows_of.size(); draw++)
    if (!rows_of[draw].empty())
      sample_sharded_alike(group, logits, stride, width, first, vocabulary, samples, samples->draws[draw], rows_of[draw], threads);
}

// `score` where each rank has a slice of the vocabulary, as in `sample_sharded`.
void score_sharded(Group* group, const float* logits, int64_t rows, int64_t stride, int64_t vocabulary, int64_t first, const int64_t* targets,
                   double temperature, float* logps, float* entropies, int64_t threads) {
  const float inverse_temperature = float(1.0 / temperature);
  std::vector<SliceSums> sums(rows);
  over_rows(rows, threads, [&](int64_t r) {
    const Row row(logits + r * stride, vocabulary, inverse_temperature);
    const int64_t target = targets[r] - first;
    const bool here = target >= 0 && target < vocabulary;
    sums[r] = {row.max_logit, row.mass, row.raw, row.entropy_sum(inverse_temperature), here ? row.logits[target] : 0.0, 0, here};
  });
  const std::vector<SliceSums> all = gathered(*group, sums);
  for (int64_t r = 0; r < rows; r++) {
    const WholeRow whole = whole_row(*group, all, rows, r, inverse_temperature);
    logps[r] = float((whole.target_logit - whole.max_logit) * inverse_temperature - std::log(whole.mass));
    entropies[r] = float(std::log(whole.mass) + whole.entropy_sum / whole.mass);
  }
}

// A forward over a batch, and a draw after each of its tokens. Returns 0; 1 if a rank of a group has failed, with undefined
// tokens; or -1, with nothing changed, if an id is outside the embedding.
static int64_t forward_and_draw(const Decoder* d, const Batch* batch, int64_t layers, const Samples* drawn, float* hidden, float* logits_of_step,
                                float* work, int64_t threads) {
  if (forward(d, batch, -1, layers, hidden, work, threads)) return -1;
  logits(d, hidden, batch->tokens, logits_of_step, work, threads);
  if (d->group)
    sample_sharded(d->group, logits_of_step, d->vocab_size, d->local_tokens, d->first_token, d->whole_vocabulary, drawn, threads);
  else
    sample(logits_of_step, d->vocab_size, drawn, threads);
  return (d->group && d->group->status) || (d->expert_group && d->expert_group->status);
}

// Decodes `steps` tokens for every sequence of a batch of one token each, but stops after a step that draws one of
// `stop_ids`, or a logprob of NaN. The tokens and logprobs of `samples` are [steps, rows]; its positions and the batch's are those of the first
// step. logits_of_step: memory for them.
// Returns the number of steps done; -1 if an id is outside the embedding.
int64_t decode_steps(const Decoder* d, const Batch* batch, int64_t layers, const Samples* samples, const int64_t* stop_ids, int64_t num_stop_ids,
                     int64_t steps, float* hidden, float* logits_of_step, float* work, int64_t threads) {
  const int64_t rows = batch->tokens;
  std::vector<int64_t> ids(batch->ids, batch->ids + rows), positions(samples->positions, samples->positions + rows);
  std::vector<int32_t> at(batch->positions, batch->positions + rows);
  Batch step = *batch;
  Samples drawn = *samples;
  step.ids = ids.data(), step.positions = at.data(), drawn.positions = positions.data();
  for (int64_t done = 0; done < steps; done++) {
    const int64_t failed = forward_and_draw(d, &step, layers, &drawn, hidden, logits_of_step, work, threads);
    if (failed < 0) return -1;
    bool ended = failed;
    for (int64_t r = 0; r < rows; r++) {
      ids[r] = drawn.tokens[r], at[r]++, positions[r]++;
      ended |= std::find(stop_ids, stop_ids + num_stop_ids, ids[r]) != stop_ids + num_stop_ids || std::isnan(drawn.sampling_logps[r]);
    }
    if (ended) return done + 1;
    drawn.tokens += rows, drawn.sampling_logps += rows, drawn.old_logps += rows, drawn.raw_logps += rows;
    drawn.sampling_mask += rows;
  }
  return steps;
}

// A draft of each row, into drafts [rows, width], and its length, into counts [rows]; width: the most of `drafting->most`.
void draft_tokens(const Drafting* drafting, int64_t width, int32_t* drafts, int64_t* counts) {
  for (int64_t r = 0; r < drafting->rows; r++) counts[r] = find_draft(*drafting, r, drafts + r * width);
}
}
