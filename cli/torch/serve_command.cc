#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/report/text.h"
#include "cli/torch/commands.h"
#include "cli/torch/rollout_flags.h"
#include "distckpt/base/error.h"
#include "distckpt/execute/rendezvous.h"
#include "models/distributed/failure_board.h"
#include "serve/api_server.h"
#include "serve/bridge/decoded_images.h"
#include "serve/bridge/ranked_engine.h"
#include "serve/bridge/remote_engine.h"
#include "serve/bridge/rollout_engine.h"

namespace ferry::cli {
namespace {

struct ServeFlags {
  RolloutFlags rollout{};
  serve::ServerOptions server{};
  serve::ApiOptions api{};
  std::string name{};
  std::string max_body = "32MiB";
  std::string tool_call_parser = "auto";
  std::string reasoning_parser{};
  std::int64_t max_images = serve::ServedImages{}.max_images;
  std::int64_t max_image_pixels = std::int64_t{1} << 26;
  std::string allowed_local_media_path{};
  double request_timeout = 0;
  double shutdown_timeout = 30;
};

std::chrono::milliseconds milliseconds(double seconds) {
  constexpr double kLongest = 1e9;  // which the clock counts, in nanoseconds
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::min(seconds, kLongest) * 1e3));
}

// Refuses what was given for a model that lacks what it is for.
void check_model_has(const CLI::App& command,
                     const RolloutModel& model,
                     const std::shared_ptr<serve::DecodedImages>& images) {
  require_effective(
      command, {{.here = images == nullptr || model.engine_options().vision == nullptr,
                 .options = {"--max-images", "--max-image-pixels", "--allowed-local-media-path"},
                 .why = "images of this model are not computed"},
                {.here = model.tokenizer() == nullptr,
                 .options = {"--tool-call-parser", "--reasoning-parser"},
                 .why = "the model has no tokenizer, and its answers no text"}});
}

std::optional<rollout::text::ToolFormat> tool_format(const ServeFlags& flags,
                                                     const RolloutModel& model) {
  if (flags.tool_call_parser != "auto")
    return find_in(rollout::text::kToolFormats, flags.tool_call_parser);
  const auto found = model.find_chat_template(true);
  return found ? rollout::text::tool_format_of_template(found->text()) : std::nullopt;
}

std::optional<rollout::text::ReasoningFormat> reasoning_format(
    const ServeFlags& flags, std::optional<rollout::text::ToolFormat> calls) {
  const auto format = find_in(rollout::text::kReasoningFormats, flags.reasoning_parser);
  const bool has_channels = calls && rollout::text::has_channels(*calls);
  require(
      !format || format->on_channel() == has_channels, ErrorKind::kUsage,
      "--reasoning-parser {}: answers of the model {} on channels, as --tool-call-parser openai "
      "reads them",
      flags.reasoning_parser, has_channels ? "are" : "are not");
  return has_channels ? std::nullopt : format;
}

std::shared_ptr<serve::DecodedImages> decoded_images(const ServeFlags& flags,
                                                     const RolloutModel& model) {
  auto reader = model.image_reader();
  if (!reader) return nullptr;
  reader->most_pixels = flags.max_image_pixels;
  return std::make_shared<serve::DecodedImages>(std::move(*reader));
}

std::optional<serve::ServedImages> served_images(
    const ServeFlags& flags, const std::shared_ptr<serve::DecodedImages>& images) {
  if (!images) return std::nullopt;
  const auto expand = [images](const std::string& text, const serve::ImageFiles& files) {
    return rollout::expand_placeholders(text, images->read(files), images->reader());
  };
  return serve::ServedImages{.expand = expand,
                             .max_images = flags.max_images,
                             .allowed_media_folder = flags.allowed_local_media_path};
}

serve::ServedModel served_model(const ServeFlags& flags,
                                const RolloutModel& model,
                                const rollout::EngineOptions& engine,
                                std::int64_t longest,
                                const std::shared_ptr<serve::DecodedImages>& images) {
  const auto calls = tool_format(flags, model);
  return {.name = flags.name.empty() ? flags.rollout.checkpoint : flags.name,
          .root = flags.rollout.checkpoint,
          .max_model_len = longest,
          .is_limited_by_cache = longest < engine.max_model_len,
          .vocab_size = model.model().config().vocab_size,
          .max_num_seqs = engine.max_num_seqs,
          .tokenizer = model.tokenizer(),
          .chat_template = model.find_chat_template(false),
          .tool_template = model.find_chat_template(true),
          .tool_format = calls,
          .reasoning = reasoning_format(flags, calls),
          .images = served_images(flags, images)};
}

// The files of the weights that an engine has after an update.
WeightFiles files_after(const serve::WeightSource& update, const std::optional<WeightFiles>& now) {
  require(now || !update.checkpoint.empty(), ErrorKind::kUsage,
          "the engine's weights are of no checkpoint");
  auto next = update.checkpoint.empty()
                  ? *now
                  : WeightFiles{.checkpoint = converter::locate(
                                    update.checkpoint, parse_iteration_flag(update.iteration))};
  if (!update.delta.empty()) next.deltas.push_back(update.delta);
  return next;
}

// Sequences that the KV cache of each engine holds.
std::int64_t longest_sequence(const serve::RolloutEngine& mine,
                              const std::vector<std::unique_ptr<serve::RemoteEngine>>& others) {
  auto least = mine.stats().num_blocks;
  for (const auto& other : others) {
    other->idle();  // its answer has them
    least = std::min(least, other->stats().num_blocks);
  }
  return mine.longest_sequence(least);
}

// On rank 0: HTTP on a thread of its own, the first engine on this one.
void serve_http(const ServeFlags& flags,
                const RolloutModel& model,
                const rollout::EngineOptions& options,
                std::int64_t longest,
                const std::shared_ptr<serve::DecodedImages>& images,
                const std::vector<serve::EngineSteps*>& engines) {
  serve::EngineFleet loop(engines);
  serve::ApiServer server(served_model(flags, model, options, longest, images), loop, flags.server,
                          flags.api);
  if (const auto family = model.family_by_arguments(); !family.empty())
    fmt::print(stderr, "{:<10} {}\n", "family", family);
  fmt::print(stderr, "{:<10} {} in {}\n", "loaded", flags.rollout.checkpoint,
             format_seconds(model.seconds_to_load()));
  if (longest < options.max_model_len)
    fmt::print(stderr, "{:<10} {} tokens at most, not {}: the KV cache holds no more\n",
               "sequences", longest, options.max_model_len);
  const auto asked = flags.server.max_connections;
  if (const auto most = serve::connections_within_limit(asked); most < asked)
    fmt::print(stderr, "{:<10} {} at a time, not {}: `ulimit -Hn` allows no more descriptors\n",
               "connections", most, asked);
  const auto& host = flags.server.host;
  const bool is_ipv6 = host.find(':') != std::string::npos;
  fmt::print(stderr, "{:<10} http://{}{}{}:{}\n", "serving", is_ipv6 ? "[" : "", host,
             is_ipv6 ? "]" : "", server.port());
  std::exception_ptr failed;
  std::jthread http([&] {
    try {
      server.run();
    } catch (...) {
      failed = std::current_exception();
    }
    loop.stop();
  });
  try {
    loop.run();
  } catch (...) {
    server.close();
    throw;
  }
  http.join();
  if (failed) std::rethrow_exception(failed);
}

void serve_rank(const CLI::App& command, const ServeFlags& flags, models::World& world) {
  const auto parallel = parallel_of(flags.rollout.mesh);
  const int tp = parallel.tensor_model_parallel_size, dp = world.size() / tp;
  require(tp * dp == world.size(), ErrorKind::kUsage,
          "serve: {} ranks and --tp {}: an engine's ranks are tensor parallel", world.size(), tp);
  const models::MeshShape shape(parallel, world.size());
  require(dp == 1 || shape.ep() * shape.etp() <= tp, ErrorKind::kUsage,
          "serve: --dp {}: engines that share experts take their steps together, which is not "
          "supported",
          dp);
  // Ranks of an engine follow each other, in a mesh of their own: engines have no collective
  // together, so that others go on where one has died.
  const int first = world.rank() / tp * tp;
  std::vector<int> ranks(static_cast<std::size_t>(tp));
  std::iota(ranks.begin(), ranks.end(), first);
  if (dp > 1) models::limit_failure(world, ranks);
  RolloutModel model(world, flags.rollout, std::move(ranks));
  auto weights = model.weight_files(), before = weights;
  const auto images = decoded_images(flags, model);
  check_model_has(command, model, images);
  serve::RolloutEngine engine(
      model.model(), model.engine_options(),
      [&](const serve::WeightSource& source) {
        const auto& files = source.are_previous ? before : weights;
        return [&weights, &before, next = model.open_weights(files_after(source, files))] {
          before = weights;
          next.load();
          weights = next.from;
        };
      },
      images);
  const auto mailbox = [&](const std::string& name) {
    return std::make_unique<models::Mailbox>(
        world, name,
        models::Mailbox::Patience{.limit = world.timeout(),
                                  .hint = "--timeout is the time that ranks wait for each other"});
  };
  const auto mail = mailbox("serve");
  std::vector<std::unique_ptr<models::Mailbox>> of_engines(1);
  for (int i = 1; i < dp; ++i) of_engines.push_back(mailbox(fmt::format("engine {}", i)));
  if (world.rank() > first) return serve::follow(engine, world, *mail, first);
  serve::RankedEngine all(engine, world, *mail, tp);
  serve::EngineSteps& mine = tp == 1 ? static_cast<serve::EngineSteps&>(engine) : all;
  if (first > 0) {
    serve::answer_calls(mine, *of_engines[static_cast<std::size_t>(first / tp)]);
  } else {
    std::vector<std::unique_ptr<serve::RemoteEngine>> others;
    std::vector<serve::EngineSteps*> engines{&mine};
    for (int i = 1; i < dp; ++i)
      engines.push_back(others
                            .emplace_back(std::make_unique<serve::RemoteEngine>(
                                *of_engines[static_cast<std::size_t>(i)], i * tp))
                            .get());
    serve_http(flags, model, engine.options(), longest_sequence(engine, others), images, engines);
    for (const auto& other : others) other->end();
  }
  all.end();
}

void serve_checkpoint(const CLI::App& command, ServeFlags& flags) {
  flags.server.limits.max_body_bytes =
      static_cast<std::size_t>(parse_size(flags.max_body, "--max-body"));
  flags.api.request_timeout = milliseconds(flags.request_timeout);
  flags.api.shutdown_timeout = milliseconds(flags.shutdown_timeout);
  flags.api.stop_requested = stop_requested;
  catch_stop_signals();
  const bool is_one_of_processes = distckpt::rank_from_environment().size > 1;
  run_mesh(flags.rollout.mesh, flags.rollout.data_parallel_size, [&](models::World& world) {
    const auto body = [&] { serve_rank(command, flags, world); };
    is_one_of_processes ? run_rank(world, body) : body();
  });
}

}  // namespace

void add_serve(CLI::App& app) {
  const auto flags = std::make_shared<ServeFlags>();
  auto* const command =
      app.add_subcommand("serve", "Answer OpenAI's API over HTTP with a checkpoint's model");
  add_rollout(*command, flags->rollout);
  add_tokenizer(*command, flags->rollout);
  const auto add = [&](const char* name, auto& value, const char* what) {
    return command->add_option(name, value, what)->group("Server");
  };
  add("--host", flags->server.host, "The address to listen on; 0.0.0.0: all of this machine")
      ->capture_default_str();
  add("--port", flags->server.port, "Its port; 0: any that is free")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  add("--served-model-name", flags->name, "The model's name in the API. Default: CHECKPOINT");
  flags->api.version = FERRY_VERSION;
  add("--api-key", flags->api.api_keys, "Refuse requests without this key; repeatable")
      ->allow_extra_args(false)
      ->envname("FERRY_API_KEY");
  add("--allowed-origins", flags->api.allowed_origins,
      "A site whose pages may ask (https://example.com), or *; repeatable. Default: * with "
      "--api-key, else none")
      ->allow_extra_args(false);
  add("--tool-call-parser", flags->tool_call_parser,
      "How the model writes calls of tools. auto: as its chat template does")
      ->check(CLI::IsMember([] {
        auto names = names_of(rollout::text::kToolFormats);
        names.insert(names.begin(), "auto");
        return names;
      }()))
      ->capture_default_str();
  add("--reasoning-parser", flags->reasoning_parser,
      "How the model writes thoughts, which become the reasoning of a chat. Default: content")
      ->check(CLI::IsMember(names_of(rollout::text::kReasoningFormats)));
  add("--max-connections", flags->server.max_connections, "Connections at a time, at most")
      ->check(at_least(1))
      ->capture_default_str();
  add("--max-queued-requests", flags->api.max_queued_requests,
      "Answers that may wait for a place beside --max-num-seqs; further requests get status 429")
      ->check(at_least(0))
      ->capture_default_str();
  add("--max-body", flags->max_body, "Size of a request, at most")->capture_default_str();
  add("--max-images", flags->max_images, "Images of a chat, at most")
      ->check(at_least(0))
      ->capture_default_str();
  add("--max-image-pixels", flags->max_image_pixels, "Pixels of an image's file, at most")
      ->check(at_least(1))
      ->capture_default_str();
  add("--allowed-local-media-path", flags->allowed_local_media_path,
      "A folder whose files image_url may name by file://. Default: only data: URLs are read")
      ->check(CLI::ExistingDirectory);
  add("--request-timeout", flags->request_timeout,
      "Seconds after which an answer is given up; 0: none")
      ->check(at_least(0))
      ->capture_default_str();
  add("--shutdown-timeout", flags->shutdown_timeout,
      "Seconds that answers under way have left after SIGTERM")
      ->check(at_least(0))
      ->capture_default_str();
  command->footer("Exit status: 0 ended by SIGTERM or SIGINT, 2 trouble.");
  command->callback([flags, command] { serve_checkpoint(*command, *flags); });
}

}  // namespace ferry::cli
