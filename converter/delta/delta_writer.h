// The forms in which a delta is written. A writer is handed all stretches of both ends, and then
// writes its files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "converter/delta/delta_manifest.h"
#include "converter/delta/spool.h"

namespace ferry::converter {

// A stretch of a tensor, which begins at a multiple of kTaskBytes.
struct ChangedStretch {
  std::uint32_t tensor = 0;
  std::int64_t offset = 0;  // bytes
  std::span<const std::byte> base{};
  std::span<const std::byte> result{};
  bool equal = false;
};

class DeltaWriter {
 public:
  virtual ~DeltaWriter() = default;

  // The number of elements that changed. Thread-safe.
  virtual std::int64_t add(const ChangedStretch& stretch) = 0;

  // True if add() wants the stretches of a tensor from front to back, by one thread.
  virtual bool in_order() const { return false; }

  // The names of the files that write() makes, known from the start: the one without which it is no
  // delta last.
  virtual std::vector<std::filesystem::path> files() const = 0;

  // Writes them, durably. `manifest` has the tensors that add() named by their index, with the
  // digests of both ends.
  virtual void write(const std::filesystem::path& folder, const DeltaManifest& manifest) = 0;
};

// `tensors` are those that add() names by their index: names, dtypes and shapes. All writers keep
// what they have encoded in `spool`, which outlives them.
std::unique_ptr<DeltaWriter> make_ferry_writer(const std::vector<DeltaTensor>& tensors,
                                               Spool& spool);

// A version of slime's folder, with its encoding "xor". `also` names tensors under a second name
// that the base's files have, by the index of the first.
std::unique_ptr<DeltaWriter> make_slime_writer(
    const std::vector<DeltaTensor>& tensors,
    std::vector<std::pair<std::string, std::uint32_t>> also,
    std::int64_t version,
    Spool& spool);

// Flat indices and values of the elements that changed: the fields of vLLM's
// CheckpointWeightPatch.
std::unique_ptr<DeltaWriter> make_patch_writer(const std::vector<DeltaTensor>& tensors,
                                               Spool& spool);

}  // namespace ferry::converter
