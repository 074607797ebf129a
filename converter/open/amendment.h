// A change of a checkpoint's tensors on their way: what is read is amended before it is digested
// and written. A checkpoint and its amendment are a source of any conversion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "converter/open/checkpoint.h"
#include "distckpt/elements/digest.h"

namespace ferry::converter {

class Amendment {
 public:
  virtual ~Amendment() = default;

  // Tells it from every other: an interrupted conversion goes on with the same one alone.
  virtual distckpt::Digest identity() const = 0;

  // The files and folders that it was read from: who may not read them may not read the result.
  virtual std::vector<std::filesystem::path> sources() const = 0;

  // Looks at the source before anything of it is read; may change the files that travel along.
  // Throws Error if the amendment is not of this checkpoint.
  virtual void begin(Checkpoint& source) = 0;

  // Changes elements [element, element + n) of source.tensors[tensor], row-major. Each is handed
  // over once, in stretches that begin at a multiple of kTaskBytes. Thread-safe.
  virtual void amend(std::uint32_t tensor, std::int64_t element, std::span<std::byte> elements) = 0;

  // The most that one thread takes in amend() and where it reads what the amendment computes, in
  // bytes. Known after begin().
  virtual std::int64_t thread_memory() const { return 0; }

  // True if elements of a tensor that are handed over out of turn are held until it is theirs.
  virtual bool in_order() const { return false; }

  // Takes the digests of all tensors as they became, before anything is published. Throws
  // Error(kCorrupt) naming one that is not as the amendment says.
  virtual void finish(const std::vector<distckpt::Digest>& digests) = 0;
};

}  // namespace ferry::converter
