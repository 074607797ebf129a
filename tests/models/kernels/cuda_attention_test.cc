// Attention on a GPU: rows that do not depend on others, gradients that come back the same. Skipped
// where there is no GPU.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "models/kernels/attention/attention_cuda.h"
#include "tests/models/cuda_fixture.h"

namespace ferry::models {
namespace cuda_attention_test {

struct Heads {
  std::int64_t heads, groups, dim, value_dim;
};

TEST_F(CudaKernels, AttentionRowsDoNotDependOnPackingOrChunks) {
  for (const auto& [heads, groups, dim, value_dim] :
       {Heads{12, 2, 128, 128}, Heads{14, 2, 64, 64}, Heads{16, 16, 192, 128}}) {
    const std::int64_t length = 700;
    const auto query = random({length, heads, dim});
    const auto key = random({length, groups, dim});
    const auto value = random({length, groups, value_dim});
    const AttentionOptions options{.scale = 1 / std::sqrt(static_cast<double>(dim)),
                                   .alignment = Alignment::kBitwise};
    const auto run = [&](const std::vector<AttentionSegment>& segments) {
      return attention_cuda(query, key, value, segments, options);
    };
    const auto whole = run({{0, length, 0, length}});
    const auto name = std::to_string(heads) + "x" + std::to_string(dim);
    for (const std::int64_t rows : {2, 16, 100, 300})
      EXPECT_TRUE(
          same_bytes(run({{0, rows, 0, rows}}).narrow(0, 0, rows), whole.narrow(0, 0, rows)))
          << name << ", prefix of " << rows;
    for (const std::int64_t at : {16, 129, 699})
      EXPECT_TRUE(same_bytes(run({{at, 1, 0, at + 1}}).narrow(0, at, 1), whole.narrow(0, at, 1)))
          << name << ", row " << at;
    const auto chunks = run({{0, 200, 0, 200}, {200, 150, 0, 350}, {350, 350, 0, 700}});
    EXPECT_TRUE(same_bytes(chunks, whole)) << name << ", chunks";
    const auto packed = run({{100, 250, 100, 250}, {400, 300, 400, 300}});
    for (const std::int64_t begin : {100, 400}) {
      const auto size = begin == 100 ? 250 : 300;
      const auto alone =
          attention_cuda(query.narrow(0, begin, size), key.narrow(0, begin, size),
                         value.narrow(0, begin, size), {{0, size, 0, size}}, options);
      EXPECT_TRUE(same_bytes(packed.narrow(0, begin, size), alone)) << name << ", packed";
    }
    EXPECT_EQ(packed.narrow(0, 350, 50).abs().max().item<float>(), 0) << name << ", gap";
  }
}

// Sequences of one length in kFast.
TEST_F(CudaKernels, CudnnsAttentionIsThatOfHuggingFacesSdpa) {
  for (const auto& [heads, groups, dim, value_dim] :
       {Heads{12, 2, 128, 128}, Heads{16, 16, 192, 128}}) {
    const std::int64_t length = 256;
    const auto query = random({length, heads, dim});
    const auto key = random({length, groups, dim});
    const auto value = random({length, groups, value_dim});
    const auto batch = [](const at::Tensor& x) { return x.unsqueeze(0).transpose(1, 2); };
    const auto expected =
        at::scaled_dot_product_attention(batch(query), batch(key), batch(value), std::nullopt, 0.0,
                                         true, 0.1, groups != heads)
            .transpose(1, 2)[0];
    const auto got = attention_cuda(query, key, value, {{0, length, 0, length}},
                                    {.scale = 0.1, .alignment = Alignment::kFast});
    EXPECT_TRUE(same_bytes(got, expected)) << dim;
  }
}

TEST_F(CudaKernels, AttentionsGradientsComeBackTheSameEachTimeAndNearFp64) {
  for (const auto& [heads, groups, dim, value_dim] :
       {Heads{12, 2, 128, 128}, Heads{16, 16, 192, 128}})
    for (const std::int64_t length : {768, 700})  // the one of cuDNN's batches, the other not
      for (const auto alignment : {Alignment::kBitwise, Alignment::kFast})
        for (const bool deterministic : {true, false}) {
          const AttentionOptions options{
              .scale = 0.08, .alignment = alignment, .deterministic = deterministic};
          const std::vector<AttentionSegment> segments{{0, length, 0, length},
                                                       {length, length, length, length}};
          const auto query = random({2 * length, heads, dim});
          const auto key = random({2 * length, groups, dim});
          const auto value = random({2 * length, groups, value_dim});
          const auto grad = random({2 * length, heads, value_dim});
          const auto run = [&] {
            const auto q = query.clone().requires_grad_();
            const auto k = key.clone().requires_grad_();
            const auto v = value.clone().requires_grad_();
            attention_cuda(q, k, v, segments, options).backward(grad);
            return std::vector<at::Tensor>{q.grad(), k.grad(), v.grad()};
          };
          const auto first = run();
          const auto name = fmt::format("dim {}, length {}, {}, {}", dim, length,
                                        alignment == Alignment::kFast ? "fast" : "bitwise",
                                        deterministic ? "deterministic" : "not deterministic");
          if (deterministic || alignment == Alignment::kBitwise) {
            for (int again = 0; again < 10; ++again) {
              const auto other = run();
              for (std::size_t i = 0; i < 3; ++i)
                EXPECT_TRUE(same_bytes(other[i], first[i])) << name;
            }
          }
          const auto exact = [&](const at::Tensor& x) {
            return x.to(at::kDouble).requires_grad_();
          };
          const auto q = exact(query);
          const auto k = exact(key);
          const auto v = exact(value);
          std::vector<at::Tensor> parts;
          for (const auto& segment : segments) {
            const auto of = [&](const at::Tensor& x) {
              return x.narrow(0, segment.key_begin, length)
                  .repeat_interleave(heads / x.size(1), 1)
                  .transpose(0, 1);
            };
            const auto mask = at::ones({length, length}, query.options().dtype(at::kBool)).triu(1);
            const auto scores =
                (at::matmul(of(q), of(k).transpose(1, 2)) * 0.08).masked_fill(mask, -INFINITY);
            parts.push_back(at::matmul(at::softmax(scores, -1), of(v)).transpose(0, 1));
          }
          at::cat(parts).backward(grad.to(at::kDouble));
          const std::vector<at::Tensor> wanted{q.grad(), k.grad(), v.grad()};
          for (std::size_t i = 0; i < 3; ++i) {
            const auto off = (first[i].to(at::kDouble) - wanted[i]).norm() / wanted[i].norm();
            EXPECT_LT(off.item<double>(), 6e-3) << name << ", " << i;  // bf16 inside and out
          }
        }
}

}  // namespace cuda_attention_test
}  // namespace ferry::models
