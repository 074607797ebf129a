#include "trainer/data/record_stream.h"

#include <string_view>

namespace ferry::trainer {
namespace {

// The version of the order, not of the program: streams of another one cannot be continued.
constexpr std::string_view kOrderVersion = "windows of chunks, feistel-8 splitmix64";

std::int64_t integer_at(const Record& state, std::string_view key) {
  const auto found = state.find(key);
  require(found != state.end() && found->is_number_integer() && *found >= 0, ErrorKind::kCorrupt,
          "data cursor: {} is missing or no number", key);
  return found->get<std::int64_t>();
}

}  // namespace

RecordStream::RecordStream(const std::vector<std::filesystem::path>& files,
                           const StreamOptions& options)
    : options_(options) {
  require(!files.empty(), ErrorKind::kUsage, "data: no file is named");
  for (const auto& path : files) {
    const auto& file = *files_.emplace_back(open_record_file(path));
    for (std::size_t i = 0; i < file.chunks().size(); ++i) {
      chunks_.push_back({.file = &file, .index = i});
      sizes_.push_back(file.chunks()[i]);
    }
  }
  seek({});
  num_records_ = order_->size();
  require(num_records_ > 0, ErrorKind::kUsage, "{}: there is no record in {}",
          files.front().string(), files.size() == 1 ? "it" : "it, nor in the files after it");
}

void RecordStream::begin_batch(std::int64_t size) {
  places_.clear();
  require(size > 0, ErrorKind::kUsage, "data: a batch of {} records", size);
  require(!options_.drop_last || size <= num_records_, ErrorKind::kUsage,
          "data: a batch of {} records out of {}: an epoch has no full batch", size, num_records_);
}

// A whole epoch without a batch would be followed by others like it.
void RecordStream::end_epoch(std::int64_t size) {
  if (whole_epoch_ && num_yielded_ == 0 && options_.drop_last) {
    auto error = Error(ErrorKind::kUsage,
                       fmt::format("data: a whole epoch has no batch of {} records: {} of its rows "
                                   "are malformed",
                                   size, malformed_.count));
    if (!malformed_.first.empty())
      error.set_hint(fmt::format("the first is {}", malformed_.first.front().describe()));
    throw error;
  }
  seek({.epoch = cursor_.epoch + 1, .position = 0});
}

RecordStream::Row RecordStream::next_row() {
  const auto place = order_->at(cursor_.position++);
  if (place.window != window_) {
    open_.clear();
    window_ = place.window;
  }
  const auto& [file, index] = chunks_[place.chunk];
  auto& chunk = open_[place.chunk];
  if (chunk == nullptr) chunk = file->open(index);
  return {.file = file, .chunk = chunk.get(), .index = place.row};
}

std::string RecordStream::place_of(const Row& row) {
  return fmt::format("{}: {}", row.file->path().string(), row.chunk->where(row.index));
}

MalformedRow RecordStream::skippable(const Row& row, std::string reason) const {
  MalformedRow malformed{.file = row.file->path().string(),
                         .where = row.chunk->where(row.index),
                         .reason = std::move(reason)};
  require(options_.on_malformed == OnMalformed::kSkip, ErrorKind::kCorrupt, "{}",
          malformed.describe());
  return malformed;
}

void RecordStream::skip(MalformedRow malformed) {
  ++malformed_.count;
  if (malformed_.first.size() < kKeptMalformed) malformed_.first.push_back(std::move(malformed));
}

std::vector<MalformedRow> RecordStream::newly_malformed() {
  const auto& first = malformed_.first;
  const auto told = static_cast<std::ptrdiff_t>(std::exchange(num_told_, first.size()));
  return {first.begin() + told, first.end()};
}

void RecordStream::seek(const Cursor& cursor) {
  cursor_ = cursor;
  order_.emplace(sizes_, options_.order, cursor.epoch);
  open_.clear();
  window_ = 0;
  num_yielded_ = 0;
  whole_epoch_ = cursor.position == 0;
}

Record RecordStream::source() const {
  auto files = Record::array();
  for (const auto& file : files_) {
    std::int64_t num_records = 0;
    for (const auto& chunk : file->chunks()) num_records += chunk.num_records;
    files.push_back({{"name", file->path().filename().string()},
                     {"bytes", file->file_bytes()},
                     {"records", num_records}});
  }
  return {{"files", std::move(files)},
          {"shuffle", options_.order.shuffle},
          {"seed", options_.order.seed},
          {"shuffle_buffer_bytes", options_.order.shuffle_buffer_bytes},
          {"order", kOrderVersion}};
}

Record RecordStream::state() const {
  return {{"epoch", cursor_.epoch},
          {"position", cursor_.position},
          {"malformed", malformed_.count},
          {"source", source()}};
}

void RecordStream::restore(const Record& state) {
  require(state.is_object() && state.contains("source") && state["source"].is_object(),
          ErrorKind::kCorrupt, "data cursor: is no state of a stream of records");
  const auto& saved = state["source"];
  const auto now = source();
  for (const auto& [key, ours] : now.items()) {
    const auto found = saved.find(key);
    if (found != saved.end() && *found == ours) continue;
    throw Error(ErrorKind::kUsage,
                fmt::format("data cursor: {} was {} when it was saved, and is {} now", key,
                            found == saved.end() ? "not there" : found->dump(), ours.dump()),
                "continue with the same files and options, or begin anew in another "
                "trainer.default_local_dir, with the checkpoint as the model");
  }
  const Cursor cursor{.epoch = integer_at(state, "epoch"),
                      .position = integer_at(state, "position")};
  require(cursor.position <= num_records_, ErrorKind::kCorrupt,
          "data cursor: position {} of {} records", cursor.position, num_records_);
  seek(cursor);
  malformed_ = {};
  num_told_ = 0;
  if (state.contains("malformed")) malformed_.count = integer_at(state, "malformed");
}

}  // namespace ferry::trainer
