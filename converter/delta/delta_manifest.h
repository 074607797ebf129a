// The record of a delta of Ferry's own form, ferry-delta.json: the tensors of both ends and their
// digests, and the files that travel along and changed. docs/formats/delta.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"
#include "distckpt/elements/digest.h"

namespace ferry::converter {

inline constexpr std::string_view kDeltaManifest = "ferry-delta.json";
inline constexpr std::string_view kPatchFile = "patch.safetensors";  // for vLLM; names no base
inline constexpr std::string_view kDeltaTensors = "delta.safetensors";
inline constexpr std::string_view kDeltaFiles = "files";

struct DeltaTensor {
  std::string name{};  // Hugging Face's
  distckpt::DType dtype = distckpt::DType::kBF16;
  distckpt::Shape shape{};
  distckpt::Digest base{};
  distckpt::Digest result{};
  std::int64_t num_changed = 0;  // elements
};

struct DeltaFile {
  std::string name{};
  std::int64_t size = 0;
  distckpt::Digest digest{};
};

struct DeltaManifest {
  bool keep_quantized = false;         // both ends are quantised; their tensors are as they are
  std::vector<DeltaTensor> tensors{};  // all weights, also those that did not change
  std::vector<DeltaFile> files{};

  std::string base_digest() const;  // of the models
  std::string result_digest() const;
};

std::string write_delta_manifest(const DeltaManifest& manifest);  // JSON

// Throws Error(kCorrupt) also where the tensors' digests are not those of the models.
DeltaManifest parse_delta_manifest(std::string_view text, std::string_view source);

}  // namespace ferry::converter
