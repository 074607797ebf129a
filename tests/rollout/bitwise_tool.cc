// Counts the log-probabilities of a long random load that have other bytes in the trainer's
// forward, and the tokens that go to other experts in it. Prints one JSON object for each model. On
// a GPU as on the host.
//   bitwise_tool TOKENS [cuda]
#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "tests/support/models/engine_load.h"
#include "tests/support/models/tiny_training.h"

namespace ferry {
namespace {

nlohmann::json run(const std::string& family, std::int64_t tokens, at::Device device) {
  const bool is_gpt_oss = family == "gpt_oss";
  auto config = support::tiny_config({.family = is_gpt_oss ? "mixtral" : family,
                                      .head_dim = 64,
                                      .hidden = 256,
                                      .ffn = 512,
                                      .vocab = 1000,
                                      .experts = 8,
                                      .rope_dim = 16,
                                      .v_dim = 64});
  config.max_position_embeddings = 2048;
  if (is_gpt_oss) {
    support::make_gpt_oss(config);
    config.sliding_window = 100;
  }
  models::World world({.device = device});
  const models::ParallelState mesh(world, {}, "tool");
  models::GPTModel model(config, mesh, models::stage_chunks(config, {}, 0)[0],
                         {.alignment = models::Alignment::kBitwise});
  support::fill_parameters(model, 1);
  nlohmann::json report{{"family", family}};
  std::int64_t drawn = 0;
  std::int64_t alone = 0;
  std::int64_t packed = 0;
  std::int64_t routes = 0;
  std::int64_t preemptions = 0;
  std::int64_t cached = 0;
  std::int64_t steps = 0;
  for (std::uint64_t round = 0; drawn < tokens; ++round) {
    const auto rounds_of = [&](std::int64_t a, std::int64_t b, std::int64_t c) {
      return round % 3 == 0 ? a : round % 3 == 1 ? b : c;
    };
    rollout::LLMEngine engine(model, {.max_num_seqs = rounds_of(4, 64, 512),
                                      .max_num_batched_tokens = rounds_of(48, 300, 4000),
                                      .num_blocks = rounds_of(14, 150, 700),
                                      .enable_return_routed_experts = config.num_moe_experts > 0});
    const auto samples = support::run_load(
        engine, config.vocab_size,
        {.tokens = std::min<std::int64_t>(tokens - drawn, rounds_of(2000, 10000, 30000)),
         .longest_prompt = 300,
         .longest_output = 200,
         .arrivals = rounds_of(2, 8, 100),
         .seed = round});
    for (const auto& sample : samples) drawn += static_cast<std::int64_t>(sample.output.size());
    alone += support::count_unequal(model, samples, 1);
    packed += support::count_unequal(model, samples, 7);
    if (config.num_moe_experts > 0) routes += support::count_other_routes(model, samples);
    preemptions += engine.stats().num_preemptions;
    cached += engine.stats().cached_tokens;
    steps += engine.stats().steps;
  }
  report.update({{"tokens", drawn},
                 {"unequal_alone", alone},
                 {"unequal_packed", packed},
                 {"other_routes", routes},
                 {"steps", steps},
                 {"preemptions", preemptions},
                 {"cached_tokens", cached}});
  return report;
}

}  // namespace
}  // namespace ferry

int main(int argc, char** argv) {
  using namespace ferry;
  if (argc != 2 && argc != 3) return 2;
  bool equal = true;
  try {
    for (const char* const family : {"gpt_oss", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"}) {
      const auto report = run(family, std::atoll(argv[1]), at::Device(argc == 3 ? argv[2] : "cpu"));
      std::printf("%s\n", report.dump().c_str());
      std::fflush(stdout);
      equal = equal && report["unequal_alone"] == 0 && report["unequal_packed"] == 0 &&
              report["other_routes"] == 0;
    }
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  }
  return equal ? 0 : 1;
}
