// A checkpoint and a chain of deltas as the source of a conversion: the target is any that a
// conversion writes. Base, changes and result are proved by their digests.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "converter/convert.h"
#include "converter/delta/delta.h"
#include "converter/open/amendment.h"

namespace ferry::converter {

class DeltaChain : public Amendment {
 public:
  // Throws Error(kLayout) where a delta does not follow the one before it.
  explicit DeltaChain(std::vector<std::unique_ptr<Delta>> deltas);
  // The deltas at the paths, as open_deltas() opens each.
  explicit DeltaChain(std::span<const std::filesystem::path> paths);

  const std::vector<std::unique_ptr<Delta>>& deltas() const { return deltas_; }

  distckpt::Digest identity() const override;
  std::vector<std::filesystem::path> sources() const override;
  void begin(Checkpoint& source) override;
  void amend(std::uint32_t tensor, std::int64_t element, std::span<std::byte> elements) override;
  bool in_order() const override;
  void finish(const std::vector<distckpt::Digest>& digests) override;

 private:
  std::vector<std::unique_ptr<Delta>> deltas_;
  std::vector<std::int64_t> element_sizes_;  // of the source's tensors
};

// Converts options.from, changed by the deltas. Throws as convert() does, and Error(kUsage) for
// options that would change the tensors' elements, or for --resume with deltas that are read in
// order.
ConvertReport apply_delta(ConvertOptions options,
                          DeltaChain& chain,
                          const ProgressFunction& progress = {});

struct VerifyDeltaOptions {
  std::filesystem::path base{};
  std::optional<distckpt::Iteration> iteration{};
  std::filesystem::path hf_config{};
  int threads = 0;
  std::int64_t max_memory = std::int64_t{192} << 20;
};

struct VerifyDeltaReport {
  std::int64_t num_tensors = 0;
  std::int64_t bytes = 0;
  std::string result_digest{};  // of the model
};

// Applies the deltas and writes nothing. Throws as apply_delta() does.
VerifyDeltaReport verify_delta(const VerifyDeltaOptions& options,
                               DeltaChain& chain,
                               const ProgressFunction& progress = {});

}  // namespace ferry::converter
