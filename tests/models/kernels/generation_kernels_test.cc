// The kernels that generation alone calls.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <vector>

#include "models/kernels/attention/attention_cuda.h"
#include "models/kernels/attention/paged_attention.h"
#include "models/kernels/log_probs.h"
#include "models/kernels/rotary_cuda.h"
#include "tests/models/cuda_fixture.h"

namespace ferry::models {
namespace generation_kernels_test {

using GenerationKernels = CudaKernels;

struct Heads {
  std::int64_t heads, groups, dim;
  std::int64_t value_dim = dim;
};

// Lengths at both sides of what a block of the cache, and of flash's keys, has.
TEST_F(GenerationKernels, DecodedRowsAreThoseOfThePrefill) {
  const std::vector<std::int64_t> ten{1, 2, 63, 64, 65, 128, 129, 300, 1000, 2049};
  std::vector<std::int64_t> many = ten;
  for (int i = 0; i < 60; ++i) many.push_back(40 * i + 1);
  constexpr std::int64_t kBlockSize = 64;
  constexpr std::int64_t kMaxBlocks = 70;
  const auto ints = at::TensorOptions().dtype(at::kInt);
  for (const auto& lengths : {ten,
                              many,
                              {4400},  // few are computed by clusters
                              {4097, 385},
                              {513, 1, 0, 2560}})
    for (const auto& [heads, groups, dim, value_dim] :
         {Heads{12, 2, 128}, Heads{32, 8, 128}, Heads{40, 2, 128}, Heads{14, 2, 64},
          Heads{16, 2, 256}, Heads{16, 16, 192, 128}})
      for (const auto window : {std::optional<std::int64_t>(), std::optional<std::int64_t>(100),
                                std::optional<std::int64_t>(1030)}) {
        const auto sequences = static_cast<std::int64_t>(lengths.size());
        const AttentionOptions options{
            .scale = 0.08, .window = window, .alignment = Alignment::kBitwise};
        const auto query = random({sequences, heads, dim});
        PagedKeys keys{.key = random({sequences * kMaxBlocks, kBlockSize, groups, dim}),
                       .value = random({sequences * kMaxBlocks, kBlockSize, groups, value_dim})};
        const auto tables =
            at::randperm(sequences * kMaxBlocks, ints).view({sequences, kMaxBlocks}).contiguous();
        keys.block_tables = tables.cuda();
        keys.lengths = at::tensor(lengths, ints).cuda();
        const auto got = paged_attention_cuda(query, keys, options);
        for (std::int64_t i = 0; i < sequences; ++i) {
          const auto length = lengths[static_cast<std::size_t>(i)];
          if (length == 0) {
            EXPECT_TRUE(at::equal(got[i], at::zeros_like(got[i])));
            continue;
          }
          const auto all = [&](const at::Tensor& cache) {
            return cache.index_select(0, keys.block_tables[i]).flatten(0, 1).narrow(0, 0, length);
          };
          auto rows = random({length, heads, dim});
          rows[length - 1].copy_(query[i]);
          const auto whole = attention_cuda(rows, all(keys.key), all(keys.value),
                                            {{0, length, 0, length}}, options);
          EXPECT_TRUE(same_bytes(got[i], whole[length - 1]))
              << dim << " " << groups << " " << length;
        }
      }
}

// Few rows share out their keys, so that their bits are not the prefill's.
TEST_F(GenerationKernels, FewDecodedRowsThatShareOutTheirKeysAreNearThoseOfProducts) {
  constexpr std::int64_t kMaxBlocks = 140;
  const auto ints = at::TensorOptions().dtype(at::kInt);
  for (const auto& [heads, groups, dim, value_dim] :
       {Heads{12, 2, 128}, Heads{32, 8, 128}, Heads{40, 2, 128}, Heads{14, 2, 64}, Heads{64, 8, 64},
        Heads{16, 2, 256}, Heads{16, 16, 192, 128}})
    for (const auto& lengths :
         {std::vector<std::int64_t>{8900}, {1, 0, 65, 513, 1024, 4100, 8960, 17}})
      for (const bool windowed : {false, true})
        for (const bool sinks : {false, true}) {
          const auto sequences = static_cast<std::int64_t>(lengths.size());
          AttentionOptions options{.scale = 0.08, .alignment = Alignment::kFast};
          if (windowed) options.window = 300;
          if (sinks) options.sinks = random({heads}) * 4;
          const auto query = random({sequences, heads, dim});
          PagedKeys keys{.key = random({sequences * kMaxBlocks, 64, groups, dim}),
                         .value = random({sequences * kMaxBlocks, 64, groups, value_dim})};
          keys.block_tables =
              at::randperm(sequences * kMaxBlocks, ints).view({sequences, kMaxBlocks}).cuda();
          keys.lengths = at::tensor(lengths, ints).cuda();
          const auto got = paged_attention_cuda(query, keys, options);
          EXPECT_TRUE(same_bytes(paged_attention_cuda(query, keys, options), got));
          const auto wide = [](const at::Tensor& x) { return x.to(at::kFloat); };
          PagedKeys exact = keys;
          exact.key = wide(keys.key);
          exact.value = wide(keys.value);
          if (sinks) options.sinks = wide(options.sinks);
          auto expected = paged_attention_by_products(wide(query), exact, options);
          expected.masked_fill_((keys.lengths == 0).view({-1, 1, 1}), 0);
          EXPECT_TRUE(at::allclose(wide(got), expected, 2e-2, 4e-3))
              << heads << " heads of " << dim << ", " << sequences << " sequences, "
              << (wide(got) - expected).abs().max().item<float>();
        }
}

// All heads of a sequence read its latents once, few sequences in shares.
TEST_F(GenerationKernels, DecodedRowsOverLatentsAreNearThoseOfProducts) {
  constexpr std::int64_t kLatent = 512;
  constexpr std::int64_t kMaxBlocks = 70;
  const auto ints = at::TensorOptions().dtype(at::kInt);
  const AttentionOptions options{.scale = 0.07, .alignment = Alignment::kFast};
  const std::vector<std::int64_t> many(150, 300);
  for (const std::int64_t heads : {1, 16, 20, 64, 128})
    for (const auto& lengths :
         {std::vector<std::int64_t>{4470}, many, {1, 0, 64, 65, 257, 513, 1024, 4100, 4480, 17}}) {
      const auto sequences = static_cast<std::int64_t>(lengths.size());
      const auto query = random({sequences, heads, kLatent + 64});
      const auto cache = random({sequences * kMaxBlocks, 64, 1, kLatent + 64});
      const PagedKeys keys{
          .key = cache,
          .value = cache.narrow(3, 0, kLatent),
          .block_tables =
              at::randperm(sequences * kMaxBlocks, ints).view({sequences, kMaxBlocks}).cuda(),
          .lengths = at::tensor(lengths, ints).cuda()};
      const auto got = paged_attention_cuda(query, keys, options);
      EXPECT_TRUE(same_bytes(paged_attention_cuda(query, keys, options), got));
      for (std::int64_t i = 0; i < sequences; i += sequences / 10 + 1) {
        const auto length = lengths[static_cast<std::size_t>(i)];
        if (length == 0) {
          EXPECT_EQ(got[i].count_nonzero().item<std::int64_t>(), 0);
          continue;
        }
        const auto latents = cache.index_select(0, keys.block_tables[i])
                                 .view({-1, kLatent + 64})
                                 .narrow(0, 0, length)
                                 .to(at::kFloat);
        const auto weights =
            at::softmax(at::matmul(query[i].to(at::kFloat), latents.t()) * options.scale, -1);
        const auto expected = at::matmul(weights, latents.narrow(1, 0, kLatent));
        EXPECT_TRUE(at::allclose(got[i].to(at::kFloat), expected, 2e-2, 4e-3))
            << heads << " heads, " << length << " keys, "
            << (got[i].to(at::kFloat) - expected).abs().max().item<float>();
      }
    }
}

TEST_F(GenerationKernels, RowsGoIntoTheirSlotsOrNowhere) {
  const auto key = random({5, 2, 64});
  const auto value = random({5, 2, 3, 128}).select(2, 1);  // not contiguous
  const auto slots = at::tensor({7, -1, 130, 0, 191}, at::kLong).cuda();
  auto key_cache = at::zeros({3, 64, 2, 64}, key.options());
  auto value_cache = at::zeros({3, 64, 2, 128}, key.options());
  store_in_slots_cuda(key, value, slots, key_cache, value_cache);
  for (const auto& [rows, cache] : {std::pair(key, key_cache), std::pair(value, value_cache)}) {
    auto expected = at::zeros_like(cache).flatten(0, 1);
    for (const std::int64_t i : {0, 2, 3, 4})
      expected[slots[i].item<std::int64_t>()].copy_(rows[i]);
    EXPECT_TRUE(same_bytes(cache.flatten(0, 1), expected));
  }
}

// Few rows have several thread blocks each: a token that is drawn and the trainer's have one
// number.
TEST_F(GenerationKernels, ARowsScoresAreTheSameAmongFewAndMany) {
  for (const auto dtype : {at::kBFloat16, at::kFloat})
    for (const std::int64_t vocabulary : {1, 5, 997, 4096, 12292, 32000, 50001, 151936}) {
      const std::int64_t most = 300;
      const std::int64_t padding = vocabulary % 2 == 0 ? 0 : 3;
      auto logits = random({most, vocabulary + padding}, dtype) * 8;
      logits[1][vocabulary / 2] = std::numeric_limits<float>::infinity();
      logits[2].fill_(-3);
      logits.narrow(1, vocabulary, padding).fill_(1000);
      // The range is a part of a vocabulary, in which some rows have no label.
      const VocabularyRange range{.first = 7, .count = vocabulary};
      const auto labels =
          at::randint(0, vocabulary + 14, {most}, at::TensorOptions(at::kLong).device(at::kCUDA));
      for (const double temperature : {1.0, 0.7}) {
        const auto all = score_rows(logits, labels, range, temperature);
        EXPECT_TRUE(same_bytes(all.log_probs, log_probs_of(all.statistics))) << vocabulary;
        for (const std::int64_t rows : {1, 2, 7, 64, 131, 132}) {
          const auto some = score_rows(logits.narrow(0, 0, rows).clone(), labels.narrow(0, 0, rows),
                                       range, temperature);
          EXPECT_TRUE(same_bytes(some.statistics, all.statistics.narrow(1, 0, rows)))
              << vocabulary << ", rows " << rows;
          EXPECT_TRUE(same_bytes(some.log_probs, all.log_probs.narrow(0, 0, rows)))
              << vocabulary << ", rows " << rows;
        }
      }
    }
}

TEST_F(GenerationKernels, AnglesHaveTheBytesOfHuggingFacesOperations) {
  const auto longs = at::TensorOptions(at::kLong).device(at::kCUDA);
  const auto positions = at::cat({at::arange(5000, longs), at::randint(1 << 24, {5000}, longs)});
  for (const double base : {1e4, 1e6})
    for (const std::int64_t dim : {64, 96, 128})
      for (const double scaling : {1.0, 1.2079441541679836})
        for (const auto dtype : {at::kBFloat16, at::kFloat}) {
          const auto powers =
              at::arange(0, dim, 2, at::kLong).to(at::kFloat) / static_cast<double>(dim);
          const auto inv_freq = at::reciprocal(at::pow(base, powers)).cuda();
          const auto angle = positions.to(at::kFloat).unsqueeze(1) * inv_freq;
          const auto both = at::cat({angle, angle}, -1);
          const auto expected = at::stack({both.cos() * scaling, both.sin() * scaling}).to(dtype);
          const auto got = rotary_angles_cuda(positions, inv_freq, scaling, dtype);
          EXPECT_TRUE(same_bytes(got.squeeze(2), expected)) << base << " " << dim << " " << scaling;
          EXPECT_TRUE(
              same_bytes(rotary_angles_cuda(positions.narrow(0, 6000, 1), inv_freq, scaling, dtype),
                         got.narrow(1, 6000, 1)));
        }
}

}  // namespace generation_kernels_test
}  // namespace ferry::models
