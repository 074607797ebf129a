// The names of slime's /pull_weights: a folder of versions, each a checkpoint or a delta of the
// version before it (slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace ferry::converter {

std::string slime_version_folder(std::int64_t version);  // "weight_v000001"
std::optional<std::int64_t> parse_slime_version(std::string_view name);

// The versions in a folder; none if there is no such folder.
std::map<std::int64_t, std::filesystem::path> slime_versions(const std::filesystem::path& folder);

// True for a version whose index names an encoding, and which therefore is a delta.
bool is_slime_delta(const std::filesystem::path& folder);

}  // namespace ferry::converter
