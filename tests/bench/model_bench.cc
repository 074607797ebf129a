// One forward pass, and one with its backward, of a model on one device or on a mesh: time, share
// of the devices' bf16 rate, peak memory. Prints a JSON object for each mode; on a mesh of several
// ranks also in how many tokens its log-probabilities differ from those of each rank alone. Beside
// it tests/bench/hf_model_bench.py, the same with transformers.
//   model_bench CHECKPOINT --device cuda --lengths 2048,2048,2048,2048 --tp 2 --sp
// With --image HEIGHT,WIDTH each sequence begins with an image of so many patches, through which
// the vision tower, which is trained, too, runs in each pass.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "converter/alignment/model_files.h"
#include "converter/open/checkpoint.h"
#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "models/spec/costs.h"
#include "models/vision/vision_model.h"
#include "rollout/vision/visual_prompt.h"
#include "tests/bench/chrome_trace.h"

namespace ferry {
namespace {

using models::Alignment;

struct Mode {
  std::string name;
  Alignment alignment;
  bool deterministic;
};

struct Flags {
  std::string checkpoint;
  std::string device = "cpu";
  std::vector<std::int64_t> lengths{2048, 2048, 2048, 2048};
  std::vector<std::int64_t> image{};  // height and width in patches
  int rounds = 5;
  std::string trace;
  bool sequence_parallel = false;
  bool forward_only = false;
  models::ParallelConfig parallel{};
};

double multiply_adds(const models::TransformerConfig& config,
                     const models::GPTModel& model,
                     const std::vector<std::int64_t>& lengths) {
  double weights = 0;
  for (const auto& parameter : model.parameters().all()) {
    const auto& spec = parameter.spec;
    const bool looked_up = spec.key == "embedding.word_embeddings.weight" &&
                           config.untie_embeddings_and_output_weights;
    const bool of_tower = spec.key.starts_with(models::kVisionModel);  // vision_flops() counts it
    if (spec.shape.rank() != 2 || looked_up || of_tower) continue;
    const double share = spec.expert ? static_cast<double>(config.moe_router_topk) /
                                           static_cast<double>(config.num_moe_experts)
                                     : 1.0;
    weights += share * static_cast<double>(spec.shape.product());
  }
  double sum = 0;
  for (const auto length : lengths) {
    const auto attention =
        static_cast<double>(config.num_layers * config.num_attention_heads * config.kv_channels *
                            length);  // causal: half of both
    sum += static_cast<double>(length) * (weights + attention);
  }
  return sum;
}

using Chunks = std::vector<std::unique_ptr<models::GPTModel>>;

struct Images {
  std::vector<models::ImageGrid> grids{};
  at::Tensor pixels{};  // of all
  at::Tensor rows{};    // of the pack that stand for them
};

struct Batch {
  models::PackedSequences pack{};
  Images images{};
};

// Random tokens; each sequence begins with an image, if flags has one.
Batch make_batch(const Flags& flags, const models::TransformerConfig& config) {
  at::manual_seed(1);
  std::vector<at::Tensor> sequences, positions, rows;
  Images images;
  std::int64_t begin = 0;
  for (const auto length : flags.lengths) {
    auto& tokens = sequences.emplace_back(at::randint(config.vocab_size, {length}, at::kLong));
    if (!flags.image.empty()) {
      const auto& vision = *config.vision;
      const models::ImageGrid grid{.height = flags.image[0], .width = flags.image[1]};
      const auto count =
          grid.num_patches() / (vision.spatial_merge_size * vision.spatial_merge_size);
      tokens.masked_fill_(tokens.eq(vision.image_token_id), vision.image_token_id + 1);
      tokens.narrow(0, 0, count).fill_(vision.image_token_id);
      const auto prompt = rollout::make_visual_prompt(
          vision, {tokens.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(length)},
          {{.pixels = at::zeros({1}, at::kByte), .grid = grid}});
      positions.push_back(prompt->positions_of(length));
      rows.push_back(begin + at::arange(count, at::kLong));
      images.grids.push_back(grid);
    }
    begin += length;
  }
  Batch batch{.pack = models::pack(sequences), .images = std::move(images)};
  if (flags.image.empty()) return batch;
  const auto& vision = *config.vision;
  const auto patches = flags.image[0] * flags.image[1] * std::ssize(batch.images.grids);
  batch.pack.positions = at::cat(positions, 1);
  batch.images.rows = at::cat(rows);
  batch.images.pixels = at::randn({patches, vision.in_channels * vision.temporal_patch_size *
                                                vision.patch_size * vision.patch_size});
  return batch;
}

// A model of one chunk, filled from the checkpoint, and the batch as its rank sees it.
struct Subject {
  Subject(const converter::Checkpoint& checkpoint,
          const models::ParallelState& mesh,
          const Batch& whole,
          const models::ModelOptions& options)
      : chunks(models::make_stage(checkpoint.map.config, mesh, options)),
        batch(whole.pack, mesh),
        images(whole.images) {
    const auto& pack = whole.pack;
    converter::load_model(chunks, checkpoint, {.round = true});
    const auto next = at::roll(pack.tokens, -1, 0);
    labels = batch.local(next);
    weights = batch.local(at::full({next.size(0)}, 1.0 / static_cast<double>(next.size(0))));
  }
  models::GPTModel& model() const { return *chunks.front(); }
  at::Tensor forward() const {
    if (images.grids.empty()) return model().forward(batch);
    auto features = model().vision()->forward(images.pixels, images.grids);
    const auto visual = batch.local({.rows = images.rows.to(features.embeddings.device()),
                                     .embeddings = features.embeddings,
                                     .deepstack = std::move(features.deepstack)});
    return model().forward(batch, {}, {}, {}, visual);
  }
  at::Tensor log_probs() const {
    const c10::InferenceMode no_gradients;
    return model().log_probs(forward(), labels).log_probs;
  }
  void step() const {
    for (const auto& leaf : model().parameters().leaves()) leaf.value.mutable_grad() = at::Tensor();
    model().cross_entropy(forward(), labels, weights).loss.backward();
  }

  Chunks chunks;
  models::SequencePartition batch;
  Images images;
  at::Tensor labels, weights;
};

void run(const Flags& flags,
         const converter::Checkpoint& checkpoint,
         models::World& world,
         const Mode& mode) {
  const auto& config = checkpoint.map.config;
  const auto device = world.device();
  const models::ParallelState mesh(world, flags.parallel, "bench " + mode.name);
  require(mesh.shape().pp() == 1, ErrorKind::kUsage, "one stage is measured, not {}",
          mesh.shape().pp());
  const models::ModelOptions options{.alignment = mode.alignment,
                                     .sequence_parallel = flags.sequence_parallel,
                                     .deterministic_mode = mode.deterministic,
                                     .vision_tower = !flags.image.empty()};
  const auto batch = make_batch(flags, config);

  nlohmann::ordered_json report{{"program", "ferry"}, {"mode", mode.name}, {"ranks", world.size()}};
  at::Tensor expected;
  double flops = 0;
  if (mesh.shape().tp() * mesh.shape().cp() * mesh.shape().ep() > 1) {
    const models::ParallelState alone(world, {}, "alone " + mode.name);
    const Subject whole(checkpoint, alone, batch,
                        {.alignment = mode.alignment, .vision_tower = options.vision_tower});
    expected = whole.log_probs();
    flops = 2 * multiply_adds(config, whole.model(), flags.lengths);
  }
  const Subject subject(checkpoint, mesh, batch, options);
  if (flops == 0) flops = 2 * multiply_adds(config, subject.model(), flags.lengths);
  if (options.vision_tower) {
    const std::vector<std::int64_t> tokens(flags.lengths.size(),
                                           batch.images.rows.size(0) / std::ssize(flags.lengths));
    flops += models::vision_flops(*config.vision, tokens);
  }
  if (expected.defined()) {
    const auto mine = subject.batch.local(expected.cpu());
    report["unequal"] = subject.log_probs().ne(mine).sum().item<std::int64_t>();
    report["of"] = mine.size(0);
  }
  const auto measure = [&](const std::function<void()>& body) {
    double best = 1e30;
    for (int round = 0; round <= flags.rounds; ++round) {
      mesh.all().barrier();
      models::synchronize(device);
      const auto start = std::chrono::steady_clock::now();
      body();
      models::synchronize(device);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      if (round > 0) best = std::min(best, seconds.count());  // the first chooses kernels
    }
    return best;
  };
  // Data parallel ranks each have the whole batch.
  const double replicas = mesh.shape().dp();
  const auto add = [&](const std::string& name, double factor, double seconds) {
    report[name + "_ms"] = 1e3 * seconds;
    report[name + "_tflops_per_rank"] = factor * flops * replicas / seconds / 1e12 / world.size();
  };
  add("forward", 1, measure([&] {
        const c10::InferenceMode no_gradients;
        (void)subject.model().output(subject.forward());
      }));
  if (!flags.forward_only) {
    models::reset_peak_memory(device);
    const double both = measure([&] { subject.step(); });
    add("forward_backward", 3, both);
    report["tokens_per_second"] = replicas * static_cast<double>(batch.pack.tokens.size(0)) / both;
    report["peak_gib"] = static_cast<double>(models::peak_memory(device)) / (1LL << 30);
    if (!flags.trace.empty() && world.rank() == 0)
      write_trace([&] { subject.step(); }, device,
                  fmt::format("{}-{}.json", flags.trace, mode.name));
    else if (!flags.trace.empty())
      subject.step();
  }
  mesh.all().barrier();
  if (world.rank() == 0) fmt::print("{}\n", report.dump());
}

int measure(int argc, char** argv) {
  Flags flags;
  CLI::App app("Measures a model");
  app.add_option("checkpoint", flags.checkpoint, "A checkpoint, whose weights are loaded")
      ->required();
  app.add_option("--device", flags.device, "cpu or cuda");
  app.add_option("--lengths", flags.lengths, "Of the sequences that are packed")->delimiter(',');
  app.add_option("--image", flags.image, "Patches of an image in each sequence: height, width")
      ->delimiter(',')
      ->expected(2);
  app.add_option("--rounds", flags.rounds, "Of which the fastest counts");
  app.add_option("--trace", flags.trace,
                 "Write one more round of each mode as a Chrome trace, PREFIX-MODE.json");
  app.add_flag("--sp", flags.sequence_parallel, "Sequence parallelism");
  app.add_flag("--forward-only", flags.forward_only, "Measure no backward");
  app.add_option("--tp", flags.parallel.tensor_model_parallel_size, "Tensor parallel ranks");
  app.add_option("--cp", flags.parallel.context_parallel_size, "Context parallel ranks");
  app.add_option("--ep", flags.parallel.expert_model_parallel_size, "Expert parallel ranks");
  CLI11_PARSE(app, argc, argv);
  const auto checkpoint = converter::open(flags.checkpoint);
  require(flags.image.empty() || checkpoint.map.config.computes_vision(), ErrorKind::kUsage,
          "--image: a model that does not see");
  auto world = models::World::from_environment({.device = at::Device(flags.device)});
  for (const auto& mode :
       {Mode{"fast", Alignment::kFast, false}, Mode{"fast-deterministic", Alignment::kFast, true},
        Mode{"bitwise", Alignment::kBitwise, true}}) {
    run(flags, checkpoint, world, mode);
  }
  return 0;
}

}  // namespace
}  // namespace ferry

int main(int argc, char** argv) {
  try {
    return ferry::measure(argc, argv);
  } catch (const ferry::Error& error) {
    std::fputs(error.report().c_str(), stderr);
  } catch (const std::exception& error) {
    std::fputs(error.what(), stderr);
  }
  return 2;
}
