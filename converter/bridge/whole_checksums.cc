#include "converter/bridge/whole_checksums.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/interruption.h"
#include "distckpt/base/threads.h"
#include "distckpt/elements/crc32.h"

namespace ferry::converter {
namespace {

using distckpt::ExpectedChecksum;
using distckpt::MeshLayout;

constexpr std::int64_t kBlock = std::int64_t{4} << 20;  // bytes that a thread reads at a time

// The rank that a storage of a mesh stands for: where several hold the same box, each has it in its
// own memory, and all know the main one.
class MainRanks {
 public:
  explicit MainRanks(const MeshLayout& mesh) : mesh_(mesh) {
    std::map<std::tuple<std::string, distckpt::Dims, distckpt::Dims>, int> mains;
    const auto key_of = [](const distckpt::ShardedTensor& tensor) {
      const auto box = tensor.box();
      return std::tuple(tensor.key, box.offset, box.size);
    };
    for (std::size_t rank = 0; rank < mesh.ranks.size(); ++rank) {
      for (const auto& tensor : mesh.ranks[rank])
        if (tensor.is_main_replica()) mains.emplace(key_of(tensor), static_cast<int>(rank));
    }
    for (const auto& shard : mesh.shards) {
      const auto found = mains.find(key_of(shard.tensor));
      mine_.push_back(found == mains.end() ? mesh.rank : found->second);
    }
  }

  int of(distckpt::StorageId storage) const {
    return mesh_.is_mine(storage) ? mine_[storage - mesh_.ranks.size()] : static_cast<int>(storage);
  }

 private:
  const MeshLayout& mesh_;
  std::vector<int> mine_;  // by shard
};

// The ranges by their places.
class Ranges {
 public:
  explicit Ranges(const std::vector<ExpectedChecksum>& all) : all_(all), order_(all.size()) {
    std::iota(order_.begin(), order_.end(), 0U);
    std::ranges::sort(order_, {}, [&](std::uint32_t i) { return place(i); });
  }

  // The range that holds this byte.
  std::optional<std::uint32_t> find(distckpt::StorageId storage, std::int64_t offset) const {
    const auto behind = std::ranges::upper_bound(order_, std::tuple(storage, offset, INT64_MAX), {},
                                                 [&](std::uint32_t i) { return place(i); });
    if (behind == order_.begin()) return std::nullopt;
    const auto& range = all_[*std::prev(behind)].range;
    if (range.storage != storage || offset >= range.offset + range.size) return std::nullopt;
    return *std::prev(behind);
  }

 private:
  std::tuple<distckpt::StorageId, std::int64_t, std::int64_t> place(std::uint32_t i) const {
    return {all_[i].range.storage, all_[i].range.offset, all_[i].range.size};
  }

  const std::vector<ExpectedChecksum>& all_;
  std::vector<std::uint32_t> order_;
};

// Bytes of a range that a rank reads for one copy of one tensor.
using Readers = std::map<std::tuple<int, std::size_t, std::size_t>, std::int64_t>;

std::uint32_t checksum_of(distckpt::BoxSource& source, const distckpt::ChecksumRange& range) {
  std::uint32_t crc = 0;
  std::vector<std::byte> block(static_cast<std::size_t>(std::min(kBlock, range.size)));
  std::vector<distckpt::ChecksumPart> parts;
  for (std::int64_t at = 0; at < range.size; at += kBlock) {
    const auto size = std::min(kBlock, range.size - at);
    const auto bytes = std::span(block).first(static_cast<std::size_t>(size));
    require(!distckpt::is_interrupted(), ErrorKind::kCancelled, "interrupted");
    parts.clear();
    source.read({.at = {.storage = range.storage, .offset = range.offset + at, .strides = {1}},
                 .size = {size}},
                bytes, parts);
    crc = distckpt::crc32(bytes, crc);
  }
  return crc;
}

}  // namespace

std::vector<std::uint32_t> checksums_to_read(const distckpt::CopyPlan& plan,
                                             const MeshLayout& mesh,
                                             const std::vector<ExpectedChecksum>& checksums) {
  if (mesh.ranks.size() == 1 || checksums.empty()) return {};
  const MainRanks ranks(mesh);
  const Ranges ranges(checksums);
  std::vector<Readers> readers(checksums.size());
  for (std::size_t tensor = 0; tensor < plan.tensors.size(); ++tensor) {
    const auto& planned = plan.tensors[tensor];
    for (std::size_t copy = 0; copy < planned.targets.size(); ++copy) {
      auto one = planned;
      one.targets = {planned.targets[copy]};
      for (const auto& op : distckpt::copy_ops(one)) {
        const auto range = ranges.find(op.source.storage, op.source.offset);
        if (range)
          readers[*range][{ranks.of(op.target.storage), tensor, copy}] +=
              op.box.volume() * distckpt::size_of(op.source_dtype);
      }
    }
  }
  std::vector<std::uint32_t> mine;
  for (std::uint32_t i = 0; i < checksums.size(); ++i) {
    std::vector<int> some;
    bool is_read_whole = false;
    for (const auto& [reader, bytes] : readers[i]) {
      is_read_whole = is_read_whole || bytes >= checksums[i].range.size;
      const int rank = std::get<0>(reader);
      if (some.empty() || some.back() != rank) some.push_back(rank);
    }
    if (!is_read_whole && !some.empty() && some[i % some.size()] == mesh.rank) mine.push_back(i);
  }
  return mine;
}

void read_checksums(distckpt::BoxSource& source,
                    const std::vector<ExpectedChecksum>& checksums,
                    const std::vector<std::uint32_t>& which,
                    int threads) {
  const auto most = distckpt::threads_or_cores(threads);
  distckpt::side_by_side(std::ssize(which), most, [&](std::int64_t i) {
    const auto& expected = checksums[which[static_cast<std::size_t>(i)]];
    const auto& range = expected.range;
    const auto crc = checksum_of(source, range);
    require(crc == expected.crc, ErrorKind::kCorrupt,
            "{}: bytes {} to {} ({}) have CRC-32 {:08x}, the file says {:08x}",
            source.name_of(range.storage), range.offset, range.offset + range.size, expected.name,
            crc, expected.crc);
  });
}

}  // namespace ferry::converter
