// The records that Python fills and the kernels read. Their fields are declared here only: hybrid/kernels/cpu_library.py
// reads this file. A field is an int64_t, a double, a pointer, a struct above it, or an array of one of these.
#pragma once
#include <cstdint>

// The choices of DecoderSpec that are words, in the order of ENUMS in hybrid/decoders/cpu_decoder.py.
enum NormKind { RMS, LAYER };
enum Activation { SILU, GELU, GELU_TANH, RELU, RELU2, XIELU, SWIGLU_CLAMPED };
enum QkNorm { NO_QK_NORM, HEAD, ROW };
enum Mixer { NO_MIXER, ATTENTION, LATENT_ATTENTION, GATED_DELTA_NET, MAMBA2, SHORT_CONV, KIMI_DELTA_ATTENTION, HYBRID };  // MIXERS there
enum Scores { SOFTMAX, SOFTMAX_CHOSEN, SIGMOID, SPARSEMIXER, SIGMOID_CHOSEN };  // SCORES in hybrid/decoders/cpu_decoder.py

// An unmerged LoRA adapter: adds scale · B (A x) to outputs [first, first + rows).  a [rank, inputs], b [rows, rank], in
// the model's dtype.  offset: of A x [tokens, rank] in the buffer of all of them, in floats per token.  adapter: of tokens
// with this number in Batch::adapters; -1: of all tokens.
struct LoraDelta {
  const void *a, *b;
  int64_t rank, first, rows, offset, adapter;
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

// The fields of Router in hybrid/kernels/router.py.
struct Router {
  int64_t scores, float32, groups, top_groups, group_best, normalize, float32_weights, scales_inputs, stepwise, float32_choice;
  double epsilon, min_total, scale, jitter;
};

// The sizes of mixers, explained in hybrid/kernels/torch_delta_net.py, torch_mamba2.py and torch_short_conv.py.
struct GatedDeltaNet {
  int64_t key_heads, value_heads, key_dim, value_dim, conv_width;
  double beta_scale, norm_eps;
};
struct Mamba2 {
  int64_t heads, head_dim, groups, state_size, conv_width;
  double min_step, max_step, in_multiplier, out_multiplier, multipliers[5];
  int64_t group_ranks;
};
struct ShortConv {
  int64_t channels, conv_width;
};
struct KimiDeltaAttention {
  int64_t heads, head_dim, conv_width;
};

// Norms and matrices by their roles in hybrid/models/spec.py.
struct Layer {
  Norm attention_norm, q_norm, k_norm, v_norm, attention_post_norm, mlp_norm, mlp_post_norm;
  Linear qkv, attention_gate, o, gate_up, down, router;   // gate_up: up alone if the MLP is not gated
  Linear experts_gate_up, experts_down;   // all experts' matrices, one above the other, and so their biases
  Linear latent_in, latent_out;
  Linear shared_gate_up, shared_down, shared_router;
  // Of Gemma 4's layers: an MLP and a mixture in parallel, whose router reads the residual stream; per-layer inputs.
  Norm router_norm, experts_norm, experts_post_norm, shared_post_norm;
  Linear per_layer_input_gate, per_layer_projection;
  Norm per_layer_post_norm;
  // Of latent attention.  latent_up: each head's key matrix above its value matrix, adapters merged; key_up: the key
  // matrices transposed, one above the other.
  Norm q_a_norm, kv_a_norm;
  Linear q_a, q_b, kv_a, latent_up, key_up;
  // Of recurrent mixers: Norm for vectors too; conv.weight [conv_width, channels].
  Norm conv, dt_bias, a_log, delta_norm, skip, mamba_norm;
  Linear delta_in, delta_conv_in;         // delta_in: delta_z alone if delta_q, delta_k and delta_v are matrices of their own
  Linear delta_forget_b, delta_z_b;
  Linear delta_ba, delta_o, mamba_in, mamba_o, conv_in, conv_o;
  float *state, *latest;                  // [slots, heads, key_dim, padded(value_dim)]; [slots, conv_width - 1, channels]
  const float* xielu;                     // its slopes above and below 0, after softplus; null for other activations
  const float *sinks, *correction, *expert_scale, *router_scale, *layer_scalar;  // [num_heads], [num_experts] twice, [hidden], [1]; or null
  const float *cos, *sin;                 // [positions, rotary_dim / 2], or null
  void *keys, *values;                    // the layer's KV cache, see attention.h
  int64_t num_kv_heads, head_dim, rotary_dim;
  int64_t reads_other_kv;                 // `keys` and `values` are another layer's, and not written
  int64_t window;
  int64_t mixer;
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
  int64_t vocab_size, hidden_size, num_heads, num_kv_heads, head_dim, embedding_size;  // of heads: the layers' largest
  int64_t norm, norm_float32, activation, activation_stepwise, gated, alibi_bfloat16;
  int64_t rotary_dim, rotary_interleaved, rotary_float32, qk_norm, qk_norm_last, parallel, attention_first, position_offset, query_scale_positions, query_scale_unrotated;
  int64_t num_experts, experts_per_token, latent_size, per_layer_input_size;
  double swiglu_alpha, swiglu_limit;
  Router router;
  int64_t latent_dim, value_dim, query_rank;
  int64_t output_gate, gate_dim, residual_float32;
  GatedDeltaNet delta;  // of layers with these mixers; else 0
  Mamba2 mamba;
  ShortConv short_conv;
  KimiDeltaAttention kimi;
  double norm_eps, latent_norm_eps, norm_offset, attention_scale, attention_softcap, logits_softcap;
  double embedding_multiplier, residual_multiplier, logits_divisor, qkv_clip, query_scale_beta;
  double value_multiplier, attention_in_multiplier, attention_out_multiplier, key_multiplier, gate_multiplier, mlp_multiplier;
  const float* alibi;
  const Layer* layers;
  Group* group;         // null: this rank has whole weights outside the experts
  Group* expert_group;  // null: it has whole experts, and all of them
  // Weights outside the layers.
  const void *embedding, *positions;
  const void* per_layer_embedding;  // [embedding_rows, num_layers, per_layer_input_size]
  Norm embedding_norm, final_norm, per_layer_projection_norm;
  Linear project_in, project_out, head, per_layer_model_projection;
  // What the weights imply.
  int64_t bfloat16;           // the model's dtype; 0: float32
  int64_t per_layer_rows;     // of `per_layer_embedding`
  int64_t embedding_rows;     // of the whole embedding; this rank has rows [first_row, first_row + local_rows)
  int64_t first_row, local_rows;
  int64_t first_expert, local_experts;  // this rank's experts
  int64_t whole_vocabulary, first_token, local_tokens;  // this rank's logits are of tokens [first_token, first_token + local_tokens)
  int64_t intermediate_size;  // inputs of `down`, `experts_down` or `shared_down`: the maximum over layers
  int64_t num_moe_layers;     // layers with experts
  int16_t* router_indices;    // [cache positions, num_moe_layers, experts_per_token], each token's experts; null: not recorded
  int64_t num_layers;
  void* hidden_states;        // [cache positions, hidden_size], each token's output of the last layer; null: not kept
  int64_t lora_ranks;         // sum of the ranks of a layer's LoRA deltas: the maximum over layers and the part outside them
};

// hybrid/decoders/batch.py explains the fields: of PackedBatch, then of LayerActivations.
struct Batch {
  int64_t tokens, sequences, table_width;
  const int64_t* ids;
  const int32_t *positions, *cu_seqlens, *block_tables, *state_slots, *adapters;
  void* layer_inputs;              // [num_layers + 1, layer_input_rows, hidden_size] in the model's dtype; null: not written
  int64_t layer_input_rows;
  const int64_t* activation_rows;  // [tokens], in [0, layer_input_rows)
  int16_t* router_indices;         // [layer_input_rows, num_moe_layers, experts_per_token]; null: not written
};

// A row of RowParams.table of hybrid/sampling/params.py: the settings that tokens are sampled with.
struct Draw {
  double temperature;   // 0: greedy
  double top_k;         // an integer; 0: off
  double top_p, min_p;  // 1 and 0: off
  double repetition_penalty, min_new_tokens;  // not read here
};

// Tokens to draw for `rows` rows, and where to.  keys, positions [rows]: of the sampling RNG.
// tokens, and three logprobs of each [rows]: under the distribution that was sampled from, before truncation, and before
// truncation at temperature 1. Greedy: all under softmax(logits).
// sampling_mask [rows]: as SamplerOutput's of hybrid/sampling/sampler.py.
// draws [settings], draw_of_row [rows]: the settings of each row; draw_of_row null: draws[0] of all.
struct Samples {
  const Draw* draws;
  const int64_t* draw_of_row;
  int64_t rows;
  const int64_t *keys, *positions;
  int64_t* tokens;
  float *sampling_logps, *old_logps, *raw_logps, *sampling_mask;
};

// Tokens of a sequence, some of which may follow those of another one.
struct Text {
  const int32_t* tokens;
  int64_t length;
};

// Where the drafts of `rows` sequences come from. Of row r: texts [first_text[r], first_text[r + 1]), the oldest first; the
// last one is its own, prompt and completion; drafts come from it too if from_own. At most most[r] tokens are drafted, after a
// match of at least min_match tokens: tokens below `vocabulary` that are no stop_ids.
struct Drafting {
  int64_t rows, min_match, from_own, vocabulary, num_stop_ids;
  const Text* texts;
  const int64_t *first_text, *most, *stop_ids;
};
