// The folder that a conversion writes, and what --overwrite may replace of it: a checkpoint of the
// same format that consists of the files which its own records name.
#pragma once

#include <filesystem>
#include <vector>

#include "converter/stored/locate.h"

namespace ferry::converter {

// Absolute, symbolic links resolved, no trailing slash: what a rename must act on.
std::filesystem::path resolve_target(const std::filesystem::path& path);

bool is_checkpoint(const std::filesystem::path& folder);

// True if nothing is there, or an empty folder. Throws Error(kUsage) for a file, and for a link on
// the way that leads nowhere.
bool is_free(const std::filesystem::path& target);

// Throws Error(kUsage) for a target that is the source, lies in it or holds it; that is an
// iteration in a checkpoint of another kind; or that is not free, unless `overwrite` is given.
void refuse_unsafe_target(const std::filesystem::path& target,
                          Format format,
                          const std::filesystem::path& source_folder,
                          bool overwrite);

// For a run that writes nothing. Throws Error(kIo) if this user can make no folder where the target
// goes, or may not take away the one that is there. Nothing is asked of a store.
void require_writable(const std::filesystem::path& target);

// The files of the folder, relative to it. Throws Error(kUsage) that names a file, folder or link
// in it that no conversion to `format` writes, weights that the index of the checkpoint there
// (.metadata, the number in an archive's names) does not name, or a folder that holds no weights;
// Error(kCorrupt) for an index that cannot be read. Names that depend on the source (a README) are
// known if they are among `planned`, those of this conversion.
std::vector<std::filesystem::path> replaceable_files(
    const std::filesystem::path& folder,
    Format format,
    const std::vector<std::filesystem::path>& planned);

}  // namespace ferry::converter
