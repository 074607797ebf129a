// Runs a step on the device: the rows of all scheduled sequences through the model, and a token for
// each sequence that is computed to its end. One copy uploads all inputs into memory that never
// moves, so that a step can be a CUDA graph: it is one if every sequence decodes and the host is
// not asked where experts are. collect() waits for tokens and log-probabilities: before that the
// next step may be launched, whose rows take the tokens of this one on the device.
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
#include "rollout/kernels/draw.h"
#include "rollout/kernels/step_copies.h"
#include "rollout/kv_cache.h"
#include "rollout/paged_context.h"
#include "rollout/request_output.h"
#include "rollout/routed_experts.h"
#include "rollout/sampler.h"
#include "rollout/schedule/scheduler.h"
#include "rollout/schedule/slot_copies.h"
#include "rollout/step_inputs.h"

namespace ferry::rollout {

class VisionEncoder;  // rollout/vision

struct RunnerLimits {
  std::int64_t max_num_seqs = 0;
  std::int64_t max_num_batched_tokens = 0;
  std::int64_t max_model_len = 0;
  bool enforce_eager = false;                 // no CUDA graphs
  bool enable_return_routed_experts = false;  // the model has experts
  std::shared_ptr<VisionEncoder> vision{};    // of prompts that have images
};

struct DrawnToken {
  Sequence* sequence = nullptr;  // null: it has ended since the launch
  std::int64_t row = 0;          // in the step
  std::int64_t position = 0;     // of the token in the sequence
  // The sequence's first at launch, if routes are kept.
  std::vector<std::int32_t> block_table{};
  TokenOutput token{};
};

// A step that the device is computing.
struct StepInFlight {
  std::vector<DrawnToken> drawn{};      // collect() fills in the tokens
  at::Tensor tokens{};                  // [drawn], on the device
  SampledTokens results{};              // on the host, valid after `done`
  std::vector<ScoredPrompt> prompts{};  // on the host, valid after `done`
  std::vector<std::int64_t> slots{};    // of the rows whose routes are kept, in the first group
  at::Tensor routed_experts{};  // their StepRoutes::gather(), on the host, valid after `done`
  SlotCopies copies{};
  std::shared_ptr<c10::Event> done{};
};

// True if data parallel ranks, which have other requests, share this rank's experts.
bool shares_experts(const models::GPTModel& model);

class ModelRunner {
 public:
  // Called by all ranks of the model's mesh. The model outlives this. Throws Error(kUsage) if it
  // has no language model's head.
  ModelRunner(const models::GPTModel& model, RunnerLimits limits);

  // Called by every tensor parallel rank with the same sequences, in the order of
  // Scheduler::schedule(). A rank without sequences still computes with those that share its
  // experts. Unknown tokens are those of `before`; no other step may be in flight.
  StepInFlight launch(std::span<const ScheduledSequence> scheduled,
                      KVCache& cache,
                      const StepInFlight* before);
  // Waits for the step, and fills in the drawn tokens.
  static void collect(StepInFlight& step);
  // True if prompts of the model may have images.
  static bool sees_images(const models::GPTModel& model);
  // Called after the cache or the weights have moved.
  void forget_graphs();

 private:
  // The rows of a step.
  struct RowPlan {
    std::int64_t rows = 0;  // padding to come
    bool captured = false;  // every sequence decodes, in a graph
    bool equal = false;     // on all ranks that share experts
  };
  RowPlan plan_rows(std::span<const ScheduledSequence> scheduled) const;
  void agree(RowPlan& plan) const;
  static std::vector<SamplingRow> begin_draws(std::span<const ScheduledSequence> scheduled,
                                              StepInFlight& step);
  void write_inputs(std::span<const ScheduledSequence> scheduled,
                    const StepInFlight& step,
                    const Draws& draws,
                    const RowPlan& plan);
  void fill_rows(std::span<const ScheduledSequence> scheduled);
  void fill_blocks(std::span<const ScheduledSequence> scheduled);
  void fill_linear_rows(std::span<const ScheduledSequence> scheduled,
                        const RowPlan& plan,
                        std::int64_t rows);
  models::LinearRows linear_rows() const;
  DecodedRows forward(const PagedStep& step, KVCache& cache) const;
  DecodedRows replay(const RowPlan& plan, KVCache& cache);
  std::vector<PagedGroup> groups_of_step() const;
  PagedStep make_step(std::span<const ScheduledSequence> scheduled,
                      const RowPlan& plan,
                      bool copies) const;
  void draw(std::span<const SamplingRow> sampling,
            Draws& draws,
            const at::Tensor& hidden,
            StepInFlight& step);
  void keep_routes(std::span<const ScheduledSequence> scheduled,
                   const at::Tensor& routes,
                   StepInFlight& step) const;

  const models::GPTModel& model_;
  std::int64_t rows_multiple_;
  std::int64_t max_num_seqs_;
  std::int64_t max_blocks_;
  std::int64_t max_gathered_keys_;
  std::size_t num_groups_;         // of the cache
  std::int32_t unseen_block_ = 0;  // of the cache of the last step
  std::int64_t unread_slot_ = 0;   // the same
  // Two sides on the host: one is read while the other may still be in transfer.
  std::array<DrawnNumbers, 2> results_{};
  std::size_t results_side_ = 0;
  StepInputs inputs_;
  // Arrays of the last step.
  StepInputs::Array tokens_;                      // [rows], int64
  StepInputs::Array slots_;                       // [groups, rows], int64
  StepInputs::Array positions_;                   // [rows] or [3, rows], int64
  StepInputs::Array lengths_;                     // [sequences], int32
  StepInputs::Array block_tables_;                // [groups, sequences, max_blocks], int32
  StepInputs::Array copied_slots_;                // [groups, 2, tokens], int64
  StepInputs::Array begun_states_, kept_states_;  // [2, sequences], int64
  StepInputs::Array last_rows_;                   // [drawn], int64
  StepInputs::Array plain_draws_;                 // bytes of DrawRow
  models::LinearRows linear_;                     // without its tensors
  StepInputs::Array linear_rows_, linear_slots_;  // [linear_.decodes], int64
  bool captures_graphs_;
  bool enable_return_routed_experts_;
  std::shared_ptr<VisionEncoder> vision_;
  models::VisualRows visual_{};         // of the last step
  std::optional<DecodeGraphs> graphs_;  // of one cache
};

}  // namespace ferry::rollout
