// A manifest: the digest of every tensor, in Hugging Face terms, and of every file of a checkpoint.
// docs/formats/manifest.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "converter/stored/part.h"
#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"
#include "distckpt/elements/digest.h"
#include "distckpt/plan/tensor_map.h"

namespace ferry::converter {

struct ManifestTensor {
  std::string name{};
  distckpt::DType dtype = distckpt::DType::kBF16;
  distckpt::Shape shape{};
  distckpt::Role role = distckpt::Role::kWeight;  // kWeight or kDerived
  distckpt::Digest digest{};
};

struct ManifestFile {
  std::string path{};  // relative to the checkpoint
  std::int64_t size = 0;
  distckpt::Digest digest{};
};

struct Manifest {
  std::string format{};  // of the checkpoint: "huggingface", "torch_dist"
  std::string model_digest{};
  Part part{};  // of the model, that the tensors are; empty: all of it
  std::vector<ManifestTensor> tensors{};
  std::vector<ManifestFile> files{};
};

std::string write_manifest(const Manifest& manifest);  // JSON
Manifest parse_manifest(std::string_view text, std::string_view source);

// The differences of `found` from `expected`, a line each. Files are compared if both are of one
// format, unless told otherwise.
std::vector<std::string> compare_manifests(const Manifest& expected,
                                           const Manifest& found,
                                           bool with_files);

}  // namespace ferry::converter
