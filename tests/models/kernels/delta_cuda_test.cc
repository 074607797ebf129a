#include "models/kernels/delta/delta_cuda.h"

#include <vector>

#include "tests/models/cuda_fixture.h"

namespace ferry::models {
namespace {

constexpr std::int64_t kKeyHeads = 2;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kDim = 128;

class DeltaKernels : public CudaKernels {
 protected:
  static DeltaCore random_core(std::int64_t rows, std::int64_t taps) {
    const auto channels = (2 * kKeyHeads + kHeads) * kDim;
    const auto like = at::TensorOptions().device(at::kCUDA);
    return {.mixed = random({rows, channels}),
            .conv_weight = random({channels, 1, taps}),
            .alpha = random({rows, kHeads}),
            .beta = random({rows, kHeads}),
            .gate = random({rows, kHeads * kDim}),
            .a_log = at::randn({kHeads}, like),
            .dt_bias = at::randn({kHeads}, like),
            .norm = at::randn({kDim}, like) / 8,
            .epsilon = 1e-6,
            .key_heads = kKeyHeads};
  }
};

DeltaRows narrow_rows(const DeltaRows& rows, std::int64_t begin, std::int64_t count) {
  const auto of = [&](const at::Tensor& x) { return x.narrow(1, begin, count); };
  return {of(rows.query), of(rows.key), of(rows.value), of(rows.decay), of(rows.beta)};
}

std::vector<at::Tensor> leaves_of(const DeltaRows& rows) {
  return {rows.query, rows.key, rows.value, rows.decay, rows.beta};
}

DeltaRows wide_rows(const DeltaRows& rows) {
  const auto of = [](const at::Tensor& x) {
    return x.detach().to(at::kFloat).clone().requires_grad_();
  };
  return {of(rows.query), of(rows.key), of(rows.value), of(rows.decay), of(rows.beta)};
}

double distance(const at::Tensor& got, const at::Tensor& expected) {
  const auto reference = expected.to(at::kDouble);
  return ((got.to(at::kDouble) - reference).norm() / reference.norm()).item<double>();
}

class DeltaKernelsOfSequences : public DeltaKernels {
 protected:
  static DeltaRows random_rows(std::int64_t tokens) {
    const auto like = at::TensorOptions().device(at::kCUDA);
    DeltaRows rows{.query = random({1, tokens, kKeyHeads, kDim}),
                   .key = random({1, tokens, kKeyHeads, kDim}),
                   .value = random({1, tokens, kHeads, kDim}),
                   .decay = -at::rand({1, tokens, kHeads}, like) / 8,
                   .beta = at::rand({1, tokens, kHeads}, like).to(at::kBFloat16)};
    for (const auto& leaf : leaves_of(rows)) leaf.requires_grad_();
    return rows;
  }
};

// Sequences that end within a chunk, at its end, and after one token.
TEST_F(DeltaKernelsOfSequences, PackedSequencesAreThoseOfTheFormulaWithItsGradients) {
  const std::vector<std::int64_t> lengths{150, 64, 1, 200};
  const auto rows = random_rows(415);
  const auto packed = packed_gated_delta_rule(rows, lengths);
  const auto wide = wide_rows(rows);
  std::vector<at::Tensor> outputs;
  std::int64_t begin = 0;
  for (const auto length : lengths) {
    outputs.push_back(
        chunk_gated_delta_rule(narrow_rows(wide, begin, length), {}, Alignment::kFast).output);
    begin += length;
  }
  const auto output = at::cat(outputs, 1);
  EXPECT_LT(distance(packed, output), 1e-2);

  const auto grad = random(output.sizes());
  (packed * grad).to(at::kFloat).sum().backward();
  (output * grad).sum().backward();
  const auto own = leaves_of(rows);
  const auto expected = leaves_of(wide);
  for (std::size_t i = 0; i < own.size(); ++i)
    EXPECT_LT(distance(own[i].grad(), expected[i].grad()), 2e-2) << "input " << i;
}

TEST_F(DeltaKernelsOfSequences, PackedSequencesHaveTheSameBitsAgain) {
  const std::vector<std::int64_t> lengths{130, 285};
  const auto rows = random_rows(415);
  const auto run = [&] {
    const auto packed = packed_gated_delta_rule(rows, lengths);
    packed.to(at::kFloat).pow(2).sum().backward();
    const auto grad = rows.key.grad().clone();
    for (const auto& leaf : leaves_of(rows)) leaf.mutable_grad() = at::Tensor();
    return std::pair(packed.detach(), grad);
  };
  const auto [output, grad] = run();
  const auto [again, grad_again] = run();
  EXPECT_TRUE(same_bytes(again, output));
  EXPECT_TRUE(same_bytes(grad_again, grad));
}

at::Tensor longs(const std::vector<std::int64_t>& values) {
  return at::tensor(values, at::kLong).cuda();
}

// Four steps of three sequences, whose rows lie among others'.
TEST_F(DeltaKernels, AStepIsThatOfTheFormulas) {
  const auto channels = (2 * kKeyHeads + kHeads) * kDim;
  const auto like = at::TensorOptions().device(at::kCUDA);
  const auto rows = longs({4, 0, 2});
  const auto slots = longs({1, 4, 0});
  for (const std::int64_t taps : {2, 4}) {
    auto conv = random({5, taps - 1, channels});
    auto recurrent = at::randn({5, kHeads, kDim, kDim}, like) / 8;
    auto expected_conv = conv.clone();
    auto expected_recurrent = recurrent.clone();
    for (int step = 0; step < 4; ++step) {
      const auto core = random_core(6, taps);
      auto output = at::full({6, kHeads * kDim}, 7, conv.options());
      delta_step_cuda(core, rows, slots, conv, recurrent, output);

      const auto pick = [&](const at::Tensor& x) { return x.index_select(0, rows); };
      const auto mixed = pick(core.mixed);
      const auto before = expected_conv.index_select(0, slots);
      expected_conv.index_copy_(0, slots, at::cat({before.slice(1, 1), mixed.unsqueeze(1)}, 1));
      const auto convolved = causal_conv1d_update(mixed, before, core.conv_weight).unsqueeze(1);
      const auto heads = [&](std::int64_t first, std::int64_t count) {
        return convolved.narrow(2, first * kDim, count * kDim).unflatten(2, {count, kDim});
      };
      const auto decay =
          -core.a_log.exp() * at::softplus(pick(core.alpha).to(at::kFloat) + core.dt_bias);
      const auto result =
          recurrent_gated_delta_rule({.query = heads(0, kKeyHeads),
                                      .key = heads(kKeyHeads, kKeyHeads),
                                      .value = heads(2 * kKeyHeads, kHeads),
                                      .decay = decay.unsqueeze(1),
                                      .beta = at::sigmoid(pick(core.beta)).unsqueeze(1)},
                                     expected_recurrent.index_select(0, slots));
      expected_recurrent.index_copy_(0, slots, result.state);
      const auto expected =
          gated_rms_norm(result.output.reshape({-1, kDim}), pick(core.gate).reshape({-1, kDim}),
                         core.norm, core.epsilon);
      EXPECT_TRUE(same_bytes(conv, expected_conv));
      EXPECT_LT(distance(recurrent, expected_recurrent), 1e-3);
      EXPECT_LT(distance(pick(output), expected.view({3, -1})), 1e-2);
      EXPECT_EQ(output.index_select(0, longs({1, 3, 5})).ne(7).sum().item<std::int64_t>(), 0);
    }
  }
}

// Sequences whose rows lie among others', walked along at once, in two parts, and token by token.
TEST_F(DeltaKernels, AWalkHasTheBitsOfSoManySteps) {
  constexpr std::int64_t kRows = 150;
  const std::vector<DeltaSpan> spans{{.row_begin = 3, .num_rows = 70, .slot = 2},
                                     {.row_begin = 73, .num_rows = 1, .slot = 0},
                                     {.row_begin = 80, .num_rows = 33, .slot = 3}};
  const auto like = at::TensorOptions().device(at::kCUDA);
  for (const std::int64_t taps : {2, 3, 4}) {
    const auto core = random_core(kRows, taps);
    const auto channels = core.mixed.size(1);
    const auto conv = random({4, taps - 1, channels});
    const auto recurrent = at::randn({4, kHeads, kDim, kDim}, like) / 8;
    const auto fresh = [&] { return at::full({kRows, kHeads * kDim}, 7, core.mixed.options()); };
    const auto before = conv.index_select(0, longs({2, 0, 3}));

    auto stepped = fresh();
    auto conv_of_steps = conv.clone();
    auto state_of_steps = recurrent.clone();
    for (const auto& span : spans) {
      for (std::int64_t i = 0; i < span.num_rows; ++i)
        delta_step_cuda(core, longs({span.row_begin + i}), longs({span.slot}), conv_of_steps,
                        state_of_steps, stepped);
    }
    auto walked = fresh();
    auto state_of_walk = recurrent.clone();
    delta_walk_cuda(core, spans, before, state_of_walk, walked);
    EXPECT_TRUE(same_bytes(walked, stepped)) << taps << " taps";
    EXPECT_TRUE(same_bytes(state_of_walk, state_of_steps)) << taps << " taps";
    EXPECT_EQ(walked.narrow(0, 113, 37).ne(7).sum().item<std::int64_t>(), 0);

    // The second part begins behind the first one's last rows.
    auto in_parts = fresh();
    auto state_of_parts = recurrent.clone();
    constexpr std::int64_t kFirst = 21;
    delta_walk_cuda(core, std::vector<DeltaSpan>{{.row_begin = 3, .num_rows = kFirst, .slot = 2}},
                    before.narrow(0, 0, 1), state_of_parts, in_parts);
    delta_walk_cuda(
        core, std::vector<DeltaSpan>{{.row_begin = 3 + kFirst, .num_rows = 70 - kFirst, .slot = 2}},
        core.mixed.narrow(0, 3 + kFirst - (taps - 1), taps - 1).unsqueeze(0), state_of_parts,
        in_parts);
    EXPECT_TRUE(same_bytes(in_parts.narrow(0, 3, 70), stepped.narrow(0, 3, 70)));
    EXPECT_TRUE(same_bytes(state_of_parts[2], state_of_steps[2]));
  }
}

// Without states a sequence begins with zeros.
TEST_F(DeltaKernels, AWalkFromTheBeginningNeedsNoState) {
  const auto core = random_core(40, 4);
  const std::vector<DeltaSpan> spans{{.row_begin = 0, .num_rows = 17, .slot = 1},
                                     {.row_begin = 17, .num_rows = 23, .slot = 0}};
  auto expected = at::empty_like(core.gate);
  auto recurrent = at::zeros({2, kHeads, kDim, kDim}, at::TensorOptions().device(at::kCUDA));
  delta_walk_cuda(core, spans, at::zeros({2, 3, core.mixed.size(1)}, core.mixed.options()),
                  recurrent, expected);
  auto output = at::empty_like(core.gate);
  delta_walk_cuda(core, spans, {}, {}, output);
  EXPECT_TRUE(same_bytes(output, expected));
}

}  // namespace
}  // namespace ferry::models
