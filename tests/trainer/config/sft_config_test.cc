#include "trainer/config/sft_config.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace sft_config_test {

using support::fails;
using Overrides = std::vector<std::string>;

const Overrides kLeastSft{"model.path=hf", "data.train_files=train.jsonl"};

std::vector<std::string> notes_of(Overrides more) {
  more.insert(more.begin(), kLeastSft.begin(), kLeastSft.end());
  std::vector<std::string> notes;
  load_sft_config({}, more, &notes);
  return notes;
}

SftConfig load_sft(Overrides more) {
  more.insert(more.begin(), kLeastSft.begin(), kLeastSft.end());
  return load_sft_config({}, more);
}

TEST(SftConfig, NeedsAModelAndRecordsAlone) {
  const auto config = load_sft({});
  EXPECT_EQ(config.model.path, "hf");
  EXPECT_EQ(config.data.train_files, std::vector<std::string>{"train.jsonl"});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"a_model_to_train", "model.path"},
                    [] { load_sft_config({}, {"data.train_files=a"}); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"records_to_train_on"},
                    [] { load_sft_config({}, {"model.path=a"}); }));
}

TEST(SftConfig, TakesTheFileAndThenTheOverrides) {
  const support::TempDir dir;
  distckpt::write_text(dir / "run.toml", R"(
[model]
path = "hf"
[engine]
tensor_model_parallel_size = 2
expert_tensor_parallel_size = 1
[data]
train_files = ["a.jsonl", "b.parquet"]
[optim]
lr = 3e-4
lr_decay_style = "cosine"
)");
  const auto config = load_sft_config(
      dir / "run.toml",
      {"optim.lr=1e-3", "optim.lr=2e-3", "engine.expert_tensor_parallel_size=null"});
  EXPECT_EQ(config.engine.parallel.tensor_model_parallel_size, 2);
  EXPECT_EQ(config.engine.parallel.expert_tensor_parallel_size, std::nullopt);
  EXPECT_TRUE(config.engine.uses_sequence_parallel());
  EXPECT_FALSE(load_sft({"engine.sequence_parallel=true"}).engine.uses_sequence_parallel());
  EXPECT_EQ(config.data.train_files.size(), 2U);
  EXPECT_EQ(config.optim.lr, 2e-3);
  EXPECT_EQ(config.optim.lr_decay_style, LrDecayStyle::kCosine);
}

TEST(SftConfig, PrintsTomlThatReadsBackToTheSame) {
  const support::TempDir dir;
  const auto config = load_sft(
      {"model.tokenizer_path=a \"b\"\\#", "data.val_files=[]", "engine.recompute_granularity=full",
       "engine.recompute_method=block", "engine.recompute_num_layers=2", "optim.lr=0.1",
       "optim.adam_eps=1e-15", "optim.lr_warmup_steps=0", "global_profiler.tool=nsys",
       "global_profiler.steps=[1, 2, 5]", "profiler.enable=true", "profiler.ranks=0",
       "trainer.logger=tensorboard"});
  distckpt::write_text(dir / "printed.toml", to_toml(config));
  EXPECT_EQ(load_sft_config(dir / "printed.toml", {}), config);
  EXPECT_NE(to_toml(config).find("\nlr = 0.1 "), std::string::npos) << to_toml(config);
}

TEST(SftConfig, SuggestsTheKeyThatAPeersNameIsNear) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"checkpoint.save_freq?"},
                    [] { load_sft({"trainer.save_freq=5"}); }));
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"optim.adam_beta1?"}, [] { load_sft({"optim.adam_beta=0.9"}); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"engine.tensor_model_parallel_size"},
                    [] { load_sft({"engine.tensor_parallel_size=2"}); }));
}

TEST(SftConfig, SavesAndValidatesEverySoManyStepsOrBehindEachEpoch) {
  const auto config = load_sft(
      {"checkpoint.save_freq=after_each_epoch", "trainer.test_freq=5", "data.val_files=v"});
  EXPECT_EQ(config.checkpoint.save_freq, Frequency{.after_each_epoch = true});
  EXPECT_EQ(config.trainer.test_freq, Frequency{.steps = 5});
  EXPECT_NE(to_toml(config).find("\nsave_freq = \"after_each_epoch\" "), std::string::npos);
  for (const char* value : {"sometimes", "-2", "2.5"})
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"checkpoint.save_freq: is"}, [&] {
      load_sft({std::string("checkpoint.save_freq=") + value});
    })) << value;
}

TEST(Frequency, ComesBehindStepsThatItDivides) {
  EXPECT_TRUE(Frequency{.steps = 3}.comes_behind(6, 0));
  EXPECT_FALSE(Frequency{.steps = 3}.comes_behind(7, 0));
  EXPECT_FALSE(Frequency{.steps = -1}.comes_behind(1, 1));
  EXPECT_TRUE(Frequency{.after_each_epoch = true}.comes_behind(8, 4));
  EXPECT_FALSE(Frequency{.after_each_epoch = true}.comes_behind(6, 4));
}

TEST(SftConfig, NamesTheLinesOfAContradiction) {
  const support::TempDir dir;
  distckpt::write_text(dir / "run.toml", "[engine]\nvirtual_pipeline_model_parallel_size = 2\n");
  EXPECT_TRUE(
      fails(ErrorKind::kUsage,
            {"[virtual_stages_need_stages]", "engine.virtual_pipeline_model_parallel_size = 2 (",
             "run.toml:2)", "engine.pipeline_model_parallel_size = 1 (the default)"},
            [&] { load_sft_config(dir / "run.toml", kLeastSft); }));
}

// For each rule, what breaks it and nothing else.
const std::vector<std::pair<std::string_view, Overrides>> kBroken{
    {"a_model_to_train", {"model.path="}},
    {"records_to_train_on", {"data.train_files=[]"}},
    {"virtual_stages_need_stages", {"engine.virtual_pipeline_model_parallel_size=2"}},
    {"one_way_to_share_layers_out",
     {"engine.pipeline_model_parallel_layout=Et|tL", "engine.num_layers_in_last_pipeline_stage=3"}},
    {"full_recompute_is_whole_layers", {"engine.recompute_granularity=full"}},
    {"full_recompute_is_whole_layers", {"engine.recompute_method=block"}},
    {"selective_recompute_has_modules", {"engine.recompute_modules=mlp"}},
    {"each_balancing_loss_has_a_coefficient", {"engine.moe_aux_loss_coeff=0.1"}},
    {"each_balancing_loss_has_a_coefficient", {"engine.moe_router_load_balancing_type=aux_loss"}},
    {"each_balancing_loss_has_a_coefficient",
     {"engine.moe_router_load_balancing_type=[\"aux_loss\", \"seq_aux_loss\"]",
      "engine.moe_aux_loss_coeff=[0.1, 0]"}},
    {"a_balancing_loss_is_named_once",
     {"engine.moe_router_load_balancing_type=[\"aux_loss\", \"aux_loss\"]",
      "engine.moe_aux_loss_coeff=[0.1, 0.2]"}},
    {"one_size_of_micro_batches", {"data.use_dynamic_bsz=false"}},
    {"a_sequence_fits_in_a_micro_batch",
     {"data.max_length=4097", "data.max_token_len_per_gpu=2048", "engine.context_parallel_size=2"}},
    {"micro_batches_make_a_batch",
     {"data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=3"}},
    {"lr_decays_downwards", {"optim.min_lr=1"}},
    {"one_length_of_the_warmup", {"optim.lr_warmup_steps=2", "optim.lr_warmup_steps_ratio=0.1"}},
    {"warmup_ends_before_decay", {"optim.lr_warmup_steps=5", "optim.lr_decay_steps=5"}},
    {"wsd_has_its_decay", {"optim.lr_decay_style=WSD"}},
    {"wsd_has_its_decay", {"optim.lr_wsd_decay_steps=5"}},
    {"weight_decay_changes_from_start_to_end", {"optim.weight_decay_incr_style=linear"}},
    {"weight_decay_changes_from_start_to_end", {"optim.start_weight_decay=0.1"}},
    {"retention_needs_checkpoints", {"checkpoint.save_freq=0", "checkpoint.keep_last=2"}},
    {"keep_every_adds_to_keep_last", {"checkpoint.save_freq=5", "checkpoint.keep_every=100"}},
    {"resume_path_has_a_path", {"checkpoint.resume_mode=resume_path"}},
    {"resume_path_has_a_path", {"checkpoint.resume_from_path=a"}},
    {"validation_needs_records", {"trainer.test_freq=5"}},
    {"retention_needs_checkpoints", {"checkpoint.save_freq=0", "checkpoint.save_hf=true"}},
    {"profiling_needs_a_tool", {"profiler.enable=true"}},
    {"profiled_ranks_have_steps",
     {"global_profiler.tool=torch", "profiler.enable=true", "profiler.ranks=[0]"}},
    {"profiled_ranks_have_steps", {"profiler.all_ranks=true"}},
    {"profiled_steps_have_ranks", {"global_profiler.tool=torch", "global_profiler.steps=[1]"}},
    {"one_way_to_name_ranks",
     {"global_profiler.tool=torch", "global_profiler.steps=[1]", "profiler.enable=true",
      "profiler.all_ranks=true", "profiler.ranks=[0]"}},
    {"discrete_profiles_do_not_continue",
     {"global_profiler.discrete=true", "global_profiler.profile_continuous_steps=true"}},
};

TEST(SftConfig, RefusesEachContradictionByItsName) {
  std::set<std::string_view> broken;
  for (const auto& [rule, overrides] : kBroken) {
    broken.insert(rule);
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"[" + std::string(rule) + "]"}, [&] {
      load_sft(overrides);
    })) << rule;
  }
  for (const auto& rule : sft_rules()) EXPECT_TRUE(broken.contains(rule.name)) << rule.name;
}

// Each is said with what it lacks, and not with it.
TEST(SftConfig, NotesWhatHasNoEffect) {
  struct Case {
    std::string key{};
    Overrides lacks{}, has{};
  };
  const std::vector<Case> cases{
      {"optim.min_lr", {"optim.min_lr=1e-6"}, {"optim.lr_decay_style=cosine"}},
      {"optim.lr_decay_steps", {"optim.lr_decay_steps=9"}, {"optim.lr_warmup_steps_ratio=0.5"}},
      {"optim.lr_warmup_init", {"optim.lr_warmup_init=1e-6"}, {"optim.lr_warmup_steps=3"}},
      {"optim.lr_wsd_decay_style",
       {"optim.lr_wsd_decay_style=linear"},
       {"optim.lr_decay_style=WSD", "optim.lr_wsd_decay_steps=5"}},
      {"data.shuffle_buffer_bytes",
       {"data.shuffle_buffer_bytes=5", "data.shuffle=false"},
       {"data.shuffle=true"}},
      {"engine.grad_offload", {"engine.grad_offload=true"}, {"data.val_files=a"}},
  };
  for (const auto& [key, lacks, has] : cases) {
    const auto notes = notes_of(lacks);
    ASSERT_EQ(notes.size(), 1) << key;
    EXPECT_TRUE(notes[0].starts_with("note       " + key + ": no effect: ")) << notes[0];
    auto both = lacks;
    both.insert(both.end(), has.begin(), has.end());
    EXPECT_TRUE(notes_of(both).empty()) << key;
  }
  EXPECT_TRUE(notes_of({"optim.min_lr=0", "engine.grad_offload=false"}).empty());
}

TEST(SftConfig, TakesAKeyByItsFormerName) {
  EXPECT_EQ(load_sft({"data.global_batch_size=6"}).data.train_batch_size, 6);
  EXPECT_EQ(load_sft({"data.train_batch_size=5"}).data.train_batch_size, 5);
}

TEST(SftConfig, NotesWhatVerlSetsBesideWhatSwitchesItOff) {
  EXPECT_EQ(notes_of({}), std::vector<std::string>{});
  EXPECT_EQ(notes_of({"data.micro_batch_size_per_gpu=3"}),
            std::vector<std::string>{
                "note       data.micro_batch_size_per_gpu: no effect: use_dynamic_bsz packs by "
                "tokens"});
  EXPECT_EQ(notes_of({"data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=4",
                      "data.max_token_len_per_gpu=8192", "global_profiler.tool=torch"})
                .size(),
            2U);
}

TEST(SftConfig, SaysWhatVerlsOtherKeysAreHere) {
  for (const auto& [key, hint] : std::vector<std::pair<std::string, std::string_view>>{
           {"trainer.max_ckpt_to_keep", "checkpoint.keep_last"},
           {"optim.betas", "optim.adam_beta1: its second number is adam_beta2"},
           {"optim.min_lr_ratio", "optim.min_lr: a rate"},
           {"optim.main_grads_dtype", "engine.grad_reduce_in_fp32"},
           {"model.lora_rank", "ferry merge"},
           {"model.lora.rank", "ferry merge"},
           {"engine.strategy", "_parallel_size"},
           {"engine.fsdp_size", "_parallel_size"},
           {"engine.param_offload", "engine.optimizer_offload"},
           {"trainer.n_gpus_per_node", "torchrun"},
           {"model.enable_gradient_checkpointing", "engine.recompute_granularity"},
       })
    EXPECT_TRUE(fails(ErrorKind::kUsage, {key + ": there is no such key", hint}, [&] {
      load_sft({key + "=1"});
    })) << key;
}

TEST(SftConfig, TakesVariablesOfTheChatTemplate) {
  const support::TempDir dir;
  distckpt::write_text(dir / "run.toml",
                       "[data.apply_chat_template_kwargs]\nenable_thinking = true\nn.m = 3\n");
  auto config = load_sft_config(dir / "run.toml", kLeastSft);
  const ConfigValue::Table inner{{"m", {std::int64_t{3}}}};
  EXPECT_EQ(config.data.apply_chat_template_kwargs,
            (ConfigValue::Table{{"enable_thinking", {true}}, {"n", {inner}}}));
  distckpt::write_text(dir / "printed.toml", to_toml(config));
  EXPECT_EQ(load_sft_config(dir / "printed.toml", {}), config);
  const std::string kwargs = "data.apply_chat_template_kwargs";
  config = load_sft({kwargs + ".a=1", kwargs + ".b={c = \"d\"}", kwargs + ".a=null"});
  EXPECT_NE(to_toml(config).find("\napply_chat_template_kwargs = {b = {c = \"d\"}} "),
            std::string::npos)
      << to_toml(config);
  EXPECT_EQ(load_sft({kwargs + ".a=1", kwargs + "={}"}), load_sft({}));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {kwargs + ": is 1, a table is expected"},
                    [&] { load_sft({kwargs + "=1"}); }));
}

TEST(SftConfig, KnowsTheDataParallelSizeOfAWorld) {
  const auto config =
      load_sft({"engine.tensor_model_parallel_size=2", "engine.pipeline_model_parallel_size=2",
                "engine.expert_model_parallel_size=4", "engine.expert_tensor_parallel_size=1"});
  const auto dp = [&](int ranks) { return data_parallel_size(config.engine.parallel, ranks); };
  EXPECT_EQ(dp(16), 4);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"engine: 6 ranks", "tensor_model_parallel_size 2"},
                    [&] { dp(6); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"engine: 4 ranks", "expert_model_parallel_size 4"},
                    [&] { dp(4); }));
}

// docs/training/configuration.md ends with the reference; where a field changes, paste what this
// prints.
TEST(SftConfig, IsDocumentedFieldByField) {
  const char* root = std::getenv("FERRY_SOURCE_ROOT");
  ASSERT_NE(root, nullptr) << "FERRY_SOURCE_ROOT names the checkout";
  const auto text =
      distckpt::read_text(std::filesystem::path(root) / "docs/training/configuration.md");
  const auto reference = sft_config_reference();
  EXPECT_NE(text.find(reference), std::string::npos) << reference;
}

}  // namespace sft_config_test
}  // namespace ferry::trainer
