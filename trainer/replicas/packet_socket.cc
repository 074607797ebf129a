#include "trainer/replicas/packet_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>

#include "distckpt/base/cbor.h"
#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

constexpr std::uint64_t kLargestPacket = std::uint64_t{1} << 32;

distckpt::Descriptor unix_socket() {
  distckpt::Descriptor made(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  require(static_cast<bool>(made), ErrorKind::kIo, "socket: {}", std::strerror(errno));
  return made;
}

// An address has room for 107 characters: the folder is named by a descriptor of it.
template <typename Call>
void at_path(const std::filesystem::path& path, std::string_view what, const Call& call) {
  const auto folder = path.parent_path().empty() ? "." : path.parent_path();
  const distckpt::Descriptor opened(open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  require(static_cast<bool>(opened), ErrorKind::kIo, "{}: {}", folder.string(),
          std::strerror(errno));
  const auto name = fmt::format("/proc/self/fd/{}/{}", opened.get(), path.filename().string());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  require(name.size() < sizeof(address.sun_path), ErrorKind::kIo, "{}: the name is too long",
          path.string());
  std::memcpy(address.sun_path, name.c_str(), name.size() + 1);
  const bool done =
      call(reinterpret_cast<const sockaddr*>(&address), socklen_t{sizeof(address)}) == 0;
  require(done, ErrorKind::kIo, "{}: {}: {}", path.string(), what, std::strerror(errno));
}

// Bytes with room for one file.
struct FileMessage {
  msghdr header{};
  iovec bytes{};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};

  void set_bytes(char* data, std::size_t size) {
    bytes = {.iov_base = data, .iov_len = size};
    header.msg_iov = &bytes;
    header.msg_iovlen = 1;
  }
  void set_file(int file) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    auto* const head = CMSG_FIRSTHDR(&header);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(file));
    std::memcpy(CMSG_DATA(head), &file, sizeof(file));
  }
  distckpt::Descriptor file() {
    const auto* const head = CMSG_FIRSTHDR(&header);
    if (head == nullptr || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
      return {};
    int file = -1;
    std::memcpy(&file, CMSG_DATA(head), sizeof(file));
    return distckpt::Descriptor(file);
  }
};

}  // namespace

PacketSocket::PacketSocket(distckpt::Descriptor connection) : connection_(std::move(connection)) {}

PacketSocket PacketSocket::connect(const std::filesystem::path& path) {
  auto made = unix_socket();
  at_path(path, "connect", [&](const sockaddr* address, socklen_t size) {
    return ::connect(made.get(), address, size);
  });
  return PacketSocket(std::move(made));
}

void PacketSocket::send(const nlohmann::json& packet, distckpt::Descriptor file) {
  const auto bytes = to_cbor(packet);
  if (file) unsent_files_.emplace_back(num_sent_ + unsent_.size(), std::move(file));
  const std::uint64_t size = bytes.size();
  unsent_.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(bytes);
  exchange(0);
}

std::optional<nlohmann::json> PacketSocket::receive(std::chrono::milliseconds wait) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + wait;
  while (true) {
    if (auto packet = take()) return packet;
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    if (closed_) return std::nullopt;
    exchange(static_cast<int>(std::max<std::int64_t>(left, 0)));
    if (left <= 0) return take();
  }
}

std::optional<nlohmann::json> PacketSocket::take() {
  std::uint64_t size = 0;
  if (received_.size() < sizeof(size)) return std::nullopt;
  std::memcpy(&size, received_.data(), sizeof(size));
  require(size <= kLargestPacket, ErrorKind::kCorrupt, "a packet of {} bytes", size);
  if (received_.size() < sizeof(size) + size) return std::nullopt;
  const auto packet =
      std::string_view(received_).substr(sizeof(size), static_cast<std::size_t>(size));
  nlohmann::json value;
  try {
    value = from_cbor<nlohmann::json>(packet);
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::kCorrupt, "a packet of {} bytes is no CBOR: {}", size, error.what());
  }
  received_.erase(0, sizeof(size) + static_cast<std::size_t>(size));
  return value;
}

distckpt::Descriptor PacketSocket::take_file() {
  require(!received_files_.empty(), ErrorKind::kCorrupt, "a packet came without its file");
  auto file = std::move(received_files_.front());
  received_files_.pop_front();
  return file;
}

void PacketSocket::exchange(int wait_ms) {
  pollfd fd{.fd = connection_.get(),
            .events = static_cast<short>(POLLIN | (unsent_.empty() ? 0 : POLLOUT)),
            .revents = 0};
  if (poll(&fd, 1, wait_ms) <= 0) return;
  if (!unsent_.empty() && (fd.revents & POLLOUT) != 0) send_some();
  if ((fd.revents & (POLLIN | POLLHUP | POLLERR)) == 0) return;
  while (receive_some()) {
  }
}

// A file that is due goes with what is sent now, which ends before the next file is due.
void PacketSocket::send_some() {
  FileMessage message;
  auto next = unsent_files_.begin();
  if (next != unsent_files_.end() && next->first == num_sent_)
    message.set_file((next++)->second.get());
  const auto until =
      next == unsent_files_.end() ? num_sent_ + unsent_.size() : std::uint64_t{next->first};
  message.set_bytes(unsent_.data(), static_cast<std::size_t>(until - num_sent_));
  const auto sent = sendmsg(connection_.get(), &message.header, MSG_NOSIGNAL);
  if (sent <= 0) return;
  unsent_files_.erase(unsent_files_.begin(), next);
  unsent_.erase(0, static_cast<std::size_t>(sent));
  num_sent_ += static_cast<std::uint64_t>(sent);
}

// Returns whether there may be more. What comes at once has one file at most.
bool PacketSocket::receive_some() {
  std::array<char, 65536> bytes{};
  FileMessage message;
  message.set_bytes(bytes.data(), bytes.size());
  message.header.msg_control = message.control.data();
  message.header.msg_controllen = message.control.size();
  const auto count = recvmsg(connection_.get(), &message.header, MSG_CMSG_CLOEXEC);
  if (count <= 0) {
    closed_ = count == 0 || (errno != EAGAIN && errno != EINTR);
    return false;
  }
  received_.append(bytes.data(), static_cast<std::size_t>(count));
  if (auto file = message.file()) received_files_.push_back(std::move(file));
  return true;
}

PacketListener::PacketListener(std::filesystem::path path)
    : path_(std::move(path)), listening_(unix_socket()) {
  std::filesystem::create_directories(path_.parent_path());
  std::filesystem::remove(path_);
  at_path(path_, "listen", [&](const sockaddr* address, socklen_t size) {
    return bind(listening_.get(), address, size);
  });
  std::filesystem::permissions(path_, std::filesystem::perms::owner_all);
  require(listen(listening_.get(), SOMAXCONN) == 0, ErrorKind::kIo, "{}: {}", path_.string(),
          std::strerror(errno));
}

PacketListener::~PacketListener() {
  std::error_code gone;
  std::filesystem::remove(path_, gone);
}

std::optional<PacketSocket> PacketListener::accept() {
  distckpt::Descriptor one(
      accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!one) return std::nullopt;
  return PacketSocket(std::move(one));
}

}  // namespace ferry::trainer
