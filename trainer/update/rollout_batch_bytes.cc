// The bytes of a rollout batch: magic, size of the description, the description in CBOR; then each
// tensor at a multiple of 64.
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <cstring>
#include <numeric>
#include <utility>

#include "distckpt/base/error.h"
#include "trainer/update/rollout_columns.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMagic = 0x31'54'41'42'4F'52'44'46;  // "FDROBAT1"
constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t offset) {
  return (offset + kAlignment - 1) / kAlignment * kAlignment;
}

class Writer {
 public:
  void add(const std::string& name, const at::Tensor& column) {
    const auto whole = column.cpu().contiguous();
    const auto narrow = whole.scalar_type() == at::kLong ? whole.to(at::kInt) : whole;
    const bool fits = whole.scalar_type() == at::kLong && at::equal(narrow.to(at::kLong), whole);
    const auto& tensor = tensors_.emplace_back(fits ? narrow : whole);
    const auto offset = aligned(end_);
    description["tensors"][name] = {{"dtype", static_cast<int>(tensor.scalar_type())},
                                    {"shape", tensor.sizes().vec()},
                                    {"widen", fits},
                                    {"offset", offset}};
    offsets_.push_back(offset);
    end_ = offset + tensor.nbytes();
  }
  void add(const std::string& name, const models::SamplingMask& column) {
    add(name + ".token_ids", column.token_ids);
    add(name + ".offsets", at::tensor(column.offsets, at::kLong));
  }
  template <typename T>
  void add(const std::string& name, const std::vector<T>& column) {
    description["columns"][name] = column;
  }

  std::vector<std::byte> bytes() const {
    const auto head = json::to_cbor(description);
    const std::uint64_t numbers[2] = {kMagic, head.size()};
    const auto begin = aligned(sizeof(numbers) + head.size());
    std::vector<std::byte> bytes(begin + end_);
    std::memcpy(bytes.data(), numbers, sizeof(numbers));
    std::memcpy(bytes.data() + sizeof(numbers), head.data(), head.size());
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      if (const auto& tensor = tensors_[i]; tensor.nbytes() > 0)
        std::memcpy(bytes.data() + begin + offsets_[i], tensor.const_data_ptr(), tensor.nbytes());
    return bytes;
  }

  json description = json::object();

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<std::size_t> offsets_;  // behind the description
  std::size_t end_ = 0;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {
    require(number(0) == kMagic, ErrorKind::kCorrupt, "batch: does not begin as one");
    const auto head = at(16, number(8));
    const auto* text = reinterpret_cast<const std::uint8_t*>(head.data());
    description = json::from_cbor(text, text + head.size());
    begin_ = aligned(16 + head.size());
  }

  void read(const std::string& name, at::Tensor& column) const {
    const auto found = description.at("tensors").find(name);
    if (found != description.at("tensors").end()) column = tensor_of(name, *found);
  }
  void read(const std::string& name, models::SamplingMask& column) const {
    at::Tensor offsets;
    read(name + ".token_ids", column.token_ids);
    read(name + ".offsets", offsets);
    if (!offsets.defined()) return;
    const auto* const first = offsets.const_data_ptr<std::int64_t>();
    column.offsets.assign(first, first + offsets.numel());
    require(column.token_ids.defined() && column.offsets.back() == column.token_ids.numel(),
            ErrorKind::kCorrupt, "batch: {} has other tokens than its offsets say", name);
  }
  template <typename T>
  void read(const std::string& name, std::vector<T>& column) const {
    const auto found = description.at("columns").find(name);
    if (found != description.at("columns").end()) found->get_to(column);
  }

  json description;

 private:
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
  at::Tensor tensor_of(const std::string& name, const json& entry) const {
    const auto shape = entry.at("shape").get<std::vector<std::int64_t>>();
    const auto type = static_cast<at::ScalarType>(entry.at("dtype").get<std::int8_t>());
    double elements = 1;
    bool positive = !shape.empty();
    for (const auto size : shape) {
      elements *= static_cast<double>(size);
      positive = positive && size >= 0;
    }
    require(positive && (c10::isIntegralType(type, /*includeBool=*/true) || type == at::kFloat) &&
                elements <= static_cast<double>(bytes_.size()),
            ErrorKind::kCorrupt, "batch: {} has dtype {} and shape {}", name,
            entry.at("dtype").dump(), entry.at("shape").dump());
    const auto count = static_cast<std::uint64_t>(elements) * c10::elementSize(type);
    // The bytes are there before memory is taken for them.
    const auto bytes = at(begin_ + entry.at("offset").get<std::uint64_t>(), count);
    auto tensor = at::empty(shape, type);
    if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
    return entry.at("widen").get<bool>() ? tensor.to(at::kLong) : tensor;
  }

  std::span<const std::byte> bytes_;
  std::size_t begin_ = 0;  // of the tensors
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
  writer.description = {{"offsets", offsets},
                        {"response_offsets", response_offsets},
                        {"max_prompt_length", max_prompt_length},
                        {"max_response_length", max_response_length},
                        {"tensors", json::object()},
                        {"columns", json::object()}};
  each_column([&](const char* name, Per, auto member) {
    if (is_known(this->*member)) writer.add(name, this->*member);
  });
  return writer.bytes();
}

RolloutBatch RolloutBatch::from_bytes(std::span<const std::byte> bytes) {
  try {
    const Reader reader(bytes);
    RolloutBatch batch;
    reader.description.at("offsets").get_to(batch.offsets);
    reader.description.at("response_offsets").get_to(batch.response_offsets);
    reader.description.at("max_prompt_length").get_to(batch.max_prompt_length);
    reader.description.at("max_response_length").get_to(batch.max_response_length);
    const auto ascending = [](const std::vector<std::int64_t>& all) {
      return !all.empty() && all.front() == 0 && std::ranges::is_sorted(all);
    };
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
    return batch;
  } catch (const json::exception& error) {
    fail(ErrorKind::kCorrupt, "batch: {}", error.what());
  }
}

}  // namespace ferry::trainer
