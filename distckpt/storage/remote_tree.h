// This process's knowledge of the stores: which files they have, and the state in which each was
// first seen. From then on any other state of it is an error.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "distckpt/storage/remote_store.h"

namespace ferry::distckpt {

// A file of a store, in one state. Thread-safe.
class RemoteObject {
 public:
  // Asks for the first bytes of it. Nothing if there is no such file. Throws Error(kIo).
  static std::shared_ptr<const RemoteObject> open(std::string address, RemoteStore& store);

  std::int64_t size() const { return size_; }
  const std::string& version() const { return version_; }  // ETag, or the time of the last change

  // Asks for the range, and for what is missing of it when a connection breaks. Short ranges come
  // in blocks that serve their neighbours, too. Throws Error(kIo) if the file has changed.
  void read_at(std::int64_t offset, std::span<std::byte> into) const;

 private:
  RemoteObject(std::string address, RemoteStore& store);
  bool open();
  HttpRequest next_request() const;
  void accept(const HttpResponse& response, std::int64_t offset, std::int64_t length) const;
  void note(const HttpResponse& response) const;
  void fetch(std::int64_t offset, std::span<std::byte> into) const;
  std::shared_ptr<const std::string> block(std::int64_t index) const;

  std::string address_;
  RemoteStore& store_;
  std::int64_t size_ = 0;
  std::string version_;
  mutable std::mutex mutex_;
  mutable std::string direct_url_;  // that redirects lead to, as long as it answers
  mutable std::map<std::int64_t, std::shared_ptr<const std::string>> blocks_;
};

class RemoteTree {
 public:
  static RemoteTree& instance();

  bool is_file(const std::filesystem::path& path);
  bool is_folder(const std::filesystem::path& path);
  std::vector<std::filesystem::path> list(const std::filesystem::path& folder);  // what is in it

  // All files below it. Throws Error(kUsage) if the store cannot say that these are all.
  std::vector<std::filesystem::path> list_below(const std::filesystem::path& folder);

  // A copy of the file on this machine, empty if there is none.
  std::filesystem::path local_copy(const std::filesystem::path& path);

  // Throws Error(kNotFound | kIo).
  std::shared_ptr<const RemoteObject> open(const std::filesystem::path& path);

  // Opens many side by side.
  void open_all(const std::vector<std::filesystem::path>& paths);

  // Files of this machine that are taken for the stores' at these addresses: what is about to be
  // sent there. Other threads send elsewhere: each drops what is below its own address.
  void add_local(const std::map<std::string, std::filesystem::path>& files);
  void drop_local(const std::string& address);

  // Everything is asked for anew.
  void forget();

  // Somebody asks for this folder, not for one that holds it: it is listed alone.
  void add_root(const std::filesystem::path& folder);

 private:
  struct Listing {
    std::map<std::string, RemoteEntry> files{};  // by address
    bool complete = true;
  };
  RemoteStore& store_of(const std::string& address);
  const RemoteEntry* find(const std::string& address);
  const Listing& listing_of(const std::string& asked);
  std::vector<std::filesystem::path> below(const std::string& address);
  const Listing* covering(const std::string& address) const;

  std::recursive_mutex mutex_;
  std::map<std::string, std::unique_ptr<RemoteStore>> stores_;  // by scheme
  std::map<std::string, Listing> listings_;                     // by the folder that was listed
  std::map<std::string, std::filesystem::path> local_;
  std::set<std::string> roots_;  // all that were ever listed
  std::map<std::string, std::shared_ptr<const RemoteObject>> objects_;
};

}  // namespace ferry::distckpt
