// device_load_bench CHECKPOINT [cpu|cuda] [ROUNDS] [threads]: loads a checkpoint into a model on
// one device, beside the limits: the files read into one buffer after another, of memory that the
// device copies from (the page cache, or the disk where it holds less), and copying that to the
// device. Prints a JSON object; the last round's times. Beside it:
// tests/bench/safetensors_load_bench.py.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "converter/alignment/model_files.h"
#include "converter/open/checkpoint.h"
#include "distckpt/base/error.h"
#include "distckpt/base/threads.h"
#include "distckpt/storage/file_io.h"
#include "models/device/device.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "models/reshard/device_box_io.h"

namespace ferry {
namespace {

constexpr std::int64_t kBuffer = std::int64_t{16} << 20;

double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Every byte of the checkpoint's files, by all threads, into a buffer of each.
std::int64_t read_plainly(const converter::Checkpoint& checkpoint, int threads) {
  std::int64_t total = 0;
  for (const auto& storage : checkpoint.layout.storages()) {
    const auto* path = distckpt::file_of(storage);
    if (path == nullptr) continue;
    const distckpt::ReadFile file(*path);
    const auto size = file.size();
    const auto share = (size + threads - 1) / threads;
    std::vector<std::jthread> workers;
    for (int t = 0; t < threads; ++t) {
      workers.emplace_back([&, begin = t * share, end = std::min(size, (t + 1) * share)] {
        std::vector<std::byte> buffer(static_cast<std::size_t>(kBuffer));
        for (auto at = begin; at < end; at += kBuffer)
          file.read_at(
              at, std::span(buffer).first(static_cast<std::size_t>(std::min(kBuffer, end - at))));
      });
    }
    workers.clear();
    total += size;
  }
  return total;
}

int run(int argc, char** argv) {
  const std::string path = argv[1];
  const at::Device device =
      argc > 2 && std::string(argv[2]) == "cuda" ? at::Device(at::kCUDA, 0) : at::kCPU;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 2;
  const int threads = argc > 4 ? std::atoi(argv[4]) : distckpt::available_cores();
  const auto checkpoint = converter::open(path);
  models::World world(models::World::Options{.device = device});
  const models::ParallelState mesh(world, {}, "bench");
  double plain = 0;
  double load = 0;
  double copy = 0;
  std::int64_t bytes = 0;
  for (int round = 0; round < rounds; ++round) {
    plain = seconds_of([&] { bytes = read_plainly(checkpoint, threads); });
    const auto chunks = models::make_stage(checkpoint.map.config, mesh, {});
    models::synchronize(device);
    load = seconds_of([&] {
      converter::load_model(chunks, checkpoint, {.threads = threads});
      models::synchronize(device);
    });
  }
  const auto pinned =
      at::empty({kBuffer * 16}, at::TensorOptions(at::kByte).pinned_memory(device.is_cuda()));
  auto target = at::empty({kBuffer * 16}, at::TensorOptions(at::kByte).device(device));
  target.copy_(pinned);
  models::synchronize(device);
  constexpr int kCopies = 32;
  copy = seconds_of([&] {
    for (int i = 0; i < kCopies; ++i) target.copy_(pinned, /*non_blocking=*/true);
    models::synchronize(device);
  });
  const auto rate = [](std::int64_t size, double seconds) {
    return static_cast<double>(size) / seconds / 1e9;
  };
  fmt::print("{}\n",
             nlohmann::ordered_json{{"program", "ferry"},
                                    {"gb", static_cast<double>(bytes) / 1e9},
                                    {"threads", threads},
                                    {"load_s", load},
                                    {"load_gb_per_s", rate(bytes, load)},
                                    {"plain_reading_gb_per_s", rate(bytes, plain)},
                                    {"pinned_copy_gb_per_s", rate(kBuffer * 16 * kCopies, copy)}}
                 .dump());
  return 0;
}

}  // namespace
}  // namespace ferry

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  try {
    return ferry::run(argc, argv);
  } catch (const ferry::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  }
}
