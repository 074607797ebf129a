#include "tests/support/shard_stores.h"

#include "distckpt/base/error.h"
#include "distckpt/execute/executor.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/execute/journal.h"
#include "tests/support/memory_box_io.h"

namespace ferry::support {
namespace {

using distckpt::Box;
using distckpt::DType;

// Tensors in memory, and the map in which each is itself.
struct StoreMemory {
  std::vector<distckpt::ModelTensor> tensors{};
  distckpt::Layout layout{};
  distckpt::TensorMap map{};

  void add(const std::string& name, DType dtype, const distckpt::Shape& shape, std::byte* data) {
    const auto index = static_cast<std::uint32_t>(tensors.size());
    const auto whole = Box::whole(shape);
    tensors.push_back({.name = name, .dtype = dtype, .shape = shape});
    const auto storage = layout.add_storage(
        distckpt::MemoryStorage{.data = data, .size = tensors.back().num_bytes()});
    layout.add_tensor({.name = name,
                       .dtype = dtype,
                       .shape = shape,
                       .shards = {distckpt::packed_shard(whole, dtype, storage, 0)}});
    map.links.push_back({.model = index, .model_box = whole, .stored = index, .stored_box = whole});
  }
  distckpt::PlanSide side() const { return {.layout = &layout, .map = &map}; }
};

}  // namespace

std::vector<StoredBytes> random_tensors(Random& random, int count, std::int64_t max_size) {
  constexpr std::array kDTypes{DType::kBF16, DType::kF32, DType::kU8, DType::kF64};
  std::vector<StoredBytes> tensors;
  for (int i = 0; i < count; ++i) {
    const auto rank = static_cast<int>(random.between(0, 4));
    auto shape = random_shape(random, rank, 1, rank > 2 ? 6 : max_size);
    if (rank > 0 && random.chance(5)) shape[0] = 0;
    const auto dtype = kDTypes[static_cast<std::size_t>(random.between(0, 3))];
    StoredBytes stored{
        .tensor = {.name = fmt::format("t{}.weight", i), .dtype = dtype, .shape = shape},
        .bytes = random.bytes(shape.product() * size_of(dtype))};
    if (random.chance(50)) {
      for (auto& byte : stored.bytes) byte &= std::byte{7};
    }
    tensors.push_back(std::move(stored));
  }
  return tensors;
}

std::int64_t write_shard_store(const std::filesystem::path& folder,
                               const std::vector<StoredBytes>& tensors,
                               const WriteOptions& options) {
  StoreMemory memory;
  std::vector<distckpt::ShardStoreTensor> stored;
  auto copies = tensors;  // BoxSource reads from what could be written
  for (auto& one : copies) {
    memory.add(one.tensor.name, one.tensor.dtype, one.tensor.shape, one.bytes.data());
    stored.push_back(one.tensor);
  }
  std::filesystem::create_directories(folder);
  distckpt::ShardStoreTarget target(folder, stored, options.store);
  const auto plan =
      plan_copy(memory.tensors, memory.side(), {.layout = &target.layout(), .map = &memory.map});
  MemorySource source(memory.layout);
  if (options.stop_after >= 0) {
    source.before_read = [&](std::int64_t reads) {
      require(reads < options.stop_after, ErrorKind::kCancelled, "stopped");
    };
  }
  distckpt::Journal journal(folder / "journal", {}, true);
  auto& sink = target.open(plan, journal);
  const auto report = distckpt::Executor({.threads = options.threads, .journal = &journal})
                          .submit(plan, source, &sink)
                          .wait();
  target.finish(options.small_files);
  std::filesystem::remove(folder / "journal");
  return report.bytes - report.resumed_bytes;
}

std::vector<std::vector<std::byte>> read_tensors(const distckpt::ShardStore& store, int threads) {
  std::vector<std::vector<std::byte>> bytes;
  StoreMemory memory;
  for (const auto& tensor : store.layout.tensors()) {
    auto& into = bytes.emplace_back(static_cast<std::size_t>(tensor.num_bytes()));
    memory.add(tensor.name, tensor.dtype, tensor.shape, into.data());
  }
  const auto plan =
      plan_copy(memory.tensors, {.layout = &store.layout, .map = &memory.map}, memory.side());
  distckpt::FileSource source(store.layout.storages());
  MemorySink sink(memory.layout);
  distckpt::Executor({.threads = threads}).submit(plan, source, &sink).wait();
  return bytes;
}

}  // namespace ferry::support
