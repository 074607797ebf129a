#include "trainer/config/sft_config.h"

#include "distckpt/base/error.h"
#include "trainer/config/config_table.h"
#include "trainer/config/sft_rules.h"

namespace ferry::trainer {
namespace {

void list_offload(ConfigTable& table, EngineConfig& c) {
  table.add("grad_offload", c.grad_offload, "gradients lie on the host while the run validates");
  table.add("optimizer_offload", c.optimizer_offload,
            "the state of the optimizer lies on the host but while it updates");
}

void list(ConfigTable& table, DataConfig& c) {
  table.section("data", "Records (docs/training_data.md) and how they become batches");
  table.add("train_files", c.train_files, "files of records: .jsonl, .parquet");
  table.add("val_files", c.val_files, "those to validate on");
  table.add("messages_key", c.messages_key, "the column of conversations");
  table.add("prompt_key", c.prompt_key, "where there is none: the column of prompts");
  table.add("response_key", c.response_key, "and that of the responses to them");
  table.add("tools_key", c.tools_key, "the column of tools");
  table.add("shuffle", c.shuffle, "each epoch has an order of its own, out of trainer.seed");
  table.add("shuffle_buffer_bytes", c.shuffle_buffer_bytes,
            "bytes of records that are shuffled, and in memory, at a time", at_least(0));
  table.add("malformed_rows", c.malformed_rows, "skip and count them, or stop at the first");
  table.add("max_length", c.max_length, "tokens of a sequence", at_least(1));
  table.add("truncation", c.truncation,
            "what becomes of longer ones: an error, or they lose tokens at that end");
  table.add("global_batch_size", c.global_batch_size, "sequences of a step, over all ranks",
            at_least(1));
  table.add("use_dynamic_bsz", c.use_dynamic_bsz,
            "micro-batches are packed up to a number of tokens, not of sequences");
  table.add("max_token_len_per_gpu", c.max_token_len_per_gpu,
            "tokens of a micro-batch per rank of its context parallel group; not set: as many as "
            "max_length needs",
            at_least(1));
  table.add("micro_batch_size_per_gpu", c.micro_batch_size_per_gpu,
            "without use_dynamic_bsz: sequences of a micro-batch", at_least(1));
}

ConfigTable table_of(SftConfig& config) {
  ConfigTable table;
  list_model(table, "model", "The model that training starts from", config.model);
  list_tokenizer(table, config.model);
  list_mesh(table, "engine", "The mesh of ranks, and what is traded for memory", config.engine);
  list_recompute(table, config.engine);
  list_offload(table, config.engine);
  list(table, config.data);
  list(table, "optim", config.optim);
  list(table, "checkpoint", config.checkpoint);
  list(table, "trainer", config.trainer);
  list(table, "global_profiler", config.global_profiler);
  list(table, "profiler", config.profiler);
  return table;
}

}  // namespace

SftConfig load_sft_config(const std::filesystem::path& file,
                          const std::vector<std::string>& overrides) {
  SftConfig config;
  auto table = table_of(config);
  for (const auto& entry : read_entries(file, overrides)) table.set(entry);
  require_consistent(config, sft_rules(), table);
  return config;
}

std::string to_toml(const SftConfig& config) {
  auto copy = config;
  return table_of(copy).toml();
}

std::string sft_config_reference() {
  SftConfig defaults;
  return table_of(defaults).markdown();
}

}  // namespace ferry::trainer
