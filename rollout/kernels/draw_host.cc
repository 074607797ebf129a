#include <ATen/Parallel.h>

#include <algorithm>
#include <span>
#include <vector>

#include "distckpt/base/integers.h"
#include "rollout/kernels/best_token.h"
#include "rollout/kernels/draw.h"
#include "rollout/kernels/host_row.h"

namespace ferry::rollout {
namespace {

constexpr std::int64_t kPart = 512 * kTokenChunk;  // tokens of a row that one task looks at

template <typename T>
void draw_plain(const at::Tensor& logits,
                std::int64_t vocab_size,
                const std::vector<DrawRow>& rows,
                const at::Tensor& tokens) {
  const auto* values = static_cast<const T*>(logits.const_data_ptr());
  const auto parts = distckpt::ceil_div(vocab_size, kPart);
  std::vector<BestToken> best(rows.size() * static_cast<std::size_t>(parts));
  at::parallel_for(0, static_cast<std::int64_t>(best.size()), 1, [&](auto begin, auto end) {
    for (auto i = begin; i < end; ++i) {
      const auto& draw = rows[static_cast<std::size_t>(i / parts)];
      const auto first = i % parts * kPart;
      best[static_cast<std::size_t>(i)] =
          best_token(draw, values + draw.row * logits.size(1), draw.inverse_temperature, first,
                     std::min(vocab_size, first + kPart));
    }
  });
  auto* const drawn = tokens.mutable_data_ptr<std::int64_t>();
  auto part = best.begin();
  for (const auto& draw : rows) {
    BestToken of_row;
    for (std::int64_t i = 0; i < parts; ++i, ++part) of_row.offer(part->sum, part->token);
    drawn[draw.row] = of_row.token;
  }
}

template <typename T>
void draw_shaped(const at::Tensor& logits,
                 std::int64_t vocab_size,
                 const Draws& draws,
                 const DrawnRows& out) {
  const auto* values = logits.const_data_ptr<T>();
  auto* const drawn = out.tokens.mutable_data_ptr<std::int64_t>();
  auto* const log_probs = out.processed_logprobs.mutable_data_ptr<float>();
  auto* const kept = out.kept.defined() ? out.kept.mutable_data_ptr<bool>() : nullptr;
  const auto count = static_cast<std::int64_t>(draws.shaped.size());
  at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> z(static_cast<std::size_t>(vocab_size));
    for (auto i = begin; i < end; ++i) {
      const auto& draw = draws.shaped[static_cast<std::size_t>(i)];
      HostRow row(draw, z);
      row.read(values + draw.row * logits.size(1),
               std::span(draws.changes)
                   .subspan(static_cast<std::size_t>(draw.first_change),
                            static_cast<std::size_t>(draw.num_changes)));
      row.truncate();
      drawn[draw.row] = row.draw();
      log_probs[draw.row] = row.log_prob(drawn[draw.row]);
      if (kept != nullptr)
        std::ranges::transform(z, kept + i * vocab_size,
                               [](float l) { return l > kMinusInfinity; });
    }
  });
}

}  // namespace

void draw_on_host(const at::Tensor& logits,
                  std::int64_t vocab_size,
                  const Draws& draws,
                  const DrawnRows& drawn) {
  if (logits.scalar_type() == at::kFloat) {
    draw_plain<float>(logits, vocab_size, draws.plain, drawn.tokens);
    draw_shaped<float>(logits, vocab_size, draws, drawn);
  } else {
    draw_plain<std::uint16_t>(logits, vocab_size, draws.plain, drawn.tokens);
    draw_shaped<at::BFloat16>(logits, vocab_size, draws, drawn);
  }
}

}  // namespace ferry::rollout
