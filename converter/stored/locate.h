// Recognises the checkpoint at a path: its format, and which folder it is. Only names, the tracker
// file and metadata.json are looked at.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>

#include "distckpt/storage/filenames.h"

namespace ferry::converter {

enum class Format : std::uint8_t {
  kHuggingFace,  // safetensors
  kTorchSave,    // pytorch_model.bin, one or many
  kTorchDist,    // Megatron-Core, torch_dist
  kLegacy,       // Megatron, a file for each rank (mp_rank_*)
  kDcp,          // torch.distributed.checkpoint: FSDP trainers, torch_dcp, fsdp_dtensor
  kZarr,         // Megatron-Core, its zarr backend
  kFsdp,         // FSDP states that each rank saved by itself, as verl does
  kArchive,      // Ferry's own, HDF5
};
std::string_view to_string(Format format);  // "huggingface", "torch_dist"
std::string_view describe(Format format);   // "Hugging Face", "Megatron-Core torch_dist"

// The hint of an error that an adapter was named for a model.
inline constexpr std::string_view kAdapterHint =
    "ferry merge BASE ADAPTER DST merges it, ferry convert ADAPTER DST --base BASE converts it";

// A checkpoint's place and format, before anything of it is read.
struct Location {
  Format format = Format::kHuggingFace;
  std::filesystem::path root{};    // as named by the user
  std::filesystem::path folder{};  // of the files: for Megatron the iteration's
  std::optional<distckpt::Iteration>
      iteration{};             // Megatron and verl, if a tracker or a folder's name says it
  std::filesystem::path hf{};  // of config.json and what travels with it, if not `folder`

  std::filesystem::path config_folder() const { return hf.empty() ? folder : hf; }

  // A configuration beside the tensors that is not to be replaced by another.
  bool has_own_config() const;
};

// Throws Error(kNotFound) that says what was looked for. `iteration` chooses one of a Megatron
// checkpoint's; default: the tracker's.
Location locate(const std::filesystem::path& path,
                std::optional<distckpt::Iteration> iteration = std::nullopt);

// True if `locate` would find a checkpoint without iterations there: one of Hugging Face, or an
// archive.
bool lacks_iterations(const std::filesystem::path& path);

// True if the folder is itself a checkpoint, not one that holds iterations.
bool holds_checkpoint(const std::filesystem::path& folder);

// True if the folder is an archive's.
bool is_archive(const std::filesystem::path& folder);

}  // namespace ferry::converter
