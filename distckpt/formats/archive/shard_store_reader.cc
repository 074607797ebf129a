#include <set>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/execute/plane_codec.h"
#include "distckpt/formats/archive/shard_store.h"
#include "distckpt/formats/archive/shard_store_index.h"
#include "distckpt/formats/archive/shard_store_layout.h"
#include "distckpt/formats/archive/shard_store_trailer.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::distckpt {
namespace fs = std::filesystem;
namespace {

std::string read_range(const ReadFile& file, const ByteRange& range) {
  std::string text(static_cast<std::size_t>(range.size()), '\0');
  file.read_at(range.begin, std::as_writable_bytes(std::span(text)));
  return text;
}

class ShardStoreReader {
 public:
  explicit ShardStoreReader(const fs::path& folder) : folder_(folder) {}

  ShardStore read() {
    find_files();
    for (std::uint32_t i = 0; i < store_.files.size(); ++i) {
      with_context([&] { return fmt::format("opening {}", store_.files[i].string()); },
                   [&] { read_file(i); });
    }
    auto layout = make_layout(store_);
    place_chunks(layout);
    check_layout(layout);
    return {.layout = std::move(layout), .files = std::move(small_files_)};
  }

 private:
  // The name of the first file says how many there are.
  void find_files() {
    std::set<std::size_t> counts;
    for (const auto& path : list_source(folder_)) {
      if (const auto count = shard_store_file_count(path.filename().string()))
        counts.insert(*count);
    }
    require(!counts.empty(), ErrorKind::kNotFound, "{}: holds no {}", folder_.string(),
            shard_store_filename(0, 1));
    require(counts.size() == 1, ErrorKind::kLayout,
            "{}: holds files of several archives, {} and {}", folder_.string(),
            shard_store_filename(0, *counts.begin()), shard_store_filename(0, *counts.rbegin()));
    const auto count = *counts.begin();
    for (std::size_t i = 0; i < count; ++i) {
      const auto name = shard_store_filename(i, count);
      require(source_exists(folder_ / name), ErrorKind::kNotFound, "{}: {} of {} files is missing",
              folder_.string(), name, count);
      store_.files.push_back(folder_ / name);
    }
  }

  void read_file(std::uint32_t index) {
    const ReadFile file(store_.files[index]);
    auto trailer = read_trailer(file);
    const auto what = store_.files[index].string();
    const auto contents = read_index(read_range(file, trailer.index), index, store_.files.size(),
                                     trailer.chunks.size(), what, store_);
    places_.insert(places_.end(), trailer.chunks.begin(), trailer.chunks.end());
    if (index + 1 < store_.files.size()) {
      digests_.push_back(to_string(trailer.digest));
      return;
    }
    for (std::size_t i = 0; i < digests_.size(); ++i) {
      require(contents.trailers.size() == digests_.size() && contents.trailers[i] == digests_[i],
              ErrorKind::kCorrupt, "{}: belongs to another archive than {}",
              store_.files[i].string(), what);
    }
    read_small_files(file, trailer.begin, contents, what);
  }

  void read_small_files(const ReadFile& file,
                        std::int64_t end,
                        const ShardStoreContents& contents,
                        const std::string& what) {
    auto room = end;  // together they are no larger than the file
    for (const auto& [name, range] : contents.small_files) {
      require(
          range.begin >= 0 && range.begin <= range.end && range.end <= end && range.size() <= room,
          ErrorKind::kCorrupt, "{}: {} cannot lie in bytes {} to {}", what, name, range.begin,
          range.end);
      room -= range.size();
      small_files_.emplace(name, read_range(file, range));
    }
  }

  void place_chunks(Layout& layout) const {
    for (StorageId i = 0; i < places_.size(); ++i) {
      auto& chunk = std::get<ChunkStorage>(layout.storage(i));
      const auto& place = places_[i];
      const auto most = max_encoded_size(chunk.decoded_size, chunk.element_size);
      require(place.size <= most, ErrorKind::kCorrupt,
              "{}: the chunk {} cannot lie in bytes {} to {}: it has {} at most",
              chunk.path.string(), chunk.name, place.offset, place.end(), most);
      chunk.offset = place.offset;
      chunk.encoded_size = place.size;
      chunk.crc = place.crc;
    }
  }

  const fs::path& folder_;
  ShardStoreLayout store_;
  std::vector<ChunkPlace> places_;    // of chunks, by storage
  std::vector<std::string> digests_;  // of the trailers of all files but the last
  std::map<std::string, std::string> small_files_;
};

}  // namespace

ShardStore read_shard_store(const fs::path& folder) {
  return ShardStoreReader(folder).read();
}

}  // namespace ferry::distckpt
