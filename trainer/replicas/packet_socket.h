// Packets between processes of one machine: JSON values in CBOR, each behind its size, over a Unix
// socket, some of them with an open file. The path of a socket may be of any length.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "distckpt/storage/file_io.h"

namespace ferry::trainer {

class PacketSocket {
 public:
  explicit PacketSocket(distckpt::Descriptor connection);
  // Throws Error(kIo) if nobody listens there.
  static PacketSocket connect(const std::filesystem::path& path);

  // Sends what the other side takes; the rest goes with later calls.
  void send(const nlohmann::json& packet) { send(packet, {}); }
  // The same with an open file, which the other side then has, too.
  void send(const nlohmann::json& packet, distckpt::Descriptor file);
  // Waits for a packet, but no longer than that. Nothing if none came. Throws Error(kCorrupt) for
  // bytes that are none.
  std::optional<nlohmann::json> receive(std::chrono::milliseconds wait);
  // The next of the files that came with packets. Throws Error(kCorrupt) if there is none.
  distckpt::Descriptor take_file();
  // True if the other side has gone; packets that came before are still received.
  bool is_closed() const { return closed_; }

 private:
  std::optional<nlohmann::json> take();
  void exchange(int wait_ms);
  void send_some();
  bool receive_some();

  distckpt::Descriptor connection_;
  std::string unsent_;
  std::string received_;
  // Files go and come with the first byte of their packet.
  std::uint64_t num_sent_ = 0;  // bytes
  std::deque<std::pair<std::uint64_t, distckpt::Descriptor>> unsent_files_;
  std::deque<distckpt::Descriptor> received_files_;
  bool closed_ = false;
};

class PacketListener {
 public:
  // Makes the socket, which only this user can connect to, in place of one that a process left
  // behind; removes it in the end. Throws Error(kIo).
  explicit PacketListener(std::filesystem::path path);
  ~PacketListener();
  PacketListener(const PacketListener&) = delete;
  PacketListener& operator=(const PacketListener&) = delete;

  // A process that has connected, if one has.
  std::optional<PacketSocket> accept();

 private:
  std::filesystem::path path_;
  distckpt::Descriptor listening_;
};

}  // namespace ferry::trainer
