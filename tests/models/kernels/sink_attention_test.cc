// Attention beside sinks on a GPU: in kBitwise the bits of "eager" attention of GPT-OSS in
// transformers, in kFast near it; and its gradients.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "models/kernels/attention/attention.h"
#include "models/kernels/attention/paged_attention.h"
#include "tests/models/cuda_fixture.h"

namespace ferry::models {
namespace sink_attention_test {

class SinkAttention : public CudaKernels {
 protected:
  struct Inputs {
    at::Tensor query, key, value, sinks;
  };
  static Inputs inputs(std::int64_t length,
                       std::int64_t heads,
                       std::int64_t groups,
                       std::int64_t dim) {
    return {random({length, heads, dim}), random({length, groups, dim}),
            random({length, groups, dim}), random({heads})};
  }
  static AttentionOptions options(const Inputs& in,
                                  std::optional<std::int64_t> window,
                                  Alignment alignment) {
    return {.scale = 0.125, .window = window, .sinks = in.sinks, .alignment = alignment};
  }
  static at::Tensor run(const Inputs& in,
                        const std::vector<AttentionSegment>& segments,
                        const AttentionOptions& how) {
    return attention(in.query, in.key, in.value, segments, how);
  }
  static at::Tensor hidden(std::int64_t length, std::optional<std::int64_t> window) {
    const auto mask =
        at::ones({length, length}, at::TensorOptions(at::kBool).device(at::kCUDA)).triu(1);
    return window ? mask.logical_or(at::ones_like(mask).tril(-*window)) : mask;
  }
};

// eager_attention_forward of modeling_gpt_oss.py on a batch of copies: with 256 heads and more
// cuBLAS takes one kind of kernel at every length from 64 on.
at::Tensor eager_of_transformers(const at::Tensor& query,
                                 const at::Tensor& key,
                                 const at::Tensor& value,
                                 const at::Tensor& sinks,
                                 const at::Tensor& hidden) {
  const auto heads = query.size(1);
  const auto copies = (255 + heads) / heads;
  const auto lay_out = [&](const at::Tensor& x) {
    return x.repeat_interleave(heads / x.size(1), 1)
        .transpose(0, 1)
        .unsqueeze(0)
        .expand({copies, -1, -1, -1})
        .contiguous();
  };
  const double least = std::numeric_limits<c10::BFloat16>::lowest();
  auto scores = at::matmul(lay_out(query), lay_out(key).transpose(2, 3)) * 0.125;
  scores = scores + at::zeros(hidden.sizes(), query.options()).masked_fill(hidden, least);
  auto of_sinks = scores.sizes().vec();
  of_sinks.back() = 1;
  auto all = at::cat({scores, sinks.view({1, -1, 1, 1}).expand(of_sinks)}, -1);
  all = all - std::get<0>(all.max(-1, /*keepdim=*/true));
  const auto weights = at::softmax(all, -1).narrow(-1, 0, scores.size(-1));
  return at::matmul(weights, lay_out(value))[0].transpose(0, 1);
}

TEST_F(SinkAttention, HasTheBitsOfTransformersEagerAttention) {
  auto& context = at::globalContext();
  const auto before = context.blasPreferredBackend();
  context.setBlasPreferredBackend(at::BlasBackend::Cublaslt);
  for (const auto& [heads, groups, dim] :
       {std::array{64, 8, 64}, std::array{4, 2, 64}, std::array{16, 2, 128}})
    for (const auto window : {std::optional<std::int64_t>(), std::optional<std::int64_t>(128)}) {
      const auto in = inputs(992, heads, groups, dim);
      const auto got = run(in, {{0, 992, 0, 992}}, options(in, window, Alignment::kBitwise));
      for (const std::int64_t length : {64, 96, 256, 480, 992}) {
        const auto of = [&](const at::Tensor& x) { return x.narrow(0, 0, length); };
        const auto expected = eager_of_transformers(of(in.query), of(in.key), of(in.value),
                                                    in.sinks, hidden(length, window));
        EXPECT_TRUE(same_bytes(of(got), expected)) << heads << "x" << dim << ", " << length;
      }
    }
  context.setBlasPreferredBackend(before);
}

TEST_F(SinkAttention, RowsDoNotDependOnPackingOrChunks) {
  for (const auto window : {std::optional<std::int64_t>(), std::optional<std::int64_t>(100)}) {
    const auto in = inputs(700, 16, 2, 64);
    const auto how = options(in, window, Alignment::kBitwise);
    const auto whole = run(in, {{0, 700, 0, 700}}, how);
    for (const std::int64_t rows : {1, 2, 17, 300})
      EXPECT_TRUE(same_bytes(run(in, {{0, rows, 0, rows}}, how).narrow(0, 0, rows),
                             whole.narrow(0, 0, rows)))
          << rows;
    EXPECT_TRUE(same_bytes(run(in, {{0, 200, 0, 200}, {200, 150, 0, 350}, {350, 350, 0, 700}}, how),
                           whole));
    const auto packed = run(in, {{100, 250, 100, 250}, {400, 300, 400, 300}}, how);
    const Inputs second{in.query.narrow(0, 400, 300), in.key.narrow(0, 400, 300),
                        in.value.narrow(0, 400, 300), in.sinks};
    EXPECT_TRUE(same_bytes(packed.narrow(0, 400, 300), run(second, {{0, 300, 0, 300}}, how)));
  }
}

// Rows with up to 8 and 16 heads of a group keep the scores of 1,536 and 768 keys of 64 channels.
TEST_F(SinkAttention, DecodedRowsAreThoseOfThePrefill) {
  const std::vector<std::int64_t> lengths{1,   2,   63,  64,   65,   128,  129, 300,
                                          768, 769, 800, 1000, 1536, 1537, 2049};
  const auto sequences = static_cast<std::int64_t>(lengths.size());
  constexpr std::int64_t kBlocks = 40;
  const auto ints = at::TensorOptions().dtype(at::kInt);
  for (const auto& [alignment, heads, dim] :
       {std::tuple(Alignment::kBitwise, 16, 64), std::tuple(Alignment::kBitwise, 24, 64),
        std::tuple(Alignment::kBitwise, 40, 64), std::tuple(Alignment::kBitwise, 16, 128),
        std::tuple(Alignment::kFast, 40, 64), std::tuple(Alignment::kFast, 40, 128)})
    for (const auto window : {std::optional<std::int64_t>(), std::optional<std::int64_t>(100)}) {
      const auto in = inputs(sequences, heads, 2, dim);
      const auto how = options(in, window, alignment);
      PagedKeys keys{.key = random({sequences * kBlocks, 64, 2, dim}),
                     .value = random({sequences * kBlocks, 64, 2, dim})};
      keys.block_tables =
          at::randperm(sequences * kBlocks, ints).view({sequences, kBlocks}).contiguous().cuda();
      keys.lengths = at::tensor(lengths, ints).cuda();
      const auto got = paged_attention_cuda(in.query, keys, how);
      for (std::int64_t i = 0; i < sequences; ++i) {
        const auto length = lengths[static_cast<std::size_t>(i)];
        const auto all = [&](const at::Tensor& cache) {
          return cache.index_select(0, keys.block_tables[i]).flatten(0, 1).narrow(0, 0, length);
        };
        // Three rows of a prompt, of which this is the last, are more than a kernel keeps.
        const auto rows = std::min<std::int64_t>(length, 3);
        const auto query = at::cat({random({rows - 1, heads, dim}), in.query.narrow(0, i, 1)});
        const auto one =
            attention(query, all(keys.key), all(keys.value), {{0, rows, 0, length}}, how)[rows - 1];
        if (alignment == Alignment::kBitwise)
          EXPECT_TRUE(same_bytes(got[i], one)) << heads << "x" << dim << ", " << length;
        else
          EXPECT_TRUE(at::allclose(got[i], one, 2e-2, 2e-2)) << dim << ", " << length;
      }
    }
}

TEST_F(SinkAttention, ResultsAndGradientsAreNearFp64AndTheSameEachTime) {
  for (const auto alignment : {Alignment::kBitwise, Alignment::kFast})
    for (const auto window : {std::optional<std::int64_t>(), std::optional<std::int64_t>(128)}) {
      const auto in = inputs(600, 16, 2, 64);
      const auto grad = random({600, 16, 64});
      const std::vector<AttentionSegment> segments{{0, 300, 0, 300}, {300, 300, 300, 300}};
      const auto leaves = [&](at::ScalarType dtype) {
        std::vector<at::Tensor> all;
        for (const auto& one : {in.query, in.key, in.value, in.sinks})
          all.push_back(one.to(dtype).clone().requires_grad_());
        return all;
      };
      const auto results = [&](const at::Tensor& rows, const std::vector<at::Tensor>& of) {
        rows.backward(grad.to(rows.scalar_type()));
        return std::vector<at::Tensor>{rows.detach(), of[0].grad(), of[1].grad(), of[2].grad(),
                                       of[3].grad()};
      };
      const auto run_kernel = [&] {
        const auto of = leaves(at::kBFloat16);
        auto how = options(in, window, alignment);
        how.sinks = of[3];
        return results(attention(of[0], of[1], of[2], segments, how), of);
      };
      const auto first = run_kernel();
      const auto again = run_kernel();
      const auto of = leaves(at::kDouble);
      std::vector<at::Tensor> parts;
      for (const auto& segment : segments) {
        const auto part = [&](const at::Tensor& x) {
          return x.narrow(0, segment.key_begin, 300)
              .repeat_interleave(16 / x.size(1), 1)
              .transpose(0, 1);
        };
        const auto scores = (at::matmul(part(of[0]), part(of[1]).transpose(1, 2)) * 0.125)
                                .masked_fill(hidden(300, window), -INFINITY);
        const auto all = at::cat({scores, of[3].view({-1, 1, 1}).expand({-1, 300, 1})}, -1);
        parts.push_back(
            at::matmul(at::softmax(all, -1).narrow(-1, 0, 300), part(of[2])).transpose(0, 1));
      }
      const auto wanted = results(at::cat(parts), of);
      for (std::size_t i = 0; i < first.size(); ++i) {
        EXPECT_TRUE(same_bytes(again[i], first[i])) << i;
        const auto off = (first[i].to(at::kDouble) - wanted[i]).norm() / wanted[i].norm();
        EXPECT_LT(off.item<double>(), 1.2e-2) << i;  // bf16 scores and weights inside, bf16 out
      }
    }
}

}  // namespace sink_attention_test
}  // namespace ferry::models
