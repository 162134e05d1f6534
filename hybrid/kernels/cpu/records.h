// The records that Python fills and the kernels read. Their fields are declared here only: hybrid/kernels/cpu_library.py
// reads this file. A field is an int64_t, a double, a pointer, a struct above it, or an array of one of these.
#pragma once
#include <cstdint>

// The choices of DecoderSpec that are words, in the order of ENUMS in hybrid/decoders/cpu_decoder.py.
enum NormKind { RMS, LAYER };
enum Activation { SILU, GELU, GELU_TANH, RELU };
enum QkNorm { NO_QK_NORM, HEAD, ROW };

// An unmerged LoRA adapter: adds scale · B (A x) to outputs [first, first + rows).  a [rank, inputs], b [rows, rank], in
// the model's dtype.  offset: of A x [tokens, rank] in the buffer of all of them, in floats per token.
struct LoraDelta {
  const void *a, *b;
  int64_t rank, first, rows, offset;
  double scale;
};

// A matrix of 1 to 3 parts, one above the other (q, k, v; gate, up); 0 parts: there is none.  weight[i] [rows[i], inputs]
// in the model's dtype; bias[i] float32 [rows[i]] or null. If scale[i] is not null, float32 [rows[i], groups], weight[i]
// is int8.
struct Linear {
  const void* weight[3];
  const float *bias[3], *scale[3];
  int64_t rows[3];
  int64_t parts, inputs, groups;
  const LoraDelta* lora_deltas;
  int64_t num_lora_deltas;
};

struct Norm {
  const float *weight, *bias;  // float32 [size]; no weight: no norm
};

// Norms and matrices by their roles in hybrid/models/spec.py.
struct Layer {
  Norm attention_norm, q_norm, k_norm, attention_post_norm, mlp_norm, mlp_post_norm;
  Linear qkv, o, gate_up, down, router;   // gate_up: up alone if the MLP is not gated
  Linear experts_gate_up, experts_down;   // all experts' matrices, one above the other
  const float *cos, *sin;                 // [positions, rotary_dim / 2], or null
  void *keys, *values;                    // the layer's KV cache, see attention.h
  int64_t window;
  int64_t moe_layer;                      // its number among the layers with experts
};

// Ranks that share a decoder.  memory: of the ranks of one host, see group.h; null: `sum` is called instead, an
// int64_t (*)(float* data, int64_t count) that sums in place, over the ranks, and returns 0 if it succeeded.
struct Group {
  int64_t size, index;
  void* memory;
  int64_t capacity;         // floats of a rank's buffer in `memory`
  const void* sum;
  int64_t round, call;      // rounds so far; number of the current call
  int64_t timeout_s;
  int64_t status, culprit;  // GroupStatus; once it is not GROUP_OK nothing is exchanged
  int64_t pids[64];         // of each rank
};

// With a group, numbers of heads, inner sizes and vocabulary are those of this rank's slices.
struct Decoder {
  // DecoderSpec's fields.
  int64_t vocab_size, hidden_size, num_heads, num_kv_heads, head_dim, embedding_size;
  int64_t norm, norm_float32, activation, activation_stepwise, gated, alibi_bfloat16;
  int64_t rotary_dim, rotary_interleaved, rotary_float32, qk_norm, parallel, position_offset;
  int64_t num_experts, experts_per_token, normalize_experts, experts_float32;
  double norm_eps, norm_offset, attention_scale, attention_softcap, logits_softcap;
  double embedding_multiplier, residual_multiplier, logits_divisor;
  const float* alibi;
  const Layer* layers;
  Group* group;         // null: this rank has whole weights outside the experts
  Group* expert_group;  // null: it has whole experts, and all of them
  // Weights outside the layers.
  const void *embedding, *positions;
  Norm embedding_norm, final_norm;
  Linear project_in, project_out, head;
  // What the weights imply.
  int64_t bfloat16;           // the model's dtype; 0: float32
  int64_t embedding_rows;     // of the whole embedding; this rank has rows [first_row, first_row + local_rows)
  int64_t first_row, local_rows;
  int64_t first_expert, local_experts;  // this rank's experts
  int64_t whole_vocabulary, first_token, local_tokens;  // this rank's logits are of tokens [first_token, first_token + local_tokens)
  int64_t intermediate_size;  // inputs of `down` or `experts_down`: the maximum over layers
  int64_t num_moe_layers;     // layers with experts
  int16_t* router_indices;    // [cache positions, num_moe_layers, experts_per_token], each token's experts; null: not recorded
  int64_t num_layers;
  void* hidden_states;        // [cache positions, hidden_size], each token's output of the last layer; null: not kept
  int64_t lora_ranks;         // sum of the ranks of a layer's LoRA deltas: the maximum over layers and the part outside them
};

// hybrid/decoders/batch.py explains the fields.
struct Batch {
  int64_t tokens, sequences, table_width;
  const int64_t* ids;
  const int32_t *positions, *cu_seqlens, *block_tables;
};

// How a token is drawn.
struct Draw {
  double temperature;  // 0: greedy
  int64_t top_k;       // 0: off
  double top_p, min_p; // 1 and 0: off
};

// Tokens to draw for `rows` rows, and where to.  keys, positions [rows]: of the sampling RNG.
// tokens, and three logprobs of each [rows]: under the distribution that was sampled from, before truncation, and before
// truncation at temperature 1. Greedy: all under softmax(logits).
struct Samples {
  Draw draw;
  int64_t rows;
  const int64_t *keys, *positions;
  int64_t* tokens;
  float *sampling_logps, *old_logps, *raw_logps;
};

// Tokens of a sequence, some of which may follow those of another one.
struct Text {
  int32_t* tokens;
  int64_t length;
};

// Where the drafts of `rows` sequences come from. Of row r: texts [first_text[r], first_text[r + 1]), the oldest first; the
// last one is its own, prompt and completion, with room for the tokens that it is given; drafts come from it too if
// from_own. At most most[r] tokens are drafted at a time, after a match of at least least_match tokens.
struct Drafting {
  int64_t rows, least_match, from_own;
  const Text* texts;
  const int64_t *first_text, *most;
};

// What verification steps give. Of each row: new tokens; drafts, and those of which a token was rejected; drafted and accepted
// tokens. Of each step: tokens of the forward, and nanoseconds.
struct Verified {
  int64_t *counts, *drafts, *rejected, *drafted, *accepted;
  int64_t *step_tokens, *step_ns;
};
