// The archive's codec from memory to memory, checksum included, on one core; and slices read at
// random from an archive. One JSON object on stdout.
//   codec_bench codec [FILE]      128 MiB of synthetic bf16 weights, or the first bytes of FILE
//   codec_bench slices FOLDER     boxes of 64 KiB, of whole chunks, and of tensor-parallel slices
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/execute/plane_codec.h"
#include "distckpt/formats/archive/shard_store.h"

namespace ferry::bench {
namespace {

using distckpt::Box;

constexpr std::size_t kBytes = std::size_t{128} << 20;
constexpr std::size_t kChunk = std::size_t{1} << 20;
constexpr int kRounds = 7;  // the fastest counts

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// CPU time of this thread: others may share the machine.
double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// N(0, 0.02), each row of 4096 scaled by a log-normal factor.
std::vector<std::byte> synthetic_weights() {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  std::vector<std::byte> bytes(kBytes);
  float scale = 0;
  for (std::size_t i = 0; i < kBytes / 2; ++i) {
    if (i % 4096 == 0) scale = 0.02F * std::exp(0.3F * normal(random));
    const float value = scale * normal(random);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    bits += 0x7fff + ((bits >> 16) & 1);  // to nearest even
    const auto half = static_cast<std::uint16_t>(bits >> 16);
    std::memcpy(bytes.data() + 2 * i, &half, sizeof half);
  }
  return bytes;
}

std::vector<std::byte> read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<std::byte> bytes(kBytes);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(kBytes));
  bytes.resize(static_cast<std::size_t>(file.gcount()) / kChunk * kChunk);
  require(!bytes.empty(), ErrorKind::kUsage, "{}: is shorter than {} bytes", path, kChunk);
  return bytes;
}

void run_codec(std::vector<std::byte> bytes) {
  distckpt::PlaneCodec codec;
  std::vector<std::vector<std::byte>> encoded(bytes.size() / kChunk);
  std::vector<std::byte> decoded(bytes.size());
  double in = 1e9;
  double out = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    auto start = cpu_seconds();
    for (std::size_t i = 0; i < encoded.size(); ++i)
      encoded[i] = codec.encode(std::span(bytes).subspan(i * kChunk, kChunk), 2, "chunk");
    in = std::min(in, cpu_seconds() - start);
    start = cpu_seconds();
    for (std::size_t i = 0; i < encoded.size(); ++i)
      codec.decode(encoded[i], 2, "chunk", std::span(decoded).subspan(i * kChunk, kChunk));
    out = std::min(out, cpu_seconds() - start);
  }
  require(decoded == bytes, ErrorKind::kBug, "what was decoded is not what was encoded");
  std::size_t stored = 0;
  for (const auto& chunk : encoded) stored += chunk.size();
  const auto size = static_cast<double>(bytes.size());
  std::printf("{\"ratio\": %.4f, \"encode_gb_per_s\": %.3f, \"decode_gb_per_s\": %.3f}\n",
              size / static_cast<double>(stored), size / in / 1e9, size / out / 1e9);
}

// Reads `box` of a tensor, chunk by chunk.
void read_box(distckpt::FileSource& source,
              const distckpt::TensorLayout& tensor,
              const Box& box,
              std::vector<std::byte>& into) {
  std::vector<distckpt::ChecksumPart> parts;
  const auto size = size_of(tensor.dtype);
  std::size_t at = 0;
  for (const auto& shard : tensor.shards) {
    const auto part = intersect(shard.box, box);
    if (!part) continue;
    auto placement = shard.at;
    for (int d = 0; d < box.rank(); ++d)
      placement.offset += (part->offset[d] - shard.box.offset[d]) * placement.strides[d];
    const auto bytes = static_cast<std::size_t>(part->volume() * size);
    if (into.size() < at + bytes) into.resize(at + bytes);
    source.read({.at = placement, .size = part->size, .element_size = size},
                std::span(into).subspan(at, bytes), parts);
    at += bytes;
  }
}

void run_slices(const char* folder) {
  auto start = std::chrono::steady_clock::now();
  const auto store = distckpt::read_shard_store(folder);
  const auto opening = seconds_since(start);
  std::vector<const distckpt::TensorLayout*> matrices;
  std::size_t chunks = 0;
  for (const auto& tensor : store.layout.tensors()) {
    if (tensor.shape.rank() != 2 || tensor.shards.size() < 2) continue;
    matrices.push_back(&tensor);
    chunks += tensor.shards.size();
  }
  require(!matrices.empty(), ErrorKind::kUsage, "{}: holds no large matrix", folder);
  distckpt::FileSource source(store.layout.storages());
  std::mt19937_64 random(2);
  std::vector<std::byte> into;
  const auto measure = [&](const char* name, auto&& draw) {
    std::vector<double> times;
    const auto decoded = source.num_decoded();
    for (int i = 0; i < 600; ++i) {
      const auto& tensor = *matrices[random() % matrices.size()];
      const Box box = draw(tensor);
      start = std::chrono::steady_clock::now();
      read_box(source, tensor, box, into);
      if (i >= 100) times.push_back(1e3 * seconds_since(start));  // after the file is in the cache
    }
    std::ranges::sort(times);
    std::printf(", \"%s\": {\"median_ms\": %.3f, \"p99_ms\": %.3f, \"chunks\": %.2f}", name,
                times[times.size() / 2], times[times.size() * 99 / 100],
                static_cast<double>(source.num_decoded() - decoded) / 600);
  };
  std::printf("{\"chunks\": %zu, \"open_ms\": %.3f", chunks, 1e3 * opening);
  const auto chunk = [&](const distckpt::TensorLayout& tensor) {
    return tensor.shards[random() % tensor.shards.size()].box;
  };
  measure("64 x 512 elements of a chunk", [&](const distckpt::TensorLayout& tensor) {
    auto box = chunk(tensor);
    for (int d = 0; d < 2; ++d)
      box.size[d] = std::min<std::int64_t>(box.size[d], d == 0 ? 64 : 512);
    return box;
  });
  measure("a chunk", chunk);
  for (const int dim : {0, 1}) {
    measure(dim == 0 ? "one of 8 parts of rows" : "one of 8 parts of columns",
            [&](const distckpt::TensorLayout& tensor) {
              auto box = Box::whole(tensor.shape);
              box.size[dim] /= 8;
              box.offset[dim] = box.size[dim] * static_cast<std::int64_t>(random() % 8);
              return box;
            });
  }
  std::printf("}\n");
}

int run(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "codec";
  if (mode == "codec") {
    run_codec(argc > 2 ? read_file(argv[2]) : synthetic_weights());
    return 0;
  }
  require(mode == "slices" && argc == 3, ErrorKind::kUsage,
          "codec_bench codec [FILE] | codec_bench slices FOLDER");
  run_slices(argv[2]);
  return 0;
}

}  // namespace
}  // namespace ferry::bench

int main(int argc, char** argv) {
  try {
    return ferry::bench::run(argc, argv);
  } catch (const ferry::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
}
