#include "converter/diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <mutex>
#include <utility>

#include "distckpt/base/integers.h"
#include "distckpt/base/stopwatch.h"
#include "distckpt/elements/digest.h"

namespace ferry::converter {
namespace {

using distckpt::ceil_div;
using distckpt::kDigestBlock;

// One tensor while its parts are compared, in any order. Sums of squares are kept per block, and
// added up in the order of the blocks: their last digits depend on that.
struct PartialDiff {
  distckpt::ElementCounts counts{};
  std::vector<distckpt::SquareSums> blocks{};

  distckpt::ElementDifference finish() const {
    distckpt::ElementDifference whole{.counts = counts};
    for (const auto& block : blocks) whole.squares += block;
    return whole;
  }
};

std::vector<distckpt::ElementDifference> compare(CheckpointPair& pair,
                                                 const ProgressFunction& progress) {
  std::vector<PartialDiff> partial(pair.num_tensors());
  for (std::size_t i = 0; i < partial.size(); ++i) {
    const auto bytes = pair.tensor(i).num_bytes();
    partial[i].blocks.resize(static_cast<std::size_t>(ceil_div(bytes, kDigestBlock)));
  }
  std::mutex mutex;
  const auto add = [&](const distckpt::Comparison& part) {
    const auto dtype = pair.tensor(part.tensor).dtype;
    auto& tensor = partial[part.tensor];
    auto block = static_cast<std::size_t>(part.element * size_of(dtype) / kDigestBlock);
    distckpt::ElementCounts counts;
    for (std::size_t at = 0; at < part.expected.size(); at += kDigestBlock, ++block) {
      const auto size = std::min<std::size_t>(kDigestBlock, part.expected.size() - at);
      const auto difference = distckpt::compare_elements(dtype, part.expected.subspan(at, size),
                                                         part.found.subspan(at, size));
      counts += difference.counts;
      tensor.blocks[block] = difference.squares;  // each block is of one thread
    }
    const std::lock_guard lock(mutex);
    tensor.counts += counts;
  };
  pair.compare(add, progress);
  std::vector<distckpt::ElementDifference> whole;
  for (const auto& tensor : partial) whole.push_back(tensor.finish());
  return whole;
}

// The number after the first `marker` in `name`, and where it stands.
struct Numbered {
  std::int64_t number = 0;
  std::size_t begin = 0;
  std::size_t end = 0;
};
std::optional<Numbered> find_number(std::string_view name, std::string_view marker) {
  const auto at = name.find(marker);
  if (at == std::string_view::npos) return std::nullopt;
  Numbered found{.begin = at + marker.size()};
  const auto* const first = name.data() + found.begin;
  const auto [stop, error] = std::from_chars(first, name.data() + name.size(), found.number);
  if (error != std::errc() || stop == name.data() + name.size() || *stop != '.')
    return std::nullopt;
  found.end = static_cast<std::size_t>(stop - name.data());
  return found;
}

class Tabulator {
 public:
  DiffTable run(const DiffReport& report) {
    for (const auto& tensor : report.tensors) {
      const auto place = place_of(tensor.name);
      auto& row = row_of(place);
      auto& cell = cell_of(row, place);
      const bool changed = tensor.difference.counts.different > 0;
      for (auto* sum : {&row.total.difference, &cell.difference}) *sum += tensor.difference;
      for (auto* number : {&row.total.num_tensors, &cell.num_tensors}) ++*number;
      for (auto* number : {&row.total.num_changed, &cell.num_changed}) *number += changed ? 1 : 0;
      if (place.expert) expert_of(row.total, *place.expert) += tensor.difference;
      if (cell.worst != nullptr && !is_worse(tensor.difference, cell.worst->difference)) continue;
      cell.worst = &tensor;
      cell.worst_expert = place.expert;
    }
    for (const auto& tensor : report.unpaired) {
      const auto place = place_of(tensor.tensor);
      cell_of(row_of(place), place).unpaired.push_back(&tensor);
    }
    DiffTable table{.columns = std::move(columns_)};
    for (auto& [layer, row] : rows_) {
      for (auto& [column, cell] : row.cells) row.total.cells.push_back(std::move(cell));
      if (layer) {
        table.layers.push_back(std::move(row.total));
      } else {
        table.outside = std::move(row.total);
      }
    }
    return table;
  }

 private:
  struct Row {
    DiffRow total{};
    std::map<std::size_t, DiffCell> cells{};  // by column
  };

  Row& row_of(const TensorPlace& place) {
    auto& row = rows_[place.layer];
    row.total.layer = place.layer;
    return row;
  }

  static distckpt::ElementDifference& expert_of(DiffRow& row, std::int64_t expert) {
    const auto index = static_cast<std::size_t>(expert);
    if (row.experts.size() <= index) row.experts.resize(index + 1);
    return row.experts[index];
  }

  DiffCell& cell_of(Row& row, const TensorPlace& place) {
    std::size_t column = 0;
    if (place.layer) {
      const auto [at, added] = column_index_.emplace(place.column, columns_.size());
      if (added) columns_.push_back(place.column);
      column = at->second;
    } else {
      column = outside_index_.emplace(place.column, outside_index_.size()).first->second;
    }
    auto& cell = row.cells[column];
    cell.column = place.column;
    cell.name = place.name;
    return cell;
  }

  std::vector<std::string> columns_;
  std::map<std::string, std::size_t> column_index_;
  std::map<std::string, std::size_t> outside_index_;
  std::map<std::optional<std::int64_t>, Row> rows_;
};

}  // namespace

DiffReport diff(const PairOptions& options, const ProgressFunction& progress) {
  const distckpt::Stopwatch stopwatch;
  CheckpointPair pair(options, /*without_adapter=*/true);
  auto differences = compare(pair, progress);
  DiffReport report{.left = pair.left().location.folder,
                    .right = pair.right().location.folder,
                    .left_format = pair.left().location.format,
                    .right_format = pair.right().location.format,
                    .family = pair.left().map.config.family,
                    .unpaired = pair.unpaired(),
                    .notes = pair.notes(),
                    .bytes = pair.num_bytes()};
  for (std::size_t i = 0; i < differences.size(); ++i) {
    const auto& tensor = pair.tensor(i);
    report.total += differences[i];
    if (differences[i].counts.different > 0) ++report.num_changed;
    report.tensors.push_back({.name = tensor.name,
                              .dtype = tensor.dtype,
                              .shape = tensor.shape,
                              .difference = differences[i]});
  }
  report.seconds = stopwatch.seconds();
  return report;
}

TensorPlace place_of(std::string_view name) {
  TensorPlace place{.name = std::string(name)};
  if (const auto expert = find_number(name, ".experts.")) {
    place.expert = expert->number;
    place.name = fmt::format("{}*{}", name.substr(0, expert->begin), name.substr(expert->end));
  }
  place.column = place.name;
  if (const auto layer = find_number(place.name, ".layers.")) {
    place.layer = layer->number;
    place.column.erase(0, layer->end + 1);
  }
  constexpr std::string_view kWeight = ".weight";
  if (place.column.ends_with(kWeight)) place.column.resize(place.column.size() - kWeight.size());
  return place;
}

bool is_worse(const distckpt::ElementDifference& a, const distckpt::ElementDifference& b) {
  const auto of = [](const distckpt::ElementDifference& one) {
    return std::pair(one.relative_difference(), one.counts.changed_share());
  };
  return of(a) > of(b);
}

DiffTable tabulate(const DiffReport& report) {
  return Tabulator().run(report);
}

}  // namespace ferry::converter
