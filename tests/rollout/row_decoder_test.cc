// The kernel of one row against the layers that it computes over again.
#include "models/decode_row/row_decoder.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <string>

#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "rollout/kv_cache.h"
#include "rollout/paged_context.h"
#include "tests/support/models/gpu_ranks.h"

namespace ferry::rollout {
namespace row_decoder_test {

using models::Alignment;

constexpr std::int64_t kBlocks = 96;

struct Case {
  const char* name;
  std::int64_t hidden, ffn, heads, groups, dim;
  bool bias = false;
  bool qk_layernorm = false;
  std::optional<std::int64_t> window{};
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.name;
}

class RowDecoder : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
    at::manual_seed(1);
  }
};

// A step that has the layers' own kernels.
class LayerByLayer : public PagedContext {
 public:
  using PagedContext::PagedContext;
  std::optional<models::DecodedRow> only_row() const override { return std::nullopt; }
};

models::TransformerConfig config_of(const Case& one) {
  return {.num_layers = 3,
          .hidden_size = one.hidden,
          .ffn_hidden_size = one.ffn,
          .num_attention_heads = one.heads,
          .num_query_groups = one.groups,
          .kv_channels = one.dim,
          .vocab_size = 512,
          .max_position_embeddings = kBlocks * KVCache::kBlockSize,
          .layernorm_epsilon = 1e-6,
          .sliding_window = one.window,
          .add_qkv_bias = one.bias,
          .qk_layernorm = one.qk_layernorm};
}

at::Tensor like(const at::Tensor& x, double scale) {
  return (at::randn(x.sizes(), x.options().dtype(at::kFloat)) * scale).to(x.scalar_type());
}

// The error of `got`, as a share of what is expected.
double difference(const at::Tensor& got, const at::Tensor& expected) {
  const auto wide = expected.to(at::kFloat);
  return (got.to(at::kFloat) - wide).norm().item<double>() / wide.norm().item<double>();
}

void compare_with_layers(const Case& shape, models::World& world) {
  const at::NoGradGuard no_grad;
  const auto config = config_of(shape);
  const models::ParallelState mesh(world, {.tensor_model_parallel_size = world.size()}, shape.name);
  mesh.tp().map_peer_memory();
  const models::GPTModel model(config, mesh,
                               models::stage_chunks(config, mesh.shape().parallel(), 0)[0],
                               {.alignment = Alignment::kFast});
  for (const auto& parameter : model.parameters().all()) {
    const auto& value = parameter.value;
    value.copy_(value.dim() == 1 ? 1 + like(value, 0.2) : like(value, 0.03));
  }
  KVCache cache(model, kBlocks);
  KVCache other(model, kBlocks);
  const auto longs = at::TensorOptions().device(at::kCUDA).dtype(at::kLong);
  const auto table = at::randperm(kBlocks, longs).to(at::kInt).unsqueeze(0);
  int others = 0;  // results with other bits
  for (const std::int64_t length : {1, 2, 63, 64, 65, 130, 1000, 1025, 3000, 6144}) {
    for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
      for (const auto& [one, two] : {std::pair(cache.key(layer), other.key(layer)),
                                     std::pair(cache.value(layer), other.value(layer))}) {
        one.copy_(like(one, 1));
        two.copy_(one);
      }
    }
    const auto position = length - 1;
    const auto block = table[0][position / KVCache::kBlockSize].item<std::int64_t>();
    const PagedStep step{
        .groups = {{.slots = at::full(
                        {1}, block * KVCache::kBlockSize + position % KVCache::kBlockSize, longs),
                    .block_tables = table}},
        .lengths = at::full({1}, length, longs.dtype(at::kInt)),
        .num_decodes = 1};
    const auto token = at::full({1}, length % config.vocab_size, longs);
    const auto run = [&](auto&& context) {
      return model.forward(token, at::full({1}, position, longs), context).clone();
    };
    const auto expected = run(LayerByLayer(other, step));
    const auto got = run(PagedContext(cache, step));
    others += at::equal(got, expected) ? 0 : 1;
    EXPECT_LT(difference(got, expected), 0.02) << length;
    for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
      EXPECT_LT(difference(cache.key(layer), other.key(layer)), 0.02) << length << " " << layer;
      EXPECT_LT(difference(cache.value(layer), other.value(layer)), 0.02) << length << " " << layer;
      // Slots that keep nothing do not change: the caches are the same except for one slot.
      EXPECT_LE(cache.key(layer).ne(other.key(layer)).flatten(2).any(2).sum().item<std::int64_t>(),
                1);
      EXPECT_LE(
          cache.value(layer).ne(other.value(layer)).flatten(2).any(2).sum().item<std::int64_t>(),
          1);
    }
    EXPECT_TRUE(at::equal(run(PagedContext(cache, step)), got)) << "another result of the same row";
  }
  EXPECT_GT(others, 0) << "the same kernels: the row's was never asked";
}

TEST_P(RowDecoder, ItsRowIsThatOfTheLayers) {
  models::World world({.device = at::Device(at::kCUDA, 0)});
  compare_with_layers(GetParam(), world);
}

TEST(RowDecoderOfRanks, ItsRowIsThatOfTheLayers) {
  support::on_gpus(2, {.device = at::Device(at::kCUDA)}, [](models::World& world) {
    at::manual_seed(1);
    compare_with_layers({"Qwen2_1B5", 1536, 8960, 12, 2, 128, true}, world);
    compare_with_layers({"Qwen3_8B", 4096, 12288, 32, 8, 128, false, true}, world);
  });
}

INSTANTIATE_TEST_SUITE_P(All,
                         RowDecoder,
                         testing::Values(Case{"Qwen2_1B5", 1536, 8960, 12, 2, 128, true},
                                         Case{"Qwen2_0B5", 896, 4864, 14, 2, 64, true},
                                         Case{"Qwen3_0B6", 1024, 3072, 16, 8, 128, false, true},
                                         Case{"Llama_8B", 4096, 14336, 32, 8, 128},
                                         Case{"ManyHeadsOfAGroup", 1280, 2048, 40, 2, 64},
                                         Case{"EachHeadItsKeys", 2048, 1000, 32, 32, 64},
                                         Case{"SlidingWindow", 512, 1024, 8, 2, 128, false, false,
                                              100}),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace row_decoder_test
}  // namespace ferry::rollout
