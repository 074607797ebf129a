#include "trainer/update/rollout_batch.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <type_traits>

#include "distckpt/base/error.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/update/rollout_columns.h"

namespace ferry::trainer {
namespace {

using Offsets = std::vector<std::int64_t>;

std::int64_t extent(const Offsets& offsets, std::int64_t row) {
  const auto i = static_cast<std::size_t>(row);
  return offsets.at(i + 1) - offsets[i];
}

// Elements of a column that are a row's.
struct Range {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

Range range_of(const RolloutBatch& batch, Per per, std::int64_t row) {
  if (per == Per::kRow) return {row, 1};
  const auto& offsets = per == Per::kToken ? batch.offsets : batch.response_offsets;
  return {offsets[static_cast<std::size_t>(row)], extent(offsets, row)};
}

at::Tensor part(const at::Tensor& column, const Range& range) {
  return column.narrow(0, range.begin, range.count);
}
models::SamplingMask part(const models::SamplingMask& column, const Range& range) {
  return column.rows(range.begin, range.count);
}
template <typename T>
std::vector<T> part(const std::vector<T>& column, const Range& range) {
  return {column.begin() + range.begin, column.begin() + range.begin + range.count};
}

at::Tensor joined(const std::vector<at::Tensor>& parts) {
  return at::cat(parts);
}
models::SamplingMask joined(const std::vector<models::SamplingMask>& parts) {
  return concat(parts);
}
template <typename T>
std::vector<T> joined(const std::vector<std::vector<T>>& parts) {
  std::vector<T> all;
  for (const auto& one : parts) all.insert(all.end(), one.begin(), one.end());
  return all;
}

// The name of a column.
template <typename Column>
std::string name_of(Column RolloutBatch::*column) {
  std::string found;
  each_column([&](const char* name, Per, auto member) {
    if constexpr (std::is_same_v<decltype(member), Column RolloutBatch::*>)
      if (member == column) found = name;
  });
  return found;
}

// Gives `to` the column `name`, if `from` says where it is kept, as `as`.
void give_kept(const RolloutBatch& from,
               RolloutBatch& to,
               const std::string& name,
               const std::string& as) {
  for (const auto& [columns, places, leases] : from.kept) {
    const auto found = columns.find(name);
    if (found == columns.end()) continue;
    const auto same = std::ranges::find(to.kept, places, &RolloutBatch::Kept::places);
    if (same == to.kept.end())
      to.kept.push_back({.columns = {{as, found->second}}, .places = places, .leases = leases});
    else
      same->columns.emplace(as, found->second);
  }
}

void drop_kept(RolloutBatch& batch, const std::string& name) {
  for (auto& one : batch.kept) one.columns.erase(name);
  std::erase_if(batch.kept, [](const auto& one) { return one.columns.empty(); });
}

std::span<const std::int64_t> numbers(const at::Tensor& tokens,
                                      std::int64_t begin,
                                      std::int64_t count) {
  return {tokens.const_data_ptr<std::int64_t>() + begin, static_cast<std::size_t>(count)};
}

}  // namespace

RolloutBatch RolloutBatch::of(std::span<const Tokens> prompts, std::span<const Tokens> responses) {
  require(responses.empty() || responses.size() == prompts.size(), ErrorKind::kBug,
          "batch: {} responses to {} prompts", responses.size(), prompts.size());
  RolloutBatch batch;
  Tokens all;
  for (std::size_t row = 0; row < prompts.size(); ++row) {
    all.insert(all.end(), prompts[row].begin(), prompts[row].end());
    std::int64_t response_length = 0;
    if (!responses.empty()) {
      all.insert(all.end(), responses[row].begin(), responses[row].end());
      response_length = static_cast<std::int64_t>(responses[row].size());
    }
    batch.offsets.push_back(static_cast<std::int64_t>(all.size()));
    batch.response_offsets.push_back(batch.response_offsets.back() + response_length);
  }
  batch.tokens = at::tensor(all, at::kLong);
  if (!responses.empty())
    batch.response_mask = at::ones({batch.response_offsets.back()}, at::kBool);
  return batch;
}

std::int64_t RolloutBatch::length(std::int64_t row) const {
  return extent(offsets, row);
}

std::int64_t RolloutBatch::response_length(std::int64_t row) const {
  return extent(response_offsets, row);
}

std::vector<std::int64_t> RolloutBatch::lengths() const {
  std::vector<std::int64_t> all;
  for (std::int64_t row = 0; row < size(); ++row) all.push_back(length(row));
  return all;
}

std::span<const std::int64_t> RolloutBatch::prompt(std::int64_t row) const {
  return numbers(tokens, offsets.at(static_cast<std::size_t>(row)), prompt_length(row));
}

std::span<const std::int64_t> RolloutBatch::response(std::int64_t row) const {
  const auto count = response_length(row);
  return numbers(tokens, offsets[static_cast<std::size_t>(row) + 1] - count, count);
}

std::vector<at::Tensor> RolloutBatch::sequences() const {
  std::vector<at::Tensor> all;
  for (std::int64_t row = 0; row < size(); ++row)
    all.push_back(tokens.narrow(0, offsets[static_cast<std::size_t>(row)], length(row)));
  return all;
}

at::Tensor RolloutBatch::response_of(const at::Tensor& column, std::int64_t row) const {
  return column.narrow(0, response_offsets.at(static_cast<std::size_t>(row)), response_length(row));
}

at::Tensor RolloutBatch::padded(const at::Tensor& column) const {
  auto matrix = at::zeros({size(), max_response_length}, column.options());
  for (std::int64_t row = 0; row < size(); ++row)
    matrix[row].narrow(0, 0, response_length(row)).copy_(response_of(column, row));
  return matrix;
}

at::Tensor RolloutBatch::ragged(const at::Tensor& matrix) const {
  std::vector<at::Tensor> rows{matrix.reshape(-1).narrow(0, 0, 0)};
  for (std::int64_t row = 0; row < size(); ++row)
    rows.push_back(matrix[row].narrow(0, 0, response_length(row)));
  return at::cat(rows);
}

at::Tensor RolloutBatch::responses_of(const std::vector<at::Tensor>& of_tokens) const {
  std::vector<at::Tensor> rows;
  for (std::int64_t row = 0; row < size(); ++row)
    rows.push_back(of_tokens[static_cast<std::size_t>(row)].narrow(0, prompt_length(row) - 1,
                                                                   response_length(row)));
  return at::cat(rows);
}

RolloutBatch RolloutBatch::without_columns() const {
  RolloutBatch batch;
  batch.offsets = offsets;
  batch.response_offsets = response_offsets;
  batch.max_prompt_length = max_prompt_length;
  batch.max_response_length = max_response_length;
  return batch;
}

RolloutBatch RolloutBatch::only(std::initializer_list<at::Tensor RolloutBatch::*> columns) const {
  auto batch = without_columns();
  give(batch, &RolloutBatch::tokens);
  batch.images = images;
  for (const auto column : columns) give(batch, column);
  return batch;
}

void RolloutBatch::give(RolloutBatch& to, at::Tensor RolloutBatch::*column) const {
  to.*column = this->*column;
  give_kept(*this, to, name_of(column), name_of(column));
}

void RolloutBatch::give(RolloutBatch& to, models::SamplingMask RolloutBatch::*column) const {
  to.*column = this->*column;
  give_kept(*this, to, name_of(column), name_of(column));
}

void RolloutBatch::alias(at::Tensor RolloutBatch::*column, at::Tensor RolloutBatch::*of) {
  drop_kept(*this, name_of(column));
  this->*column = this->*of;
  const auto whole = *this;
  give_kept(whole, *this, name_of(of), name_of(column));
}

RolloutBatch RolloutBatch::select(std::span<const std::int64_t> rows) const {
  RolloutBatch batch;
  batch.max_prompt_length = max_prompt_length;
  batch.max_response_length = max_response_length;
  for (const auto row : rows) {
    require(row >= 0 && row < size(), ErrorKind::kUsage, "batch: no row {} of {}", row, size());
    batch.offsets.push_back(batch.offsets.back() + length(row));
    batch.response_offsets.push_back(batch.response_offsets.back() + response_length(row));
  }
  each_column([&](const char*, Per per, auto member) {
    if (!is_known(this->*member)) return;
    std::vector<std::remove_cvref_t<decltype(batch.*member)>> parts{part(this->*member, {})};
    for (const auto row : rows) parts.push_back(part(this->*member, range_of(*this, per, row)));
    batch.*member = joined(parts);
  });
  for (const auto& [columns, places, leases] : kept) {
    auto& one = batch.kept.emplace_back(Kept{.columns = columns, .leases = leases});
    for (const auto row : rows) one.places.push_back(places[static_cast<std::size_t>(row)]);
  }
  return batch;
}

RolloutBatch RolloutBatch::slice(std::int64_t begin, std::int64_t end) const {
  Rows rows(static_cast<std::size_t>(std::max<std::int64_t>(end - begin, 0)));
  std::iota(rows.begin(), rows.end(), begin);
  return select(rows);
}

RolloutBatch RolloutBatch::concat(std::span<const RolloutBatch> parts) {
  RolloutBatch batch;
  std::vector<const RolloutBatch*> some;
  for (const auto& part : parts) {
    if (part.size() == 0) continue;
    some.push_back(&part);
    for (std::int64_t row = 0; row < part.size(); ++row) {
      batch.offsets.push_back(batch.offsets.back() + part.length(row));
      batch.response_offsets.push_back(batch.response_offsets.back() + part.response_length(row));
    }
  }
  if (some.empty()) return batch;
  batch.max_prompt_length = some.front()->max_prompt_length;
  batch.max_response_length = some.front()->max_response_length;
  each_column([&](const char* name, Per, auto member) {
    std::vector<std::remove_cvref_t<decltype(batch.*member)>> columns;
    for (const auto* part : some)
      if (is_known(part->*member)) columns.push_back(part->*member);
    require(columns.empty() || columns.size() == some.size(), ErrorKind::kUsage,
            "batch: {} is known of {} parts of {}", name, columns.size(), some.size());
    if (!columns.empty()) batch.*member = joined(columns);
  });
  batch.kept = some.front()->kept;
  for (std::size_t i = 1; i < some.size(); ++i) {
    const auto& more = some[i]->kept;
    require(std::ranges::equal(more, batch.kept, {}, &Kept::columns, &Kept::columns),
            ErrorKind::kUsage, "batch: other columns of part {} are kept", i);
    for (std::size_t group = 0; group < more.size(); ++group) {
      std::ranges::copy(more[group].places, std::back_inserter(batch.kept[group].places));
      auto& leases = batch.kept[group].leases;
      std::ranges::copy_if(more[group].leases, std::back_inserter(leases), [&](const auto& lease) {
        return std::ranges::find(leases, lease) == leases.end();
      });
    }
  }
  return batch;
}

void RolloutBatch::take(const RolloutBatch& answer) {
  require(answer.size() == size(), ErrorKind::kUsage, "batch: an answer of {} rows to {}",
          answer.size(), size());
  const bool has_tokens =
      answer.tokens.defined() || std::ranges::any_of(answer.kept, [](const auto& one) {
        return one.columns.contains("tokens");
      });
  if (has_tokens) {
    offsets = answer.offsets;
    response_offsets = answer.response_offsets;
  }
  require(answer.response_offsets == response_offsets, ErrorKind::kUsage,
          "batch: an answer of responses of other lengths");
  each_column([&](const char* name, Per, auto member) {
    if (is_known(answer.*member)) {
      drop_kept(*this, name);
      this->*member = answer.*member;
    }
    for (const auto& one : answer.kept) {
      if (!one.columns.contains(name)) continue;
      drop_kept(*this, name);
      this->*member = std::remove_cvref_t<decltype(this->*member)>{};
    }
  });
  std::ranges::copy(answer.kept, std::back_inserter(kept));
}

}  // namespace ferry::trainer
