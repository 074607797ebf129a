// The rows of a step of reinforcement learning: a prompt, its response, and all that becomes known
// of them between the rollout and the update (verl's DataProto, under its names). Rows are ragged:
// they lie one behind another, without padding; padded() makes the matrix that a formula is
// written for. Columns are members; one that is not known yet is undefined or empty.
//
// Columns of tokens may be kept by the ranks that made them: then the batch knows where each row
// lies, and the member is undefined (workers/row_parcels.h).
//
// Copies share their tensors: assigning a column costs nothing, and no operation writes to one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "models/kernels/log_probs.h"

namespace ferry::trainer {

struct RolloutBatch {
  using Tokens = std::vector<std::int64_t>;
  using Rows = std::vector<std::int64_t>;

  // Row i has the tokens [offsets[i], offsets[i + 1]). The last of them are its response:
  // [response_offsets[i], response_offsets[i + 1]) of the columns of response tokens.
  std::vector<std::int64_t> offsets{0};           // [rows + 1]
  std::vector<std::int64_t> response_offsets{0};  // [rows + 1]
  // data.max_prompt_length and max_response_length. Matrices of the whole batch are that wide, so
  // that a sum has the same bits whichever rows are in the batch.
  std::int64_t max_prompt_length = 0, max_response_length = 0;

  // [tokens]
  at::Tensor tokens{};          // int64
  at::Tensor routed_experts{};  // [tokens, layers with experts, topk] (engine/router_replay.h)

  // [response tokens], fp32 but for the mask and steps
  at::Tensor response_mask{};  // bool: the tokens that are learned; any, not only a run of them
  at::Tensor rollout_log_probs{}, old_log_probs{}, ref_log_prob{};
  // int64: the step behind which the weights are that drew a token; known where
  // PpoConfig::is_async().
  at::Tensor global_steps{};
  at::Tensor log_prob{};  // of the policy as it is now
  at::Tensor entropys{};
  at::Tensor rollout_is_weights{};
  at::Tensor values{};  // of a token before it is given
  at::Tensor token_level_scores{}, token_level_rewards{};
  at::Tensor turn_scores{};  // what turns have earned, at their last tokens
  at::Tensor advantages{}, returns{};
  models::SamplingMask sampling_mask{};  // the tokens that each response token was drawn from

  // [rows]
  at::Tensor seeds{};              // int64, of the draws
  at::Tensor min_global_steps{};   // int64, of global_steps: the oldest weights, ...
  at::Tensor max_global_steps{};   // ... and the newest
  at::Tensor index{};              // int64: a row's place in the batch of the step
  at::Tensor scores{};             // fp32, of whole responses
  at::Tensor overlong_reward{};    // fp32, to be added to scores
  at::Tensor reward_baselines{};   // fp32, what the greedy answer earns
  at::Tensor reward_restarts{};    // int64, of workers that scored: in the first row of each rank
  std::vector<std::string> uid{};  // of the prompt: rows that share it are a group
  std::vector<std::string> data_source{};
  std::vector<nlohmann::json> ground_truth{}, extra_info{}, reward_extra_info{};
  std::vector<std::string> images{};      // of the prompt (PromptEncoder::visual_prompt())
  std::vector<std::string> raw_prompt{};  // the messages of the prompt, JSON
  std::vector<std::string> agent_name{};  // of the loop that answers; "": the default one
  std::vector<nlohmann::json> replay{};   // exchanges that a session repeats
  std::vector<nlohmann::json>
      agent_info{};                       // of a session: {"num_turns", "exchanges", "extra_info"}
  std::vector<nlohmann::json> session{};  // one under way, as a packet (replicas/session_packet.h)

  // A row of an answer, on the rank that made it.
  struct Place {
    std::int64_t answer = 0;
    int rank = 0;
    std::int64_t row = 0;
    bool operator==(const Place&) const = default;
  };
  struct Kept {
    std::map<std::string, std::string> columns{};       // by their names here, those in the answer
    std::vector<Place> places{};                        // [rows]
    std::vector<std::shared_ptr<const void>> leases{};  // the answers are kept as long as one lives
  };
  std::vector<Kept> kept{};  // a column is in one at most, and then unknown here

  // Rows of these prompts and responses, as many of each; without responses: prompts alone. The
  // mask of the responses is all ones.
  static RolloutBatch of(std::span<const Tokens> prompts, std::span<const Tokens> responses = {});

  std::int64_t size() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
  std::int64_t length(std::int64_t row) const;
  std::int64_t prompt_length(std::int64_t row) const { return length(row) - response_length(row); }
  std::int64_t response_length(std::int64_t row) const;
  std::vector<std::int64_t> lengths() const;  // [rows]

  std::span<const std::int64_t> prompt(std::int64_t row) const;
  std::span<const std::int64_t> response(std::int64_t row) const;
  std::vector<at::Tensor> sequences() const;  // [rows] of [length], views
  // A row's part of a column of response tokens: [response length, ...], a view.
  at::Tensor response_of(const at::Tensor& column, std::int64_t row) const;

  // [response tokens] -> [rows, max_response_length], zeros behind the ends of responses.
  at::Tensor padded(const at::Tensor& column) const;
  // The inverse: drops what lies behind the ends.
  at::Tensor ragged(const at::Tensor& matrix) const;
  // [length, ...] of each row, where place t speaks of token t + 1 -> [response tokens, ...].
  at::Tensor responses_of(const std::vector<at::Tensor>& of_tokens) const;

  // The lengths alone: for the columns of an answer.
  RolloutBatch without_columns() const;
  // The lengths, tokens, images and these columns, as far as they are known or kept: what a call
  // reads.
  RolloutBatch only(std::initializer_list<at::Tensor RolloutBatch::*> columns) const;
  // Gives a batch of the same rows this column, if it is known or kept.
  void give(RolloutBatch& to, at::Tensor RolloutBatch::*column) const;
  void give(RolloutBatch& to, models::SamplingMask RolloutBatch::*column) const;
  // Makes `column` another name of one that is known or kept.
  void alias(at::Tensor RolloutBatch::*column, at::Tensor RolloutBatch::*of);
  // Each row as often as it is named, in that order.
  RolloutBatch select(std::span<const std::int64_t> rows) const;
  RolloutBatch slice(std::int64_t begin, std::int64_t end) const;
  // Batches without rows are skipped; the others have the same columns. Throws Error(kUsage).
  static RolloutBatch concat(std::span<const RolloutBatch> parts);
  // The columns that `answer` has of the same rows, also in place of columns that are here. Throws
  // Error(kUsage) for other rows.
  void take(const RolloutBatch& answer);

  // For another rank, without what is kept. int64 columns whose values fit travel as int32.
  std::vector<std::byte> to_bytes() const;
  // Throws Error(kCorrupt).
  static RolloutBatch from_bytes(std::span<const std::byte> bytes);
  // Messages hold these bytes (distckpt/base/cbor.h).
  friend void to_json(nlohmann::json& json, const RolloutBatch& batch);
  friend void from_json(const nlohmann::json& json, RolloutBatch& batch);
};

}  // namespace ferry::trainer
