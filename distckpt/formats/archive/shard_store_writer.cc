#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/elements/digest.h"
#include "distckpt/execute/chunk_cache.h"
#include "distckpt/execute/object_pool.h"
#include "distckpt/execute/plane_codec.h"
#include "distckpt/formats/archive/shard_store.h"
#include "distckpt/formats/archive/shard_store_file.h"
#include "distckpt/formats/archive/shard_store_index.h"
#include "distckpt/formats/archive/shard_store_layout.h"
#include "distckpt/formats/archive/shard_store_trailer.h"
#include "distckpt/plan/schedule.h"
#include "distckpt/storage/file_io.h"

namespace ferry::distckpt {
namespace {

// Encoded chunks that wait for an earlier one, before tasks that are ahead are held up.
constexpr std::int64_t kMaxWaitingBytes = std::int64_t{16} << 20;

// Chunks are filled by any thread, encoded by the one that completes them, and written in the order
// in which a single thread would have completed them. A file is begun with its first chunk and
// finished with its last.
class StoreSink : public BoxSink {
 public:
  // `finished` are the digests of the trailers of files that are there already: what belongs there
  // is dropped.
  StoreSink(const ShardStoreLayout& store,
            const Layout& layout,
            const CopyPlan& plan,
            std::vector<std::string> finished)
      : store_(store), layout_(layout), chunks_(layout.storages().size()) {
    for (const auto& digest : finished) files_.push_back({.trailer = digest});
    for (const auto& tensor : layout.tensors()) {
      for (const auto& shard : tensor.shards) {
        const auto bytes = shard.box.volume() * size_of(tensor.dtype);
        chunks_[shard.at.storage].missing += bytes;
        chunks_[shard.at.storage].bytes += bytes;
      }
    }
    number_chunks(plan);
    for (const auto storage : order_) ++file_of(storage).missing_chunks;
  }

  void write(const Region& region,
             std::span<const std::byte> packed,
             std::vector<ChecksumPart>&) override {
    const auto storage = region.at.storage;
    if (!file_of(storage).trailer.empty() || region.num_bytes() == 0) return;
    auto& chunk = chunks_.at(storage);
    auto* const data = buffer(chunk, storage);
    copy_strided(data + region.at.offset, region.at.strides, packed.data(), packed_strides(region),
                 region.size, region.element_size);
    const auto bytes = region.num_bytes();
    const auto left = chunk.missing.fetch_sub(bytes) - bytes;
    require(left >= 0, ErrorKind::kBug, "{}: written twice", describe(layout_.storages()[storage]));
    if (left == 0) complete(storage);
  }

  // The earliest unfinished task is never held up here, and chunks wait for nothing else.
  void commit(std::span<const ChecksumPart>) override {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return waiting_bytes_ <= kMaxWaitingBytes || cancelled_; });
  }

  void cancel() override {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    room_.notify_all();
  }

  void finish(const std::map<std::string, std::string>& small_files) {
    require(next_ == order_.size(), ErrorKind::kBug, "{} chunks were written, of {}", next_,
            order_.size());
    std::vector<std::string> trailers;
    for (std::uint32_t i = 0; i + 1 < files_.size(); ++i) {
      if (files_[i].trailer.empty()) finish_file(i, {}, {});  // it has no chunks
      trailers.push_back(files_[i].trailer);
    }
    finish_file(static_cast<std::uint32_t>(files_.size() - 1), small_files, trailers);
  }

 private:
  struct Chunk {
    std::atomic<std::int64_t> missing = 0;
    std::int64_t bytes = 0;  // of tensors; the rest is padding
    std::uint32_t sequence = 0;
    DecodedChunk decoded{};
  };

  struct File {
    std::string trailer{};  // its digest, once the file is finished; of the last it stays empty
    std::size_t missing_chunks = 0;
    std::unique_ptr<ShardStoreFile> open{};
  };

  std::uint32_t dataset_of(StorageId storage) const {
    const auto after =
        std::ranges::upper_bound(store_.datasets, storage, {}, &StoredDataset::first_chunk);
    return static_cast<std::uint32_t>(after - store_.datasets.begin() - 1);
  }
  File& file_of(StorageId storage) { return files_[store_.datasets[dataset_of(storage)].file]; }

  // The executor runs through the tensors in the schedule's order, each of them in row-major order:
  // a chunk is complete when the last of its elements is.
  void number_chunks(const CopyPlan& plan) {
    std::vector<std::pair<std::size_t, std::int64_t>> last(chunks_.size());
    std::size_t position = 0;
    std::set<std::uint32_t> seen;
    for (const auto& segment : make_schedule(plan, true).segments) {
      if (segment.kind != Segment::Kind::kTensor || !seen.insert(segment.index).second) continue;
      ++position;
      const auto& planned = plan.tensors[segment.index];
      const auto strides = row_major_strides(planned.tensor.shape);
      for (const auto& cover : planned.targets) {
        for (const auto& piece : cover) {
          std::int64_t element = 0;
          for (int d = 0; d < strides.rank(); ++d) element += (piece.box.end(d) - 1) * strides[d];
          auto& of_chunk = last[piece.at.storage];
          of_chunk = std::max(of_chunk, std::pair(position, element));
        }
      }
    }
    for (std::uint32_t i = 0; i < chunks_.size(); ++i) {
      if (file_of(i).trailer.empty()) order_.push_back(i);
    }
    std::ranges::stable_sort(order_, {}, [&](StorageId i) { return last[i]; });
    for (std::uint32_t i = 0; i < order_.size(); ++i) chunks_[order_[i]].sequence = i;
  }

  std::byte* buffer(Chunk& chunk, StorageId storage) {
    const std::lock_guard lock(mutex_);
    if (!chunk.decoded.data) {
      const auto& stored = std::get<ChunkStorage>(layout_.storages()[storage]);
      chunk.decoded = DecodedChunk::make(stored.decoded_size);
      if (chunk.bytes < stored.decoded_size) {
        std::ranges::fill(chunk.decoded.bytes(), std::byte{0});
      }
    }
    return chunk.decoded.data.get();
  }

  void complete(StorageId storage) {
    auto& chunk = chunks_[storage];
    const auto& stored = std::get<ChunkStorage>(layout_.storages()[storage]);
    auto encoded = codecs_.with([&](PlaneCodec& codec) {
      return codec.encode(chunk.decoded.bytes(), stored.element_size, stored.name);
    });
    std::unique_lock lock(mutex_);
    chunk.decoded = {};
    waiting_bytes_ += static_cast<std::int64_t>(encoded.size());
    ready_.emplace(chunk.sequence, std::move(encoded));
    if (writing_) return;  // by the thread that does
    writing_ = true;
    while (!ready_.empty() && ready_.begin()->first == next_) {
      const auto bytes = std::move(ready_.begin()->second);
      ready_.erase(ready_.begin());
      lock.unlock();
      write_chunk(order_[next_], bytes);  // if it throws, nobody writes any more
      lock.lock();
      ++next_;
      waiting_bytes_ -= static_cast<std::int64_t>(bytes.size());
      room_.notify_all();
    }
    writing_ = false;
  }

  void write_chunk(StorageId storage, std::span<const std::byte> encoded) {
    const auto dataset = dataset_of(storage);
    const auto index = store_.datasets[dataset].file;
    auto& file = files_[index];
    if (!file.open) file.open = std::make_unique<ShardStoreFile>(store_, index);
    file.open->write(dataset, storage - store_.datasets[dataset].first_chunk, encoded);
    const bool last = index + 1 == files_.size();
    if (--file.missing_chunks == 0 && !last) finish_file(index, {}, {});
  }

  void finish_file(std::uint32_t index,
                   const std::map<std::string, std::string>& small_files,
                   const std::vector<std::string>& trailers) {
    auto& file = files_[index];
    if (!file.open) file.open = std::make_unique<ShardStoreFile>(store_, index);
    file.trailer = to_string(file.open->finish(small_files, trailers));
    file.open.reset();
  }

  const ShardStoreLayout& store_;
  const Layout& layout_;
  std::vector<File> files_;
  ObjectPool<PlaneCodec> codecs_;
  std::vector<Chunk> chunks_;     // by storage
  std::vector<StorageId> order_;  // by sequence

  std::mutex mutex_;
  std::condition_variable room_;
  std::map<std::uint32_t, std::vector<std::byte>> ready_;  // by sequence
  std::uint32_t next_ = 0;
  std::int64_t waiting_bytes_ = 0;
  bool writing_ = false;
  bool cancelled_ = false;
};

// The digest of the trailer of a file that an earlier run has finished; empty otherwise.
std::string finished_trailer(const ShardStoreLayout& store, std::uint32_t index) {
  if (!std::filesystem::exists(store.files[index])) return {};
  try {
    const ReadFile file(store.files[index]);
    const auto trailer = read_trailer(file);
    std::string text(static_cast<std::size_t>(trailer.index.size()), '\0');
    file.read_at(trailer.index.begin, std::as_writable_bytes(std::span(text)));
    return text == make_index(store, index, {}) ? to_string(trailer.digest) : std::string();
  } catch (const Error&) {
    return {};  // it was being written
  }
}

}  // namespace

struct ShardStoreTarget::State {
  ShardStoreLayout store;
  Layout layout;
  std::unique_ptr<StoreSink> sink;
};

ShardStoreTarget::ShardStoreTarget(std::filesystem::path folder,
                                   const std::vector<ShardStoreTensor>& tensors,
                                   const ShardStoreOptions& options)
    : state_(std::make_unique<State>()) {
  state_->store = plan_shard_store(folder, tensors, options);
  state_->layout = make_layout(state_->store);
}

ShardStoreTarget::~ShardStoreTarget() = default;

const Layout& ShardStoreTarget::layout() const {
  return state_->layout;
}

BoxSink& ShardStoreTarget::open(const CopyPlan& plan, Journal& journal) {
  auto& store = state_->store;
  std::vector<std::string> finished(store.files.size());
  if (journal.num_finished() > 0) {
    for (std::uint32_t i = 0; i + 1 < store.files.size(); ++i)
      finished[i] = finished_trailer(store, i);
  }
  std::vector<bool> kept;  // by storage
  for (const auto& dataset : store.datasets)
    kept.insert(kept.end(), static_cast<std::size_t>(dataset.num_chunks()),
                !finished[dataset.file].empty());
  const auto schedule = make_schedule(plan, true);
  journal.keep_only([&](std::uint32_t task) {
    if (task >= schedule.tasks.size()) return false;
    const auto& [first, count] = schedule.tasks[task];
    return std::ranges::all_of(
        std::span(schedule.segments).subspan(first, count), [&](const Segment& segment) {
          if (segment.kind != Segment::Kind::kTensor) return true;
          const auto& targets = plan.tensors[segment.index].targets;
          return std::ranges::all_of(targets, [&](const Cover& cover) {
            return std::ranges::all_of(cover,
                                       [&](const Piece& piece) { return kept[piece.at.storage]; });
          });
        });
  });
  state_->sink = std::make_unique<StoreSink>(store, state_->layout, plan, std::move(finished));
  return *state_->sink;
}

void ShardStoreTarget::finish(const std::map<std::string, std::string>& small_files) {
  state_->sink->finish(small_files);
  state_->sink.reset();
}

}  // namespace ferry::distckpt
