// The bytes of a rollout batch: the size of a description, the description in CBOR, and the tensors
// that it lists, one behind another.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "distckpt/base/error.h"
#include "trainer/update/rollout_columns.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;

class Writer {
 public:
  void add(const char* name, const at::Tensor& column) {
    const auto whole = column.cpu().contiguous();
    const auto narrow = whole.scalar_type() == at::kLong ? whole.to(at::kInt) : whole;
    const bool fits = whole.scalar_type() == at::kLong && at::equal(narrow.to(at::kLong), whole);
    const auto& tensor = fits ? narrow : whole;
    description["tensors"].push_back({{"name", name},
                                      {"dtype", static_cast<int>(tensor.scalar_type())},
                                      {"shape", tensor.sizes().vec()},
                                      {"widen", fits}});
    append(tensor.const_data_ptr(), tensor.nbytes());
  }
  void add(const char* name, const models::SamplingMask& column) {
    add(name, at::tensor(column.offsets, at::kLong));
    add(name, column.token_ids);
  }
  template <typename T>
  void add(const char* name, const std::vector<T>& column) {
    description["columns"][name] = column;
  }

  std::vector<std::byte> bytes() && {
    const auto tensors = std::move(bytes_);
    const auto head = json::to_cbor(description);
    const std::uint64_t size = head.size();
    bytes_.clear();
    append(&size, sizeof(size));
    append(head.data(), head.size());
    append(tensors.data(), tensors.size());
    return std::move(bytes_);
  }

  json description{{"tensors", json::array()}, {"columns", json::object()}};

 private:
  void append(const void* data, std::size_t count) {
    const auto* const begin = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), begin, begin + count);
  }

  std::vector<std::byte> bytes_;
};

bool ascending(const std::vector<std::int64_t>& all) {
  return !all.empty() && all.front() == 0 && std::ranges::is_sorted(all);
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {
    std::uint64_t size = 0;
    std::memcpy(&size, take(sizeof(size)).data(), sizeof(size));
    const auto head = take(size);
    const auto* const text = reinterpret_cast<const std::uint8_t*>(head.data());
    description = json::from_cbor(text, text + head.size());
  }

  // Columns are read in the order in which they were added; one that was not is left alone.
  void read(const char* name, at::Tensor& column) {
    const auto& tensors = description.at("tensors");
    if (next_ == tensors.size() || tensors[next_].at("name") != name) return;
    const auto& entry = tensors[next_++];
    const auto shape = entry.at("shape").get<std::vector<std::int64_t>>();
    const auto type = static_cast<at::ScalarType>(entry.at("dtype").get<std::int8_t>());
    double elements = 1;
    for (const auto size : shape) elements *= static_cast<double>(std::max<std::int64_t>(size, 0));
    require(!shape.empty() && std::ranges::min(shape) >= 0 &&
                (c10::isIntegralType(type, /*includeBool=*/true) || type == at::kFloat) &&
                elements <= static_cast<double>(rest_.size()),
            ErrorKind::kCorrupt, "batch: {} has dtype {} and shape {}", name,
            entry.at("dtype").dump(), entry.at("shape").dump());
    // The bytes are there before memory is taken for them.
    const auto bytes = take(static_cast<std::uint64_t>(elements) * c10::elementSize(type));
    column = at::empty(shape, type);
    if (!bytes.empty()) std::memcpy(column.mutable_data_ptr(), bytes.data(), bytes.size());
    if (entry.at("widen").get<bool>()) column = column.to(at::kLong);
  }
  void read(const char* name, models::SamplingMask& column) {
    at::Tensor offsets;
    read(name, offsets);
    read(name, column.token_ids);
    if (!offsets.defined()) return;
    require(offsets.scalar_type() == at::kLong, ErrorKind::kCorrupt, "batch: {} has no offsets",
            name);
    const auto* const first = offsets.const_data_ptr<std::int64_t>();
    column.offsets.assign(first, first + offsets.numel());
    require(column.token_ids.defined() && ascending(column.offsets) &&
                column.offsets.back() == column.token_ids.numel(),
            ErrorKind::kCorrupt, "batch: {} has other tokens than its offsets say", name);
  }
  template <typename T>
  void read(const char* name, std::vector<T>& column) {
    auto& columns = description.at("columns");
    const auto found = columns.find(name);
    if (found == columns.end()) return;
    found->get_to(column);
    columns.erase(found);
  }

  // Throws Error(kCorrupt) that names what is listed and was not read.
  void finish() const {
    std::vector<std::string> left;
    const auto& tensors = description.at("tensors");
    for (auto i = next_; i < tensors.size(); ++i)
      left.push_back(tensors[i].at("name").get<std::string>());
    for (const auto& [name, column] : description.at("columns").items()) left.push_back(name);
    require(left.empty(), ErrorKind::kCorrupt, "batch: {}: no column of that name, or not in order",
            fmt::join(left, ", "));
    require(rest_.empty(), ErrorKind::kCorrupt, "batch: {} bytes are behind its tensors",
            rest_.size());
  }

  json description;

 private:
  std::span<const std::byte> take(std::uint64_t count) {
    require(count <= rest_.size(), ErrorKind::kCorrupt, "batch: {} bytes are left, expected {}",
            rest_.size(), count);
    const auto taken = rest_.first(static_cast<std::size_t>(count));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }

  std::span<const std::byte> rest_;
  std::size_t next_ = 0;  // of the tensors
};

std::int64_t elements(const at::Tensor& column) {
  return column.size(0);
}
std::int64_t elements(const models::SamplingMask& column) {
  return static_cast<std::int64_t>(column.offsets.size()) - 1;
}
template <typename T>
std::int64_t elements(const std::vector<T>& column) {
  return static_cast<std::int64_t>(column.size());
}

}  // namespace

std::vector<std::byte> RolloutBatch::to_bytes() const {
  Writer writer;
  writer.description["lengths"] = {offsets, response_offsets};
  writer.description["limits"] = {max_prompt_length, max_response_length};
  each_column([&](const char* name, Per, auto member) {
    if (is_known(this->*member)) writer.add(name, this->*member);
  });
  return std::move(writer).bytes();
}

RolloutBatch RolloutBatch::from_bytes(std::span<const std::byte> bytes) {
  try {
    Reader reader(bytes);
    RolloutBatch batch;
    reader.description.at("lengths").at(0).get_to(batch.offsets);
    reader.description.at("lengths").at(1).get_to(batch.response_offsets);
    reader.description.at("limits").at(0).get_to(batch.max_prompt_length);
    reader.description.at("limits").at(1).get_to(batch.max_response_length);
    require(ascending(batch.offsets) && ascending(batch.response_offsets) &&
                batch.offsets.size() == batch.response_offsets.size(),
            ErrorKind::kCorrupt, "batch: offsets are none");
    each_column([&](const char* name, Per per, auto member) {
      reader.read(name, batch.*member);
      const auto expected = per == Per::kRow     ? batch.size()
                            : per == Per::kToken ? batch.offsets.back()
                                                 : batch.response_offsets.back();
      require(!is_known(batch.*member) || elements(batch.*member) == expected, ErrorKind::kCorrupt,
              "batch: {} does not have {} elements", name, expected);
    });
    reader.finish();
    return batch;
  } catch (const json::exception& error) {
    fail(ErrorKind::kCorrupt, "batch: {}", error.what());
  }
}

void to_json(json& value, const RolloutBatch& batch) {
  const auto bytes = batch.to_bytes();
  const auto* const begin = reinterpret_cast<const std::uint8_t*>(bytes.data());
  value = json::binary({begin, begin + bytes.size()});
}

void from_json(const json& value, RolloutBatch& batch) {
  batch = RolloutBatch::from_bytes(std::as_bytes(std::span(value.get_binary())));
}

}  // namespace ferry::trainer
