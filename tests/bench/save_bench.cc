// save_bench FOLDER [--device cpu|cuda] [--layers N] [--rounds N] [--pause S]: saves a training run
// of the Qwen2.5-0.5B or 1.5B shape (bf16 parameters, fp32 masters and moments) from one rank, at
// once and in the background, in turn with its limits: copying the same bytes off the device, and
// writing them to one file from memory. Prints a JSON object: the seconds of each round. Beside it,
// with torch.distributed.checkpoint: tests/bench/save_bench.py, which runs this.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/threads.h"
#include "distckpt/storage/file_io.h"
#include "models/device/device.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "trainer/engine/training_checkpoint.h"
#include "trainer/optimizer/distributed_optimizer.h"

namespace ferry::trainer {
namespace {

namespace fs = std::filesystem;

double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Options {
  std::string folder{};
  std::string device = "cpu";
  std::string shape = "0.5b";
  int layers = 0;
  int rounds = 3;
  int threads = 0;
  int pause = 0;
};

models::TransformerConfig config_of(const Options& options) {
  const bool small = options.shape == "0.5b";
  models::TransformerConfig config{.family = "qwen2",
                                   .num_layers = small ? 24 : 28,
                                   .hidden_size = small ? 896 : 1536,
                                   .ffn_hidden_size = small ? 4864 : 8960,
                                   .num_attention_heads = small ? 14 : 12,
                                   .num_query_groups = 2,
                                   .kv_channels = small ? 64 : 128,
                                   .vocab_size = 151936,
                                   .max_position_embeddings = 32768,
                                   .add_qkv_bias = true,
                                   .untie_embeddings_and_output_weights = false};
  if (options.layers > 0) config.num_layers = options.layers;
  return config;
}

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

void copy_all(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
  for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i], /*non_blocking=*/true);
  models::synchronize(from.front().device());
}

// One file of them, by as many threads as a save has, made durable.
void write_plainly(const fs::path& path, const std::vector<at::Tensor>& tensors, int threads) {
  constexpr std::int64_t kPiece = std::int64_t{16} << 20;
  struct Piece {
    std::int64_t offset = 0;
    std::span<const std::byte> bytes{};
  };
  std::vector<Piece> pieces;
  std::int64_t size = 0;
  for (const auto& tensor : tensors) {
    const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
    const auto nbytes = static_cast<std::int64_t>(tensor.nbytes());
    for (std::int64_t at = 0; at < nbytes; at += kPiece)
      pieces.push_back(
          {size + at, {data + at, static_cast<std::size_t>(std::min(kPiece, nbytes - at))}});
    size += nbytes;
  }
  const distckpt::WriteFile file(path, size);
  std::vector<std::jthread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      for (auto i = static_cast<std::size_t>(t); i < pieces.size();
           i += static_cast<std::size_t>(threads))
        file.write_at(pieces[i].offset, pieces[i].bytes);
    });
  }
  workers.clear();
  file.sync();
}

int run(const Options& options) {
  const at::Device device =
      options.device == "cuda" ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  models::set_device(device);
  models::World world(models::World::Options{.device = device});
  const models::ParallelState mesh(world, {}, "bench");
  const auto chunks = models::make_stage(config_of(options), mesh, {});
  DistributedDataParallel ddp({chunks[0].get()}, {.grad_reduce_in_fp32 = false});
  DistributedOptimizer optimizer(ddp, {});
  OptimizerParamScheduler scheduler({});
  auto state = optimizer.own_state();
  for (const auto& buffer : ddp.buffers()) state.push_back(buffer.params());
  for (auto& tensor : state) tensor.fill_(0.37);  // no page is a page of zeros
  const auto bytes = bytes_of(state);
  const int threads = distckpt::threads_or_cores(options.threads);

  std::vector<double> copy, plain, save, stall, background;
  const fs::path folder = options.folder;
  fs::create_directories(folder);
  const auto pinned = [&] {
    std::vector<at::Tensor> host;
    for (const auto& tensor : state)
      host.push_back(at::empty(
          tensor.sizes(),
          at::TensorOptions().dtype(tensor.scalar_type()).pinned_memory(device.is_cuda())));
    return host;
  };
  // A disk that owes a burst of writes is slower for a while.
  const auto rest = [&] { std::this_thread::sleep_for(std::chrono::seconds(options.pause)); };
  for (int round = 0; round < options.rounds; ++round) {
    rest();
    {
      const auto host = pinned();
      copy_all(state, host);  // its pages are there from now on
      copy.push_back(seconds_of([&] { copy_all(state, host); }));
      plain.push_back(seconds_of([&] { write_plainly(folder / "plain", host, threads); }));
      fs::remove(folder / "plain");
    }
    rest();
    TrainingCheckpoint checkpoint(world, {chunks[0].get()}, optimizer, scheduler,
                                  {.root = folder / "run", .threads = options.threads});
    save.push_back(seconds_of([&] { checkpoint.save(1, {}); }));
    fs::remove_all(folder / "run");
    for (const int iteration : {2, 3}) {  // the first one makes the snapshot's memory
      rest();
      const auto start = seconds_of([&] { checkpoint.save_in_background(iteration, {}); });
      const auto writing = seconds_of([&] { checkpoint.finish_save(); });
      if (iteration == 2) continue;
      stall.push_back(start);
      background.push_back(start + writing);
    }
    fs::remove_all(folder / "run");
  }
  fmt::print("{}\n", nlohmann::ordered_json{{"program", "ferry"},
                                            {"device", options.device},
                                            {"threads", threads},
                                            {"bytes", bytes},
                                            {"copy_s", copy},
                                            {"plain_write_s", plain},
                                            {"save_s", save},
                                            {"stall_s", stall},
                                            {"background_s", background}}
                         .dump());
  return 0;
}

}  // namespace
}  // namespace ferry::trainer

int main(int argc, char** argv) {
  ferry::trainer::Options options;
  CLI::App app("Saves a training run, beside the limits of it");
  app.add_option("folder", options.folder, "Where to")->required();
  app.add_option("--device", options.device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--shape", options.shape, "Of Qwen2.5")->check(CLI::IsMember({"0.5b", "1.5b"}));
  app.add_option("--layers", options.layers, "Instead of the shape's");
  app.add_option("--rounds", options.rounds, "Of each");
  app.add_option("--threads", options.threads, "Of a save; 0: one per core");
  app.add_option("--pause", options.pause, "Seconds before everything that writes");
  CLI11_PARSE(app, argc, argv);
  try {
    return ferry::trainer::run(options);
  } catch (const ferry::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  }
}
