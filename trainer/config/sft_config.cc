#include "trainer/config/sft_config.h"

#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "trainer/config/config_table.h"

namespace ferry::trainer {
namespace {

void list(ConfigTable& table, DataConfig& c) {
  table.section("data", "Records (docs/training/data.md) and how they become batches");
  table.add_path("train_files", c.train_files, "files of records: .jsonl, .parquet");
  table.add_path("val_files", c.val_files, "files of records for validation: .jsonl, .parquet");
  table.add("messages_key", c.messages_key, "the column of conversations");
  table.add("prompt_key", c.prompt_key, "the column of prompts, if there are no conversations");
  table.add("response_key", c.response_key,
            "the column of responses, if there are no conversations");
  table.add("tools_key", c.tools_key, "the column of tools");
  table.add("image_key", c.image_key, "the column of images, for models that also see");
  table.add("enable_thinking_key", c.enable_thinking_key,
            "the column that says enable_thinking to the chat template");
  table.add("enable_thinking_default", c.enable_thinking_default,
            "the same for rows without it; not set: the template decides");
  table.add("apply_chat_template_kwargs", c.apply_chat_template_kwargs,
            "variables of the chat template: apply_chat_template_kwargs.enable_thinking=false");
  table.add("shuffle", c.shuffle, "permute the records of each epoch, by trainer.seed");
  table.add("shuffle_buffer_bytes", c.shuffle_buffer_bytes,
            "bytes of records that are in memory and shuffled at a time", at_least(0));
  table.add("malformed_rows", c.malformed_rows,
            "skip: skip and count malformed rows; fail: stop at the first one");
  table.add("max_length", c.max_length, "tokens of a sequence", at_least(1));
  table.add(
      "truncation", c.truncation,
      "longer sequences: an error, or lose tokens at the left or right end, or in the middle");
  table.add("train_batch_size", c.train_batch_size, "sequences of a step, over all ranks",
            at_least(1));
  table.former("data.global_batch_size", "data.train_batch_size");
  table.add("use_dynamic_bsz", c.use_dynamic_bsz,
            "pack micro-batches up to a number of tokens, not of sequences");
  table.add_auto("max_token_len_per_gpu", c.max_token_len_per_gpu,
                 "tokens of a micro-batch per context parallel rank; auto: what fits a GPU, up to "
                 "16384 or what max_length needs; on the host what max_length needs",
                 at_least(1));
  table.add("micro_batch_size_per_gpu", c.micro_batch_size_per_gpu,
            "sequences of a micro-batch, without use_dynamic_bsz", at_least(1));
}

ConfigTable table_of(SftConfig& config) {
  ConfigTable table;
  list_model(table, "model", "The model that training starts from", config.model);
  list_tokenizer(table, config.model);
  list_mesh(table, "engine", "The mesh of ranks, and time traded for memory", config.engine);
  list_training(table, config.engine);
  list_load_balancing(table, config.engine);
  list_vision_tower(table, config.engine);
  table.add_auto("grad_offload", config.engine.grad_offload,
                 "give the gradients' memory away while the run validates; auto: false, since "
                 "training needs it anyway");
  list(table, config.data);
  list(table, "optim", config.optim);
  list(table, "checkpoint", config.checkpoint);
  list(table, "trainer", config.trainer);
  list(table, "global_profiler", config.global_profiler);
  list(table, "profiler", config.profiler);
  return table;
}

}  // namespace

MicroBatchSize SftConfig::micro_batches() const {
  MicroBatchSize size{.use_dynamic_bsz = data.use_dynamic_bsz,
                      .max_token_len_per_gpu = data.max_token_len_per_gpu,
                      .micro_batch_size_per_gpu = data.micro_batch_size_per_gpu};
  if (size.use_dynamic_bsz && !size.max_token_len_per_gpu)
    size.max_token_len_per_gpu =
        distckpt::ceil_div(data.max_length, engine.parallel.context_parallel_size);
  return size;
}

SftConfig load_sft_config(const std::filesystem::path& file,
                          const std::vector<std::string>& overrides,
                          std::vector<std::string>* notes) {
  SftConfig config;
  auto table = table_of(config);
  table.set_all(read_entries(file, overrides));
  require_consistent(config, sft_rules(), table);
  auto found = find_ineffective(config, ineffective_in_sft(), table);
  if (notes != nullptr) *notes = std::move(found);
  return config;
}

std::string to_toml(const SftConfig& config) {
  auto copy = config;
  return table_of(copy).toml();
}

ConfigValues values_of(const SftConfig& config) {
  auto copy = config;
  return table_of(copy).values();
}

std::string sft_config_reference() {
  SftConfig defaults;
  return table_of(defaults).markdown();
}

}  // namespace ferry::trainer
