// Arrays of zarr version 2, uncompressed: a folder with a `.zarray` and a file for each chunk.
// docs/formats/zarr.md.
#pragma once

#include <filesystem>
#include <string>

#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

// True for the folder of an array.
bool is_zarr_array(const std::filesystem::path& folder);

// Adds the array and its chunks' files. Throws Error(kCorrupt | kLayout) naming the file, for
// chunks that are missing, surplus or of another size too.
void add_zarr_array(const std::filesystem::path& folder, std::string name, Layout& layout);

}  // namespace ferry::distckpt
