// The kernels that nvcc compiles, by raw pointers, so that it never sees LibTorch's headers. Each
// launches on `stream` and returns the launch's error. Rows are contiguous.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "models/kernels/cuda/strided_box.h"

namespace ferry::models::launch {

enum class Element : std::uint8_t { kBf16, kFloat };

// y[m, n] = sum over k of x[m, k] w[n, k], in the order of k, then + bias[n], in fp32; `element` is
// that of x and w.
cudaError_t serial_gemm(const void* x,
                        const void* w,
                        const float* bias,  // or null
                        float* y,
                        std::int64_t m,
                        std::int64_t n,
                        std::int64_t k,
                        Element element,
                        cudaStream_t stream);

// The same of bf16, all aligned to 16 bytes, rounded once.
using RowsProduct = cudaError_t(const void* x,
                                const void* weight,
                                const void* bias,  // or null
                                void* y,
                                std::int64_t rows,
                                std::int64_t n,
                                std::int64_t k,
                                cudaStream_t stream);
// 1 to 4 rows, k a multiple of 8: summed in fp32. The second one rounds nothing: y is fp32.
RowsProduct few_rows_product;
RowsProduct few_rows_product_in_fp32;
// At most 8 rows: sums of instructions of 16 channels, one after the other (ordered_columns.cuh).
bool ordered_rows_supported(std::int64_t rows, std::int64_t k);
RowsProduct ordered_rows_product;

struct RmsNormShape {
  std::int64_t rows = 0;
  std::int64_t channels = 0;  // a multiple of 4, or below 128
  float epsilon = 0;
  bool rounds_once = false;      // NormRounding::kOnce and kOnceByOnePlus
  bool adds_one = false;         // NormRounding::kOnceByOnePlus
  bool gathered_weight = false;  // a kernel of the stream writes the weight
};
// The norm of x, or with `delta` of x + delta, which is written to `sum`. Pointers are aligned to
// 16 bytes.
cudaError_t rms_norm(const void* x,
                     const void* delta,  // or null, like sum
                     const void* weight,
                     void* sum,
                     void* y,
                     float* inverse_rms,  // [rows], for the backward
                     RmsNormShape shape,
                     Element element,
                     cudaStream_t stream);
// partial_weight: [rms_norm_partials(rows), channels], whose sum over rows is the weight's
// gradient.
std::int64_t rms_norm_partials(std::int64_t rows);
cudaError_t rms_norm_backward(const void* grad_y,
                              const void* x,
                              const void* weight,
                              const float* inverse_rms,
                              const void* grad_sum,  // of x + delta, or null: added to grad_x
                              void* grad_x,
                              float* partial_weight,
                              RmsNormShape shape,
                              Element element,
                              cudaStream_t stream);

// cos and sin [tokens, dim] of positions [tokens] times inverse_frequencies [dim / 2], each scaled.
cudaError_t rotary_angles(const std::int64_t* positions,
                          const float* inverse_frequencies,
                          void* cos,
                          void* sin,
                          std::int64_t tokens,
                          std::int64_t dim,
                          float scaling,
                          Element element,
                          cudaStream_t stream);

struct RotaryShape {
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t heads_of_group = 1;
  std::int64_t dim = 0;
  std::int64_t token_stride = 0;  // of x, in elements
  std::int64_t group_stride = 0;
  std::int64_t head_stride = 0;  // of the heads of a group
  bool interleaved = false;  // channels 2i and 2i + 1 of x turn together, and come out as halves
};
// Turns the heads of `strided`, whose strides the shape gives, into `heads` [tokens, heads, dim].
// With `keys`, the last head of each group goes to keys [tokens, groups, dim] and the others to
// `heads`. cos and sin are [tokens, dim]. `transpose`: the backward, from the gradients of `heads`
// and `keys` to that of `strided`.
cudaError_t rotary(void* strided,
                   const void* cos,
                   const void* sin,
                   void* heads,
                   void* keys,  // or null
                   RotaryShape shape,
                   bool transpose,
                   Element element,
                   cudaStream_t stream);

// The kernel of norm_rotary_cuda(): heads of kNormedChannels channels, aligned to 16 bytes.
constexpr std::int64_t kNormedChannels = 128;
cudaError_t norm_rotary(const void* strided,
                        const void* query_weight,
                        const void* key_weight,
                        const void* cos,
                        const void* sin,
                        void* queries,
                        void* keys,
                        RotaryShape shape,
                        float epsilon,
                        Element element,
                        cudaStream_t stream);

// gate_up [rows, 2 * ffn] -> [rows, ffn].
cudaError_t swiglu(const void* gate_up,
                   void* y,
                   std::int64_t rows,
                   std::int64_t ffn,
                   Element element,
                   cudaStream_t stream);
cudaError_t swiglu_backward(const void* grad_y,
                            const void* gate_up,
                            void* grad_gate_up,
                            std::int64_t rows,
                            std::int64_t ffn,
                            Element element,
                            cudaStream_t stream);

// Rows of experts one behind another, those of expert e up to ends[e].
struct ExpertRows {
  std::int64_t rows = 0;
  std::int64_t columns = 0;  // of the result
  std::int64_t experts = 0;
};
// y = x + the bias of the row's expert, [experts, columns].
cudaError_t add_expert_biases(const void* x,
                              const void* biases,
                              const std::int32_t* ends,
                              void* y,
                              ExpertRows shape,
                              Element element,
                              cudaStream_t stream);
// (up + offset) * gate * sigmoid(1.702 gate) of gate_up [rows, 2 * columns] + biases [experts, 2 *
// columns], with gate at most `clamp` and up at most that far from 0 -> y [rows, columns].
cudaError_t quick_geglu(const void* gate_up,
                        const void* biases,
                        const std::int32_t* ends,
                        void* y,
                        ExpertRows shape,
                        float clamp,
                        float offset,
                        Element element,
                        cudaStream_t stream);

cudaError_t quick_geglu_backward(const void* grad_y,
                                 const void* gate_up,
                                 const void* biases,
                                 const std::int32_t* ends,
                                 void* grad_gate_up,
                                 ExpertRows shape,
                                 float clamp,
                                 float offset,
                                 Element element,
                                 cudaStream_t stream);
// The sum of each expert's rows, [experts, columns].
cudaError_t sum_expert_rows(const void* rows,
                            const std::int32_t* ends,
                            void* sums,
                            ExpertRows shape,
                            Element element,
                            cudaStream_t stream);

// Kernels of models/kernels/log_probs.h.
struct LogProbShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;     // of the vocabulary
  std::int64_t row_stride = 0;  // with the padding behind them
  std::int64_t first = 0;       // token of column 0
  float inverse_temperature = 1;
};
// statistics [4, rows], log_probs [rows].
cudaError_t row_statistics(const void* logits,
                           const std::int64_t* labels,
                           float* statistics,
                           float* log_probs,
                           LogProbShape shape,
                           Element element,
                           cudaStream_t stream);
cudaError_t logits_to_gradient(void* logits,
                               const float* statistics,
                               const std::int64_t* labels,
                               const float* of_log_prob,
                               const float* of_entropy,  // or null
                               LogProbShape shape,
                               Element element,
                               cudaStream_t stream);

// The kernels of models/kernels/attention/paged_attention.h, for bf16 in blocks of 64 keys: heads
// of 64, 128 or 256 channels, of 192 with values of 128, or of 576 in one group, the first 512 of
// which are the values; `value` is not read then, and neither are sinks, window and in_order.
struct PagedAttentionShape {
  int sequences = 0;
  int heads = 0;
  int groups = 0;
  int dim = 0;
  int max_blocks = 0;  // columns of the block tables
  int window = 0;      // keys that a row sees at most, its own among them; 0: all
  float scale = 1;
  bool in_order = true;  // as flash adds up; else few rows share out their keys over blocks
};
cudaError_t paged_attention(const void* query,
                            const void* key,
                            const void* value,
                            const std::int32_t* block_tables,
                            const std::int32_t* lengths,
                            const void* sinks,  // [heads], or null
                            void* result,
                            PagedAttentionShape shape,
                            cudaStream_t stream);

// The kernel of models/kernels/attention/eager_attention_cuda.h. Rows of queries, and keys, of
// sequence i lie from begin[i] to begin[i + 1].
struct EagerAttention {
  const void* query = nullptr;                // [queries, heads, dim]
  const void* key = nullptr;                  // [keys, groups, dim], or [blocks, 64, groups, dim]
  const void* value = nullptr;                // like keys
  const void* sinks = nullptr;                // [heads]
  const std::int32_t* query_begin = nullptr;  // null: a row for each sequence, its last one
  const std::int32_t* key_begin = nullptr;    // null: keys in blocks, so many as `lengths` say
  const std::int32_t* block_tables = nullptr;
  const std::int32_t* lengths = nullptr;
  void* result = nullptr;    // like queries
  float* log_sum = nullptr;  // [heads, queries], or null
  std::int64_t queries = 0;
  int longest_query = 1;
  PagedAttentionShape shape{};
};
cudaError_t eager_attention(const EagerAttention& arguments, cudaStream_t stream);

// store_in_slots() copies rows of keys and of values to the slots of their caches, and skips rows
// with a slot below 0. Sizes and strides are in units of 16 bytes.
struct SlotRows {
  const void* rows = nullptr;
  void* cache = nullptr;
  std::int64_t units = 0;         // of a row, and of a slot
  std::int64_t stride = 0;        // from row to row
  std::int64_t group_units = 0;   // of a row's group, contiguous
  std::int64_t group_stride = 0;  // from group to group
};
cudaError_t store_in_slots(SlotRows key,
                           SlotRows value,
                           const std::int64_t* slots,
                           std::int64_t num_rows,
                           cudaStream_t stream);

// The kernel of models/kernels/strided_copy_cuda.h.
cudaError_t strided_copy(const StridedBox* boxes,
                         const std::int32_t* box_of_tile,
                         const std::int64_t* memories,
                         void* staging,
                         std::int64_t tiles,
                         cudaStream_t stream);

}  // namespace ferry::models::launch
