// Shards on the host, and where there is a GPU also there: what a plan writes into them and reads
// out of them again is what the source held.
#include "models/reshard/device_box_io.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "distckpt/execute/executor.h"
#include "distckpt/plan/mesh_layout.h"
#include "tests/support/expect.h"
#include "tests/support/random_boxes.h"

namespace ferry::models {
namespace device_box_io_test {

using distckpt::Box;
using distckpt::DType;
using distckpt::Layout;
using distckpt::LocalShard;
using distckpt::MeshLayout;
using distckpt::Shape;

std::vector<at::Device> devices() {
  std::vector<at::Device> found{at::kCPU};
  if (at::hasCUDA()) found.emplace_back(at::kCUDA, 0);
  return found;
}

// Tensors in host memory beside shards of them that one rank holds all of.
struct Sides {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<distckpt::ModelTensor> tensors;
  distckpt::TensorMap map;
  Layout source;
  std::vector<at::Tensor> memory;
  MeshLayout mesh;

  // Each shape cut along its first dimension into `parts`; odd ones lie column after column.
  Sides(const std::vector<Shape>& shapes, int parts, at::Device device) {
    support::Random random(3);
    std::vector<LocalShard> shards;
    for (std::uint32_t i = 0; i < shapes.size(); ++i) {
      const auto& shape = shapes[i];
      const auto name = "w" + std::to_string(i);
      bytes.push_back(random.bytes(shape.product() * 2));
      const auto storage = source.add_storage(distckpt::MemoryStorage{
          .data = bytes.back().data(), .size = std::ssize(bytes.back()), .owner = nullptr});
      const auto whole = Box::whole(shape);
      source.add_tensor({.name = name,
                         .shape = shape,
                         .shards = {packed_shard(whole, DType::kBF16, storage, 0)}});
      tensors.push_back({.name = name, .shape = shape});
      map.links.push_back({.model = i, .model_box = whole, .stored = i, .stored_box = whole});
      for (int part = 0; part < parts; ++part) {
        auto box = whole;
        box.size[0] = shape[0] / parts;
        box.offset[0] = part * box.size[0];
        memory.push_back(at::full({box.volume()}, 0x7FFF, at::device(device).dtype(at::kShort)));
        LocalShard shard{.tensor = {.key = name,
                                    .local_shape = box.size,
                                    .global_shape = shape,
                                    .global_offset = box.offset},
                         .data = static_cast<std::byte*>(memory.back().data_ptr()),
                         .device = device.is_cpu() ? -1 : device.index(),
                         .owner = nullptr};
        if (part % 2 == 1 && shape.rank() == 2) shard.strides = {1, box.size[0]};
        shards.push_back(std::move(shard));
      }
    }
    mesh = distckpt::make_mesh_layout({{}}, 0, std::move(shards));
  }

  distckpt::PlanSide files() const { return {.layout = &source, .map = &map}; }
  distckpt::PlanSide shards() const { return {.layout = &mesh.layout, .map = &map}; }
};

distckpt::ExecutorOptions options(int threads) {
  return {.threads = threads, .staging = staging_memory(), .on_compared = {}};
}

TEST(DeviceBoxIo, WritesAndReadsWhatTheSourceHolds) {
  for (const auto device : devices()) {
    for (const int threads : {1, 4}) {
      SCOPED_TRACE(device.str() + " with " + std::to_string(threads) + " threads");
      // More than all buffers hold, matrices and vectors, and three dimensions.
      Sides sides({{8192, 4096}, {12, 7}, {40}, {4, 30, 50}, {6000, 3000}}, 4, device);
      const auto plan = part_of_rank(
          distckpt::plan_copy(sides.tensors, sides.files(), sides.shards()), sides.mesh);
      distckpt::MemorySource source(sides.source);
      const auto sink = make_memory_sink(sides.mesh.layout);
      distckpt::Executor(options(threads)).submit_pieces(plan, source, *sink).wait();
      ASSERT_NO_THROW(sink->finish());

      const auto expected = sides.bytes;
      for (auto& bytes : sides.bytes) std::ranges::fill(bytes, std::byte{0});
      const auto back = distckpt::plan_copy(sides.tensors, sides.shards(), sides.files());
      const auto memory = make_memory_source(sides.mesh.layout);
      distckpt::MemorySink host(sides.source);
      distckpt::Executor(options(threads)).submit_pieces(back, *memory, host).wait();
      for (std::size_t i = 0; i < expected.size(); ++i)
        ASSERT_TRUE(support::same_bytes(expected[i], sides.bytes[i])) << "tensor " << i;
      // Another way than the source's: a contiguous shard as torch copies it.
      const auto first = sides.memory.front().cpu();
      ASSERT_TRUE(support::same_bytes(
          std::span(expected.front()).first(static_cast<std::size_t>(first.nbytes())),
          {static_cast<const std::byte*>(first.data_ptr()), first.nbytes()}));
    }
  }
}

TEST(DeviceBoxIo, NamesAShardThatWasNotWrittenWhole) {
  for (const auto device : devices()) {
    const Sides sides({{4, 4}}, 2, device);
    const auto sink = make_memory_sink(sides.mesh.layout);
    EXPECT_TRUE(support::fails(ErrorKind::kBug, {"w0 [0:2, 0:4]", "0 of its 16 bytes"},
                               [&] { sink->finish(); }));
  }
}

TEST(DeviceBoxIo, StopsWhereASourceFails) {
  class Failing : public distckpt::BoxSource {
   public:
    void read(const distckpt::Region&,
              std::span<std::byte>,
              std::vector<distckpt::ChecksumPart>&) override {
      fail(ErrorKind::kIo, "the disk is gone");
    }
  };
  for (const auto device : devices()) {
    const Sides sides({{4096, 4096}, {4096, 4096}}, 4, device);
    const auto plan =
        part_of_rank(distckpt::plan_copy(sides.tensors, sides.files(), sides.shards()), sides.mesh);
    Failing source;
    const auto sink = make_memory_sink(sides.mesh.layout);
    EXPECT_TRUE(support::fails(ErrorKind::kIo, {"the disk is gone"}, [&] {
      distckpt::Executor(options(4)).submit_pieces(plan, source, *sink).wait();
    }));
  }
}

}  // namespace device_box_io_test
}  // namespace ferry::models
