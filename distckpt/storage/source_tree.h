// Looks at paths that are read from: of this system's files, or of a store (remote_store.h). The
// names are no std::filesystem functions', which a path would choose by itself.
#pragma once

#include <filesystem>
#include <vector>

namespace ferry::distckpt {

// Symbolic links are followed.
bool source_exists(const std::filesystem::path& path);
bool source_is_file(const std::filesystem::path& path);
bool source_is_folder(const std::filesystem::path& path);

// Lists the folder, without order; nothing for what is no folder.
std::vector<std::filesystem::path> list_source(const std::filesystem::path& folder);

// All files below a folder of a store, at any depth. Throws Error(kUsage) if its server lists none,
// and so may have more than are known.
std::vector<std::filesystem::path> list_source_below(const std::filesystem::path& folder);

// The path as a name for reports: absolute, links resolved; that of a store as it is.
std::filesystem::path canonical_source(const std::filesystem::path& path);

// Opens the files of stores side by side, so that those who open them next do not wait for each.
void open_sources(const std::vector<std::filesystem::path>& paths);

// `threads`, or if it is 0 and the path is of a store as many as keep its server busy.
int reading_threads(int threads, const std::filesystem::path& path);

}  // namespace ferry::distckpt
