#include "converter/alignment/reference.h"

#include <ATen/ops/empty.h>

#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/file_io.h"
#include "models/tensor_parallel/parameters.h"

namespace ferry::converter {
namespace {

// "logits.12" -> 12 and ""; "hidden.12.embedding" -> 12 and "embedding".
std::optional<std::pair<std::size_t, std::string>> parse_name(std::string_view name,
                                                              std::string_view kind) {
  if (!name.starts_with(kind)) return std::nullopt;
  name.remove_prefix(kind.size());
  std::size_t index = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), index);
  if (error != std::errc() || index > 1'000'000) return std::nullopt;
  name.remove_prefix(static_cast<std::size_t>(end - name.data()));
  if (name.empty()) return std::pair(index, std::string());
  if (name[0] != '.') return std::nullopt;
  return std::pair(index, std::string(name.substr(1)));
}

}  // namespace

Reference read_reference(const std::filesystem::path& path) {
  const auto header = distckpt::read_safetensors_header(path);
  const distckpt::ReadFile file(path);
  const auto name_of_file = path.string();
  Reference reference;
  if (const auto regime = header.metadata.find("regime"); regime != header.metadata.end())
    reference.regime = regime->second;
  const auto sequence = [&](std::size_t index) -> ReferenceSequence& {
    if (reference.sequences.size() <= index) reference.sequences.resize(index + 1);
    return reference.sequences[index];
  };
  for (const auto& entry : header.entries) {
    auto tensor = at::empty(
        at::IntArrayRef(entry.shape.begin(), entry.shape.end()),
        entry.dtype == distckpt::DType::kI64 ? at::kLong : models::scalar_type(entry.dtype));
    file.read_at(entry.begin, std::span(static_cast<std::byte*>(tensor.mutable_data_ptr()),
                                        static_cast<std::size_t>(entry.end - entry.begin)));
    if (const auto at = parse_name(entry.name, "tokens.")) {
      sequence(at->first).tokens = std::move(tensor);
    } else if (const auto of = parse_name(entry.name, "logits.")) {
      sequence(of->first).logits = std::move(tensor);
    } else if (const auto in = parse_name(entry.name, "hidden.")) {
      sequence(in->first).hidden[in->second] = std::move(tensor);
    } else if (const auto by = parse_name(entry.name, "predicted.")) {
      sequence(by->first).predicted[by->second] = std::move(tensor);
    } else {
      reference.others[entry.name] = std::move(tensor);
    }
  }
  require(!reference.sequences.empty(), ErrorKind::kCorrupt,
          "{}: holds no tokens.0 and logits.0, so it is no reference", name_of_file);
  for (std::size_t i = 0; i < reference.sequences.size(); ++i) {
    const auto& [tokens, logits, hidden, predicted] = reference.sequences[i];
    require(tokens.defined() && tokens.dim() == 1 && tokens.scalar_type() == at::kLong &&
                tokens.size(0) > 0 && logits.defined() && logits.dim() == 2 &&
                logits.size(0) == tokens.size(0),
            ErrorKind::kCorrupt, "{}: tokens.{} and logits.{} are not of one length", name_of_file,
            i, i);
    for (const auto* const outputs : {&hidden, &predicted}) {
      for (const auto& [module, output] : *outputs) {
        require(output.dim() == 2 && output.size(0) == tokens.size(0), ErrorKind::kCorrupt,
                "{}: {} of sequence {} is not of the length of its tokens", name_of_file, module,
                i);
      }
    }
  }
  return reference;
}

}  // namespace ferry::converter
