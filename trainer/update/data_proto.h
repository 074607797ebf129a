// A batch as it travels between the roles of a reinforcement learning step (verl protocol.py):
// tensors and other columns of as many rows, and what is said of all of them. Operations leave
// their operand alone; rows are copied where they move, shared where they do not.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace ferry::trainer {

class DataProto {
 public:
  using Tensors = std::map<std::string, at::Tensor>;  // [rows, ...]
  using Columns = std::map<std::string, std::vector<nlohmann::json>>;
  using Keys = std::span<const std::string>;
  using Rows = std::span<const std::int64_t>;

  DataProto() = default;
  // Throws Error(kUsage), also below, for columns of different lengths.
  explicit DataProto(Tensors batch,
                     Columns non_tensor_batch = {},
                     nlohmann::json meta_info = nlohmann::json::object());

  std::int64_t size() const;  // rows; 0 without a column
  const Tensors& batch() const { return batch_; }
  const Columns& non_tensor_batch() const { return non_tensor_batch_; }
  const at::Tensor& tensor(const std::string& key) const;
  const std::vector<nlohmann::json>& column(const std::string& key) const;
  void set(const std::string& key, at::Tensor tensor);
  void set(const std::string& key, std::vector<nlohmann::json> column);

  nlohmann::json meta_info = nlohmann::json::object();

  // Columns of either kind. `select` keeps them, `pop` takes them out and returns them; both take
  // meta_info along.
  DataProto select(Keys keys) const;
  DataProto pop(Keys keys);
  DataProto rename(const std::string& from, const std::string& to) const;
  // The columns of both, of the same rows; what both have must be equal, bit for bit.
  DataProto union_with(const DataProto& other) const;

  DataProto select_idxs(Rows rows) const;  // each row as often as it is named
  DataProto slice(std::int64_t begin, std::int64_t end) const;
  DataProto reorder(Rows order) const;  // a permutation
  // interleave: 0 0 1 1; otherwise: 0 1 0 1.
  DataProto repeat(std::int64_t repeat_times, bool interleave = true) const;
  // Equal parts, in order. Throws Error(kUsage) if the rows do not come out even.
  std::vector<DataProto> chunk(std::int64_t chunks) const;
  // Parts of as many rows; the last may have fewer.
  std::vector<DataProto> split(std::int64_t split_size) const;
  // What meta_info all of them have must be the same.
  static DataProto concat(std::span<const DataProto> parts);

  // For another rank: columns as they are, tensors on the host.
  std::vector<std::byte> to_bytes() const;
  // Throws Error(kCorrupt).
  static DataProto from_bytes(std::span<const std::byte> bytes);

 private:
  void check(const std::string& key, std::int64_t rows) const;

  Tensors batch_;
  Columns non_tensor_batch_;
};

// With its first rows again behind it, until the divisor divides it; and how many these are. Throws
// Error(kUsage) if there is no row to repeat.
std::pair<DataProto, std::int64_t> pad_dataproto_to_divisor(const DataProto& data,
                                                            std::int64_t size_divisor);
DataProto unpad_dataproto(const DataProto& data, std::int64_t pad_size);

// The order of rows in which chunk(dp) gives every rank about the same work (verl
// ray_trainer._balance_batch), from `attention_mask` [rows, tokens]. Undone by inverse_order().
std::vector<std::int64_t> balanced_order(const DataProto& data, std::int64_t dp);
std::vector<std::int64_t> inverse_order(std::span<const std::int64_t> order);

}  // namespace ferry::trainer
