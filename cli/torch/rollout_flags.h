// The options that all subcommands that generate have, of a model, its engine and its sampling, and
// the model itself, loaded from a checkpoint of any format.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/torch/commands.h"
#include "converter/open/amendment.h"
#include "converter/open/checkpoint.h"
#include "converter/stored/locate.h"
#include "distckpt/storage/source_files.h"
#include "models/distributed/parallel_state.h"
#include "models/gpt_model.h"
#include "models/vision/vision_model.h"
#include "rollout/llm_engine.h"
#include "rollout/text/chat_template.h"
#include "rollout/text/tokenizer/tokenizer.h"
#include "rollout/vision/prompt_images.h"

namespace ferry::cli {

struct RolloutFlags {
  std::string checkpoint{};
  std::optional<distckpt::Iteration> iteration{};
  std::filesystem::path hf_config{};
  std::string tokenizer{};  // a folder; empty: the checkpoint's own
  std::string load_format = "auto";
  std::string dtype = "bf16";
  MeshFlags mesh{};
  int data_parallel_size = 0;  // 0: as many as the ranks allow
  rollout::EngineOptions engine{};
  std::optional<double> gpu_memory_utilization{};  // of a GPU alone
  std::string kv_cache_memory{};                   // of the host alone
  bool no_enable_prefix_caching = false;
  bool no_enable_chunked_prefill = false;
};
void add_rollout(CLI::App& command, RolloutFlags& flags);
void add_tokenizer(CLI::App& command, RolloutFlags& flags);
// Refuses numbers below it.
CLI::Validator at_least(double least);
void add_sampling(CLI::App& command, rollout::SamplingParams& params);
// Adds the flags that say how tokens are drawn, none that says when an answer ends.
void add_sampling_shape(CLI::App& command, rollout::SamplingParams& params);

// Gives a model that is only measured weights that depend on nothing but the model.
void fill_with_dummies(const models::GPTModel& model);

// The files of a model's weights.
struct WeightFiles {
  converter::Location checkpoint{};
  std::filesystem::path hf_config{};
  std::vector<std::string> deltas{};  // applied to it in turn
  // The checkpoint's as they were when it was opened. Null: they are opened for the first time.
  std::shared_ptr<const distckpt::SourceFiles> files{};
};
struct OpenedWeights {
  WeightFiles from{};
  std::function<void()> load{};  // in place
};

class RolloutModel {
 public:
  // Called by all ranks of the mesh: `ranks`, in the world, or all if there are none. Throws Error
  // for what of the flags does not fit the checkpoint.
  RolloutModel(models::World& world, const RolloutFlags& flags, std::vector<int> ranks = {});

  models::GPTModel& model() const { return *chunks_.front(); }
  const models::ParallelState& mesh() const { return mesh_; }
  const rollout::EngineOptions& engine_options() const { return engine_options_; }
  const rollout::text::Tokenizer* tokenizer() const { return tokenizer_.get(); }  // or null
  // Throws Error(kNotFound) if the checkpoint has no chat template.
  rollout::text::ChatTemplate chat_template() const;
  // Nothing if there is none.
  std::optional<rollout::text::ChatTemplate> find_chat_template(bool with_tools) const;
  // The files that the weights came from; nothing with dummy weights.
  std::optional<WeightFiles> weight_files() const;
  // Opens another checkpoint of the same model and deltas that follow it. Throws Error if they do
  // not fit, before anything has changed. Called by all ranks of the mesh.
  OpenedWeights open_weights(const WeightFiles& from) const;
  double seconds_to_load() const { return seconds_to_load_; }
  // converter::family_by_arguments of the checkpoint.
  std::string family_by_arguments() const;
  // Nothing if images in prompts are not computed. Throws Error if the checkpoint does not say how
  // they are read.
  std::optional<rollout::ImageReader> image_reader() const;

 private:
  std::unique_ptr<models::VisionModel> load_tower(const converter::Checkpoint& checkpoint,
                                                  converter::Amendment* amendment) const;
  // In place. A checkpoint of the language model alone leaves the tower.
  void load_weights(const converter::Checkpoint& checkpoint, converter::Amendment* amendment) const;

  std::filesystem::path hf_config_;
  std::optional<converter::Checkpoint> checkpoint_;  // nothing with dummy weights
  models::ParallelState mesh_;
  std::vector<std::unique_ptr<models::GPTModel>> chunks_;
  rollout::text::ModelFiles files_;
  std::unique_ptr<rollout::text::Tokenizer> tokenizer_;
  rollout::EngineOptions engine_options_;
  double seconds_to_load_ = 0;
};

}  // namespace ferry::cli
