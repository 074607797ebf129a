// Records of several files as an endless stream of batches, epoch after epoch. Batches are a pure
// function of the files, the options and the cursor: every rank sees the same global batch, with no
// word between them, and takes its share of it. A resumed stream continues as if it had not
// stopped, on any number of ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "trainer/config/run_choices.h"
#include "trainer/data/epoch_order.h"
#include "trainer/data/record_file.h"

namespace ferry::trainer {

struct StreamOptions {
  OrderOptions order{};
  OnMalformed on_malformed = OnMalformed::kSkip;
  // The rest of an epoch that makes no full batch is dropped; else it is a batch of its own.
  bool drop_last = true;
};

struct MalformedRow {
  std::string file{};
  std::string where{};   // "line 17"
  std::string reason{};  // "prompt: is missing"
  std::string describe() const { return fmt::format("{}: {}: {}", file, where, reason); }
};

// Rows that were skipped, each time that they were met; counted from the beginning of the run, also
// where it was stopped.
struct MalformedRows {
  std::int64_t count = 0;
  std::vector<MalformedRow> first{};  // of them; at most kKeptMalformed
};
inline constexpr std::size_t kKeptMalformed = 20;

// Rows of an epoch that something was made of, and the first that is malformed.
struct ParsedRows {
  std::int64_t count = 0;
  std::optional<MalformedRow> malformed{};
};

struct Cursor {
  std::int64_t epoch = 0;
  std::int64_t position = 0;  // in the epoch's order: records that are behind
  bool operator==(const Cursor&) const = default;
};

class RecordStream {
 public:
  // Opens and scans the files. Throws Error that names the file, Error(kUsage) if there is none or
  // no record in them.
  RecordStream(const std::vector<std::filesystem::path>& files, const StreamOptions& options);

  std::int64_t num_records() const { return num_records_; }  // of an epoch, malformed ones included
  const Cursor& cursor() const { return cursor_; }
  const MalformedRows& malformed() const { return malformed_; }
  // Rows of malformed().first that this has not returned before.
  std::vector<MalformedRow> newly_malformed();

  // The places of the records of the last batch: "train.jsonl: line 17".
  const std::vector<std::string>& places() const { return places_; }

  // Tries `parse` on the first record, and leaves the stream where it is. Throws its Error, unless
  // the row may be skipped.
  template <typename Parse>
  void try_first(Parse&& parse) const {
    const auto place = std::ranges::find_if(sizes_, [](auto size) { return size.num_records > 0; });
    const auto& first = chunks_.at(static_cast<std::size_t>(place - sizes_.begin()));
    const auto chunk = first.file->open(first.index);
    std::optional<MalformedRow> malformed;
    (void)parse_row({.file = first.file, .chunk = chunk.get()}, parse, malformed);
  }

  // Counts the records of an epoch that `parse` makes something of, in this rank's share of so
  // many: reads all of it, counts nothing as malformed, and leaves the stream where it is.
  template <typename Parse>
  ParsedRows count_parsed(Parse&& parse, int rank, int num_ranks) const {
    ParsedRows rows;
    for (auto i = static_cast<std::size_t>(rank); i < chunks_.size();
         i += static_cast<std::size_t>(num_ranks)) {
      const auto chunk = chunks_[i].file->open(chunks_[i].index);
      Row row{.file = chunks_[i].file, .chunk = chunk.get()};
      for (; row.index < sizes_[i].num_records; ++row.index) {
        std::optional<MalformedRow> malformed;
        rows.count += parse_row(row, parse, malformed) ? 1 : 0;
        if (!rows.malformed) rows.malformed = std::move(malformed);
      }
    }
    return rows;
  }

  // The next `size` records that `parse(const Record&)` makes something of. An Error(kCorrupt) from
  // it makes the row malformed. Fewer come only at the end of an epoch and without drop_last: maybe
  // none, where all that was left of it was malformed. Throws Error(kUsage) if a whole epoch yields
  // no batch.
  template <typename Parse>
  auto next_batch(std::int64_t size, Parse&& parse) {
    std::vector<std::invoke_result_t<Parse&, const Record&>> batch;
    begin_batch(size);
    while (std::cmp_less(batch.size(), size)) {
      if (cursor_.position == order_->size()) {
        end_epoch(size);
        if (!options_.drop_last) break;
        batch.clear();
        places_.clear();
        continue;
      }
      std::optional<MalformedRow> malformed;
      const auto row = next_row();
      auto parsed = parse_row(row, parse, malformed);
      if (!parsed) {
        skip(*std::move(malformed));
        continue;
      }
      batch.push_back(*std::move(parsed));
      places_.push_back(place_of(row));
    }
    num_yielded_ += static_cast<std::int64_t>(batch.size());
    return batch;
  }

  // The cursor, and all that its order depends on, for a checkpoint.
  Record state() const;

  // Continues there. Throws Error(kUsage) that names what differs if files, seed or order are
  // others.
  void restore(const Record& state);

 private:
  struct Row {
    const RecordFile* file = nullptr;
    const Chunk* chunk = nullptr;
    std::int64_t index = 0;  // in the chunk
  };
  struct ChunkOfFile {
    const RecordFile* file = nullptr;
    std::size_t index = 0;
  };

  // Returns what `parse` makes of a row; of a malformed one that may be skipped nothing, and why.
  template <typename Parse>
  auto parse_row(const Row& row, Parse& parse, std::optional<MalformedRow>& malformed) const
      -> std::optional<std::invoke_result_t<Parse&, const Record&>> {
    try {
      return parse(row.chunk->at(row.index));
    } catch (Error& error) {
      if (error.kind() != ErrorKind::kCorrupt) {
        error.add_context(fmt::format("reading {}", place_of(row)));
        throw;
      }
      malformed = skippable(row, error.what());
      return std::nullopt;
    }
  }

  void begin_batch(std::int64_t size);
  void end_epoch(std::int64_t size);
  Row next_row();
  static std::string place_of(const Row& row);
  MalformedRow skippable(const Row& row, std::string reason) const;  // or throws
  void skip(MalformedRow malformed);
  void seek(const Cursor& cursor);
  Record source() const;  // what the order depends on

  StreamOptions options_;
  std::vector<std::unique_ptr<RecordFile>> files_;
  std::vector<ChunkOfFile> chunks_;  // of all files
  std::vector<ChunkSize> sizes_;     // of the chunks
  std::int64_t num_records_ = 0;
  Cursor cursor_{};
  std::optional<EpochOrder> order_;  // of the cursor's epoch
  std::size_t window_ = 0;
  std::map<std::size_t, std::unique_ptr<Chunk>> open_;  // chunks of window_
  MalformedRows malformed_{};
  std::vector<std::string> places_;
  std::size_t num_told_ = 0;      // of malformed_.first
  std::int64_t num_yielded_ = 0;  // of this epoch, since begin or restore
  bool whole_epoch_ = true;       // this one began at its beginning
};

// The share of a data-parallel rank: runs of consecutive records, equal or one longer in the first
// ranks. A batch that the ranks share evenly is required of the configuration.
template <typename Example>
std::span<const Example> shard_of(const std::vector<Example>& batch, int dp_rank, int dp_size) {
  require(dp_rank >= 0 && dp_rank < dp_size, ErrorKind::kBug, "dp rank {} of {}", dp_rank, dp_size);
  const auto rank = static_cast<std::size_t>(dp_rank);
  const auto size = static_cast<std::size_t>(dp_size);
  const auto begin = [&](std::size_t r) {
    return r * (batch.size() / size) + std::min(r, batch.size() % size);
  };
  return std::span(batch).subspan(begin(rank), begin(rank + 1) - begin(rank));
}

}  // namespace ferry::trainer
