// A delta that lies somewhere, in Ferry's form or slime's: the changes that make one checkpoint of
// another, tensor by tensor in Hugging Face terms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "distckpt/elements/digest.h"

namespace ferry::converter {

struct Checkpoint;

enum class DeltaForm {
  kFerry,
  kSlime,  // a version of slime's /pull_weights: weight_v000001
};

struct ChangedTensor {
  std::string name{};
  std::optional<std::int64_t> num_changed{};  // elements; slime's form does not say
  std::int64_t stored_bytes = 0;
};

struct DeltaSummary {
  DeltaForm form = DeltaForm::kFerry;
  std::filesystem::path path{};
  std::vector<ChangedTensor> tensors{};  // those that changed
  std::int64_t stored_bytes = 0;         // of all files of the delta

  // Ferry's form only.
  std::string base_digest{};  // of the models
  std::string result_digest{};
  std::int64_t num_tensors = 0;  // also those that did not change
  std::int64_t model_bytes = 0;
  std::vector<std::string> files{};  // that travel along and changed
  bool keep_quantized = false;

  // slime's form only.
  std::int64_t version = 0;
  std::int64_t base_version = 0;
  std::string encoding{};
};

class Delta {
 public:
  virtual ~Delta() = default;

  const DeltaSummary& summary() const { return summary_; }
  const distckpt::Digest& identity() const { return identity_; }  // of what its headers say

  // The checkpoint whose tensors will be changed, in the order by which apply() names them. Begins
  // anew. Throws Error(kLayout) naming a tensor that only one side has, or that is another there.
  virtual void begin(const Checkpoint& base) = 0;

  // Makes the new bytes of the old ones, from byte `offset` of a tensor on. Called once for each
  // stretch of kTaskBytes of each tensor. Thread-safe. Throws Error(kCorrupt) for a damaged delta,
  // and Error(kLayout) for bytes that are not those that the delta was made from.
  virtual void apply(std::uint32_t tensor, std::int64_t offset, std::span<std::byte> bytes) = 0;

  // After all of apply(). Throws Error(kCorrupt) naming a tensor of which another number of
  // elements changed than the delta says.
  virtual void require_applied() const = 0;

  // The digests of all tensors as they became. Throws Error(kCorrupt) naming one that is not as the
  // delta says.
  virtual void require_result(const std::vector<distckpt::Digest>& digests) const = 0;

  // Files that travel along and are others than the base's: name and content.
  virtual std::map<std::string, std::string> files() const { return {}; }

  // True if a tensor is changed from front to back: what comes out of turn waits in memory, and no
  // run goes on in the middle.
  virtual bool in_order() const { return false; }

 protected:
  DeltaSummary summary_;
  distckpt::Digest identity_{};
};

std::unique_ptr<Delta> open_ferry_delta(const std::filesystem::path& folder);
std::unique_ptr<Delta> open_slime_delta(const std::filesystem::path& folder);

// The deltas at a path, in order: one, or all versions of a folder of slime's. Throws
// Error(kNotFound).
std::vector<std::unique_ptr<Delta>> open_deltas(const std::filesystem::path& path);

// Throws Error(kLayout) where a delta does not begin where the one before it ends.
void require_chain(const std::vector<std::unique_ptr<Delta>>& deltas);

}  // namespace ferry::converter
