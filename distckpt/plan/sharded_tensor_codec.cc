#include "distckpt/plan/sharded_tensor_codec.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

constexpr std::string_view kCodecMagic = "shards01";
constexpr int kMaxReplicaIds = 16;
constexpr std::int64_t kMaxNumber = std::int64_t{1} << 61;  // the sum of two does not overflow
constexpr std::int64_t kMinTensorBytes = 8;

class Encoder {
 public:
  explicit Encoder(std::string& out) : out_(out) {}

  void number(std::int64_t value) {
    auto rest = static_cast<std::uint64_t>(value);
    while (rest >= 0x80) {
      out_.push_back(static_cast<char>(rest | 0x80));
      rest >>= 7;
    }
    out_.push_back(static_cast<char>(rest));
  }

  void numbers(const Dims& dims) {
    for (const auto value : dims) number(value);
  }

  void tensor(const ShardedTensor& tensor) {
    tensor.validate();
    const auto [there, _] = std::ranges::mismatch(tensor.key, previous_);
    const auto shared = there - tensor.key.begin();
    number(shared);
    number(std::ssize(tensor.key) - shared);
    out_ += std::string_view(tensor.key).substr(static_cast<std::size_t>(shared));
    previous_ = tensor.key;
    number(static_cast<std::int64_t>(tensor.dtype));
    number(tensor.global_shape.rank());
    number(tensor.prepend_axis_num);
    numbers(tensor.global_shape);
    numbers(tensor.global_offset);
    numbers(tensor.local_shape);
    require(std::ssize(tensor.replica_id) <= kMaxReplicaIds, ErrorKind::kLayout,
            "{}: a replica_id of {} numbers", tensor.key, tensor.replica_id.size());
    number(std::ssize(tensor.replica_id));
    for (const auto id : tensor.replica_id) {
      require(id >= 0, ErrorKind::kLayout, "{}: a negative replica_id: {}", tensor.key, id);
      number(id);
    }
    number(tensor.flattened_range.has_value() ? 1 : 0);
    if (!tensor.flattened_range) return;
    number(tensor.flattened_range->first);
    number(tensor.flattened_range->second);
  }

 private:
  std::string& out_;
  std::string previous_;
};

class Decoder {
 public:
  Decoder(std::string_view bytes, std::string_view source) : bytes_(bytes), source_(source) {}

  std::vector<ShardedTensor> decode() {
    check(bytes_.starts_with(kCodecMagic), "these are no shards, or those of another version");
    at_ = kCodecMagic.size();
    std::vector<ShardedTensor> tensors;
    const auto count = number(std::ssize(bytes_) / kMinTensorBytes);
    tensors.reserve(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) tensors.push_back(tensor());
    check(at_ == bytes_.size(), "something follows the last tensor");
    return tensors;
  }

 private:
  void check(bool ok, std::string_view what) const {
    require(ok, ErrorKind::kCorrupt, "{}: byte {}: {}", source_, at_, what);
  }

  std::int64_t number(std::int64_t limit = kMaxNumber) {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      check(at_ < bytes_.size(), "it ends here");
      check(shift < 63, "a number is too long");
      const auto byte = static_cast<unsigned char>(bytes_[at_++]);
      value |= static_cast<std::uint64_t>(byte & 0x7FU) << shift;
      if ((byte & 0x80U) == 0) break;
    }
    const auto result = static_cast<std::int64_t>(value);
    check(result <= limit, "a number is too large");
    return result;
  }

  Dims numbers(std::int64_t rank) {
    Dims dims;
    for (std::int64_t d = 0; d < rank; ++d) dims.push_back(number());
    return dims;
  }

  ShardedTensor tensor() {
    ShardedTensor tensor;
    const auto shared = number(std::ssize(previous_));
    const auto rest = number(static_cast<std::int64_t>(bytes_.size() - at_));
    tensor.key = previous_.substr(0, static_cast<std::size_t>(shared));
    tensor.key += bytes_.substr(at_, static_cast<std::size_t>(rest));
    at_ += static_cast<std::size_t>(rest);
    previous_ = tensor.key;
    tensor.dtype = static_cast<DType>(number(static_cast<std::int64_t>(DType::kF64)));
    const auto rank = number(kMaxRank);
    tensor.prepend_axis_num = static_cast<int>(number(rank));
    tensor.global_shape = numbers(rank);
    tensor.global_offset = numbers(rank);
    tensor.local_shape = numbers(rank - tensor.prepend_axis_num);
    const auto num_ids = number(kMaxReplicaIds);
    for (std::int64_t i = 0; i < num_ids; ++i)
      tensor.replica_id.push_back(static_cast<int>(number(std::numeric_limits<int>::max())));
    if (number(1) == 1) {
      const auto first = number();
      tensor.flattened_range = {first, number()};
    }
    try {
      tensor.validate();
    } catch (const Error& error) {
      check(false, error.what());
    }
    return tensor;
  }

  std::string_view bytes_;
  std::string_view source_;
  std::size_t at_ = 0;
  std::string previous_;
};

}  // namespace

std::string encode_sharded_tensors(std::span<const ShardedTensor> tensors) {
  std::string bytes(kCodecMagic);
  Encoder encoder(bytes);
  encoder.number(std::ssize(tensors));
  for (const auto& tensor : tensors) encoder.tensor(tensor);
  return bytes;
}

std::vector<ShardedTensor> decode_sharded_tensors(std::string_view bytes, std::string_view source) {
  return Decoder(bytes, source).decode();
}

std::vector<std::vector<ShardedTensor>> decode_ranks(std::span<const std::string> ranks) {
  std::vector<std::vector<ShardedTensor>> tensors;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    tensors.push_back(
        decode_sharded_tensors(ranks[rank], fmt::format("the shards of rank {}", rank)));
  return tensors;
}

}  // namespace ferry::distckpt
