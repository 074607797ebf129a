// Converts a checkpoint: opens the source, places the target, plans, copies, proves, publishes.
// Every direction and every change of layout is this one path.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "converter/open/amendment.h"
#include "converter/open/checkpoint.h"
#include "converter/progress.h"
#include "converter/stored/part.h"
#include "distckpt/elements/digest.h"
#include "distckpt/execute/executor.h"
#include "distckpt/execute/rendezvous.h"
#include "models/spec/parallel_config.h"

namespace ferry::converter {

enum class DryRun {
  kNo,
  kPlan,  // plan everything, touch nothing
  kRead,  // also read and digest the source
};

struct ConvertOptions {
  std::filesystem::path from{};
  const Checkpoint* memory = nullptr;  // the source, if it is in memory and not opened from `from`
  Amendment* amendment = nullptr;      // changes the source on its way
  std::filesystem::path to{};
  std::optional<Format> format{};                  // default: the other one
  std::optional<distckpt::Iteration> iteration{};  // of a Megatron source (default: the tracker's);
                                                   // else the target's (default: release)
  std::filesystem::path hf_config{};
  Selection selection{};                              // convert this part of the model
  models::ParallelConfig parallel{};                  // of a Megatron target
  std::vector<std::string> layout_flags{};            // of those that a user gave: "--tp"
  std::optional<MegatronLayout> megatron_layout{};    // default: the source's
  std::optional<distckpt::DType> dtype{};             // default: each tensor keeps its own
  bool keep_quantized = false;                        // no dequantisation
  std::optional<Quantization::Method> quantize{};     // weights, on the way
  PredictionLayers mtp = PredictionLayers::kKeep;     // kDrop: also without training state
  bool no_save_optim = false;                         // from Megatron to Megatron: the model alone
  std::optional<std::int64_t> max_shard_size{};       // of a Hugging Face target or an archive
  int threads = 0;                                    // 0: one per core
  std::int64_t max_memory = std::int64_t{192} << 20;  // of staging buffers
  DryRun dry_run = DryRun::kNo;
  bool overwrite = false;
  bool resume = false;
  bool follow_symlinks = false;  // take companions that lie outside of the checkpoint along
  distckpt::RankOfJob job{};     // of processes that share the conversion
};

struct FileSize {
  std::string name{};
  std::int64_t bytes = 0;
};

struct ConvertReport {
  Format source_format = Format::kHuggingFace;
  Format target_format = Format::kTorchDist;
  std::filesystem::path source{};
  std::filesystem::path target{};  // the folder that was published
  std::string family{};
  Part part{};                   // of the model, that the target holds
  std::int64_t num_tensors = 0;  // in Hugging Face terms
  std::int64_t num_parameters = 0;
  std::int64_t bytes = 0;
  std::int64_t num_pieces = 0;    // rectangular copies of the plan
  std::vector<FileSize> files{};  // that hold the tensors; of a planned archive before compression
  int threads = 0;
  std::int64_t staging_bytes = 0;
  int ranks = 1;  // processes that shared the work
  DryRun dry_run = DryRun::kNo;
  std::int64_t resumed_bytes = 0;
  bool redone = false;      // what an interrupted run had left was damaged, and was made anew
  double copy_seconds = 0;  // also made durable
  double proof_seconds = 0;
  // Each tensor's digest, re-read from the published files, is that of what was copied.
  bool proved = false;
  bool proof_from_disk = false;   // past the page cache; not on memory-backed file systems
  bool proof_from_store = false;  // of a target in S3
  std::string model_digest{};
  std::vector<distckpt::NonZeroPadding> nonzero_padding{};  // dropped
  std::vector<std::string> second_copies{};                 // tensors stored twice, verified equal
  std::int64_t num_training_state = 0;   // entries of optimizer and RNG that were left out
  std::int64_t num_adapter_tensors = 0;  // factors of a LoRA adapter that were left out
  // The training run that goes along: the form of its optimizer in the source
  // (param_state_sharding_type), the kinds of its state ("exp_avg", "exp_avg_sq", "param"; none
  // without an optimizer), and whether the RNG's state goes along.
  std::string optimizer_form{};
  std::vector<std::string> optimizer_kinds{};
  bool rng = false;
  // The reason why a Megatron target has no run_config.yaml for Megatron-Bridge; "" where it has
  // one.
  std::string run_config_problem{};
  // Things that could not go along, and why, that look wrong, or that readers will miss.
  std::vector<std::string> training_notes{};
};

// The format of a target that is options.from, changed: its own where that is written, else that of
// Hugging Face.
Format format_like_source(const ConvertOptions& options);

// Throws Error; nothing is published then, and nothing that was there is lost. The first of several
// ranks reports the conversion; the others' reports say nothing.
ConvertReport convert(const ConvertOptions& options, const ProgressFunction& progress = {});

}  // namespace ferry::converter
