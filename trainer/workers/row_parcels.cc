#include "trainer/workers/row_parcels.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "distckpt/base/error.h"
#include "trainer/update/rollout_columns.h"

namespace ferry::trainer {
namespace {

// The columns that are asked for, under the receiver's names.
RolloutBatch renamed(const RolloutBatch& answer,
                     const std::map<std::string, std::string>& columns) {
  auto batch = answer.without_columns();
  for (const auto& [to, from] : columns) {
    each_column([&]<typename Column>(const char* name, Per, Column RolloutBatch::*member) {
      if (name != to) return;
      each_column([&]<typename Other>(const char* other, Per, Other RolloutBatch::*of) {
        if constexpr (std::is_same_v<Column, Other>)
          if (other == from) batch.*member = answer.*of;
      });
    });
  }
  return batch;
}

}  // namespace

std::vector<RowParcel> plan_parcels(const RolloutBatch& batch,
                                    const std::map<int, RolloutBatch::Rows>& receivers) {
  std::vector<RowParcel> parcels;
  for (const auto& [to, rows] : receivers) {
    std::map<int, RowParcel> of_owners;
    for (std::size_t group = 0; group < batch.kept.size(); ++group) {
      const auto& [columns, places, leases] = batch.kept[group];
      std::map<std::pair<int, std::int64_t>, RowPiece> pieces;  // of a rank's answer
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto& place = places.at(static_cast<std::size_t>(rows[i]));
        auto& piece = pieces[{place.rank, place.answer}];
        piece.rows.push_back(place.row);
        piece.places.push_back(static_cast<std::int64_t>(i));
      }
      for (auto& [key, piece] : pieces) {
        piece.answer = key.second;
        piece.columns = columns;
        piece.group = static_cast<std::int64_t>(group);
        auto& parcel = of_owners[key.first];
        parcel.from = key.first;
        parcel.to = to;
        parcel.pieces.push_back(std::move(piece));
      }
    }
    for (auto& [owner, parcel] : of_owners) parcels.push_back(std::move(parcel));
  }
  return parcels;
}

std::vector<std::string> KeptRows::keep(std::int64_t answer, RolloutBatch& batch) {
  std::vector<std::string> names;
  auto kept = batch.without_columns();
  each_column([&](const char* name, Per per, auto member) {
    if (goes_with_rows(per, name) || !is_known(batch.*member)) return;
    names.emplace_back(name);
    kept.*member = std::exchange(batch.*member, {});
  });
  if (!names.empty()) answers_.insert_or_assign(answer, std::move(kept));
  return names;
}

void KeptRows::keep_only(std::span<const std::int64_t> answers) {
  std::erase_if(answers_, [&](const auto& one) {
    return std::ranges::find(answers, one.first) == answers.end();
  });
}

std::vector<RolloutBatch> KeptRows::find(const RowParcel& parcel) const {
  std::vector<RolloutBatch> found;
  for (const auto& piece : parcel.pieces) {
    const auto answer = answers_.find(piece.answer);
    require(answer != answers_.end(), ErrorKind::kBug, "rank {} does not keep answer {}",
            parcel.from, piece.answer);
    found.push_back(renamed(answer->second, piece.columns).select(piece.rows));
  }
  return found;
}

void add_columns(RolloutBatch& rows,
                 std::span<const RowParcel> parcels,
                 std::span<const std::vector<RolloutBatch>> found) {
  struct Group {
    std::vector<RolloutBatch> parts{};
    RolloutBatch::Rows places{};
  };
  std::map<std::int64_t, Group> groups;
  for (std::size_t i = 0; i < parcels.size(); ++i) {
    const auto& pieces = parcels[i].pieces;
    require(found[i].size() == pieces.size(), ErrorKind::kBug, "{} pieces of rows instead of {}",
            found[i].size(), pieces.size());
    for (std::size_t piece = 0; piece < pieces.size(); ++piece) {
      auto& group = groups[pieces[piece].group];
      group.parts.push_back(found[i][piece]);
      std::ranges::copy(pieces[piece].places, std::back_inserter(group.places));
    }
  }
  for (const auto& [number, group] : groups) {
    RolloutBatch::Rows order(group.places.size());
    for (std::size_t i = 0; i < order.size(); ++i)
      order.at(static_cast<std::size_t>(group.places[i])) = static_cast<std::int64_t>(i);
    rows.take(RolloutBatch::concat(group.parts).select(order));
  }
}

}  // namespace ferry::trainer
