#include "distckpt/storage/filenames.h"

#include <algorithm>
#include <charconv>

#include "distckpt/base/error.h"

namespace ferry::distckpt {

std::string safetensors_filename(int index, int count) {
  if (count == 1) return std::string(kSafetensorsModel);
  return fmt::format("model-{:05d}-of-{:05d}.safetensors", index + 1, count);
}

bool is_torch_model_filename(std::string_view name) {
  constexpr std::string_view kStem = "pytorch_model-";  // pytorch_model-00001-of-00002.bin
  return name == kTorchModel || name == kTorchModelIndex ||
         (name.starts_with(kStem) && name.ends_with(".bin"));
}

std::string iteration_text(const Iteration& iteration) {
  return iteration.number ? fmt::format("{}", *iteration.number) : "release";
}

std::optional<Iteration> parse_iteration(std::string_view text) {
  if (text == "release") return Iteration{};
  std::int64_t number = 0;
  const auto* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || number < 0) return std::nullopt;
  return Iteration{.number = number};
}

std::string iteration_folder(const Iteration& iteration) {
  return iteration.number ? fmt::format("iter_{:07d}", *iteration.number) : "release";
}

std::optional<Iteration> parse_iteration_folder(std::string_view name) {
  constexpr std::string_view kPrefix = "iter_";
  if (name == "release") return Iteration{};
  if (!name.starts_with(kPrefix) || name.size() < kPrefix.size() + 7) return std::nullopt;
  const auto iteration = parse_iteration(name.substr(kPrefix.size()));
  return iteration && iteration->number ? iteration : std::nullopt;
}

std::string distcp_filename(int rank) {
  return fmt::format("__{}_0.distcp", rank);
}

// Megatron-Core numbers the files of one rank: "__3_1.distcp".
bool is_distcp_filename(std::string_view name) {
  constexpr std::string_view kSuffix = ".distcp";
  if (!name.starts_with("__") || !name.ends_with(kSuffix)) return false;
  const auto numbers = name.substr(2, name.size() - 2 - std::min(name.size() - 2, kSuffix.size()));
  const auto is_number = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  const auto middle = numbers.find('_');
  return middle != std::string_view::npos && is_number(numbers.substr(0, middle)) &&
         is_number(numbers.substr(middle + 1));
}

std::optional<std::vector<int>> parse_rank_folder(std::string_view name) {
  constexpr std::string_view kPrefix = "mp_rank_";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  std::vector<int> ranks;
  while (ranks.size() < 3) {
    const std::size_t digits = ranks.empty() ? 2 : 3;  // at least
    int rank = 0;
    const auto* end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data(), end, rank);
    const auto length = static_cast<std::size_t>(stop - name.data());
    if (error != std::errc() || rank < 0 || length < digits) return std::nullopt;
    ranks.push_back(rank);
    if (stop == end) return ranks;
    if (*stop != '_') return std::nullopt;
    name.remove_prefix(length + 1);
  }
  return std::nullopt;
}

std::optional<Iteration> parse_step_folder(std::string_view name) {
  constexpr std::string_view kPrefix = "global_step_";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const auto iteration = parse_iteration(name.substr(kPrefix.size()));
  return iteration && iteration->number ? iteration : std::nullopt;
}

std::string fsdp_filename(const FsdpRank& rank) {
  return fmt::format("model_world_size_{}_rank_{}.pt", rank.world_size, rank.rank);
}

std::optional<FsdpRank> parse_fsdp_filename(std::string_view name) {
  constexpr std::string_view kPrefix = "model_world_size_";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  FsdpRank rank;
  const auto* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, rank.world_size);
  constexpr std::string_view kRank = "_rank_";
  const std::string_view rest(stop, static_cast<std::size_t>(end - stop));
  if (error != std::errc() || !rest.starts_with(kRank)) return std::nullopt;
  const auto [rank_end, rank_error] = std::from_chars(stop + kRank.size(), end, rank.rank);
  // Nothing but the name that this rank's file has.
  if (rank_error != std::errc() || rank.rank < 0 || fsdp_filename(rank) != name)
    return std::nullopt;
  return rank;
}

std::string shard_store_filename(std::size_t index, std::size_t count) {
  return count == 1 ? std::string(kArchiveFile)
                    : fmt::format("weights-{:05}-of-{:05}.h5", index + 1, count);
}

std::optional<std::size_t> shard_store_file_count(std::string_view name) {
  if (name == shard_store_filename(0, 1)) return 1;
  constexpr std::string_view kPrefix = "weights-";
  constexpr std::string_view kOf = "-of-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const auto* end = name.data() + name.size();
  std::size_t number = 0;
  std::size_t count = 0;
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, number);
  const std::string_view rest(stop, static_cast<std::size_t>(end - stop));
  if (error != std::errc() || !rest.starts_with(kOf)) return std::nullopt;
  std::from_chars(stop + kOf.size(), end, count);
  if (number < 1 || number > count || count < 2 || name != shard_store_filename(number - 1, count))
    return std::nullopt;
  return count;
}

std::filesystem::path work_folder(const std::filesystem::path& target) {
  return target.parent_path() / fmt::format(".{}.ferry", target.filename().string());
}

void require_plain_filename(std::string_view name, std::string_view source) {
  const bool plain = !name.empty() && name != "." && name != ".." &&
                     name.find('/') == std::string_view::npos &&
                     name.find('\0') == std::string_view::npos;
  require(plain, ErrorKind::kCorrupt,
          "{}: names the file \"{}\", which is not a plain name inside the folder", source, name);
}

}  // namespace ferry::distckpt
