// Requests of one shape through the engine, in both numerical modes: tokens a second, and in how
// many tokens the log-probabilities differ, in their bytes, from the trainer's forward of the
// finished sequences, packed. Prints a JSON object for each mode.
//   rollout_bench CHECKPOINT --device cuda --batch 256 --input 128 --output 128 --verify
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "converter/alignment/model_files.h"
#include "converter/open/checkpoint.h"
#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "rollout/llm_engine.h"
#include "tests/bench/chrome_trace.h"

namespace ferry {
namespace {

using models::Alignment;
using Clock = std::chrono::steady_clock;

struct Flags {
  std::string checkpoint;
  std::string device = "cpu";
  std::vector<std::string> modes{"fast", "bitwise"};
  std::int64_t batch = 16;
  std::vector<std::int64_t> input{128};  // one length, or the ends of a range
  std::vector<std::int64_t> output{128};
  std::int64_t max_num_seqs = 512;
  std::int64_t max_num_batched_tokens = 16384;
  double temperature = 1;
  int rounds = 1;
  bool verify = false;
  bool eager = false;
  bool short_warmup = false;
  bool experts = false;
  std::string trace;
};

struct Request {
  std::vector<std::int64_t> tokens{};  // the prompt, then what was drawn
  std::int64_t prompt = 0;
  std::int64_t wanted = 0;
  std::vector<float> logprobs{};
};

std::vector<Request> make_requests(const Flags& flags, std::int64_t vocab, int round) {
  std::mt19937_64 random(static_cast<std::uint64_t>(round) + 1);
  const auto length = [&](const std::vector<std::int64_t>& range) {
    return std::uniform_int_distribution(range.front(), range.back())(random);
  };
  std::vector<Request> requests(static_cast<std::size_t>(flags.batch));
  for (auto& request : requests) {
    request.prompt = length(flags.input);
    request.wanted = length(flags.output);
    for (std::int64_t i = 0; i < request.prompt; ++i)
      request.tokens.push_back(
          static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(vocab)));
  }
  return requests;
}

// Drawn tokens whose log-probability has other bytes than the trainer's.
std::int64_t count_unequal(const models::GPTModel& model, const std::vector<Request>& requests) {
  const c10::InferenceMode no_gradients;
  constexpr std::int64_t kTokens = 32768;  // of a pack
  std::int64_t unequal = 0;
  for (std::size_t first = 0; first < requests.size();) {
    std::vector<at::Tensor> sequences;
    std::int64_t tokens = 0;
    std::size_t last = first;
    for (; last < requests.size() && (last == first || tokens < kTokens); ++last) {
      sequences.push_back(at::tensor(requests[last].tokens, at::kLong));
      tokens += sequences.back().size(0);
    }
    const models::SequencePartition batch(models::pack(sequences), model.mesh());
    const auto log_probs =
        model.log_probs(model.forward(batch), batch.tokens_behind(1)).log_probs.cpu();
    std::int64_t begin = 0;
    for (auto i = first; i < last; ++i) {
      const auto& request = requests[i];
      const auto expected = log_probs.narrow(0, begin + request.prompt - 1,
                                             static_cast<std::int64_t>(request.logprobs.size()));
      unequal += at::tensor(request.logprobs)
                     .view(at::kInt)
                     .ne(expected.view(at::kInt))
                     .sum()
                     .item<std::int64_t>();
      begin += static_cast<std::int64_t>(request.tokens.size());
    }
    first = last;
  }
  return unequal;
}

struct Timing {
  double seconds = 0;
  double first_token = 0;  // until the last request has one
  std::int64_t outputs = 0;
  std::int64_t steps = 0;
};

Timing serve(rollout::LLMEngine& engine,
             std::vector<Request>& requests,
             const Flags& flags,
             at::Device device) {
  Timing timing;
  models::synchronize(device);
  const auto begin = Clock::now();
  const auto since = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  for (std::size_t i = 0; i < requests.size(); ++i)
    engine.add_request(
        std::to_string(i), requests[i].tokens,
        {.temperature = flags.temperature, .ignore_eos = true, .max_tokens = requests[i].wanted});
  std::size_t started = 0;
  while (engine.has_unfinished()) {
    ++timing.steps;
    for (const auto& output : engine.step()) {
      if (output.error) throw Error(*output.error);
      auto& request = requests[std::stoul(output.request_id)];
      if (request.logprobs.empty() && ++started == requests.size()) timing.first_token = since();
      for (const auto& token : output.outputs.front().tokens) {
        request.tokens.push_back(token.token_id);
        request.logprobs.push_back(token.logprob);
        ++timing.outputs;
      }
    }
  }
  timing.seconds = since();
  return timing;
}

void run(const Flags& flags,
         const converter::Checkpoint& checkpoint,
         models::World& world,
         const std::string& mode) {
  const auto device = world.device();
  const models::ParallelState mesh(
      world,
      {.tensor_model_parallel_size = flags.experts ? 1 : world.size(),
       .expert_model_parallel_size = flags.experts ? world.size() : 1,
       .expert_tensor_parallel_size = flags.experts ? 1 : world.size()},
      "bench " + mode);
  const auto chunks =
      models::make_stage(checkpoint.map.config, mesh,
                         {.alignment = mode == "bitwise" ? Alignment::kBitwise : Alignment::kFast});
  converter::load_model(chunks, checkpoint, {.round = true});
  auto& model = *chunks.front();
  rollout::LLMEngine engine(model, {.max_num_seqs = flags.max_num_seqs,
                                    .max_num_batched_tokens = flags.max_num_batched_tokens,
                                    .max_model_len = flags.input.back() + flags.output.back() + 1,
                                    .gpu_memory_utilization = flags.verify ? 0.5 : 0.9,
                                    .enforce_eager = flags.eager});
  nlohmann::ordered_json report{
      {"program", "ferry"}, {"mode", mode}, {"ranks", world.size()}, {"batch", flags.batch}};
  Timing best{.seconds = 1e30};
  auto short_ones = flags;
  short_ones.output = {16};
  std::int64_t unequal = 0;
  std::int64_t compared = 0;
  for (int round = 0; round <= flags.rounds;
       ++round) {  // the first chooses kernels and captures graphs
    auto requests = make_requests(round == 0 && flags.short_warmup ? short_ones : flags,
                                  checkpoint.map.config.vocab_size, round);
    const auto timing = serve(engine, requests, flags, device);
    if (round > 0 && timing.seconds < best.seconds) best = timing;
    if (flags.verify) {
      unequal += count_unequal(model, requests);
      compared += timing.outputs;
    }
  }
  if (!flags.trace.empty()) {
    auto few = flags;
    few.output = {12};
    auto requests = make_requests(few, checkpoint.map.config.vocab_size, 99);
    const auto serve_few = [&] { serve(engine, requests, few, device); };
    if (world.rank() == 0)
      write_trace(serve_few, device, fmt::format("{}-{}.json", flags.trace, mode));
    else
      serve_few();
  }
  const auto stats = engine.stats();
  report["output_tokens_per_second"] = static_cast<double>(best.outputs) / best.seconds;
  report["decode_tokens_per_second"] =
      static_cast<double>(best.outputs - flags.batch) / (best.seconds - best.first_token);
  report["seconds"] = best.seconds;
  report["last_first_token_seconds"] = best.first_token;
  report["output_tokens"] = best.outputs;
  report["steps"] = best.steps;
  report["kv_blocks"] = stats.num_blocks;
  report["preemptions"] = stats.num_preemptions;
  report["peak_gib"] = static_cast<double>(models::peak_memory(device)) / (1LL << 30);
  if (flags.verify) report["unequal"] = fmt::format("{} of {}", unequal, compared);
  mesh.all().barrier();
  if (world.rank() == 0) fmt::print("{}\n", report.dump());
  std::fflush(stdout);
}

}  // namespace
}  // namespace ferry

int main(int argc, char** argv) {
  using namespace ferry;
  Flags flags;
  CLI::App app("Measures generation");
  app.add_option("checkpoint", flags.checkpoint, "A checkpoint, whose weights are loaded")
      ->required();
  app.add_option("--device", flags.device, "cpu or cuda");
  app.add_option("--modes", flags.modes, "fast, bitwise")->delimiter(',');
  app.add_option("--batch", flags.batch, "Requests, all there from the beginning");
  app.add_option("--input", flags.input, "Tokens of a prompt, or LEAST,MOST")->delimiter(',');
  app.add_option("--output", flags.output, "Tokens of an answer, or LEAST,MOST")->delimiter(',');
  app.add_option("--max-num-seqs", flags.max_num_seqs, "Sequences of a step");
  app.add_option("--max-num-batched-tokens", flags.max_num_batched_tokens, "Tokens of a step");
  app.add_option("--temperature", flags.temperature, "Of the draws; 0: greedy");
  app.add_option("--rounds", flags.rounds, "Of which the fastest counts");
  app.add_flag("--verify", flags.verify, "Compare log-probabilities with the trainer's");
  app.add_flag("--experts", flags.experts,
               "Ranks share out the experts, and each has all requests, not tensor parallel parts");
  app.add_flag("--short-warmup", flags.short_warmup, "Of 16 tokens each");
  app.add_flag("--enforce-eager", flags.eager, "No CUDA graphs");
  app.add_option("--trace", flags.trace,
                 "Write a short round of rank 0 in each mode as a Chrome trace, PREFIX-MODE.json");
  CLI11_PARSE(app, argc, argv);
  try {
    const auto checkpoint = converter::open(flags.checkpoint);
    auto world = models::World::from_environment({.device = at::Device(flags.device)});
    for (const auto& mode : flags.modes) run(flags, checkpoint, world, mode);
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  } catch (const std::exception& error) {
    std::fputs(error.what(), stderr);
    return 2;
  }
}
