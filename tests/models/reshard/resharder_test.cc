#include "models/reshard/resharder.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/models/tiny_training.h"
#include "tests/support/random_boxes.h"

namespace ferry::models {
namespace resharder_test {

using distckpt::Box;
using distckpt::DType;
using distckpt::LocalShard;
using distckpt::ShardedTensor;
using support::Random;

// The boxes of some tensors that each rank has; every tensor in boxes of its own, with replicas.
using Mesh = std::vector<std::vector<ShardedTensor>>;

struct Whole {
  std::string key{};
  DType dtype = DType::kF32;
  distckpt::Shape shape{};
};

Mesh random_mesh(Random& random,
                 const std::vector<Whole>& tensors,
                 int world,
                 const std::vector<int>& ranks) {
  Mesh mesh(static_cast<std::size_t>(world));
  for (const auto& whole : tensors) {
    for (const auto& box : support::random_tiling(random, whole.shape, 5)) {
      auto order = ranks;
      random.shuffle(order);
      const auto holders =
          random.chance(40) ? random.between(1, static_cast<std::int64_t>(ranks.size())) : 1;
      for (int replica = 0; replica < holders; ++replica) {
        mesh[static_cast<std::size_t>(order[static_cast<std::size_t>(replica)])].push_back(
            {.key = whole.key,
             .dtype = whole.dtype,
             .local_shape = box.size,
             .global_shape = whole.shape,
             .global_offset = box.offset,
             .replica_id = {replica}});
      }
    }
  }
  return mesh;
}

at::Tensor part_of(const at::Tensor& whole, const Box& box) {
  auto part = whole;
  for (int d = 0; d < box.rank(); ++d) part = part.narrow(d, box.offset[d], box.size[d]);
  return part;
}

// Shards of a rank in memory that is transposed where it can be, and that memory.
struct Memory {
  std::vector<LocalShard> shards{};
  std::vector<at::Tensor> values{};
};
Memory memory_of(const std::vector<ShardedTensor>& tensors) {
  Memory memory;
  for (const auto& tensor : tensors) {
    const auto& size = tensor.local_shape;
    std::vector<std::int64_t> sizes(size.begin(), size.end());
    std::ranges::reverse(sizes);
    std::vector<std::int64_t> back(sizes.size());
    for (std::size_t d = 0; d < back.size(); ++d)
      back[d] = static_cast<std::int64_t>(back.size() - 1 - d);
    auto value = at::full(sizes, -1, scalar_type(tensor.dtype)).permute(back);
    memory.shards.push_back({.tensor = tensor,
                             .data = static_cast<std::byte*>(value.data_ptr()),
                             .strides = distckpt::Dims(std::span<const std::int64_t>(
                                 value.strides().data(), value.strides().size()))});
    memory.values.push_back(value);
  }
  return memory;
}

struct Ranks {
  const char* name;
  std::vector<int> source, target;
};

TEST(Resharder, MovesWhatEachRankLacksBetweenAnyTwoMeshes) {
  constexpr int kWorld = 4;
  std::atomic<std::int64_t> most_rounds = 0;
  for (const auto& ranks :
       {Ranks{"same", {0, 1, 2, 3}, {0, 1, 2, 3}}, Ranks{"disjoint", {0, 1}, {2, 3}},
        Ranks{"overlapping", {0, 1, 2}, {1, 2, 3}}}) {
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      SCOPED_TRACE(fmt::format("{} {}", ranks.name, seed));
      Random random(seed);
      std::vector<Whole> tensors;
      std::vector<at::Tensor> values;
      for (int i = 0; i < 6; ++i) {
        const auto shape =
            support::random_shape(random, static_cast<int>(random.between(1, 3)), 1, 40);
        tensors.push_back(
            {fmt::format("tensor {}", i), random.chance(50) ? DType::kBF16 : DType::kF32, shape});
        values.push_back(
            at::arange(shape.product(), at::kFloat)
                .remainder(251)
                .view(at::IntArrayRef(&*shape.begin(), static_cast<std::size_t>(shape.rank())))
                .to(scalar_type(tensors.back().dtype)));
      }
      const auto sources = random_mesh(random, tensors, kWorld, ranks.source);
      const auto targets = random_mesh(random, tensors, kWorld, ranks.target);
      run_ranks(kWorld, {}, [&](World& world) {
        const auto me = static_cast<std::size_t>(world.rank());
        auto source = memory_of(sources[me]);
        auto target = memory_of(targets[me]);
        const auto value_of = [&](const ShardedTensor& tensor) {
          const auto i = std::ranges::find(tensors, tensor.key, &Whole::key) - tensors.begin();
          return part_of(values[static_cast<std::size_t>(i)], tensor.box());
        };
        for (std::size_t i = 0; i < source.values.size(); ++i)
          source.values[i].copy_(value_of(sources[me][i]));
        Resharder resharder(world, "reshard", source.shards, target.shards, {.bucket_bytes = 1});
        for (int round = 0; round < 2; ++round) {
          for (auto& value : target.values) value.fill_(-1);
          const auto report = resharder.run_and_verify();
          for (std::size_t i = 0; i < target.values.size(); ++i)
            EXPECT_TRUE(at::equal(target.values[i], value_of(targets[me][i])))
                << targets[me][i].key;
          EXPECT_TRUE(!sources[me].empty() || report.bytes_sent == 0);
          EXPECT_TRUE(!targets[me].empty() || report.bytes_received == 0);
          most_rounds = std::max(most_rounds.load(), report.rounds);
        }
      });
    }
  }
  EXPECT_GT(most_rounds, 3);
}

at::Tensor words_of(const at::Tensor& value) {
  return value.contiguous().view({-1}).view(at::kShort);
}

// Bytes that ranks have sent in so many steps of training, of what they would have sent.
double share_sent(Delta delta, int steps) {
  Random layout(5);
  const std::vector<Whole> tensors{{"matrix", DType::kBF16, {60, 70}},
                                   {"vector", DType::kF32, {900}},
                                   {"still", DType::kBF16, {200}}};
  const auto sources = random_mesh(layout, tensors, 4, {0, 1});
  const auto targets = random_mesh(layout, tensors, 4, {2, 3});
  std::atomic<std::int64_t> sent = 0;
  std::atomic<std::int64_t> whole = 0;
  run_ranks(4, {}, [&](World& world) {
    const auto me = static_cast<std::size_t>(world.rank());
    std::vector<at::Tensor> values;
    for (const auto& one : tensors)
      values.push_back(
          at::zeros(at::IntArrayRef(one.shape.begin(), one.shape.end()), scalar_type(one.dtype)));
    const auto value_of = [&](const ShardedTensor& tensor) {
      const auto i = std::ranges::find(tensors, tensor.key, &Whole::key) - tensors.begin();
      return part_of(values[static_cast<std::size_t>(i)], tensor.box());
    };
    const auto source = memory_of(sources[me]);
    const auto target = memory_of(targets[me]);
    Resharder resharder(world, "delta", source.shards, target.shards,
                        {.bucket_bytes = 8192, .delta = delta});
    std::int64_t first = 0;  // bytes of the first run, which sends all
    Random random(7);        // the same on all ranks
    for (int step = 0; step < steps; ++step) {
      for (std::size_t i = 0; i < 2; ++i) {
        const auto words = words_of(values[i]);
        const auto changes = step == steps / 2
                                 ? words.numel()
                                 : random.between(0, words.numel() / 50);  // once most of them
        for (std::int64_t change = 0; change < changes; ++change)
          words.mutable_data_ptr<std::int16_t>()[random.between(0, words.numel() - 1)] =
              static_cast<std::int16_t>(random.bits());
      }
      for (std::size_t i = 0; i < source.values.size(); ++i)
        source.values[i].copy_(value_of(sources[me][i]));
      const bool look = step + 1 == steps || step == steps / 2 || random.chance(3);
      const auto report = look ? resharder.run_and_verify() : resharder.run();
      sent += report.bytes_sent;
      if (step == 0) whole += report.bytes_sent * steps;
      if (step == 0) first = report.bytes_sent;
      EXPECT_EQ(report.kept_bytes, first);
      for (std::size_t i = 0; look && i < target.values.size(); ++i)
        ASSERT_TRUE(at::equal(words_of(target.values[i]), words_of(value_of(targets[me][i]))))
            << "step " << step << ", " << targets[me][i].key;
    }
  });
  return static_cast<double>(sent) / static_cast<double>(whole);
}

TEST(Resharder, SendsOnlyWhatChangedAndIsTheSameAfterAThousandSteps) {
  const auto share = share_sent(Delta::kOnDevice, 1000);
  EXPECT_GT(share, 0.005);
  EXPECT_LT(share,
            0.05);  // 1 % of the elements, on average; 3 bytes for 2, and a count for each 256
  EXPECT_LT(share_sent(Delta::kOnHost, 40), 0.2);  // three of them send everything
}

TEST(Resharder, RefusesSidesThatDoNotFit) {
  const auto tensor = [](std::string key, std::int64_t rows, DType dtype = DType::kF32) {
    return ShardedTensor{.key = std::move(key),
                         .dtype = dtype,
                         .local_shape = {rows},
                         .global_shape = {rows},
                         .global_offset = {0},
                         .replica_id = {0}};
  };
  using distckpt::plan_between_ranks;
  EXPECT_THROW(plan_between_ranks({{tensor("a", 4)}}, {{tensor("b", 4)}}), Error);
  EXPECT_THROW(plan_between_ranks({{tensor("a", 4)}}, {{tensor("a", 4), tensor("b", 4)}}), Error);
  EXPECT_THROW(plan_between_ranks({{tensor("a", 4)}}, {{tensor("a", 4, DType::kBF16)}}), Error);
  // Padding is dropped, or filled with zeros.
  const auto longer = plan_between_ranks({{tensor("a", 4)}}, {{tensor("a", 6)}});
  ASSERT_EQ(longer.fills.size(), 1U);
  EXPECT_EQ(longer.fills[0].box, (Box{{4}, {2}}));
  const auto shorter = plan_between_ranks({{tensor("a", 6)}}, {{tensor("a", 4)}});
  ASSERT_EQ(shorter.copies.size(), 1U);
  EXPECT_EQ(shorter.copies[0].box, (Box{{0}, {4}}));
}

struct Meshes {
  const char* family;
  models::ParallelConfig source, target;
  Alignment target_alignment = Alignment::kFast;
};

TEST(Resharder, TurnsTheTrainersModelIntoTheRollouts) {
  using Parallel = models::ParallelConfig;
  const std::vector<Meshes> all{
      {"llama", Parallel{.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2},
       Parallel{.tensor_model_parallel_size = 4}},
      {"qwen2", Parallel{.pipeline_model_parallel_size = 4},
       Parallel{.tensor_model_parallel_size = 2}, Alignment::kBitwise},
      {"qwen3_moe",
       Parallel{.pipeline_model_parallel_size = 2,
                .expert_model_parallel_size = 2,
                .expert_tensor_parallel_size = 1},
       Parallel{.tensor_model_parallel_size = 4,
                .expert_model_parallel_size = 1,
                .expert_tensor_parallel_size = 4}},
  };
  for (const auto& one : all) {
    SCOPED_TRACE(one.family);
    const auto config = support::tiny_config({.family = one.family, .num_layers = 4, .experts = 8});
    run_ranks(4, {}, [&](World& world) {
      auto source_parallel = one.source;
      auto target_parallel = one.target;
      source_parallel.make_vocab_size_divisible_by = target_parallel.make_vocab_size_divisible_by =
          2;
      const ParallelState training(world, source_parallel, "training");
      const ParallelState rollout(world, target_parallel, "rollout");
      const auto trained = make_stage(config, training, {});
      for (const auto& chunk : trained) support::fill_parameters(*chunk, 3);
      const auto served = make_stage(config, rollout, {.alignment = one.target_alignment});
      const auto expected = make_stage(config, rollout, {.alignment = one.target_alignment});
      for (const auto& chunk : expected) support::fill_parameters(*chunk, 3);
      Resharder resharder(world, "reshard", sharded_state_dict(trained),
                          sharded_state_dict(served));
      const auto check = [&] {
        resharder.run_and_verify();
        for (std::size_t chunk = 0; chunk < served.size(); ++chunk) {
          const auto& got = served[chunk]->parameters().all();
          const auto& wanted = expected[chunk]->parameters().all();
          ASSERT_EQ(got.size(), wanted.size());
          for (std::size_t i = 0; i < got.size(); ++i)
            EXPECT_TRUE(at::equal(got[i].value, wanted[i].value)) << got[i].spec.key;
        }
      };
      check();
      // Again, with everything elsewhere.
      const auto move = [](Parameters& parameters) {
        for (std::size_t leaf = 0; leaf < parameters.leaves().size(); ++leaf)
          parameters.rebind(leaf, at::empty_like(parameters.leaves()[leaf].value.detach()));
      };
      for (const auto& chunk : trained) move(chunk->parameters());
      for (const auto& chunk : served) {
        move(chunk->parameters());
        for (const auto& parameter : chunk->parameters().all()) parameter.value.zero_();
      }
      resharder.set_memory(owner_addresses(trained), owner_addresses(served));
      check();
    });
  }
}

}  // namespace resharder_test
}  // namespace ferry::models
