// load_bench CHECKPOINT [threads] [tp]: loads the shards of each rank of a mesh into host memory,
// one rank after the other, beside the plain reading of as many bytes. Times of the second of two
// runs, of files in the page cache and memory that was touched before.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "converter/bridge/load.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/models/parallel_model.h"

namespace ferry::support {
namespace {

double seconds_of(const std::function<void()>& body) {
  double seconds = 0;
  for (int run = 0; run < 2; ++run) {
    const auto start = std::chrono::steady_clock::now();
    body();
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return seconds;
}

// The first `bytes` of the checkpoint's files, a mebibyte at a time, by all threads.
void read_plainly(const converter::Checkpoint& checkpoint, std::span<std::byte> into, int threads) {
  const auto share = into.size() / static_cast<std::size_t>(threads);
  const auto* path = distckpt::file_of(checkpoint.layout.storages().front());
  const distckpt::ReadFile file(*path);
  std::vector<std::jthread> workers;  // join before the file closes
  for (int t = 0; t < threads; ++t) {
    const auto begin = static_cast<std::size_t>(t) * share;
    workers.emplace_back([&file, mine = into.subspan(begin, share), begin] {
      constexpr std::size_t kStep = std::size_t{1} << 20;
      for (std::size_t at = 0; at < mine.size(); at += kStep) {
        const auto size = std::min(kStep, mine.size() - at);
        const auto offset = static_cast<std::int64_t>(begin + at);
        file.read_at(offset % (file.size() - static_cast<std::int64_t>(kStep)),
                     mine.subspan(at, size));
      }
    });
  }
}

void run(const std::string& path, int threads, int tp) {
  const auto checkpoint = converter::open(path);
  MeshOptions options{.dtype = {}};
  options.parallel.tensor_model_parallel_size = tp;
  const ParallelModel model(checkpoint.map, checkpoint.tensors, options);
  for (int rank = 0; rank < model.size(); ++rank) {
    converter::LoadReport report;
    const auto load =
        seconds_of([&] { report = load_rank(checkpoint, model, rank, {.threads = threads}); });
    std::vector<std::byte> memory(static_cast<std::size_t>(report.bytes));
    const auto plain = seconds_of([&] { read_plainly(checkpoint, memory, threads); });
    const auto gigabytes = static_cast<double>(report.bytes) / 1e9;
    fmt::print(
        "rank {} of {}: {:.2f} GB, {} threads: {:.2f} GB/s with its plan, {:.2f} GB/s read "
        "plainly: {:.0f}%\n",
        rank, model.size(), gigabytes, threads, gigabytes / load, gigabytes / plain,
        100 * plain / load);
  }
}

}  // namespace
}  // namespace ferry::support

int main(int argc, char** argv) {
  try {
    ferry::require(argc >= 2, ferry::ErrorKind::kUsage,
                   "usage: load_bench CHECKPOINT [threads] [tp]");
    ferry::support::run(argv[1], argc > 2 ? std::stoi(argv[2]) : 2,
                        argc > 3 ? std::stoi(argv[3]) : 1);
    return 0;
  } catch (const ferry::Error& error) {
    fmt::print(stderr, "{}", error.report());
    return 2;
  }
}
