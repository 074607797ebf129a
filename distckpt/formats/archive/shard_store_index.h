// The index of a file of an archive: a JSON text that says which datasets and tensors it holds,
// and, in the last file, which files belong together and which small files are inside.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/formats/archive/shard_store_layout.h"
#include "distckpt/formats/archive/shard_store_trailer.h"

namespace ferry::distckpt {

// The part of the index that only the last file of an archive holds, which is finished after all
// others.
struct ShardStoreContents {
  std::map<std::string, ByteRange>
      small_files{};                    // "hf/config.json" and where it lies in that file
  std::vector<std::string> trailers{};  // digests, of the other files in their order
};

// The part of `store` that lies in its file `file`.
std::string make_index(const ShardStoreLayout& store,
                       std::uint32_t file,
                       const ShardStoreContents& contents);

// Appends to `store` what the index of its file `file`, of `num_files`, says. Throws
// Error(kCorrupt) for everything that does not fit together; `what` names the file. `num_chunks`
// are those that the trailer lists: no size is taken from the index that they do not vouch for.
ShardStoreContents read_index(std::string_view text,
                              std::uint32_t file,
                              std::size_t num_files,
                              std::size_t num_chunks,
                              const std::string& what,
                              ShardStoreLayout& store);

}  // namespace ferry::distckpt
