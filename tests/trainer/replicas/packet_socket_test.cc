#include "trainer/replicas/packet_socket.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace packet_socket_test {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr milliseconds kLong(20000);

struct Pair {
  PacketSocket here, there;
};

Pair make_pair() {
  std::array<int, 2> ends{};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {PacketSocket(distckpt::Descriptor(ends[0])), PacketSocket(distckpt::Descriptor(ends[1]))};
}

// A packet socket, and the other end as it is.
struct RawPair {
  PacketSocket here;
  distckpt::Descriptor there;
};

RawPair make_raw_pair() {
  std::array<int, 2> ends{};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {PacketSocket(distckpt::Descriptor(ends[0])), distckpt::Descriptor(ends[1])};
}

void write_raw(const distckpt::Descriptor& to, std::string_view bytes) {
  ASSERT_EQ(write(to.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
}

std::string size_of(std::uint64_t size) {
  return {reinterpret_cast<const char*>(&size), sizeof(size)};
}

distckpt::Descriptor file_with(std::string_view text) {
  distckpt::Descriptor file(memfd_create("test", MFD_CLOEXEC));
  write_raw(file, text);
  return file;
}

std::string text_of(const distckpt::Descriptor& file) {
  std::array<char, 64> bytes{};
  const auto count = pread(file.get(), bytes.data(), bytes.size(), 0);
  return {bytes.data(), static_cast<std::size_t>(std::max<ssize_t>(count, 0))};
}

// Sends and receives until a packet of `to` is whole: it may be larger than what fits into the
// socket at a time.
json passed(PacketSocket& from, PacketSocket& to) {
  for (int i = 0; i < 100000; ++i) {
    if (auto packet = to.receive(milliseconds(0))) return *packet;
    (void)from.receive(milliseconds(0));  // sends on
  }
  ADD_FAILURE() << "no packet came";
  return {};
}

TEST(PacketSocket, BringsPacketsInTheirOrder) {
  auto [here, there] = make_pair();
  const json first{{"x", {1, -2.5, "\xff bytes"}},
                   {"inf", -std::numeric_limits<double>::infinity()}};
  here.send(first);
  here.send(json("second"));
  EXPECT_EQ(there.receive(kLong), first);
  EXPECT_EQ(there.receive(kLong), json("second"));
  EXPECT_EQ(there.receive(milliseconds(0)), std::nullopt);
  EXPECT_FALSE(there.is_closed());
}

TEST(PacketSocket, WaitsNoLongerThanItIsTold) {
  auto [here, there] = make_pair();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(there.receive(milliseconds(50)), std::nullopt);
  const auto took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took, milliseconds(49));
  EXPECT_LT(took, milliseconds(5000));
}

TEST(PacketSocket, BringsMoreThanTheSocketHolds) {
  auto [here, there] = make_pair();
  const json large(std::string(std::size_t{5} << 20, 'x'));
  here.send(large);
  here.send(json(7));
  EXPECT_EQ(passed(here, there), large);
  EXPECT_EQ(passed(here, there), json(7));
}

TEST(PacketSocket, WaitsForTheRestOfAPacket) {
  auto [here, there] = make_raw_pair();
  write_raw(there, size_of(3) + "\x82\x01");  // [1, 2] but for its end
  EXPECT_EQ(here.receive(milliseconds(1)), std::nullopt);
  write_raw(there, "\x02");
  EXPECT_EQ(here.receive(kLong), json({1, 2}));
}

TEST(PacketSocket, HasThePacketsOfOneThatHasGone) {
  auto [here, there] = make_pair();
  here.send(json(1));
  here.send(json(2));
  { const auto gone = std::move(here); }
  EXPECT_EQ(there.receive(kLong), json(1));
  EXPECT_EQ(there.receive(kLong), json(2));
  EXPECT_EQ(there.receive(kLong), std::nullopt);
  EXPECT_TRUE(there.is_closed());
  there.send(json(3));  // no signal ends the process
}

TEST(PacketSocket, NoticesAnEndInTheMidstOfAPacket) {
  auto [here, there] = make_raw_pair();
  write_raw(there, size_of(100) + "half");
  there = {};
  EXPECT_EQ(here.receive(kLong), std::nullopt);
  EXPECT_TRUE(here.is_closed());
}

TEST(PacketSocket, RefusesBytesThatAreNoPacket) {
  auto [here, there] = make_raw_pair();
  write_raw(there, size_of(2) + "\xff\xff");
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"a packet of 2 bytes is no CBOR"},
                             [&] { (void)here.receive(kLong); }));
}

TEST(PacketSocket, RefusesASizeThatNoPacketHas) {
  auto [here, there] = make_raw_pair();
  write_raw(there, "GET / HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(
      support::fails(ErrorKind::kCorrupt, {"a packet of"}, [&] { (void)here.receive(kLong); }));
}

TEST(PacketSocket, BringsFilesWithTheirPackets) {
  auto [here, there] = make_pair();
  here.send(json("none"));
  here.send(json("a"), file_with("of a"));
  here.send(json(std::string(std::size_t{1} << 20, 'b')), file_with("of b"));
  here.send(json("end"));
  EXPECT_EQ(passed(here, there), json("none"));
  EXPECT_EQ(passed(here, there), json("a"));
  EXPECT_EQ(text_of(there.take_file()), "of a");
  EXPECT_EQ(passed(here, there).get<std::string>().size(), std::size_t{1} << 20);
  EXPECT_EQ(text_of(there.take_file()), "of b");
  EXPECT_EQ(passed(here, there), json("end"));
  EXPECT_TRUE(
      support::fails(ErrorKind::kCorrupt, {"without its file"}, [&] { (void)there.take_file(); }));
}

TEST(PacketListener, TakesOneAfterTheOther) {
  const support::TempDir folder;
  const auto path = folder.path() / std::string(120, 'd') / "socket";  // longer than an address
  PacketListener listener(path);
  EXPECT_FALSE(listener.accept());
  auto first = PacketSocket::connect(path);
  auto second = PacketSocket::connect(path);
  first.send(json(1));
  second.send(json(2));
  EXPECT_EQ(listener.accept().value().receive(kLong), json(1));
  EXPECT_EQ(listener.accept().value().receive(kLong), json(2));
  EXPECT_FALSE(listener.accept());
}

TEST(PacketListener, IsForItsUserAloneAndGoesInTheEnd) {
  const support::TempDir folder;
  const auto path = folder.path() / "socket";
  {
    const PacketListener listener(path);
    EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms::owner_all);
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  errno = 0;
  EXPECT_TRUE(support::fails(ErrorKind::kIo, {"socket: connect: No such file"},
                             [&] { (void)PacketSocket::connect(path); }));
}

TEST(PacketListener, TakesThePlaceOfOneThatWasKilled) {
  const support::TempDir folder;
  const auto path = folder.path() / "socket";
  const PacketListener killed(path);
  PacketListener listener(path);
  auto one = PacketSocket::connect(path);
  EXPECT_TRUE(listener.accept());
}

TEST(PacketListener, RefusesANameThatIsTooLong) {
  const support::TempDir folder;
  EXPECT_TRUE(support::fails(ErrorKind::kIo, {"the name is too long"},
                             [&] { (void)PacketListener(folder.path() / std::string(100, 'x')); }));
}

}  // namespace packet_socket_test
}  // namespace ferry::trainer
