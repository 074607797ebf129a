#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cli/commands.h"
#include "cli/report/text.h"
#include "cli/torch/commands.h"
#include "cli/torch/device_rates.h"
#include "cli/torch/request_mix.h"
#include "cli/torch/rollout_flags.h"
#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/distributed/messages.h"

namespace ferry::cli {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

struct BenchRolloutFlags {
  RolloutFlags rollout{};
  rollout::SamplingParams sampling{};
  MixOptions mix{};
  int num_warmups = 1;
  bool json = false;
  bool quiet = false;
};

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// The cost of a replay: this rank's share of the requests.
struct Replay {
  std::vector<double> first{};    // seconds from arrival to the first token
  std::vector<double> between{};  // seconds between tokens of one answer
  std::vector<double> whole{};    // seconds from arrival to the last token
  std::int64_t prompt_tokens = 0;
  std::int64_t cached_tokens = 0;
  std::int64_t output_tokens = 0;
  std::int64_t steps = 0;
  std::int64_t preemptions = 0;
  double seconds = 0;  // from the first arrival to the last token
  double busy = 0;     // of these, in steps
  double bound = 0;    // what the steps take at best
};

// Requests in flight, as their tokens come.
class Replayer {
 public:
  Replayer(const RolloutModel& model, const models::Roofline& roofline)
      : model_(model), roofline_(roofline), engine_(model.model(), model.engine_options()) {}

  Replay run(const std::vector<MixRequest>& mix, const rollout::SamplingParams& params) {
    Replay replay;
    flights_.clear();
    const auto before = engine_.stats();
    last_prompt_tokens_ = before.prompt_tokens;
    begin_ = Clock::now();
    std::size_t next = 0;
    while (true) {
      const auto arrived = num_arrived(mix, next);
      for (; next < arrived; ++next) add(mix[next], next, params);
      if (engine_.has_unfinished()) {
        step(replay);
      } else if (next == mix.size()) {
        break;
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      require(!stop_requested(), ErrorKind::kCancelled, "stopped on request");
    }
    const auto after = engine_.stats();
    replay.seconds = seconds_between(begin_, Clock::now());
    replay.prompt_tokens = after.prompt_tokens - before.prompt_tokens;
    replay.cached_tokens = after.cached_tokens - before.cached_tokens;
    replay.steps = after.steps - before.steps;
    replay.preemptions = after.num_preemptions - before.num_preemptions;
    return replay;
  }

  rollout::EngineStats stats() const { return engine_.stats(); }

 private:
  struct Flight {
    Clock::time_point arrival{};
    std::int64_t prompt_len = 0;
    std::map<std::int64_t, std::pair<Clock::time_point, std::int64_t>> samples{};  // last, tokens
  };

  // Ranks that step together add together: the first one's clock counts.
  std::size_t num_arrived(const std::vector<MixRequest>& mix, std::size_t next) const {
    if (next == mix.size() || mix.back().arrival == 0) return mix.size();
    const auto now = seconds_between(begin_, Clock::now());
    auto arrived = next;
    while (arrived < mix.size() && mix[arrived].arrival <= now) ++arrived;
    const auto& mesh = model_.mesh();
    const auto& group = mesh.shape().ep() > 1 ? mesh.all() : mesh.tp();
    return models::broadcast(group, arrived, 0);
  }

  void add(const MixRequest& request, std::size_t number, rollout::SamplingParams params) {
    const auto& mesh = model_.mesh();
    if (static_cast<int>(number) % mesh.shape().dp() != mesh.coordinates().dp) return;
    params.max_tokens = request.output_len;
    params.ignore_eos = true;
    const auto id = std::to_string(number);
    flights_[id] = {.arrival = begin_ + std::chrono::duration_cast<Clock::duration>(
                                            std::chrono::duration<double>(request.arrival)),
                    .prompt_len = static_cast<std::int64_t>(request.prompt_token_ids.size())};
    engine_.add_request(id, request.prompt_token_ids, params);
  }

  void step(Replay& replay) {
    const auto begin = Clock::now();
    const auto outputs = engine_.step();
    const auto now = Clock::now();
    models::StepWork work;
    for (const auto& output : outputs) {
      if (output.error) throw Error(*output.error);
      auto& flight = flights_.at(output.request_id);
      for (const auto& sample : output.outputs) take(flight, sample, now, work, replay);
    }
    const auto prompt_tokens = engine_.stats().prompt_tokens;
    work.rows += prompt_tokens - last_prompt_tokens_;
    last_prompt_tokens_ = prompt_tokens;
    replay.bound += roofline_.seconds(work);
    replay.busy += seconds_between(begin, now);
  }

  static void take(Flight& flight,
                   const rollout::CompletionOutput& sample,
                   Clock::time_point now,
                   models::StepWork& work,
                   Replay& replay) {
    const auto count = static_cast<std::int64_t>(sample.tokens.size());
    const auto [found, is_first] = flight.samples.try_emplace(sample.index, now, 0);
    auto& [last, tokens] = found->second;
    work.drawn += count;
    replay.output_tokens += count;
    if (is_first) {  // of the prompt's last row
      replay.first.push_back(seconds_between(flight.arrival, now));
    } else {
      work.rows += count;
      work.cached_keys += flight.prompt_len + tokens;
      for (std::int64_t i = 0; i < count; ++i)
        replay.between.push_back(seconds_between(last, now) / static_cast<double>(count));
    }
    last = now;
    tokens += count;
    if (sample.finish_reason != rollout::FinishReason::kNone)
      replay.whole.push_back(seconds_between(flight.arrival, now));
  }

  const RolloutModel& model_;
  const models::Roofline& roofline_;
  rollout::LLMEngine engine_;
  std::map<std::string, Flight> flights_;
  std::int64_t last_prompt_tokens_ = 0;
  Clock::time_point begin_{};
};

// Puts the data parallel ranks together: sums, and the time of the slowest.
Replay whole_replay(const models::ProcessGroup& dp, const Replay& mine) {
  const nlohmann::json report{
      {"first", mine.first},
      {"between", mine.between},
      {"whole", mine.whole},
      {"counts", {mine.prompt_tokens, mine.cached_tokens, mine.output_tokens, mine.preemptions}},
      {"seconds", mine.seconds}};
  Replay all{.steps = mine.steps, .busy = mine.busy, .bound = mine.bound};
  for (const auto& theirs : models::gather(dp, report)) {
    const auto append = [&](std::vector<double>& times, const char* name) {
      for (const double seconds : theirs[name]) times.push_back(seconds);
    };
    append(all.first, "first");
    append(all.between, "between");
    append(all.whole, "whole");
    const auto& counts = theirs["counts"];
    all.prompt_tokens += counts[0].get<std::int64_t>();
    all.cached_tokens += counts[1].get<std::int64_t>();
    all.output_tokens += counts[2].get<std::int64_t>();
    all.preemptions += counts[3].get<std::int64_t>();
    all.seconds = std::max(all.seconds, theirs["seconds"].get<double>());
  }
  return all;
}

// Milliseconds; nearest rank.
ordered_json percentiles(std::vector<double> seconds) {
  std::ranges::sort(seconds);
  const auto at = [&](double share) {
    if (seconds.empty()) return 0.0;
    const auto rank = std::ceil(share * static_cast<double>(seconds.size()));
    return 1e3 * seconds[static_cast<std::size_t>(std::max(rank, 1.0)) - 1];
  };
  const double sum = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  return {{"mean", seconds.empty() ? 0.0 : 1e3 * sum / static_cast<double>(seconds.size())},
          {"p50", at(0.5)},
          {"p90", at(0.9)},
          {"p99", at(0.99)},
          {"max", at(1)}};
}

ordered_json report_json(const BenchRolloutFlags& flags,
                         const RolloutModel& model,
                         const models::Roofline& roofline,
                         const Replay& replay,
                         const rollout::EngineStats& stats) {
  const auto rate = [&](std::int64_t count) { return static_cast<double>(count) / replay.seconds; };
  const auto num_requests = static_cast<std::int64_t>(replay.whole.size());
  return {{"model", flags.rollout.checkpoint},
          {"family", model.model().config().family},
          {"alignment", flags.rollout.mesh.alignment},
          {"dtype", flags.rollout.dtype},
          {"device", flags.rollout.mesh.device},
          {"tp", model.mesh().shape().tp()},
          {"dp", model.mesh().shape().dp()},
          {"ep", model.mesh().shape().ep()},
          {"answers", num_requests},
          {"seconds", replay.seconds},
          {"prompt_tokens", replay.prompt_tokens},
          {"cached_tokens", replay.cached_tokens},
          {"output_tokens", replay.output_tokens},
          {"output_tokens_per_second", rate(replay.output_tokens)},
          {"tokens_per_second", rate(replay.output_tokens + replay.prompt_tokens)},
          {"answers_per_second", rate(num_requests)},
          {"time_to_first_token_ms", percentiles(replay.first)},
          {"inter_token_latency_ms", percentiles(replay.between)},
          {"answer_ms", percentiles(replay.whole)},
          {"steps", replay.steps},
          {"preemptions", replay.preemptions},
          {"num_blocks", stats.num_blocks},
          {"roofline",
           {{"share", replay.busy > 0 ? replay.bound / replay.busy : 0.0},
            {"bound_seconds", replay.bound},
            {"busy_seconds", replay.busy},
            {"bytes_per_second", roofline.rates().bytes_per_second},
            {"flops_per_second", roofline.rates().flops_per_second},
            {"weight_bytes", roofline.weight_bytes()}}}};
}

std::string report_text(const ordered_json& report) {
  std::string text;
  const auto line = [&](const char* name, const std::string& what) {
    text += fmt::format("{:<10} {}\n", name, what);
  };
  const auto number = [&](const char* name) { return report[name].get<double>(); };
  const auto count = [&](const char* name) {
    return format_count(report[name].get<std::int64_t>());
  };
  const auto times = [&](const char* name) {
    const auto& of = report[name];
    return fmt::format("{:.1f} ms (median), {:.1f} (90 %), {:.1f} (99 %)", of["p50"].get<double>(),
                       of["p90"].get<double>(), of["p99"].get<double>());
  };
  const auto& roofline = report["roofline"];
  line("model",
       fmt::format("{} ({}), {} {} on {}, tp {}, dp {}, ep {}", report["model"].get<std::string>(),
                   report["family"].get<std::string>(), report["alignment"].get<std::string>(),
                   report["dtype"].get<std::string>(), report["device"].get<std::string>(),
                   report["tp"].get<int>(), report["dp"].get<int>(), report["ep"].get<int>()));
  line("load",
       fmt::format(
           "{} answers, {} tokens of prompts and {} found in the cache, {} tokens of answers",
           count("answers"), count("prompt_tokens"), count("cached_tokens"),
           count("output_tokens")));
  line("throughput",
       fmt::format("{:.1f} tokens/s of answers, {:.1f} with prompts, {:.2f} answers/s, in {}",
                   number("output_tokens_per_second"), number("tokens_per_second"),
                   number("answers_per_second"), format_seconds(number("seconds"))));
  line("first", "token after " + times("time_to_first_token_ms"));
  line("between", "tokens " + times("inter_token_latency_ms"));
  line("answer", "complete after " + times("answer_ms"));
  line("steps", fmt::format("{}, {} preemptions, {} blocks", count("steps"), count("preemptions"),
                            count("num_blocks")));
  line("roofline",
       fmt::format("{:.1f} % of what {:.1f} GB/s and {:.2f} TFLOP/s, measured in this run, allow",
                   100 * roofline["share"].get<double>(),
                   1e-9 * roofline["bytes_per_second"].get<double>(),
                   1e-12 * roofline["flops_per_second"].get<double>()));
  return text;
}

void bench_on_rank(const BenchRolloutFlags& flags, models::World& world) {
  const RolloutModel model(world, flags.rollout);
  const auto& of = model.model();
  const models::Roofline roofline(of.config(), of.mesh().shape(), of.options().layout(),
                                  measure_rates(world.device(), of.options().dtype));
  models::release_cached_memory(world.device());
  Replayer replayer(model, roofline);
  const auto vocab_size = model.model().config().vocab_size;
  for (int i = 0; i < flags.num_warmups; ++i)
    replayer.run(make_mix(flags.mix, vocab_size, static_cast<std::uint64_t>(i) + 1),
                 flags.sampling);
  model.mesh().all().barrier();
  const auto replay = whole_replay(
      model.mesh().dp(), replayer.run(make_mix(flags.mix, vocab_size, 0), flags.sampling));
  if (world.rank() != 0) return;
  const auto report = report_json(flags, model, roofline, replay, replayer.stats());
  if (flags.json) {
    fmt::print("{}\n", report.dump(2));
  } else if (!flags.quiet) {
    fmt::print("{}", report_text(report));
  }
}

}  // namespace

void add_bench(CLI::App& app) {
  auto* const bench = app.add_subcommand("bench", "Measure");
  bench->require_subcommand(1);
  bench->footer("");  // `rollout` has its own
  const auto flags = std::make_shared<BenchRolloutFlags>();
  auto* const command = bench->add_subcommand(
      "rollout", "Replay a load of requests: throughput, latencies, share of the roofline");
  add_rollout(*command, flags->rollout);
  auto& mix = flags->mix;
  auto* const num_prompts =
      command->add_option("--num-prompts", mix.num_prompts, "Requests")->capture_default_str();
  auto* const input_len =
      command
          ->add_option("--input-len", mix.input_len,
                       "Tokens of a prompt: 1024, uniform: 100:1024, or log-normal with mean, "
                       "sigma and the most: lognormal:1060:1:4096")
          ->capture_default_str();
  auto* const output_len =
      command->add_option("--output-len", mix.output_len, "Tokens of an answer, likewise")
          ->capture_default_str();
  command->add_option("--prefix-len", mix.prefix_len, "Tokens that all prompts begin with")
      ->check(at_least(0))
      ->capture_default_str();
  command
      ->add_option("--lengths", mix.lengths,
                   "Instead: a .jsonl or .parquet file of input_len, output_len and perhaps "
                   "arrival, in seconds")
      ->excludes(num_prompts)
      ->excludes(input_len)
      ->excludes(output_len);
  command
      ->add_option("--request-rate", mix.request_rate,
                   "Requests that arrive in a second, by chance. Default: all at once")
      ->check(at_least(0));
  command
      ->add_option("--num-warmups", flags->num_warmups,
                   "Replays before the one that counts, with other prompts")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  command->add_option("--seed", mix.seed, "Of lengths, prompts and arrivals")
      ->capture_default_str();
  add_sampling_shape(*command, flags->sampling);
  add_json(*command, flags->json);
  add_quiet(*command, flags->quiet);
  command->footer(
      "Ranks are those that torchrun, srun or mpirun started; of one process on the host they are "
      "threads.\nExit status: 0 measured, 2 trouble.");
  command->callback([flags] {
    flags->sampling.verify();
    catch_stop_signals();
    run_mesh(flags->rollout.mesh, flags->rollout.data_parallel_size,
             [&](models::World& world) { bench_on_rank(*flags, world); });
  });
}

}  // namespace ferry::cli
