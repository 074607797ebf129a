// Stores of files that addresses lead to, behind one interface: web servers, the hub, S3.
//
// An address is a path that begins with a scheme ("s3://bucket/run/iter_0000010"); it goes wherever
// a path of the local system does, through source_tree.h and file_io.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/storage/network/http.h"

namespace ferry::distckpt {

// True of "https://...", "http://...", "hf://..." and "s3://...".
bool is_remote(const std::filesystem::path& path);

// Throws Error(kUsage) for what is hardly meant: the address of another store ("gs://bucket/run",
// "s3:/bucket/run"), unless a folder here has that name; a page of the hub; a ~ of a shell.
void refuse_mistaken_path(const std::filesystem::path& path);

// The address without slashes at its end. Throws Error(kUsage) for one that is not plainly a place:
// with an empty name, `.` or `..` in it, a query, or a user's name.
std::string address_of(const std::filesystem::path& path);

// A file that a store lists.
struct RemoteEntry {
  std::string address{};
  std::optional<std::int64_t> size{};  // bytes, if the list says so
  std::filesystem::path local{};       // a copy on this machine, if there is one
};

struct RemoteList {
  std::vector<RemoteEntry> files{};
  bool complete = true;  // else there may be more than were asked for by name
};

class RemoteStore {
 public:
  virtual ~RemoteStore() = default;

  // All files below the folder, at any depth; none if there are none, or no folder.
  virtual RemoteList list(const std::string& folder) = 0;

  // The request that reads an object, without its range.
  virtual HttpRequest request(const std::string& address) = 0;
};

std::unique_ptr<RemoteStore> make_http_store();
std::unique_ptr<RemoteStore> make_hub_store();
std::unique_ptr<RemoteStore> make_s3_store();

}  // namespace ferry::distckpt
