// The configuration of a run of supervised fine-tuning: one TOML file, overrides on the command
// line. Names are verl's and Megatron-Core's; docs/training/configuration.md has what they mean,
// out of the same list that reads them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "trainer/config/config_rules.h"
#include "trainer/config/config_value.h"
#include "trainer/config/run_sections.h"

namespace ferry::trainer {

struct DataConfig {
  std::vector<std::string> train_files{};
  std::vector<std::string> val_files{};
  std::string messages_key = "messages";
  std::string prompt_key = "prompt";
  std::string response_key = "response";
  std::string tools_key = "tools";
  std::string image_key = "images";
  std::string enable_thinking_key = "enable_thinking";
  std::optional<bool> enable_thinking_default{};  // not set: the template decides
  ConfigValue::Table apply_chat_template_kwargs{};
  bool shuffle = true;
  std::int64_t shuffle_buffer_bytes = std::int64_t{256} << 20;
  OnMalformed malformed_rows = OnMalformed::kSkip;
  int max_length = 1024;
  Truncation truncation = Truncation::kError;
  int train_batch_size = 256;
  bool use_dynamic_bsz = true;
  std::optional<int> max_token_len_per_gpu{};  // default: chosen by the plan of the run
  std::optional<int> micro_batch_size_per_gpu{};
  bool operator==(const DataConfig&) const = default;
};

struct SftConfig {
  ModelConfig model{};
  EngineConfig engine{};
  DataConfig data{};
  OptimConfig optim{};
  CheckpointSection checkpoint{};
  TrainerConfig trainer{};
  GlobalProfilerConfig global_profiler{};
  ProfilerConfig profiler{};
  bool operator==(const SftConfig&) const = default;

  // Takes as many tokens as the longest sequence needs where no size is set.
  MicroBatchSize micro_batches() const;
};

// The rules of a run of supervised fine-tuning, and the keys that have no effect in some.
const ConfigRules<SftConfig>& sft_rules();
const IneffectiveKeys<SftConfig>& ineffective_in_sft();

// Reads the file, then the overrides ("optim.lr=1e-5"), in their order; without a file (empty), the
// overrides alone. Throws Error(kUsage) for keys that are none, values of another type or out
// of range, without effect, and contradictions, each with file and line. `notes` takes lines about
// keys without effect that are none of these.
SftConfig load_sft_config(const std::filesystem::path& file,
                          const std::vector<std::string>& overrides,
                          std::vector<std::string>* notes = nullptr);

// Every key with its value and meaning: TOML that loads to the same.
std::string to_toml(const SftConfig& config);
ConfigValues values_of(const SftConfig& config);

// Every key with its default and meaning, for the documentation.
std::string sft_config_reference();

}  // namespace ferry::trainer
