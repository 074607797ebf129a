// One step on the device: the rows of all scheduled sequences through the model, and a token for
// each that is computed to its end. Numbers go up in buffers that never move, so that a step can be
// captured in a CUDA graph: those in which every sequence decodes are, of dense models on one GPU.
// Tokens and their log-probabilities come down when they are asked for: meanwhile the next step may
// be launched, whose rows take the tokens of this one on the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "models/gpt_model.h"
#include "rollout/decode_graphs.h"
#include "rollout/kv_cache.h"
#include "rollout/paged_context.h"
#include "rollout/request_output.h"
#include "rollout/routed_experts.h"
#include "rollout/sampler.h"
#include "rollout/scheduler.h"

namespace ferry::rollout {

struct RunnerLimits {
  std::int64_t max_num_seqs = 0;
  std::int64_t max_num_batched_tokens = 0;
  std::int64_t max_model_len = 0;
  bool enforce_eager = false;                 // no CUDA graphs
  bool enable_return_routed_experts = false;  // of a model with experts
};

struct DrawnToken {
  Sequence* sequence = nullptr;  // null: it has ended meanwhile
  std::int64_t position = 0;     // of the token, in the sequence
  std::vector<std::int32_t> block_table{};  // the sequence's then; kept where routes are
  TokenOutput token{};
};

// A step that the device computes.
struct StepInFlight {
  std::vector<DrawnToken> drawn{};  // whose tokens come with collect()
  at::Tensor tokens{};              // [drawn], on the device
  SampledTokens results{};          // on the host, as soon as `done` has happened
  std::vector<std::int64_t> slots{};  // of the rows whose routes are kept
  at::Tensor routed_experts{};        // theirs: StepRoutes::gather(), on the host like the results
  std::vector<CopiedSlot> copied_slots{};
  std::shared_ptr<c10::Event> done{};
};

class ModelRunner {
 public:
  // The model outlives this. Throws Error(kUsage) if it has no language model's head.
  ModelRunner(const models::GPTModel& model, RunnerLimits limits);

  // Every tensor parallel rank with the same sequences, as Scheduler::schedule() orders them.
  // Without any, a rank still computes with those that share its experts. Tokens that are unknown
  // are those of `before`; at most that one step is under way besides.
  StepInFlight launch(std::span<const ScheduledSequence> scheduled,
                      KVCache& cache,
                      const StepInFlight* before);
  // Waits for the step, and fills in what it drew.
  static void collect(StepInFlight& step);
  // The cache or the weights have moved.
  void forget_graphs();

 private:
  // Numbers that the host writes and the device reads. Of two sides on the host one is written
  // while the other may still be on its way.
  struct Buffer {
    std::array<at::Tensor, 2> hosts{};
    at::Tensor device{};
    std::size_t side = 0;
    template <typename T>
    T* data() const {
      return hosts[side].mutable_data_ptr<T>();
    }
    // Its first `rows`, uploaded.
    at::Tensor upload(std::int64_t rows) const;
  };
  Buffer make_buffer(at::IntArrayRef shape, at::ScalarType dtype) const;

  std::int64_t fill_rows(std::span<const ScheduledSequence> scheduled, std::int64_t multiple);
  at::Tensor forward(std::span<const ScheduledSequence> scheduled,
                     KVCache& cache,
                     const StepInFlight* before,
                     std::span<const CopiedSlot> copied_slots,
                     const models::RouterReplay& routes);
  // Every one of the first `rows` rows decodes: out of the buffers, as uploaded.
  at::Tensor decode(std::int64_t rows, KVCache& cache) const;
  PagedStep make_step(std::span<const ScheduledSequence> scheduled,
                      std::int64_t rows,
                      std::span<const CopiedSlot> copied_slots) const;
  void fill_in_unknown(std::span<const ScheduledSequence> scheduled, const StepInFlight* before);
  void draw(std::span<const ScheduledSequence> scheduled,
            const at::Tensor& hidden,
            StepInFlight& step);
  void keep_routes(std::span<const ScheduledSequence> scheduled,
                   const StepRoutes& routes,
                   StepInFlight& step) const;

  const models::GPTModel& model_;
  std::int64_t rows_multiple_;
  Buffer tokens_, positions_, slots_;  // [rows], int64
  Buffer lengths_;                     // [sequences], int32
  Buffer block_tables_;                // [sequences, max_blocks], int32
  Buffer last_rows_;                   // [sequences], int64
  Buffer copied_slots_;                // [tokens, 2], int64
  Buffer unknown_;                     // [2, sequences], int64: rows, and where `before` draws them
  bool captures_graphs_;
  bool enable_return_routed_experts_;
  std::optional<DecodeGraphs> graphs_;  // of one cache
};

}  // namespace ferry::rollout
