// What lies at a path: which format, and which folder of it. Names alone are looked at, the tracker
// file and metadata.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>

#include "distckpt/filenames.h"

namespace ferry::converter {

enum class Format : std::uint8_t {
  kHuggingFace,  // safetensors
  kTorchSave,    // pytorch_model.bin, one or many
  kTorchDist,    // Megatron-Core, torch_dist
  kLegacy,       // Megatron, a file for each rank (mp_rank_*)
  kArchive,      // Ferry's own, HDF5
};
std::string_view to_string(Format format);  // "huggingface", "torch_dist"

// Where a checkpoint lies and what it is, before anything of it is read.
struct Location {
  Format format = Format::kHuggingFace;
  std::filesystem::path root{};    // as named by the user
  std::filesystem::path folder{};  // of the files: for Megatron the iteration's
  std::optional<distckpt::Iteration>
      iteration{};  // Megatron, if a tracker or the folder's name says it

  // The only configuration that it can have lies in `folder`.
  bool has_own_config() const;
};

// Throws Error(kNotFound) that says what was looked for. `iteration` chooses one of a Megatron
// checkpoint's; default: the tracker's.
Location locate(const std::filesystem::path& path,
                std::optional<distckpt::Iteration> iteration = std::nullopt);

// True if `locate` would find a checkpoint without iterations there: one of Hugging Face, or an
// archive.
bool lacks_iterations(const std::filesystem::path& path);

// True if the folder is an archive's.
bool is_archive(const std::filesystem::path& folder);

}  // namespace ferry::converter
