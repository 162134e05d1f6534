// A whole decoder on the CPU: all layers of a forward in one call, with barriers between the threads' steps.
//
// Activations are float32, rounded to the model's dtype wherever Hugging Face's modules round; weights are read in place.
// hybrid/models/spec.py explains the fields of Layer and Decoder, hybrid/decoders/batch.py those of Batch.
#include <omp.h>

#include <chrono>

#include "attention.h"
#include "drafts.h"
#include "group.h"
#include "linear.h"
#include "sharded_sampling.h"

// The float work space: [tokens, ·] buffers, one after the other.
struct Work {
  float *normed, *mlp_normed, *projected, *qkv, *attended, *gate_up, *expert_in, *expert_out, *router_weights, *lora_ax, *squares, *scratch;
};

constexpr int64_t EXPERT_ROWS = 1024;

static int64_t head_pad(const Decoder& d) { return (d.head_dim + LANES - 1) / LANES * LANES; }

// Rows of the buffers of experts: of all (token, expert) pairs of a decode step; of a larger batch, of some experts at a time.
static int64_t expert_rows(const Decoder& d, int64_t tokens) {
  return d.num_experts ? std::max(tokens, std::min(tokens * d.experts_per_token, EXPERT_ROWS)) : 0;
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
  w.qkv = take(tokens * (d.num_heads + 2 * d.num_kv_heads) * d.head_dim);
  w.attended = take(tokens * d.num_heads * d.head_dim);
  w.gate_up = take(std::max(tokens, expert_rows(d, tokens)) * d.intermediate_size * 2);
  w.expert_in = take(expert_rows(d, tokens) * d.hidden_size);
  w.expert_out = take(expert_rows(d, tokens) * d.hidden_size);
  w.router_weights = take(tokens * d.num_experts);
  w.lora_ax = take(tokens * d.lora_ranks);
  w.squares = take(d.group && d.qk_norm == ROW ? tokens * 2 : 0);
  w.scratch = take(threads * AttentionWork::floats(d.head_dim, head_pad(d)));
  if (work) *work = w;
  return used;
}

// Tokens [first, last) of a sequence, for attention to splits of its context.
struct AttentionItem {
  int64_t sequence, first, last;
  Range splits;
};
constexpr int64_t ITEM_TOKENS = 48;  // at most: a multiple of every `queries_at_once`

// What the threads of a call share.
struct Team {
  Barrier barrier;
  Queue queue;
  std::vector<AttentionItem> items;  // for each KV head
  int64_t splits = 0;                // of the longest context, if splits are items of their own, for a few tokens; else 0
  std::vector<float> parts;          // sums of splits, [tokens, heads, splits]

  Team(const Decoder& d, const Batch& batch, int64_t threads) {
    int64_t longest = 0;
    for (int64_t s = 0; s < batch.sequences; s++)
      for (int64_t t = batch.cu_seqlens[s]; t < batch.cu_seqlens[s + 1]; t += ITEM_TOKENS) {
        const int64_t last = std::min<int64_t>(t + ITEM_TOKENS, batch.cu_seqlens[s + 1]), end = batch.positions[last - 1] / SPLIT_TOKENS + 1;
        items.push_back({s, t, last, {0, end}});
        longest = std::max(longest, end);
      }
    if (longest < 2 || batch.tokens * d.num_kv_heads >= 2 * threads) return;
    splits = longest;
    parts.resize(batch.tokens * d.num_heads * splits * SplitSums::floats(head_pad(d)));
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
    lora_a<T>(l, x, work.lora_ax, thread, threads);
    barrier();
  }
  // A share of y = l(x).
  void multiply(const Linear& l, const Rows& x, const Output& y, Share mine) const {
    linear<T>(l, x.part(mine.rows.first, mine.rows.size()), y.at(mine.rows.first, 0), mine.columns.first, mine.columns.last);
  }
  // This thread's share of y = l(x), unmerged LoRA adapters included. No barrier at the end.
  void product(const Linear& l, const float* x, int64_t x_stride, float* y, int64_t y_stride, bool is_partial = false) const {
    const Rows rows{x, x_stride, batch.tokens};
    const Output out{Output::STORE, y, y_stride, 1.0f, is_partial};
    const Share mine = share(batch.tokens, outputs(l));
    prepare_lora(l, rows);
    multiply(l, rows, out, mine);
    add_lora<T>(l, work.lora_ax, batch.tokens, out, mine);
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
  // y = norm(x), rounded as in the model; y = x if there is no norm.
  void norm(const Norm& n, const float* x, float* y, int64_t size) const {
    if (!n.weight) {
      if (y != x) std::memcpy(y, x, size * sizeof(float));
      return;
    }
    double total = 0;
    if (d.norm == LAYER)
      for (int64_t i = 0; i < size; i++) total += x[i];
    const float mean = float(total / size);
    scaled(n, x, y, size, mean, float(squared(x, size, mean) / size));
  }
  // y = weight · (x - mean) / sqrt(variance) + bias, rounded as in the model.
  void scaled(const Norm& n, const float* x, float* y, int64_t size, float mean, float variance) const {
    const float factor = 1.0f / std::sqrt(variance + float(d.norm_eps)), offset = float(d.norm_offset);
    for (int64_t i = 0; i < size; i++) {
      float v = (x[i] - mean) * factor;
      if (d.norm == LAYER)
        v = rounded<T>(v * n.weight[i] + (n.bias ? n.bias[i] : 0.0f));
      else if (d.norm_float32)
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
      default: return max(x, Vec{});
    }
  }
  // Elements [first, last) of a row: act(gate) · up of gate before up if gated, else act(up).
  void activate(float* row, int64_t first, int64_t last, int64_t intermediate) const {
    auto activated_product = [&](const float* gate, const float* up) {
      const Vec v = rounded<T>(activated(load(gate)));
      return d.gated ? rounded<T>(v * load(up)) : v;
    };
    int64_t i = first;
    for (; i + LANES <= last; i += LANES) store(row + i, activated_product(row + i, row + intermediate + i));
    if (i == last) return;
    float gate[LANES] = {}, up[LANES] = {};
    const int64_t rest = (last - i) * sizeof(float);
    std::memcpy(gate, row + i, rest);
    if (d.gated) std::memcpy(up, row + intermediate + i, rest);
    store(gate, activated_product(gate, up));
    std::memcpy(row + i, gate, rest);
  }

  // A share of the up (and gate) projection and activation of an MLP over rows of x.  share.columns: of [0, intermediate);
  // ranges begin at multiples of 2 · LANES: whole blocks, and in the last range the tail.
  void expand(const Linear& gate_up, const Rows& x, float* y, int64_t intermediate, Share mine) const {
    const int64_t width = outputs(gate_up);
    for (int64_t from = 0; from < width; from += intermediate) {  // gate, up
      const Share part{mine.rows, {from + mine.columns.first, from + mine.columns.last}};
      multiply(gate_up, x, {Output::STORE, y, width}, part);
      add_lora<T>(gate_up, work.lora_ax, x.count, {Output::STORE, y, width}, part);
    }
    for (int64_t m = mine.rows.first; m < mine.rows.last; m++) {
      activate(y + m * width, mine.columns.first, mine.columns.last, intermediate);
      arrange(y + m * width + mine.columns.first, mine.columns.size());
    }
  }
  // `expand` of the MLP that is not a mixture, over all tokens. No barrier at the end.
  void expand_all(const Layer& layer, int64_t intermediate) const {
    const Rows rows{work.mlp_normed, d.hidden_size, batch.tokens};
    prepare_lora(layer.gate_up, rows);
    Grain grain = product_grain<T>();
    grain.columns = 2 * LANES;
    expand(layer.gate_up, rows, work.gate_up, intermediate, share_of(batch.tokens, intermediate, grain, thread, threads));
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
    const int64_t size = d.head_dim, q = d.num_heads * size, kv = d.num_kv_heads * size, pad = head_pad(d);
    T *keys = (T*)layer.keys, *values = (T*)layer.values;
    const Range mine = rows();
    if (thread == 0) team.queue.restart();  // for `attention`, which follows a barrier
    int64_t sequence = 0;
    for (int64_t t = mine.first; t < mine.last; t++) {
      while (batch.cu_seqlens[sequence + 1] <= t) sequence++;
      float* row = work.qkv + t * (q + 2 * kv);
      if (d.qk_norm == ROW) {
        norm_row(layer.q_norm, row, q, 2 * t);
        norm_row(layer.k_norm, row + q, kv, 2 * t + 1);
      } else {
        for (int64_t h = 0; h < d.num_heads; h++) norm(layer.q_norm, row + h * size, row + h * size, size);
        for (int64_t h = 0; h < d.num_kv_heads; h++) norm(layer.k_norm, row + q + h * size, row + q + h * size, size);
      }
      const int64_t position = batch.positions[t];
      if (layer.cos)
        for (int64_t h = 0; h < d.num_heads + d.num_kv_heads; h++)
          rope(row + h * size, layer.cos + position * (d.rotary_dim / 2), layer.sin + position * (d.rotary_dim / 2));
      const int64_t block = slot(sequence, t) / BLOCK_SIZE, offset = position % BLOCK_SIZE;
      for (int64_t h = 0; h < d.num_kv_heads; h++) {
        T* key = keys + (block * d.num_kv_heads + h) * key_dims(size) * BLOCK_SIZE;
        T* value = values + (block * d.num_kv_heads + h) * BLOCK_SIZE * pad;
        for (int64_t i = 0; i < key_dims(size); i++) store(key_at(key, i, offset), i < size ? row[q + h * size + i] : 0.0f);
        for (int64_t i = 0; i < pad; i++) store(value_at(value, pad, i, offset), i < size ? row[q + kv + h * size + i] : 0.0f);
        if (IN_PAIRS<T> && offset % 2 == 0 && t + 1 == batch.cu_seqlens[sequence + 1])  // the next token's half is not written yet
          for (int64_t i = 0; i < pad; i++) store(value_at(value, pad, i, offset + 1), 0.0f);
      }
    }
  }
  void rope(float* head, const float* cos, const float* sin) const {
    const int64_t half = d.rotary_dim / 2, step = d.rotary_interleaved ? 2 : 1, apart = d.rotary_interleaved ? 1 : half;
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
    const int64_t size = d.head_dim, group = d.num_heads / d.num_kv_heads, width = (d.num_heads + 2 * d.num_kv_heads) * size;
    const AttentionShape shape{d.num_kv_heads, size, head_pad(d), float(d.attention_scale), float(d.attention_softcap), layer.window, d.alibi_bfloat16 != 0};
    const T *keys = (const T*)layer.keys, *values = (const T*)layer.values;
    const AttentionWork scratch(work.scratch + thread * AttentionWork::floats(size, shape.head_pad), shape.head_pad);
    const int64_t count = team.items.size(), each = team.splits * SplitSums::floats(shape.head_pad);
    const auto query = [&](int64_t t, int64_t h) {
      const int64_t row = t * d.num_heads + h;
      float* parts = team.splits ? team.parts.data() + row * each : nullptr;
      return Query{work.qkv + t * width + h * size, work.attended + row * size, batch.positions[t], d.alibi ? d.alibi[h] : 0.0f, parts};
    };
    Query queries[MOST_QUERIES];
    const int most = queries_at_once<T>();
    if (in_tiles<T>()) tiles_begin();
    for (Range run; run = team.queue.take(count * d.num_kv_heads, threads), run.size();)
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
            if (held == most) attend_held();
          }
        attend_held();
      }
    if (in_tiles<T>()) tiles_end();
    if (!team.splits) return;
    barrier();
    const Range mine = partition(batch.tokens * d.num_heads, 1, thread, threads);
    for (int64_t row = mine.first; row < mine.last; row++) merge_parts<T>(shape, query(row / d.num_heads, row % d.num_heads));
  }

  Output added_to(float* hidden) const { return {Output::ADD, hidden, d.hidden_size, float(d.residual_multiplier)}; }

  // hidden += factor · norm(projected), for this thread's rows.
  void add_normed(const Norm& n, float* hidden) const {
    const Output out = added_to(hidden);
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
      for (int64_t i = 0; i < d.hidden_size; i++) row[i] = rounded<T>(row[i] + rounded<T>(mlp[i] + attended[i]));
    }
  }
  // hidden += l(x), unmerged LoRA adapters included, through the post norm if there is one. Ends in a barrier.
  void add_linear(const Linear& l, const float* x, int64_t x_stride, const Norm& post, float* hidden) const {
    if (post.weight || l.num_lora_deltas || d.group) {
      product(l, x, x_stride, work.projected, d.hidden_size, d.group);
      barrier();
      sum_over_ranks(d.group, work.projected, batch.tokens * d.hidden_size);
      add_normed(post, hidden);
    } else {
      multiply(l, {x, x_stride, batch.tokens}, added_to(hidden), share(batch.tokens, outputs(l)));
    }
    barrier();
  }

  void layer(const Layer& layer, float* hidden) const {
    const bool own_norm = d.parallel && layer.mlp_norm.weight;
    for (int64_t t = rows().first; t < rows().last; t++) {
      float* row = work.normed + t * d.hidden_size;
      norm(layer.attention_norm, hidden + t * d.hidden_size, row, d.hidden_size);
      if (d.parallel) {  // the MLP's input, before attention adds to the residual
        float* other = work.mlp_normed + t * d.hidden_size;
        if (own_norm)
          norm(layer.mlp_norm, hidden + t * d.hidden_size, other, d.hidden_size);
        else
          std::memcpy(other, row, d.hidden_size * sizeof(float));
        arrange(other, d.hidden_size);
      }
      arrange(row, d.hidden_size);
    }
    barrier();
    const int64_t q = d.num_heads * d.head_dim;
    product(layer.qkv, work.normed, d.hidden_size, work.qkv, (d.num_heads + 2 * d.num_kv_heads) * d.head_dim);
    barrier();
    sum_squares();
    rope_and_write(layer);
    barrier();
    attention(layer);
    barrier();
    if (d.bfloat16) {
      for (int64_t t = rows().first; t < rows().last; t++) arrange(work.attended + t * q, q);
      barrier();
    }
    const int64_t intermediate = outputs(layer.gate_up) / (d.gated ? 2 : 1);
    if (d.parallel) {
      product(layer.o, work.attended, q, work.projected, d.hidden_size, d.group);
      expand_all(layer, intermediate);
      barrier();
      product(layer.down, work.gate_up, outputs(layer.gate_up), work.normed, d.hidden_size, d.group);
      barrier();
      sum_over_ranks(d.group, work.projected, batch.tokens * d.hidden_size);
      sum_over_ranks(d.group, work.normed, batch.tokens * d.hidden_size);
      add_both(layer, hidden);
      barrier();
      return;
    }
    add_linear(layer.o, work.attended, q, layer.attention_post_norm, hidden);
    for (int64_t t = rows().first; t < rows().last; t++) {
      norm(layer.mlp_norm, hidden + t * d.hidden_size, work.mlp_normed + t * d.hidden_size, d.hidden_size);
      arrange(work.mlp_normed + t * d.hidden_size, d.hidden_size);
    }
    barrier();
    if (layer.router.parts) {
      mixture(layer);
      add_normed(layer.mlp_post_norm, hidden);
      barrier();
      return;
    }
    expand_all(layer, intermediate);
    barrier();
    add_linear(layer.down, work.gate_up, outputs(layer.gate_up), layer.mlp_post_norm, hidden);
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

  // A mixture of experts into `projected`: as many experts at a time as the buffers hold rows for.
  void mixture(const Layer& layer) const {
    const int64_t experts = d.num_experts, intermediate = layer.experts_down.inputs, width = intermediate * (d.gated ? 2 : 1);
    const bool is_partial = d.expert_group;
    product(layer.router, work.mlp_normed, d.hidden_size, work.router_weights, experts);
    barrier();
    for (int64_t t = rows().first, sequence = 0; t < rows().last; t++) {
      while (batch.cu_seqlens[sequence + 1] <= t) sequence++;
      int16_t* chosen = nullptr;
      if (d.router_indices) chosen = d.router_indices + (slot(sequence, t) * d.num_moe_layers + layer.moe_layer) * d.experts_per_token;
      route(work.router_weights + t * experts, experts, chosen);
      std::memset(work.projected + t * d.hidden_size, 0, d.hidden_size * sizeof(float));
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
        std::memcpy(work.expert_in + i * d.hidden_size, work.mlp_normed + tokens[i] * d.hidden_size, d.hidden_size * sizeof(float));
      barrier();
      over_columns(some, intermediate, 2 * LANES, [&](const ExpertRows& expert, Range columns) {
        const Rows rows{work.expert_in + expert.rows.first * d.hidden_size, d.hidden_size, expert.rows.size()};
        const Linear gate_up = rows_of<T>(layer.experts_gate_up, expert.local * width, width);
        expand(gate_up, rows, work.gate_up + expert.rows.first * width, intermediate, {{0, rows.count}, columns});
      });
      barrier();
      over_columns(some, d.hidden_size, product_grain<T>().columns, [&](const ExpertRows& expert, Range columns) {
        const Rows rows{work.gate_up + expert.rows.first * width, width, expert.rows.size()};
        const Output out{Output::STORE, work.expert_out + expert.rows.first * d.hidden_size, d.hidden_size, 1.0f, is_partial};
        multiply(rows_of<T>(layer.experts_down, expert.local * d.hidden_size, d.hidden_size), rows, out, {{0, rows.count}, columns});
      });
      barrier();
      const Range columns = partition(d.hidden_size, LANES, thread, threads);
      for (const ExpertRows& expert : some)
        for (int64_t i = expert.rows.first; i < expert.rows.last; i++) {
          const float weight = work.router_weights[tokens[i] * experts + d.first_expert + expert.local];
          for (int64_t k = columns.first; k < columns.last; k++) {
            const float scaled = unfused(work.expert_out[i * d.hidden_size + k] * weight);
            work.projected[tokens[i] * d.hidden_size + k] += d.experts_float32 || is_partial ? scaled : rounded<T>(scaled);
          }
        }
      barrier();
    }
    sum_over_ranks(d.expert_group, work.projected, batch.tokens * d.hidden_size);
    for (int64_t t = rows().first; t < rows().last; t++)
      for (int64_t k = 0; k < d.hidden_size; k++) work.projected[t * d.hidden_size + k] = rounded<T>(work.projected[t * d.hidden_size + k]);
  }
  // Router logits to expert weights, in place: softmax over all experts, the top experts_per_token kept, 0 elsewhere.
  // chosen: null, or where the experts that are kept are written, the one with the largest weight first.
  void route(float* weights, int64_t experts, int16_t* chosen) const {
    float max_logit = weights[0];
    for (int64_t e = 1; e < experts; e++) max_logit = std::max(max_logit, weights[e]);
    float total = 0;
    for (int64_t e = 0; e < experts; e++) total += weights[e] = std::exp(weights[e] - max_logit);
    std::vector<int64_t> order(experts);
    for (int64_t e = 0; e < experts; e++) order[e] = e;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return weights[a] > weights[b]; });
    float kept = 0;
    for (int64_t i = 0; i < experts; i++) {
      float& weight = weights[order[i]];
      weight = i < d.experts_per_token ? weight / total : 0.0f;
      kept += weight;
    }
    for (int64_t i = 0; chosen && i < d.experts_per_token; i++) chosen[i] = int16_t(order[i]);
    for (int64_t e = 0; e < experts; e++) {
      const float weight = d.normalize_experts ? weights[e] / kept : weights[e];
      weights[e] = d.experts_float32 ? weight : rounded<T>(weight);
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
extern const int64_t record_sizes[] = {sizeof(LoraDelta), sizeof(Linear), sizeof(Norm), sizeof(Layer), sizeof(Group), sizeof(Decoder), sizeof(Batch), sizeof(Draw), sizeof(Samples), sizeof(Text), sizeof(Drafting), sizeof(Verified)};

int64_t lanes() { return LANES; }

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
    for (int64_t i = std::max<int64_t>(first, 0); i < last; i++) run.layer(d->layers[i], hidden);
    if (d->hidden_states && last == d->num_layers) {
      run.barrier();
      run.keep(hidden);
    }
  });
  return 0;
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

// Draws from logits float32 [rows, vocabulary].
void sample(const float* logits, int64_t vocabulary, const Samples* samples, int64_t threads) {
  const auto& [draw, rows, keys, positions, tokens, sampling_logps, old_logps, raw_logps] = *samples;
  const float inverse_temperature = inverse_temperature_of(draw);
  over_rows(rows, threads, [&](int64_t r) {
    const Row row(logits + r * vocabulary, vocabulary, inverse_temperature);
    double mass = row.mass;
    if (draw.temperature == 0) {
      tokens[r] = row.argmax();
    } else {
      const double u = uniform(keys[r], positions[r]);
      tokens[r] = truncates(draw) ? truncated_draw(row, draw, u, mass) : row.inverse_cdf(u, inverse_temperature);
    }
    const double gap = double(row.logits[tokens[r]]) - row.max_logit;
    sampling_logps[r] = float(gap * inverse_temperature - std::log(mass));
    old_logps[r] = float(gap * inverse_temperature - std::log(row.mass));
    raw_logps[r] = float(gap - std::log(row.raw));
  });
}

// For each row of logits float32 [rows, vocabulary]: the logprob of its target, int64 [rows], and the entropy in nats,
// float32 [rows] each, both of softmax(logits / temperature).
void score(const float* logits, int64_t rows, int64_t vocabulary, const int64_t* targets, double temperature,
           float* logps, float* entropies, int64_t threads) {
  const float inverse_temperature = float(1.0 / temperature);
  over_rows(rows, threads, [&](int64_t r) {
    const Row row(logits + r * vocabulary, vocabulary, inverse_temperature);
    logps[r] = float((double(row.logits[targets[r]]) - row.max_logit) * inverse_temperature - std::log(row.mass));
    entropies[r] = float(std::log(row.mass) + row.entropy_sum(inverse_temperature) / row.mass);
  });
}

// `sample` where each rank has logits [rows, stride] of a slice of the vocabulary: of `width` tokens, which begin at token
// `first` of `vocabulary`. Every rank gets the same tokens and logprobs.
void sample_sharded(Group* group, const float* logits, int64_t stride, int64_t width, int64_t first, int64_t vocabulary, const Samples* samples,
                    int64_t threads) {
  const auto& [draw, rows, keys, positions, tokens, sampling_logps, old_logps, raw_logps] = *samples;
  const float inverse_temperature = inverse_temperature_of(draw);
  std::vector<SliceSums> sums(rows);
  std::vector<Row> own(rows);
  over_rows(rows, threads, [&](int64_t r) {
    own[r] = Row(logits + r * stride, width, inverse_temperature);
    sums[r] = {own[r].max_logit, own[r].mass, own[r].raw, 0, 0, width ? first + own[r].argmax() : 0, 0};
  });
  const std::vector<SliceSums> all = gathered(*group, sums);
  std::vector<WholeRow> whole(rows);
  std::vector<double> u(rows), mass(rows);
  for (int64_t r = 0; r < rows; r++) {
    whole[r] = whole_row(*group, all, rows, r, inverse_temperature);
    mass[r] = whole[r].mass;
    if (draw.temperature > 0) u[r] = uniform(keys[r], positions[r]);
  }
  std::vector<Found> found(rows);
  if (draw.temperature == 0) {
    for (int64_t r = 0; r < rows; r++) found[r] = {whole[r].argmax, whole[r].max_logit};
  } else if (truncates(draw)) {
    found = truncated_draws(*group, own, whole, draw, u, first, vocabulary, mass, threads);
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
    tokens[r] = found[r].token;
    sampling_logps[r] = float(gap * inverse_temperature - std::log(mass[r]));
    old_logps[r] = float(gap * inverse_temperature - std::log(whole[r].mass));
    raw_logps[r] = float(gap - std::log(whole[r].raw));
  }
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
// `stop_ids`. The tokens and logprobs of `samples` are [steps, rows]; its positions and the batch's are those of the first
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
      ended |= std::find(stop_ids, stop_ids + num_stop_ids, ids[r]) != stop_ids + num_stop_ids;
    }
    if (ended) return done + 1;
    drawn.tokens += rows, drawn.sampling_logps += rows, drawn.old_logps += rows, drawn.raw_logps += rows;
  }
  return steps;
}

static Draftable draftable_of(const Decoder& d, const int64_t* stop_ids, int64_t num_stop_ids) {
  return {std::min(d.embedding_rows, d.group ? d.whole_vocabulary : d.vocab_size), stop_ids, num_stop_ids};
}

// The tokens of a verification step: of each row the latest one, then its draft.
struct Verification {
  std::vector<int64_t> ids, keys, new_positions, tokens;
  std::vector<int32_t> positions, cu_seqlens, draft;
  std::vector<float> logps;  // [3, tokens]

  Batch batch(const Batch& of_rows) {
    Batch all = of_rows;
    all.tokens = ids.size(), all.ids = ids.data(), all.positions = positions.data(), all.cu_seqlens = cu_seqlens.data();
    return all;
  }
  Samples samples(const Draw& draw) {
    const size_t count = ids.size();
    tokens.resize(count), logps.resize(3 * count);
    return {draw, int64_t(count), keys.data(), new_positions.data(), tokens.data(), logps.data(), logps.data() + count, logps.data() + 2 * count};
  }
  void clear() {
    ids.clear(), keys.clear(), new_positions.clear(), positions.clear();
    cu_seqlens.assign(1, 0);
  }
  void add(int64_t id, int64_t key, int64_t new_position, int64_t position) {
    ids.push_back(id), keys.push_back(key), new_positions.push_back(new_position), positions.push_back(int32_t(position));
  }
};

// As decode_steps with up to `steps` forwards over each sequence's latest token and a draft: of a draft are accepted the
// tokens before the first that is not the one drawn at its place. So the tokens are those of decode_steps, more in a step.
// It also ends after a step in which a sequence reaches its limit, limits[rows] new tokens in all.
// samples, drafting: of rows. samples' tokens and logprobs are [n, rows], with `verified->counts` of each row written; n: at
// least the most of a row. hidden, logits_of_step, work: for a token and a draft of each row. New tokens are appended to the
// own texts.
// Returns the number of steps done; -1 if an id is outside the embedding.
int64_t verify_steps(const Decoder* d, const Batch* batch, int64_t layers, const Samples* samples, const int64_t* limits, const int64_t* stop_ids,
                     int64_t num_stop_ids, const Drafting* drafting, const Verified* verified, int64_t steps, float* hidden, float* logits_of_step,
                     float* work, int64_t threads) {
  using Clock = std::chrono::steady_clock;
  const int64_t rows = batch->tokens, *first_text = drafting->first_text;
  const Draftable draftable = draftable_of(*d, stop_ids, num_stop_ids);
  std::vector<Text> texts(drafting->texts, drafting->texts + first_text[rows]);
  std::vector<int64_t> latest(batch->ids, batch->ids + rows);
  Verification step;
  step.draft.resize(*std::max_element(drafting->most, drafting->most + rows));
  for (int64_t done = 0; done < steps; done++) {
    const auto start = Clock::now();
    step.clear();
    for (int64_t r = 0; r < rows; r++) {
      const int64_t count = verified->counts[r], position = batch->positions[r] + count, next = samples->positions[r] + count;
      const int64_t most = std::min(drafting->most[r], limits[r] - next - 1);
      const int64_t drafted = find_draft(*drafting, &texts[first_text[r]], first_text[r + 1] - first_text[r], most, draftable, step.draft.data());
      step.add(latest[r], samples->keys[r], next, position);
      for (int64_t i = 0; i < drafted; i++) step.add(step.draft[i], samples->keys[r], next + 1 + i, position + 1 + i);
      step.cu_seqlens.push_back(int32_t(step.ids.size()));
      verified->drafts[r] += drafted > 0, verified->drafted[r] += drafted;
    }
    const Batch all = step.batch(*batch);
    const Samples drawn = step.samples(samples->draw);
    const int64_t failed = forward_and_draw(d, &all, layers, &drawn, hidden, logits_of_step, work, threads);
    if (failed < 0) return -1;
    bool ended = failed;
    for (int64_t r = 0; r < rows && !failed; r++) {
      Text& own = texts[first_text[r + 1] - 1];
      for (int64_t t = step.cu_seqlens[r], last = step.cu_seqlens[r + 1] - 1; t <= last; t++) {
        const int64_t token = latest[r] = drawn.tokens[t], at = verified->counts[r]++ * rows + r;
        samples->tokens[at] = token, own.tokens[own.length++] = int32_t(token);
        samples->sampling_logps[at] = drawn.sampling_logps[t], samples->old_logps[at] = drawn.old_logps[t], samples->raw_logps[at] = drawn.raw_logps[t];
        ended |= samples->positions[r] + verified->counts[r] == limits[r];
        ended |= std::find(stop_ids, stop_ids + num_stop_ids, token) != stop_ids + num_stop_ids;
        if (t == last) break;
        const bool accepted = token == step.ids[t + 1];  // never a stop token: none is drafted
        verified->accepted[r] += accepted, verified->rejected[r] += !accepted;
        if (!accepted) break;
      }
    }
    verified->step_tokens[done] = all.tokens;
    verified->step_ns[done] = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
    if (ended) return done + 1;
  }
  return steps;
}

// A draft of each row, into drafts [rows, width], and its length, into counts [rows]; width: the most of `drafting->most`.
void draft_tokens(const Drafting* drafting, int64_t vocabulary, const int64_t* stop_ids, int64_t num_stop_ids, int64_t width, int32_t* drafts, int64_t* counts) {
  const int64_t* first = drafting->first_text;
  for (int64_t r = 0; r < drafting->rows; r++)
    counts[r] = find_draft(*drafting, drafting->texts + first[r], first[r + 1] - first[r], drafting->most[r], {vocabulary, stop_ids, num_stop_ids},
                           drafts + r * width);
}

// What verification steps would have done over the last news[r] tokens of each row's own text, which are there already.
// verified: counts of tokens, and the steps that they would have taken into step_tokens [rows].
void replay_drafts(const Drafting* drafting, const int64_t* news, int64_t vocabulary, const int64_t* stop_ids, int64_t num_stop_ids, const Verified* verified) {
  const int64_t* first = drafting->first_text;
  const Draftable draftable{vocabulary, stop_ids, num_stop_ids};
  for (int64_t r = 0; r < drafting->rows; r++) {
    std::vector<Text> texts(drafting->texts + first[r], drafting->texts + first[r + 1]);
    std::vector<int32_t> draft(drafting->most[r]);
    Text& own = texts.back();
    const int64_t length = own.length;
    for (own.length -= news[r]; own.length < length; own.length++) {
      const int64_t most = std::min(drafting->most[r], length - own.length - 1);
      const int64_t drafted = find_draft(*drafting, texts.data(), texts.size(), most, draftable, draft.data());
      int64_t accepted = 0;
      while (accepted < drafted && draft[accepted] == own.tokens[own.length + accepted]) accepted++;
      own.length += accepted;
      verified->drafts[r] += drafted > 0, verified->rejected[r] += accepted < drafted;
      verified->drafted[r] += drafted, verified->accepted[r] += accepted, verified->step_tokens[r]++;
    }
    verified->counts[r] = news[r];
  }
}
}
