// Messages through the memory of other GPUs, against the formula and NCCL.
#include "models/peer/peer_memory.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "models/distributed/process_group.h"
#include "models/kernels/rms_norm.h"
#include "tests/models/cuda_fixture.h"
#include "tests/support/models/gpu_ranks.h"

namespace ferry::models {
namespace peer_memory_test {

const World::Options kOnGpu{.device = at::Device(at::kCUDA), .timeout = std::chrono::seconds(30)};

// Both see all ranks; only the first exchanges through the ranks' memory.
struct Groups {
  explicit Groups(World& world)
      : peers(world, "peers", all_ranks(world)), nccl(world, "nccl", all_ranks(world)) {
    peers.map_peer_memory();
    EXPECT_NE(peers.peer_memory(), nullptr);
  }
  static std::vector<int> all_ranks(const World& world) {
    std::vector<int> ranks(static_cast<std::size_t>(world.size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  ProcessGroup peers;
  ProcessGroup nccl;
};

// The tensors of the ranks, which all ranks know.
std::vector<at::Tensor> of_all_ranks(const World& world,
                                     at::IntArrayRef shape,
                                     at::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world.size(); ++rank)
    all.push_back((at::randn(shape, at::TensorOptions().device(at::kCUDA)) * 100).to(dtype));
  return all;
}

at::Tensor sum_of(const std::vector<at::Tensor>& all) {
  const auto dtype = all[0].scalar_type();
  const bool narrow = dtype == at::kBFloat16;
  auto sum = narrow ? all[0].to(at::kFloat) : all[0].clone();
  for (std::size_t rank = 1; rank < all.size(); ++rank) sum.add_(all[rank]);
  return sum.to(dtype);
}

void expect_close(const at::Tensor& got, const at::Tensor& expected, std::int64_t size) {
  const auto error = (got.to(at::kDouble) - expected.to(at::kDouble)).norm().item<double>();
  EXPECT_LE(error, 0.01 * expected.to(at::kDouble).norm().item<double>()) << size;
}

// Takes a step, and then records it.
void run_and_capture(const std::function<void()>& step, at::cuda::CUDAGraph& graph) {
  step();
  c10::cuda::getCurrentCUDAStream().synchronize();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  step();
  graph.capture_end();
}

// Two ranks add up at once what four, past 256 KiB, add up a part each.
class PeerMemory : public testing::TestWithParam<int> {};

TEST_P(PeerMemory, SumsAndGathersAsAtenAndNccl) {
  support::on_gpus(GetParam(), kOnGpu, [](World& world) {
    const Groups groups(world);
    const auto me = static_cast<std::size_t>(world.rank());
    at::manual_seed(1);
    for (const auto dtype : {at::kBFloat16, at::kFloat, at::kInt}) {
      // Up to and past 256 KiB, 8 MiB and 16 MiB, and numbers that are no multiple of 16 bytes.
      for (const std::int64_t size :
           {1, 8, 24, 1000, 4096, 4099, 65536, 65544, 131072, 131080, 1 << 20, (1 << 20) + 24,
            4 << 20, (4 << 20) + 16, 8 << 20, (8 << 20) + 16}) {
        const auto all = of_all_ranks(world, {size}, dtype);
        const auto sum = groups.peers.all_reduce(all[me]);
        EXPECT_TRUE(same_bytes(sum, sum_of(all))) << size << " " << dtype;
        expect_close(groups.nccl.all_reduce(all[me]), sum, size);
        const auto gathered = groups.peers.all_gather(all[me]);
        EXPECT_TRUE(same_bytes(gathered, at::cat(all))) << size;
        EXPECT_TRUE(same_bytes(groups.nccl.all_gather(all[me]), gathered)) << size;
        const auto parts = of_all_ranks(world, {world.size() * size}, dtype);
        EXPECT_TRUE(same_bytes(groups.peers.reduce_scatter(parts[me]),
                               sum_of(parts).narrow(0, world.rank() * size, size)))
            << size;
      }
    }
    for (const std::int64_t rows : {1, 3, 16, 256, 300, 5000, 20001}) {
      for (const std::int64_t channels : {8, 12, 2048, 6144}) {
        const auto all = of_all_ranks(world, {rows, channels}, at::kBFloat16);
        const auto gathered = groups.peers.all_gather_channels(all[me]);
        EXPECT_TRUE(same_bytes(gathered, at::cat(all, 1))) << rows << " " << channels;
        EXPECT_TRUE(same_bytes(groups.nccl.all_gather_channels(all[me]), gathered)) << rows;
      }
    }
    // A message that does not begin on 16 bytes.
    const auto all = of_all_ranks(world, {65}, at::kBFloat16);
    EXPECT_TRUE(same_bytes(groups.peers.all_reduce(all[me].narrow(0, 1, 64)),
                           sum_of(all).narrow(0, 1, 64)));
    groups.peers.barrier();
  });
}

// The places of rows on a rank, its own first; each lies with the rank that `owners` has for it.
struct ScatteredRows {
  ScatteredRows(const at::Tensor& owners, std::int64_t rank)
      : order(at::argsort(owners.ne(rank).to(at::kInt), /*stable=*/true)),
        places(at::empty_like(order)),
        end(owners.eq(rank).sum().to(at::kInt).view({1})) {
    places.scatter_(0, order, at::arange(order.size(0), order.options()));
  }
  at::Tensor brought_by(const ProcessGroup& group, const at::Tensor& rows) const {
    return group.all_to_all_rows(rows.index_select(0, order), places, end);
  }

  at::Tensor order, places, end;
};

TEST_P(PeerMemory, BringsRowsToTheirRanks) {
  support::on_gpus(GetParam(), kOnGpu, [](World& world) {
    const Groups groups(world);
    at::manual_seed(3);
    const auto options = at::TensorOptions().device(at::kCUDA);
    for (const auto dtype : {at::kBFloat16, at::kFloat}) {
      for (const std::int64_t of_rank : {1, 3, 16, 512, 3000}) {
        for (const std::int64_t channels : {8, 12, 264, 2048, 6144}) {
          const auto all = of_rank * world.size();
          const auto rows = at::randn({all, channels}, options).to(dtype);
          auto owners = at::randint(world.size(), {all}, options.dtype(at::kLong));
          if (of_rank == 16) owners.fill_(world.size() - 1);  // others have nothing
          const ScatteredRows scattered(owners, world.rank());
          const auto expected = rows.narrow(0, world.rank() * of_rank, of_rank);
          for (const auto* const group : {&groups.peers, &groups.nccl})
            EXPECT_TRUE(same_bytes(scattered.brought_by(*group, rows), expected))
                << of_rank << " x " << channels << " " << dtype << " " << group->name();
        }
      }
    }
    groups.peers.barrier();
  });
}

// All that a graph does is compared in the graph, at every one of thousands of replays, of which
// some begin late on one rank or the other.
TEST_P(PeerMemory, KeepsItsBitsInGraphsOfManyExchanges) {
  support::on_gpus(GetParam(), kOnGpu, [](World& world) {
    const Groups groups(world);
    const auto me = static_cast<std::size_t>(world.rank());
    at::manual_seed(2);
    std::vector<std::vector<at::Tensor>> messages;
    for (const std::int64_t rows : {1, 2, 16, 40, 256})
      messages.push_back(of_all_ranks(world, {rows, 4096}, at::kBFloat16));
    for (const std::int64_t rows : {1040, 2304})  // gathers of several parts
      messages.push_back(of_all_ranks(world, {rows, 4096}, at::kBFloat16));
    auto wrong = at::zeros({}, at::TensorOptions().device(at::kCUDA).dtype(at::kLong));
    const auto owners = at::randint(world.size(), {messages.back()[0].size(0)},
                                    at::TensorOptions().device(at::kCUDA).dtype(at::kLong));
    const ScatteredRows scattered(owners, world.rank());
    const auto step = [&] {
      for (auto& all : messages) {
        for (auto& one : all) one.mul_(-1).add_(0.5);
        wrong.add_(groups.peers.all_reduce(all[me]).ne(sum_of(all)).sum());
        if (const auto& rows = all[0]; rows.size(0) == owners.size(0))
          wrong.add_(scattered.brought_by(groups.peers, rows)
                         .ne(rows.view({world.size(), -1, 4096})[world.rank()])
                         .sum());
        wrong.add_(groups.peers.all_gather_channels(all[me]).ne(at::cat(all, 1)).sum());
        if (all[me].size(0) > 256) continue;
        wrong.add_(groups.peers.reduce_scatter(all[me].view({-1}))
                       .ne(sum_of(all).view({world.size(), -1})[world.rank()])
                       .sum());
      }
    };
    at::cuda::CUDAGraph graph;
    run_and_capture(step, graph);
    constexpr int kReplays = 3000;
    for (int i = 0; i < kReplays; ++i) {
      if (i % 7 == world.rank()) at::cuda::sleep(std::int64_t{20000} * (i % 11));
      graph.replay();
      if (i % 100 == 0) step();  // without the graph
    }
    EXPECT_EQ(wrong.item<std::int64_t>(), 0);
    groups.peers.barrier();
  });
}

// The norm of all heads (OLMo 2, MiniMax-M2): its weight, too, has just been gathered, from a rank
// that may be late, while the kernels behind have begun.
TEST_P(PeerMemory, NormsByAGatheredWeight) {
  support::on_gpus(GetParam(), kOnGpu, [](World& world) {
    const Groups groups(world);
    const auto me = static_cast<std::size_t>(world.rank());
    at::manual_seed(4);
    const auto rows = of_all_ranks(world, {4, 1024}, at::kBFloat16);
    auto weights = of_all_ranks(world, {1, 1024}, at::kBFloat16);
    const auto all_rows = at::cat(rows, 1);
    const auto all_weights = at::cat(weights, 1).squeeze(0);
    auto wrong = at::zeros({}, at::TensorOptions().device(at::kCUDA).dtype(at::kLong));
    const auto step = [&] {
      weights[me].neg_();
      all_weights.neg_();
      const auto weight = groups.peers.all_gather_channels(weights[me]).squeeze(0);
      const auto x = groups.peers.all_gather_channels(rows[me]);
      const auto normed = rms_norm(x, weight, 1e-6, NormRounding::kBeforeWeight, /*gathered=*/true);
      wrong.add_(normed.ne(rms_norm(all_rows, all_weights, 1e-6)).sum());
    };
    at::cuda::CUDAGraph graph;
    run_and_capture(step, graph);
    constexpr int kReplays = 1000;
    for (int i = 0; i < kReplays; ++i) {
      if (i % 7 == world.rank()) at::cuda::sleep(std::int64_t{20000} * (i % 11));
      graph.replay();
    }
    EXPECT_EQ(wrong.item<std::int64_t>(), 0);
    groups.peers.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, PeerMemory, testing::Values(2, 4));

TEST(PeerMemoryOfTwo, NamesTheRankThatDies) {
  auto options = kOnGpu;
  options.timeout = std::chrono::seconds(4);
  support::on_gpus(
      2, options,
      [](World& world) {
        const Groups groups(world);
        const auto mine = at::ones({4096}, at::TensorOptions().device(at::kCUDA));
        for (int i = 0; i < 10; ++i) (void)groups.peers.all_reduce(mine);
        (void)groups.peers.all_reduce(mine).cpu();
        if (world.rank() == 1) std::_Exit(3);
        (void)groups.peers.all_reduce(mine).cpu();  // never ends
      },
      [](const std::vector<support::EndOfRank>& ends) {
        EXPECT_EQ(ends[1].status, 3) << ends[1].output;
        EXPECT_EQ(ends[0].status, 2) << ends[0].output;
        for (const char* const text : {"group peers of ranks 0, 1: all_reduce", "missing: rank 1"})
          EXPECT_NE(ends[0].output.find(text), std::string::npos) << ends[0].output;
      });
}

}  // namespace peer_memory_test
}  // namespace ferry::models
