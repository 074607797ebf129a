// A LoRA adapter beside the checkpoint that it is merged into: which tensors it changes, and the
// factors of each change, whatever form the adapter has.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "converter/bridge/checkpoint_parts.h"
#include "distckpt/elements/digest.h"

namespace ferry::converter {

// A matrix of the model that the adapter changes: a tensor, one of those that a tensor stacks, or
// rows of one. Nothing of it is in memory.
struct AdaptedTensor {
  std::string tensor{};        // of the model: "model.layers.0.self_attn.q_proj.weight"
  std::int64_t first_row = 0;  // of the tensor's rows, stack after stack
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t rank = 0;    // 0: the adapter has no factors, but its own rows or the base's
  float scaling = 1;        // of the product
  bool transposed = false;  // the product of the factors is [columns, rows]
  // Names of the factors: a is [num_experts * rank, in], b is [out, rank * num_experts].
  std::string a{};
  std::string b{};
  std::int64_t first_out = 0;  // row of b, or of `whole`
  // Rows of a belong to an expert after the other, columns of b take turns.
  std::int64_t expert = 0;
  std::int64_t num_experts = 1;
  std::optional<std::string> magnitude{};  // of DoRA
  std::optional<std::string> base{};       // the base's weight, which PEFT saves beside factors
  std::optional<std::string> whole{};      // the adapter's rows that take the place of the base's

  bool changes() const { return rank > 0 || whole; }
};

// W becomes W + scaling * left right; with magnitudes each row is then scaled to that length.
struct LowRankChange {
  std::vector<float> left{};       // [rows, rank]
  std::vector<float> right{};      // [rank, columns]
  std::vector<float> magnitude{};  // [rows], or none
};

struct TiedTensors;

class AdapterChanges {
 public:
  // Reads configuration and headers of an adapter of PEFT, verl or Megatron-Bridge; `alpha` is
  // OpenAdapterOptions::alpha. Throws Error(kLayout) for a kind of adapter
  // that is not merged (biases, fan_in_fan_out), naming the setting, and Error(kCorrupt) for
  // factors that do not fit together.
  AdapterChanges(const std::filesystem::path& path,
                 const Checkpoint& base,
                 const std::optional<double>& alpha);

  const std::vector<AdaptedTensor>& tensors() const { return tensors_; }
  const distckpt::Digest& identity() const { return identity_; }

  // Reads the factors, as fp32. Thread-safe.
  LowRankChange load(const AdaptedTensor& tensor) const;

  // Elements [first, first + count) of tensor.whole, else of tensor.base, as fp32. Thread-safe.
  std::vector<float> saved_elements(const AdaptedTensor& tensor,
                                    std::int64_t first,
                                    std::int64_t count) const;

  void require_unchanged() const { parts_->whole()->files->require_unchanged(); }

 private:
  using Values = std::shared_ptr<const std::vector<float>>;

  const distckpt::Shape& shape_of(const std::string& name) const;
  bool are_tied(const TiedTensors& tied) const;
  Values whole(const std::string& name) const;
  std::vector<float> read(const std::string& name, const std::optional<distckpt::Box>& box) const;

  std::unique_ptr<const CheckpointParts> parts_;
  std::vector<AdaptedTensor> tensors_;
  distckpt::Digest identity_{};
  // Factors that were read last: experts share them.
  mutable std::mutex mutex_;
  mutable std::deque<std::pair<std::string, Values>> recent_;
};

}  // namespace ferry::converter
