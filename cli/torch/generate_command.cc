#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/report/text.h"
#include "cli/torch/answers.h"
#include "cli/torch/commands.h"
#include "cli/torch/prompts.h"
#include "cli/torch/rollout_flags.h"
#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/distributed/messages.h"
#include "rollout/vision/visual_prompt.h"

namespace ferry::cli {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

struct GenerateFlags {
  RolloutFlags rollout{};
  rollout::SamplingParams sampling{.max_tokens = 256};
  std::vector<std::string> prompts{};
  std::vector<std::string> prompt_ids{};
  std::string input{};
  std::string system{};
  bool chat = false;
  bool json = false;
  bool quiet = false;
};

std::string read_standard_input() {
  return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
}

// The same on every rank: a launcher gives standard input to the first.
std::vector<Prompt> read_prompts(const GenerateFlags& flags, const RolloutModel& model) {
  std::optional<rollout::text::ChatTemplate> chat;
  if (flags.chat) chat.emplace(model.chat_template());
  PromptReader reader({.tokenizer = model.tokenizer(),
                       .chat_template = chat ? &*chat : nullptr,
                       .system = flags.system,
                       .params = flags.sampling,
                       .images = [&] { return model.image_reader(); }});
  for (const auto& text : flags.prompts) reader.add_text(text);
  for (const auto& ids : flags.prompt_ids) reader.add_ids(ids);
  const bool nothing = flags.prompts.empty() && flags.prompt_ids.empty() && flags.input.empty();
  if (nothing || flags.input == "-") {
    const auto& all = model.mesh().all();
    const auto text = models::broadcast(all, all.rank() == 0 ? read_standard_input() : "", 0);
    if (nothing) {
      reader.add_text(text);
    } else {
      reader.add_lines(text, "standard input");
    }
  } else if (!flags.input.empty()) {
    reader.add_file(flags.input);
  }
  require(!flags.chat || reader.applies_template(), ErrorKind::kUsage,
          "--chat: has no effect: all prompts are token ids");
  require(flags.system.empty() || reader.has_system(), ErrorKind::kUsage,
          "--system: has no effect: all prompts are messages or token ids");
  return reader.take();
}

// Ranks that step together stop together: they ask each other now and then.
class Cancellation {
 public:
  explicit Cancellation(const models::ParallelState& mesh)
      : group_(mesh.shape().ep() > 1 ? mesh.all() : mesh.tp()) {}

  bool requested() {
    constexpr std::int64_t kStepsBetween = 16;
    if (group_.size() == 1) return stop_requested();
    if (num_asked_++ % kStepsBetween != 0) return false;
    const auto answers = models::gather(group_, stop_requested());
    return std::ranges::find(answers, true) != answers.end();
  }

 private:
  const models::ProcessGroup& group_;
  std::int64_t num_asked_ = 0;
};

struct Totals {
  std::int64_t output_tokens = 0;
  std::int64_t prompt_tokens = 0;
  std::vector<double> first_tokens{};  // seconds
  double seconds = 0;
  bool cancelled = false;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(
    Totals, output_tokens, prompt_tokens, first_tokens, seconds, cancelled)

// The answers of a data parallel rank.
struct Share {
  Totals totals{};
  std::string answers{};  // JSON, whose members keep their order: [[number, answer], ...]
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Share, totals, answers)

// This rank's share of the prompts: those whose number, by data parallel ranks, leaves its own.
class Generation {
 public:
  Generation(const RolloutModel& model, const std::vector<Prompt>& prompts)
      : model_(model),
        prompts_(prompts),
        engine_(model.model(), model.engine_options()),
        processor_(engine_, model.tokenizer()) {}

  // `take`: of the prompt's number and its answer, as soon as it is complete.
  template <typename Take>
  Totals run(const rollout::OutputProcessor::OnText& on_text, Take&& take) {
    const auto begin = Clock::now();
    Totals totals;
    const auto all = [&](const std::vector<rollout::Answer>& answers) {
      for (const auto& answer : answers) {
        const auto number = numbers_.at(answer.request_id);
        count(answer, totals);
        take(number, json_of(prompts_[static_cast<std::size_t>(number)], answer));
      }
    };
    add_requests(take);
    Cancellation cancellation(model_.mesh());
    bool stop = false;
    while (!stop && processor_.has_unfinished()) {
      all(processor_.step(on_text));
      stop = cancellation.requested();
    }
    const auto aborted = processor_.abort_all(on_text);
    totals.cancelled = !aborted.empty();
    all(aborted);
    const auto stats = engine_.stats();
    totals.prompt_tokens = stats.prompt_tokens;
    totals.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    return totals;
  }

  std::int64_t cache_bytes() const {
    return engine_.stats().num_blocks * rollout::KVCache::bytes_per_block(model_.model());
  }

 private:
  template <typename Take>
  void add_requests(Take&& take) {
    const auto& mesh = model_.mesh();
    for (auto i = mesh.coordinates().dp; i < static_cast<int>(prompts_.size());
         i += mesh.shape().dp()) {
      const auto& prompt = prompts_[static_cast<std::size_t>(i)];
      if (prompt.error) {
        take(i, json_of(prompt, {.request_id = prompt.id, .error = prompt.error}));
        continue;
      }
      numbers_[prompt.id] = i;
      const auto refused = add_request(prompt);
      if (refused) take(i, json_of(prompt, *refused));
    }
  }

  std::optional<rollout::Answer> add_request(const Prompt& prompt) {
    std::shared_ptr<const rollout::VisualPrompt> visual;
    try {
      if (!prompt.images.empty())
        visual = rollout::make_visual_prompt(*model_.model().config().vision, prompt.token_ids,
                                             prompt.images);
    } catch (const Error& error) {
      return rollout::Answer{.request_id = prompt.id, .error = error};
    }
    return processor_.add_request(prompt.id, prompt.token_ids, prompt.params, visual);
  }

  ordered_json json_of(const Prompt& prompt, const rollout::Answer& answer) const {
    return answer_json(prompt, answer, model_.model().config(), model_.tokenizer() != nullptr);
  }

  static void count(const rollout::Answer& answer, Totals& totals) {
    for (const auto& completion : answer.completions)
      totals.output_tokens += static_cast<std::int64_t>(completion.tokens.size());
    if (answer.seconds_to_first_token > 0)
      totals.first_tokens.push_back(answer.seconds_to_first_token);
  }

  const RolloutModel& model_;
  const std::vector<Prompt>& prompts_;
  rollout::LLMEngine engine_;
  rollout::OutputProcessor processor_;
  std::map<std::string, std::int64_t> numbers_;  // of prompts, by id
};

std::int64_t most_host_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return std::int64_t{usage.ru_maxrss} * 1024;
}

void say_totals(const Totals& totals, std::int64_t cache_bytes, at::Device device) {
  const auto say = [](const char* what, const std::string& text) {
    fmt::print(stderr, "{:<10} {}\n", what, text);
  };
  say("generated",
      fmt::format("{} tokens in {}: {:.1f} tokens/s; {} tokens of prompts{}",
                  format_count(totals.output_tokens), format_seconds(totals.seconds),
                  static_cast<double>(totals.output_tokens) / totals.seconds,
                  format_count(totals.prompt_tokens), totals.cancelled ? "; cancelled" : ""));
  auto first = totals.first_tokens;
  if (!first.empty()) {
    std::ranges::sort(first);
    say("first", first.size() == 1
                     ? fmt::format("token after {:.1f} ms", 1e3 * first[0])
                     : fmt::format("tokens after {:.1f} ms (median), {:.1f} ms (last)",
                                   1e3 * first[first.size() / 2], 1e3 * first.back()));
  }
  auto memory = fmt::format("{} of KV cache, {} in this process", format_bytes(cache_bytes),
                            format_bytes(most_host_memory()));
  if (device.is_cuda())
    memory += fmt::format(", {} on the GPU", format_bytes(models::peak_memory(device)));
  say("memory", memory);
}

// Prints the answers [[number, answer], ...] of all data parallel ranks, on the first. -> their
// totals.
Totals gather(const models::ProcessGroup& dp,
              const Totals& mine,
              const ordered_json& answers,
              AnswerPrinter& printer) {
  Totals sums{.seconds = mine.seconds};
  const Share share{mine, answers.dump(-1, ' ', false, ordered_json::error_handler_t::replace)};
  for (const auto& theirs : models::gather(dp, share)) {
    sums.output_tokens += theirs.totals.output_tokens;
    sums.prompt_tokens += theirs.totals.prompt_tokens;
    sums.cancelled = sums.cancelled || theirs.totals.cancelled;
    std::ranges::copy(theirs.totals.first_tokens, std::back_inserter(sums.first_tokens));
    if (dp.rank() != 0) continue;
    for (const auto& answer : ordered_json::parse(theirs.answers))
      printer.add(answer[0].get<std::int64_t>(), answer[1]);
  }
  return sums;
}

// -> on the first rank, whether each prompt has its answer.
bool generate_on_rank(const GenerateFlags& flags, models::World& world) {
  RolloutModel model(world, flags.rollout);
  const auto prompts = read_prompts(flags, model);
  Generation generation(model, prompts);
  const bool is_first = world.rank() == 0;
  if (is_first && !flags.quiet) {
    if (const auto family = model.family_by_arguments(); !family.empty())
      fmt::print(stderr, "{:<10} {}\n", "family", family);
    fmt::print(stderr, "{:<10} {} in {}\n", "loaded", flags.rollout.checkpoint,
               format_seconds(model.seconds_to_load()));
  }
  const auto& mesh = model.mesh();
  const bool alone = mesh.shape().dp() == 1;
  const bool streams = is_first && alone && !flags.json && prompts.size() == 1 &&
                       prompts[0].params.n == 1 && model.tokenizer() != nullptr &&
                       !prompts[0].error;
  AnswerPrinter printer(flags.json);
  auto mine = ordered_json::array();  // [number, answer], for the first rank
  rollout::OutputProcessor::OnText on_text;
  if (streams)
    on_text = [](const auto&, auto, std::string_view text) {
      fmt::print("{}", text);
      std::fflush(stdout);
    };
  auto totals = generation.run(on_text, [&](std::int64_t number, ordered_json answer) {
    if (!alone) {
      mine.push_back({number, std::move(answer)});
    } else if (streams && !answer.contains("error")) {
      fmt::print("\n");
    } else if (is_first) {
      printer.add(number, std::move(answer));
    }
  });
  if (!alone && mesh.coordinates().tp == 0) totals = gather(mesh.dp(), totals, mine, printer);
  if (is_first && !flags.quiet) say_totals(totals, generation.cache_bytes(), world.device());
  if (totals.cancelled && is_first)
    fmt::print(stderr, "error: cancelled: answers that were not finished say \"abort\"\n");
  return printer.num_refused() == 0 && !totals.cancelled;
}

void generate(const GenerateFlags& flags) {
  flags.sampling.verify();
  require(flags.system.empty() || flags.chat, ErrorKind::kUsage,
          "--system: is a message of a chat, and --chat was not asked for");
  require(flags.json || !flags.sampling.logprobs, ErrorKind::kUsage,
          "--logprobs: has no effect without --json, which tells them");
  require(flags.json || !flags.rollout.engine.enable_return_routed_experts, ErrorKind::kUsage,
          "--enable-return-routed-experts: has no effect without --json, which tells them");
  catch_stop_signals();
  bool all_answered = true;
  run_mesh(flags.rollout.mesh, flags.rollout.data_parallel_size, [&](models::World& world) {
    const bool answered = generate_on_rank(flags, world);
    if (world.rank() == 0) all_answered = answered;
  });
  if (!all_answered) throw CLI::RuntimeError(kTrouble);
}

}  // namespace

void add_generate(CLI::App& app) {
  const auto flags = std::make_shared<GenerateFlags>();
  auto* const command = app.add_subcommand("generate", "Generate text with a checkpoint's model");
  add_rollout(*command, flags->rollout);
  add_tokenizer(*command, flags->rollout);
  command->add_option("prompts", flags->prompts,
                      "Texts to go on from. Default: what standard input says");
  command
      ->add_option("--prompt-ids", flags->prompt_ids,
                   "A prompt in token ids: 1,2,3; repeatable. No tokenizer is needed")
      ->allow_extra_args(false);
  command->add_option("--input", flags->input,
                      "Prompts in a .jsonl or .parquet file; - for JSON lines on standard input");
  command->add_flag("--chat", flags->chat, "Prompts are what a user says: apply the chat template");
  command->add_option("--system", flags->system,
                      "With --chat: the system's message to prompts that are text");
  add_sampling(*command, flags->sampling);
  command->add_flag("--json", flags->json, "Print a line of JSON for each prompt on stdout");
  command->add_flag(
      "--enable-return-routed-experts", flags->rollout.engine.enable_return_routed_experts,
      "With --json: also the experts of all tokens but the last, of models that have some");
  command->add_flag("-q,--quiet", flags->quiet, "Say nothing of speed and memory");
  command->footer(
      "Ranks are those that torchrun, srun or mpirun started; of one process on the host they are "
      "threads.\nExit status: 0 each prompt has its answer, 2 trouble: the others are answered.");
  command->callback([flags] { generate(*flags); });
}

}  // namespace ferry::cli
