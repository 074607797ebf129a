#include "trainer/update/data_proto.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "distckpt/base/error.h"
#include "trainer/engine/micro_batches.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;
using Columns = DataProto::Columns;
using Tensors = DataProto::Tensors;

constexpr std::uint64_t kMagic = 0x31'4F'54'4F'52'50'44'46;  // "FDPROTO1"
constexpr std::size_t kAlignment = 64;

bool same_bits(const at::Tensor& left, const at::Tensor& right) {
  if (left.scalar_type() != right.scalar_type() || left.sizes() != right.sizes()) return false;
  const auto a = left.cpu().contiguous(), b = right.cpu().contiguous();
  return a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

std::size_t aligned(std::size_t offset) {
  return (offset + kAlignment - 1) / kAlignment * kAlignment;
}

std::int64_t rows_of(const at::Tensor& tensor, const std::string& key) {
  require(tensor.defined() && tensor.dim() > 0, ErrorKind::kUsage, "batch: {} has no rows", key);
  return tensor.size(0);
}

std::vector<std::int64_t> ascending(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(std::max<std::int64_t>(end - begin, 0)));
  std::iota(rows.begin(), rows.end(), begin);
  return rows;
}

// Bytes that come from elsewhere, taken from the front.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::span<const std::byte> at(std::uint64_t offset, std::uint64_t count) const {
    require(offset <= bytes_.size() && count <= bytes_.size() - offset, ErrorKind::kCorrupt,
            "batch: {} bytes, expected {} behind byte {}", bytes_.size(), count, offset);
    return bytes_.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(count));
  }
  std::uint64_t number(std::uint64_t offset) const {
    std::uint64_t value = 0;
    std::memcpy(&value, at(offset, sizeof(value)).data(), sizeof(value));
    return value;
  }

 private:
  std::span<const std::byte> bytes_;
};

at::Tensor tensor_of(const json& entry, const Reader& reader, std::size_t begin) {
  const auto shape = entry.at("shape").get<std::vector<std::int64_t>>();
  const auto type = static_cast<at::ScalarType>(entry.at("dtype").get<std::int8_t>());
  require((c10::isIntegralType(type, /*includeBool=*/true) || c10::isFloatingType(type) ||
           c10::isComplexType(type)) &&
              std::ranges::none_of(shape, [](auto size) { return size < 0; }),
          ErrorKind::kCorrupt, "batch: a tensor has dtype {} and shape {}",
          entry.at("dtype").dump(), entry.at("shape").dump());
  // The bytes are there before memory is taken for them.
  const auto bytes = reader.at(begin + entry.at("offset").get<std::uint64_t>(),
                               entry.at("nbytes").get<std::uint64_t>());
  double elements = 1;
  for (const auto size : shape) elements *= static_cast<double>(size);
  require(
      elements * static_cast<double>(c10::elementSize(type)) == static_cast<double>(bytes.size()),
      ErrorKind::kCorrupt, "batch: a tensor of shape {} has {} bytes", entry.at("shape").dump(),
      bytes.size());
  auto tensor = at::empty(shape, at::TensorOptions(type));
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

}  // namespace

DataProto::DataProto(Tensors batch, Columns non_tensor_batch, json meta)
    : meta_info(std::move(meta)) {
  for (auto& [key, tensor] : batch) set(key, std::move(tensor));
  for (auto& [key, column] : non_tensor_batch) set(key, std::move(column));
}

std::int64_t DataProto::size() const {
  if (!batch_.empty()) return batch_.begin()->second.size(0);
  if (non_tensor_batch_.empty()) return 0;
  return static_cast<std::int64_t>(non_tensor_batch_.begin()->second.size());
}

void DataProto::check(const std::string& key, std::int64_t rows) const {
  require((batch_.empty() && non_tensor_batch_.empty()) || rows == size(), ErrorKind::kUsage,
          "batch: {} has {} rows, expected {}", key, rows, size());
}

void DataProto::set(const std::string& key, at::Tensor tensor) {
  require(!non_tensor_batch_.contains(key), ErrorKind::kUsage, "batch: {} is no tensor", key);
  const auto rows = rows_of(tensor, key);
  const auto old = batch_.extract(key);
  check(key, rows);
  batch_[key] = std::move(tensor);
}

void DataProto::set(const std::string& key, std::vector<json> column) {
  require(!batch_.contains(key), ErrorKind::kUsage, "batch: {} is a tensor", key);
  const auto old = non_tensor_batch_.extract(key);
  check(key, static_cast<std::int64_t>(column.size()));
  non_tensor_batch_[key] = std::move(column);
}

const at::Tensor& DataProto::tensor(const std::string& key) const {
  const auto found = batch_.find(key);
  require(found != batch_.end(), ErrorKind::kUsage, "batch: no tensor {}", key);
  return found->second;
}

const std::vector<json>& DataProto::column(const std::string& key) const {
  const auto found = non_tensor_batch_.find(key);
  require(found != non_tensor_batch_.end(), ErrorKind::kUsage, "batch: no column {}", key);
  return found->second;
}

DataProto DataProto::select(Keys keys) const {
  DataProto result;
  result.meta_info = meta_info;
  for (const auto& key : keys) {
    if (batch_.contains(key))
      result.set(key, batch_.at(key));
    else
      result.set(key, column(key));
  }
  return result;
}

DataProto DataProto::pop(Keys keys) {
  auto result = select(keys);
  for (const auto& key : keys) {
    batch_.erase(key);
    non_tensor_batch_.erase(key);
  }
  return result;
}

DataProto DataProto::rename(const std::string& from, const std::string& to) const {
  auto result = *this;
  const auto taken = result.pop(std::span(&from, 1));
  require(!result.batch_.contains(to) && !result.non_tensor_batch_.contains(to), ErrorKind::kUsage,
          "batch: {} cannot be renamed to {}, which is there", from, to);
  if (taken.batch_.empty())
    result.set(to, taken.column(from));
  else
    result.set(to, taken.tensor(from));
  return result;
}

DataProto DataProto::union_with(const DataProto& other) const {
  auto result = *this;
  for (const auto& [key, tensor] : other.batch_) {
    require(!batch_.contains(key) || same_bits(batch_.at(key), tensor), ErrorKind::kUsage,
            "batch: {} differs on both sides of a union", key);
    if (!batch_.contains(key)) result.set(key, tensor);
  }
  for (const auto& [key, column] : other.non_tensor_batch_) {
    const bool has = non_tensor_batch_.contains(key);
    require(!has || non_tensor_batch_.at(key) == column, ErrorKind::kUsage,
            "batch: {} differs on both sides of a union", key);
    if (!has) result.set(key, column);
  }
  for (const auto& [key, value] : other.meta_info.items()) {
    require(!meta_info.contains(key) || meta_info.at(key) == value, ErrorKind::kUsage,
            "batch: meta_info {} differs on both sides of a union", key);
    result.meta_info[key] = value;
  }
  return result;
}

DataProto DataProto::select_idxs(Rows rows) const {
  for (const auto row : rows)
    require(row >= 0 && row < size(), ErrorKind::kUsage, "batch: no row {} of {}", row, size());
  DataProto result;
  result.meta_info = meta_info;
  const auto index = at::tensor(std::vector<std::int64_t>(rows.begin(), rows.end()), at::kLong);
  for (const auto& [key, tensor] : batch_)
    result.set(key, tensor.index_select(0, index.to(tensor.device())));
  for (const auto& [key, column] : non_tensor_batch_) {
    std::vector<json> selected;
    for (const auto row : rows) selected.push_back(column[static_cast<std::size_t>(row)]);
    result.set(key, std::move(selected));
  }
  return result;
}

DataProto DataProto::slice(std::int64_t begin, std::int64_t end) const {
  require(0 <= begin && begin <= end && end <= size(), ErrorKind::kUsage,
          "batch: no rows {} to {} of {}", begin, end, size());
  DataProto result;
  result.meta_info = meta_info;
  for (const auto& [key, tensor] : batch_) result.set(key, tensor.slice(0, begin, end));
  for (const auto& [key, column] : non_tensor_batch_)
    result.set(key, std::vector<json>(column.begin() + begin, column.begin() + end));
  return result;
}

DataProto DataProto::reorder(Rows order) const {
  std::vector<std::int64_t> sorted(order.begin(), order.end());
  std::ranges::sort(sorted);
  require(sorted == ascending(0, size()), ErrorKind::kUsage,
          "batch: an order of {} rows is no permutation of {}", order.size(), size());
  return select_idxs(order);
}

DataProto DataProto::repeat(std::int64_t repeat_times, bool interleave) const {
  require(repeat_times > 0, ErrorKind::kUsage, "batch: cannot be repeated {} times", repeat_times);
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < size() * repeat_times; ++i)
    rows.push_back(interleave ? i / repeat_times : i % size());
  return select_idxs(rows);
}

std::vector<DataProto> DataProto::chunk(std::int64_t chunks) const {
  require(chunks > 0 && size() % chunks == 0, ErrorKind::kUsage,
          "batch: {} rows do not make {} equal chunks", size(), chunks);
  std::vector<DataProto> parts;
  const auto rows = size() / chunks;
  for (std::int64_t i = 0; i < chunks; ++i) parts.push_back(slice(i * rows, (i + 1) * rows));
  return parts;
}

std::vector<DataProto> DataProto::split(std::int64_t split_size) const {
  require(split_size > 0, ErrorKind::kUsage, "batch: no split into parts of {} rows", split_size);
  std::vector<DataProto> parts;
  for (std::int64_t i = 0; i < size(); i += split_size)
    parts.push_back(slice(i, std::min(i + split_size, size())));
  return parts;
}

DataProto DataProto::concat(std::span<const DataProto> parts) {
  DataProto result;
  if (parts.empty()) return result;
  const auto& first = parts.front();
  for (const auto& part : parts) {
    require(std::ranges::equal(part.batch_, first.batch_, {}, &Tensors::value_type::first,
                               &Tensors::value_type::first) &&
                std::ranges::equal(part.non_tensor_batch_, first.non_tensor_batch_, {},
                                   &Columns::value_type::first, &Columns::value_type::first),
            ErrorKind::kUsage, "batch: parts to be put together have different columns");
    for (const auto& [key, value] : part.meta_info.items()) {
      require(!result.meta_info.contains(key) || result.meta_info.at(key) == value,
              ErrorKind::kUsage, "batch: meta_info {} differs between parts", key);
      result.meta_info[key] = value;
    }
  }
  for (const auto& [key, tensor] : first.batch_) {
    std::vector<at::Tensor> pieces;
    for (const auto& part : parts) {
      const auto& piece = part.batch_.at(key);
      require(piece.scalar_type() == tensor.scalar_type() &&
                  piece.sizes().slice(1) == tensor.sizes().slice(1),
              ErrorKind::kUsage, "batch: {} differs between parts in dtype or shape", key);
      pieces.push_back(piece);
    }
    result.set(key, at::cat(pieces));
  }
  for (const auto& [key, column] : first.non_tensor_batch_) {
    std::vector<json> all;
    for (const auto& part : parts) {
      const auto& rows = part.non_tensor_batch_.at(key);
      all.insert(all.end(), rows.begin(), rows.end());
    }
    result.set(key, std::move(all));
  }
  return result;
}

// Magic, size of the description, the description in CBOR; then each tensor at a multiple of 64.
std::vector<std::byte> DataProto::to_bytes() const {
  json description{
      {"tensors", json::array()}, {"columns", non_tensor_batch_}, {"meta_info", meta_info}};
  std::size_t end = 0;
  for (const auto& [key, tensor] : batch_) {
    const auto offset = aligned(end);
    description["tensors"].push_back({{"key", key},
                                      {"dtype", static_cast<int>(tensor.scalar_type())},
                                      {"shape", tensor.sizes().vec()},
                                      {"offset", offset},
                                      {"nbytes", tensor.nbytes()}});
    end = offset + tensor.nbytes();
  }
  const auto head = json::to_cbor(description);
  const std::uint64_t numbers[2] = {kMagic, head.size()};
  const auto begin = aligned(sizeof(numbers) + head.size());
  std::vector<std::byte> bytes(begin + end);
  std::memcpy(bytes.data(), numbers, sizeof(numbers));
  std::memcpy(bytes.data() + sizeof(numbers), head.data(), head.size());
  for (const auto& entry : description["tensors"]) {
    const auto tensor = batch_.at(entry["key"].get<std::string>()).cpu().contiguous();
    if (tensor.nbytes() != 0)
      std::memcpy(bytes.data() + begin + entry["offset"].get<std::size_t>(),
                  tensor.const_data_ptr(), tensor.nbytes());
  }
  return bytes;
}

DataProto DataProto::from_bytes(std::span<const std::byte> bytes) {
  const Reader reader(bytes);
  require(reader.number(0) == kMagic, ErrorKind::kCorrupt, "batch: does not begin as one");
  const auto head = reader.at(16, reader.number(8));
  const auto* text = reinterpret_cast<const std::uint8_t*>(head.data());
  try {
    const auto description = json::from_cbor(text, text + head.size());
    DataProto result({}, description.at("columns").get<Columns>(), description.at("meta_info"));
    for (const auto& entry : description.at("tensors"))
      result.set(entry.at("key").get<std::string>(),
                 tensor_of(entry, reader, aligned(16 + head.size())));
    return result;
  } catch (const json::exception& error) {
    fail(ErrorKind::kCorrupt, "batch: {}", error.what());
  }
}

std::pair<DataProto, std::int64_t> pad_dataproto_to_divisor(const DataProto& data,
                                                            std::int64_t size_divisor) {
  require(size_divisor > 0 && data.size() > 0, ErrorKind::kUsage,
          "batch: {} rows cannot be padded to a multiple of {}", data.size(), size_divisor);
  const auto pad_size = (size_divisor - data.size() % size_divisor) % size_divisor;
  if (pad_size == 0) return {data, 0};
  auto rows = ascending(0, data.size() + pad_size);
  for (auto& row : rows) row %= data.size();
  return {data.select_idxs(rows), pad_size};
}

DataProto unpad_dataproto(const DataProto& data, std::int64_t pad_size) {
  return data.slice(0, data.size() - pad_size);
}

std::vector<std::int64_t> balanced_order(const DataProto& data, std::int64_t dp) {
  const auto lengths = data.tensor("attention_mask").sum(-1).to(at::kLong).cpu().contiguous();
  const std::span<const std::int64_t> seqlens(lengths.const_data_ptr<std::int64_t>(),
                                              static_cast<std::size_t>(lengths.numel()));
  std::vector<std::int64_t> order;
  for (const auto& part : balance_batch(seqlens, static_cast<std::size_t>(dp)))
    for (const auto row : part) order.push_back(static_cast<std::int64_t>(row));
  return order;
}

std::vector<std::int64_t> inverse_order(std::span<const std::int64_t> order) {
  std::vector<std::int64_t> inverse(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    inverse.at(static_cast<std::size_t>(order[i])) = static_cast<std::int64_t>(i);
  return inverse;
}

}  // namespace ferry::trainer
