// A tensor that tests of the executor copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "distckpt/execute/executor.h"
#include "tests/support/memory_box_io.h"

namespace ferry::distckpt::executor_test {

// One tensor in memory, in two halves of its columns; copied to one in halves of its rows.
struct FilePair {
  static constexpr std::int64_t kRows = 4096;
  static constexpr std::int64_t kColumns = 1024;

  explicit FilePair(DType from_dtype = DType::kF32, DType into_dtype = DType::kF32)
      : tensors{{.name = "w", .dtype = into_dtype, .shape = {kRows, kColumns}}} {
    from = side(from_dtype, 1, source_bytes);
    into = side(into_dtype, 0, target_bytes);
    auto* values = reinterpret_cast<std::uint16_t*>(source_bytes.data());
    for (std::size_t i = 0; i < source_bytes.size() / 2; ++i)
      values[i] = static_cast<std::uint16_t>(i * 2654435761U >> 7 & 0x3FFF);
  }

  struct Side {
    Layout layout{};
    TensorMap map{};
  };

  Side side(DType dtype, int dim, std::vector<std::byte>& bytes) {
    Side side;
    const Shape shape{kRows, kColumns};
    bytes.resize(static_cast<std::size_t>(shape.product() * size_of(dtype)));
    const auto memory = side.layout.add_storage(
        MemoryStorage{.data = bytes.data(), .size = static_cast<std::int64_t>(bytes.size())});
    auto first = Box::whole(shape);
    first.size[dim] /= 2;
    auto second = first;
    second.offset[dim] = first.size[dim];
    const auto half = shape.product() / 2 * size_of(dtype);
    side.layout.add_tensor({.name = "w",
                            .dtype = dtype,
                            .shape = shape,
                            .shards = {packed_shard(first, dtype, memory, 0),
                                       packed_shard(second, dtype, memory, half)}});
    side.map.links.push_back({.model_box = Box::whole(shape), .stored_box = Box::whole(shape)});
    return side;
  }

  CopyPlan plan(Transform cast = Transform::kCastExact) const {
    return plan_copy(tensors, {.layout = &from.layout, .map = &from.map},
                     {.layout = &into.layout, .map = &into.map}, cast);
  }

  std::vector<ModelTensor> tensors;
  std::vector<std::byte> source_bytes;
  std::vector<std::byte> target_bytes;
  Side from;
  Side into;
};

inline ExecuteReport run(FilePair& pair, const CopyPlan& plan, ExecutorOptions options = {}) {
  support::MemorySource source(pair.from.layout);
  support::MemorySink sink(pair.into.layout);
  return Executor(std::move(options)).submit(plan, source, &sink).wait();
}

}  // namespace ferry::distckpt::executor_test
