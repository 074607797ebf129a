#include "models/certificate/numerics_certificate.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "models/spec/products.h"
#include "tests/support/expect.h"

namespace ferry::models {
namespace numerics_certificate_test {

models::TransformerConfig tiny(bool with_experts) {
  models::TransformerConfig config;
  config.num_layers = 1;
  config.hidden_size = 256;
  config.ffn_hidden_size = 512;
  config.num_attention_heads = 4;
  config.num_query_groups = 2;
  config.kv_channels = 64;
  config.vocab_size = 1000;
  config.add_qkv_bias = true;
  if (with_experts) {
    config.num_moe_experts = 8;
    config.moe_layer_freq = {true};
    config.moe_ffn_hidden_size = 128;
    config.moe_router_topk = 2;
  }
  return config;
}

// Layers of gated delta nets, and a tower.
models::TransformerConfig hybrid_that_sees() {
  auto config = tiny(false);
  config.linear_attention_freq = {true};
  config.linear_conv_kernel_dim = 4;
  config.linear_num_key_heads = 2;
  config.linear_num_value_heads = 4;
  config.linear_key_head_dim = 16;
  config.linear_value_head_dim = 24;
  config.vision = VisionConfig{.depth = 1,
                               .hidden_size = 64,
                               .intermediate_size = 96,
                               .num_heads = 4,
                               .in_channels = 3,
                               .patch_size = 4,
                               .temporal_patch_size = 2,
                               .spatial_merge_size = 2,
                               .out_hidden_size = 256,
                               .num_position_embeddings = 16};
  return config;
}

const NumericsCheck* first_failure(const NumericsCertificate& certificate) {
  const auto found = std::ranges::find(certificate.checks, false, &NumericsCheck::passed);
  return found == certificate.checks.end() ? nullptr : &*found;
}

std::string text(const NumericsCheck* check) {
  return check == nullptr ? "" : check->subject + ", " + check->property + ": " + check->detail;
}

TEST(NumericsCertificate, TheHostKeepsBitsInBf16) {
  for (const bool with_experts : {false, true}) {
    const auto certificate = certify_numerics(tiny(with_experts), {}, bitwise_ops(at::kCPU));
    EXPECT_TRUE(certificate.passed()) << text(first_failure(certificate));
    EXPECT_GE(certificate.checks.size(), 15U);
    EXPECT_FALSE(certificate.environment.empty());
    EXPECT_LT(certificate.seconds, 60);
  }
}

TEST(NumericsCertificate, TheHostKeepsBitsInFloatOnAnyNumberOfThreads) {
  const auto threads = at::get_num_threads();
  auto narrow = tiny(true);  // MKL cuts so few columns into kernels of other bits from 3 threads on
  narrow.hidden_size = 16;
  narrow.ffn_hidden_size = 24;
  narrow.moe_ffn_hidden_size = 12;
  narrow.kv_channels = 4;
  narrow.vocab_size = 50;
  for (const auto& config : {tiny(false), narrow, hybrid_that_sees()}) {
    for (const int count : {1, 2, 3, 4, 16}) {
      at::set_num_threads(count);
      const auto certificate =
          certify_numerics(config, {.dtype = at::kFloat}, bitwise_ops(at::kCPU));
      EXPECT_TRUE(certificate.passed()) << count << ": " << text(first_failure(certificate));
      EXPECT_FALSE(certificate.transformers.empty());
    }
  }
  at::set_num_threads(threads);
}

TEST(NumericsCertificate, RefusesModelsThatAreNotComputed) {
  auto config = tiny(false);
  config.family = "gemma4_text";
  config.traits.not_computed = "an input of each layer";
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"gemma4_text", "not computed"},
                             [&] { certify_numerics(config, {}, bitwise_ops(at::kCPU)); }));
}

TEST(NumericsCertificate, SaysOfDeltaRulesAndTowersWhetherTransformersHasTheBits) {
  const auto config = hybrid_that_sees();
  const auto subjects = [](const std::vector<NumericsCheck>& checks) {
    std::set<std::string> all;
    for (const auto& check : checks) all.insert(check.subject);
    return all;
  };
  const std::string rule = "delta rule 2x16, 4x24";
  const std::string frame = "attention of a frame 4x16";
  const auto in_bf16 = certify_numerics(config, {}, bitwise_ops(at::kCPU));
  EXPECT_TRUE(in_bf16.passed()) << text(first_failure(in_bf16));
  EXPECT_TRUE(subjects(in_bf16.checks).contains(frame));
  EXPECT_EQ(subjects(in_bf16.transformers), std::set{rule});  // it computes in fp32 in any dtype
  auto ops = bitwise_ops(at::kCPU);
  const auto rule_of = ops.delta_rule;
  ops.delta_rule = [&](const DeltaRows& rows, const at::Tensor& state, Alignment alignment) {
    auto result = rule_of(rows, state, alignment);
    if (alignment == Alignment::kFast) result.output += 1;
    if (rows.query.size(1) == 300) result.output += 1;
    return result;
  };
  const auto frame_of = ops.attention_of_frame;
  ops.attention_of_frame = [&](const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, Alignment alignment) {
    const auto attended = frame_of(query, key, value, alignment);
    return alignment == Alignment::kFast || query.size(2) == 256 ? attended + 1 : attended;
  };
  const auto certificate = certify_numerics(config, {.dtype = at::kFloat}, ops);
  std::string failures;
  for (const auto& check : certificate.checks)
    if (!check.passed) failures += text(&check) + "; ";
  EXPECT_EQ(failures, frame + ", rows: other bits at 256 rows; " + rule +
                          ", length: other bits at a prefix of 300; ");
  EXPECT_FALSE(certificate.equals_transformers());
  const auto compared = subjects(certificate.transformers);
  EXPECT_TRUE(compared.contains(frame) && compared.contains(rule));
  for (const auto& check : certificate.transformers) {
    if (check.subject == frame) {
      EXPECT_EQ(check.detail, "other bits at 16 patches 64 patches 192 patches 400 patches");
    }
    if (check.subject == rule) {
      EXPECT_EQ(check.detail, "other bits at 16 tokens 64 tokens 192 tokens 400 tokens");
    }
  }
}

// A product that adds up K in other pieces when rows are few, as split-K kernels do.
TEST(NumericsCertificate, NamesTheShapeOfAProductThatDependsOnRows) {
  auto ops = bitwise_ops(at::kCPU);
  const auto right = ops.slice;
  ops.slice = [&](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    if (x.size(0) != 17 || weight.size(1) != 512) return right(x, weight, bias);
    return right(x.narrow(1, 0, 256), weight.narrow(1, 0, 256), bias) +
           right(x.narrow(1, 256, 256), weight.narrow(1, 256, 256), {});
  };
  const auto certificate = certify_numerics(tiny(false), {}, ops);
  EXPECT_FALSE(certificate.passed());
  ASSERT_NE(first_failure(certificate), nullptr);
  EXPECT_EQ(text(first_failure(certificate)), "linear_fc2 256x512, rows: other bits at 17 rows");
}

TEST(NumericsCertificate, NamesASliceAnOrderAndANormThatDiffer) {
  auto ops = bitwise_ops(at::kCPU);
  const auto right = ops.slice;
  ops.slice = [&](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    auto y = right(x, weight, bias);
    if (weight.size(0) == 500) y[3][0] += 1;  // half of the vocabulary
    return y;
  };
  ops.rms_norm = [](const at::Tensor& x, const at::Tensor&) { return x / x.size(0); };
  const auto certificate = certify_numerics(tiny(false), {}, ops);
  std::string failures;
  for (const auto& check : certificate.checks)
    if (!check.passed) failures += check.subject + " " + check.property + "; ";
  EXPECT_EQ(failures, "output_layer 1000x256 slices; RMSNorm 256 rows; ");
}

// A weight that every rank has whole is examined by the operation of such weights.
TEST(NumericsCertificate, NamesARouterThatDependsOnRows) {
  auto ops = bitwise_ops(at::kCPU);
  const auto right = ops.linear;
  ops.linear = [&](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return right(x, weight, bias) * (x.size(0) == 7 ? 2 : 1);
  };
  const auto certificate = certify_numerics(tiny(true), {}, ops);
  std::string failures;
  for (const auto& check : certificate.checks)
    if (!check.passed) failures += text(&check) + "; ";
  EXPECT_EQ(failures, "router 8x256, rows: other bits at 7 rows; ");
}

TEST(NumericsCertificate, NamesAttentionThatSeesItsNeighbours) {
  auto ops = bitwise_ops(at::kCPU);
  const auto right = ops.attention;
  ops.attention = [&](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const std::vector<AttentionSegment>& segments,
                      const AttentionOptions& options) {
    auto y = right(query, key, value, segments, options);
    return segments.size() == 2 ? y + 1 : y;
  };
  const auto certificate = certify_numerics(tiny(false), {}, ops);
  ASSERT_NE(first_failure(certificate), nullptr);
  EXPECT_EQ(text(first_failure(certificate)),
            "attention 4x2x64, packing: other bits at the second of two sequences");
}

TEST(NumericsCertificate, ExaminesThePredictionLayersProjectionAndBothProductsOfExperts) {
  auto config = tiny(true);
  config.mtp_num_layers = 1;
  std::set<std::string> subjects;
  for (const auto& check : certify_numerics(config, {}, bitwise_ops(at::kCPU)).checks)
    subjects.insert(check.subject);
  for (const auto* subject : {"eh_proj 256x512", "grouped product 256x256",
                              "grouped product 256x128", "sum of 2 experts"})
    EXPECT_TRUE(subjects.contains(subject)) << subject;
}

// Gemma 4: layers that look at all tokens have wider heads, and each layer an embedding of its own.
TEST(NumericsCertificate, ExaminesTheNormOfADeltaNetsHeads) {
  std::set<std::string> subjects;
  for (const auto& check : certify_numerics(hybrid_that_sees(), {}, bitwise_ops(at::kCPU)).checks)
    subjects.insert(check.subject);
  EXPECT_TRUE(subjects.contains("RMSNorm 24"));
  EXPECT_FALSE(subjects.contains("attention 4x2x64"));  // its only layer has none
}

TEST(NumericsCertificate, ListsTheProductsOfLatentAttentionAndSharedExperts) {
  auto config = tiny(true);
  config.multi_latent_attention = true;
  config.q_lora_rank = 96;
  config.kv_lora_rank = 64;
  config.qk_head_dim = 32;
  config.qk_pos_emb_head_dim = 16;
  config.v_head_dim = 32;
  config.moe_shared_expert_intermediate_size = 128;
  std::string names;
  for (const auto& shape : gemm_shapes(config)) names += shape.subject() + "; ";
  EXPECT_EQ(names,
            "linear_q_down_proj 96x256; linear_q_up_proj 192x96; linear_kv_down_proj 80x256; "
            "linear_kv_up_proj 256x64; linear_proj 256x128; router 8x256; "
            "experts.linear_fc1 256x256; experts.linear_fc2 256x128; "
            "shared_experts.linear_fc1 256x256; shared_experts.linear_fc2 256x128; "
            "output_layer 1000x256; ");
}

}  // namespace numerics_certificate_test
}  // namespace ferry::models
