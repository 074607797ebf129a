// Digests a checkpoint: every tensor in Hugging Face terms, and every file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "converter/manifest.h"
#include "converter/open/checkpoint.h"
#include "converter/progress.h"

namespace ferry::converter {

struct DigestOptions {
  std::filesystem::path path{};
  std::optional<distckpt::Iteration> iteration{};
  std::filesystem::path hf_config{};
  std::vector<std::filesystem::path> leave_out{};  // manifests that lie in the checkpoint itself
  bool keep_quantized = false;                     // digest blocks and their scales as they are
  Part part{};  // digest this part of what is there, and no files
  bool files = true;
  int threads = 0;
  std::int64_t max_memory = std::int64_t{192} << 20;
};

// The digest of a model of these tensors: of its weights, without derived tensors and padding.
std::string model_digest(const std::vector<distckpt::ModelTensor>& tensors,
                         const std::vector<distckpt::Digest>& digests);

// The manifest of a checkpoint whose tensors have these digests, without its files.
Manifest manifest_of(const Checkpoint& checkpoint, const std::vector<distckpt::Digest>& digests);

Manifest digest_checkpoint(const DigestOptions& options, const ProgressFunction& progress = {});

// A checkpoint held against a manifest.
struct ManifestCheck {
  Manifest found{};
  bool files_compared = false;             // both have some, and are of one format
  std::vector<std::string> differences{};  // a line each
};

// Digests the part of the checkpoint that the manifest is of. `all_files`: also files that are not
// compared.
ManifestCheck check_manifest(DigestOptions options,
                             const Manifest& expected,
                             bool all_files,
                             const ProgressFunction& progress = {});

}  // namespace ferry::converter
